"""Policies of whole models: attention, weight gradients and gradients join the plan, across layers.

They need layers that micro-batches can go through (`LayerCosts.micro`); otherwise they are as in `policies.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.lancet import PARTS, lancet_plan
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, any_order, pipemoe
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.whole import Split, micro_plan
from fusedmoe.schedule.workload import StackCosts

_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)
# Pieces of the largest gradient of a layer, and what FlowMoE's are where nothing tunes them.
_PIECES, _UNTUNED_BYTES = (1, 2, 4, 8, 16), 2**20


def flowmoe(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """Micro-batches through all layers, one degree for both passes; gradients in pieces below all-to-all (FlowMoE)."""
    return _flowmoe(costs, limit).plan


def lancet(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """Ranges of layers in micro-batches forward; weight gradients beside communication backward (Lancet)."""
    return lancet_plan(costs, [k for k in PARTS if k <= limit])


def joint(costs: StackCosts, limit: int = MAX_DEGREE) -> Plan:
    """The best in simulation of all policies, and of all degrees, gradient pieces and weight gradients together."""
    search, degrees = _flowmoe(costs, limit), _degrees(limit)
    search.try_all(search.best._replace(forward=degree, backward=degree, weights=True) for degree in degrees)
    search.try_all(search.best._replace(backward=degree) for degree in degrees)
    search.try_all(search.best._replace(forward=degree) for degree in degrees)
    search.try_all(search.best._replace(piece_bytes=search.piece(pieces)) for pieces in _PIECES)
    search.try_all([search.best._replace(weights=not search.best.weights)])
    others = [policy.plan(costs, limit) for name, policy in POLICIES.items() if name != "joint"]
    others += [any_order(costs, limit), lancet(costs, limit), *ablation(costs, limit).values()]
    return min([search.plan, *others], key=lambda plan: makespan(plan, costs))


#: Policies by name. `joint` stands for the one of `policies.POLICIES` where layers can be split.
WHOLE_POLICIES = {"flowmoe": flowmoe, "lancet": lancet, "joint": joint}


def ablation(costs: StackCosts, limit: int = MAX_DEGREE) -> dict[str, Plan]:
    """FlowMoE part by part (Table 5), each with all before it: pipelined experts, attention in micro-batches as well,
    all-reduces in pieces of 1 MiB, pieces of the best size."""
    found = _flowmoe(costs, limit)
    attention = _Search(costs, exposed=True)
    attention.try_all(Split(degree, degree) for degree in _degrees(limit))
    return {
        "pipelined experts": pipemoe(costs, limit),
        "attention": attention.plan,
        "all-reduce": micro_plan(costs, attention.best._replace(piece_bytes=_UNTUNED_BYTES)),
        "tuned": found.plan,
    }


def _flowmoe(costs: StackCosts, limit: int) -> _Search:
    search = _Search(costs)
    search.try_all(Split(degree, degree, search.piece(4)) for degree in _degrees(limit))
    search.try_all(search.best._replace(piece_bytes=search.piece(pieces)) for pieces in _PIECES)
    return search


class _Search:
    """The best split so far, and its plan."""

    def __init__(self, costs: StackCosts, *, exposed: bool = False) -> None:
        self._costs, self._exposed = costs, exposed
        self._known: dict[Split, float] = {}
        self.best: Split
        self.plan: Plan

    def piece(self, pieces: int) -> int:
        """Bytes of a piece, where the largest gradient of a layer goes in so many."""
        return max(1, -(-max(self._costs.gradient_bytes) // pieces))

    def try_all(self, splits: Iterable[Split]) -> None:
        for split in list(splits):  # as the best one was when the search began
            if split not in self._known:
                plan = micro_plan(self._costs, split, exposed=self._exposed)
                self._known[split] = makespan(plan, self._costs)
                if self._known[split] == min(self._known.values()):
                    self.best, self.plan = split, plan


def _degrees(limit: int) -> Sequence[int]:
    return [degree for degree in _DEGREES if degree <= limit]
