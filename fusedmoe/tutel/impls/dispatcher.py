"""Dispatcher of a Tutel layer, based on fusedmoe's dispatchers, and its local experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedmoe import Schedule, Topology
from fusedmoe.autograd import experts as fused_experts
from fusedmoe.autograd.experts import cast_down
from fusedmoe.autograd.order import order, permute, take_pairs, unpermute
from fusedmoe.comm import RowForm, make_all_to_all
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives, find_no_plans
from fusedmoe.engine.dispatcher import Local, Routed
from fusedmoe.engine.module_hooks import needs_module_call
from fusedmoe.engine.run import AssignedPlans, Plans
from fusedmoe.kernels import Layout, Weights
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.measure import measurement_context
from fusedmoe.layers.schedule import require_same_plans
from fusedmoe.runtime.cache import measured_costs
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule import Workload
from fusedmoe.tutel.impls.fast_dispatch import Choice, scaled

Degree = int | Literal["auto"]
# Maps a block of C rows per local expert, [e, C, D] -> [e, C, D_out]; takes `LocalExperts.joined` as `joined`.
Blocks = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """Experts of a rank, e = `count`.

    Attributes:
        fused: parameters and activation for fusedmoe's kernels. None: use `blocks`, with zeros in unused rows.
        module: the experts module; its optional method `workload(rows, itemsize, ep, esp)` describes a pass.
        joined: weights gathered from other ranks before the call; None if `blocks` needs none.
    """

    count: int
    fused: tuple[Weights, str] | None
    blocks: Blocks
    module: nn.Module
    joined: tuple[Any, ...] | None = None

    @property
    def workload(self) -> Callable[[int, int, int, int], Workload] | None:
        return getattr(self.module, "workload", None)

    @property
    def reads_parameters_once(self) -> bool:
        return self.fused is not None

    def modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules()

    def __call__(
        self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None, slots: int = 0, counts_RE: Tensor | None = None
    ) -> Tensor:
        """Run the experts on the tokens' rows; return each token's weighted sum of results.

        Args:
            slots: minimum number of rows per source rank in a block.
            counts_RE: rows per source rank and expert; None for one source.
        """
        if self.fused is not None:
            return fused_experts(x_SM, layout, weight_N, *self.fused)
        layout = layout.exact()
        rows_NM = permute(x_SM, layout)
        counts_ER = layout.counts_E[:, None] if counts_RE is None else counts_RE.t()
        slots = max(slots, int(counts_ER.max()))
        # Custom experts may rely on Tutel's block: `slots` rows per source rank, in rank order.
        length = slots * counts_ER.shape[1]
        counts_G = counts_ER.reshape(-1)
        # Offset in the block of row n, the i-th row of its source and expert.
        shift_G = torch.arange(len(counts_G), device=counts_G.device) * slots - (counts_G.cumsum(0) - counts_G)
        place_N = shift_G.repeat_interleave(counts_G, output_size=layout.rows)
        place_N = place_N + torch.arange(layout.rows, device=place_N.device)
        blank = rows_NM.new_zeros(self.count * length, rows_NM.shape[1])
        block = blank.index_copy(0, place_N, rows_NM).view(self.count, length, rows_NM.shape[1])
        out_NM = self.blocks(block, joined=self.joined).flatten(0, 1).index_select(0, place_N)
        if weight_N is not None:
            out_NM = scaled(out_NM, weight_N[: layout.rows])
        return unpermute(out_NM, layout)

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if self.fused is not None:
            return GroupedExperts(*self.fused)
        own = tuple(self.module.parameters())
        if self.joined is None:
            return AutogradExperts(self, own, self.module)
        # Gradients of joined weights are communicated once, after the last chunk.
        leaves = tuple(_leaf(value) for value in self.joined)
        pairs = [pair for pair in zip(self.joined, leaves, strict=True) if isinstance(pair[0], Tensor)]
        joined_tensors, leaf_tensors = zip(*pairs, strict=True)
        experts = replace(self, joined=leaves)
        return AutogradExperts(experts, (*joined_tensors, *own), self.module, (*leaf_tensors, *own))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class LayerDispatcher:
    """Sends rows to the experts of a topology and returns their results.

    Args:
        topology: its ep axis has the ranks of different experts, its esp axis the parts of an expert's work.
        dispatch: all-to-all algorithm, "direct" or "2dh".
        replicas: number of ep ranks that compute the same expert; its rows are distributed over them round-robin.
        peers: ranks that make the same call although no rows are exchanged between them.
        wire: format of the rows, as for `fusedmoe.Schedule`.
    """

    def __init__(
        self,
        topology: Topology,
        dispatch: str = "direct",
        replicas: int = 1,
        peers: Topology | None = None,
        wire: str | None = None,
    ) -> None:
        self.topology, self.replicas = topology, replicas
        self.checks, self._peers = InputChecks(topology, "moe_layer"), None
        if peers is not None and peers.size > 1:
            self._peers = Collectives(peers, make_all_to_all("direct", peers), name="moe_layer")
        all_to_all = make_all_to_all(dispatch, topology, find_wire_format(wire))
        self._wire = all_to_all.wire
        self._collectives = Collectives(topology, all_to_all, name="moe_layer")
        # Gloo uses threads, not streams.
        if topology.ep.handle is None or torch.distributed.get_backend(topology.ep.handle) != "nccl":
            self._collectives.runner.streams = None
        self._plans: dict[tuple[Any, ...], Plans] = {}

    def exchange_values_error(self, x_SM: Tensor, weight_SK: Tensor) -> str | None:
        """Return this rank's error message for non-finite values or None, for `through_experts` to raise on all ranks.

        On CUDA a later call reports the error.
        """
        refusal = self.checks.find_values_error(x_SM, weight_SK)
        if self._peers is not None and not x_SM.is_cuda:
            # Peers exchange no rows, but an empty exchange, which carries the error.
            nothing_E = torch.zeros(self._peers.topology.ep.size, dtype=torch.long, device="cpu")
            form = RowForm(x_SM.dtype, x_SM.shape[1], weight_SK.shape[1], weight_SK.dtype)
            self._peers.exchange_counts(nothing_E, form, refusal)
        return refusal

    def through_experts(
        self,
        x_SM: Tensor,
        choice: Choice,
        weight_SK: Tensor,
        capacity: int,
        experts: LocalExperts,
        *,
        postscore: bool,
        degree: Degree,
        slots: int,
        keep_local: bool = False,
        refusal: str | None = None,
    ) -> Tensor:
        """Return y_SM, the weighted sum over each token's experts with free capacity; zeros if there is none.

        Args:
            weight_SK: weights of the results, or of the inputs without `postscore`.
            capacity: rows per expert accepted from this rank.
            degree: number of overlapped chunks; "auto" selects it. Results do not depend on it.
            slots: minimum number of rows per source rank in a block.
            keep_local: send no rows, to time the remaining work: local experts substitute for all experts.
            refusal: result of `exchange_values_error`.
        """
        is_remote = not keep_local and self.topology.ep.size * self.topology.esp.size > 1
        if not is_remote:
            self.checks.refuse(refusal)
        layout = order(choice.expert_SK, choice.experts, capacity, choice.priority_S)
        if keep_local:
            layout = self._reassign_experts(layout, choice, lambda expert, _: expert % experts.count, experts.count)
        elif self.replicas > 1:
            # Ranks that compute the same expert receive equal numbers of its rows.
            share = self.replicas
            layout = self._reassign_experts(layout, choice, lambda e, n: e * share + n % share, choice.experts * share)
        # Experts in blocks receive first choices first, as in Tutel: send one row per (token, expert) pair. The results
        # are sent unweighted: weighting half precision before sending would round differently from Tutel.
        in_blocks = experts.fused is None and is_remote
        if postscore and not in_blocks:
            return self._run(Routed(x_SM, layout, weight_SK, refusal), experts, degree, slots, is_remote)
        layout = layout.exact()
        rows_NM, weight_N = permute(x_SM, layout), take_pairs(weight_SK, layout)
        if not postscore:
            rows_NM = scaled(rows_NM, weight_N).to(x_SM.dtype)
        contiguous = contiguous_layout(layout.counts_E, layout.rows)
        out_NM = self._run(Routed(rows_NM, contiguous, None, refusal), experts, degree, slots, is_remote)
        return unpermute(scaled(out_NM, weight_N) if postscore else out_NM, layout)

    def _run(self, routed: Routed, experts: LocalExperts, degree: Degree, slots: int, is_remote: bool) -> Tensor:
        overlaps = experts.workload is not None if degree == "auto" else degree > 1
        overlaps = overlaps and not needs_module_call(experts)
        if is_remote and (overlaps or experts.fused is not None):
            plans = partial(self._plans_for, degree, experts.workload)
            self._collectives.find_plans = plans if overlaps else find_no_plans
            return self._collectives.through_experts(routed, experts)
        dispatcher = self._collectives if is_remote else Local()
        rows_RM, handle = dispatcher.dispatch(routed)
        out_RM = experts(rows_RM, handle.layout, handle.weight_N, slots, handle.counts_RE)
        return dispatcher.combine(cast_down(out_RM, rows_RM) if is_remote else out_RM, handle)

    def _reassign_experts(
        self, layout: Layout, choice: Choice, number: Callable[[Tensor, Tensor], Tensor], experts: int
    ) -> Layout:
        """Return a layout in which the expert of each kept pair is `number(expert, index at that expert)`."""
        place_SK = layout.row_SK - layout.offsets_E1.long()[choice.expert_SK]
        dealt_SK = torch.where(layout.row_SK < 0, -1, number(choice.expert_SK, place_SK))
        return order(dealt_SK, experts, None, choice.priority_S)

    def _plans_for(
        self,
        degree: Degree,
        find: Callable[..., Workload] | None,
        x_SM: Tensor,
        exchange: Exchange,
        in_chunks: Callable[[], ChunkExperts] | None,
    ) -> AssignedPlans | None:
        """Return plans for the largest number of rows that any rank sends; collective for new arguments."""
        if in_chunks is None:
            return None
        topology = self.topology
        workload = costs = None
        if degree == "auto":
            assert find is not None
            rows = 1 << (exchange.max_pairs - 1).bit_length() if exchange.max_pairs else 1
            workload = find(rows, x_SM.dtype.itemsize, topology.ep.size, topology.esp.size).sending(
                exchange.tokens_per_pair
            )
            if self._wire is not None:
                workload = workload.encoded(*self._wire.element_bytes(x_SM.shape[1]))
        can_rechunk = in_chunks().can_rechunk
        key = (degree, workload, can_rechunk)
        if key not in self._plans:
            # Hides measurements from autograd's hooks and modes.
            with measurement_context():
                if degree == "auto":
                    schedule = Schedule.named("auto")
                    costs = measured_costs(topology, x_SM.device, x_SM.dtype)
                else:
                    schedule = Schedule("tutel", degrees=(degree, degree))
                assert schedule is not None
                kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "itself")
                plans = schedule.plans(kinds, workload, costs, can_rechunk=can_rechunk)
                require_same_plans(topology, plans)
            self._plans[key] = plans
        return AssignedPlans(self._plans[key])
