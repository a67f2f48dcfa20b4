"""Which parameters of a model are split over ranks, and along which of their dimensions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.errors import ConfigError
from fusedmoe.layers.expert_networks import NAMED

EXPERT_AXES = ("ep", "esp")
AXES = (*EXPERT_AXES, "mp")


def parameter_shardings(model: nn.Module) -> dict[str, dict[str, int]]:
    """Maps the names of split parameters and buffers to {axis: dimension}, axis one of "ep", "esp", "mp".

    The names are those of `model.state_dict()`; a tensor that several modules share appears under each of its names.
    What is not in the result is replicated on every rank. A module says what it splits in its attribute `shardings`,
    under names relative to itself. Where a dimension is split, ranks hold the pieces that `torch.chunk` makes. The
    dimension `NAMED` says that each rank's tensor is a whole one with a name of its own.

    Raises:
        ConfigError: an unknown name, axis or dimension; a tensor split over both expert axes and mp; a shared tensor
            whose owners disagree.
    """
    shardings: dict[str, dict[str, int]] = {}
    seen: dict[int, tuple[str, dict[str, int]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own_name, axes in getattr(module, "shardings", {}).items():
            name = f"{prefix}.{own_name}" if prefix else own_name
            tensor = _find(module, own_name, name)
            if tensor is None:
                continue
            _check(name, tensor, axes)
            first, known = seen.setdefault(id(tensor), (name, axes))
            if known != axes:
                raise ConfigError(f"{first} and {name} are one tensor, but split as {known} and as {axes}")
            shardings[name] = dict(axes)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named if seen else ():
        if id(tensor) in seen:
            shardings.setdefault(name, dict(seen[id(tensor)][1]))
    return shardings


def _find(module: nn.Module, own_name: str, name: str) -> Tensor | None:
    path, _, leaf = own_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = nn.Module()
    for tensors in (owner._parameters, owner._buffers):
        if leaf in tensors:
            return tensors[leaf]
    if parametrize.is_parametrized(owner, leaf):
        inside = f"{path}.parametrizations.{leaf}".lstrip(".")
        raise ConfigError(
            f"{name} is parametrised (LoRA, weight norm), and how its parts are split is not known. Say so in the "
            "module's shardings, after parametrising: "
            f"shardings[{inside + '.original'!r}] = shardings.pop({own_name!r}), and an entry such as "
            f"shardings['{inside}.0.A'] = {{'ep': 0}} for each parameter of the parametrisation "
            "that has one part for each expert"
        )
    raise ConfigError(f"{type(module).__name__}.shardings lists {own_name!r}; no parameter or buffer is named {name!r}")


def _check(name: str, tensor: Tensor, axes: dict[str, int]) -> None:
    for axis, dim in axes.items():
        if axis not in AXES:
            raise ConfigError(f"{name} is split over an unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if dim != NAMED and not 0 <= dim < tensor.dim():
            raise ConfigError(f"{name} of shape {list(tensor.shape)} has no dimension {dim} to split over {axis}")
    if "mp" in axes and len(axes) > 1:
        raise ConfigError(f"{name} is split as {axes}; a tensor is split over ep and esp, or over mp, not both")
