"""A layer's dispatcher, by the library's own, and the experts of a rank as it calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedmoe import Schedule, Topology
from fusedmoe.autograd import experts as fused_experts
from fusedmoe.autograd import order, permute, take_pairs, unpermute
from fusedmoe.autograd.experts import no_wider
from fusedmoe.comm import Exchange, RowForm, make_all_to_all
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives, no_plans
from fusedmoe.engine.dispatcher import Local, Routed
from fusedmoe.engine.module_hooks import must_be_called
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.kernels import Layout, Weights, contiguous_layout
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.measure import measured_costs, undisturbed
from fusedmoe.layers.schedule import require_same_plans
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule import Workload
from fusedmoe.tutel.impls.fast_dispatch import Choice, scaled

Degree = int | Literal["auto"]
# Rows of every local expert as a block, [e, C, D] -> [e, C, D_out]; `joined` is `LocalExperts.joined`.
Blocks = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The experts of a rank, e = `count`.

    Attributes:
        fused: parameters and activation for the library's own operation; None: the experts are `blocks`, any function
            of [e, C, D] with rows of zeros where an expert has fewer.
        module: the experts. Its method `workload(rows, itemsize, ep, esp)` describes a pass, where it has one.
        joined: tensors, and other values, gathered from other ranks before the call; None: `blocks` needs none.
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
    def reads_once(self) -> bool:
        return self.fused is not None

    def modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules()

    def __call__(
        self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None, places: int = 0, counts_RE: Tensor | None = None
    ) -> Tensor:
        """Returns the sum of each row's weighted results, over its sorted copies.

        `places`: in a block, at least, for the rows of each source. `counts_RE`: these rows; None for one source.
        """
        if self.fused is not None:
            return fused_experts(x_SM, layout, weight_N, *self.fused)
        layout = layout.exact()
        rows_NM = permute(x_SM, layout)
        counts_ER = layout.counts_E[:, None] if counts_RE is None else counts_RE.t()
        places = max(places, int(counts_ER.max()))
        # A block of Tutel's has `places` rows for each source rank, in rank order; custom experts may rely on it.
        length = places * counts_ER.shape[1]
        counts_G = counts_ER.reshape(-1)
        # Row n is the i-th of its source and expert: its place is theirs and i.
        shift_G = torch.arange(len(counts_G), device=counts_G.device) * places - (counts_G.cumsum(0) - counts_G)
        place_N = shift_G.repeat_interleave(counts_G, output_size=layout.rows)
        place_N = place_N + torch.arange(layout.rows, device=place_N.device)
        # Places without a row are zeros, as Tutel pads them.
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
        # The graph of a chunk ends at leaves: gradients of joined weights go to other ranks once, after the last chunk.
        leaves = tuple(_leaf(value) for value in self.joined)
        pairs = [pair for pair in zip(self.joined, leaves, strict=True) if isinstance(pair[0], Tensor)]
        joined_tensors, leaf_tensors = zip(*pairs, strict=True)
        experts = replace(self, joined=leaves)
        return AutogradExperts(experts, (*joined_tensors, *own), self.module, (*leaf_tensors, *own))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


class LayerDispatcher:
    """Sends rows to the experts of a topology, and results back.

    Args:
        topology: ep counts experts' ranks, esp the parts of an expert's work.
        dispatch: "direct" or "2dh".
        copies: how many ranks of ep compute the same expert; its rows are dealt out to them in turn.
        beside: ranks that call this together though no rows travel between them.
    """

    def __init__(
        self, topology: Topology, dispatch: str = "direct", copies: int = 1, beside: Topology | None = None
    ) -> None:
        self.topology, self.copies = topology, copies
        self.checks, self._beside = InputChecks(topology, "moe_layer"), None
        if beside is not None and beside.size > 1:
            self._beside = Collectives(beside, make_all_to_all("direct", beside), name="moe_layer")
        # One dispatcher serves all calls: its exchanges are numbered, and ranks compare the numbers.
        self._collectives = Collectives(topology, make_all_to_all(dispatch, topology), name="moe_layer")
        # Streams overlap NCCL's kernels with ours; Gloo's threads need none.
        if topology.ep.handle is None or torch.distributed.get_backend(topology.ep.handle) != "nccl":
            self._collectives.streams = None
        self._plans: dict[tuple[Any, ...], Plans] = {}

    def agreed_refusal(self, x_SM: Tensor, weight_SK: Tensor) -> str | None:
        """Says what is wrong with the numbers of this rank, if anything; `through_experts` then ends all ranks."""
        refusal = self.checks.of_numbers(x_SM, weight_SK)
        # On CUDA, where the host would have to wait to know, a later call tells.
        if self._beside is not None and not x_SM.is_cuda:
            # No rows travel that would tell: an exchange of none carries the refusal, and ends all ranks alike.
            nothing_E = torch.zeros(self._beside.topology.ep.size, dtype=torch.long, device="cpu")
            form = RowForm(x_SM.dtype, x_SM.shape[1], weight_SK.shape[1], weight_SK.dtype)
            self._beside.exchange(nothing_E, form, refusal)
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
        places: int,
        stay: bool = False,
        refusal: str | None = None,
    ) -> Tensor:
        """Returns y_SM, for each token the weighted sum over its experts that had room for it; zeros where none had.

        Args:
            weight_SK: multiplies results, or without `postscore` what experts are given.
            capacity: rows that an expert accepts of this rank.
            degree: chunks that overlap with each other; "auto" has the library choose. Results do not depend on it.
            places: as for `LocalExperts`.
            stay: rows stay on this rank; for timing what remains.
            refusal: why this rank cannot take part, if so.
        """
        if not self._crosses(stay):
            self.checks.refuse(refusal)
        # Drops are decided here, on the sender, by expert and capacity; what follows sends what is left.
        layout = order(choice.expert_SK, choice.experts, capacity, choice.priority_S)
        if stay:
            # SKIP_A2A: this rank's experts stand for those of all ranks, so that the work is about the same.
            layout = self._dealt(layout, choice, lambda expert, _: expert % experts.count, experts.count)
        elif self.copies > 1:
            # Ranks that share an expert's tokens take its rows in turn, so each gets as many as the others.
            share = self.copies
            layout = self._dealt(layout, choice, lambda e, n: e * share + n % share, choice.experts * share)
        # Results in half precision travel as they are: weighted they would be in float32, or rounded where Tutel's are
        # not.
        weighted_here = experts.fused is None and x_SM.dtype.itemsize < 4 and self._crosses(stay)
        # Experts of another kind see blocks of rows in Tutel's order, first choices before second ones: so a row
        # travels for each pair.
        in_blocks = experts.fused is None and self._crosses(stay)
        if postscore and not weighted_here and not in_blocks:
            return self._through(Routed(x_SM, layout, weight_SK, refusal), experts, degree, places, stay)
        layout = layout.exact()
        # Rows are sorted here, and travel as tokens of their own with the layout that leaves them as they are.
        rows_NM, weight_N = permute(x_SM, layout), take_pairs(weight_SK, layout)
        if not postscore:
            rows_NM = scaled(rows_NM, weight_N).to(x_SM.dtype)
        contiguous = contiguous_layout(layout.counts_E, layout.rows)
        out_NM = self._through(Routed(rows_NM, contiguous, None, refusal), experts, degree, places, stay)
        return unpermute(scaled(out_NM, weight_N) if postscore else out_NM, layout)

    def _crosses(self, stay: bool) -> bool:
        """Returns whether rows travel to other ranks."""
        return not stay and self.topology.ep.size * self.topology.esp.size > 1

    def _through(self, routed: Routed, experts: LocalExperts, degree: Degree, places: int, stay: bool) -> Tensor:
        crosses = self._crosses(stay)
        overlaps = experts.workload is not None if degree == "auto" else degree > 1
        overlaps = overlaps and not must_be_called(experts)
        if crosses and (overlaps or experts.fused is not None):
            plans = partial(self._plans_for, degree, experts.workload)
            self._collectives.plans = plans if overlaps else no_plans
            return self._collectives.through_experts(routed, experts)
        # Experts that are called as a module, once for all rows: autograd sees all that they do.
        dispatcher = self._collectives if crosses else Local()
        rows_RM, handle = dispatcher.dispatch(routed)
        out_RM = experts(rows_RM, handle.layout, handle.weight_N, places, handle.counts_RE)
        return dispatcher.combine(no_wider(out_RM, rows_RM) if crosses else out_RM, handle)

    def _dealt(
        self, layout: Layout, choice: Choice, number: Callable[[Tensor, Tensor], Tensor], experts: int
    ) -> Layout:
        """Sorts the pairs that were not dropped by other expert numbers: `number(expert, place in it)`."""
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
    ) -> Assigned | None:
        """Returns plans for as many rows as the rank sends that sends the most. The first call of a kind is
        collective."""
        if in_chunks is None:
            return None
        topology = self.topology
        workload = costs = None
        if degree == "auto":
            assert find is not None
            # Rounded up to a power of two, so that few sizes are planned.
            rows = 1 << (exchange.most_pairs - 1).bit_length() if exchange.most_pairs else 1
            workload = find(rows, x_SM.dtype.itemsize, topology.ep.size, topology.esp.size).sending(exchange.share)
        any_degree = in_chunks().any_degree
        key = (degree, workload, any_degree)
        if key not in self._plans:
            # Planning may measure, in the midst of a forward pass: autograd's hooks and modes must not see it.
            with undisturbed():
                if degree == "auto":
                    schedule = Schedule.named("auto")
                    costs = measured_costs(topology, x_SM.device, x_SM.dtype)
                else:
                    schedule = Schedule("tutel", degrees=(degree, degree))
                assert schedule is not None
                kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "itself")
                plans = schedule.plans(kinds, workload, costs, any_degree=any_degree)
                # Ranks with different plans would wait for each other for ever.
                require_same_plans(topology, plans)
            self._plans[key] = plans
        return Assigned(self._plans[key])
