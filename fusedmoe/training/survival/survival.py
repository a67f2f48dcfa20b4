"""`Survival`: restore the newest complete in-memory snapshot of a job after a rank or a node is lost."""

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
from fusedmoe.experts.split_optimizers import Optimizers
from fusedmoe.training.checkpoint import ABOUT, EXTRA, ModelState
from fusedmoe.training.checkpoint_folder import local_tensor, require_writable
from fusedmoe.training.checkpoint_reader import PlainPlanner, item_elements, require_convertible, require_lossless
from fusedmoe.training.optimizer_state import GROUPS
from fusedmoe.training.plain_values import unpack_value
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.snapshot import (
    FORMAT,
    JobNodes,
    Price,
    Snapshots,
    StatePart,
    exchange_bytes,
    parse_generation,
    part_digests,
)

PartKey = tuple[str, tuple[int, ...] | None]


class Survival:
    """Keep a job's state in the memory of its nodes, each part on two nodes (FlowMoE, Appendix K.3).

    For jobs restarted by torchrun (`--max-restarts`, `--nnodes MIN:MAX`). After a rank or a node is lost, torchrun
    restarts the program on the remaining nodes, where

        survival = Survival(topology)
        extra = survival.restore(model, optimizer)  # None in a new job

    loads the newest complete snapshot, on any number of ranks and in any layout. In the training loop,

        survival.refresh(step, model, optimizer, {"step": step})

    replaces the snapshot. Called every n steps, it limits the repeated steps to n.

    Construction and all methods are collective over all ranks.

    Args:
        memory: of this node; by default bound to the lifetime of this rank's launcher.
    Attributes:
        step: of the snapshot, or None.
        lost: newer, incomplete snapshots as {step: keys with a part that no node has}.
        damaged: descriptions of damaged data.
    Raises:
        ConfigError: the system has no memory file system.
        RankError: a rank failed or is missing.
    """

    def __init__(self, topology: Topology, memory: NodeMemory | None = None) -> None:
        self._memory, self._topology = NodeMemory() if memory is None else memory, topology
        self._earlier_slots = self._memory.slots()
        last = max(map(parse_generation, self._earlier_slots), default=0)
        of_ranks = all_gather_object(topology.world, (self._memory.name, last), "comparing nodes")
        self._nodes = JobNodes.from_names([name for name, _ in of_ranks])
        # The caller removes a memory that it passed.
        if memory is None and self._nodes.is_node_leader(topology.world.index):
            self._memory.keep()
        self._stored_state, newer, self.damaged = find_newest_state(self._memory, topology, self._nodes)
        self.step = None if self._stored_state is None else self._stored_state.step
        self.lost = {state.step: state.missing() for state in newer}
        # Snapshots of this process are newer than earlier ones, whatever their step.
        generation = max(last for _, last in of_ranks) + 1
        self._snapshots = Snapshots(self._memory, topology, self._nodes, generation)
        self._keeps_earlier_slots = True

    @property
    def nodes(self) -> int:
        """Number of nodes of the job. With one, no part is stored twice."""
        return self._nodes.count

    @property
    def price(self) -> Price:
        """Memory and communication of the last refresh for this rank."""
        return self._snapshots.price

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: Optimizers | None) -> dict[str, Any] | None:
        """Load the newest complete snapshot in place and return the `extra` of its refresh; None without a snapshot.

        Raises:
            ConfigError: model or optimizer differ, values do not fit the model's dtypes, or all snapshots are damaged.
        """
        if self._stored_state is None:
            if self.damaged:
                raise ConfigError(
                    "restoring from memory: the state of the job is damaged, and there is no other: "
                    f"{'; '.join(self.damaged)}: digest mismatch. Resume from a checkpoint; the next refresh removes "
                    "the damaged state."
                )
            return None
        operation = "restoring from memory"
        state = ModelState(model, optimizer, self._topology, operation)
        stored, metadata = self._stored_state, self._stored_state.metadata()
        keys = [key for key in (EXTRA, ABOUT, GROUPS) if key in metadata.state_dict_metadata]
        metadata_values: dict[str, Any] = dict.fromkeys(keys)
        stored.read(metadata_values, {})
        targets: dict[str, Any] = {}

        def compare() -> None:
            difference = state.model_difference(metadata) or state.optimizer_difference(metadata_values)
            if difference is not None:
                raise ConfigError(f"{operation}: {difference}")
            targets.update(state.targets(metadata))

        on_all_ranks(self._topology.world, operation, compare)
        stored.read(targets, state.dtypes(targets))
        state.install(targets, metadata_values)
        extra: dict[str, Any] = metadata_values[EXTRA]
        return extra

    def refresh(
        self, step: int, model: nn.Module, optimizer: Optimizers | None, extra: dict[str, Any] | None = None
    ) -> None:
        """Store the state after `step` steps. Call between steps, never inside one.

        Args:
            extra: additional state as for `save_checkpoint`, the same on every rank.
        Raises:
            ConfigError: as for `save_checkpoint`.
            RankError: `extra` differs between ranks; or a rank failed, is missing, or lacks memory. The previous
                snapshot remains.
        """
        self._snapshots.write(step, model, optimizer, {} if extra is None else extra)
        if self._keeps_earlier_slots:
            # Wait until all nodes have the new snapshot. Later refreshes overwrite the older of two slots.
            all_gather_object(self._topology.world, None, "keeping the first state")
            if self._nodes.is_node_leader(self._topology.world.index):
                for slot in self._earlier_slots:
                    self._memory.remove(slot)
            self._keeps_earlier_slots, self._earlier_slots, self._stored_state = False, [], None

    def close(self) -> None:
        """Remove the snapshots of a completed job. Do not call it after an error."""
        all_gather_object(self._topology.world, None, "ending the job")
        if self._nodes.is_node_leader(self._topology.world.index):
            for slot in self._memory.slots():
                self._memory.remove(slot)


@dataclass(frozen=True)
class StoredPart:
    node: int
    slot: str
    part: StatePart
    digest: str


class StoredState:
    """State of a job at one step, as available in the nodes' memory.

    Attributes:
        parts: copies of each part, by key and offsets.
        sizes: bytes of each slot, by node and slot name.
    """

    def __init__(
        self,
        step: int,
        headers: Iterable[tuple[int, str, dict[str, Any]]],
        memory: NodeMemory,
        topology: Topology,
        nodes: JobNodes,
    ) -> None:
        self.step, self._memory, self._topology, self._nodes = step, memory, topology, nodes
        self.parts: dict[PartKey, list[StoredPart]] = {}
        self.sizes: dict[tuple[int, str], int] = {}
        self._keys: dict[str, list[int] | None] = {}
        self._slot_bytes: dict[str, Tensor] = {}
        for node, slot, header in headers:
            self.sizes[node, slot] = header["bytes"]
            self._keys |= header["keys"]
            for fields, digest in zip(header["parts"], header["digests"], strict=True):
                part = StatePart.from_json(fields)
                self.parts.setdefault(part.part_key, []).append(StoredPart(node, slot, part, digest))

    def damaged_parts(self, slot: tuple[int, str]) -> list[StoredPart]:
        """Return the parts in a slot of this node whose digest does not match, with a warning."""
        copies = [held for copies in self.parts.values() for held in copies if (held.node, held.slot) == slot]
        memory = self._memory.slot(slot[1])
        try:
            digests = part_digests(memory.read(self.sizes[slot]), [held.part for held in copies], 1)
        except ConfigError as error:
            warn(str(error), stacklevel=2)
            return copies
        wrong = [held for held, digest in zip(copies, digests, strict=True) if held.digest != digest]
        if wrong:
            warn(
                f"survival: {memory} is damaged: {len(wrong)} parts, {wrong[0].part.key} the first, do not match their "
                "digests; using another copy or an older state",
                stacklevel=2,
            )
        return wrong

    def remove_parts(self, damaged: Iterable[StoredPart]) -> None:
        for held in damaged:
            place = held.part.part_key
            self.parts[place].remove(held)
            if not self.parts[place]:
                del self.parts[place]

    def missing(self) -> list[str]:
        """List the keys with a part that no node has."""
        # Parts do not overlap.
        volumes: dict[str, int] = defaultdict(int)
        for (key, _), (held, *_) in self.parts.items():
            volumes[key] += 1 if held.part.size is None else math.prod(held.part.size)
        wholes = {key: 1 if shape is None else math.prod(shape) for key, shape in self._keys.items()}
        return [key for key, whole in wholes.items() if key not in volumes or volumes[key] < whole]

    def metadata(self) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        entries: dict[str, Any] = {}
        for (key, start), (held, *_) in sorted(self.parts.items(), key=lambda item: repr(item[0])):
            part = held.part
            if start is None or part.size is None:
                entries[key] = BytesStorageMetadata()
                continue
            chunks[key].append(ChunkStorageMetadata(torch.Size(start), torch.Size(part.size)))
            properties = TensorProperties(dtype=getattr(torch, part.dtype))
            entries[key] = TensorStorageMetadata(properties, torch.Size(part.full_shape), chunks[key])
        return Metadata(entries)

    def read(self, targets: dict[str, Any], target_dtypes: dict[str, torch.dtype]) -> None:
        """Read the entries in `targets`: tensors in place, objects into the dictionary. Collective.

        Raises:
            ConfigError, RankError: a target cannot be written, or a value does not fit its dtype in `target_dtypes`; no
                tensor was modified.
        """
        planners: list[PlainPlanner] = []

        def plan() -> None:
            for key, target in targets.items():
                if isinstance(target, Tensor):
                    require_writable(local_tensor(target), f"restoring from memory: {key}")
            planners.append(PlainPlanner(targets, self.metadata()))

        on_all_ranks(self._topology.world, "planning what to read from memory", plan)
        (planner,) = planners
        items = planner.items
        fetched = self._fetch_parts(list(dict.fromkeys(map(_part_key, items))))
        tensors = [(item, self._read_value(item, fetched)) for item in items if item.type is not LoadItemType.BYTE_IO]

        # All ranks check before any rank writes: either all load the state or none does.
        def check() -> None:
            for item, value in tensors:
                key = item.dest_index.fqn
                require_convertible("restoring from memory", key, value.dtype, target_dtypes[key])
                require_lossless("restoring from memory", key, value, target_dtypes[key])

        on_all_ranks(self._topology.world, "checking the values in memory", check)
        # Values first: an invalid value leaves all tensors unchanged.
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                targets[item.dest_index.fqn] = unpack_value(fetched[_part_key(item)])
        for item, value in tensors:
            planner.copy(item, value)

    def _read_value(self, item: Any, fetched: dict[PartKey, Tensor]) -> Tensor:
        part = self.parts[_part_key(item)][0].part
        assert part.size is not None
        return item_elements(item, fetched[_part_key(item)].view(getattr(torch, part.dtype)).view(part.size))

    def _fetch_parts(self, keys: list[PartKey]) -> dict[PartKey, Tensor]:
        world = self._topology.world
        node = self._nodes.node_of_rank[world.index]

        def own(place: PartKey) -> StoredPart | None:
            return next((held for held in self.parts[place] if held.node == node), None)

        fetched = {place: self._read_bytes(held) for place in keys if (held := own(place)) is not None}
        requests = all_gather_object(world, [place for place in keys if place not in fetched], "requesting parts")
        streams: dict[tuple[int, int], list[PartKey]] = defaultdict(list)  # from, to
        for rank, places in enumerate(requests):
            for place in places:
                streams[self._source_rank(place, rank), rank].append(place)
        lengths = {pair: [self.parts[place][0].part.bytes for place in places] for pair, places in streams.items()}
        outgoing = {
            to: torch.cat([self._read_bytes(own(place)) for place in places])
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
            # Cloned for alignment.
            pieces = [piece.clone() for piece in received.split(lengths[stream])]
            fetched |= dict(zip(streams[stream], pieces, strict=True))
        return fetched

    def _source_rank(self, key: PartKey, reader: int) -> int:
        """Return the rank that sends a part to a reader; deterministic on all ranks."""
        # The hash distributes parts over nodes; the reader's number distributes them over a node's ranks.
        holding_nodes = sorted({held.node for held in self.parts[key]})
        part_hash = zlib.crc32(repr(key).encode())
        ranks = self._nodes.ranks(holding_nodes[part_hash % len(holding_nodes)])
        return ranks[(part_hash // len(holding_nodes) + reader) % len(ranks)]

    def _read_bytes(self, held: StoredPart | None) -> Tensor:
        assert held is not None
        if held.slot not in self._slot_bytes:
            self._slot_bytes[held.slot] = self._memory.slot(held.slot).read(self.sizes[held.node, held.slot])
        return self._slot_bytes[held.slot][held.part.offset : held.part.offset + held.part.bytes]


def find_newest_state(
    memory: NodeMemory, topology: Topology, nodes: JobNodes
) -> tuple[StoredState | None, list[StoredState], list[str]]:
    """Find the newest complete state. Collective, with the same result on every rank.

    The ranks of each node verify the digests of all data stored there.

    Returns:
        The state or None; newer, incomplete states; and descriptions of damaged files.
    """
    world, me = topology.world, topology.world.index
    node, operation = nodes.node_of_rank[me], "finding the job's state in memory"

    def read_headers() -> dict[str, tuple[str, dict[str, Any] | None]]:
        headers = memory.headers() if nodes.is_node_leader(me) else {}
        return {slot: (str(memory.slot(slot)), header) for slot, header in headers.items()}

    headers_of_ranks = on_all_ranks(world, operation, read_headers)
    paths: dict[tuple[int, str], str] = {}
    headers_by_state: dict[tuple[int, int], list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    newer: list[StoredState] = []
    damaged: list[str] = []
    for rank, headers in enumerate(headers_of_ranks):
        for slot, (path, header) in headers.items():
            paths[nodes.node_of_rank[rank], slot] = path
            if header is None or header.get("format") != FORMAT:
                damaged.append(f"the header of {path} on rank {world.ranks[rank]}'s host")
            else:
                headers_by_state[header["generation"], header["step"]].append((nodes.node_of_rank[rank], slot, header))

    def check(state: StoredState) -> list[StoredPart]:
        slots, ranks = sorted(slot for its_node, slot in state.sizes if its_node == node), nodes.ranks(node)
        own_slots = slots[ranks.index(me) :: len(ranks)]
        return [held for slot in own_slots for held in state.damaged_parts((node, slot))]

    # Latest generation first: a restart from an older state repeats steps with different results.
    for generation, step in sorted(headers_by_state, reverse=True):
        state = StoredState(step, headers_by_state[generation, step], memory, topology, nodes)
        if not state.missing():
            of_ranks = on_all_ranks(world, "checking the job's state in memory", partial(check, state))
            for rank, copies in enumerate(of_ranks):
                state.remove_parts(copies)
                slots = dict.fromkeys((held.node, held.slot) for held in copies)
                damaged += [f"{paths[slot]} on rank {world.ranks[rank]}'s host" for slot in slots]
        if not state.missing():
            return state, newer, damaged
        newer.append(state)
    return None, newer, damaged


def _part_key(item: Any) -> PartKey:
    index = item.storage_index
    return index.fqn, None if item.type is LoadItemType.BYTE_IO else tuple(index.offset)
