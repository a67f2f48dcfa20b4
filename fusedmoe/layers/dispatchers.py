"""The dispatchers that a layer chooses from: kernels that send and receive by themselves, and experts that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.order import take_pairs
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts, GroupedExperts
from fusedmoe.engine.dispatcher import (
    Collectives,
    Crossing,
    Dispatcher,
    Handle,
    LocalExperts,
    recomputing,
    refuse,
)
from fusedmoe.engine.run import Plans
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.task import resources_of


class KernelTransport(NamedTuple):
    """How kernels of a layer send and receive by themselves.

    Attributes:
        kind: the fused operation.   degree: its chunks, in both passes.   tokens: at most.
    """

    kind: str
    degree: int
    tokens: int


class OneSided(Dispatcher):
    """Kernels put rows into other ranks' memory (`fusedmoe.puts`), where they can and plans take it; else collectives.

    Args:
        transport: for rows like these; None: by collectives. The first call is collective.
        collectives: what then takes rows.
    """

    def __init__(self, transport: Callable[[Tensor], KernelTransport | None], collectives: Collectives) -> None:
        self._transport, self.collectives = transport, collectives

    def dispatch(
        self, x_SM: Tensor, layout: Layout, weight_SK: Tensor | None, refusal: str | None = None
    ) -> tuple[Tensor, Handle]:
        """By collectives: kernels that put rows do not give them back before experts have them."""
        return self.collectives.dispatch(x_SM, layout, weight_SK, refusal)

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        return self.collectives.combine(out_RM, handle)

    def through_experts(
        self,
        x_SM: Tensor,
        layout: Layout,
        weight_SK: Tensor | None,
        experts: LocalExperts,
        refusal: str | None = None,
    ) -> Tensor:
        transport = None if weight_SK is None else self._transport(x_SM)
        self.collectives.recorder = self.recorder
        if transport is None or weight_SK is None:
            return self.collectives.through_experts(x_SM, layout, weight_SK, experts, refusal)
        topology = self.collectives.topology
        refuse(topology, refusal)
        return fused_experts(x_SM, weight_SK, layout, topology, experts.in_chunks(x_SM), transport, self.recorder)


class Moving(Collectives):
    """Experts are where a placement says, and so rows go to the places of their copies."""

    def __init__(self, placed: DynamicExperts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._placed = placed

    def meet(self, x_SM: Tensor, layout: Layout, weight_SK: Tensor | None, refusal: str | None) -> Crossing:
        placed = self._placed
        if not placed.hooked or not (placed.begun or recomputing()):
            placed.recorder = self.recorder
            placed.begin()
        with span(self.recorder, "order", kind="order", phase="forward"):
            layout = placed.split(layout.exact(), placed.experts.training and not recomputing())
            weight_N = None if weight_SK is None else take_pairs(weight_SK, layout)
        held = max(1, len(placed.held))
        exchange = self.exchange(layout.counts_E, x_SM.dtype, refusal or placed.refusal(), held=held)
        return Crossing(layout, weight_N, exchange)

    def through_experts(
        self,
        x_SM: Tensor,
        layout: Layout,
        weight_SK: Tensor | None,
        experts: LocalExperts,
        refusal: str | None = None,
    ) -> Tensor:
        crossing = self.meet(x_SM, layout, weight_SK, refusal)
        return self._placed.call(lambda own: self.run(x_SM, crossing, own), recomputing())


def has_heap(topology: Topology, device: torch.device) -> bool:
    """Whether all ranks that a layer's experts are split over have a symmetric heap, where they are split over one
    axis. Collective over these."""
    from fusedmoe.comm.heaps import find_backend

    return bool(find_backend(_group(topology), device)[0])


def choose_transport(
    topology: Topology, kind: str, x_SM: Tensor, plans_for: Callable[[int], Plans]
) -> KernelTransport | None:
    """By a fused operation, where plans take it; None: by collectives. Collective over the ranks that have the experts.

    Args:
        plans_for: the plans for so many tokens on a rank.
    """
    group = _group(topology)
    tokens = torch.tensor([len(x_SM)], device=device_of(group))
    most = _rounded_up(int(all_reduce(group, tokens, "max", "tokens of the ranks")))
    forward = plans_for(most).forward
    if any(task.kind != kind for task in forward):
        return None
    return KernelTransport(kind, len(forward), most)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor,
    layout: Layout,
    topology: Topology,
    experts: ChunkExperts,
    transport: KernelTransport,
    recorder: Recorder | None,
) -> Tensor:
    """`fusedmoe.puts.fused_experts` over the layer's ranks, in windows that all layers share.

    Raises:
        ConfigError: more tokens than any rank had when the transport was chosen, rounded up.
        RankError: a rank failed, or did not come in time.
    """
    from fusedmoe.engine import one_sided_experts
    from fusedmoe.kernels.one_sided import for_all_shards

    assert isinstance(experts, GroupedExperts)
    group = _group(topology)
    if group is topology.esp:
        layout = for_all_shards(layout.exact(), group.size)
        weight_SK = weight_SK.repeat_interleave(group.size, 1)
    windows = _windows(topology, group, layout, x_SM, transport)
    try:
        measured = one_sided_experts.Measured(recorder, transport.kind, resources_of(transport.kind)[1:])
        return one_sided_experts.fused_experts(x_SM, weight_SK, layout, windows, experts, transport.degree, measured)
    except BaseException:
        _shared.pop(topology, None)
        windows.heap.abandon()
        raise


# Of topologies that are in use: one layer works at a time, and its exchanges follow those of the layer before.
_shared: WeakKeyDictionary[Topology, dict[object, object]] = WeakKeyDictionary()


def _windows(topology: Topology, group: Group, layout: Layout, x_SM: Tensor, transport: KernelTransport):  # type: ignore[no-untyped-def]
    from fusedmoe.comm.heaps import open_heap
    from fusedmoe.comm.windows import Room, Windows

    room = Room(transport.tokens, layout.k, layout.experts, x_SM.shape[1], x_SM.dtype, transport.degree)
    known = _shared.setdefault(topology, {})
    if (group.axis, room) not in known:
        known[group.axis, room] = Windows(open_heap(group, x_SM.device), room)
    return known[group.axis, room]


def _group(topology: Topology) -> Group:
    """The ranks that the experts, or the shards of each, are split over."""
    return topology.ep if topology.ep.size > 1 else topology.esp


def _rounded_up(tokens: int) -> int:
    """With a fourth to spare: batches need not all be as long as the first."""
    return -(-5 * max(1, tokens) // 64) * 16
