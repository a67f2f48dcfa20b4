"""Hooks: user code at the six seams of a layer, FSMoE §3.1, and two that are ready-made, with their operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fusedmoe.construction import Constructed
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import wire
from fusedmoe.kernels.derivatives import Function, operator, register_fake, register_gradient

__all__ = ["HookContext", "Hooks", "WireCast", "WireFp8"]

Direction = Literal["forward", "backward"]


@dataclass
class HookContext:
    """The pass and the chunk of a tensor that a hook is given.

    Attributes:
        direction: "forward" with activations, "backward" with their gradients.
        chunk, chunks: which part of the batch travels, of how many.
        memory: a dict shared by the before_ and after_ hooks of one transfer, for what the one must tell the other. Of
            several hooks, each keeps to a key of its own, best itself.
    """

    direction: Direction
    chunk: int = 0
    chunks: int = 1
    memory: dict[Any, Any] = field(default_factory=dict)


class Hooks(Constructed):
    """Override what you need. Each hook gets a tensor and returns another, or None to leave it as it is.

    In forward the order is before_moe_start, before_dispatch, after_dispatch, before_combine, after_combine,
    before_moe_end; in backward the gradients pass the same seams in the same order: a gradient's way to the experts is
    a dispatch, its way home a combine.

    - `before_moe_start` sees the layer's input [..., M] and `before_moe_end` its output (backward: the gradient of the
      output, and that of the input). In forward autograd sees through them: what they compute is differentiated.
    - The dispatch and combine hooks see rows [n, M], once per chunk, on the wire's two ends. A row is a token, once for
      each rank that it goes to (this one among them), or the sum of its results on a rank; numbers of experts and
      router weights travel beside. They stand for lossless or nearly lossless transport (compression): autograd takes
      before_ and after_ together for the identity. A before_ hook may change dtype and width, if the after_ hook undoes
      it, and if all ranks do the same.

    Ranks compare the arguments that hooks were made with when a layer is made, and the attributes of these names. Those
    that may differ by rank, as the path of a log, are named in the class attribute `rank_specific`.
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


def carry(
    hooks: Sequence[Hooks], name: str, move: Callable[[Tensor], Tensor], rows: Tensor, context: HookContext
) -> Tensor:
    """Moves rows ("dispatch" or "combine") with the hooks at both ends."""
    before, after = ("before_dispatch", "after_dispatch") if name == "dispatch" else ("before_combine", "after_combine")
    return run_hooks(hooks, after, move(run_hooks(hooks, before, rows, context)), context)


def run_hooks(hooks: Sequence[Hooks], seam: str, tensor: Tensor, context: HookContext) -> Tensor:
    """Passes the tensor through every hook at a seam."""
    # After_ hooks in reverse, so that pairs nest: the hook that packed last unpacks first.
    for hook in reversed(hooks) if seam.startswith("after") else hooks:
        # Each seam is written out, so that a search for a method's name finds where it is called.
        seams = {
            "before_moe_start": hook.before_moe_start,
            "before_dispatch": hook.before_dispatch,
            "after_dispatch": hook.after_dispatch,
            "before_combine": hook.before_combine,
            "after_combine": hook.after_combine,
            "before_moe_end": hook.before_moe_end,
        }
        changed = seams[seam](tensor, context)
        if changed is not None and not isinstance(changed, Tensor):
            raise ConfigError(f"{type(hook).__name__}.{seam} gave {changed!r}; a hook gives a tensor, or None")
        tensor = tensor if changed is None else changed
    return tensor


class WireCast(Hooks):
    """Compression: tokens are dispatched, and their sums combined, in a narrower dtype and widened on arrival.

    Halves these bytes for float32 tokens, in forward and in backward; rounds every element that travels, a token's
    results on a rank once, as their sum. Router weights, which travel beside, stay as they are. What ESP moves
    inside a node stays wide, and so does what the experts compute in.

    Args:
        dtype: on the wire, e.g. torch.bfloat16.
    Raises:
        ConfigError: a dtype that is not of floating-point numbers.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"WireCast: rows cannot travel as {dtype!r}; give a floating-point dtype, torch.bfloat16")
        self.dtype = dtype

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        # The other end is told the dtype here: what arrives does not say what it was.
        context.memory[self] = rows.dtype
        return rows.to(self.dtype)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return rows.to(context.memory[self])

    before_combine = before_dispatch
    after_combine = after_dispatch

    def __repr__(self) -> str:
        return f"WireCast({self.dtype})"


class WireFp8(Hooks):
    """Compression: tokens and their sums travel between ranks as fp8, one byte an element and a scale for each row.

    A quarter of the bytes of dispatch and combine for float32 rows, half for bfloat16, in forward and in backward. An
    element that travels is off by 2⁻⁴ of itself at most, or by 2⁻¹⁸ of the largest of its row. The format is
    e4m3 both ways: with a scale for each row gradients do not need the range of e5m2. What is not finite arrives as
    NaN. The experts compute in the rows' own dtype. The bytes: `fusedmoe.kernels.wire`.
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


def listed(hooks: object) -> tuple[Hooks, ...]:
    """Returns the hooks that a layer was given.

    Raises:
        ConfigError: one that is in no list, or what are no hooks.
    """
    if not isinstance(hooks, Iterable):
        raise ConfigError(f"MoELayer: hooks is {hooks!r}; give a list, hooks=[fusedmoe.hooks.WireCast()]")
    given = tuple(hooks)
    for hook in given:
        if not isinstance(hook, Hooks):
            example = "fusedmoe.hooks.WireCast(), or a fusedmoe.Hooks of your own"
            raise ConfigError(f"MoELayer: a hook is {hook!r}, no Hooks; give, say, {example}")
    return given


def enter(hooks: Sequence[Hooks], x: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Returns what a layer gets of its input. The gradient of the input passes the hooks at the layer's end."""
    if not hooks:
        return x
    # The gradient of the input leaves the layer at its end, in the order of the backward pass.
    x = _tap(hooks, x, "before_moe_end", chunk, chunks)
    return run_hooks(hooks, "before_moe_start", x, HookContext("forward", chunk, chunks))


def leave(hooks: Sequence[Hooks], y: Tensor, chunk: int = 0, chunks: int = 1) -> Tensor:
    """Returns what a layer gives of its output. The gradient of the output passes the hooks at the layer's start."""
    if not hooks:
        return y
    y = run_hooks(hooks, "before_moe_end", y, HookContext("forward", chunk, chunks))
    return _tap(hooks, y, "before_moe_start", chunk, chunks)


def _tap(hooks: Sequence[Hooks], tensor: Tensor, seam: str, chunk: int, chunks: int) -> Tensor:
    """The identity, whose backward passes the gradient through the hooks at `seam`."""
    return _Tap.apply(tensor, lambda grad: run_hooks(hooks, seam, grad, HookContext("backward", chunk, chunks)))


class _Tap(Function):
    operation, twice = "hooks at a layer's start and end", True  # autograd sees what they make of a gradient, too

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.passed = passed
        # An input that is returned as it is would not be an output of this function.
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.passed(gradients[0]), None


@operator("pack_bf16")
def pack_bf16(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M] bfloat16."""
    packed = wire.pack_bf16(rows_NM)
    # An operator returns new memory, also where there is nothing to convert.
    return packed.clone() if packed is rows_NM else packed


@register_fake(pack_bf16)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty(rows_NM.shape, dtype=torch.bfloat16)


@operator("unpack_bf16")
def unpack_bf16(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M] bfloat16 -> [n, M] of `dtype`."""
    rows = packed_NM.to(dtype)
    return rows.clone() if rows is packed_NM else rows


@register_fake(unpack_bf16)
def _(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    return packed_NM.new_empty(packed_NM.shape, dtype=dtype)


@operator("pack_fp8")
def pack_fp8(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M + 4] uint8."""
    return wire.pack_fp8(rows_NM)


@register_fake(pack_fp8)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty((rows_NM.shape[0], rows_NM.shape[1] + wire.SCALE_BYTES), dtype=torch.uint8)


@operator("unpack_fp8")
def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M + 4] uint8 -> [n, M] of `dtype`."""
    return wire.unpack_fp8(packed, dtype)


@register_fake(unpack_fp8)
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] - wire.SCALE_BYTES), dtype=dtype)


# The backward of either bfloat16 operator is the other, so that both have derivatives of any order.
def _keep_dtype(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


register_gradient(pack_bf16, lambda ctx, grad: (unpack_bf16(grad, ctx.dtype),), _keep_dtype)
register_gradient(unpack_bf16, lambda ctx, grad: (pack_bf16(grad), None), _keep_dtype)
