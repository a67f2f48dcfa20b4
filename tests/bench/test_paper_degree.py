"""The paper's printed choice of degree compared with the exact optimum."""

from __future__ import annotations

import random

import pytest

from bench.paper_degree import paper_cases, paper_degree
from bench.simulate.grid import workloads
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import choose_degree, three_queues_s
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, chunk_times


def case_by_hand(r: int, times: ChunkTimes, gar: float) -> float:
    """The paper's four cases, predicate by predicate as printed in §4.2."""
    a2a, ag, exp, rs, _ = times
    q1 = a2a > ag
    q2 = r * exp > 2 * (r - 1) * a2a
    q3 = r * exp > (r - 1) * (ag + rs)
    q4 = gar > ag + rs
    q5 = gar > r * exp - 2 * (r - 1) * a2a + ag + rs
    q6 = gar > r * ag + r * rs - 2 * (r - 1) * a2a
    q7 = gar > ag + rs + r * exp - 2 * (r - 1) * a2a
    if (q1 and not q2 and q4) or (q1 and q2 and q5) or (not q1 and not q3 and q6) or (not q1 and q3 and q7):
        return 2 * r * a2a + gar
    if (q1 and q2 and not q5) or (not q1 and q3 and not q7):
        return 2 * a2a + ag + rs + r * exp
    if q1 and not q2 and not q4:
        return 2 * r * a2a + ag + rs
    assert not q1 and not q3 and not q6
    return 2 * a2a + r * ag + r * rs


def test_paper_cases_are_exact_if_gather_time_equals_scatter():
    rng = random.Random()
    numbers, off = set(), 0
    for _ in range(5000):
        d, ag, x, rs = (rng.random() for _ in range(4))
        r, gar = rng.randint(1, 12), rng.choice([0.0, 4 * rng.random()])
        times = ChunkTimes(d, ag, x, rs, d)
        case = paper_cases(r, times, gar)
        numbers.add(case.number)
        assert case.seconds == pytest.approx(case_by_hand(r, times, gar), rel=1e-12)
        off += case.seconds != pytest.approx(three_queues_s(r, times, gar), rel=1e-9)
        same = times._replace(reduce_scatter=ag)
        assert paper_cases(r, same, gar).seconds == pytest.approx(three_queues_s(r, same, gar), rel=1e-9)
    assert numbers == {1, 2, 3, 4}
    assert 0.1 < off / 5000 < 0.4


def paper_regret(cases) -> list[float]:
    regrets = []
    for chunks, gar in cases:
        degree = paper_degree(chunks, gar).degree
        assert 1 <= degree <= MAX_DEGREE
        best = choose_degree(chunks, gar).seconds
        regrets.append(three_queues_s(degree, chunk_times(chunks, degree), gar) / best - 1)
    assert min(regrets) >= -1e-12
    return regrets


def grid_passes(testbed, every: int, first: int = 0):
    model = TESTBEDS[testbed].costs
    for workload in list(workloads(TESTBEDS[testbed]))[first::every]:
        layer = workload.layer_costs(model)
        yield layer.chunks["forward"], 0.0
        yield layer.chunks["backward"], model.line("all-reduce/dp").seconds(layer.gradient_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("testbed", TESTBEDS)
def test_paper_degree_has_low_regret_on_its_grid(testbed):
    """Every 25th case: 25 is coprime to the lengths of the grid's axes, so every axis value occurs."""
    regrets = paper_regret(grid_passes(testbed, 25, first := random.randrange(25)))
    mean = sum(regrets) / len(regrets)
    assert mean < 1e-3, f"{testbed} from {first}: mean regret {mean:.4%}, worst {max(regrets):.2%}"
