"""Hooks: user code at six points of a layer (FSMoE §3.1), and two ready-made compression hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fusedmoe.construction import Constructed
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import wire
from fusedmoe.kernels.derivatives import operator, register_fake, transform_gradient

__all__ = ["WireCast", "WireFp8"]

Direction = Literal["forward", "backward"]


@dataclass
class HookContext:
    """Pass and chunk of a hook's tensor.

    Attributes:
        direction: "forward" for activations, "backward" for their gradients.
        chunk, chunks: index of the chunk, and the number of chunks.
        memory: a dict shared by the before_ and after_ hooks of one transfer. Each hook uses its own key, preferably
            itself.
    """

    direction: Direction
    chunk: int = 0
    chunks: int = 1
    memory: dict[Any, Any] = field(default_factory=dict)


class Hooks(Constructed):
    """Base class of hooks. Each method receives a tensor and returns another, or None to leave it unchanged.

    In forward the order is before_moe_start, before_dispatch, after_dispatch, before_combine, after_combine,
    before_moe_end. Backward calls the hooks in the same order with gradients: the gradient of the layer's output is
    dispatched to the experts, and the gradient of its input is combined.

    - `before_moe_start` receives the layer's input [..., M] (M = model_dim), `before_moe_end` its output; in backward
      the gradient of the output, and of the input. Autograd records both hooks in forward.
    - Dispatch and combine hooks receive rows [n, M], once per chunk, before sending and after receiving. A row is a
      token, once for each destination rank including this one, or the sum of its results on a rank. A before_ hook may
      change dtype and width if the after_ hook restores them and all ranks do the same. The pair must be (nearly)
      lossless: autograd treats it as the identity.

    When a layer is constructed, ranks compare the hooks' constructor arguments and the attributes of the same names,
    except those in the class attribute `rank_specific`, such as the path of a log.
    """

    def before_moe_start(self, x: Tensor, context: HookContext) -> Tensor | None:
        return None

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor | None:
        return None

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor | None:
        return None

    def before_combine(self, rows: Tensor, context: HookContext) -> Tensor | None:
        return None

    def after_combine(self, rows: Tensor, context: HookContext) -> Tensor | None:
        return None

    def before_moe_end(self, y: Tensor, context: HookContext) -> Tensor | None:
        return None


def transfer_with_hooks(
    hooks: Sequence[Hooks], name: str, move: Callable[[Tensor], Tensor], rows: Tensor, context: HookContext
) -> Tensor:
    """Run the hooks before the transfer `name` ("dispatch" or "combine"), then `move`, then the hooks after it."""
    sent = run_hooks(hooks, f"before_{name}", rows, context)
    return run_hooks(hooks, f"after_{name}", move(sent), context)


def run_hooks(hooks: Sequence[Hooks], point: str, tensor: Tensor, context: HookContext) -> Tensor:
    """Apply the hooks at one point of the layer in list order, at `after_…` points in reverse order.

    The last hook to encode rows is thus the first to decode them.
    """
    for hook in reversed(hooks) if point.startswith("after") else hooks:
        changed = getattr(hook, point)(tensor, context)
        if changed is not None and not isinstance(changed, Tensor):
            raise ConfigError(f"{type(hook).__name__}.{point} returned {changed!r}; a hook returns a tensor, or None")
        tensor = tensor if changed is None else changed
    return tensor


class WireCast(Hooks):
    """Compression: send tokens and their summed results in a narrower floating-point dtype.

    Halves the bytes of dispatch and combine for float32 tokens, in forward and backward. Every sent element is rounded.
    Router weights, ESP collectives and the experts' computation keep their dtype.

    Args:
        dtype: of sent rows, e.g. torch.bfloat16.
    Raises:
        ConfigError: not a floating-point dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"WireCast: cannot send rows as {dtype!r}; pass a floating-point dtype, torch.bfloat16")
        self.dtype = dtype

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        # Received rows do not carry the original dtype.
        context.memory[self] = rows.dtype
        return rows.to(self.dtype)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return rows.to(context.memory[self])

    before_combine = before_dispatch
    after_combine = after_dispatch

    def __repr__(self) -> str:
        return f"WireCast({self.dtype})"


class WireFp8(Hooks):
    """Compression: send tokens and their summed results as fp8 (e4m3), one byte per element and one scale per row.

    A quarter of the bytes of dispatch and combine for float32 rows, half for bfloat16, in forward and backward. The
    error of a sent element is at most 2⁻⁴ of itself, or 2⁻¹⁸ of the largest in its row. Non-finite values are received
    as NaN. The experts compute in the rows' own dtype. Format: `fusedmoe.kernels.wire`.
    """

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        context.memory[self] = rows.dtype
        return pack_fp8(rows)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return unpack_fp8(rows, context.memory[self])

    before_combine = before_dispatch
    after_combine = after_dispatch

    def __repr__(self) -> str:
        return "WireFp8()"


def validate_hooks(hooks: object) -> tuple[Hooks, ...]:
    """Return the hooks passed to a layer as a tuple. Raise `ConfigError` if they are not a list of `Hooks`."""
    if not isinstance(hooks, Iterable):
        raise ConfigError(f"MoELayer: hooks is {hooks!r}; pass a list, hooks=[fusedmoe.hooks.WireCast()]")
    given = tuple(hooks)
    for hook in given:
        if not isinstance(hook, Hooks):
            example = "fusedmoe.hooks.WireCast(), or your own fusedmoe.Hooks"
            raise ConfigError(f"MoELayer: hook {hook!r} is not a Hooks; pass, for example, {example}")
    return given


def apply_start_hooks(hooks: Sequence[Hooks], x: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Apply hooks to the layer's input, and in backward the end hooks to its gradient."""
    if not hooks:
        return x
    # In backward the gradient of the input is the last tensor to leave the layer.
    x = _hook_gradient(hooks, x, "before_moe_end", chunk, chunks)
    return run_hooks(hooks, "before_moe_start", x, HookContext("forward", chunk, chunks))


def apply_end_hooks(hooks: Sequence[Hooks], y: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Apply hooks to the layer's output, and in backward the start hooks to its gradient."""
    if not hooks:
        return y
    y = run_hooks(hooks, "before_moe_end", y, HookContext("forward", chunk, chunks))
    return _hook_gradient(hooks, y, "before_moe_start", chunk, chunks)


def _hook_gradient(hooks: Sequence[Hooks], tensor: Tensor, point: str, chunk: int, chunks: int) -> Tensor:
    def apply_hooks(grad: Tensor) -> Tensor:
        return run_hooks(hooks, point, grad, HookContext("backward", chunk, chunks))

    return transform_gradient(tensor, apply_hooks, "hooks at a layer's start and end")


@operator("pack_fp8")
def pack_fp8(rows_NM: Tensor) -> Tensor:
    """Pack [n, M] floating point into [n, M + 4] uint8."""
    return wire.pack_fp8(rows_NM)


@register_fake(pack_fp8)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty((rows_NM.shape[0], rows_NM.shape[1] + wire.SCALE_BYTES), dtype=torch.uint8)


@operator("unpack_fp8")
def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack [n, M + 4] uint8 into [n, M] of `dtype`."""
    return wire.unpack_fp8(packed, dtype)


@register_fake(unpack_fp8)
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] - wire.SCALE_BYTES), dtype=dtype)
