"""Plans of a whole step in micro-batches: attention is split as well, and chunks go on from layer to layer (FlowMoE).

A step is what it was, with every layer's parts in chunks from its attention to its combine; chunk i of a layer waits
for chunk i of the layer before and for no other. Weight gradients may be tasks of their own (Lancet): what waits for a
pass waits for the gradients of its input only.
"""

from __future__ import annotations

from typing import NamedTuple

from fusedmoe.schedule.bound import resource_bound_s
from fusedmoe.schedule.list_schedule import ListSchedule, list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import gradient_pieces, step_tasks
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task
from fusedmoe.schedule.timeline import PHASES


class StepSplit(NamedTuple):
    """How a step is split.

    `forward`, `backward`: micro-batches of both passes. `piece_bytes`: of a gradient all-reduce (S_p); None: a layer's
    in one piece. `weights`: weight gradients are tasks of their own.
    """

    forward: int
    backward: int
    piece_bytes: int | None = None
    weights: bool = False

    @classmethod
    def of(cls, plan: Plan) -> StepSplit:
        """How a plan of `micro_schedule` is split. Its `piece_bytes` are those of the largest piece there is."""
        degrees = plan.degrees.items()
        forward, backward = (max(degree for (phase, _), degree in degrees if phase == one) for one in PHASES)
        piece_bytes = max((task.size or 0 for task in plan.inter if task.kind == "gradient-all-reduce"), default=None)
        weights = any(task.kind in WEIGHT_GRADIENTS.values() for task in plan.compute)
        return cls(forward, backward, piece_bytes, weights)

    def bound_s(self, costs: StepCosts) -> float:
        """Seconds that no order of a step that is split so beats."""
        pieces = gradient_pieces(costs.gradient_bytes, self.piece_bytes)
        return resource_bound_s(costs, (self.forward, self.backward), [piece.size or 0 for piece in pieces])

    def tasks(self, costs: StepCosts) -> list[Task]:
        """All tasks of a step that is split so. Raises `ConfigError` for layers that cannot be (`LayerCosts.micro`)."""
        return list(step_tasks(costs, *self[:3], weights=self.weights))


def micro_schedule(costs: StepCosts, split: StepSplit) -> ListSchedule:
    """A step that is split so, every order by list scheduling: its plan, and its makespan at a fraction of the cost.

    Raises:
        ConfigError: layers that cannot be split (`LayerCosts.micro`).
    """
    tasks = split.tasks(costs)
    return ListSchedule(tasks, costs.durations(tasks))


def exposed_plan(costs: StepCosts, split: StepSplit) -> Plan:
    """The plan of a step that is split so, where all gradients wait for the end of the backward pass.

    Raises:
        ConfigError: layers that cannot be split.
    """
    late = ("gradient-all-reduce", "optimizer")
    found = split.tasks(costs)
    tasks = [task for task in found if task.kind not in late]
    plan = list_plan(tasks, costs.durations(tasks))
    pieces, end = ([task for task in found if task.kind == kind] for kind in late)
    orders = {"compute": [*plan.compute, *end], "intra": plan.intra, "inter": [*plan.inter, *pieces]}
    return Plan.of(orders, {piece: plan.compute[-1:] for piece in pieces})
