"""Dispatch and combine by collectives: all-to-alls over EP, all-gathers and reduce-scatters over ESP, in both passes.

A batch takes one of two paths, whose results agree to rounding: without a plan, by operators that compilers can capture
(`autograd/exchange_operators.py`); with a plan, in overlapping chunks (`engine/planned.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe import handles
from fusedmoe.autograd import exchange_operators
from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.exchange_operators import BatchRoute, CollectiveRoute
from fusedmoe.autograd.order import permute, row_weights, take_pairs, unpermute
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import Exchange, exchange_metadata
from fusedmoe.comm.metadata import ExpertCalls, NonFiniteCount, RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import (
    Dispatcher,
    ForwardDecision,
    Handle,
    LocalExperts,
    Routed,
    SharedExpert,
    call_module,
    has_saved_tensor_hooks,
    is_in_selective_checkpoint,
)
from fusedmoe.engine.module_hooks import call_reason, needs_module_call, with_call_reason
from fusedmoe.engine.planned import PlannedBatch, PlannedFunction
from fusedmoe.engine.recomputation import without_selective_checkpoint
from fusedmoe.engine.run import AssignedPlans, ReplicaTransport, Runner, reduce_in_backward
from fusedmoe.hooks import Hooks
from fusedmoe.kernels.deduplicate import SentTokens
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import active_recorder, part_span, span
from fusedmoe.schedule.task import COUNT_EXCHANGE

_handle_numbers = count()

# (tokens, exchange, function that returns the experts in chunks) -> plans; None: no plan. The function is None for
# experts that must be called as a module, which get assigned plans only.
FindPlans = Callable[[Tensor, Exchange, Callable[[], ChunkExperts] | None], "AssignedPlans | None"]


def find_no_plans(x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None) -> None:
    """Return None: every batch runs without a plan."""


class CountedBatch(NamedTuple):
    """A batch after the metadata exchange.

    Attributes:
        x_SM, weight_N: tokens, and router weights of the rows sorted by expert. They require gradients if any rank's
            do.
    """

    x_SM: Tensor
    weight_N: Tensor | None
    sent_tokens: SentTokens
    exchange: Exchange


class _DispatchState(NamedTuple):
    tokens: Layout
    send_PC: Tensor
    recv_QPC: Tensor
    route: CollectiveRoute | BatchRoute


@dataclass(eq=False)
class Collectives(Dispatcher):
    """Dispatches by all-to-alls over EP and all-gathers over ESP; combines by reduce-scatters and all-to-alls.

    Attributes:
        choose_algorithm: called with the first batch, returns the all-to-all algorithm of all batches, the same on
            every rank; None: `all_to_all`.
        graph_module: experts that compiled operators call under autograd; None for `GroupedExperts`, whose weights are
            arguments of the operators.
        handle_number: int64 scalar on the host, the key by which compiled operators find this dispatcher.
    """

    compiles = follows_plans = True

    topology: Topology
    all_to_all: AllToAll
    find_plans: FindPlans = find_no_plans
    hooks: Sequence[Hooks] = ()
    name: str = "MoELayer"
    graph_module: nn.Module | None = None
    choose_algorithm: Callable[[Tensor], AllToAll] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.route = CollectiveRoute(self.topology, self.all_to_all)
        self.runner = Runner(self.topology, self.name, self.hooks)
        self._call_reason = ForwardDecision[str]()
        # Ranks compare it in each exchange: a rank that skipped a layer is reported before any rows are sent.
        self._call = f"{self.name} {self.topology.next_layer_number()}"
        self._register_handle()

    def _register_handle(self) -> None:
        # A graph input, like a parameter, so that one graph serves all layers.
        number = next(_handle_numbers)
        self.handle_number = torch.tensor(number, device="cpu")
        self._handle = handles.register(f"dispatcher {number}", self)

    @property
    def collectives(self) -> Collectives:
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._register_handle()

    def exchange_metadata(
        self, routed: Routed, calls: ExpertCalls, by_node: bool = True, weight_N: Tensor | None = None
    ) -> CountedBatch:
        """Exchange the counts of this batch's tokens and pairs between the ranks; set `sent_counts`. Collective.

        Args:
            calls: how this rank can call its experts.
            by_node: two-level algorithms may forward tokens inside nodes.
            weight_N: router weights of the layout's rows, if `routed.weight_SK` is None.
        """
        if self.choose_algorithm is not None:
            self.all_to_all = self.choose_algorithm(routed.x_SM)
            self.route, self.choose_algorithm = CollectiveRoute(self.topology, self.all_to_all), None
        x_SM, layout, weight_SK, refusal, _ = routed
        # Hooks may change rows to a format that intermediate ranks cannot sum.
        sent, tokens = self.all_to_all.select_tokens(layout, by_node and not self.hooks)
        weights = weight_N if weight_SK is None else weight_SK
        form = RowForm(x_SM.dtype, x_SM.shape[1], layout.row_SK.shape[1], None if weights is None else weights.dtype)
        grad = torch.is_grad_enabled()
        exchange = self.exchange_counts(
            layout.counts_E,
            form,
            refusal,
            tokens=tokens,
            expert_calls=calls,
            tokens_require_grad=grad and x_SM.requires_grad,
            weights_require_grad=grad and weight_SK is not None and weight_SK.requires_grad,
        )
        # Padding is not sent. The host knows its amount now.
        pairs = exchange.pair_exchange.num_sent
        self.sent_counts = pairs, exchange.num_sent
        weight_N = weight_N if weight_SK is None else take_pairs(weight_SK, layout.cut(pairs))
        return CountedBatch(
            *exchange.match_requires_grad(x_SM, weight_N), sent.exact(exchange.num_sent, pairs), exchange
        )

    def exchange_counts(
        self, counts_E: Tensor, form: RowForm, refusal: str | NonFiniteCount | None, **options: Any
    ) -> Exchange:
        """Call `comm.exchange.exchange_metadata` over this dispatcher's ranks. Collective."""
        why = self._call_reason.value
        with (
            nullcontext() if why is None else with_call_reason(why),
            span(active_recorder(), "exchange of counts", kind=COUNT_EXCHANGE, resource="inter", phase="forward"),
        ):
            ranks = self.all_to_all, self.topology.esp
            return exchange_metadata(*ranks, counts_E, form, refusal, call=self._call, **options)

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return self._dispatch(self.exchange_metadata(routed, ExpertCalls.MODULE))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        check_rows("combine", "the experts' result", out_RM, len(handle.layout.row_SK))
        return self.combine_by_operators(out_RM, handle)

    def _dispatch(self, counted: CountedBatch) -> tuple[Tensor, Handle]:
        x_SM, weight_N, sent, exchange = counted
        route = BatchRoute(self.topology, exchange, self.hooks, active_recorder())
        with part_span("permute"):
            x_TM = permute(x_SM, sent.tokens)
        sizes = torch.from_numpy(exchange.sizes.send_PC), torch.from_numpy(exchange.sizes.recv_QPC)
        x_RM, handle = self.send_by_operators(x_TM, weight_N, sent, sizes, route)
        return x_RM, handle._replace(counts_RE=exchange.counts_RE)

    def send_by_operators(
        self,
        x_TM: Tensor,
        weight_N: Tensor | None,
        sent: SentTokens,
        sizes: tuple[Tensor, Tensor],
        route: CollectiveRoute | BatchRoute,
    ) -> tuple[Tensor, Handle]:
        """Send [T, M] tokens and the router weights of the sorted rows. Collective.

        `sizes`: sizes to send and to receive, from the metadata exchange.
        """
        result = exchange_operators.dispatch(x_TM, weight_N, sent.row_N, sent.code_N, sent.k, *sizes, route.name)
        x_RM, weight_R, _, *layout = result
        state = _DispatchState(sent.tokens, *sizes, route)
        return x_RM, Handle(Layout.of(layout), None if weight_N is None else weight_R, state=state)

    def dispatch_by_operators(
        self, x_SM: Tensor, weight_N: Tensor | None, layout: Layout, bad: Tensor | None = None
    ) -> tuple[Tensor, Handle]:
        """Send [S, M] tokens and the router weights of the sorted rows by operators, metadata included. Collective.

        `bad`: scalar count of non-finite values; all ranks raise if it is not 0 on any.
        """
        sent, sizes = self.metadata_by_operators(Routed(x_SM, layout, weight_N), bad)
        return self.send_by_operators(permute(x_SM, sent.tokens), weight_N, sent, sizes, self.route)

    def metadata_by_operators(self, routed: Routed, bad: Tensor | None) -> tuple[SentTokens, tuple[Tensor, Tensor]]:
        """Exchange counts with the other ranks by operators, which graphs can capture. Collective.

        Args:
            bad: scalar, > 0 if router logits or their inputs are not finite: all ranks then raise; None: not checked.
        Returns:
            The tokens to send, and the counts sent and received (`ExchangeSizes.send_PC` and `recv_QPC`).
        """
        x_SM, layout, weights, *_ = routed
        form, sent, tokens_W = RowForm.of(x_SM, layout, weights), SentTokens(layout), None
        if layout.source_N is not None:
            *tokens, row_N, code_N = exchange_operators.deduplicate(layout.tensors, self.topology.ep.size)
            sent, tokens_W = SentTokens(Layout.of(tokens), row_N, code_N, layout.k), tokens[0]
        return sent, exchange_operators.exchange_metadata(layout.counts_E, tokens_W, bad, *form[:4], self.route.name)

    def combine_by_operators(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """Return [S, M], the sum of each token's results in rank order."""
        tokens, send_PC, recv_QPC, route = handle.state
        y_TM = exchange_operators.combine(out_RM, send_PC, recv_QPC, len(tokens.pair_N), route.name)
        with part_span("unpermute"):
            return unpermute(y_TM, tokens)

    def run_by_operators(
        self, routed: Routed, experts: Callable[[Tensor, Layout, Tensor | None], Tensor], bad: Tensor | None = None
    ) -> Tensor:
        """Run metadata exchange, dispatch, experts and combine as operators, which a graph can capture. Collective.

        `bad`: as in `dispatch_by_operators`.
        """
        weight_N = row_weights(routed.weight_SK, routed.layout)
        x_RM, handle = self.dispatch_by_operators(routed.x_SM, weight_N, routed.layout, bad)
        return self.combine_by_operators(experts(x_RM, handle.layout, handle.weight_N), handle)

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        calls = self.find_expert_calls(experts)
        if not is_in_selective_checkpoint():
            return self.send_through_experts(self.exchange_metadata(routed, calls), experts, shared=routed.shared)
        if not isinstance(routed.refusal, str) and not self.hooks:
            # A selective checkpoint caches results of operators: the metadata exchange must be one.
            self.sent_counts = None
            return self.run_by_operators(routed, experts, None if routed.refusal is None else routed.refusal.number)
        with without_selective_checkpoint():
            return self.send_through_experts(self.exchange_metadata(routed, calls), experts)

    def find_expert_calls(self, experts: Any) -> ExpertCalls:
        """Return `MODULE` if the experts must be called as a module (`needs_module_call`), else `EITHER`."""
        why = self._call_reason.decide(lambda: call_reason(experts) if needs_module_call(experts) else None)
        return ExpertCalls.EITHER if why is None else ExpertCalls.MODULE

    def send_through_experts(
        self,
        counted: CountedBatch,
        experts: LocalExperts,
        replicas: ReplicaTransport | None = None,
        shared: SharedExpert | None = None,
    ) -> Tensor:
        """Send a batch through the experts, some of which may be `replicas`. Collective.

        A plan also computes the `shared` expert, unless it must be called as a module.
        """
        x_SM, weight_N, sent, exchange = counted
        in_chunks = cache(partial(self.in_chunks, experts, x_SM))  # parametrisations are evaluated once
        assigned = self.find_plans(x_SM, exchange, None if exchange.needs_module_calls else in_chunks)
        chunk_experts = None if assigned is None or exchange.needs_module_calls else in_chunks()
        if chunk_experts is not None and not self.can_chunk(chunk_experts):
            chunk_experts = None
        if assigned is None or chunk_experts is None:
            rows_RM, handle = self._dispatch(counted)
            if replicas is not None:
                replicas.wait_for_replicas()
            y_SM = self.combine(call_module(experts, rows_RM, handle), handle)
            return y_SM if assigned is None else reduce_in_backward(y_SM, assigned)
        if not chunk_experts.can_rechunk:
            assigned.plans.require_one_degree()
        chunk_experts.tokens_require_grad = exchange.tokens_require_grad
        chunk_experts.weights_require_grad = exchange.weights_require_grad
        run = self.runner.start(assigned, x_SM.device, active_recorder(), replicas)
        shared_experts = None
        # Without a backward of the routed rows, a trained shared expert must not start one: other ranks may have none.
        has_backward = any(one is not None and one.requires_grad for one in (x_SM, weight_N, *chunk_experts.parameters))
        # Buckets of a plan contain the shared expert's gradients, which would come too late from its own backward.
        if shared is not None and assigned.gradients is None and (has_backward or not torch.is_grad_enabled()):
            shared_experts = self._shared_in_chunks(shared)
        batch = PlannedBatch(sent, exchange, chunk_experts, run, shared_experts)
        if shared is None or shared_experts is None:
            return PlannedFunction.apply(x_SM, weight_N, batch, None, *chunk_experts.parameters)
        parameters = *chunk_experts.parameters, *shared_experts.parameters
        y_SM, shared.result = PlannedFunction.apply(x_SM, weight_N, batch, shared.x_SM, *parameters)
        return y_SM

    def _shared_in_chunks(self, shared: SharedExpert) -> ChunkExperts | None:
        """Return the shared expert for a plan; None if it must be called after the plan."""
        if needs_module_call(shared.module):
            return None
        experts = shared.module.in_chunks(shared.x_SM)
        experts.tokens_require_grad = torch.is_grad_enabled() and shared.x_SM.requires_grad
        return experts if self.can_chunk(experts) else None

    def in_chunks(self, experts: LocalExperts, x_SM: Tensor) -> ChunkExperts:
        return experts.in_chunks(x_SM)

    def can_chunk(self, experts: ChunkExperts) -> bool:
        # An activation checkpoint would recompute the whole call from the middle of each chunk's backward.
        return experts.can_rechunk or not has_saved_tensor_hooks()
