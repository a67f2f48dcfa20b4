"""Policies of whole models: attention, weight gradients and gradients join the plan, across layers.

They need layers that micro-batches can go through (`LayerCosts.micro`); otherwise they are as in `policies.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import product

from fusedmoe.schedule.lancet import PARTS, lancet_plan
from fusedmoe.schedule.micro_batches import StepSplit, exposed_plan, micro_schedule
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, any_order, best_of
from fusedmoe.schedule.simulate import ROUNDING, makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts

_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)
# Pieces of the largest gradient of a layer, and what FlowMoE's are where nothing tunes them.
_PIECES, _UNTUNED_BYTES = (1, 2, 4, 8, 16), 2**20


def flowmoe(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Micro-batches through all layers, one degree for both passes; gradients in pieces below all-to-all (FlowMoE)."""
    return WholeModel(costs, limit, samples).flowmoe


def lancet(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """Ranges of layers in micro-batches forward; weight gradients beside communication backward (Lancet)."""
    return WholeModel(costs, limit, samples).lancet


def joint(costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Plan:
    """The best in simulation of all policies, degrees, gradient pieces and weight gradients."""
    return WholeModel(costs, limit, samples).joint


def ablation(costs: StepCosts, limit: int = MAX_DEGREE) -> dict[str, Plan]:
    """FlowMoE part by part (Table 5), each with all before it: pipelined experts, attention in micro-batches as well,
    all-reduces in pieces of 1 MiB, pieces of the best size."""
    return WholeModel(costs, limit).ablation


#: Policies by name. `joint` stands for the one of `policies.POLICIES` where layers can be split.
WHOLE_POLICIES = {"flowmoe": flowmoe, "lancet": lancet, "joint": joint}


class WholeModel:
    """The plans of one step by all policies, each made when it is first asked for: what they share is searched once.

    Args:
        limit: the most chunks, and the most micro-batches.
        samples: of a batch; then micro-batches have equally many. None: any number of micro-batches.
        progress: told how many parts of the search of `joint` are done, of how many; the others' are among them.
    Raises:
        ConfigError: layers that cannot be split.
    """

    def __init__(
        self,
        costs: StepCosts,
        limit: int = MAX_DEGREE,
        samples: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._costs, self._limit, self._progress = costs, limit, progress
        self._degrees: Sequence[int] = [degree for degree in _DEGREES if degree <= limit]
        if samples is not None:
            self._degrees = [degree for degree in range(1, limit + 1) if samples % degree == 0]
        self._made: dict[str, Plan] = {}
        # Splits that FlowMoE tries, those that `joint` adds in two rounds, the ablation's, and policies.
        degrees, pieces = len(self._degrees), len(_PIECES)
        self._total = (degrees + pieces) + degrees + 2 * (2 * degrees * pieces + degrees) + (degrees + 1)
        self._total += len(POLICIES) + 2
        self._done = 0

    def plan(self, name: str) -> Plan:
        """By a policy of `WHOLE_POLICIES` or of `policies.POLICIES`."""
        if name in WHOLE_POLICIES:
            found: Plan = getattr(self, name)
            return found
        if name not in self._made:
            self._made[name] = POLICIES[name].plan(self._costs, self._limit)
            self._step()
        return self._made[name]

    @cached_property
    def flowmoe(self) -> Plan:
        return self._tuned.plan()

    @cached_property
    def lancet(self) -> Plan:
        plan = lancet_plan(self._costs, [k for k in PARTS if k in self._degrees])
        self._step()
        return plan

    @cached_property
    def joint(self) -> Plan:
        search = self._tuned.copy()
        search.try_all(search.best._replace(forward=degree, backward=degree, weights=True) for degree in self._degrees)
        begun = None
        while begun != search.best:  # until no such change is better
            begun = search.best
            weights, sizes = (True, False), [search.piece(pieces) for pieces in _PIECES]
            search.try_all(
                search.best._replace(backward=backward, piece_bytes=size, weights=alone)
                for backward, size, alone in product(self._degrees, sizes, weights)
            )
            search.try_all(search.best._replace(forward=degree) for degree in self._degrees)
        plans = [self.plan(name) for name in POLICIES if name != "joint"]
        plans.append(any_order(self._costs, self._limit))
        plans += [*self.ablation.values(), self.lancet, search.plan()]
        self._done = self._total
        self._step()
        return best_of(plans, self._costs)

    @cached_property
    def ablation(self) -> dict[str, Plan]:
        """As the function of that name."""
        attention = _Search(self._costs, _with_exposed_gradients, self._step)
        attention.try_all(StepSplit(degree, degree) for degree in self._degrees)
        untuned = attention.best._replace(piece_bytes=_UNTUNED_BYTES)
        found = {
            "pipelined experts": self.plan("pipemoe"),
            "attention": attention.plan(),
            "all-reduce": micro_schedule(self._costs, untuned).plan(),
            "tuned": self.flowmoe,
        }
        self._step()
        return found

    @cached_property
    def _tuned(self) -> _Search:
        search = _Search(self._costs, _in_micro_batches, self._step)
        search.try_all(StepSplit(degree, degree, search.piece(4)) for degree in self._degrees)
        search.try_all(search.best._replace(piece_bytes=search.piece(pieces)) for pieces in _PIECES)
        return search

    def _step(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


# The seconds of a split step, and what makes its plan.
_Evaluation = tuple[float, Callable[[], Plan]]


def _in_micro_batches(costs: StepCosts, split: StepSplit, best_s: float) -> _Evaluation:
    """The seconds may be less where they are more than the best."""
    schedule = micro_schedule(costs, split)
    seconds = schedule.makespan_s()  # contention makes nothing shorter
    return seconds if seconds >= best_s else schedule.makespan_s(costs.contention), schedule.plan


def _with_exposed_gradients(costs: StepCosts, split: StepSplit, best_s: float) -> _Evaluation:
    plan = exposed_plan(costs, split)
    return makespan(plan, costs), lambda: plan


class _Search:
    """The best split so far. What cannot be better by its bound is not looked at."""

    def __init__(
        self, costs: StepCosts, evaluate: Callable[[StepCosts, StepSplit, float], _Evaluation], step: Callable[[], None]
    ) -> None:
        self._costs, self._evaluate, self._step = costs, evaluate, step
        self._tried: frozenset[StepSplit] = frozenset()
        self._best_s = math.inf
        self.best: StepSplit
        self.plan: Callable[[], Plan]

    def copy(self) -> _Search:
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
