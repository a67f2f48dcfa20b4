"""The dispatcher of kernels that put rows into other ranks' memory by themselves, and the choice of it.

The kernels' side, forward and backward, is `engine/one_sided_experts.py`, which needs Triton and is loaded with the
first batch that goes this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import ExpertCalls, NonFinite
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts, GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import LocalExperts, Routed, refuse
from fusedmoe.engine.run import Plans
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder, active_recorder
from fusedmoe.schedule.task import resources_of


class KernelTransport(NamedTuple):
    """A choice of kernels that send and receive by themselves.

    Attributes:
        kind: the fused operation.   degrees: its chunks forward and backward.   tokens: at most.
        rows: a bound on a rank's rows for each choice of a token; None: there is none.
    """

    kind: str
    degrees: tuple[int, int]
    tokens: int
    rows: int | None = None


class OneSided(Collectives):
    """Kernels put rows into other ranks' memory where they can and the plan allows it; otherwise collectives.

    `dispatch` and `combine` go by collectives in any case: a kernel that puts rows has experts work on them where they
    arrive, and there is nothing to give out between the two. So it is in graphs of a compiler.

    Args:
        transport: for rows like these; None: by collectives. The first call is collective.
    """

    compiles = True

    def __init__(self, transport: Callable[[Tensor], KernelTransport | None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._transport = transport

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        x_SM, layout, weight_SK, refusal = routed
        # Kernels send as they find rows, and nobody on the host counts.
        self.travelled = None
        as_module = self.calls(experts) == ExpertCalls.MODULE  # kernels call no module: collectives do
        transport = None if weight_SK is None or as_module else self._transport(x_SM)
        if transport is None or weight_SK is None:
            return super().through_experts(routed, experts)
        later = None
        if isinstance(refusal, NonFinite):
            # No message takes the number to the other ranks. Where the host is not to wait they hear of it later.
            later = refusal if transport.rows is not None else None
            refusal = refusal.text if later is None and int(refusal.number) else None
        refuse(self.topology, refusal)
        own = experts.in_chunks(x_SM)
        given = (x_SM, weight_SK, layout, self.topology, own, transport, active_recorder())
        return fused_experts(*given, self._call, later)


def has_heap(topology: Topology, device: torch.device) -> bool:
    """Tells whether all ranks that a layer's experts are split over have a symmetric heap. Collective over these."""
    from fusedmoe.comm.one_sided.heaps import find_backend

    group = _group(topology)
    return group is not None and bool(find_backend(group, device)[0])


def choose_transport(
    topology: Topology,
    kind: str,
    x_SM: Tensor,
    plans_for: Callable[[int], Plans],
    row_factor: float | None = None,
) -> KernelTransport | None:
    """Chooses a fused operation, where plans take it; None: collectives. Collective over the ranks with the experts.

    Args:
        plans_for: the plans for so many tokens on a rank.
        row_factor: see `Schedule`.
    """
    group = _group(topology)
    assert group is not None
    tokens = torch.tensor([len(x_SM)], device=device_of(group))
    # Buffers lie at the same addresses on all ranks, so all make them for the rank with the most tokens.
    largest = int(all_reduce(group, tokens, "max", "tokens of the ranks"))
    most = rounded_up(largest)
    plans = plans_for(most)
    if any(task.kind != kind for task in plans.forward):
        return None
    rows = None if row_factor is None else max(1, math.ceil(row_factor * largest))
    return KernelTransport(kind, (len(plans.forward), len(plans.backward)), most, rows)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor,
    layout: Layout,
    topology: Topology,
    experts: ChunkExperts,
    transport: KernelTransport,
    recorder: Recorder | None,
    name: str = "fused_experts",
    bad: NonFinite | None = None,
) -> Tensor:
    """Calls `fusedmoe.engine.one_sided_experts.fused_experts` over the layer's ranks, in buffers that all layers share.

    Args:
        name: of the layer, for errors.   bad: numbers of which all ranks are to hear later.
    Raises:
        ConfigError: more tokens than any rank had when the transport was chosen, rounded up.
        RankError: a rank failed, or did not come in time.
    """
    from fusedmoe.engine import one_sided_experts
    from fusedmoe.kernels.one_sided import for_all_shards

    assert isinstance(experts, GroupedExperts)
    group, shards = _group(topology), topology.esp.size
    assert group is not None
    # Each shard of an expert is a destination of its own, whose summand comes back as a row.
    if shards > 1:
        layout = for_all_shards(layout, shards, topology.ep.size)
        weight_SK = weight_SK.repeat_interleave(shards, 1)
    buffers = _buffers(topology, group, layout, x_SM, transport)
    try:
        if bad is not None:
            buffers.note(*bad)
        rows = None if transport.rows is None else transport.rows * layout.k
        measured = one_sided_experts.Measured(recorder, transport.kind, resources_of(transport.kind)[1:])
        more = (transport.degrees, measured, rows, name)
        return one_sided_experts.fused_experts(x_SM, weight_SK, layout, buffers, experts, *more)
    except BaseException:
        # Peers may still write into these buffers: no later batch may meet their rows.
        _shared.pop(topology, None)
        buffers.heap.abandon()
        raise


# By topology, as long as it is in use: one layer works at a time, and its exchanges follow those of the layer before.
_shared: WeakKeyDictionary[Topology, dict[object, object]] = WeakKeyDictionary()


def _buffers(topology: Topology, group: Group, layout: Layout, x_SM: Tensor, transport: KernelTransport):  # type: ignore[no-untyped-def]
    from fusedmoe.comm.one_sided.heaps import open_heap
    from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers

    # Chunks cost next to no room: the same buffers serve layers with any numbers of them.
    degree = max(BufferSizes.degree, *transport.degrees)
    sizes = BufferSizes(transport.tokens, layout.k, layout.experts, x_SM.shape[1], x_SM.dtype, degree)
    known = _shared.setdefault(topology, {})
    if (group.axis, sizes) not in known:
        known[group.axis, sizes] = ReceiveBuffers(open_heap(group, x_SM.device), sizes)
    return known[group.axis, sizes]


def _group(topology: Topology) -> Group | None:
    """The ranks that the experts, and the shards of each, are split over: ep by ep, their shards in order. Collective
    over these where there are both. None: the topology does not say which they are."""
    if topology.ep.size == 1 or topology.esp.size == 1:
        return topology.ep if topology.ep.size > 1 else topology.esp
    ranks = topology.expert_ranks
    return None if ranks is None else topology.subgroup("ep·esp", ranks)


def rounded_up(tokens: int) -> int:
    """Adds a fourth to spare: batches need not all be as long as the first."""
    # A multiple of 16, so that batches of nearly one length share buffers.
    return -(-5 * max(1, tokens) // 64) * 16
