"""Policies of whole models: attention, weight gradients and gradients join the plan, across layers.

They need layers that micro-batches can go through (`LayerCosts.micro`); otherwise they are as in `policies.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.lancet import PARTS, lancet_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import any_order
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.whole import Split, micro_plan
from fusedmoe.schedule.workload import StackCosts

_DEGREES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# Pieces of the largest gradient of a layer.
_PIECES = (1, 2, 4, 8, 16)


def flowmoe(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """Micro-batches through all layers, one degree for both passes; gradients in pieces below all-to-all (FlowMoE)."""
    search = _Search(costs)
    search.try_all(Split(degree, degree, search.piece(4)) for degree in _degrees(limit))
    search.try_all(search.best._replace(piece_bytes=search.piece(pieces)) for pieces in _PIECES)
    return search.plan


def lancet(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """Ranges of layers in micro-batches forward; weight gradients beside communication backward (Lancet)."""
    return lancet_plan(costs, [k for k in PARTS if k <= limit])


def joint(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """The best in simulation of all policies, and of all degrees, gradient pieces and weight gradients together."""
    search = _Search(costs)
    degrees = _degrees(limit)
    for weights in (False, True):
        search.try_all(Split(degree, degree, search.piece(2), weights) for degree in degrees)
    search.try_all(search.best._replace(backward=degree) for degree in degrees)
    search.try_all(search.best._replace(forward=degree) for degree in degrees)
    search.try_all(
        search.best._replace(piece_bytes=search.piece(pieces), weights=weights)
        for pieces in _PIECES
        for weights in (False, True)
    )
    plans = [search.plan, any_order(costs, limit), lancet(costs, limit), flowmoe(costs, limit)]
    return min(plans, key=lambda plan: makespan(plan, costs))


class _Search:
    """The best split so far, and its plan."""

    def __init__(self, costs: StackCosts) -> None:
        self._costs = costs
        self._known: dict[Split, float] = {}
        self.best: Split
        self.plan: Plan

    def piece(self, pieces: int) -> int:
        return max(1, -(-max(self._costs.gradient_bytes) // pieces))

    def try_all(self, splits: Iterable[Split]) -> None:
        for split in list(splits):
            if split not in self._known:
                plan = micro_plan(self._costs, split)
                self._known[split] = makespan(plan, self._costs)
                if self._known[split] == min(self._known.values()):
                    self.best, self.plan = split, plan


def _degrees(limit: int) -> Sequence[int]:
    return [degree for degree in _DEGREES if degree <= limit]
