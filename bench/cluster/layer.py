"""`MoELayer(schedule=…)` in a setting: both passes under autograd, with experts that wait instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from bench.cluster.setting import Setting
from bench.cluster.step import START_S
from bench.cluster.turns import beside, degrees_of, first_of, in_turns, predicted, recorded_step, refitted, row
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.run import Plans
from fusedmoe.experts.networks import Place, RowExperts
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.moe import number_layers
from fusedmoe.layers.schedule import Schedule, ScheduledPlans
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import layer_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, RESOURCES, Task, TaskKind, resources_of
from fusedmoe.schedule.workload import Workload

# Recorded steps, of which the picture shows the one nearest the median.
_DRAWN_OF = 5


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time the layer under every policy and without a schedule ("off"), with its own prediction. Collective."""
    off = make_layer(setting, topology, None)
    x_SM = torch.randn(setting.S // setting.k, setting.M).requires_grad_()
    model = off.measured_costs(len(x_SM))
    dy_SM = torch.randn(setting.S // setting.k, setting.M)
    made = {
        "off": off,
        **{name: make_layer(setting, topology, Schedule(name, costs=model)) for name in layer_policies()},
    }
    auto = Schedule.named("auto")
    assert auto is not None
    made["auto"] = make_layer(setting, topology, replace(auto, costs=model))
    plans = {name: _plans(layer, x_SM, dy_SM) for name, layer in made.items()}
    first = first_of({name: str(plan) if plan else name for name, plan in plans.items()})
    runs = {name: partial(run, made[name], x_SM, dy_SM) for name in dict.fromkeys(first.values())}
    workload = off.experts.workload(setting.S, 4, setting.ep, setting.esp)
    costs = workload.step_costs(model, [0], off.parts)
    both = {name: both_passes(plan, costs) for name in runs if (plan := plans[name])}
    later = {}
    for name, plan in both.items():
        number_layers([made[name]])  # spans and tasks then have equal layer numbers
        step = partial(recorded_step, topology, partial(run, made[name], x_SM, dy_SM))
        later[name] = refitted(topology, plan, costs, step)
    rows = {name: row(seconds) for name, seconds in in_turns(topology, runs, rounds).items()}
    for name, plan in both.items():
        found = rows[name]
        found |= predicted(found["median_s"], makespan(plan, costs), plan, later[name])
        found["degrees"] = list(degrees_of(plan))
    parts = {phase: {kind: vars(of) for kind, of in costs.layers[0].chunks[phase].items()} for phase in PHASES}
    fastest = min((name for name in rows if name != "off"), key=lambda name: rows[name]["median_s"])
    timelines = {}
    for name in ("off", fastest):
        steps = []
        for _ in range(_DRAWN_OF):
            all_gather_object(topology.world, None, "beginning together")
            steps.append(recorded_step(topology, partial(run, made[name], x_SM, dy_SM)))
        # The picture's titles state medians.
        apart_s = [abs(step.duration_s - rows[name]["median_s"]) for step in steps]
        timelines[name] = steps[apart_s.index(min(apart_s))].as_dict()
    return {
        "rows": beside(rows, first),
        "parts": parts,
        "layers": 1,
        "timelines": timelines,
    }


def both_passes(plans: Plans, costs: StepCosts) -> Plan:
    """Return both passes of a single layer as one plan: no attention, but the work around the pipeline."""
    orders = {one: [*plans.forward.on(one), *plans.backward.on(one)] for one in RESOURCES}
    for phase in PHASES:
        around = [kind for kind in (TaskKind.OTHER, TaskKind.COUNT_EXCHANGE) if kind in costs.layers[0].dense_s[phase]]
        for task in (Task(kind, None, 0, phase) for kind in around):
            order = orders[resources_of(task.kind)[0]]
            order.insert(0 if phase == "forward" else len(order), task)
    return Plan.from_orders(orders)


def make_layer(
    setting: Setting,
    topology: Topology | None,
    schedule: Schedule | None,
    shared: fusedmoe.experts.Experts | None = None,
) -> fusedmoe.MoELayer:
    """Create the setting's layer; without a topology, all experts are local and nothing is sent."""
    torch.manual_seed(0)
    experts = fusedmoe.experts.FeedForward(setting.H) if setting.emulated_flops is None else Waiting(setting)
    return fusedmoe.MoELayer(
        setting.M,
        fusedmoe.gates.Random(setting.E, k=setting.k),
        experts,
        topology=topology,
        mp_input="split",
        schedule=schedule,
        shared=shared,
    )


def _plans(layer: fusedmoe.MoELayer, x_SM: Tensor, dy_SM: Tensor) -> Plans | None:
    run(layer, x_SM, dy_SM)
    # A layer without a schedule has no plans.
    return next(iter(layer.plans.plans_by_workload.values()), None) if isinstance(layer.plans, ScheduledPlans) else None


def run(layer: fusedmoe.MoELayer, x_SM: Tensor, dy_SM: Tensor, recorder: Recorder | None = None) -> None:
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    layer.recorder = recorder
    y_SM = layer(x_SM)
    with span(recorder, "between the passes", kind="loss"):
        pass
    y_SM.backward(dy_SM)
    with span(recorder, "after the passes", kind="optimizer"):
        pass
    layer.recorder = None


class Waiting(RowExperts):
    """Experts that return their rows after the time of an accelerator, in both passes."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        assert setting.emulated_flops is not None
        self._setting = setting
        self.row_s = setting.expert_flop / setting.emulated_flops / (setting.S * setting.esp)

    def make(self, model_dim: int, place: Place, seed: int, **_: Any) -> None:
        # `GradientBuckets` locates a layer's dense part by its expert parameters.
        self.w = nn.Parameter(torch.zeros(place.local, 1))
        self.shardings["w"] = {"ep": 0, "esp": 1}

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        return Wait.apply(rows_NM, self.w, START_S + len(rows_NM) * self.row_s)

    def in_chunks(self, x_SM: Tensor) -> WaitingChunks:
        return WaitingChunks(self.row_s, self.w)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        of = self._setting
        return Workload(1, rows * esp, of.M, of.H, of.E, k=1, expert="ffn", ep=ep, esp=esp, itemsize=itemsize)


class Wait(torch.autograd.Function):
    """Identity that waits for the given seconds, twice as long in backward. A weight gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, seconds: float) -> Tensor:
        ctx.seconds, ctx.like = seconds, weight
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None if ctx.like is None else torch.zeros_like(ctx.like), None


class WaitingChunks:
    """`Waiting` in chunks; see `fusedmoe.engine.chunk_experts.ChunkExperts`."""

    can_rechunk = needs_input_rows = True

    def __init__(self, row_s: float, weight: Tensor) -> None:
        self._row_s = row_s
        self.parameters: Sequence[Tensor | None] = (weight,)

    def for_backward(self) -> WaitingChunks:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        time.sleep(START_S + layout.rows * self._row_s)
        return gather_sum(permute(x_RM, layout), layout, weight_R), x_RM.new_empty(layout.rows, 0)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Any
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        dx_RM, dweight_R, rest = self.backward_rows(dy_RM, x_RM, kept, layout, weight_R)
        return dx_RM, dweight_R, rest(totals)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor, kept: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Callable[[Any], Sequence[Tensor | None]]]:
        half_s = START_S + layout.rows * self._row_s
        time.sleep(half_s)
        dweight_R = None if weight_R is None else torch.zeros_like(weight_R)

        like = [torch.zeros_like(one) for one in self.parameters if one is not None]

        def rest(totals: Any) -> Sequence[Tensor | None]:
            time.sleep(half_s)
            return like

        return gather_sum(permute(dy_RM, layout), layout, weight_R), dweight_R, rest
