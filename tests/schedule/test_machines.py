"""Costs of machines from data sheets: lines by hand, spreads over ranks, and sources of every figure."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Contention, Line
from fusedmoe.schedule.machines import (
    MACHINES,
    TESTBEDS,
    Link,
    Machine,
    SourcedValue,
    expected_maximum,
    measured_spread,
    scaling_ranks,
    slowest_rank_factor,
)
from fusedmoe.schedule.timeline import Span, Timeline


def chosen_datum(value: float) -> SourcedValue:
    return SourcedValue(value, "chosen")


# Four ranks a node; a link carries 50 of 100 bytes/s inside it, and two cards 16 of 20 each: 8 bytes/s for each rank.
TINY = Machine(
    "tiny",
    4,
    "fp32",
    flops=chosen_datum(1000.0),
    product_start_s=chosen_datum(0.5),
    copied_bytes_per_s=chosen_datum(10.0),
    start_s=chosen_datum(1.0),
    intra=Link(chosen_datum(0.1), chosen_datum(100.0), chosen_datum(0.5)),
    inter=Link(chosen_datum(0.3), chosen_datum(20.0), chosen_datum(0.8)),
    cards=chosen_datum(2),
    contention=chosen_datum(0.7),
    computes_beside=chosen_datum(0.8),
    links_beside=chosen_datum(0.9),
    spread=chosen_datum(0.0),
)


def lines_are_close(line: Line, alpha_s: float, beta_s: float) -> bool:
    return math.isclose(line.alpha_s, alpha_s) and math.isclose(line.beta_s, beta_s)


def test_cost_lines_of_worked_example() -> None:
    # Four nodes of four; groups of experts have two ranks in each of four nodes, attention is split over two.
    costs = TINY.costs(16, ep=8, esp=2, mp=2)
    assert set(costs.lines) == {
        *("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp", "gemm", "copy")
    }
    assert costs.contention == Contention(0.8, 0.8, 0.9, 0.7, 0.9, 0.7) and "not measured" in costs.machine
    assert lines_are_close(costs.line("all-to-all/ep"), 1 + 0.1 + 6 * 0.3, 6 / 8 / 8)
    assert lines_are_close(costs.line("all-gather/esp"), 1 + 0.1, 1 / 2 / 50)
    assert costs.line("reduce-scatter/esp") == costs.line("all-gather/esp")
    # Eight ranks, two in each of four nodes; half of each rank's bytes cross nodes.
    assert lines_are_close(costs.line("all-reduce/dp"), 1 + 2 * 0.1 + 2 * 2 * 0.3, 2 * 3 / 4 / 2 / 8)
    assert lines_are_close(costs.line("gemm"), 0.5, 1 / 1000) and lines_are_close(costs.line("copy"), 0.5, 1 / 10)


def test_single_node_uses_intra_node_links_only() -> None:
    costs = TINY.costs(4, ep=4)
    assert lines_are_close(costs.line("all-to-all/ep"), 1 + 3 * 0.1, 3 / 4 / 50)
    assert lines_are_close(costs.line("all-reduce/dp"), 1 + 6 * 0.1, 2 * 3 / 4 / 50)
    assert set(TINY.costs(1).lines) == {"gemm", "copy"}
    # The slower link inside the node determines the time.
    slow = replace(TINY, intra=replace(TINY.intra, reached=chosen_datum(0.01)))
    assert lines_are_close(slow.costs(8, ep=8).line("all-to-all/ep"), 1 + 3 * 0.1 + 4 * 0.3, 3 / 8 / 1)
    # Attention split over all ranks has no replicas; the other parameters are still replicated on every rank.
    assert TINY.costs(4, mp=4).line("all-reduce/dp") == TINY.all_reduce(4, 4, 1)


@pytest.mark.parametrize("name", MACHINES)
def test_all_to_all_time_is_monotonic_in_ranks(name: str) -> None:
    machine, chance = MACHINES[name], random.Random(name)
    for esp in (1, 2):
        numbers = [ranks for ranks in scaling_ranks(machine) if ranks >= 2 * esp]
        before: Line | None = None
        for ranks in numbers:
            line = machine.costs(ranks, ep=ranks // esp, esp=esp).line("all-to-all/ep")
            for nbytes in (0, 10 ** chance.uniform(0, 10)):
                assert before is None or line.seconds(nbytes) >= before.seconds(nbytes)
            before = line
        reduces = [machine.all_reduce(ranks, ranks // esp, esp) for ranks in numbers]
        assert reduces == sorted(reduces, key=lambda line: line.alpha_s)


@pytest.mark.parametrize("name", TESTBEDS)
def test_machine_model_reproduces_published_testbed(name: str) -> None:
    """All-reduce is not among the measurements behind its figures."""
    testbed, machine = TESTBEDS[name], MACHINES[f"fsmoe-{name.lower()}"].with_values(spread=0.0)
    costs = machine.costs(testbed.nodes * testbed.gpus, testbed.nodes, testbed.gpus, testbed.gpus)
    for line in ("all-to-all/ep", "all-gather/esp", "gemm"):
        published = testbed.costs.line(line)
        assert lines_are_close(costs.line(line), published.alpha_s, published.beta_s)
    for line in ("reduce-scatter/esp", "all-reduce/dp"):
        assert costs.line(line).beta_s == pytest.approx(testbed.costs.line(line).beta_s, rel=0.11)
    assert 0.4 < machine.inter.reached.value < 1


def test_expected_maximum_and_slowest_rank_factor() -> None:
    assert expected_maximum(1) == pytest.approx(0, abs=1e-9)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    chance = random.Random()
    drawn = [max(chance.gauss(0, 1) for _ in range(64)) for _ in range(1000)]
    assert expected_maximum(64) == pytest.approx(sum(drawn) / len(drawn), abs=0.1)  # seven standard errors
    rising = [slowest_rank_factor(ranks, 0.1) for ranks in (1, 8, 64, 512, 4096)]
    assert rising == sorted(rising) and rising[0] == pytest.approx(1) and rising[-1] == pytest.approx(1.363, abs=1e-3)
    even, uneven = TINY.costs(16), TINY.with_values(spread=0.1).costs(16)
    factor = slowest_rank_factor(16, 0.1)
    for line in ("gemm", "copy"):
        assert lines_are_close(uneven.line(line), factor * even.line(line).alpha_s, factor * even.line(line).beta_s)
    assert uneven.line("all-reduce/dp") == even.line("all-reduce/dp")


def test_spread_is_estimated_from_timelines() -> None:
    chance = random.Random()
    lengths = {"attention": 2.0, "expert": 5.0}

    def measured(rank: int) -> Timeline:
        spans, now = [], 0.0
        for layer in [*range(299), 0]:
            for kind, mean in lengths.items():
                end = now + mean * chance.gauss(1, 0.05)
                spans.append(
                    Span(kind, kind, "compute", now, end, None if kind == "attention" else 0, layer, "forward")
                )
                now = end
            spans.append(Span("combine", "combine", "inter", now, now + 10 * chance.random(), 0, layer, "forward"))
        return Timeline(rank, tuple(spans), "measured")

    timelines = [measured(rank) for rank in range(8)]
    assert measured_spread(timelines) == pytest.approx(0.05, rel=0.15)
    assert measured_spread([timelines[0], replace(timelines[0], rank=1)]) == 0
    for too_few in ([], timelines[:1], [Timeline(0, (), "measured"), Timeline(1, (), "measured")]):
        with pytest.raises(ConfigError, match="at least two ranks"):
            measured_spread(too_few)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ranks": 6}, "fill nodes of 4"),
        ({"ranks": 8, "ep": 3}, "ep · esp = 3"),
        ({"ranks": 8, "ep": 0}, "ep · esp = 0"),
        ({"ranks": 8, "ep": -2, "esp": -1}, "ep · esp = 2"),
        ({"ranks": 0}, "0 ranks"),
        ({"ranks": 8, "mp": 3}, "mp = 3"),
        ({"ranks": 16, "esp": 8}, "must divide the 4 ranks of a node"),
        ({"ranks": 12, "ep": 6, "esp": 1}, "evenly"),
    ],
)
def test_costs_reject_invalid_group_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TINY.costs(**sizes)


@pytest.mark.parametrize("spread", [-0.1, math.nan, math.inf])
def test_invalid_spread_is_rejected(spread: float) -> None:
    with pytest.raises(ConfigError, match="spread"):
        TINY.with_values(spread=spread).costs(8)


_SHARES = ("intra.reached", "inter.reached", "contention", "computes_beside", "links_beside")


def test_published_bounds_contain_their_value() -> None:
    bounded = [figure for machine in MACHINES.values() for _, figure in machine.figures() if figure.bounds is not None]
    assert bounded and all(low <= figure.value <= high for figure in bounded for low, high in (figure.bounds,))


def test_all_machine_figures_have_sources() -> None:
    for machine in MACHINES.values():
        figures = dict(machine.figures())
        assert len(figures) == 16 and all(one.source for one in figures.values())
        assert figures["spread"].estimate
        assert all(0 < figures[name].value <= 1 for name in _SHARES)
        assert all(figures[name].value > 0 for name in ("flops", "inter.bytes_per_s", "intra.bytes_per_s", "cards"))
    assert scaling_ranks(MACHINES["dgx-h100"]) == [8 * 2**power for power in range(10)]
    assert scaling_ranks(replace(TINY, ranks_per_node=12)) == [8]
    assert scaling_ranks(replace(TINY, ranks_per_node=32)) == [8 * 2**power for power in range(10)]
