"""Low-rank adapters on expert matrices: parametrisations that the experts' forward does not evaluate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.engine.module_hooks import find_hook
from fusedmoe.errors import ConfigError
from fusedmoe.experts.initialisation import draw_seed
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.low_rank import Adapters, LowRank

_MATRICES = ("w1", "w2")
# Global module hooks that only track the running module, as PyTorch's FLOP counter registers.
_TRACKING_HOOKS = ("torch.utils.module_tracker",)


class LowRankUpdate(nn.Module):
    """Parametrisation (`torch.nn.utils.parametrize`) of per-expert matrices: W becomes W + scale·B·A.

    Feed-forward experts never form the sum; reading the parameter does. Register it with `unsafe=True`, as PyTorch
    otherwise evaluates the sum once.

    Args:
        a_ErI: [e, r, in]; `in` is the last dimension of W.
        b: shape of W with r as the last dimension.
        scale: LoRA's alpha / r.
    """

    def __init__(self, a_ErI: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a_ErI), nn.Parameter(b), scale

    def factors(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.a.to(dtype), self.b.flatten(1, -2).to(dtype), self.scale)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.factors(w.dtype).delta_EOI().view(w.shape)

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[1]}, scale={self.scale}"


def add_adapters(experts: Any, rank: int, alpha: float | None = None, names: Any = _MATRICES) -> None:
    """Freeze a layer's experts and add trainable low-rank adapters to their matrices.

    Call it before wrapping the layer or creating an optimizer: it adds the factors to the experts' `shardings`. Ranks
    with equal seeds hold the shards of one adapter. B is initialised to zero.

    Args:
        experts: attribute `experts` of a `MoELayer`: `FeedForward` or `SwiGLU`.
        rank: r, at least 1.
        alpha: the scale is alpha / r; default scale 1.
        names: matrices to adapt, "w1" and/or "w2".
    Raises:
        ConfigError: other experts, or experts without a layer; a parametrised matrix; an invalid name or rank.
    """
    place = getattr(experts, "place", None)
    if place is None or not hasattr(experts, "w1"):
        raise ConfigError(f"adapters need FeedForward or SwiGLU experts of a layer, got {type(experts).__name__}")
    if not isinstance(rank, int) or rank < 1 or not names or not set(names) <= set(_MATRICES):
        raise ConfigError(f"adapters have a rank of at least 1 and names among {_MATRICES}, got {rank!r} and {names!r}")
    for name in names:
        if parametrize.is_parametrized(experts, name):
            raise ConfigError(f"{name} of {type(experts).__name__} is already parametrised; remove that first")
    experts.requires_grad_(False)
    for name in names:
        w = getattr(experts, name)
        last, declared = w.dim() - 1, experts.shardings.pop(name, None)
        axes = declared or {}
        inner = {axis: dim for axis, dim in axes.items() if dim == last}
        shards, shard = (place.shards, place.shard) if inner else (1, 0)
        seed = draw_seed()
        a = w.new_empty((len(w), rank, w.shape[last]))
        # Each factor is drawn whole, seeded by the expert's number, so shards belong to one adapter.
        for at, number in enumerate(place.numbers if w.device.type != "meta" else ()):
            generator = torch.Generator().manual_seed((seed + number) % 2**63)
            whole = w.shape[last] * shards
            drawn = torch.empty(rank, whole, device="cpu").uniform_(-(whole**-0.5), whole**-0.5, generator=generator)
            a[at] = drawn.chunk(shards, 1)[shard]
        scale = (rank if alpha is None else alpha) / rank
        update = LowRankUpdate(a, w.new_zeros((*w.shape[:-1], rank)), scale)
        parametrize.register_parametrization(experts, name, update, unsafe=True)
        if declared is None:  # a shared expert, replicated on all ranks
            continue
        experts.shardings[f"parametrizations.{name}.original"] = axes
        # A has W's column split and B its row split; a factor without the split dimension is whole on each shard.
        outer = {axis: dim for axis, dim in axes.items() if axis not in inner}
        columns = dict.fromkeys(inner, 2) | {axis: 0 for axis, dim in outer.items() if dim == 0}
        experts.shardings[f"parametrizations.{name}.0.a"] = columns
        experts.shardings[f"parametrizations.{name}.0.b"] = outer


def merge_adapters(experts: Any) -> None:
    """Add the adapters to the experts' matrices permanently. The matrices become plain, frozen parameters."""
    for name in _MATRICES:
        if _adapter_of(experts, name) is not None:
            axes = experts.shardings.pop(f"parametrizations.{name}.original", None)
            for factor in "ab":
                experts.shardings.pop(f"parametrizations.{name}.0.{factor}", None)
            parametrize.remove_parametrizations(experts, name, leave_parametrized=True)
            if axes is not None:
                experts.shardings[name] = axes


def frozen_weights_and_adapters(experts: Any, dtype: torch.dtype | None) -> tuple[Weights, Adapters] | None:
    """Return frozen weights and their adapters, in `dtype` (default w1's).

    None without adapters, or if the weights are trainable, otherwise parametrised, or have hooks on adapters: then read
    the sums, which evaluates each parametrisation once.
    """
    updates, frozen = [_adapter_of(experts, name) for name in _MATRICES], []
    if any(update is not None and find_hook(update, _TRACKING_HOOKS) is not None for update in updates):
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


def _adapter_of(experts: Any, name: str) -> LowRankUpdate | None:
    parametrisations: Any = experts.parametrizations[name] if parametrize.is_parametrized(experts, name) else ()
    only = parametrisations[0] if len(parametrisations) == 1 else None
    return only if isinstance(only, LowRankUpdate) else None
