"""Declared sharding of a model's parameters over ranks, and a check that replicas are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import NAMED

EXPERT_AXES = ("ep", "esp")
AXES = (*EXPERT_AXES, "mp")
# Special dimension: it is unknown how the axis splits the tensor. `active_shardings` raises if the axis has several
# ranks.
UNKNOWN = -2


def parameter_shardings(model: nn.Module, *, marked: bool = True) -> dict[str, dict[str, int]]:
    """Return the split parameters and buffers: name -> {axis: dimension} with axes "ep", "esp" and "mp".

    Modules declare splits in the attribute `shardings`, under names relative to the module. Ranks hold the pieces of
    `torch.chunk` along the dimension. With dimension `NAMED`, each rank has a whole tensor under a rank-specific name.
    All other tensors are replicated. Keys of the result are names in `model.state_dict()`; a shared tensor appears
    under each of its names.

    Raises:
        ConfigError: an unknown name, axis or dimension; a tensor split over an expert axis and mp; a shared tensor with
            conflicting declarations; if `marked`, an undeclared parameter with Tutel's expert mark.
    """
    return {name: dict(declared.axes) for name, declared in _collect_declarations(model, marked=marked).items()}


def active_shardings(model: nn.Module, topology: Topology) -> tuple[dict[str, dict[str, int]], set[str]]:
    """Return the shardings restricted to axes with several ranks.

    A layer's attribute `expert_ranks` contains the ranks of its EP and ESP groups. Along an axis with one rank the
    layer's experts are replicated, regardless of the topology; several ranks must equal the topology's.

    Returns:
        The shardings by the names of `parameter_shardings`, and the names of all expert tensors, split or not.
    Raises:
        ConfigError: as `parameter_shardings`; a layer and the topology have different ranks on an axis; a tensor's
            split over an axis is unknown.
    """
    shardings = _collect_declarations(model)
    experts = {name for name, declared in shardings.items() if not declared.axes.keys().isdisjoint(EXPERT_AXES)}
    return {name: _active_axes(name, *declared, topology) for name, declared in shardings.items()}, experts


class _Declaration(NamedTuple):
    """A tensor's declared sharding.

    Attributes:
        axes: mesh axis -> dimension split over it, or `NAMED`.
        ranks: `expert_ranks` of the enclosing layer: axis -> ranks.
    """

    axes: Mapping[str, int]
    ranks: Mapping[str, tuple[int, ...]]


def _collect_declarations(model: nn.Module, *, marked: bool = True) -> dict[str, _Declaration]:
    declared: dict[str, _Declaration] = {}
    seen: dict[int, tuple[str, _Declaration]] = {}  # by id: a shared tensor has one sharding
    layers: list[tuple[str, Mapping[str, tuple[int, ...]]]] = [("", {})]  # enclosing layers, outermost first
    for prefix, module in model.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        while not path.startswith(layers[-1][0]):
            layers.pop()
        if (ranks := getattr(module, "expert_ranks", None)) is not None:
            layers.append((path, ranks))
        for own_name, axes in getattr(module, "shardings", {}).items():
            name = path + own_name
            tensor = _find_tensor(module, own_name, name)
            if tensor is None:
                continue
            _validate_axes(name, tensor, axes)
            first, known = seen.setdefault(id(tensor), (name, _Declaration(axes, layers[-1][1])))
            if known.axes != axes:
                raise ConfigError(f"{first} and {name} are one tensor, but split as {known.axes} and as {axes}")
            declared[name] = known
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in seen:
            declared.setdefault(name, seen[id(tensor)][1])
        elif marked and hasattr(tensor, "_tutel_expert"):
            # Without a declaration it would be treated as replicated.
            raise ConfigError(
                f"{name} is an expert's parameter by its mark _tutel_expert, but no module declares over which ranks "
                "it is split. Pass the model with its fusedmoe.tutel.moe.moe_layer, not the experts alone"
            )
    return declared


def _active_axes(
    name: str, axes: Mapping[str, int], layer_ranks: Mapping[str, tuple[int, ...]], topology: Topology
) -> dict[str, int]:
    active = {}
    groups = {"ep": topology.ep, "esp": topology.esp, "mp": topology.mp}
    for axis, dim in axes.items():
        group = groups[axis]
        ranks = layer_ranks.get(axis, group.ranks)
        if len(ranks) == 1:  # the layer does not split these experts, regardless of the topology
            continue
        if ranks != group.ranks:
            sizes = ", ".join(f"{each}={len(layer_ranks[each])}" for each in EXPERT_AXES)
            raise ConfigError(
                f"rank {topology.rank}: {name} is split over the ranks {list(ranks)} by its layer, but {axis} of the "
                f"given topology is the ranks {list(group.ranks)}: experts would be treated as copies of others. Pass "
                f"the layer's own topology, with {sizes}: Topology.from_sizes({sizes}), or from_mesh if its ranks "
                "are not consecutive"
            )
        if dim == UNKNOWN:
            raise ConfigError(
                f"rank {topology.rank}: the ranks {list(ranks)} share an expert, but its module does not declare how "
                f"they split {name}. Declare it in the module: self.shardings = {{'{name.rpartition('.')[2]}': {{'ep': "
                "0, 'esp': 1}}, if each has a slice along dimension 1 of [local experts, …], or {'ep': 0} if each has "
                "all of it"
            )
        active[axis] = dim
    return active


def _find_tensor(module: nn.Module, own_name: str, name: str) -> Tensor | None:
    """Return a module's tensor by its relative name; None if the attribute is None, as an absent bias.

    Raises `ConfigError` if it is parametrised or does not exist. `name`: for errors.
    """
    path, _, leaf = own_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = nn.Module()
    if parametrize.is_parametrized(owner, leaf):
        inside = f"{path}.parametrizations.{leaf}".lstrip(".")
        raise ConfigError(
            f"{name} is parametrised (LoRA, weight norm), and the split of its parts is unknown. Declare it in the "
            "module's shardings, after parametrising: "
            f"shardings[{inside + '.original'!r}] = shardings.pop({own_name!r}), and an entry such as "
            f"shardings['{inside}.0.A'] = {{'ep': 0}} for each parameter of the parametrisation "
            "that has one part for each expert"
        )
    tensor = getattr(owner, leaf, owner)
    if tensor is None or isinstance(tensor, Tensor):
        return tensor
    raise ConfigError(f"{type(module).__name__}.shardings lists {own_name!r}; no parameter or buffer is named {name!r}")


def _validate_axes(name: str, tensor: Tensor, axes: dict[str, int]) -> None:
    for axis, dim in axes.items():
        # A misspelt axis would leave the tensor replicated, with gradients summed over different parameters.
        if axis not in AXES:
            raise ConfigError(f"{name} is split over an unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if dim not in (NAMED, UNKNOWN) and not 0 <= dim < tensor.dim():
            raise ConfigError(f"{name} of shape {list(tensor.shape)} has no dimension {dim} to split over {axis}")
    if "mp" in axes and len(axes) > 1:
        raise ConfigError(f"{name} is split as {axes}; a tensor is split over ep and esp, or over mp, not both")


def require_equal(tensors: Iterable[tuple[str, Group, Tensor]], topology: Topology, fix: str) -> None:
    """Check that named tensors are equal on all ranks of their group. Collective over the topology.

    Args:
        tensors: (name, group, tensor) on this rank; names may differ between ranks.
        fix: a sentence appended to the error.
    Raises:
        RankError: a tensor differs. Every rank raises the same error, with the first such tensor and the ranks.
    """
    # Names differ between pipeline stages, and replicas of a name between groups. Unequal replicas receive equal
    # gradients and stay unequal without any other symptom.
    own = {name: (group.ranks[0], _digest(tensor)) for name, group, tensor in tensors if group.size > 1}
    every = all_gather_object(topology.world, own, "comparing copies of parameters")
    ranks_by_digest: dict[tuple[str, int], dict[int, list[int]]] = {}
    for rank, theirs in zip(topology.world.ranks, every, strict=True):
        for name, (first, digest) in theirs.items():
            ranks_by_digest.setdefault((name, first), {}).setdefault(digest, []).append(rank)
    differ = {name: holders for (name, _), holders in ranks_by_digest.items() if len(holders) > 1}
    if not differ:
        return
    name = next(iter(differ))
    holders = differ.pop(name)
    values = ", another on ".join(f"ranks {ranks}" for ranks in holders.values())
    raise RankError(
        f"rank {topology.rank}: {name} should be a copy on all of these ranks, but has one value on {values}"
        f"{f', and {len(differ)} more parameters differ' if differ else ''}. {fix}",
        agreed=True,
    )


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    # Bits: NaN equals itself, and an integer sum does not depend on order.
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(integers).sum(dtype=torch.int64))
