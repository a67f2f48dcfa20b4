"""The gradients that the experts' backward is asked for."""

from __future__ import annotations

from typing import NamedTuple


class Wanted(NamedTuple):
    """The inputs of `experts_forward` whose gradients are asked for; of one that is not there none is made.

    Worked example, W1 and W2 frozen: of dA' = dy·W2 and dx = dH·W1, dW1 = dH'ᵀ·x and dW2 = dyᵀ·A only the first two are
    made. With W1 alone frozen the third is left out, and x may be forgotten after the forward.
    """

    x_SM: bool = True
    weight_N: bool = True
    w1: bool = True
    w2: bool = True
    b1: bool = True
    b2: bool = True

    @property
    def parameters(self) -> bool:
        """Tells whether any parameter has a gradient."""
        return self.w1 or self.w2 or self.b1 or self.b2

    @property
    def dh_NH(self) -> bool:
        """Tells whether the pre-activations' gradient is needed."""
        return self.x_SM or self.w1 or self.b1

    @property
    def h_NH(self) -> bool:
        """Tells whether pre-activations are needed: for all gradients but the output bias's."""
        return self.x_SM or self.weight_N or self.w1 or self.w2 or self.b1


ALL = Wanted()
