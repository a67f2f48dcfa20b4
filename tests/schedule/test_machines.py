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
    Known,
    Link,
    Machine,
    expected_maximum,
    scale_of,
    slowest_of,
    spread_of,
)
from fusedmoe.schedule.timeline import Span, Timeline


def known(value: float) -> Known:
    return Known(value, "chosen")


# Four ranks a node; a link carries 50 of 100 bytes/s inside it, and two cards 16 of 20 each: 8 bytes/s for each rank.
TINY = Machine(
    "tiny",
    4,
    "fp32",
    flops=known(1000.0),
    product_start_s=known(0.5),
    copied_bytes_per_s=known(10.0),
    start_s=known(1.0),
    intra=Link(known(0.1), known(100.0), known(0.5)),
    inter=Link(known(0.3), known(20.0), known(0.8)),
    cards=known(2),
    contention=known(0.7),
    computes_beside=known(0.8),
    links_beside=known(0.9),
    spread=known(0.0),
)


def close(line: Line, alpha_s: float, beta_s: float) -> bool:
    return math.isclose(line.alpha_s, alpha_s) and math.isclose(line.beta_s, beta_s)


def test_lines_by_hand() -> None:
    # Four nodes of four; groups of experts have two ranks in each of four nodes, attention is split over two.
    costs = TINY.costs(16, ep=8, esp=2, mp=2)
    assert set(costs.lines) == {
        *("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp", "gemm", "copy")
    }
    assert costs.contention == Contention(0.8, 0.8, 0.9, 0.7, 0.9, 0.7) and "not measured" in costs.machine
    assert close(costs.line("all-to-all/ep"), 1 + 0.1 + 6 * 0.3, 6 / 8 / 8)
    assert close(costs.line("all-gather/esp"), 1 + 0.1, 1 / 2 / 50)
    assert costs.line("reduce-scatter/esp") == costs.line("all-gather/esp")
    # Eight ranks, two in each of four nodes, each with half of what crosses.
    assert close(costs.line("all-reduce/dp"), 1 + 2 * 0.1 + 2 * 2 * 0.3, 2 * 3 / 4 / 2 / 8)
    assert close(costs.line("gemm"), 0.5, 1 / 1000) and close(costs.line("copy"), 0.5, 1 / 10)


def test_one_node_has_no_network() -> None:
    costs = TINY.costs(4, ep=4)
    assert close(costs.line("all-to-all/ep"), 1 + 3 * 0.1, 3 / 4 / 50)
    assert close(costs.line("all-reduce/dp"), 1 + 6 * 0.1, 2 * 3 / 4 / 50)
    assert set(TINY.costs(1).lines) == {"gemm", "copy"}
    # Where the link inside is the slower one, it is what counts.
    slow = replace(TINY, intra=replace(TINY.intra, reached=known(0.01)))
    assert close(slow.costs(8, ep=8).line("all-to-all/ep"), 1 + 3 * 0.1 + 4 * 0.3, 3 / 8 / 1)
    # Nobody holds a copy of what attention splits over all ranks; the rest is still everybody's.
    assert TINY.costs(4, mp=4).line("all-reduce/dp") == TINY.all_reduce(4, 4, 1)


@pytest.mark.parametrize("name", MACHINES)
def test_more_ranks_never_make_an_all_to_all_faster(name: str) -> None:
    machine, chance = MACHINES[name], random.Random(name)
    for esp in (1, 2):
        numbers = [ranks for ranks in scale_of(machine) if ranks >= 2 * esp]
        before: Line | None = None
        for ranks in numbers:
            line = machine.costs(ranks, ep=ranks // esp, esp=esp).line("all-to-all/ep")
            for nbytes in (0, 10 ** chance.uniform(0, 10)):
                assert before is None or line.seconds(nbytes) >= before.seconds(nbytes)
            before = line
        reduces = [machine.all_reduce(ranks, ranks // esp, esp) for ranks in numbers]
        assert reduces == sorted(reduces, key=lambda line: line.alpha_s)


@pytest.mark.parametrize("name", TESTBEDS)
def test_a_published_testbed_is_met_at_its_own_size(name: str) -> None:
    """All-reduce is none of what its figures were made of."""
    testbed, machine = TESTBEDS[name], MACHINES[f"fsmoe-{name.lower()}"].with_spread(0.0)
    costs = machine.costs(testbed.nodes * testbed.gpus, testbed.nodes, testbed.gpus, testbed.gpus)
    for line in ("all-to-all/ep", "all-gather/esp", "gemm"):
        published = testbed.costs.line(line)
        assert close(costs.line(line), published.alpha_s, published.beta_s)
    for line in ("reduce-scatter/esp", "all-reduce/dp"):
        assert costs.line(line).beta_s == pytest.approx(testbed.costs.line(line).beta_s, rel=0.11)
    assert 0.4 < machine.inter.reached.value < 1


def test_the_slowest_rank() -> None:
    assert expected_maximum(1) == pytest.approx(0, abs=1e-9)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    chance = random.Random()
    drawn = [max(chance.gauss(0, 1) for _ in range(64)) for _ in range(1000)]
    assert expected_maximum(64) == pytest.approx(sum(drawn) / len(drawn), abs=0.1)  # seven standard errors
    rising = [slowest_of(ranks, 0.1) for ranks in (1, 8, 64, 512, 4096)]
    assert rising == sorted(rising) and rising[0] == pytest.approx(1) and rising[-1] == pytest.approx(1.363, abs=1e-3)
    even, uneven = TINY.costs(16), TINY.with_spread(0.1).costs(16)
    factor = slowest_of(16, 0.1)
    for line in ("gemm", "copy"):
        assert close(uneven.line(line), factor * even.line(line).alpha_s, factor * even.line(line).beta_s)
    assert uneven.line("all-reduce/dp") == even.line("all-reduce/dp")


def test_a_measured_spread() -> None:
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
    assert spread_of(timelines) == pytest.approx(0.05, rel=0.15)
    assert spread_of([timelines[0], replace(timelines[0], rank=1)]) == 0
    for too_few in ([], timelines[:1], [Timeline(0, (), "measured"), Timeline(1, (), "measured")]):
        with pytest.raises(ConfigError, match="at least two ranks"):
            spread_of(too_few)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ranks": 6}, "fill nodes of 4"),
        ({"ranks": 8, "ep": 3}, "ep · esp = 3"),
        ({"ranks": 8, "ep": 0}, "ep · esp = 0"),
        ({"ranks": 8, "ep": -2, "esp": -1}, "ep · esp = 2"),
        ({"ranks": 0}, "0 ranks"),
        ({"ranks": 8, "mp": 3}, "mp = 3"),
        ({"ranks": 16, "esp": 8}, "one node of 4"),
        ({"ranks": 12, "ep": 6, "esp": 1}, "evenly"),
    ],
)
def test_what_cannot_be_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TINY.costs(**sizes)


@pytest.mark.parametrize("spread", [-0.1, math.nan, math.inf])
def test_a_spread_that_cannot_be_is_refused(spread: float) -> None:
    with pytest.raises(ConfigError, match="spread"):
        TINY.with_spread(spread).costs(8)


_SHARES = ("intra.reached", "inter.reached", "contention", "computes_beside", "links_beside")


def test_every_figure_has_its_source() -> None:
    for machine in MACHINES.values():
        figures = dict(machine.figures())
        assert len(figures) == 15 and all(one.source for one in figures.values())
        assert figures["spread"].estimate
        assert all(0 < figures[name].value <= 1 for name in _SHARES)
        assert all(figures[name].value > 0 for name in ("flops", "inter.bytes_per_s", "intra.bytes_per_s", "cards"))
    assert scale_of(MACHINES["dgx-h100"]) == [8 * 2**power for power in range(10)]
    assert scale_of(replace(TINY, ranks_per_node=12)) == [8]
    assert scale_of(replace(TINY, ranks_per_node=32)) == [8 * 2**power for power in range(10)]
