"""Hooks: user code at the six seams of a layer, FSMoE §3.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fusedmoe.errors import ConfigError

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


class Hooks:
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
    """Passes the tensor through every hook at a seam; after_ hooks in reverse, so that pairs nest."""
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
