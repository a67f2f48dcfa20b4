"""Parameters of a model over ranks: which are split, along which of their dimensions, and whether copies are equal.

Modules say what they split in their attribute `shardings`; nothing else knows of it.
"""

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
# In place of a dimension: it is not known how the tensor is split over this axis. `active_shardings` refuses it where
# the axis has several ranks.
UNKNOWN = -2


def parameter_shardings(model: nn.Module, *, marked: bool = True) -> dict[str, dict[str, int]]:
    """Maps the names of split parameters and buffers to {axis: dimension}, axis one of "ep", "esp", "mp".

    The names are those of `model.state_dict()`; a tensor that several modules share appears under each of its names.
    What is not in the result is replicated on every rank. A module says what it splits in its attribute `shardings`,
    under names relative to itself. Where a dimension is split, ranks hold the pieces that `torch.chunk` makes. The
    dimension `NAMED` says that each rank's tensor is a whole one with a name of its own.

    Raises:
        ConfigError: an unknown name, axis or dimension; a tensor split over both expert axes and mp; a shared tensor
            whose owners disagree; a parameter that Tutel's mark calls an expert's, of which no module says more.
    """
    return {name: dict(stated.axes) for name, stated in _collect(model, marked=marked).items()}


def active_shardings(model: nn.Module, topology: Topology) -> tuple[dict[str, dict[str, int]], set[str]]:
    """Leaves of each sharding the axes that split over ranks; a tensor without any is replicated.

    A layer's attribute `expert_ranks` says which ranks its own ep and esp have. Along an axis on which these are one
    rank the layer's experts are replicated, whatever the topology; several ranks must be those of the topology.

    Returns:
        The shardings by the names of `parameter_shardings`, and which of these are experts', split or not.
    Raises:
        ConfigError: as `parameter_shardings`; a layer splits its experts over other ranks than the topology says; a
            tensor whose split over an axis is not known.
    """
    shardings = _collect(model)
    experts = {name for name, stated in shardings.items() if not stated.axes.keys().isdisjoint(EXPERT_AXES)}
    return {name: _active(name, *stated, topology) for name, stated in shardings.items()}, experts


class _Stated(NamedTuple):
    """Statements of modules on a tensor: its sharding, and the ranks along its layer's own axes."""

    axes: Mapping[str, int]
    ranks: Mapping[str, tuple[int, ...]]


def _collect(model: nn.Module, *, marked: bool = True) -> dict[str, _Stated]:
    """Collects what the modules say by the names of `model.state_dict()`."""
    stated: dict[str, _Stated] = {}
    seen: dict[int, tuple[str, _Stated]] = {}  # by id: a tensor that several modules share has one sharding
    layers: list[tuple[str, Mapping[str, tuple[int, ...]]]] = [("", {})]  # those around a module, from outside
    for prefix, module in model.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        # `named_modules` goes depth first, so that the layers around a module are the last ones seen.
        while not path.startswith(layers[-1][0]):
            layers.pop()
        # A layer may have other expert ranks than the model around it, or none.
        if (ranks := getattr(module, "expert_ranks", None)) is not None:
            layers.append((path, ranks))
        for own_name, axes in getattr(module, "shardings", {}).items():
            name = path + own_name
            tensor = _find(module, own_name, name)
            if tensor is None:
                continue
            _check(name, tensor, axes)
            first, known = seen.setdefault(id(tensor), (name, _Stated(axes, layers[-1][1])))
            # Tied weights: both names have one memory, so it cannot be split in two ways.
            if known.axes != axes:
                raise ConfigError(f"{first} and {name} are one tensor, but split as {known.axes} and as {axes}")
            stated[name] = known
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in seen:
            stated.setdefault(name, seen[id(tensor)][1])
        elif marked and hasattr(tensor, "_tutel_expert"):
            # It would pass for a parameter that all ranks share.
            raise ConfigError(
                f"{name} is an expert's parameter by its mark _tutel_expert, and no module says over which ranks it is "
                "split. Give the model with its fusedmoe.tutel.moe.moe_layer, not the experts alone"
            )
    return stated


def _active(
    name: str, axes: Mapping[str, int], of_layer: Mapping[str, tuple[int, ...]], topology: Topology
) -> dict[str, int]:
    """Leaves the axes along which several ranks split a tensor, and refuses what cannot be."""
    active = {}
    groups = {"ep": topology.ep, "esp": topology.esp, "mp": topology.mp}
    for axis, dim in axes.items():
        group = groups[axis]
        ranks = of_layer.get(axis, group.ranks)
        if len(ranks) == 1:  # its layer has these experts whole, whatever the topology given
            continue
        if ranks != group.ranks:
            sizes = ", ".join(f"{each}={len(of_layer[each])}" for each in EXPERT_AXES)
            raise ConfigError(
                f"rank {topology.rank}: {name} is split over the ranks {list(ranks)} by its layer, and {axis} of the "
                f"topology given is the ranks {list(group.ranks)}: experts would be taken for copies of others. Give "
                f"the layer's own topology, with {sizes}: Topology.from_sizes({sizes}), or from_mesh where its ranks "
                "are not consecutive"
            )
        if dim == UNKNOWN:
            raise ConfigError(
                f"rank {topology.rank}: the ranks {list(ranks)} share an expert, and its module does not say how they "
                f"split {name}. Say so where it is made: self.shardings = {{'{name.rpartition('.')[2]}': {{'ep': 0, "
                "'esp': 1}}, if each has a slice along dimension 1 of [local experts, …], or {'ep': 0} if each has "
                "all of it"
            )
        active[axis] = dim
    return active


def _find(module: nn.Module, own_name: str, name: str) -> Tensor | None:
    """Finds a tensor by the name that its module uses; None: a place without a parameter, as of a bias."""
    path, _, leaf = own_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = nn.Module()
    if parametrize.is_parametrized(owner, leaf):
        inside = f"{path}.parametrizations.{leaf}".lstrip(".")
        raise ConfigError(
            f"{name} is parametrised (LoRA, weight norm), and how its parts are split is not known. Say so in the "
            "module's shardings, after parametrising: "
            f"shardings[{inside + '.original'!r}] = shardings.pop({own_name!r}), and an entry such as "
            f"shardings['{inside}.0.A'] = {{'ep': 0}} for each parameter of the parametrisation "
            "that has one part for each expert"
        )
    tensor = getattr(owner, leaf, owner)
    if tensor is None or isinstance(tensor, Tensor):
        return tensor
    raise ConfigError(f"{type(module).__name__}.shardings lists {own_name!r}; no parameter or buffer is named {name!r}")


def _check(name: str, tensor: Tensor, axes: dict[str, int]) -> None:
    for axis, dim in axes.items():
        # A misspelt axis would leave the tensor replicated, and its gradients summed over strangers.
        if axis not in AXES:
            raise ConfigError(f"{name} is split over an unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if dim not in (NAMED, UNKNOWN) and not 0 <= dim < tensor.dim():
            raise ConfigError(f"{name} of shape {list(tensor.shape)} has no dimension {dim} to split over {axis}")
    if "mp" in axes and len(axes) > 1:
        raise ConfigError(f"{name} is split as {axes}; a tensor is split over ep and esp, or over mp, not both")


def require_equal(held: Iterable[tuple[str, Group, Tensor]], topology: Topology, cure: str) -> None:
    """Checks that the tensors of a name are equal on all ranks of their group. Collective over the topology.

    Args:
        held: by this rank; names may differ between ranks.
        cure: a sentence for the error.
    Raises:
        RankError: the same on every rank; it names the first tensor that differs, and the ranks.
    """
    # Names differ between pipeline stages, and replicas of a name between groups: the first rank tells groups apart.
    # Gradients are the same on all of them: copies that begin apart stay apart, and nothing else would tell.
    own = {name: (group.ranks[0], _digest(tensor)) for name, group, tensor in held if group.size > 1}
    every = all_gather_object(topology.world, own, "comparing copies of parameters")
    ranks_by_digest: dict[tuple[str, int], dict[int, list[int]]] = {}
    for rank, theirs in zip(topology.world.ranks, every, strict=True):
        for name, (first, digest) in theirs.items():
            ranks_by_digest.setdefault((name, first), {}).setdefault(digest, []).append(rank)
    differ = {name: holders for (name, _), holders in ranks_by_digest.items() if len(holders) > 1}
    if not differ:
        return
    # One name is enough to find the cause; the error counts the rest.
    name = next(iter(differ))
    holders = differ.pop(name)
    values = ", another on ".join(f"ranks {ranks}" for ranks in holders.values())
    raise RankError(
        f"rank {topology.rank}: {name} should be a copy on all of these ranks, but has one value on {values}"
        f"{f', and {len(differ)} more parameters differ' if differ else ''}. {cure}",
        agreed=True,
    )


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    """Returns a sum of the tensor's bits, which is another one for other random numbers."""
    # Bits, not values: NaN equals itself, and a sum of integers does not depend on its order.
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(integers).sum(dtype=torch.int64))
