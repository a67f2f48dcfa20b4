"""Hooks: user code at six points of a layer (FSMoE §3.1), and a ready-made compression hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fusedmoe.comm.wire_format import WireFormat
from fusedmoe.construction import Constructed
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import transform_gradient

__all__ = ["WireCast"]

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
    Router weights, ESP collectives and the experts' computation keep their dtype. For fp8: `Schedule(wire=…)`.

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


class _WireHooks(Hooks):
    """Sends rows in a `WireFormat` after the hooks of the user, which receive rows in their own dtype."""

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        context.memory[self] = rows.dtype
        return self.wire.encode(rows)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return self.wire.decode(rows, context.memory[self])

    def before_combine(self, rows: Tensor, context: HookContext) -> Tensor:
        return self.before_dispatch(rows, context) if self.wire.encodes_results else rows

    def after_combine(self, rows: Tensor, context: HookContext) -> Tensor:
        return self.after_dispatch(rows, context) if self.wire.encodes_results else rows


def hooks_and_wire(hooks: Sequence[Hooks], wire: WireFormat | None) -> tuple[Sequence[Hooks], WireFormat | None]:
    """Return the hooks and the format for the collectives of a layer: with hooks, the last of them encodes the rows."""
    if wire is None or not hooks:
        return hooks, wire
    return (*hooks, _WireHooks(wire)), None


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
