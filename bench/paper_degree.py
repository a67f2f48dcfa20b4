"""FSMoE §4.2 as printed: four cases of a pass, and the degree by minimising each (Algorithm 1).

For comparison only. The library uses the exact form (`passes.three_queues_s`), which equals these cases only if
all-gather and reduce-scatter take equal time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fusedmoe.schedule.passes import DegreeChoice
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, StageTime
from fusedmoe.schedule.task import PIPELINE


class Case(NamedTuple):
    """The active case (1: all-reduce, 2: experts, 3: all-to-all, 4: intra-node links) and its time in seconds."""

    number: int
    seconds: float


def paper_cases(r: float, times: ChunkTimes, gar: float = 0.0) -> Case:
    """Return the case and time of a pass of r chunks, by the predicates Q1 … Q7 (Q5 and Q7 are identical)."""
    q1, q2, q3, q4, q5, q6 = (margin > 0 for margin in _margins(r, times, gar))
    short = 2 if (q2 if q1 else q3) else 3 if q1 else 4  # the case for a short all-reduce
    long = {2: q5, 3: q4, 4: q6}[short]
    number = 1 if long else short
    return Case(number, _case_s(number, r, times, gar))


def paper_degree(chunks: Mapping[str, StageTime], gar: float = 0.0, *, limit: int = MAX_DEGREE) -> DegreeChoice:
    """Return the degree by Algorithm 1: SLSQP in the region of each case, then the better neighbouring integer.

    The printed algorithm takes the minimum of the four minima; the regions are described in §4.2. A case may hold in
    several regions, each a conjunction that SLSQP can handle.

    Returns:
        The degree and its time according to the paper's cases.
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
    """Return the degree by Algorithm 1 literally, without the regions of §4.2: the minimum of the four minima.

    Returns:
        The degree and its time in the selected case, whether or not that case holds there.
    """
    degrees = range(1, limit + 1)
    found = (DegreeChoice(r, _case_s(number, r, _times(chunks, r), gar)) for number in range(1, 5) for r in degrees)
    return min(found, key=lambda choice: choice.seconds)


# Regions of the cases: (index of a predicate's margin, +1 if true, −1 if false).
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
    """Return the margin of each predicate, which is true if its margin is positive."""
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
