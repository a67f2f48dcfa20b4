"""Gates by logits: the router's matrix product, at least in float32, and the choice of each token's k best experts.

Ties are decided the same way on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import GateChoice, GateRule, gate, router_product
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.derivatives import Function, linear
from fusedmoe.kernels.gate import fits_kernels, has_kernels
from fusedmoe.layers.gates.base import Gate, Routing, SoftRouting, outside_autocast, router_dtype
from fusedmoe.losses import balance_loss_of_sums, z_loss_of_sums


class RouterGate(Gate):
    """Base of gates that choose experts by logits, token by token; most by x·Wᵀ.

    A subclass defines `choose` in plain torch, and says with `rule` how the experts follow from the logits: where
    kernels serve (`serves`), they make the choice. Where logits are x·Wᵀ and nothing else enters (`one_kernel`), one
    kernel does product and choice.

    Parameters: `weight_EM` [E, M], unless the class says otherwise.
    """

    splits: ClassVar[bool] = True
    weight_EM: nn.Parameter

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    @property
    def one_kernel(self) -> bool:
        """True where x, W and the rule are all that the routing depends on, but for what `draw` gives."""
        return True

    def rule(self) -> GateRule:
        """Returns how experts and weights follow from logits, for `fusedmoe.ops.gate`."""
        raise NotImplementedError(f"{type(self).__name__} defines no rule()")

    def choice_bias(self) -> Tensor | None:
        """Returns what is added to the scores for the choice alone, [E]; None: nothing."""
        return None

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        drawn = self.draw(x_SM)
        # The kernel makes neither noise nor jitter: with any, it chooses from logits that are made here (`choose`).
        if not drawn and self.one_kernel and self.serves(x_SM, self.weight_EM):
            return self.routing_of(gate(x_SM, self.weight_EM, self.rule(), self.choice_bias()))
        return self.choose(*self.score(x_SM, *drawn))

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return (router_logits(x_SM, self.weight_EM),)

    def serves(self, *tensors: Tensor) -> bool:
        """Returns whether there are kernels for such operands, tokens and matrix or logits."""
        return uses_triton(tensors[0]) and fits_kernels(self.experts, self.k) and has_kernels(*tensors)

    def make_rule(self, score: str, *, normalize: bool, scale: float = 1.0, sequence: int | None = None) -> GateRule:
        """Makes a `GateRule` for this gate's k, with the sums that its auxiliary losses need."""
        balance = "balance" in self.aux
        return GateRule(
            self.k,
            score,
            normalize=normalize,
            scale=scale,
            statistics=balance,
            # Sums per sequence are asked for only where a loss needs them: the kernel writes them for each.
            sequence=sequence if balance else None,
            logsumexp="z" in self.aux,
        )

    def routing_of(self, choice: GateChoice, other_losses: Mapping[str, Callable[[], Tensor]] | None = None) -> Routing:
        """Makes the routing of a choice that `fusedmoe.ops.gate` made by this gate's rule."""

        def balance() -> Tensor:
            assert choice.score_BE is not None and choice.count_BE is not None
            return balance_loss_of_sums(choice.score_BE, choice.count_BE, *choice.expert_SK.shape)

        def z() -> Tensor:
            assert choice.logsumexp_S is not None
            return z_loss_of_sums(choice.logsumexp_S)

        terms = {"balance": balance, "z": z, **(other_losses or {})}
        return self.routing(choice.expert_SK, choice.weight_SK, choice.logits_SE, terms)


class _RouterLogits(Function):
    # nn.functional.linear on a cast copy would keep that copy, S·M·4 bytes, alive until backward.

    operation, twice = "router_logits, the product of a gate", True

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        ctx.save_for_backward(x_SM, weight_EM)
        dtype = router_dtype(x_SM)
        return x_SM.to(dtype) @ weight_EM.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_SE,) = grads
        x_SM, weight_EM = ctx.saved_tensors
        dtype = grad_SE.dtype
        grad_x = grad_weight = None
        with outside_autocast(grad_SE.device.type):
            if ctx.needs_input_grad[0]:
                grad_x = (grad_SE @ weight_EM.to(dtype)).to(x_SM.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_SE.t() @ x_SM.to(dtype)).to(weight_EM.dtype)
        return grad_x, grad_weight


def router_logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """x · weightᵀ in `router_dtype(x)`: [S, M] and [E, M], each of any float dtype, give [S, E].

    Saves `x_SM` and `weight_EM` themselves for backward, no cast copies. Gradients come in the inputs' dtypes.
    Differentiable twice where plain torch serves, once where Triton does.
    """
    if uses_triton(x_SM) and has_kernels(x_SM, weight_EM):
        return router_product(x_SM, weight_EM)
    return _RouterLogits.apply(x_SM, weight_EM)


# Measured on a CPU at 8192 tokens, k passes of max against one stable sort: 8 experts, k = 2: 0.3 and 0.8 ms;
# 512 experts, k = 16: 45 and 165 ms.
_MAX_PASSES = 32


def top_experts(score_SE: Tensor, k: int) -> Tensor:
    """The k highest columns of each row, best first; between equal scores the lower column wins.

    `torch.topk` leaves the order of equal scores open, so that two devices could route a token differently.

    Args:
        score_SE: [S, E] float or int64; k ≤ E. NaN counts as the highest score, -inf as the lowest finite one, so that
            the k columns of a row are distinct and in range whatever the scores are. No gradient.

    Returns:
        [S, k] int64.

    Example: score [[1, 3, 3, 2]], k = 3 gives [[1, 2, 3]].
    """
    score_SE = score_SE.detach()
    if k > _MAX_PASSES:
        return score_SE.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if score_SE.is_floating_point():
        taken: float = -torch.inf
        lowest: float = torch.finfo(score_SE.dtype).min
    else:
        taken = torch.iinfo(score_SE.dtype).min
        lowest = taken + 1
    # k passes of `max` leave the scores in place; a sort moves all E of them.
    left_SE = score_SE.clamp(min=lowest)  # a copy; nothing in it is as low as a column already taken
    chosen = []
    for place in range(k):
        best_S1 = left_SE.max(dim=1, keepdim=True).indices  # documented: the first of equal maxima
        chosen.append(best_S1)
        if place + 1 < k:
            left_SE.scatter_(1, best_S1, taken)
    return torch.cat(chosen, dim=1)


def pick(score_SE: Tensor, expert_SK: Tensor) -> Tensor:
    """`score_SE.gather(1, expert_SK)` that does not keep the scores for backward, as torch's does for their shape."""
    shape = score_SE.shape
    return linear(
        score_SE,
        lambda score: score.gather(1, expert_SK),
        lambda grad: grad.new_zeros(shape).scatter_add(1, expert_SK, grad),
        "the scores of chosen experts",
    )
