"""Snapshot of a job's state in its nodes' memory, with every part on two nodes.

Each node stores parts that several nodes hold (dense parameters, data-parallel replicas of experts) once, from its own
ranks. Parts that only one node holds are also sent to a buddy rank on another node.

Two slots alternate. A rank starts a refresh only after all ranks have finished the previous one: whenever a rank is
killed, one slot is complete on every node, for the same step.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from fusedmoe.comm.collectives import all_gather_object, all_to_all_rows, device_of, on_all_ranks
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.experts.split_optimizers import Optimizers
from fusedmoe.training.checkpoint import ABOUT, EXTRA, ModelState, require_extra
from fusedmoe.training.checkpoint_folder import require_writable
from fusedmoe.training.plain_values import dtype_name, encode_value, tensor_bytes
from fusedmoe.training.survival.node_memory import NodeMemory, Slot

#: Version of the headers.
FORMAT = 3
# Bytes sent at once. A transfer uses twice as much GPU memory.
CHUNK_BYTES = 2**25
# Alignment of parts, sufficient for any dtype.
_ALIGN = 64


@dataclass(frozen=True)
class JobNodes:
    """Node of each rank of a job: `node_of_rank[r]` is the node number of rank r, from 0."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> JobNodes:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        return max(self.node_of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, its_node in enumerate(self.node_of_rank) if its_node == node]

    def is_node_leader(self, rank: int) -> bool:
        return self.node_of_rank.index(self.node_of_rank[rank]) == rank

    def is_keeper(self, key: str, holders: Sequence[int], rank: int) -> bool:
        """Return whether `rank` stores `key` for its node: a hash of the key selects one of the node's `holders`."""
        on_node = [other for other in sorted(holders) if self.node_of_rank[other] == self.node_of_rank[rank]]
        return on_node[zlib.crc32(key.encode()) % len(on_node)] == rank

    def is_on_one_node(self, holders: Sequence[int]) -> bool:
        return len({self.node_of_rank[rank] for rank in holders}) == 1

    def buddy(self, rank: int) -> int | None:
        """Return the rank on the next node that stores the parts only this node holds; None with one node."""
        if self.count == 1:
            return None
        own, next_ones = self.ranks(self.node_of_rank[rank]), self.ranks((self.node_of_rank[rank] + 1) % self.count)
        return next_ones[own.index(rank) % len(next_ones)]

    def source_ranks(self, rank: int) -> list[int]:
        return [other for other in range(len(self.node_of_rank)) if self.buddy(other) == rank]


class StatePart(NamedTuple):
    """Part of a tensor, or a whole object, in a slot.

    Attributes:
        start, size: offsets and shape of the part; None for an object.
        dtype: name of the dtype; "" for an object.
        offset, bytes: offset and length in the slot.
        is_sent: only one node holds the part; the buddy stores a copy.
    """

    key: str
    start: tuple[int, ...] | None
    size: tuple[int, ...] | None
    full_shape: tuple[int, ...]
    dtype: str
    offset: int
    bytes: int
    is_sent: bool

    @property
    def part_key(self) -> tuple[str, tuple[int, ...] | None]:
        return self.key, self.start

    @classmethod
    def from_json(cls, fields: list[Any]) -> StatePart:
        plain: Any = [tuple(value) if isinstance(value, list) else value for value in fields]
        return cls(*plain)


@dataclass(frozen=True)
class Price:
    """Cost of survival for this rank: bytes in its node's memory (both slots), and bytes sent per refresh."""

    memory_bytes: int
    sent_bytes: int


class Snapshots:
    """Writer of model and optimizer state to the nodes' memory.

    `generation` is larger than the generation of every earlier process.
    """

    def __init__(self, memory: NodeMemory, topology: Topology, nodes: JobNodes, generation: int) -> None:
        self._memory, self._topology, self._nodes, self._generation = memory, topology, nodes, generation
        rank = topology.world.index
        self._slots: list[Slot] = [memory.slot(f"{generation}-{rank}-{number}") for number in (0, 1)]
        self._written = 0
        # All ranks of the node compute digests at once.
        self._threads = max(1, len(os.sched_getaffinity(0)) // len(nodes.ranks(nodes.node_of_rank[rank])))
        self._digests: list[str] = []
        self._parts_by_rank: list[list[StatePart]] = []
        self.price = Price(0, 0)

    @torch.no_grad()
    def write(self, step: int, model: nn.Module, optimizer: Optimizers | None, extra: dict[str, Any]) -> None:
        """Store the state after `step` steps. Collective over all ranks; raises the errors of `Survival.refresh`."""
        nodes, world, operation = self._nodes, self._topology.world, f"keeping the state of step {step}"
        me = world.index
        state = ModelState(model, optimizer, self._topology, operation)
        parts: list[StatePart] = []
        values: list[Tensor] = []

        def collect() -> tuple[str, str]:
            require_extra(extra, operation)
            digest = encode_value(extra, f"{operation}: {EXTRA}").digest()
            for part, value in _own_parts(state, self._topology, nodes, extra, operation):
                parts.append(part)
                values.append(value)
            return _digest(repr(parts).encode()), digest

        self._gather_parts(parts, on_all_ranks(world, operation, collect), operation)
        bases: dict[int, int] = {}
        total = slot_bytes(parts)
        for source_rank in nodes.source_ranks(me):
            bases[source_rank] = total
            total += _sent_bytes(self._parts_by_rank[source_rank])
        slot, memory = self._slots[self._written % 2], torch.empty(0, dtype=torch.uint8, device="cpu")

        def begin() -> None:
            nonlocal memory
            self._memory.check()
            memory = slot.begin(total)

        on_all_ranks(world, operation, begin)
        for part, value in zip(parts, values, strict=True):
            memory[part.offset : part.offset + part.bytes].copy_(value)
        sent, buddy = [_sent_bytes(of_rank) for of_rank in self._parts_by_rank], nodes.buddy(me)
        if buddy is not None:
            incoming = {source_rank: memory[base : base + sent[source_rank]] for source_rank, base in bases.items()}
            exchange_bytes(world, {buddy: memory[: sent[me]]}, incoming, max(sent), operation)
        held = list(parts)
        for source_rank, base in bases.items():
            held += [
                part._replace(offset=base + part.offset) for part in self._parts_by_rank[source_rank] if part.is_sent
            ]
        all_parts = (part for of_rank in self._parts_by_rank for part in of_rank)
        keys = {part.key: None if part.start is None else part.full_shape for part in all_parts}
        header = {"format": FORMAT, "generation": self._generation, "step": step, "bytes": total, "keys": keys}
        slot.complete(header | {"parts": held, "digests": part_digests(memory, held, self._threads)})
        self._written += 1
        self.price = Price(2 * total, sent[me])

    def _gather_parts(self, parts: list[StatePart], digests_by_rank: list[tuple[str, str]], operation: str) -> None:
        """Gather every rank's parts if a digest of parts has changed. Raise `RankError` if `extra` differs.

        `digests_by_rank` has digests of the parts and of `extra`.
        """
        world = self._topology.world
        for rank, (_, of_extra) in zip(world.ranks, digests_by_rank, strict=True):
            if of_extra != digests_by_rank[0][1]:
                raise RankError(
                    f"{operation}: the `extra` of refresh differs between rank {world.ranks[0]} and rank {rank}. "
                    "Pass equal values; gather values that differ between ranks (all_gather_object)."
                )
        digests = [of_parts for of_parts, _ in digests_by_rank]
        if digests != self._digests:
            self._parts_by_rank = all_gather_object(world, parts, operation)
            self._digests = digests


def exchange_bytes(
    world: Group, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], longest: int, operation: str
) -> None:
    """Exchange byte tensors [n] uint8 by peer rank. Collective over the world.

    `longest`, the bytes of the longest tensor on any rank, determines the number of rounds.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    # In chunks, which pass through GPU memory.
    for start in range(0, longest, CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        rows = [outgoing.get(rank, nothing)[chunk] for rank in range(world.size)]
        places = [incoming.get(rank, nothing)[chunk] for rank in range(world.size)]
        send, recv = ([len(part) for part in parts] for parts in (rows, places))
        received = all_to_all_rows(world, torch.cat(rows).to(device_of(world)), send, recv, operation)
        for place, part in zip(places, received.split(recv), strict=True):
            place.copy_(part)


def parse_generation(slot: str) -> int:
    return int(slot.split("-")[0])


def slot_bytes(parts: Iterable[StatePart]) -> int:
    return max((_aligned(part.offset + part.bytes) for part in parts), default=0)


def part_digests(memory: Tensor, parts: Sequence[StatePart], threads: int) -> list[str]:
    """Compute the digest of each part in a slot's memory, including the padding after the part."""

    def digest(part: StatePart) -> str:
        return _digest(memory[part.offset : _aligned(part.offset + part.bytes)].numpy())

    with ThreadPoolExecutor(threads) as pool:  # hashlib releases the GIL
        return list(pool.map(digest, parts))


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _sent_bytes(parts: Iterable[StatePart]) -> int:
    return slot_bytes(part for part in parts if part.is_sent)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _own_parts(
    state: ModelState, topology: Topology, nodes: JobNodes, extra: dict[str, Any], operation: str
) -> Iterator[tuple[StatePart, Tensor]]:
    """Yield the parts that this rank stores, with their values. The parts to send precede the other parts."""
    me = topology.world.index
    alone: set[str] = set()
    places = {rank: place for place, rank in enumerate(topology.world.ranks)}

    def includes(key: str, group: Group) -> bool:
        holders = [places[rank] for rank in group.ranks]
        if nodes.is_on_one_node(holders) and nodes.count > 1:
            alone.add(key)
        return nodes.is_keeper(key, holders, me)

    entries = state.entries(includes)
    for key, entry in ((EXTRA, extra), (ABOUT, state.about())):
        if includes(key, topology.world):
            entries[key] = entry
    packed = {
        key: encode_value(entry, f"{operation}: {key}").pack()
        for key, entry in entries.items()
        if not isinstance(entry, Tensor)
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(entries | packed, None, True)
    items = planner.create_local_plan().items
    offset = 0
    for item in sorted(items, key=lambda item: item.index.fqn not in alone):
        key, data = item.index.fqn, planner.resolve_data(item)
        assert isinstance(data, Tensor) and item.tensor_data is not None
        value = tensor_bytes(data)
        if key in packed:
            part = StatePart(key, None, None, (), "", offset, value.numel(), key in alone)
        else:
            require_writable(data, f"{operation}: {key}")
            chunk, dtype = item.tensor_data.chunk, dtype_name(data.dtype)
            place = tuple(chunk.offsets), tuple(chunk.sizes), tuple(item.tensor_data.size)
            part = StatePart(key, *place, dtype, offset, value.numel(), key in alone)
        yield part, value
        offset = _aligned(offset + part.bytes)
