"""Selection of the gradients that the experts' backward computes."""

from __future__ import annotations

from typing import NamedTuple


class NeedsGrad(NamedTuple):
    """Inputs of `experts_forward` that need a gradient.

    With W1 and W2 frozen, only dA' = dy·W2 and dx = dH·W1 are computed. With only W1 frozen, dW1 = dH'ᵀ·x is skipped
    and x need not be saved for backward.
    """

    x_SM: bool = True
    weight_N: bool = True
    w1: bool = True
    w2: bool = True
    b1: bool = True
    b2: bool = True

    @property
    def parameters(self) -> bool:
        return self.w1 or self.w2 or self.b1 or self.b2

    @property
    def dh_NH(self) -> bool:
        return self.x_SM or self.w1 or self.b1

    @property
    def h_NH(self) -> bool:
        """True unless only the output bias needs a gradient, which does not depend on the pre-activations."""
        return self.x_SM or self.weight_N or self.w1 or self.w2 or self.b1


ALL = NeedsGrad()
