"""ScatterMoE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.device import package_version
from bench.gpu.layer import Layer, leaf
from bench.gpu.peers.find import find

NAME = "scattermoe"


def make(case: Case) -> Layer:
    """`GLUMLP`: its W1 has u before g, opposite to the case's."""
    mlp, shape = find("scattermoe.mlp"), case.shape
    with torch.device("meta"):  # its weights are replaced
        module = mlp.GLUMLP(shape.M, shape.H, shape.E, shape.K)
    w1 = torch.nn.Parameter(case.w1.flip(1).view(shape.E, -1, shape.M))
    w2 = torch.nn.Parameter(case.w2.detach())
    module.experts.weight, module.output_experts.weight = w1, w2
    x_SM, weight_SK = leaf(case.x_SM), leaf(case.weight_SK.to(case.x_SM.dtype))

    def forward() -> Tensor:
        y_SM: Tensor = module(x_SM, weight_SK, case.expert_SK)
        return y_SM

    def ours(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        dx_SM, dweight_SK, dw1, dw2 = gradients
        return dx_SM, dweight_SK, dw1.view(case.w1.shape).flip(1), dw2

    return Layer(NAME, package_version("scattermoe"), forward, (x_SM, weight_SK, w1, w2), ours)
