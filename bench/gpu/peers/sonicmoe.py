"""SonicMoE."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.device import package_version
from bench.gpu.layer import Layer, leaf
from bench.gpu.peers.find import find

NAME = "sonicmoe"


def make(case: Case) -> Layer:
    """`moe_general_routing_inputs`, for arbitrary routing; g before u as here (`concat_layout`), experts last."""
    library, enums = find("sonicmoe"), find("sonicmoe.enums")
    shape, device = case.shape, case.x_SM.device
    leaves = leaf(case.x_SM), leaf(case.weight_SK), leaf(case.w1), leaf(case.w2)
    x_SM, weight_SK, w1, w2 = leaves
    token_N = torch.arange(shape.S, device=device, dtype=torch.int32).repeat_interleave(shape.K)
    expert_N = case.expert_SK.flatten().int()

    def forward() -> Tensor:
        y_SM: Tensor = library.moe_general_routing_inputs(
            x_SM,
            weight_SK.flatten(),
            token_N,
            expert_N,
            w1.view(shape.E, -1, shape.M).permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            shape.E,
            torch.cuda.current_stream().cuda_stream,
            enums.ActivationType.SWIGLU,
            concat_layout=True,
        )[0]
        return y_SM

    return Layer(NAME, package_version("sonic-moe"), forward, leaves)
