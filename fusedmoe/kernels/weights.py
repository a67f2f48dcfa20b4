"""The parameters of feed-forward experts, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of the local experts.

    Attributes:
        w1: [e, 2, H, M] for a gated activation (first half g, second u), else [e, H, M].
        w2: [e, M, H]; its M may be another than w1's, and is the width of the results.
        b1: [e, 2, H] or [e, H], or None.
        b2: [e, m] or None; it is added to the m columns of the output from `b2_start` on (a shard of the experts
            owns a slice of the output bias, so that the sum over shards adds each column once).
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    b2_start: int = 0

    def contiguous(self) -> Weights:
        """These weights, with copies of those that are not contiguous; the kernels read no other."""
        tensors = (self.w1, self.w2, self.b1, self.b2)
        if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
            return self
        w1, w2 = self.w1.contiguous(), self.w2.contiguous()
        b1, b2 = (None if bias is None else bias.contiguous() for bias in (self.b1, self.b2))
        return Weights(w1, w2, b1, b2, self.b2_start)

    def up(self, expert: int) -> Tensor:
        """[(2·)H, M]"""
        return self.w1[expert].view(-1, self.w1.shape[-1])

    def b2_columns(self) -> slice:
        assert self.b2 is not None
        return slice(self.b2_start, self.b2_start + self.b2.shape[1])


@dataclass(frozen=True, eq=False)
class Hidden:
    """Activations and their inputs' gradients by sorted row: what rows' gradients leave for those of parameters.

    Either both times the rows' router weights or neither, as the device's kernels like it.

    Attributes:
        a_NH: [N, H].   dh_NH: [N, H], gated [N, 2·H].
    """

    a_NH: Tensor
    dh_NH: Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of all inputs of `experts_forward`, like these; None where there was none."""

    x_SM: Tensor
    weight_N: Tensor | None
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None

    def added_to(self, others: Gradients) -> Gradients:
        """These gradients, with the parameters' ones added to those of others, in place."""

        def add(total: Tensor | None, mine: Tensor | None) -> Tensor | None:
            return None if total is None or mine is None else total.add_(mine)

        b1, b2 = add(others.b1, self.b1), add(others.b2, self.b2)
        return replace(self, w1=others.w1.add_(self.w1), w2=others.w2.add_(self.w2), b1=b1, b2=b2)
