"""The kernels of a layer with their inputs, by their names in results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from bench.gpu import costs
from bench.gpu.case import Case
from bench.gpu.clock import Step
from bench.gpu.costs import Cost
from bench.gpu.shapes import Shape
from bench.gpu.spread import PARTS, part_costs, part_steps
from fusedmoe import autograd
from fusedmoe.kernels import gather_sum
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.gate import GateChoice, GateRule

_HALF = 2  # bytes per bfloat16

FORWARD = ("order", "up", "down", "gather-and-sum")
BACKWARD = ("dhidden", "dinput", "dW1", "dW2", "dX sum")
KERNELS = ("gate forward", "gate backward", *FORWARD, *BACKWARD, *PARTS)
PASSES = {"forward": FORWARD, "backward": BACKWARD, "both": (*FORWARD, *BACKWARD)}


def fastest_of_forms(times: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the minimum times of Triton and of Gluon configurations, by name; None if there is none."""
    triton, gluon = (
        min((time for name, time in times.items() if name.startswith("gluon") is form), default=None)
        for form in (False, True)
    )
    return triton, gluon


def kernel_costs(shape: Shape) -> dict[str, Cost]:
    S, M, H, E, K, R = shape.S, shape.M, shape.H, shape.E, shape.K, shape.rows
    return {
        "gate forward": costs.gate(S, M, E, K, _HALF),
        "gate backward": costs.gate(S, M, E, K, _HALF, backward=True),
        "order": costs.layout(S, K, E, R),
        "up": costs.up(R, S, E, M, H, _HALF),
        "down": costs.down(R, E, M, H, _HALF),
        "gather-and-sum": costs.gather_sum(R, S, K, M, _HALF, weighted=True),
        "dhidden": costs.dhidden(R, S, E, M, H, _HALF),
        "dinput": costs.dinput(R, E, M, H, _HALF),
        "dW1": costs.dw1(R, S, E, M, H, _HALF),
        "dW2": costs.dw2(R, S, E, M, H, _HALF),
        "dX sum": costs.gather_sum(R, S, K, M, _HALF, weighted=False),
        **part_costs(shape, _HALF),
    }


def pass_costs(shape: Shape, name: str) -> list[Cost]:
    """Return the costs of a pass's kernels, without the gate: routing is an input of a pass."""
    of_kernels = kernel_costs(shape)
    return [of_kernels[kernel] for kernel in PASSES[name]]


class _Chosen(NamedTuple):
    choice: GateChoice
    leaves: tuple[torch.Tensor, torch.Tensor]


def kernel_steps(case: Case) -> list[Step]:
    """Return a step per kernel in the order of `KERNELS`. The products require Triton."""
    return [*gate_steps(case), *row_steps(case), *grouped_steps(case), *part_steps(case)]


def gate_steps(case: Case) -> list[Step]:
    gate_rule = GateRule(case.shape.K, statistics=True)
    dweight_SK = torch.randn_like(case.weight_SK)
    dscore_BE = torch.randn((1, case.shape.E), device=dweight_SK.device)

    def chosen() -> _Chosen:
        leaves = case.x_SM.detach().requires_grad_(), case.router_EM.detach().requires_grad_()
        return _Chosen(autograd.gate(*leaves, gate_rule), leaves)

    def backward(given: _Chosen) -> object:
        score_BE = given.choice.score_BE
        assert score_BE is not None
        return torch.autograd.grad([given.choice.weight_SK, score_BE], given.leaves, [dweight_SK, dscore_BE])

    return [
        Step("gate forward", lambda _: autograd.gate(case.x_SM, case.router_EM, gate_rule)),
        Step("gate backward", backward, chosen),
    ]


def row_steps(case: Case) -> list[Step]:
    """Return the steps of ordering and of the two sums over a token's rows."""
    layout = autograd.order(case.expert_SK, case.shape.E)
    rows_NM = torch.randn((layout.rows, case.shape.M), device=case.x_SM.device, dtype=case.x_SM.dtype)
    weight_N = gather_sum.take_pairs(case.weight_SK, layout)
    return [
        Step("order", lambda _: autograd.order(case.expert_SK, case.shape.E)),
        Step("gather-and-sum", lambda _: gather_sum.gather_sum(rows_NM, layout, weight_N)),
        Step("dX sum", lambda _: gather_sum.gather_sum(rows_NM, layout)),
    ]


def grouped_steps(
    case: Case,
    choose: Callable[[Any, Any], Any] | None = None,
    shared: bool = False,
    times: Callable[[Any], Mapping[str, float]] | None = None,
) -> list[Step]:
    """Return the steps of the grouped products, with the tile tables that a layer shares already built.

    Args:
        choose: selects configurations instead of the tuner.
        shared: select configurations for launches concurrent with communication.
        times: returns the microseconds of a key's configurations; default: the tuner's.
    """
    from fusedmoe.kernels.triton import experts
    from fusedmoe.kernels.triton.grouped import autotune

    layout, swiglu = autograd.order(case.expert_SK, case.shape.E), ACTIVATIONS["swiglu"]
    weights, weight_N = Weights(case.w1, case.w2), gather_sum.take_pairs(case.weight_SK, layout)
    call = experts.make_call(layout, case.x_SM, shared=shared)
    chosen: dict[str, tuple[Any, Any]] = {}
    own = choose or call.choose

    def noted(key: Any, launch: Any) -> Any:
        chosen[key.variant.operation] = key, own(key, launch)
        return chosen[key.variant.operation][1]

    def told(operation: str) -> Mapping[str, object]:
        if operation not in chosen:
            return {}
        key, config = chosen[operation]
        if times is not None:
            taken = times(key)
        else:
            taken = {} if choose or not case.x_SM.is_cuda else autotune.tuner(case.x_SM.device).tuning_times_us(key)
        return {"config": str(config), "microseconds": taken}

    call.choose = noted
    h, a = experts.up(call, case.x_SM, weights, swiglu)
    dh, scaled_a, _ = experts.dhidden(call, case.dy_SM, h, weight_N, weights, swiglu)
    up_ENM = case.w1.view(case.shape.E, -1, case.shape.M)

    def step(name: str, function: Any, *arguments: Any) -> Step:
        return Step(name, lambda _: function(call, *arguments), told=lambda: told(name.lower()))

    return [
        step("up", experts.up, case.x_SM, weights, swiglu),
        step("down", experts.product, "down", a, case.w2, True),
        step("dhidden", experts.dhidden, case.dy_SM, h, weight_N, weights, swiglu),
        step("dinput", experts.product, "dinput", dh, up_ENM, False),
        step("dW1", experts.dweight, "dw1", dh, case.x_SM, "right"),
        step("dW2", experts.dweight, "dw2", case.dy_SM, scaled_a, "left"),
    ]
