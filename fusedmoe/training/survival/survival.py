"""`Survival`, which a training loop calls so that it goes on after a rank or a node is lost.

It finds the newest state of a job that is whole in its nodes' memory, and hands each rank its parts of it. Whatever
ranks wrote it, any others read it: a rank reads what its node has, and gets from other nodes what is only there.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
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

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, warn
from fusedmoe.training.checkpoint import ABOUT, EXTRA, ModelState
from fusedmoe.training.checkpoint_folder import own_part, require_writable
from fusedmoe.training.checkpoint_reader import PlainPlanner
from fusedmoe.training.kept_numbers import refuse_lost, require_convertible
from fusedmoe.training.optimizer_state import GROUPS
from fusedmoe.training.optimizers import Optimizers
from fusedmoe.training.plain_values import unpack_value
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.snapshot import (
    FORMAT,
    JobNodes,
    Price,
    Snapshots,
    StatePart,
    exchange_bytes,
    generation_of,
    part_digests,
)

Place = tuple[str, tuple[int, ...] | None]


class Survival:
    """Keeps a job's state in the memory of its nodes, each part on two of them (FlowMoE, Appendix K.3).

    For jobs that torchrun restarts (`--max-restarts`, `--nnodes MIN:MAX`). When a rank or a node is lost, the other
    ranks end with their error; torchrun meets with the nodes that are left and starts the program anew, in which

        survival = Survival(topology)
        extra = survival.restore(model, optimizer)  # None in a job that begins

    gives back the newest state that is whole, on any number of ranks and in any layout. In the loop,

        survival.refresh(step, model, optimizer, {"step": step})

    keeps a newer one: every step, or every n, after which at most n steps are done again, and none twice. A rank that
    is killed costs no state: its node's memory outlives it. A node that is lost takes one copy of each part with it.

    Collective over all ranks, as are all its methods.

    Args:
        memory: of this node; by default that of this rank's launcher, with which it goes.
    Attributes:
        step: of the state that was found, None without one.
        lost: keys of a newer state of which some part was on no node any more, by step.
        damaged: what of memory was not as it was written, and so was not taken for a copy; a warning named each.
    Raises:
        ConfigError: this system has no memory for it.
        RankError: a rank failed, or did not come.
    """

    def __init__(self, topology: Topology, memory: NodeMemory | None = None) -> None:
        self._memory, self._topology = NodeMemory() if memory is None else memory, topology
        self._earlier = self._memory.slots()  # unfinished ones, too
        last = max(map(generation_of, self._earlier), default=0)
        of_ranks = all_gather_object(topology.world, (self._memory.name, last), "comparing nodes")
        self._nodes = JobNodes.from_names([name for name, _ in of_ranks])
        # A memory that was given has an owner that removes it.
        if memory is None and self._nodes.speaks(topology.world.index):
            self._memory.keep()
        self._found, newer, self.damaged = find(self._memory, topology, self._nodes)
        self.step = None if self._found is None else self._found.step
        self.lost = {state.step: state.missing() for state in newer}
        # Larger than any before on any node: what this process keeps is newer than what was found, whatever its step.
        generation = max(last for _, last in of_ranks) + 1
        self._snapshots = Snapshots(self._memory, topology, self._nodes, generation)
        self._first = True

    @property
    def nodes(self) -> int:
        """Number of nodes of the job; with one, no part can be kept on two."""
        return self._nodes.count

    @property
    def price(self) -> Price:
        """Price of the last refresh, in bytes of this rank's node and link."""
        return self._snapshots.price

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: Optimizers | None) -> dict[str, Any] | None:
        """Loads the newest whole state, in place, and returns the `extra` of its refresh; None without one.

        Raises:
            ConfigError: it is of another model or optimizer, has numbers that the model's dtypes cannot hold, or all
                there was is damaged.
        """
        if self._found is None:
            if self.damaged:
                raise ConfigError(
                    f"going on from memory: the state of the job is damaged, and there is no other: "
                    f"{'; '.join(self.damaged)} is not as it was written. Go on from a checkpoint; the next refresh "
                    "removes the damaged state."
                )
            return None
        operation = "going on from memory"
        state = ModelState(model, optimizer, self._topology, operation)
        reader = Reader(self._found, self._memory, self._topology, self._nodes)
        metadata = reader.metadata
        keys = [key for key in (EXTRA, ABOUT, GROUPS) if key in metadata.state_dict_metadata]
        small: dict[str, Any] = dict.fromkeys(keys)
        # Small values first: they say whether the rest is of this model and optimizer at all.
        reader.read(small, {})
        targets: dict[str, Any] = {}

        def compare() -> None:
            difference = state.difference(metadata) or state.optimizer_difference(small)
            if difference is not None:
                raise ConfigError(f"{operation}: {difference}")
            targets.update(state.targets(metadata))

        on_all_ranks(self._topology.world, operation, compare)
        reader.read(targets, state.dtypes(targets))
        state.install(targets, small)
        extra: dict[str, Any] = small[EXTRA]
        return extra

    def refresh(
        self, step: int, model: nn.Module, optimizer: Optimizers | None, extra: dict[str, Any] | None = None
    ) -> None:
        """Keeps the state after so many steps; between two steps, never inside one.

        Args:
            extra: whatever else the run needs, the same on every rank; as for `save_checkpoint`.
        Raises:
            RankError: `extra` differs between ranks, a rank has no room, failed or did not come; the state kept before
                stands.
        """
        self._snapshots.write(step, model, optimizer, {} if extra is None else extra)
        if self._first:
            # Once all nodes have the new one: until then the state of before is the only whole one. Later refreshes
            # need no such wait: of two slots the older one is written.
            all_gather_object(self._topology.world, None, "keeping the first state")
            if self._nodes.speaks(self._topology.world.index):
                for slot in self._earlier:
                    self._memory.remove(slot)
            self._first, self._earlier, self._found = False, [], None

    def close(self) -> None:
        """Removes the state: the job is through. Collective; not for a job that ends with an error."""
        all_gather_object(self._topology.world, None, "ending the job")
        if self._nodes.speaks(self._topology.world.index):
            for slot in self._memory.slots():
                self._memory.remove(slot)


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
        parts: by what they are of, all that hold them.
        sizes: of the slots that have it, by node and name; in bytes.
    """

    def __init__(self, step: int, headers: Iterable[tuple[int, str, dict[str, Any]]]) -> None:
        self.step = step
        self.parts: dict[Place, list[Held]] = {}
        self.sizes: dict[tuple[int, str], int] = {}
        self._keys: dict[str, list[int] | None] = {}
        for node, slot, header in headers:
            self.sizes[node, slot] = header["bytes"]
            self._keys |= header["keys"]
            for fields, digest in zip(header["parts"], header["digests"], strict=True):
                part = StatePart.from_json(fields)
                self.parts.setdefault(part.place, []).append(Held(node, slot, part, digest))

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
        wholes = {key: 1 if shape is None else math.prod(shape) for key, shape in self._keys.items()}
        return [key for key, whole in wholes.items() if key not in volumes or volumes[key] < whole]

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


def find(
    memory: NodeMemory, topology: Topology, nodes: JobNodes
) -> tuple[KeptState | None, list[KeptState], list[str]]:
    """Looks for the newest state that is whole. Collective; the same on every rank.

    Every bit of it is as it was written: the ranks of each node check what lies there.

    Returns:
        The state, None without one; newer ones of which some part is nowhere; and the names of files of which something
        is not as it was written.
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
        slots, ranks = sorted(slot for its_node, slot in state.sizes if its_node == node), nodes.ranks(node)
        return [held for slot in slots[ranks.index(me) :: len(ranks)] for held in _damaged(memory, state, (node, slot))]

    # Of the newest process first: after a restart from an older state the same steps are done again, and differ.
    for generation, step in sorted(kept, reverse=True):
        state = KeptState(step, kept[generation, step])
        if not state.missing():
            of_ranks = on_all_ranks(world, "checking the job's state in memory", partial(check, state))
            for rank, copies in enumerate(of_ranks):
                state.drop(copies)
                slots = dict.fromkeys((held.node, held.slot) for held in copies)
                damaged += [f"{paths[slot]} on rank {world.ranks[rank]}'s host" for slot in slots]
        if not state.missing():
            return state, newer, damaged
        newer.append(state)
    return None, newer, damaged


def _damaged(memory: NodeMemory, state: KeptState, slot: tuple[int, str]) -> list[Held]:
    """Lists the parts in a slot that are not as they were written; a warning says so."""
    copies = [held for every in state.parts.values() for held in every if (held.node, held.slot) == slot]
    try:
        data = memory.slot(slot[1]).read(state.sizes[slot])
        digests = part_digests(data, [held.part for held in copies], 1)
    except ConfigError as error:
        warn(str(error), stacklevel=2)
        return copies
    wrong = [held for held, digest in zip(copies, digests, strict=True) if held.digest != digest]
    if wrong:
        warn(
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
            for key, target in targets.items():
                if isinstance(target, Tensor):
                    require_writable(own_part(target), f"going on from memory: {key}")
            planner.set_up_planner(targets, self.metadata, True)
            items.extend(planner.finish_plan(planner.create_local_plan()).items)

        on_all_ranks(self._topology.world, "planning what to read from memory", plan)
        fetched = self._fetch(list(dict.fromkeys(map(_place, items))))
        tensors = [(item, self._value(item, fetched)) for item in items if item.type is not LoadItemType.BYTE_IO]

        # All ranks look before one of them writes into its model: a state is loaded by all or by none.
        def check() -> None:
            for item, value in tensors:
                key = item.dest_index.fqn
                require_convertible("going on from memory", key, value.dtype, become[key])
                refuse_lost("going on from memory", key, value, become[key])

        on_all_ranks(self._topology.world, "looking at the numbers in memory", check)
        # Values before tensors, as in a checkpoint: one that is refused has changed no tensor yet.
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                targets[item.dest_index.fqn] = unpack_value(fetched[_place(item)])
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
        world, parts = self._topology.world, self._state.parts
        node = self._nodes.of_rank[world.index]

        # A node has a part once, whichever of its ranks hold it.
        def own(place: Place) -> Held | None:
            return next((held for held in parts[place] if held.node == node), None)

        fetched = {place: self._bytes(held) for place in wanted if (held := own(place)) is not None}
        asked = all_gather_object(world, [place for place in wanted if place not in fetched], "asking for parts")
        # All ranks make the same table from all requests: nobody has to be told what it sends.
        streams: dict[tuple[int, int], list[Place]] = defaultdict(list)  # from, to
        for rank, places in enumerate(asked):
            for place in places:
                streams[self._source(place, rank), rank].append(place)
        lengths = {pair: [parts[place][0].part.bytes for place in places] for pair, places in streams.items()}
        outgoing = {
            to: torch.cat([self._bytes(own(place)) for place in places])
            for (source, to), places in streams.items()
            if source == world.index
        }
        incoming = {
            source: torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            for (source, to), sizes in lengths.items()
            if to == world.index
        }
        longest = max(map(sum, lengths.values()), default=0)
        exchange_bytes(world, outgoing, incoming, longest, "reading the state of other nodes")
        for source, received in incoming.items():
            stream = source, world.index
            # Copied, so that each begins where any dtype may.
            pieces = [piece.clone() for piece in received.split(lengths[stream])]
            fetched |= dict(zip(streams[stream], pieces, strict=True))
        return fetched

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
            self._open[held.slot] = self._memory.slot(held.slot).read(self._state.sizes[held.node, held.slot])
        return self._open[held.slot][held.part.at : held.part.at + held.part.bytes]


def _place(item: Any) -> Place:
    index = item.storage_index
    return index.fqn, None if item.type is LoadItemType.BYTE_IO else tuple(index.offset)
