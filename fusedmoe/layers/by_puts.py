"""A layer whose kernels send and receive by themselves (`fusedmoe.puts`), where its schedule says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.chunk_experts import ChunkExperts, FusedChunks
from fusedmoe.autograd.pipeline import Plans
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.task import FUSED

_OVER_EXPERTS, _OVER_SHARDS = "dispatch-expert-combine", "all-gather-expert-reduce-scatter"


class Way(NamedTuple):
    """How a layer's rows travel in one dtype.

    Attributes:
        kind: the fused operation; None: collectives.   degree: its chunks, in both passes.   tokens: at most.
    """

    kind: str | None
    degree: int = 1
    tokens: int = 0


def fused_kind(topology: Topology, x_SM: Tensor, experts: ChunkExperts) -> str | None:
    """The fused operation that can do all of a layer's road; None where collectives must. The same on all ranks that
    have the same experts and devices."""
    ep, esp = topology.ep.size, topology.esp.size
    if (ep > 1) == (esp > 1) or not isinstance(experts, FusedChunks):
        return None
    if not uses_triton(x_SM) or x_SM.dtype == torch.float64:
        return None
    return _OVER_EXPERTS if ep > 1 else _OVER_SHARDS


def choose_way(topology: Topology, kind: str, x_SM: Tensor, plans_for: Callable[[int], Plans]) -> Way:
    """By which way rows travel from now on: where some rank has no symmetric heap, by collectives. Collective over the
    ranks that have the experts.

    Args:
        plans_for: the plans for so many tokens on a rank.
    """
    tokens = torch.tensor([len(x_SM)], device=device_of(_group(topology, kind)))
    most = _rounded_up(int(all_reduce(_group(topology, kind), tokens, "max", "tokens of the ranks")))
    plans = plans_for(most)
    both = (plans.forward, plans.backward)
    kinds = {task.kind for plan in both for task in plan}
    degrees = {degree for plan in both for degree in plan.degrees.values()}
    # Where experts are split over all ranks there is nobody to dispatch to.
    idle = {"dispatch", "combine"} if kind == _OVER_SHARDS else set()
    if kinds - idle != {kind} or len(degrees) != 1:
        return Way(None)
    from fusedmoe.comm.heap import find_backend

    if not find_backend(_group(topology, kind), x_SM.device)[0]:
        return Way(None)
    return Way(kind, degrees.pop(), most)


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
    from fusedmoe.autograd import fused
    from fusedmoe.kernels.routes import for_all_shards

    assert way.kind is not None and isinstance(experts, FusedChunks)
    group = _group(topology, way.kind)
    if way.kind == _OVER_SHARDS:
        layout = for_all_shards(layout.exact(), group.size)
        weight_SK = weight_SK.repeat_interleave(group.size, 1)
    windows = _windows(topology, group, layout, x_SM, way)
    try:
        measured = fused.Measured(recorder, way.kind, ("inter",) if way.kind == _OVER_EXPERTS else ("intra",))
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


def _group(topology: Topology, kind: str) -> Group:
    return topology.ep if kind == _OVER_EXPERTS else topology.esp


def _rounded_up(tokens: int) -> int:
    """With a fourth to spare: batches need not all be as long as the first."""
    return -(-5 * max(1, tokens) // 64) * 16


assert {_OVER_EXPERTS, _OVER_SHARDS} <= FUSED.keys()
