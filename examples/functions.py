"""The layer's operations as functions, for a model that brings its own modules and router.

python examples/functions.py
"""

from __future__ import annotations

import torch

import fusedmoe
from fusedmoe import autograd
from fusedmoe.kernels import Weights


def main() -> torch.Tensor:
    torch.manual_seed(0)
    S, M, H, E, K = 64, 16, 32, 4, 2
    x_SM = torch.randn(S, M, requires_grad=True)
    router_EM = torch.randn(E, M, requires_grad=True)
    weights = Weights(
        w1=torch.randn(E, 2, H, M).mul_(M**-0.5).requires_grad_(),
        w2=torch.randn(E, M, H).mul_(H**-0.5).requires_grad_(),
    )

    # Any router will do; here: the K best of a softmax.
    weight_SK, expert_SK = (x_SM @ router_EM.t()).softmax(-1).topk(K)

    # Sort by expert, at most 40 rows each; then gather, experts and weighted sum in one operation.
    layout = autograd.order(expert_SK, experts=E, capacity=40)
    weight_N = autograd.take_pairs(weight_SK, layout)
    y_SM = autograd.experts(x_SM, layout, weight_N, weights, "swiglu")
    y_SM.square().mean().backward()
    print("rows of each expert:", layout.counts, " dropped:", S * K - layout.rows)
    assert router_EM.grad is not None and weights.w1.grad is not None
    print(f"gradient norms: router {router_EM.grad.norm().item():.4f}  w1 {weights.w1.grad.norm().item():.4f}")
    return y_SM


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
