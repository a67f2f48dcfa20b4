"""Finds the newest state of a job that is whole in its nodes' memory, and hands each rank its parts of it.

Whatever ranks wrote it, any others read it: a rank reads what its node has, and gets from other nodes what is only
there. Only what it needs travels.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.optim import Optimizer

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.checkpoint import ABOUT, EXTRA, GROUPS, ModelState
from fusedmoe.training.checkpoint_folder import PlainPlanner, refuse_lost
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.snapshot import FORMAT, JobNodes, StatePart, exchange_bytes, part_digests

Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class Held:
    """Copy of a part in a slot of some node."""

    node: int
    slot: str
    part: StatePart
    digest: str


class KeptState:
    """The state of a job at one step, as far as the nodes' memory has it.

    Attributes:
        generation, step: when it was kept.
        parts: by what they are of, all that hold them.
        slots: that have it, by node.
    """

    def __init__(self, generation: int, step: int, headers: Iterable[tuple[int, str, dict[str, Any]]]) -> None:
        self.generation, self.step = generation, step
        self.parts: dict[Place, list[Held]] = {}
        self.slots: set[tuple[int, str]] = set()
        self._sizes: dict[tuple[int, str], int] = {}
        self._keys: dict[str, list[int] | None] = {}
        for node, slot, header in headers:
            self.slots.add((node, slot))
            self._sizes[node, slot] = header["bytes"]
            self._keys |= header["keys"]
            for fields, digest in zip(header["parts"], header["digests"], strict=True):
                part = StatePart.from_json(fields)
                self.parts.setdefault(part.place, []).append(Held(node, slot, part, digest))

    def held_in(self, node: int, slot: str) -> list[Held]:
        """Lists the copies in a slot."""
        return [held for every in self.parts.values() for held in every if (held.node, held.slot) == (node, slot)]

    def drop(self, damaged: Iterable[Held]) -> None:
        """Forgets copies."""
        for held in damaged:
            place = held.part.place
            self.parts[place].remove(held)
            if not self.parts[place]:
                del self.parts[place]

    def missing(self) -> list[str]:
        """Lists the keys of which some part is on no node."""
        # Parts of a tensor do not overlap, so it is whole where they have as many elements as it.
        volumes: dict[str, int] = defaultdict(int)
        for (key, _), (held, *_) in self.parts.items():
            volumes[key] += 1 if held.part.size is None else math.prod(held.part.size)
        return [
            key
            for key, whole in self._keys.items()
            if key not in volumes or volumes[key] < (1 if whole is None else math.prod(whole))
        ]

    def metadata(self) -> Metadata:
        """Returns the index of what it holds, as a checkpoint has it."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        entries: dict[str, Any] = {}
        for (key, start), (held, *_) in sorted(self.parts.items(), key=lambda item: repr(item[0])):
            part = held.part
            if start is None or part.size is None:
                entries[key] = BytesStorageMetadata()
                continue
            chunks[key].append(ChunkStorageMetadata(torch.Size(start), torch.Size(part.size)))
            properties = TensorProperties(dtype=getattr(torch, part.dtype))
            entries[key] = TensorStorageMetadata(properties, torch.Size(part.whole), chunks[key])
        return Metadata(entries)

    def bytes_of(self, slot: tuple[int, str]) -> int:
        """Returns the size of a slot of a node."""
        return self._sizes[slot]


@dataclass(frozen=True)
class Found:
    """Result of a look into the nodes' memory.

    Attributes:
        state: the newest one that is whole.
        newer: those of which some part is nowhere.
        damaged: files of which something is not as it was written.
    """

    state: KeptState | None
    newer: list[KeptState]
    damaged: list[str]


def find(memory: NodeMemory, topology: Topology, nodes: JobNodes) -> Found:
    """Looks for the newest whole state. Collective; the same on every rank.

    Every bit of it is as it was written: the ranks of each node check what lies there.
    """
    world, me = topology.world, topology.world.index
    node, operation = nodes.of_rank[me], "looking for the job's state in memory"

    def look() -> dict[str, tuple[str, dict[str, Any] | None]]:
        headers = memory.headers() if nodes.speaks(me) else {}
        return {slot: (str(memory.slot(slot)), header) for slot, header in headers.items()}

    headers_of_ranks = on_all_ranks(world, operation, look)
    paths: dict[tuple[int, str], str] = {}
    kept: dict[tuple[int, int], list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    newer: list[KeptState] = []
    damaged: list[str] = []
    for rank, headers in enumerate(headers_of_ranks):
        for slot, (path, header) in headers.items():
            paths[nodes.of_rank[rank], slot] = path
            if header is None or header.get("format") != FORMAT:
                damaged.append(f"the header of {path} on rank {world.ranks[rank]}'s host")
            else:
                kept[header["generation"], header["step"]].append((nodes.of_rank[rank], slot, header))

    def check(state: KeptState) -> list[Held]:
        # The ranks of a node share its slots: digests take as long as memory is read.
        slots, ranks = sorted(slot for its_node, slot in state.slots if its_node == node), nodes.ranks(node)
        return [held for slot in slots[ranks.index(me) :: len(ranks)] for held in _damaged(memory, state, (node, slot))]

    # Of the newest process first: after a restart from an older state the same steps are done again, and differ.
    for generation, step in sorted(kept, reverse=True):
        state = KeptState(generation, step, kept[generation, step])
        if not state.missing():
            of_ranks = on_all_ranks(world, "checking the job's state in memory", partial(check, state))
            for rank, copies in enumerate(of_ranks):
                state.drop(copies)
                slots = dict.fromkeys((held.node, held.slot) for held in copies)
                damaged += [f"{paths[slot]} on rank {world.ranks[rank]}'s host" for slot in slots]
        if not state.missing():
            return Found(state, newer, damaged)
        newer.append(state)
    return Found(None, newer, damaged)


def _damaged(memory: NodeMemory, state: KeptState, slot: tuple[int, str]) -> list[Held]:
    """Lists the parts in a slot that are not as they were written; a warning says so."""
    copies = state.held_in(*slot)
    try:
        data = memory.slot(slot[1]).read(state.bytes_of(slot))
        digests = part_digests(data, [held.part for held in copies], 1)
    except ConfigError as error:
        warnings.warn(str(error), stacklevel=2)
        return copies
    wrong = [held for held, digest in zip(copies, digests, strict=True) if held.digest != digest]
    if wrong:
        warnings.warn(
            f"survival: {memory.slot(slot[1])} is damaged: {len(wrong)} parts, {wrong[0].part.key} the first, are not "
            "as they were written; another copy is looked for, or an older state",
            stacklevel=2,
        )
    return wrong


class Reader:
    """Reads parts of a kept state; every call is collective over all ranks."""

    def __init__(self, state: KeptState, memory: NodeMemory, topology: Topology, nodes: JobNodes) -> None:
        self._state, self._memory, self._topology, self._nodes = state, memory, topology, nodes
        self.metadata = state.metadata()
        self._open: dict[str, Tensor] = {}

    def read(self, targets: dict[str, Any], become: dict[str, torch.dtype]) -> None:
        """Reads what `targets` names: tensors in place, objects into the dictionary.

        Raises:
            ConfigError, RankError: a number is lost in the dtype that its tensor is to `become`; nothing was read.
        """
        planner = PlainPlanner()
        items: list[Any] = []

        def plan() -> None:
            planner.set_up_planner(targets, self.metadata, True)
            items.extend(planner.finish_plan(planner.create_local_plan()).items)

        on_all_ranks(self._topology.world, "planning what to read from memory", plan)
        fetched = self._fetch(list(dict.fromkeys(_place(item) for item in items)))
        tensors = [(item, self._value(item, fetched)) for item in items if item.type is not LoadItemType.BYTE_IO]

        # All ranks look before one of them writes into its model: a state is loaded by all or by none.
        def check() -> None:
            for item, value in tensors:
                key = item.dest_index.fqn
                refuse_lost("going on from memory", key, value, become[key])

        on_all_ranks(self._topology.world, "looking at the numbers in memory", check)
        # Values before tensors, as in a checkpoint: one that is refused has changed no tensor yet.
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, BytesIO(fetched[_place(item)].numpy().tobytes()))
        for item, value in tensors:
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

    def _value(self, item: Any, fetched: dict[Place, Tensor]) -> Tensor:
        """Cuts the tensor of an item out of the bytes that were fetched."""
        part = self._state.parts[_place(item)][0].part
        assert part.size is not None
        value = fetched[_place(item)].view(getattr(torch, part.dtype)).view(part.size)
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dim, offset, length)
        return value

    def _fetch(self, wanted: list[Place]) -> dict[Place, Tensor]:
        """Returns the bytes of these parts, from this node's memory or another's."""
        world, nodes = self._topology.world, self._nodes
        node = nodes.of_rank[world.index]
        own = {place: held for place in wanted if (held := self._on(node, place)) is not None}
        fetched = {place: self._bytes(held) for place, held in own.items()}
        asked = all_gather_object(world, [place for place in wanted if place not in own], "asking for parts")
        # All ranks make the same table from all requests: nobody has to be told what it sends.
        streams: dict[tuple[int, int], list[Place]] = defaultdict(list)  # from, to
        for rank, places in enumerate(asked):
            for place in places:
                streams[self._source(place, rank), rank].append(place)
        sizes = {pair: sum(self._size(place) for place in places) for pair, places in streams.items()}
        outgoing = {
            to: torch.cat([self._bytes(self._on(node, place)) for place in places])
            for (source, to), places in streams.items()
            if source == world.index
        }
        incoming = {
            source: torch.empty(size, dtype=torch.uint8) for (source, to), size in sizes.items() if to == world.index
        }
        exchange_bytes(world, outgoing, incoming, max(sizes.values(), default=0), "reading the state of other nodes")
        for source, received in incoming.items():
            places = streams[source, world.index]
            parts = received.split([self._size(place) for place in places])
            fetched |= {place: part.clone() for place, part in zip(places, parts, strict=True)}  # aligned for any dtype
        return fetched

    def _size(self, place: Place) -> int:
        return self._state.parts[place][0].part.bytes

    def _on(self, node: int, place: Place) -> Held | None:
        return next((held for held in self._state.parts[place] if held.node == node), None)

    def _source(self, place: Place, reader: int) -> int:
        """Returns the rank that sends a part to a reader: by chance, but the same everywhere."""
        # By a hash of the part, so that no node sends everything; and in turn over its ranks, by reader.
        having = sorted({held.node for held in self._state.parts[place]})
        chance = zlib.crc32(repr(place).encode())
        ranks = self._nodes.ranks(having[chance % len(having)])
        return ranks[(chance // len(having) + reader) % len(ranks)]

    def _bytes(self, held: Held | None) -> Tensor:
        assert held is not None
        # Mapped once, however many parts of it are read.
        if held.slot not in self._open:
            size = self._state.bytes_of((held.node, held.slot))
            self._open[held.slot] = self._memory.slot(held.slot).read(size)
        return self._open[held.slot][held.part.at : held.part.at + held.part.bytes]


def _place(item: Any) -> Place:
    index = item.storage_index
    return index.fqn, None if item.type is LoadItemType.BYTE_IO else tuple(index.offset)


@torch.no_grad()
def load(reader: Reader, model: nn.Module, optimizer: Optimizer | None, topology: Topology) -> dict[str, Any]:
    """Loads a kept state into model and optimizer, in place, and returns its `extra`. Collective over all ranks.

    Raises:
        ConfigError: it is of another model or optimizer, or has numbers that the model's dtypes cannot hold.
        RankError: a rank failed, or did not come.
    """
    operation = "going on from memory"
    state = ModelState(model, optimizer, topology, operation)
    there = reader.metadata.state_dict_metadata
    small: dict[str, Any] = dict.fromkeys(key for key in (EXTRA, ABOUT, GROUPS) if key in there)
    # Small values first: they say whether the rest is of this model and optimizer at all.
    reader.read(small, {})
    targets: dict[str, Any] = {}

    def compare() -> None:
        difference = state.difference(reader.metadata) or state.optimizer_difference(small)
        if difference is not None:
            raise ConfigError(f"{operation}: {difference}")
        targets.update(state.targets(reader.metadata))

    on_all_ranks(topology.world, operation, compare)
    reader.read(targets, state.dtypes(targets))
    state.install(targets, small)
    extra: dict[str, Any] = small[EXTRA]
    return extra
