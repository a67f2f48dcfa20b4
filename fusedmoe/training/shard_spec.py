"""Shard specs for checkpoints: this rank's part of each tensor and its position in the full tensor."""

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
from fusedmoe.training.replicated_parameters import local_part, replica_group

Shapes = dict[str, tuple[int, ...]]


class RowShard(Tensor):
    """Tensor that holds selected rows of a full tensor, or the same slice of each. A DTensor needs contiguous rows.

    Consecutive rows are written and read as one part.

    Args:
        part: [n, ...], this rank's elements.
        numbers: the n row indices in the full tensor.
        shape: of the full tensor.
        starts: offsets of `part` in the full tensor; the entry of dimension 0 is ignored.
    """

    part: Tensor
    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls, part: Tensor, numbers: Sequence[int], shape: Sequence[int], starts: Sequence[int]) -> RowShard:
        made = part.new_empty(()).expand(torch.Size(shape)).as_subclass(cls)  # allocates no memory for the full tensor
        made.part, made.numbers, made.starts = part, tuple(numbers), tuple(starts)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of some rows of a tensor: they are for checkpoints alone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowShard({list(self.numbers)} of {list(self.shape)})"

    # Protocol of torch.distributed.checkpoint for custom tensors.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size((self.numbers[first], *self.starts[1:])), torch.Size((end - first, *self.part.shape[1:]))
            )
            for first, end in self._runs()
        ]

    def _runs(self) -> list[tuple[int, int]]:
        """Return the ranges (first, end) of rows in `part` that are consecutive in the full tensor."""
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
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """Distribution of a tensor over ranks.

    Attributes:
        shape: of the full tensor.
        group: ranks that hold the same part as this one.
        is_split: ep, esp or mp ranks hold parts of the tensor, or separate tensors. FSDP alone does not count.
        is_on_all_ranks: all ranks hold (a part of) a tensor of this name.
        mesh, placements: of the DTensor that contains this rank's part; with mesh None the tensor is used directly.
        numbers, starts: row indices and offsets of this rank's part, if the rows are not contiguous.
        unpadded_sizes: dimension -> size without the padding at its end.
    """

    shape: tuple[int, ...]
    group: Group
    is_split: bool = False
    is_on_all_ranks: bool = True
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    numbers: tuple[int, ...] | None = None
    starts: tuple[int, ...] = ()
    unpadded_sizes: Mapping[int, int] = field(default_factory=dict)

    def to_sharded(self, tensor: Tensor) -> Tensor:
        """Return a DTensor or `RowShard` with `tensor`, without padding, as local part; `tensor` without a mesh."""
        if self.numbers is not None:
            return RowShard(local_part(tensor), self.numbers, self.shape, self.starts)
        if self.mesh is None:
            return tensor
        # Without a shape, DTensor assumes equal parts on all ranks.
        stride = torch.empty(self.shape, device="meta").stride()
        part = local_part(tensor)
        for dim, size in self.unpadded_sizes.items():
            part = part.narrow(dim, 0, size)
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def with_trailing_shape(self, lead: int, rest: Sequence[int]) -> ShardSpec:
        """Return the spec of a tensor [first `lead` dimensions of this one, *rest] with the same sharding.

        Raises:
            ConfigError: this tensor is split along a later dimension.
        """
        for place, size in zip(self.placements, () if self.mesh is None else self.mesh.shape, strict=True):
            if isinstance(place, Shard) and place.dim >= lead and size > 1:
                raise ConfigError(
                    f"a parameter of shape {list(self.shape)} is split along dimension {place.dim} ({size} ranks), and "
                    "the state of PerMatrix cannot be. Use an elementwise optimizer (AdamW) with esp > 1."
                )
        whole = [place if isinstance(place, Shard) and place.dim < lead else Replicate() for place in self.placements]
        starts = (*self.starts[:lead], *(0 for _ in rest))
        unpadded_sizes = {dim: size for dim, size in self.unpadded_sizes.items() if dim < lead}
        return replace(
            self,
            shape=(*self.shape[:lead], *rest),
            placements=tuple(whole),
            starts=starts,
            unpadded_sizes=unpadded_sizes,
        )


def shard_specs(
    model: nn.Module, tensors: Mapping[str, Tensor], topology: Topology, operation: str
) -> tuple[dict[str, ShardSpec], set[str]]:
    """Compute the specs of a model's tensors, given by plain name. Collective over all ranks.

    Returns:
        Specs of this rank's tensors by name, and names of tensors that only other ranks have.

    Raises:
        ConfigError, RankError: ranks hold different tensors, or a shard differs from torch.chunk's. The message names
            the first tensor.
    """
    found, _ = active_shardings(model, topology)
    shardings = {plain_name(name): sharding for name, sharding in found.items()}
    split = {name: tuple(tensor.shape) for name, tensor in tensors.items() if shardings.get(name)}
    whole = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in split}
    shapes = _exchange_shapes(split, whole, topology, operation)
    numbers, unpadded = _row_numbers(model), _unpadded_sizes(model)
    specs: dict[str, ShardSpec] = {}

    def build() -> None:
        for name, tensor in tensors.items():
            known = shapes, topology, numbers.get(name), unpadded.get(name, {})
            specs[name] = _shard_spec(name, tensor, shardings.get(name, {}), *known)

    on_all_ranks(topology.world, operation, build)
    return specs, {name for on_rank in shapes.values() for name in on_rank} - split.keys()


def is_writer(key: str, group: Group) -> bool:
    """Return whether this rank, of those in `group`, writes `key`; deterministic on all ranks."""
    return zlib.crc32(key.encode()) % group.size == group.index


def _exchange_shapes(split: Shapes, whole: Shapes, topology: Topology, operation: str) -> dict[int, Shapes]:
    digest = hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()
    facts = all_gather_object(topology.world, (digest, split), operation)
    if any(other != digest for other, _ in facts):
        for rank, others in zip(topology.world.ranks, all_gather_object(topology.world, whole, operation), strict=True):
            for name in sorted(whole.keys() | others.keys()):
                if whole.get(name) != others.get(name):
                    raise RankError(
                        f"{operation}: {name} is {_describe_shape(whole.get(name))} on rank {topology.rank} and "
                        f"{_describe_shape(others.get(name))} on rank {rank}. Build the same model on every rank, and "
                        "list split parameters in their module's `shardings`."
                    )
    return {rank: on_rank for rank, (_, on_rank) in zip(topology.world.ranks, facts, strict=True)}


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def _row_numbers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        plain_name(prefix + name): experts.own_numbers
        for prefix, experts in experts_of(model)
        if experts.is_placed and experts.own_numbers is not None
        for name, _ in experts.named_parameters()
    }


def _unpadded_sizes(model: nn.Module) -> dict[str, dict[int, int]]:
    return {
        plain_name(f"{prefix}.{name}".lstrip(".")): sizes
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, sizes in getattr(module, "unpadded", {}).items()
    }


def expert_number_names(model: nn.Module) -> set[str]:
    """Return the names of state entries that list this rank's experts."""
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
    if not sharding:
        return ShardSpec(tuple(tensor.shape), topology.mp if isinstance(tensor, DTensor) else topology.world)
    for axis, dim in sharding.items():
        holding_ranks = [rank for rank in getattr(topology, axis).ranks if name in shapes[rank]]
        if dim == NAMED and len(holding_ranks) > 1:
            raise ConfigError(
                f"ranks {holding_ranks} have different tensors of the same name {name}: a checkpoint would store only "
                "one. Make it [local experts, …], list its split dimension in its module's `shardings`, or put the "
                "expert's number into its name"
            )
    shape, own = list(tensor.shape), list(tensor.shape)
    for dim in set(sharding.values()) - {NAMED}:
        shape[dim] = sum(shapes[rank][name][dim] for rank in _ranks_along(dim, sharding, topology))
    # Padding is not saved.
    if not isinstance(tensor, DTensor):
        for dim, size in unpadded.items():
            shape[dim] = min(shape[dim], size)
            start = own[dim] * topology.esp.index if sharding.get("esp") == dim else 0
            own[dim] = max(0, min(own[dim], size - start))
    unpadded_sizes = {dim: size for dim, size in enumerate(own) if size != tensor.shape[dim]}
    starts = _check_chunk(name, own, shape, sharding, topology, numbers is not None)
    axes = ("mp",) if "mp" in sharding else ("ep", "esp")
    placements = tuple(Replicate() if (dim := sharding.get(axis, NAMED)) == NAMED else Shard(dim) for axis in axes)
    mesh = topology.dense_mesh if "mp" in sharding else topology.expert_mesh
    whole, is_on_all_ranks = tuple(shape), NAMED not in sharding.values()
    if not isinstance(tensor, DTensor):
        group, all_placements = replica_group(sharding, topology), (Replicate(), *placements)
        return ShardSpec(whole, group, True, is_on_all_ranks, mesh, all_placements, numbers, starts, unpadded_sizes)
    assert mesh is not None
    # FSDP splits the replicas. DTensor shards in the order of mesh dimensions, and FSDP's axis splits the parts of the
    # other axes.
    own_group = topology.subgroup("own", (topology.rank,))
    names, old = (*axes, "dp" if "mp" in sharding else "edp"), mesh.mesh_dim_names or ()
    grid = mesh.mesh.permute(*(old.index(name) for name in names))
    reordered = DeviceMesh(mesh.device_type, grid, mesh_dim_names=names, _init_backend=False)
    return ShardSpec(whole, own_group, True, is_on_all_ranks, reordered, (*placements, *tensor.placements))


def _ranks_along(dim: int, sharding: dict[str, int], topology: Topology) -> list[int]:
    """Return the ranks whose parts, concatenated along `dim`, yield the full tensor."""
    if "mp" in sharding:
        assert topology.dense_grid is not None
        return topology.dense_grid[0].tolist()
    assert topology.expert_grid is not None
    ranks = topology.expert_grid[0]
    for place, axis in enumerate(("ep", "esp")):
        if sharding.get(axis) != dim:
            index = getattr(topology, axis).index if sharding.get(axis) == NAMED else 0
            ranks = ranks.narrow(place, index, 1)
    return ranks.flatten().tolist()


def _check_chunk(
    name: str, own: list[int], shape: list[int], sharding: dict[str, int], topology: Topology, has_placement: bool
) -> tuple[int, ...]:
    """Return the offsets of this rank's part. Raise `ConfigError` if torch.chunk would split differently."""
    # DTensor derives offsets from torch.chunk.
    expected, starts = list(shape), [0] * len(shape)
    for axis in ("ep", "esp", "mp"):
        dim = sharding.get(axis, NAMED)
        # Experts with a placement are in no fixed order.
        if has_placement and axis == "ep":
            expected[dim] = own[dim]
        elif dim != NAMED:
            group = getattr(topology, axis)
            chunk = -(-expected[dim] // group.size)
            starts[dim] += min(chunk * group.index, expected[dim])
            expected[dim] = max(0, min(chunk, expected[dim] - chunk * group.index))
    if own != expected:
        raise ConfigError(
            f"rank {topology.rank}: {name} has shape {own} here and {shape} over all ranks; split as "
            f"{sharding}, torch.chunk would put {expected} here. Split like torch.chunk, or pad."
        )
    return tuple(starts)
