"""Fits of cost lines and contention to measured times, and measurements within a budget."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.runtime import profiler as module
from fusedmoe.runtime.profiler import ROUNDS, Profile, line_names, profile
from fusedmoe.runtime.recorder import span
from fusedmoe.schedule.cost import (
    LINES,
    MIN_BETA,
    NO_CONTENTION,
    Contention,
    CostModel,
    Line,
    TaskDurations,
    fit_nonnegative_line,
    speed_fractions,
)
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import simulate
from fusedmoe.schedule.task import Task, resources_of
from tests.cluster import Cluster
from tests.schedule.test_simulate import by_definition

CPU = torch.device("cpu")
MIB = 2**20


# Lines and contention


def test_fit_recovers_exact_line() -> None:
    for _ in range(50):
        right = Line(random.uniform(0, 1e-2), 10 ** random.uniform(-13, -6))
        points = [(n, right.seconds(n)) for n in random.sample(range(1, 10**8), random.randint(2, 24))]
        found = fit_nonnegative_line(points)
        assert found.alpha_s == pytest.approx(right.alpha_s, abs=1e-9 + 1e-6 * max(seconds for _, seconds in points))
        assert found.beta_s == pytest.approx(right.beta_s, rel=1e-5)
        assert found.r2 == pytest.approx(1.0)


def test_fit_of_noisy_times_is_nonnegative_and_optimal() -> None:
    """The fit is then the best line in relative errors with nonnegative start and slope: compared with a bounded
    solver.
    """
    seen = 0
    for _ in range(100):
        n = np.array(random.sample(range(1, 100), 6)) * 1e6
        seconds = np.abs(random.uniform(-1e-2, 1e-3) + random.uniform(-1e-10, 1e-9) * n) + 1e-6
        found = fit_nonnegative_line(list(zip(n.tolist(), seconds.tolist(), strict=True)))
        assert found.alpha_s >= 0 and found.beta_s > 0 and found.r2 is not None
        slope, start = np.polyfit(n, seconds, 1)
        if slope > MIN_BETA and start >= 0:
            assert (found.alpha_s, found.beta_s) == pytest.approx((start, slope), rel=1e-6)
            continue
        seen += 1
        right = lsq_linear(np.stack([1 / seconds, n / 1e8 / seconds], 1), np.ones(6), (0, np.inf), "bvls", tol=1e-14)
        assert (found.alpha_s, found.beta_s * 1e8) == pytest.approx(tuple(right.x), rel=1e-5, abs=1e-6)
    assert seen > 10


def test_speed_fractions_invert_simulator() -> None:
    together = Plan.parse("compute: E0\ninter: D0\nafter E0:")
    tasks = {task.kind: task for task in together}
    for _ in range(100):
        alone_s, shares = ([random.uniform(0.1, 9), random.uniform(0.1, 9)], [random.uniform(0.1, 1) for _ in range(2)])
        contention = Contention(compute_beside_inter=shares[0], inter_beside_compute=shares[1])
        durations = TaskDurations({tasks["expert"]: alone_s[0], tasks["dispatch"]: alone_s[1]}, contention)
        spans = {span.kind: span.end_s for span in simulate(together, durations).spans}
        found = speed_fractions((alone_s[0], alone_s[1]), (spans["expert"], spans["dispatch"]))
        # The task that ends first yields its own share; the other's share follows from its remaining work.
        assert found == pytest.approx(shares)


def test_speed_fractions_are_clamped_to_one() -> None:
    assert speed_fractions((2.0, 3.0), (2.0, 3.0)) == (1.0, 1.0)
    assert speed_fractions((2.0, 3.0), (1.9, 2.9)) == (1.0, 1.0)
    assert speed_fractions((2.0, 2.0), (4.0, 4.0)) == (0.5, 0.5)
    assert speed_fractions((2.0, 2.0), (4.0, 6.5))[1] > 0


# A machine whose times are known: collectives and products advance its clock


class Machine:
    """A clock that advances by the lines of a cost model.

    Overlapping work advances at the speeds of a contention model: a plan's bodies report the time of each task alone,
    and the simulator's definition computes its end.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, lines: dict[str, Line], contention: Contention = NO_CONTENTION
    ) -> None:
        self.now_s, self.lines, self.contention = 0.0, lines, contention
        patch.setattr(module, "execute", self.execute)
        self.calls: list[tuple[str, float]] = []
        patch.setattr(module, "line_names", lambda topology: tuple(lines))
        for name, line in (("all_to_all_rows", "all-to-all/ep"), ("all_gather_rows", "all-gather/esp")):
            patch.setattr(module, name, self.does(line))
        patch.setattr(module, "reduce_scatter_rows", self.does("reduce-scatter/esp"))
        patch.setattr(module, "all_reduce", self.all_reduce)
        patch.setattr(torch, "mm", self.product)

    def does(self, name: str) -> Callable[..., None]:
        def run(group: Any, rows: torch.Tensor, *rest: Any) -> None:
            self.go(name, rows.numel() * rows.element_size())

        return run

    def all_reduce(self, group: Any, tensor: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if group.axis == "dp":
            self.go("all-reduce/dp", tensor.numel() * 4)
        return tensor

    def product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        assert out.shape == (len(left), right.shape[1])
        self.go("gemm", 2 * left.numel() * right.shape[1])

    def go(self, name: str, n: float) -> None:
        self.calls.append((name, n))
        self.now_s += self.lines[name].seconds(n)

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: Plan, bodies: dict[str, Callable[[Task], None]], recorder: Any = None, **rest: Any) -> None:
        began_s, alone_s = self.now_s, {}
        for task in plan.sequence:
            before_s = self.now_s
            bodies[task.kind](task)
            alone_s[task] = self.now_s - before_s
        for task, (start, end) in by_definition(plan, alone_s, self.contention).items():
            self.now_s = began_s + float(start)
            with span(recorder, task.kind, kind=task.kind, resource=resources_of(task.kind)[0]):
                self.now_s = began_s + float(end)
        self.now_s = began_s + max(float(end) for _, end in by_definition(plan, alone_s, self.contention).values())


FAST = {
    "all-to-all/ep": Line(1e-4, 2e-10),
    "reduce-scatter/esp": Line(3e-5, 1e-10),
    "all-reduce/dp": Line(2e-4, 5e-10),
    "gemm": Line(1e-5, 1e-12),
}


def test_profile_recovers_known_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FAST)
    shown: list[tuple[int, int]] = []
    found = profile(Topology(), CPU, clock=machine.clock, machine="made up", show=lambda *at: shown.append(at))
    assert list(found.costs.lines) == list(FAST) and found.costs.machine == "made up"
    assert found.costs.contention == NO_CONTENTION
    for name, line in found.costs.lines.items():
        assert line.alpha_s == pytest.approx(FAST[name].alpha_s, rel=1e-6)
        assert line.beta_s == pytest.approx(FAST[name].beta_s, rel=1e-9)
        assert line.r2 == pytest.approx(1.0)
    # The paper's ladders and two small sizes, five times.
    sizes = {name: [n for n, _ in points] for name, points in found.points.items()}
    small = [1 / 64, 1 / 4]
    assert sizes["all-to-all/ep"] == sizes["all-reduce/dp"] == [MIB * step for step in (*small, *range(1, 25))]
    sides = [(91, 90), (362, 362), (724, 724), *((512 * step, 1024) for step in range(2, 13))]
    assert sizes["gemm"] == [2 * rows * side**2 for rows, side in sides]
    assert found.costs.ranges == {name: (of[0], of[-1]) for name, of in sizes.items()}
    assert machine.calls.count(("all-to-all/ep", 24 * MIB)) == ROUNDS
    assert found.seconds == pytest.approx(machine.now_s) and found.seconds < 30
    assert shown[-1][0] == shown[-1][1] == len(shown)


@pytest.mark.parametrize("budget_s", [1.0, 10.0, 90.0])
@pytest.mark.parametrize("slow", ["all-to-all/ep", "all-reduce/dp", "gemm"])
def test_profile_respects_budget(monkeypatch: pytest.MonkeyPatch, slow: str, budget_s: float) -> None:
    line = Line(1e-3, 1e-11) if slow == "gemm" else Line(1e-3, 3e-7)
    machine = Machine(monkeypatch, FAST | {slow: line})
    found = profile(Topology(), CPU, budget_s=budget_s, clock=machine.clock)
    assert machine.now_s == pytest.approx(found.seconds) and found.seconds < 1.1 * budget_s
    sizes = [n for n, _ in found.points[slow]]
    unit = sizes[-1] - sizes[-2]
    assert 6 <= len(sizes) - 2 <= 24 and sizes[0] < unit / 4
    assert found.costs.line(slow).beta_s == pytest.approx(line.beta_s, rel=1e-6)


def test_start_up_time_is_at_most_the_time_of_a_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products may be slow, for example because they exceed caches; small layers must not inherit their line."""

    class SlowWhenLarge(Machine):
        def go(self, name: str, n: float) -> None:
            super().go(name, n)
            self.now_s += 8e-3 * (name == "gemm" and n >= 2**30)

    found = profile(Topology(), CPU, clock=SlowWhenLarge(monkeypatch, FAST).clock)
    (n, seconds), *_, (most, most_s) = found.points["gemm"]
    line = found.costs.line("gemm")
    assert n < 2e6 and line.alpha_s <= seconds and line.seconds(most) == pytest.approx(most_s, rel=0.2)


def test_zero_budget_is_rejected() -> None:
    with pytest.raises(ConfigError, match="budget_s must be positive, not 0"):
        profile(Topology(), CPU, budget_s=0)


@pytest.mark.parametrize(
    "contention",
    [NO_CONTENTION, *map(Contention.between_links, (0.8, 0.5)), Contention(0.9, 0.6, 0.95, 0.7, 0.8, 0.75)],
    ids=["no contention", "partial link contention", "shared link", "contention between all resources"],
)
def test_profile_recovers_known_contention(monkeypatch: pytest.MonkeyPatch, contention: Contention) -> None:
    """Products and collectives of both kinds of links, each pair begun together: each has its share of its speed."""
    machine = Machine(monkeypatch, FAST | {"all-gather/esp": Line(7e-5, 3e-10)}, contention)
    found = profile(Topology(), CPU, clock=machine.clock)
    assert asdict(found.costs.contention) == pytest.approx(asdict(contention), rel=1e-6)
    # Lines are those of each operation alone, for any contention.
    assert found.costs.line("gemm").beta_s == pytest.approx(FAST["gemm"].beta_s, rel=1e-6)


@pytest.mark.parametrize("inter", [1e-8, 1e-7])
def test_profile_recovers_contention_with_slow_link(monkeypatch: pytest.MonkeyPatch, inter: float) -> None:
    """Products are repeated until they take as long as a message of a slow link."""
    contention = Contention(compute_beside_inter=0.7, inter_beside_compute=0.9)
    lines = {name: FAST[name] for name in ("all-reduce/dp", "gemm")} | {"all-to-all/ep": Line(1e-3, inter)}
    machine = Machine(monkeypatch, lines, contention)
    found = profile(Topology(), CPU, clock=machine.clock)
    assert asdict(found.costs.contention) == pytest.approx(asdict(contention), rel=1e-6)
    assert found.seconds < 1.1 * 30


# Ranks


def profile_on_rank(rank: int, world: int, ep: int, esp: int, mp: int) -> tuple[Profile, tuple[str, ...], bool]:
    topology = Topology.from_sizes(ep, esp, mp, ranks_per_node=2)
    before = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = profile(topology, CPU, dtype=torch.float64, budget_s=1.0)
    return found, line_names(topology), torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ep", "esp", "mp", "names"),
    [
        pytest.param(1, 1, 1, 1, LINES[4:], marks=pytest.mark.slow),
        pytest.param(2, 1, 2, 1, (*LINES[1:3], *LINES[3:]), marks=pytest.mark.slow),
        # One replica, whose ranks all have norms and gates.
        pytest.param(2, 1, 2, 2, (*LINES[1:3], *LINES[3:]), marks=pytest.mark.slow),
        (4, 2, 2, 1, LINES),
        pytest.param(4, 2, 1, 1, (LINES[0], *LINES[3:]), marks=pytest.mark.slow),
    ],
)
def test_all_ranks_return_equal_profiles(
    cluster: Cluster, world: int, ep: int, esp: int, mp: int, names: tuple[str, ...]
) -> None:
    every = cluster.run(world, profile_on_rank, ep, esp, mp)
    found, known, untouched = every[0]
    assert all(one == every[0] for one in every) and untouched
    assert tuple(found.costs.lines) == tuple(found.points) == known == names
    for name, line in found.costs.lines.items():
        sizes = [n for n, _ in found.points[name]]
        assert line.alpha_s >= 0 and line.beta_s > 0
        assert len(sizes) >= 6 and sizes == sorted(sizes) and all(seconds > 0 for _, seconds in found.points[name])
    links = [link for link, name in (("intra", LINES[1]), ("inter", LINES[0])) if name in names]
    for one, other in itertools.permutations(("compute", "intra", "inter"), 2):
        measured_both = {one, other} <= {"compute", *links}
        assert measured_both or found.costs.contention.speed_fraction(one, other) == 1.0


# JSON

SOME = Profile(
    CostModel({"gemm": Line(1e-5, 3.1e-12, 0.99)}, Contention(0.9, 0.8), "some machine"),
    {"gemm": ((1e6, 0.1), (2e6, 0.25))},
    12.5,
)


def test_json_round_trip() -> None:
    assert Profile.from_json(SOME.to_json()) == SOME
    assert CostModel.from_json(SOME.to_json()) == SOME.costs


@pytest.mark.parametrize("broken", ["points", "seconds", "lines", "format"])
def test_from_json_rejects_invalid_profile(broken: str) -> None:
    data = json.loads(SOME.to_json())
    for value in itertools.chain(([1], "x"), () if broken == "seconds" else (3,)):
        with pytest.raises(ConfigError):
            Profile.from_json(json.dumps(data | {broken: value}))
    del data[broken]
    with pytest.raises(ConfigError):
        Profile.from_json(json.dumps(data))
