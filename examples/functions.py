"""Build an MoE layer from functions, for models with their own modules and router.

python examples/functions.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fusedmoe
from fusedmoe import autograd
from fusedmoe.comm import RowForm, exchange_metadata, make_all_to_all
from fusedmoe.kernels import Layout, Weights


def main() -> torch.Tensor:
    torch.manual_seed(0)
    S, M, H, E, K = 64, 16, 32, 4, 2
    x_SM = torch.randn(S, M, requires_grad=True)
    router_EM = torch.randn(E, M, requires_grad=True)
    weights = Weights(
        w1=torch.randn(E, 2, H, M).mul_(M**-0.5).requires_grad_(),
        w2=torch.randn(E, M, H).mul_(H**-0.5).requires_grad_(),
    )

    # Any router works. This one takes the top K of a softmax.
    weight_SK, expert_SK = (x_SM @ router_EM.t()).softmax(-1).topk(K)

    # Sort pairs by expert, at most 40 per expert; then gather rows, run the experts and sum in one operation.
    layout = autograd.order(expert_SK, experts=E, capacity=40)
    weight_N = autograd.row_weights(weight_SK, layout)
    y_SM = autograd.experts(x_SM, layout, weight_N, weights, "swiglu")
    y_SM.square().mean().backward()
    print("rows per expert:", layout.counts, " dropped:", S * K - layout.rows)
    assert router_EM.grad is not None and weights.w1.grad is not None
    print(f"gradient norms: router {router_EM.grad.norm().item():.4f}  w1 {weights.w1.grad.norm().item():.4f}")

    # With experts split over ranks: exchange the counts, send the rows to their experts, and return the results. Here
    # all experts are on one rank.
    def compute(rows_RM: Tensor, received: Layout, weight_R: Tensor | None) -> Tensor:
        return autograd.experts(rows_RM, received, weight_R, weights, "swiglu")

    topology = fusedmoe.Topology()
    form = RowForm.of(x_SM, layout, weight_SK)
    exchange = exchange_metadata(make_all_to_all("direct", topology), topology.esp, layout.counts_E, form)
    rows_NM = autograd.through_experts(autograd.permute(x_SM, layout), weight_N, exchange, compute)
    torch.testing.assert_close(autograd.unpermute(rows_NM, layout), y_SM)
    return y_SM


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
