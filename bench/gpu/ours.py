"""The library's own layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.device import package_version
from bench.gpu.layer import Layer, leaf
from bench.gpu.spool import NAME
from bench.gpu.spread import variants
from fusedmoe import autograd
from fusedmoe.autograd.order import take_pairs
from fusedmoe.kernels.experts import Weights


def fusedmoe_layer(case: Case) -> Layer:
    leaves = leaf(case.x_SM), leaf(case.weight_SK), leaf(case.w1), leaf(case.w2)
    x_SM, weight_SK, w1, w2 = leaves

    def forward() -> Tensor:
        layout = autograd.order(case.expert_SK, case.shape.E)
        return autograd.experts(x_SM, layout, take_pairs(weight_SK, layout), Weights(w1, w2), "swiglu")

    return Layer(NAME, package_version(NAME), forward, leaves)


#: By variant name.
OURS: dict[str, Callable[[Case], Layer]] = {NAME: fusedmoe_layer, **variants()}
