"""PyTorch operators (`torch.ops.fusedmoe.*`) that exchange tokens between ranks, eager, compiled or checkpointed.

    *tokens, row_N, code_N = deduplicate(layout, peers)               which tokens go to which rank
    send_PC, recv_QPC = exchange_metadata(counts_E, tokens_W, bad, *form[:4], route)
    x_RM, weight_N, order_N, *layout = dispatch(x_TM, weight_N, row_N, code_N, k, send_PC, recv_QPC, route)
    …                                                                 experts
    y_TM = combine(y_RM, send_PC, recv_QPC, len(x_TM), route)

`route` names the process groups: a `CollectiveRoute`, shared between layers, in a compiled graph, and a `BatchRoute`,
one batch after its metadata exchange, in eager mode. The number of received rows is known only at run time; fake
tensors have unbacked sizes, one for tokens and one for pairs. Each operator depends on the previous one, forward and
backward, so no compiler can reorder collectives. Compilers recompute only operators that they know, hence none of these
in backward.

Dispatch and combine are differentiable any number of times. Sent rows may end with padding, which is not sent; received
rows have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fusedmoe import handles
from fusedmoe.comm import exchange as comm_exchange
from fusedmoe.comm.all_to_all import AllToAll
from fusedmoe.comm.exchange import AgreedMetadata, Exchange, ExchangeSizes
from fusedmoe.comm.metadata import ExpertCalls, NonFiniteCount, RowForm, TokenCounts
from fusedmoe.comm.topology import Topology
from fusedmoe.hooks import Direction, HookContext, Hooks, transfer_with_hooks
from fusedmoe.kernels.deduplicate import deduplicate_tokens
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient
from fusedmoe.kernels.layout import Layout, LayoutTensors
from fusedmoe.runtime.recorder import Recorder, span

_new_number = count()

NONFINITE_INPUT = "the input or router logits are NaN or infinite. Check the layer's input and the gate's weights"


class CollectiveRoute:
    """The process groups and the all-to-all algorithm of a layer, registered under a name for compiled graphs.

    The name contains no rank, so all ranks compile the same graph, and layers over the same groups share it.
    """

    recorder: Recorder | None = None  # graphs record no spans

    def __init__(self, topology: Topology, all_to_all: AllToAll) -> None:
        self.topology, self.all_to_all = topology, all_to_all
        self.name = f"{all_to_all.identity}, {topology.esp.identity}"
        self._handle = handles.register(self.name, self)

    @property
    def is_open(self) -> bool:
        return self.topology.ep.is_open and self.topology.esp.is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveRoute:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CollectiveRoute, (self.topology, self.all_to_all)


class BatchRoute:
    """Process groups and row counts of one batch, registered under a name by which eager operators find them.

    The batch's autograd graph keeps it alive, so the layer may be freed before the backward pass. `hooks` and
    `recorder` receive the rows of dispatch and combine, and their spans, in both passes.
    """

    def __init__(
        self, topology: Topology, exchange: Exchange, hooks: Sequence[Hooks] = (), recorder: Recorder | None = None
    ) -> None:
        self.topology, self.exchange, self.hooks, self.recorder = topology, exchange, hooks, recorder
        self.is_sharded = topology.esp.size > 1
        self.has_peers = self.is_sharded or topology.ep.size > 1
        self.has_compared_backward = False
        self.name = f"batch {next(_new_number)}"
        self._handle = handles.register(self.name, self)


def _batch_route(name: str) -> BatchRoute | None:
    """Return the batch registered under this name; None for a `CollectiveRoute`."""
    found = handles.find(name)
    return found if isinstance(found, BatchRoute) else None


def rebuild_exchange(
    topology: Topology,
    all_to_all: AllToAll,
    send_PC: Tensor,
    recv_QPC: Tensor,
    device: torch.device,
    has_row_per_pair: bool,
    call: str,
    agreed: AgreedMetadata | None = None,
) -> Exchange:
    """Rebuild an exchange from the sizes (`ExchangeSizes`) that a graph stores and the values its ranks agreed on."""
    grid = topology.expert_grid
    ranks_QP = None if grid is None else grid[topology.edp.index].t().numpy()
    sizes = ExchangeSizes(send_PC.numpy(), recv_QPC.numpy())
    return Exchange(all_to_all, topology.esp, sizes, device, has_row_per_pair, call, ranks_QP, agreed=agreed)


class _OperatorExchange:
    """Collectives of one operator. An exception inside this context is reported to the other ranks.

    `send` sends rows to all shards of their experts; `return_results` returns the results to the tokens' ranks.
    """

    def __init__(
        self,
        route: str,
        operation: str,
        send_PC: Tensor,
        recv_QPC: Tensor,
        device: torch.device,
        has_row_per_pair: bool = False,
    ) -> None:
        batch = _batch_route(route)
        if batch is None:  # in a graph
            layers = handles.require(route, operation)
            with layers.topology.guard(f"fusedmoe::{operation}"):
                # A graph carries sizes only; the collectives are rebuilt in both passes.
                given = layers.all_to_all, send_PC, recv_QPC, device, has_row_per_pair
                exchange = rebuild_exchange(layers.topology, *given, "a layer's graph")
            batch = BatchRoute(layers.topology, exchange)
        backward = operation.endswith("_backward")
        # The backward pass starts with combine's gradient, or with dispatch's if the graph has no gradient of combine.
        if operation == "combine_backward" or (backward and not batch.has_compared_backward):
            batch.exchange.begin_backward()
        batch.has_compared_backward = operation == "combine_backward"
        self.operation, self.batch, self.exchange = operation, batch, batch.exchange
        self.phase: Direction = "backward" if backward else "forward"

    def __enter__(self) -> _OperatorExchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            # Ranks that wait in the same collective raise this error instead of timing out.
            self.batch.topology.stop(f"fusedmoe::{self.operation}", error)

    def send(self, x_TM: Tensor) -> Tensor:
        exchange, batch = self.exchange, self.batch
        if len(x_TM) > exchange.num_sent:
            x_TM = x_TM[: exchange.num_sent]  # padding is not sent
        dtype, wire = x_TM.dtype, exchange.algorithm.wire
        if wire is not None:
            x_TM = wire.encode(x_TM)
        if batch.hooks or batch.recorder is not None:
            with span(batch.recorder, "dispatch", kind="dispatch", resource="inter", phase=self.phase):
                rows = transfer_with_hooks(batch.hooks, "dispatch", exchange.dispatch, x_TM, HookContext(self.phase))
        else:
            rows = exchange.dispatch(x_TM)
        if batch.is_sharded:
            with span(batch.recorder, "all-gather", kind="all-gather", resource="intra", phase=self.phase):
                rows = exchange.all_gather(rows)
        if wire is not None:
            return wire.decode(rows, dtype)
        # An operator returns memory of its own.
        return rows if batch.has_peers else rows.clone()

    def return_results(self, rows_RM: Tensor, rows: int) -> Tensor:
        """Return the results of the rows that were sent, zero-padded to `rows` rows."""
        exchange, batch = self.exchange, self.batch
        move, wire = exchange.combine, exchange.algorithm.wire
        if wire is not None and wire.encodes_results:
            move = partial(wire.transfer, move)
        if batch.is_sharded:
            with span(batch.recorder, "reduce-scatter", kind="reduce-scatter", resource="intra", phase=self.phase):
                rows_RM = exchange.reduce_scatter(rows_RM)
        if batch.hooks or batch.recorder is not None:
            with span(batch.recorder, "combine", kind="combine", resource="inter", phase=self.phase):
                context = HookContext(self.phase)
                results = transfer_with_hooks(batch.hooks, "combine", move, rows_RM, context)
        else:
            results = move(rows_RM)
        if len(results) < rows:
            # Padding rows must not expose uninitialized memory.
            return torch.nn.functional.pad(results, (0, 0, 0, rows - len(results)))
        return results if batch.has_peers else results.clone()


@operator("deduplicate")
def deduplicate(layout: LayoutTensors, peers: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep each token once per destination rank.

    Returns the layout of the tokens to send (five tensors), then, for each sent (token, k) pair, its row in the layout
    sorted by expert and its packed expert assignment (`kernels/deduplicate.py`).
    """
    tokens, row_N, code_N, _ = deduplicate_tokens(Layout.of(layout), peers)
    assert tokens.source_N is not None and row_N is not None and code_N is not None
    return tokens.counts_E, tokens.offsets_E1, tokens.source_N, tokens.pair_N, tokens.row_SK, row_N, code_N


@register_fake(deduplicate)
def _(layout: LayoutTensors, peers: int) -> tuple[Tensor, ...]:
    of = Layout.of(layout)
    # An upper bound: each token is sent to a rank at most once, and only with a pair.
    rows = torch.sym_min(of.rows, of.tokens * peers)
    like, small = of.row_SK, torch.int16 if of.experts < 2**14 else torch.int32
    counts_W, offsets_W1 = like.new_empty(peers), like.new_empty(peers + 1, dtype=torch.int32)
    source_T, pair_T, row_SK = like.new_empty(rows), like.new_empty(rows), like.new_empty(like.shape)
    row_N = like.new_empty(of.rows)
    return counts_W, offsets_W1, source_T, pair_T, row_SK, row_N, row_N.to(small)


@operator("exchange_metadata")
def exchange_metadata(
    counts_E: Tensor,
    tokens_W: Tensor | None,
    bad: Tensor | None,
    dtype: torch.dtype,
    width: int,
    k: int,
    weights: torch.dtype | None,
    route: str,
) -> tuple[Tensor, Tensor]:
    """Exchange the counts of tokens and pairs. Return `ExchangeSizes.send_PC` and `recv_QPC`, on the host.

    Args:
        tokens_W: tokens of this rank per destination rank; None: one row per pair.
        bad: scalar, > 0 if the router logits or their inputs are not finite; all ranks then raise.
        dtype, width, k, weights: as in `RowForm`.
    Raises:
        RankError: on all ranks, if one rank refuses.
    """
    collective_route = handles.require(route, "exchange_metadata")
    with collective_route.topology.guard("fusedmoe::exchange_metadata"):
        refusal = None if bad is None else NonFiniteCount(bad, NONFINITE_INPUT)
        result = comm_exchange.exchange_metadata(
            collective_route.all_to_all,
            collective_route.topology.esp,
            counts_E,
            RowForm(dtype, width, k, weights),
            refusal,
            tokens=None if tokens_W is None else TokenCounts(tokens_W),
            expert_calls=ExpertCalls.MODULE,  # no plan follows
        )
    return torch.tensor(result.sizes.send_PC, device="cpu"), torch.tensor(result.sizes.recv_QPC, device="cpu")


@register_fake(exchange_metadata)
def _(counts_E: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, route = others
    topology = handles.require(route, "exchange_metadata").topology
    peers, shards = topology.ep.size, topology.esp.size
    send_PC = counts_E.new_empty((peers, counts_E.shape[0] // peers + 1), device="cpu")
    return send_PC, send_PC.new_empty((shards, *send_PC.shape))


@operator("dispatch")
def dispatch(
    x_TM: Tensor,
    weight_N: Tensor | None,
    row_N: Tensor | None,
    code_N: Tensor | None,
    k: int,
    send_PC: Tensor,
    recv_QPC: Tensor,
    route: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send tokens to the ranks of their experts.

    Args:
        x_TM: [T, M] tokens by destination rank.
        weight_N: [N] router weight of each row of the experts' layout, or None.
        row_N, code_N: from `deduplicate`; None: one row is sent per pair.
        k: maximum number of pairs per token.
    Returns:
        Received tokens [R, M]; the weight of each sorted row (empty without weights); the received pair of each sorted
        row; the five tensors of their `Layout`.
    """
    with _OperatorExchange(route, "dispatch", send_PC, recv_QPC, x_TM.device, code_N is None) as traffic:
        exchange = traffic.exchange
        x_RM = traffic.send(x_TM)
        received, weight_P = exchange.exchange_pairs(code_N, weight_N, row_N, k)
        layout, order_N = received.sort(exchange.num_rows, exchange.num_local_experts, k)
        sorted_N = x_TM.new_empty(0) if weight_P is None else weight_P[order_N]
        assert layout.source_N is not None
        numbers = layout.counts_E, layout.offsets_E1, layout.source_N, layout.pair_N, layout.row_SK
        return x_RM, sorted_N, order_N, *numbers


@register_fake(dispatch)
def _(x_TM: Tensor, weight_N: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    _, code_N, k, _, recv_QPC, _ = others
    tokens, experts = torch.library.get_ctx().new_dynamic_size(), recv_QPC.shape[2] - 1
    pairs = tokens if code_N is None else torch.library.get_ctx().new_dynamic_size()
    like = x_TM.new_empty(0, dtype=torch.long)
    return (
        x_TM.new_empty((tokens, x_TM.shape[1])),
        x_TM.new_empty(0) if weight_N is None else weight_N.new_empty(pairs),
        like.new_empty(pairs),
        like.new_empty(experts),
        like.new_empty(experts + 1, dtype=torch.int32),
        like.new_empty(pairs),
        like.new_empty(pairs),
        like.new_empty((tokens, k)),
    )


@operator("dispatch_backward")
def dispatch_backward(
    dx_RM: Tensor | None,
    dweight_N: Tensor | None,
    order_N: Tensor,
    row_N: Tensor | None,
    code_N: Tensor | None,
    k: int,
    send_PC: Tensor,
    recv_QPC: Tensor,
    tokens: int,
    rows: int,
    route: str,
) -> tuple[Tensor, Tensor]:
    """Return gradients of `tokens` tokens and of `rows` router weights; empty where the incoming gradient is None."""
    with _OperatorExchange(route, "dispatch_backward", send_PC, recv_QPC, order_N.device, row_N is None) as traffic:
        dx_TM = order_N.new_empty(0) if dx_RM is None else traffic.return_results(dx_RM.contiguous(), tokens)
        if dweight_N is None:
            return dx_TM, dx_TM.new_empty(0)
        dweight_P = torch.empty_like(dweight_N).index_copy_(0, order_N, dweight_N.contiguous())
        return dx_TM, traffic.exchange.return_weight_grads(dweight_P, row_N, rows).contiguous()


@register_fake(dispatch_backward)
def _(dx_RM: Tensor | None, dweight_N: Tensor | None, order_N: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, rows = others[5:7]
    dx_TM = order_N.new_empty(0) if dx_RM is None else dx_RM.new_empty((tokens, dx_RM.shape[1]))
    return dx_TM, dx_TM.new_empty(0) if dweight_N is None else dweight_N.new_empty(rows)


@operator("combine")
def combine(y_RM: Tensor, send_PC: Tensor, recv_QPC: Tensor, tokens: int, route: str) -> Tensor:
    with _OperatorExchange(route, "combine", send_PC, recv_QPC, y_RM.device) as traffic:
        return traffic.return_results(y_RM.contiguous(), tokens)


@register_fake(combine)
def _(y_RM: Tensor, send_PC: Tensor, recv_QPC: Tensor, tokens: int, route: str) -> Tensor:
    return y_RM.new_empty((tokens, y_RM.shape[1]))


@operator("combine_backward")
def combine_backward(dy_TM: Tensor, send_PC: Tensor, recv_QPC: Tensor, received: int, route: str) -> Tensor:
    """Send dy_TM to the ranks that computed the results, [T, M] -> [received, M]."""
    with _OperatorExchange(route, "combine_backward", send_PC, recv_QPC, dy_TM.device) as traffic:
        return traffic.send(dy_TM.contiguous())


@register_fake(combine_backward)
def _(dy_TM: Tensor, send_PC: Tensor, recv_QPC: Tensor, received: int, route: str) -> Tensor:
    return dy_TM.new_empty((received, dy_TM.shape[1]))


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TM, weight_N, row_N, code_N, ctx.k, send_PC, recv_QPC, ctx.route = inputs
    ctx.batch = _batch_route(ctx.route)
    ctx.tokens, ctx.rows = x_TM.shape[0], None if weight_N is None else weight_N.shape[0]
    exchange = None if ctx.batch is None else ctx.batch.exchange
    # Graphs do not store which gradients are unused on all ranks.
    ctx.needed = (True, True) if exchange is None else (exchange.tokens_require_grad, exchange.weights_require_grad)
    if not all(ctx.needed):
        ctx.mark_non_differentiable(*(rows for rows, needed in zip(output, ctx.needed, strict=False) if not needed))
        ctx.set_materialize_grads(False)  # no zeros for unused outputs
        ctx.shapes = x_TM.new_empty(()).expand(output[0].shape), output[1].new_empty(()).expand(output[1].shape)
    ctx.save_for_backward(output[2], row_N, code_N, send_PC, recv_QPC)


def _dispatch_gradient(ctx: Any, dx_RM: Tensor | None, dweight_N: Tensor | None, *_: Any) -> tuple[Any, ...]:
    order_N, row_N, code_N, *sizes = ctx.saved_tensors
    needs_x, needs_weight = ctx.needed[0], ctx.needed[1] and ctx.rows is not None
    if needs_x and dx_RM is None:
        dx_RM = torch.zeros_like(ctx.shapes[0])
    if needs_weight and dweight_N is None:
        dweight_N = torch.zeros_like(ctx.shapes[1])
    given = dx_RM if needs_x else None, dweight_N if needs_weight else None
    rows = ctx.rows if needs_weight else 0
    dx_TM, dweight = dispatch_backward(*given, order_N, row_N, code_N, ctx.k, *sizes, ctx.tokens, rows, ctx.route)
    return dx_TM if needs_x else None, dweight if needs_weight else None, None, None, None, None, None, None


def _save_dispatch_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dx_RM, dweight_N, _, row_N, code_N, ctx.k, send_PC, recv_QPC, ctx.tokens, _, ctx.route = inputs
    ctx.batch, ctx.has_grads = _batch_route(ctx.route), (dx_RM is not None, dweight_N is not None)
    ctx.save_for_backward(row_N, code_N, send_PC, recv_QPC)


def _dispatch_backward_gradient(ctx: Any, g_TM: Tensor, g_N: Tensor) -> tuple[Any, ...]:
    row_N, code_N, *sizes = ctx.saved_tensors
    tokens, weights = ctx.has_grads
    if not tokens:  # only weights have a gradient: send the narrowest tokens
        g_TM = g_N.new_zeros((ctx.tokens, 1))
    g_RM, g_weight, *_ = dispatch(g_TM, g_N if weights else None, row_N, code_N, ctx.k, *sizes, ctx.route)
    return g_RM if tokens else None, g_weight if weights else None, *(None,) * 9


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, send_PC, recv_QPC, _, ctx.route = inputs
    ctx.batch, ctx.rows = _batch_route(ctx.route), rows.shape[0]
    ctx.save_for_backward(send_PC, recv_QPC)


def _combine_gradient(ctx: Any, dy_TM: Tensor) -> tuple[Any, ...]:
    return combine_backward(dy_TM, *ctx.saved_tensors, ctx.rows, ctx.route), None, None, None, None


def _combine_backward_gradient(ctx: Any, g_RM: Tensor) -> tuple[Any, ...]:
    return combine(g_RM, *ctx.saved_tensors, ctx.rows, ctx.route), None, None, None, None


register_gradient(dispatch, _dispatch_gradient, _save_dispatch)
register_gradient(dispatch_backward, _dispatch_backward_gradient, _save_dispatch_backward)
register_gradient(combine, _combine_gradient, _save_combine)
register_gradient(combine_backward, _combine_backward_gradient, _save_combine)
