"""Liger-Kernel's fused MoE in Triton (its CuTe kernels are for expert parallelism)."""

from __future__ import annotations

from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.device import package_version
from bench.gpu.layer import Layer, Unavailable, leaf
from bench.gpu.peers.find import find

NAME = "liger_kernel"


def make(case: Case) -> Layer:
    """`LigerFusedMoEFunction`: W1 as here, g before u; router weights in the tokens' dtype, as in its modules."""
    function = getattr(find("liger_kernel.ops"), "LigerFusedMoEFunction", None)
    if function is None:
        raise Unavailable("this version has no fused MoE")
    shape = case.shape
    expert_SK = case.expert_SK.int()
    leaves = leaf(case.x_SM), leaf(case.weight_SK.to(case.x_SM.dtype)), leaf(case.w1), leaf(case.w2)
    x_SM, weight_SK, w1, w2 = leaves

    def forward() -> Tensor:
        y_SM: Tensor = function.apply(x_SM, w1.view(shape.E, -1, shape.M), w2, expert_SK, weight_SK)
        return y_SM

    return Layer(NAME, package_version("liger_kernel"), forward, leaves)
