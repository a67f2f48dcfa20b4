"""A job's state in its nodes' memory, at one step: every part on two nodes.

What several nodes hold anyway (the dense parts, experts with data-parallel copies) each of them keeps from its own
ranks. What one node alone holds is also sent to a buddy on another. On a node each part is kept once, whichever of its
ranks hold it.

Of each part a digest is kept beside it, the one that checkpoints have: what a flipped bit has changed is no copy.

There are two slots, written in turn. A rank begins a refresh only with all others, and so after all have finished the
one before: whenever some rank is killed, one of the two slots is whole on every node, of the same step.
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
from fusedmoe.training.checkpoint import ABOUT, EXTRA, ModelState, require_extra
from fusedmoe.training.checkpoint_folder import require_writable
from fusedmoe.training.optimizers import Optimizers
from fusedmoe.training.plain_values import encode_value, tensor_bytes
from fusedmoe.training.survival.node_memory import NodeMemory, Slot

#: Of the headers.
FORMAT = 3
# Bytes that travel at once: what a transfer takes of a GPU's memory, twice.
CHUNK_BYTES = 2**25
# Parts begin where any dtype may.
_ALIGN = 64


@dataclass(frozen=True)
class JobNodes:
    """The ranks of a job by node: `of_rank[r]` is the number of rank r's node, from 0."""

    of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> JobNodes:
        """Numbers the nodes from the name of each rank's node, in rank order."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        """Lists the ranks of a node."""
        return [rank for rank, its_node in enumerate(self.of_rank) if its_node == node]

    def speaks(self, rank: int) -> bool:
        """Tells that a rank does what is done once on each node."""
        return self.of_rank.index(self.of_rank[rank]) == rank

    def keeps(self, key: str, holders: Sequence[int], rank: int) -> bool:
        """Returns whether `rank`, one of the holders of `key`, is the one that keeps it on its node."""
        # Memory is the node's, so one copy serves all its ranks; by a hash, so that they share the work.
        here = [other for other in sorted(holders) if self.of_rank[other] == self.of_rank[rank]]
        return here[zlib.crc32(key.encode()) % len(here)] == rank

    def on_one(self, holders: Sequence[int]) -> bool:
        """Returns whether all holders are on one node, with which the part would be lost."""
        return len({self.of_rank[rank] for rank in holders}) == 1

    def buddy(self, rank: int) -> int | None:
        """Returns the rank that gets copies of what only the node of `rank` has; None where there is one node."""
        if self.count == 1:
            return None
        # On the next node, at the same place there.
        own, next_ones = self.ranks(self.of_rank[rank]), self.ranks((self.of_rank[rank] + 1) % self.count)
        return next_ones[own.index(rank) % len(next_ones)]

    def sources(self, rank: int) -> list[int]:
        """Lists the ranks whose buddy is `rank`."""
        return [other for other in range(len(self.of_rank)) if self.buddy(other) == rank]


class StatePart(NamedTuple):
    """Part of a tensor, or a whole object, in a slot.

    Attributes:
        key: as in a checkpoint.   start, size: where in the tensor and how large; None of an object.
        whole: the tensor's shape.   dtype: its name; "" of an object.
        at, bytes: where in the slot, and how many.
        sent: only one node holds it, so a buddy gets a copy.
    """

    key: str
    start: tuple[int, ...] | None
    size: tuple[int, ...] | None
    whole: tuple[int, ...]
    dtype: str
    at: int
    bytes: int
    sent: bool

    @property
    def place(self) -> tuple[str, tuple[int, ...] | None]:
        """Key and start: the same for all copies of the part, whoever holds them."""
        return self.key, self.start

    @classmethod
    def from_json(cls, fields: list[Any]) -> StatePart:
        """Makes a part from what JSON has made of it: lists in place of tuples."""
        plain: Any = [tuple(value) if isinstance(value, list) else value for value in fields]
        return cls(*plain)


@dataclass(frozen=True)
class Price:
    """Price of copies: bytes of this rank's share of its node's memory (both slots), and bytes sent at a refresh."""

    memory_bytes: int
    sent_bytes: int


class Snapshots:
    """Writes the state of a model and its optimizer into the nodes' memory.

    `generation` is larger than that of any earlier process of the job.
    """

    def __init__(self, memory: NodeMemory, topology: Topology, nodes: JobNodes, generation: int) -> None:
        self._memory, self._topology, self._nodes, self._generation = memory, topology, nodes, generation
        rank = topology.world.index
        self._slots: list[Slot] = [memory.slot(f"{generation}-{rank}-{number}") for number in (0, 1)]
        self._written = 0
        # This rank's share of the cores: all ranks of the node do this at once.
        self._threads = max(1, len(os.sched_getaffinity(0)) // len(nodes.ranks(nodes.of_rank[rank])))
        self._digests: list[str] = []
        self._table: list[list[StatePart]] = []
        self.price = Price(0, 0)

    @torch.no_grad()
    def write(self, step: int, model: nn.Module, optimizer: Optimizers | None, extra: dict[str, Any]) -> None:
        """Keeps the state after `step` steps. Collective over all ranks.

        Raises:
            ConfigError: as for `save_checkpoint`.
            RankError: a rank has no room for it, failed or did not come; the state kept before stands.
        """
        nodes, world, operation = self._nodes, self._topology.world, f"keeping the state of step {step}"
        me = world.index
        state = ModelState(model, optimizer, self._topology, operation)
        parts: list[StatePart] = []
        values: list[Tensor] = []

        def collect() -> tuple[str, str]:
            # Every rank checks its own: `extra` is kept by one rank of each node, and restored on all.
            require_extra(extra, operation)
            digest = encode_value(extra, f"{operation}: {EXTRA}").digest()
            for part, value in _own_parts(state, self._topology, nodes, extra, operation):
                parts.append(part)
                values.append(value)
            return _digest(repr(parts).encode()), digest

        self._compare(parts, on_all_ranks(world, operation, collect), world, operation)
        bases: dict[int, int] = {}
        total = end_of(parts)
        for source in nodes.sources(me):
            bases[source] = total
            total += _sent_bytes(self._table[source])
        # The older slot: until this one is whole, on all nodes, the other one is the state to go on from.
        slot, memory = self._slots[self._written % 2], torch.empty(0, dtype=torch.uint8, device="cpu")

        def begin() -> None:
            nonlocal memory
            self._memory.check()
            memory = slot.begin(total)

        on_all_ranks(world, operation, begin)
        for part, value in zip(parts, values, strict=True):
            memory[part.at : part.at + part.bytes].copy_(value)
        # Only what this node alone holds is sent: of all else another node keeps a copy of its own ranks.
        sent, buddy = [_sent_bytes(of_rank) for of_rank in self._table], nodes.buddy(me)
        if buddy is not None:
            incoming = {source: memory[base : base + sent[source]] for source, base in bases.items()}
            exchange_bytes(world, {buddy: memory[: sent[me]]}, incoming, max(sent), operation)
        held = list(parts)
        for source, base in bases.items():
            held += [part._replace(at=base + part.at) for part in self._table[source] if part.sent]
        keys = {part.key: None if part.start is None else part.whole for of_rank in self._table for part in of_rank}
        header = {"format": FORMAT, "generation": self._generation, "step": step, "bytes": total, "keys": keys}
        # After the last byte: a header says that its bytes are whole.
        slot.commit(header | {"parts": held, "digests": part_digests(memory, held, self._threads)})
        self._written += 1
        self.price = Price(2 * total, sent[me])

    def _compare(self, parts: list[StatePart], of_ranks: list[tuple[str, str]], world: Group, operation: str) -> None:
        """Gather every rank's parts. Raise `RankError` if `extra` differs between ranks.

        Args:
            of_ranks: digests of each rank's parts and of its `extra`.
        """
        # Each node would keep that of one of its ranks.
        for rank, (_, of_extra) in zip(world.ranks, of_ranks, strict=True):
            if of_extra != of_ranks[0][1]:
                raise RankError(
                    f"{operation}: what refresh is given as `extra` differs between rank {world.ranks[0]} and rank "
                    f"{rank}. Give the same on every rank: gather into it what differs (all_gather_object)."
                )
        digests = [of_parts for of_parts, _ in of_ranks]
        # Parts change where experts change owners, and after a first step of the optimizer: seldom.
        if digests != self._digests:
            self._table = all_gather_object(world, parts, operation)
            self._digests = digests


def exchange_bytes(
    world: Group, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], longest: int, operation: str
) -> None:
    """Sends bytes to other ranks and receives theirs, by rank, [n] uint8. Collective over the world.

    `longest`: bytes of the longest of all ranks' tensors: all go through as many exchanges.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    # In chunks, because on a GPU they lie in its memory on the way, which training has filled.
    for start in range(0, longest, CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        rows = [outgoing.get(rank, nothing)[chunk] for rank in range(world.size)]
        places = [incoming.get(rank, nothing)[chunk] for rank in range(world.size)]
        send, recv = ([len(part) for part in parts] for parts in (rows, places))
        received = all_to_all_rows(world, torch.cat(rows).to(device_of(world)), send, recv, operation)
        for place, part in zip(places, received.split(recv), strict=True):
            place.copy_(part)


def generation_of(slot: str) -> int:
    """Reads the generation of a slot from its name."""
    return int(slot.split("-")[0])


def end_of(parts: Iterable[StatePart]) -> int:
    """Returns the bytes of a slot with these parts."""
    return max((_aligned(part.at + part.bytes) for part in parts), default=0)


def part_digests(memory: Tensor, parts: Sequence[StatePart], threads: int) -> list[str]:
    """Computes the digest of each part's bytes in a slot, with those up to the next part."""

    def digest(part: StatePart) -> str:
        return _digest(memory[part.at : _aligned(part.at + part.bytes)].numpy())

    # hashlib lets other threads run while it works.
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(digest, parts))


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _sent_bytes(parts: Iterable[StatePart]) -> int:
    return end_of(part for part in parts if part.sent)


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def _own_parts(
    state: ModelState, topology: Topology, nodes: JobNodes, extra: dict[str, Any], operation: str
) -> Iterator[tuple[StatePart, Tensor]]:
    """Yield the parts that this rank keeps and their values, parts to send first."""
    me = topology.world.index
    alone: set[str] = set()
    places = {rank: place for place, rank in enumerate(topology.world.ranks)}

    def wanted(key: str, group: Group) -> bool:
        holders = [places[rank] for rank in group.ranks]
        if nodes.on_one(holders) and nodes.count > 1:
            alone.add(key)
        return nodes.keeps(key, holders, me)

    entries = state.entries(wanted)
    for key, thing in ((EXTRA, extra), (ABOUT, state.about())):
        if wanted(key, topology.world):
            entries[key] = thing
    packed = {
        key: encode_value(entry, f"{operation}: {key}").pack()
        for key, entry in entries.items()
        if not isinstance(entry, Tensor)
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(entries | packed, None, True)
    items = planner.create_local_plan().items
    at = 0
    # What is sent stands first, so that it goes to the buddy as one piece of memory.
    for item in sorted(items, key=lambda item: item.index.fqn not in alone):
        key, data = item.index.fqn, planner.resolve_data(item)
        assert isinstance(data, Tensor) and item.tensor_data is not None
        value = tensor_bytes(data)
        if key in packed:
            part = StatePart(key, None, None, (), "", at, value.numel(), key in alone)
        else:
            require_writable(data, f"{operation}: {key}")
            chunk, dtype = item.tensor_data.chunk, str(data.dtype).removeprefix("torch.")
            place = tuple(chunk.offsets), tuple(chunk.sizes), tuple(item.tensor_data.size)
            part = StatePart(key, *place, dtype, at, value.numel(), key in alone)
        yield part, value
        at = _aligned(at + part.bytes)
