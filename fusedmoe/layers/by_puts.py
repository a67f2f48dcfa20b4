"""A layer whose kernels send and receive by themselves (`fusedmoe.puts`), where its schedule says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts, FusedChunks
from fusedmoe.engine.chunked import Plans
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.task import resources_of


class Way(NamedTuple):
    """How kernels of a layer send and receive by themselves.

    Attributes:
        kind: the fused operation.   degree: its chunks, in both passes.   tokens: at most.
    """

    kind: str
    degree: int
    tokens: int


def has_heap(topology: Topology, device: torch.device) -> bool:
    """Whether all ranks that a layer's experts are split over have a symmetric heap, where they are split over one
    axis. Collective over these."""
    from fusedmoe.comm.heap import find_backend

    return bool(find_backend(_group(topology), device)[0])


def choose_way(topology: Topology, kind: str, x_SM: Tensor, plans_for: Callable[[int], Plans]) -> Way | None:
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
    return Way(kind, len(forward), most)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor,
    layout: Layout,
    topology: Topology,
    experts: ChunkExperts,
    way: Way,
    recorder: Recorder | None,
) -> Tensor:
    """`fusedmoe.puts.fused_experts` over the layer's ranks, in windows that all layers share.

    Raises:
        ConfigError: more tokens than any rank had when the way was chosen, rounded up.
        RankError: a rank failed, or did not come in time.
    """
    from fusedmoe.engine import one_sided as fused
    from fusedmoe.kernels.routes import for_all_shards

    assert isinstance(experts, FusedChunks)
    group = _group(topology)
    if group is topology.esp:
        layout = for_all_shards(layout.exact(), group.size)
        weight_SK = weight_SK.repeat_interleave(group.size, 1)
    windows = _windows(topology, group, layout, x_SM, way)
    try:
        measured = fused.Measured(recorder, way.kind, resources_of(way.kind)[1:])
        return fused.fused_experts(x_SM, weight_SK, layout, windows, experts, way.degree, measured)
    except BaseException:
        _shared.pop(topology, None)
        windows.heap.abandon()
        raise


# Of topologies that are in use: one layer works at a time, and its exchanges follow those of the layer before.
_shared: WeakKeyDictionary[Topology, dict[object, object]] = WeakKeyDictionary()


def _windows(topology: Topology, group: Group, layout: Layout, x_SM: Tensor, way: Way):  # type: ignore[no-untyped-def]
    from fusedmoe.comm.heap import open_heap
    from fusedmoe.comm.windows import Room, Windows

    room = Room(way.tokens, layout.slots, layout.experts, x_SM.shape[1], x_SM.dtype, way.degree)
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
