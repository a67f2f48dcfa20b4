from __future__ import annotations

import random

import pytest

from bench.paper_degree import paper_cases, paper_degree
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.grid import TESTBEDS, workloads
from fusedmoe.schedule.passes import alternating, choose_degree, one_queue, pass_s, three_queues, three_queues_s
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, StageTime, chunk_times
from fusedmoe.schedule.task import PIPELINE, Task
from tests.schedule.plans import ORDERS, random_layer


def brute_force(chunks, gar, order, contention, limit) -> list[float]:
    """Seconds of each degree from 1, all by simulation."""
    kinds = tuple(kind for kind in PIPELINE if kind in chunks)
    found = []
    for degree in range(1, limit + 1):
        pieces = [Task("gradient-all-reduce", 0, 1, "backward")] if gar else []
        plan = Plan.from_orders(order(kinds, degree, "backward", 0, pieces))
        of = {kind: chunks[kind].seconds(degree) for kind in kinds} | {"gradient-all-reduce": gar}
        found.append(makespan(plan, Durations({task: of[task.kind] for task in plan}, contention)))
    return found


@pytest.mark.parametrize("testbed", TESTBEDS)
def test_the_choice_has_no_regret_on_the_published_grid(testbed):
    """Both passes of all 1,458 cases (486 differ), every degree up to 16 simulated; backward with an all-reduce."""
    model = TESTBEDS[testbed].costs
    plans = {
        (r, gar): Plan.from_orders(three_queues(PIPELINE, r, pieces=gar)) for r in range(1, 17) for gar in ((), (AR,))
    }
    count = 0
    for workload in workloads(TESTBEDS[testbed]):
        layer = workload.layer_costs(model)
        reduce_s = model.line("all-reduce/dp").seconds(layer.gradient_bytes)
        for phase, gar in (("forward", 0.0), ("backward", reduce_s)):
            chunks = layer.chunks[phase]
            seconds = []
            for r in range(1, 17):
                plan = plans[r, (AR,) if gar else ()]
                of = {kind: part.seconds(r) for kind, part in chunks.items()} | {AR.kind: gar}
                seconds.append(makespan(plan, Durations({task: of[task.kind] for task in plan})))
            choice = choose_degree(chunks, gar, limit=16)
            assert seconds[choice.degree - 1] <= min(seconds) * (1 + 1e-12)
            assert choice.seconds == pytest.approx(min(seconds), rel=1e-9)
            count += 1
    assert 3 * count == 2 * 1458


AR = Task("gradient-all-reduce", 0, 1, "backward")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("contention", [1.0, 0.7, 0.45])
def test_the_choice_has_no_regret_on_any_layer(order, contention):
    rng = random.Random()
    for _ in range(25):
        chunks = random_layer(rng).chunks["backward"]
        gar, limit = rng.choice([0.0, 10 ** rng.uniform(-4, -1)]), rng.choice([1, 5, 12])
        seconds = brute_force(chunks, gar, order, contention, limit)
        choice = choose_degree(chunks, gar, order=order, contention=contention, limit=limit)
        assert choice.seconds == pytest.approx(min(seconds), rel=1e-9)
        assert seconds[choice.degree - 1] == pytest.approx(min(seconds), rel=1e-9)
        for degree in range(1, limit + 1):
            found = pass_s(chunks, degree, gar, order=order, contention=contention)
            assert found == pytest.approx(seconds[degree - 1], rel=1e-9)


def test_of_equal_degrees_the_smallest_is_chosen():
    assert choose_degree({"expert": StageTime(0.0, 1.0)}).degree == 1
    assert choose_degree({"expert": StageTime(0.0, 1.0)}, contention=0.5).degree == 1


def test_forward_and_backward_differ():
    """Testbed B: 918 of 1,458 cases here, 912 in the paper."""
    differ = 0
    for workload in workloads(TESTBEDS["B"]):
        chunks = workload.layer_costs(TESTBEDS["B"].costs).chunks
        degrees = {choose_degree(chunks[phase], limit=8).degree for phase in chunks}
        differ += 3 * (len(degrees) > 1)
    assert 0.95 * 918 <= differ <= 1.05 * 918


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        choose_degree({"expert": StageTime(0.0, 1.0)}, limit=0)


def test_the_links_in_the_node_are_the_busiest_and_turns_help():
    chunks = {kind: StageTime(1e-4, 1e-2) for kind in PIPELINE} | {"all-gather": StageTime(1e-4, 4e-2)}
    both = [choose_degree(chunks, order=order).seconds for order in (three_queues, alternating, one_queue)]
    assert both[1] < both[0] < both[2]


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


def test_paper_cases_are_the_printed_ones_and_exact_where_gather_and_scatter_take_the_same():
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


def grid_passes(testbed, every: int):
    model = TESTBEDS[testbed].costs
    for workload in list(workloads(TESTBEDS[testbed]))[::every]:
        layer = workload.layer_costs(model)
        yield layer.chunks["forward"], 0.0
        yield layer.chunks["backward"], model.line("all-reduce/dp").seconds(layer.gradient_bytes)


@pytest.mark.parametrize("testbed", TESTBEDS)
def test_the_paper_s_choice_is_close_on_its_grid(testbed, record_property):
    regrets = paper_regret(grid_passes(testbed, 97))
    record_property("mean regret", sum(regrets) / len(regrets))
    assert sum(regrets) / len(regrets) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("testbed", TESTBEDS)
def test_the_paper_s_choice_is_close_on_its_whole_grid(testbed):
    regrets = paper_regret(grid_passes(testbed, 1))
    print(
        f"\n{testbed}: mean regret {sum(regrets) / len(regrets):.4%}, worst {max(regrets):.2%}, {len(regrets)} passes"
    )
    assert sum(regrets) / len(regrets) < 1e-3
