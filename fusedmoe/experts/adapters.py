"""Low-rank adapters of experts' matrices, as parametrisations that the experts never evaluate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.engine.module_hooks import first_hook
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.low_rank import Adapters, LowRank

_MATRICES = ("w1", "w2")
# Hooks of all modules that only note which module runs, as for PyTorch's counter of FLOPs.
_OBSERVERS = ("torch.utils.module_tracker",)


class LowRankUpdate(nn.Module):
    """A parametrisation by `torch.nn.utils.parametrize` of a matrix for each expert: W becomes W + scale·B·A.

    Experts of feed-forward networks compute with the factors and never make the sum, which whoever reads the parameter
    gets. `add_adapters` registers it; register it with `unsafe=True` yourself, for else PyTorch makes the sum once.

    Args:
        a_ErI: [e, r, in], the last dimension that of W.
        b: W's shape with r in place of the last dimension.
        scale: a number, LoRA's alpha / r.
    """

    def __init__(self, a_ErI: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a_ErI), nn.Parameter(b), scale

    def factors(self, dtype: torch.dtype) -> LowRank:
        """Returns the factors in the dtype of the computation, both halves of a gated product in one."""
        return LowRank(self.a.to(dtype), self.b.flatten(1, -2).to(dtype), self.scale)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.factors(w.dtype).delta_EOI().view(w.shape)

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[1]}, scale={self.scale}"


def add_adapters(experts: Any, rank: int, alpha: float | None = None, names: Any = _MATRICES) -> None:
    """Freezes the experts of a layer and gives their matrices low-rank adapters, which learn in their place.

    Ranks that were seeded alike hold the shards of one adapter, as of one model. B begins as zeros. Call it before the
    layer gets a wrapper or an optimizer; what of the factors is split is in the experts' `shardings` then.

    Args:
        experts: of a `MoELayer`, its attribute `experts`: `FeedForward` or `SwiGLU`.
        rank: r, at least 1.
        alpha: the scale is alpha / r; 1 without it.
        names: of "w1" and "w2", which get one.
    Raises:
        ConfigError: other experts, or of no layer yet; a matrix that is parametrised already; no such name or rank.
    """
    place = getattr(experts, "place", None)
    if place is None or not hasattr(experts, "w1"):
        raise ConfigError(f"adapters need FeedForward or SwiGLU experts of a layer, got {type(experts).__name__}")
    if not isinstance(rank, int) or rank < 1 or not names or not set(names) <= set(_MATRICES):
        raise ConfigError(f"adapters have a rank of at least 1 and names among {_MATRICES}, got {rank!r} and {names!r}")
    for name in names:
        if parametrize.is_parametrized(experts, name):
            raise ConfigError(f"{name} of {type(experts).__name__} is parametrised already; take that off first")
    experts.requires_grad_(False)
    for name in names:
        w = getattr(experts, name)
        last, axes = w.dim() - 1, experts.shardings.pop(name)
        inner = {axis: dim for axis, dim in axes.items() if dim == last}
        shards, shard = (place.shards, place.shard) if inner else (1, 0)
        seed = int(torch.randint(2**62, (), device="cpu"))
        a = w.new_empty((len(w), rank, w.shape[last]))
        # Each expert's whole factor is drawn by its number, and cut then: shards are those of one adapter.
        for at, number in enumerate(place.numbers if w.device.type != "meta" else ()):
            generator = torch.Generator().manual_seed((seed + number) % 2**63)
            whole = w.shape[last] * shards
            drawn = torch.empty(rank, whole, device="cpu").uniform_(-(whole**-0.5), whole**-0.5, generator=generator)
            a[at] = drawn.chunk(shards, 1)[shard]
        scale = (rank if alpha is None else alpha) / rank
        update = LowRankUpdate(a, w.new_zeros((*w.shape[:-1], rank)), scale)
        parametrize.register_parametrization(experts, name, update, unsafe=True)
        experts.shardings[f"parametrizations.{name}.original"] = axes
        # W's columns are A's, its rows B's; a factor without the split dimension has a copy on each shard.
        outer = {axis: dim for axis, dim in axes.items() if axis not in inner}
        columns = dict.fromkeys(inner, 2) | {axis: 0 for axis, dim in outer.items() if dim == 0}
        experts.shardings[f"parametrizations.{name}.0.a"] = columns
        experts.shardings[f"parametrizations.{name}.0.b"] = outer


def merge_adapters(experts: Any) -> None:
    """Adds the adapters to the experts' matrices for good, which are plain parameters again, frozen as they were."""
    for name in _MATRICES:
        if _update(experts, name) is not None:
            axes = experts.shardings.pop(f"parametrizations.{name}.original")
            for factor in "ab":
                experts.shardings.pop(f"parametrizations.{name}.0.{factor}")
            parametrize.remove_parametrizations(experts, name, leave_parametrized=True)
            experts.shardings[name] = axes


def adapted(experts: Any, dtype: torch.dtype | None) -> tuple[Weights, Adapters] | None:
    """Returns frozen weights and the adapters beside them, in the dtype of the computation, or w1's.

    None: there are no adapters, or weights that are trained, too, or parametrised otherwise, or hooks on the adapters;
    then the sums are read, which evaluates each parametrisation once.
    """
    updates, frozen = [_update(experts, name) for name in _MATRICES], []
    if any(update is not None and first_hook(update, _OBSERVERS) is not None for update in updates):
        return None
    if any(parametrize.is_parametrized(experts, name) for name in ("b1", "b2")):
        return None
    for name, update in zip(_MATRICES, updates, strict=True):
        if update is None and parametrize.is_parametrized(experts, name):
            return None
        frozen.append(getattr(experts, name) if update is None else experts.parametrizations[name].original)
    w1, w2 = frozen
    if any(tensor is not None and tensor.requires_grad for tensor in (w1, w2, experts.b1, experts.b2)):
        return None
    dtype = dtype or w1.dtype
    b1, b2 = (None if bias is None else bias.to(dtype) for bias in (experts.b1, experts.b2))
    up, down = (None if update is None else update.factors(dtype) for update in updates)
    return Weights(w1.to(dtype), w2.to(dtype), b1, b2, experts.b2_start), Adapters(up, down)


def _update(experts: Any, name: str) -> LowRankUpdate | None:
    """Returns the adapter of a matrix; None if it is not parametrised, or by something else, or by more."""
    parametrisations: Any = experts.parametrizations[name] if parametrize.is_parametrized(experts, name) else ()
    only = parametrisations[0] if len(parametrisations) == 1 else None
    return only if isinstance(only, LowRankUpdate) else None
