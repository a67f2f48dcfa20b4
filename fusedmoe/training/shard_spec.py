"""Specs of a model's tensors for a checkpoint: this rank's part of each, and its place in the whole tensor."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import NAMED, NUMBERS, experts_of
from fusedmoe.experts.sharding import active_shardings
from fusedmoe.training.copies import holders, local_part

Shapes = dict[str, tuple[int, ...]]


class RowShard(Tensor):
    """Some rows of a whole tensor, or the same slice of each of them; a DTensor has its rows in order.

    Consecutive rows are written and read as one part. A checkpoint does not depend on how the rows were spread.

    Args:
        part: [n, ...], in whose memory they lie.
        numbers: which rows of the whole, n of them.
        shape: of the whole.
        starts: where `part` begins in the whole, by dimension; that of the rows is not read.
    """

    part: Tensor
    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls, part: Tensor, numbers: Sequence[int], shape: Sequence[int], starts: Sequence[int]) -> RowShard:
        made = part.new_empty(()).expand(torch.Size(shape)).as_subclass(cls)  # no memory for the whole
        made.part, made.numbers, made.starts = part, tuple(numbers), tuple(starts)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of some rows of a tensor: they are for checkpoints alone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowShard({list(self.numbers)} of {list(self.shape)})"

    # What torch.distributed.checkpoint asks of tensors that it does not know.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size((self.numbers[first], *self.starts[1:])), torch.Size((end - first, *self.part.shape[1:]))
            )
            for first, end in self._runs()
        ]

    def _runs(self) -> list[tuple[int, int]]:
        """List stretches of `part`, as first row and end, whose rows follow one another in the whole."""
        starts = [row for row, number in enumerate(self.numbers) if row == 0 or number != self.numbers[row - 1] + 1]
        return list(zip(starts, [*starts[1:], len(self.numbers)], strict=True)) if starts else []

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        first, end = next(run for run in self._runs() if self.numbers[run[0]] == index.offset[0])
        return self.part[first:end]


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Spread of a tensor over ranks.

    Attributes:
        shape: of the whole tensor.
        group: the ranks that hold the same part as this one.
        split: some axis splits the tensor, or gives each rank one of its own.
        everywhere: all ranks hold (a part of) a tensor of this name.
        mesh, placements: of the DTensor that this rank's part belongs to; mesh None: the tensor is used as it is.
        numbers, starts: which rows this rank has, where they are not in order, and where in them its part begins.
        kept: dimension -> how much of this rank's part belongs to the whole; padding comes behind it.
    """

    shape: tuple[int, ...]
    group: Group
    split: bool = False
    everywhere: bool = True
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    numbers: tuple[int, ...] | None = None
    starts: tuple[int, ...] = ()
    kept: Mapping[int, int] = field(default_factory=dict)

    def spread(self, tensor: Tensor) -> Tensor:
        """Returns the DTensor (or `RowShard`) whose part on this rank is `tensor`, in the same memory."""
        if self.numbers is not None:
            return RowShard(local_part(tensor), self.numbers, self.shape, self.starts)
        if self.mesh is None:
            return tensor
        # Shape and stride are said: DTensor else takes the parts of all ranks to be as large as this one.
        stride = torch.empty(self.shape, device="meta").stride()
        part = local_part(tensor)
        for dim, size in self.kept.items():
            part = part.narrow(dim, 0, size)
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def stacked(self, lead: int, rest: Sequence[int]) -> ShardSpec:
        """Returns the spread of a tensor [the first `lead` dimensions of this one, *rest], split as these are.

        Raises:
            ConfigError: this one is split along a later dimension.
        """
        for place, size in zip(self.placements, () if self.mesh is None else self.mesh.shape, strict=True):
            if isinstance(place, Shard) and place.dim >= lead and size > 1:
                raise ConfigError(
                    f"a parameter of shape {list(self.shape)} is split along dimension {place.dim} ({size} ranks), and "
                    "what PerMatrix keeps for its matrices cannot be. Use an optimizer of single elements (AdamW) with "
                    "esp > 1."
                )
        whole = [place if isinstance(place, Shard) and place.dim < lead else Replicate() for place in self.placements]
        starts = (*self.starts[:lead], *(0 for _ in rest))
        kept = {dim: size for dim, size in self.kept.items() if dim < lead}
        return replace(self, shape=(*self.shape[:lead], *rest), placements=tuple(whole), starts=starts, kept=kept)


@dataclass(eq=False)
class ShardSpecs:
    """Specs of this rank's tensors by name, and the names of those tensors that only other ranks have."""

    own: dict[str, ShardSpec]
    elsewhere: set[str]


def shard_specs(model: nn.Module, tensors: Mapping[str, Tensor], topology: Topology, operation: str) -> ShardSpecs:
    """Lays out `tensors`, those of the model's state by plain name. Collective over all ranks.

    Raises:
        ConfigError, RankError: ranks hold different tensors, or a shard that torch.chunk would not have made; the
            message names the first tensor.
    """
    found, _ = active_shardings(model, topology)
    shardings = {plain_name(name): sharding for name, sharding in found.items()}
    split = {name: tuple(tensor.shape) for name, tensor in tensors.items() if shardings.get(name)}
    whole = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in split}
    shapes = _exchange_shapes(split, whole, topology, operation)
    numbers, unpadded = _row_numbers(model), _unpadded(model)
    result = ShardSpecs({}, {name for on_rank in shapes.values() for name in on_rank} - split.keys())

    def build() -> None:
        for name, tensor in tensors.items():
            known = shapes, topology, numbers.get(name), unpadded.get(name, {})
            result.own[name] = _shard_spec(name, tensor, shardings.get(name, {}), *known)

    on_all_ranks(topology.world, operation, build)
    return result


def writes(key: str, group: Group) -> bool:
    """Returns whether this rank, of those that hold `key`, writes it: by chance, but the same on all ranks."""
    # By a hash of the name, so that the ranks of a group share the bytes without telling each other their sizes.
    return zlib.crc32(key.encode()) % group.size == group.index


def _exchange_shapes(split: Shapes, whole: Shapes, topology: Topology, operation: str) -> dict[int, Shapes]:
    """Gathers every rank's split tensors, and checks that the whole ones are the same everywhere."""
    # Whole tensors are compared by a digest: their list travels only where it differs, to say how.
    digest = hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()
    facts = all_gather_object(topology.world, (digest, split), operation)
    if any(other != digest for other, _ in facts):
        for rank, others in zip(topology.world.ranks, all_gather_object(topology.world, whole, operation), strict=True):
            for name in sorted(whole.keys() | others.keys()):
                if whole.get(name) != others.get(name):
                    raise RankError(
                        f"{operation}: {name} is {_told(whole.get(name))} on rank {topology.rank} and "
                        f"{_told(others.get(name))} on rank {rank}. Build the same model on every rank; what is split "
                        "has to be in its module's `shardings`."
                    )
    return {rank: on_rank for rank, (_, on_rank) in zip(topology.world.ranks, facts, strict=True)}


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _row_numbers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Lists which experts the parameters under a placement hold here, row by row."""
    return {
        plain_name(prefix + name): experts.own_numbers
        for prefix, experts in experts_of(model)
        if experts.moves and experts.own_numbers is not None
        for name, _ in experts.named_parameters()
    }


def _unpadded(model: nn.Module) -> dict[str, dict[int, int]]:
    """Returns the size of the whole along dimensions in which ranks pad their parts to one size, by name."""
    # Modules say so in their attribute `unpadded`, under names relative to themselves.
    return {
        plain_name(f"{prefix}.{name}".lstrip(".")): sizes
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, sizes in getattr(module, "unpadded", {}).items()
    }


def number_names(model: nn.Module) -> set[str]:
    """Names the entries of the model's state that say which experts are here; specs say so by themselves."""
    return {plain_name(prefix + NUMBERS) for prefix, _ in experts_of(model)}


def _shard_spec(
    name: str,
    tensor: Tensor,
    sharding: dict[str, int],
    shapes: dict[int, Shapes],
    topology: Topology,
    numbers: tuple[int, ...] | None,
    unpadded: Mapping[int, int],
) -> ShardSpec:
    managed = isinstance(tensor, DTensor)
    if not sharding:
        return ShardSpec(tuple(tensor.shape), topology.mp if managed else topology.world)
    for axis, dim in sharding.items():
        having = [rank for rank in _group(axis, topology).ranks if name in shapes[rank]]
        if dim == NAMED and len(having) > 1:
            raise ConfigError(
                f"the ranks {having} each have a {name} of their own, and one name for all: a checkpoint would keep "
                "one of them. Make it [local experts, …], or say in its module's `shardings` along which dimension it "
                "is split, or give it a name with the expert's number"
            )
    shape, own = list(tensor.shape), list(tensor.shape)
    for dim in set(sharding.values()) - {NAMED}:
        shape[dim] = sum(shapes[rank][name][dim] for rank in _ranks_along(dim, sharding, topology))
    # Padding makes parts of ranks alike in size and is no part of the whole: the last parts are cut to what belongs.
    if not managed:
        for dim, size in unpadded.items():
            shape[dim] = min(shape[dim], size)
            start = own[dim] * topology.esp.index if sharding.get("esp") == dim else 0
            own[dim] = max(0, min(own[dim], size - start))
    kept = {dim: size for dim, size in enumerate(own) if size != tensor.shape[dim]}
    starts = _check_chunk(name, own, shape, sharding, topology, numbers is not None)
    axes = ("mp",) if "mp" in sharding else ("ep", "esp")
    placements = tuple(Replicate() if (dim := sharding.get(axis, NAMED)) == NAMED else Shard(dim) for axis in axes)
    mesh = topology.dense_mesh if "mp" in sharding else topology.expert_mesh
    of_all = tuple(shape), holders(sharding, topology), True, NAMED not in sharding.values()
    if not isinstance(tensor, DTensor):
        # The first dimension of either mesh is that of the copies.
        return ShardSpec(*of_all, mesh, (Replicate(), *placements), numbers, starts, kept)
    assert mesh is not None
    # FSDP has split the copies among them: no other rank holds what this one holds.
    alone = topology.subgroup("own", (topology.rank,))
    by_copies = _in_order(mesh, (*axes, "dp" if "mp" in sharding else "edp"))
    return replace(ShardSpec(*of_all, by_copies, (*placements, *tensor.placements)), group=alone)


def _group(axis: str, topology: Topology) -> Group:
    """Returns the group over which a `sharding` splits a tensor along an axis."""
    return {"ep": topology.ep, "esp": topology.esp, "mp": topology.mp}[axis]


def _in_order(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh whose dimensions stand in another order."""
    # FSDP has split what other axes had split before: dimensions in that order say so.
    old = mesh.mesh_dim_names or ()
    grid = mesh.mesh.permute(*(old.index(name) for name in names))
    # It serves only to find places, so it needs no process groups.
    return DeviceMesh(mesh.device_type, grid, mesh_dim_names=names, _init_backend=False)


def _ranks_along(dim: int, sharding: dict[str, int], topology: Topology) -> list[int]:
    """Lists the ranks whose parts, joined along `dim`, give its whole size."""
    if "mp" in sharding:
        assert topology.dense_grid is not None
        return topology.dense_grid[0].tolist()
    assert topology.expert_grid is not None
    ranks = topology.expert_grid[0]
    for place, axis in enumerate(("ep", "esp")):
        if sharding.get(axis) != dim:
            index = _group(axis, topology).index if sharding.get(axis) == NAMED else 0
            ranks = ranks.narrow(place, index, 1)
    return ranks.flatten().tolist()


def _check_chunk(
    name: str, own: list[int], shape: list[int], sharding: dict[str, int], topology: Topology, placed: bool
) -> tuple[int, ...]:
    """Returns where in the whole this rank's part begins, and refuses a part that torch.chunk would not have made."""
    # DTensor finds a part's place by cutting as torch.chunk does: other parts would land elsewhere in the file.
    expected, starts = list(shape), [0] * len(shape)
    for axis in ("ep", "esp", "mp"):
        dim = sharding.get(axis, NAMED)
        # Of experts under a placement any may be here.
        if placed and axis == "ep":
            expected[dim] = own[dim]
        elif dim != NAMED:
            group = _group(axis, topology)
            chunk = -(-expected[dim] // group.size)
            starts[dim] += min(chunk * group.index, expected[dim])
            expected[dim] = max(0, min(chunk, expected[dim] - chunk * group.index))
    if own != expected:
        raise ConfigError(
            f"rank {topology.rank}: {name} has shape {own} here and {shape} over all ranks; split as "
            f"{sharding}, torch.chunk would put {expected} here. Split it that way, or pad it."
        )
    return tuple(starts)
