"""FSMoE §4.2 as printed: four cases of a pass, and the degree found by minimising each (Algorithm 1).

For study and comparison; the library uses the exact form (`passes.three_queues_s`), which these cases equal only where
an all-gather takes as long as a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fusedmoe.schedule.passes import DegreeChoice
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, StageTime
from fusedmoe.schedule.task import PIPELINE


class Case(NamedTuple):
    """Which of the four holds (1: all-reduce, 2: experts, 3: all-to-all, 4: links in the node), and its seconds."""

    number: int
    seconds: float


def paper_cases(r: float, times: ChunkTimes, gar: float = 0.0) -> Case:
    """The case of a pass of r chunks and its time, by the predicates Q1 … Q7 (Q5 and Q7 are the same one)."""
    q1, q2, q3, q4, q5, q6 = (margin > 0 for margin in _margins(r, times, gar))
    short = 2 if (q2 if q1 else q3) else 3 if q1 else 4  # the case when the all-reduce is short
    long = {2: q5, 3: q4, 4: q6}[short]
    number = 1 if long else short
    return Case(number, _case_s(number, r, times, gar))


def paper_degree(chunks: Mapping[str, StageTime], gar: float = 0.0, *, limit: int = MAX_DEGREE) -> DegreeChoice:
    """The degree by Algorithm 1: SLSQP in the region where each case holds, then the better whole neighbour.

    The printed algorithm takes the least of the four minima; of these regions it speaks in §4.2. A case may hold in
    several regions; each is a conjunction, which SLSQP can handle.

    Returns:
        The degree, and the time that the paper's cases give for it.
    """
    from scipy.optimize import minimize

    scale = _case_s(2, 1, _times(chunks, 1), 0.0)
    unit = {kind: StageTime(part.alpha_s / scale, part.whole_s / scale) for kind, part in chunks.items()}
    candidates = set()
    for number, conditions in _REGIONS:
        margins = [_condition(unit, gar / scale, index, sign) for index, sign in conditions]
        for start in _STARTS:
            found = minimize(
                lambda x, number=number: _case_s(number, x[0], _times(unit, x[0]), gar / scale),
                [min(start, limit)],
                method="SLSQP",
                bounds=[(1.0, float(limit))],
                constraints=[{"type": "ineq", "fun": margin} for margin in margins],
            )
            r = float(found.x[0])
            if all(margin([r]) >= -_TOLERANCE for margin in margins):
                candidates |= {min(limit, max(1, whole)) for whole in (math.floor(r), math.ceil(r))}
    choices = [DegreeChoice(r, paper_cases(r, _times(chunks, r), gar).seconds) for r in sorted(candidates or {1})]
    return min(choices, key=lambda choice: choice.seconds)


def unconstrained_degree(chunks: Mapping[str, StageTime], gar: float = 0.0, *, limit: int = MAX_DEGREE) -> DegreeChoice:
    """The degree by Algorithm 1 as its lines stand, without the regions of §4.2: the least of the four minima wins.

    Returns:
        The degree, and the time that its case gives for it, whether that case holds there or not.
    """
    degrees = range(1, limit + 1)
    found = (DegreeChoice(r, _case_s(number, r, _times(chunks, r), gar)) for number in range(1, 5) for r in degrees)
    return min(found, key=lambda choice: choice.seconds)


# Where each case holds: (index of a predicate's margin, +1 where it is true and −1 where it is not).
_Q1, _Q2, _Q3, _Q4, _Q5, _Q6 = range(6)
_REGIONS = (
    (1, ((_Q1, 1), (_Q2, -1), (_Q4, 1))),
    (1, ((_Q1, 1), (_Q2, 1), (_Q5, 1))),
    (1, ((_Q1, -1), (_Q3, -1), (_Q6, 1))),
    (1, ((_Q1, -1), (_Q3, 1), (_Q5, 1))),
    (2, ((_Q1, 1), (_Q2, 1), (_Q5, -1))),
    (2, ((_Q1, -1), (_Q3, 1), (_Q5, -1))),
    (3, ((_Q1, 1), (_Q2, -1), (_Q4, -1))),
    (4, ((_Q1, -1), (_Q3, -1), (_Q6, -1))),
)

_STARTS = (1.0, 4.0)
_TOLERANCE = 1e-6


def _margins(r: float, times: ChunkTimes, gar: float) -> tuple[float, ...]:
    """Returns how far each predicate is from changing: it is true where its margin is positive."""
    a2a, ag, x, rs, _ = times
    hidden = r * x - 2 * (r - 1) * a2a
    return (
        a2a - ag,
        hidden,
        r * x - (r - 1) * (ag + rs),
        gar - (ag + rs),
        gar - (hidden + ag + rs),
        gar - (r * (ag + rs) - 2 * (r - 1) * a2a),
    )


def _case_s(number: int, r: float, times: ChunkTimes, gar: float) -> float:
    a2a, ag, x, rs, _ = times
    return (2 * r * a2a + gar, 2 * a2a + ag + rs + r * x, 2 * r * a2a + ag + rs, 2 * a2a + r * (ag + rs))[number - 1]


def _times(chunks: Mapping[str, StageTime], r: float) -> ChunkTimes:
    return ChunkTimes(*(chunks[k].alpha_s + chunks[k].whole_s / r if k in chunks else 0.0 for k in PIPELINE))


def _condition(chunks: Mapping[str, StageTime], gar: float, index: int, sign: int) -> Callable[..., float]:
    return lambda x: sign * _margins(x[0], _times(chunks, x[0]), gar)[index]
