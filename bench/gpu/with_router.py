"""A layer with its router, timed by the method of SonicMoE's benchmark (`benchmarks/moe-cute.py` in its repository).

Included are router product, top-k, sorting and experts, as in SonicMoE's published figures. A time is the mean over
half a second of repeats, after half a second of rest. Backward is the difference of two means: forward with backward,
and forward. Throughput counts the FLOP of the experts' products only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.clock import Clock
from bench.gpu.device import package_version
from bench.gpu.kernels import kernel_costs, pass_costs
from bench.gpu.layer import Layer, Unavailable, leaf
from bench.gpu.ours import NAME
from bench.gpu.peers import sonicmoe
from bench.gpu.peers.find import find
from bench.gpu.spool import Spool
from bench.gpu.suite import Row
from fusedmoe import autograd
from fusedmoe.autograd.order import take_pairs
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.gate import GateRule

KIND = "with router"


def fusedmoe_layer(case: Case) -> Layer:
    leaves = leaf(case.x_SM), leaf(case.router_EM), leaf(case.w1), leaf(case.w2)
    x_SM, router_EM, w1, w2 = leaves
    gate_rule = GateRule(case.shape.K)

    def forward() -> Tensor:
        choice = autograd.gate(x_SM, router_EM, gate_rule)
        layout = autograd.order(choice.expert_SK, case.shape.E)
        return autograd.experts(x_SM, layout, take_pairs(choice.weight_SK, layout), Weights(w1, w2), "swiglu")

    return Layer(NAME, package_version(NAME), forward, leaves)


def sonicmoe_layer(case: Case) -> Layer:
    """`moe_TC_softmax_topk_layer` in training mode, as in the published figures."""
    functional, enums = find("sonicmoe.functional"), find("sonicmoe.enums")
    leaves = leaf(case.x_SM), leaf(case.router_EM), leaf(case.w1), leaf(case.w2)
    x_SM, router_EM, w1, w2 = leaves

    def forward() -> Tensor:
        y_SM: Tensor = functional.moe_TC_softmax_topk_layer(
            x_SM,
            router_EM,
            w1.view(case.shape.E, -1, case.shape.M).permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            case.shape.K,
            torch.cuda.current_stream().cuda_stream,
            enums.ActivationType.SWIGLU,
            False,
        )[0]
        return y_SM

    return Layer(sonicmoe.NAME, package_version("sonic-moe"), forward, leaves)


LAYERS: dict[str, Callable[[Case], Layer]] = {NAME: fusedmoe_layer, sonicmoe.NAME: sonicmoe_layer}


def measure_with_router(case: Case, clock: Clock, spool: Spool, left_out: set[str]) -> list[Row]:
    """Return a row for forward and one for backward of each layer that runs here; others are recorded as skipped.

    Results are checked for finite values only: `passes` compares the same kernels with the definition.
    """
    rows = []
    for name, make in LAYERS.items():
        if {name, f"{name} {KIND}"} & left_out:
            continue
        with spool.work("passes", case.shape.name, f"{name} {KIND}"):
            try:
                rows += _measure(make(case), case, clock)
            except Exception as error:
                if name == NAME:
                    raise
                word = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
                spool.add(
                    "skipped", suite="passes", shape=case.shape.name, name=f"{name} {KIND}", word=word.splitlines()[0]
                )
    return rows


def _measure(layer: Layer, case: Case, clock: Clock) -> list[Row]:
    def both() -> tuple[Tensor, ...]:
        return layer.backward(layer.forward(), case.dy_SM)

    if not all(bool(tensor.isfinite().all()) for tensor in (layer.forward().detach(), *both())):
        raise ValueError(f"{layer.name}: results are not finite")
    forward_ms, both_ms = clock.mean_ms(layer.forward), clock.mean_ms(both)
    gate = kernel_costs(case.shape)
    return [
        {
            "shape": case.shape.name,
            "kind": KIND,
            "name": name,
            "variant": layer.name,
            "version": layer.version,
            "parts": [list(part) for part in (gate[f"gate {name}"], *pass_costs(case.shape, name))],
            "flops": case.shape.flops(name),
            "measured_ms": ms,
            **clock.conditions,
        }
        for name, ms in (("forward", forward_ms), ("backward", both_ms - forward_ms))
    ]
