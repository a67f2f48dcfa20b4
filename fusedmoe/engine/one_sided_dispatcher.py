"""The dispatcher that sends rows by one-sided puts into other ranks' memory, and the choice of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import ExpertCalls, NonFiniteCount
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts, GroupedExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import LocalExperts, Routed, refuse
from fusedmoe.engine.run import Plans
from fusedmoe.kernels.layout import Layout
from fusedmoe.runtime.recorder import Recorder, active_recorder
from fusedmoe.schedule.task import resources_of


class KernelTransport(NamedTuple):
    """The fused operation chosen for a layer, and the size of its buffers.

    `max_rows_per_choice`: maximum rows received by a rank's experts, divided by K; None: unlimited.
    """

    kind: str
    degrees: tuple[int, int]
    max_tokens: int
    max_rows_per_choice: int | None = None


class OneSided(Collectives):
    """Sends rows by one-sided puts if the kernels and the plan allow it, and by collectives otherwise.

    `dispatch`, `combine` and compiled graphs use collectives: the kernels have no intermediate result to return.

    Args:
        find_transport: returns the fused operation for tokens like these, or None for collectives. The first call is
            collective.
    """

    compiles = True

    def __init__(self, find_transport: Callable[[Tensor], KernelTransport | None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._find_transport = find_transport

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        x_SM, layout, weight_SK, refusal, _ = routed
        # The host does not count the rows that kernels send.
        self.sent_counts = None
        needs_module_calls = self.find_expert_calls(experts) == ExpertCalls.MODULE
        transport = None if weight_SK is None or needs_module_calls else self._find_transport(x_SM)
        if transport is None or weight_SK is None:
            return super().through_experts(routed, experts)
        deferred = None
        if isinstance(refusal, NonFiniteCount):
            # No message carries the count to the other ranks: without a host synchronization, report it later.
            deferred = refusal if transport.max_rows_per_choice is not None else None
            refusal = refusal.text if deferred is None and int(refusal.number) else None
        refuse(self.topology, refusal)
        own = experts.in_chunks(x_SM)
        given = (x_SM, weight_SK, layout, self.topology, own, transport, active_recorder())
        return fused_experts(*given, self._call, deferred)


def has_heap(topology: Topology, device: torch.device) -> bool:
    """Return whether all ranks that share the layer's experts have a symmetric heap. Collective over these ranks."""
    from fusedmoe.comm.one_sided.heaps import find_backend

    group = _group(topology)
    return group is not None and bool(find_backend(group, device)[0])


def choose_transport(
    topology: Topology, kind: str, x_SM: Tensor, plans_for: Callable[[int], Plans], row_factor: float | None = None
) -> KernelTransport | None:
    """Return the transport of the fused operation `kind` if all forward tasks of the plans are of this kind, else None.

    None selects collectives. Collective over the ranks of the experts.

    Args:
        x_SM: a batch of this rank; the receive buffers fit the largest batch of any rank.
        plans_for: returns the plans for a number of tokens per rank.
        row_factor: as in `Schedule`.
    """
    group = _group(topology)
    assert group is not None
    tokens = torch.tensor([len(x_SM)], device=device_of(group))
    # Buffers have the same addresses on all ranks, and so the size for the rank with the most tokens.
    largest = int(all_reduce(group, tokens, "max", "tokens of the ranks"))
    max_tokens = round_up_tokens(largest)
    plans = plans_for(max_tokens)
    if any(task.kind != kind for task in plans.forward):
        return None
    rows = None if row_factor is None else max(1, math.ceil(row_factor * largest))
    return KernelTransport(kind, (len(plans.forward), len(plans.backward)), max_tokens, rows)


def fused_experts(
    x_SM: Tensor,
    weight_SK: Tensor,
    layout: Layout,
    topology: Topology,
    experts: ChunkExperts,
    transport: KernelTransport,
    recorder: Recorder | None,
    name: str = "fused_experts",
    bad: NonFiniteCount | None = None,
) -> Tensor:
    """Run `one_sided_experts.fused_experts` over the layer's ranks, with buffers that all layers share.

    Args:
        name: of the layer, for errors.
        bad: count of non-finite values, reported to all ranks asynchronously.
    Raises:
        ConfigError: more tokens than the buffers hold (`transport.max_tokens`).
        RankError: a rank failed or timed out. The buffers are then abandoned.
    """
    from fusedmoe.engine import one_sided_experts
    from fusedmoe.kernels.one_sided import expand_to_shards

    assert isinstance(experts, GroupedExperts)
    group, shards = _group(topology), topology.esp.size
    assert group is not None
    # Each shard of an expert is a destination, and returns its partial sum as a row.
    if shards > 1:
        layout = expand_to_shards(layout, shards, topology.ep.size)
        weight_SK = weight_SK.repeat_interleave(shards, 1)
    buffers = _buffers(topology, group, layout, x_SM, transport)
    try:
        if bad is not None:
            buffers.record_fault(*bad)
        rows = None if transport.max_rows_per_choice is None else transport.max_rows_per_choice * layout.k
        recording = one_sided_experts.FusedRecording(recorder, transport.kind, resources_of(transport.kind)[1:])
        more = (transport.degrees, recording, rows, name)
        return one_sided_experts.fused_experts(x_SM, weight_SK, layout, buffers, experts, *more)
    except BaseException:
        # Peers may still write into these buffers, so no later batch may use them.
        _shared_buffers.pop(topology, None)
        buffers.heap.abandon()
        raise


# Per topology, and freed with it. Layers share buffers because they run one at a time.
_shared_buffers: WeakKeyDictionary[Topology, dict[object, object]] = WeakKeyDictionary()


def _buffers(topology: Topology, group: Group, layout: Layout, x_SM: Tensor, transport: KernelTransport):  # type: ignore[no-untyped-def]
    from fusedmoe.comm.one_sided.heaps import open_heap
    from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers

    # More chunks need hardly any memory: the same buffers serve layers with different numbers of chunks.
    degree = max(BufferSizes.degree, *transport.degrees)
    sizes = BufferSizes(transport.max_tokens, layout.k, layout.experts, x_SM.shape[1], x_SM.dtype, degree)
    buffers_by_sizes = _shared_buffers.setdefault(topology, {})
    if (group.axis, sizes) not in buffers_by_sizes:
        buffers_by_sizes[group.axis, sizes] = ReceiveBuffers(open_heap(group, x_SM.device), sizes)
    return buffers_by_sizes[group.axis, sizes]


def _group(topology: Topology) -> Group | None:
    """Return the group over which experts and their shards are split, by ep rank and then by shard.

    If both ep and esp have several ranks: collective, and None if the topology does not know the group's ranks.
    """
    if topology.ep.size == 1 or topology.esp.size == 1:
        return topology.ep if topology.ep.size > 1 else topology.esp
    ranks = topology.expert_ranks
    return None if ranks is None else topology.subgroup("ep·esp", ranks)


def round_up_tokens(tokens: int) -> int:
    # A quarter in reserve, as later batches may be longer; a multiple of 16, to share buffers.
    return -(-5 * max(1, tokens) // 64) * 16
