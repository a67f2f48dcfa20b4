"""Plans of a whole step in micro-batches: attention is split as well, and chunks go on from layer to layer (FlowMoE).

A step is what it was, with every layer's parts in chunks from its attention to its combine; chunk i of a layer waits
for chunk i of the layer before and for no other. The backward pass may be split as well, into gradients of inputs and
W tasks for those of weights (Lancet): what waits for a pass waits for the gradients of its input only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from typing import NamedTuple

from fusedmoe.schedule.bound import resource_bound_s
from fusedmoe.schedule.list_schedule import ListSchedule, list_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step import gradient_pieces, step_tasks
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import WEIGHT_GRADIENTS, Task
from fusedmoe.schedule.timeline import PHASES


class StepSplit(NamedTuple):
    """How a step is split.

    `forward`, `backward`: micro-batches of both passes. `piece_bytes`: of a gradient all-reduce (S_p); None: a layer's
    in one piece. `weights`: weight gradients are W tasks.
    """

    forward: int
    backward: int
    piece_bytes: int | None = None
    weights: bool = False

    @classmethod
    def from_plan(cls, plan: Plan) -> StepSplit:
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
    return Plan.from_orders(orders, {piece: plan.compute[-1:] for piece in pieces})


#: The seconds of a split step, and what makes its plan.
Evaluation = tuple[float, Callable[[], Plan]]


def in_micro_batches(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    """The seconds may be less where they are more than the best."""
    schedule = micro_schedule(costs, split)
    seconds = schedule.makespan_s()  # contention makes nothing shorter
    return seconds if seconds >= best_s else schedule.makespan_s(costs.contention), schedule.plan


def with_exposed_gradients(costs: StepCosts, split: StepSplit, best_s: float) -> Evaluation:
    plan = exposed_plan(costs, split)
    return makespan(plan, costs), lambda: plan


class SplitSearch:
    """The best split so far. What cannot be better by its bound is not looked at."""

    def __init__(
        self, costs: StepCosts, evaluate: Callable[[StepCosts, StepSplit, float], Evaluation], step: Callable[[], None]
    ) -> None:
        self._costs, self._evaluate, self._step = costs, evaluate, step
        self._tried: frozenset[StepSplit] = frozenset()
        self._best_s = math.inf
        self.best: StepSplit
        self.plan: Callable[[], Plan]

    def copy(self) -> SplitSearch:
        """A search that goes on from here by itself."""
        return copy(self)

    def piece(self, pieces: int) -> int:
        """Bytes of a piece, where the largest gradient of a layer goes in so many."""
        return max(1, -(-max(self._costs.gradient_bytes) // pieces))

    def try_all(self, splits: Iterable[StepSplit]) -> None:
        splits = list(splits)  # as the best one was when the search began
        least = {split: split.bound_s(self._costs) for split in splits if split not in self._tried}
        for split in sorted(least, key=least.__getitem__):
            if least[split] < self._best_s:
                seconds, plan = self._evaluate(self._costs, split, self._best_s)
                if seconds * (1 + ROUNDING) < self._best_s:
                    self._best_s, self.best, self.plan = seconds, split, plan
            self._step()
        for _ in range(len(splits) - len(least)):
            self._step()
        self._tried |= least.keys()
