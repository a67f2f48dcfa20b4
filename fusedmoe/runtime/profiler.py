"""The profiler: what collectives and matrix products take on this machine, measured where they will run (FSMoE §4.1).

    found = profile(topology, device)
    found.costs                         # lines with r², and what products and collectives lose beside each other

Every collective runs on the topology's own groups through the library's own functions, on all ranks at once, as in a
layer. Nothing is drawn from the global generators, and nothing is kept.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from fusedmoe.comm.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    device_of,
    reduce_scatter_rows,
    slowest_s,
)
from fusedmoe.comm.one_sided.heaps import find_backend, open_heap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import require_floats, triton_serves
from fusedmoe.runtime.execute import Streams, execute
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import ALONE, Contention, CostModel, FusedCosts, Line, Observed, line_through
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import observe
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import LINKS, PIPELINE, Task, TaskKind
from fusedmoe.schedule.timeline import Timeline

if TYPE_CHECKING:
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll

#: Seconds that measuring may take, unless the caller says otherwise.
BUDGET_S = 30.0

#: Seconds for all steps that are done to be measured.
STEPS_BUDGET_S = 60.0

#: Below this r² times say little of the next: a line through them is hardly better than their mean.
FAIR_R2 = 0.9

#: How often each size is measured; its time is the median.
ROUNDS = 5

# How often each plan's step is measured.
_STEP_ROUNDS = 5

# The paper's ladders: 1 to 24 (1 to 12) units of elements, of a collective's buffer in fp32 and of a product's left
# factor. Copies are as large as what a layer keeps: memory that is new costs more than memory that is used again.
_UNIT, _STEPS = 2**18, 24
_GEMM_UNIT, _GEMM_STEPS = 2**19, 12
_COPY_UNIT, _COPY_STEPS = 2**21, 12
# The right factor is a square of this side; copies are of rows of so many elements.
_SIDE = 1024
# Until the ladder fits the time, steps are halved down to so many, then units down to this part of themselves: a line
# through few sizes far apart is better than one through many that are all small.
_LEAST_STEPS, _LEAST_PART = 6, 2**8
# How often the sizes are probed that its ladder is chosen by.
_PROBES = 3
# Of the budget, for probes and for what the estimates are off.
_RESERVE = 0.25

# What works on each resource where it is measured how they disturb each other: a task, and its line.
_BESIDE = {
    "compute": (Task(TaskKind.EXPERT, 0), "gemm"),
    "intra": (Task(TaskKind.ALL_GATHER, 0), "all-gather/esp"),
    "inter": (Task(TaskKind.DISPATCH, 0), "all-to-all/ep"),
}
# No share that is measured is less: it would be noise.
_LEAST_SHARE = 0.05
# Exchanges of one row, one after the other.
_SIGNALS = 8
_EMPTY, _EMPTY_ROUNDS = Plan.from_orders(three_queues(PIPELINE, 8)), 9

Show = Callable[[int, int], None]
Clock = Callable[[], float]
T = TypeVar("T")

Sample = tuple[str, int]  # a line and a size


@dataclass(frozen=True)
class Profile:
    """A measured machine: `costs` has lines through the points, (n, median seconds) with n in bytes or FLOP.

    `seconds`: how long measuring took.
    """

    costs: CostModel
    points: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def poor(self) -> dict[str, float]:
        """The r² of the lines that are far from their points (`FAIR_R2`), by name."""
        fits = {name: line.r2 for name, line in self.costs.lines.items()}
        return {name: r2 for name, r2 in fits.items() if r2 is not None and r2 < FAIR_R2}

    def to_json(self) -> str:
        """Returns indented JSON that `CostModel.from_json` reads as well."""
        data = json.loads(self.costs.to_json()) | {"points": dict(self.points), "seconds": self.seconds}
        return json.dumps(data, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> Profile:
        """Reads the profile written by `to_json`. Raises `ConfigError` for anything else."""
        costs, data = CostModel.from_json(source), json.loads(source)
        try:
            points = {name: tuple((float(n), float(s)) for n, s in pairs) for name, pairs in data["points"].items()}
            return cls(costs, points, float(data["seconds"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"profile: the points are missing or not pairs of numbers: {error}") from error


def profile(
    topology: Topology,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = BUDGET_S,
    machine: str = "",
    show: Show | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measures and fits; the result is the same on every rank. Collective over all ranks.

    All-to-all over ep, all-gather and reduce-scatter over esp and all-reduce over dp, as far as these have more than
    one rank, at 1 to 24 times 2¹⁸ fp32 elements; matrix products of 1 to 12 times 2¹⁹ elements with a square of 1024;
    and copies of rows of 1024 numbers in another order, as a layer makes them whose two passes have different chunks. n
    is the bytes that a rank puts into a collective (of an all-gather: that it gets), as in `schedule.workload`. Each
    time is the median of five rounds through all sizes; in each the slowest rank counts.

    Args:
        device: where computation runs, on CUDA the current device.
        dtype: of the matrix products.
        budget_s: what does not fit is cut: first there are fewer sizes, then smaller ones, then fewer rounds.
        machine: for `CostModel.machine`.
        show: told (done, total) now and then.
        clock: what is measured with on a CPU, in seconds.
    Raises:
        ConfigError: a budget that is not positive; a dtype that is none of floats.
        RankError: see `fusedmoe.comm.collectives`.
    """
    if not budget_s > 0:
        raise ConfigError(f"profile: the budget must be more than 0 s, not {budget_s}")
    require_floats("profile", dtype)
    # Autocast would turn the products into others.
    with topology.guard("profile"), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return _Profiler(topology, device, dtype, budget_s, show or _nothing, clock).run(machine)


def _nothing(*_: object) -> None:
    pass


def line_names(topology: Topology) -> tuple[str, ...]:
    """Returns the lines that a profile of this topology has."""
    sizes = {
        "all-to-all/ep": topology.ep.size,
        "all-gather/esp": topology.esp.size,
        "reduce-scatter/esp": topology.esp.size,
        "all-reduce/dp": topology.size,  # with one replica, of the norms and gates that all of its ranks have
    }
    return (*(name for name, size in sizes.items() if size > 1), "gemm", "copy")


def shares_of(alone_s: tuple[float, float], together_s: tuple[float, float]) -> tuple[float, float]:
    """Returns the shares of their speeds that two tasks go on at while both run, in (0, 1].

    Args:
        alone_s: seconds of each by itself.
        together_s: seconds of each where they begin together.
    """
    first = int(together_s[1] < together_s[0])  # to end
    both_s, after_s = together_s[first], together_s[1 - first] - together_s[first]
    # While both run, the first one does all that it has to do; the other one does what is left by itself.
    done_s = {first: alone_s[first], 1 - first: alone_s[1 - first] - after_s}
    shares = [min(1.0, max(_LEAST_SHARE, done_s[which] / both_s)) for which in range(2)]
    return shares[0], shares[1]


class _Work(NamedTuple):
    """Something to measure, in sizes of fp32 elements (of a product: of its left factor)."""

    unit: int
    steps: int
    run: Callable[[int], Any]
    n: Callable[[int], int]  # bytes or FLOP of a size


class _Profiler:
    def __init__(
        self, topology: Topology, device: torch.device, dtype: torch.dtype, budget_s: float, show: Show, clock: Clock
    ) -> None:
        self._topology, self._device, self._budget_s, self._show = topology, device, budget_s, show
        self._clock, self._began = clock, clock()
        self._recorder = Recorder(topology.rank, device=device, clock=clock)
        self._stop, self._streams = partial(topology.stop, "profile"), Streams()
        self._wire = device_of(topology.world)
        self._buffer = torch.zeros(_UNIT * _STEPS, device=self._wire)
        every = {**self._collectives(), "gemm": self._products(dtype), "copy": self._copies()}
        self._works = {name: every[name] for name in line_names(topology)}

    def run(self, machine: str) -> Profile:
        ladder = self._ladder()
        beside = [resource for resource, (_, name) in _BESIDE.items() if name in self._works]
        pairs = list(combinations(beside, 2))
        total = ROUNDS * (len(ladder) + (len(beside) + len(pairs)) * bool(pairs))
        rounds: list[np.ndarray] = []
        round_s = 0.0
        while len(rounds) < ROUNDS and (not rounds or self._elapsed_s() + round_s < self._budget_s):
            before_s = self._elapsed_s()
            rounds.append(self._round(ladder, len(rounds) * len(ladder), total))
            round_s = self._elapsed_s() - before_s
        # The paper takes the mean of the rounds, which one disturbance moves.
        medians = np.median(rounds, axis=0)
        points: dict[str, list[tuple[float, float]]] = {}
        for (name, size), seconds in zip(ladder, medians, strict=True):
            points.setdefault(name, []).append((float(self._works[name].n(size)), float(seconds)))
        # No line starts in less than the executor takes for an empty task: where products or links start for nothing,
        # more chunks still cost something.
        task_s = float(self._slowest([self._task_s()])[0])
        fitted = {name: line_through(of) for name, of in points.items()}
        fitted = {name: replace(line, alpha_s=max(line.alpha_s, task_s)) for name, line in fitted.items()}
        lines = self._of_rank_0(fitted)
        contention = self._contention(beside, pairs, lines, points, total) if pairs else ALONE
        tiled = self._device.type == "cpu"
        costs = CostModel(lines, contention, machine, self._fused(), tiled=tiled, task_s=task_s)
        return Profile(costs, {name: tuple(pairs) for name, pairs in points.items()}, self._elapsed_s())

    def _task_s(self) -> float:
        """Returns the seconds that the executor takes for a task that does nothing."""
        bodies = dict.fromkeys(PIPELINE, _nothing)
        taken = []
        for _ in range(_EMPTY_ROUNDS):
            began = self._clock()
            execute(_EMPTY, bodies, stop=self._stop, streams=self._streams.on(self._device))
            taken.append((self._clock() - began) / len(_EMPTY))
        return statistics.median(taken)

    def _fused(self) -> FusedCosts | None:
        """Returns the seconds of a signal between kernels, where all ranks have memory that others' kernels address."""
        if not triton_serves(self._device):
            return None
        # Here, since it needs Triton.
        from fusedmoe.comm.one_sided.receive_buffers import TOKEN_TILE, OneSidedAllToAll

        signal_s = {}
        for link, group in (("inter", self._topology.ep), ("intra", self._topology.esp)):
            if group.size == 1:
                continue
            has = bool(find_backend(group, self._device)[0])
            if not all(all_gather_object(self._topology.world, has, "profile")):
                continue
            with open_heap(group, self._device) as heap:
                signal_s[link] = self._signal_s(OneSidedAllToAll(heap, rows=1))
        return self._of_rank_0(FusedCosts(TOKEN_TILE, signal_s)) if signal_s else None

    def _signal_s(self, through: OneSidedAllToAll) -> float:
        """Returns the seconds of sending a row to each peer and waiting for theirs."""
        each = [1] * through.heap.group.size
        row = torch.zeros(len(each), dtype=torch.uint8, device=self._device)
        taken = []
        for _ in range(1 + ROUNDS):  # the first time, kernels are compiled
            self._ready()
            self._together()
            with self._recorder.span("signals", kind=TaskKind.OTHER):
                for _ in range(_SIGNALS):
                    through.exchange(row, each, each, 1, "profile")
            taken.append(float(self._slowest([self._recorder.timeline().duration_s])[0]) / _SIGNALS)
        return statistics.median(taken[1:])

    def _collectives(self) -> dict[str, _Work]:
        topology, buffer = self._topology, self._buffer
        ep, esp = topology.ep, topology.esp
        dp = topology.world if topology.dp.size == 1 < topology.size else topology.dp

        def work(ranks: int, run: Callable[[list[int]], Any]) -> _Work:
            """Returns what runs with as many elements for each rank as a size has."""
            return _Work(
                _UNIT,
                _STEPS,
                lambda size: run([size // ranks] * ranks),
                lambda size: size // ranks * ranks * buffer.element_size(),
            )

        return {
            "all-to-all/ep": work(ep.size, lambda each: all_to_all_rows(ep, buffer[: sum(each)], each, each)),
            "all-gather/esp": work(esp.size, lambda each: all_gather_rows(esp, buffer[: each[0]], each)),
            "reduce-scatter/esp": work(esp.size, lambda each: reduce_scatter_rows(esp, buffer[: sum(each)], each)),
            "all-reduce/dp": work(1, lambda each: all_reduce(dp, buffer[: each[0]])),
        }

    def _products(self, dtype: torch.dtype) -> _Work:
        # Zeros would take less power, and a GPU less time.
        chance = torch.Generator(self._device).manual_seed(0)

        left, right = (
            torch.rand(rows, _SIDE, generator=chance, device=self._device).to(dtype)
            for rows in (_GEMM_UNIT * _GEMM_STEPS // _SIDE, _SIDE)
        )
        out = torch.empty_like(left)

        def product(size: int) -> None:
            rows = size // _SIDE
            torch.mm(left[:rows], right, out=out[:rows])

        return _Work(_GEMM_UNIT, _GEMM_STEPS, product, lambda size: 2 * (size // _SIDE) * _SIDE**2)

    def _copies(self) -> _Work:
        rows = torch.ones(_COPY_UNIT * _COPY_STEPS // _SIDE, _SIDE, device=self._device)
        chance = torch.Generator().manual_seed(0)
        order = torch.randperm(len(rows), generator=chance, device="cpu").to(self._device)
        return _Work(
            _COPY_UNIT,
            _COPY_STEPS,
            lambda size: rows[order[: size // _SIDE]],
            lambda size: size // _SIDE * _SIDE * rows.element_size(),
        )

    def _ladder(self) -> list[Sample]:
        """Returns the sizes of each line that fit its share of the time."""
        ends = [(name, work.unit // part) for name, work in self._works.items() for part in (64, 4)]
        self._round(ends, 0, 0)  # the first time anything runs, it is set up
        # The least of some: one disturbance would halve a ladder.
        probed = np.min([self._round(ends, 0, 0) for _ in range(_PROBES)], axis=0)
        both = {name: (2 * place, 2 * place + 1) for place, name in enumerate(self._works)}
        guesses = {name: line_through([(ends[n][1], probed[n]) for n in two]) for name, two in both.items()}

        def takes_s(name: str, unit: int, steps: int) -> float:
            return sum(guesses[name].seconds(unit * step) for step in range(1, steps + 1)) * ROUNDS

        left_s = self._budget_s * (1 - _RESERVE) - self._elapsed_s()
        sizes: dict[str, list[int]] = {}
        # The shortest first: what they leave over goes to the longer ones.
        for name, work in sorted(self._works.items(), key=lambda one: takes_s(one[0], one[1].unit, one[1].steps)):
            share_s = left_s / (len(self._works) - len(sizes) + 1)  # contention has one, too
            unit, steps = work.unit, work.steps
            # First fewer sizes, then smaller ones: see `_LEAST_STEPS`.
            while takes_s(name, unit, steps) > share_s and steps > _LEAST_STEPS:
                steps //= 2
            while takes_s(name, unit, steps) > share_s and unit > work.unit // _LEAST_PART:
                unit //= 2
            left_s -= takes_s(name, unit, steps)
            # A product or a copy of no rows, and a collective of less than an element a rank, would be no measurement.
            unit = max(unit, _SIDE if name in ("gemm", "copy") else self._topology.size)
            sizes[name] = [unit * step for step in range(1, steps + 1)]
        return self._of_rank_0([(name, size) for name in self._works for size in sizes[name]])

    def _round(self, samples: Sequence[Sample], done: int, total: int) -> np.ndarray:
        """Returns the seconds of each sample, on the slowest rank."""
        self._ready()
        for number, (name, size) in enumerate(samples):
            self._together()
            with self._recorder.span(name, kind=TaskKind.OTHER):
                self._works[name].run(size)
            if total:
                self._show(done + number + 1, total)
        return self._slowest([span.duration_s for span in self._recorder.timeline().spans])

    def _ready(self) -> None:
        self._recorder.clear()
        if self._device.type == "cuda":
            # The GPU multiplies for 10 ms and more, so that the host is ahead and no launch is part of a measurement.
            matrix = torch.zeros(2048, 2048, device=self._device)
            for _ in range(64):
                torch.mm(matrix, matrix)

    def _together(self) -> None:
        """Waits until all ranks are here: ranks that start at different times would measure each other's delay."""
        all_reduce(self._topology.world, torch.zeros(1, device=self._wire), operation="profile")

    def _slowest(self, seconds: Sequence[float]) -> np.ndarray:
        return np.array(slowest_s(self._topology.world, seconds, "profile"))

    def _of_rank_0(self, value: T) -> T:
        """Returns rank 0's value, on all ranks."""
        # Processors of different kinds may round differently, but all must come to the same plans.
        result: T = all_gather_object(self._topology.world, value, "profile")[0]
        return result

    def _elapsed_s(self) -> float:
        """Returns the seconds since this profiler began, the same on every rank. Collective."""
        return float(self._slowest([self._clock() - self._began])[0])

    def _contention(
        self,
        beside: Sequence[str],
        pairs: Sequence[tuple[str, str]],
        lines: Mapping[str, Line],
        points: Mapping[str, Sequence[tuple[float, float]]],
        total: int,
    ) -> Contention:
        """Returns the shares of their speeds that products and collectives keep beside each other: of each pair of
        resources, both begin together, as a layer's plan has them run."""
        plans = [(each,) for each in beside] + list(pairs)
        left_s = max(0.1 * self._budget_s, self._budget_s - self._elapsed_s())
        # About as long as each other, and all of it within the time; none longer than what was measured, but products
        # may be repeated.
        longest_s = min(*(points[_BESIDE[r][1]][-1][1] for r in beside if r in LINKS.values()), left_s / (8 * ROUNDS))
        bodies: dict[str, Callable[[Task], None]] = {}
        for resource in beside:
            task, name = _BESIDE[resource]
            (least, _), *_, (most, most_s) = points[name]
            times = max(1, round(longest_s / most_s))
            size = self._size(name, min(max(lines[name].amount(longest_s / times), least), most))
            bodies[task.kind] = partial(self._repeat, name, size, times)
        rounds = []
        for number in range(ROUNDS):
            seconds: list[float] = []
            for resources in plans:
                tasks = {resource: [_BESIDE[resource][0]] for resource in resources}
                # None waits for another, as it would in a layer.
                plan = Plan.from_orders(tasks, {_BESIDE[resource][0]: () for resource in resources})
                self._ready()
                self._together()
                execute(plan, bodies, stop=self._stop, streams=self._streams.on(self._device), recorder=self._recorder)
                spans = {span.resource: span for span in self._recorder.timeline().spans}
                began_s = min(span.start_s for span in spans.values())
                seconds += [spans[resource].end_s - began_s for resource in resources]
                self._show(total - (ROUNDS - number) * len(plans) + plans.index(resources) + 1, total)
            rounds.append(self._slowest(seconds))
        medians = iter(np.median(rounds, axis=0).tolist())
        alone_s = {resource: next(medians) for resource in beside}
        shares: dict[str, float] = {}
        for first, second in pairs:
            found = shares_of((alone_s[first], alone_s[second]), (next(medians), next(medians)))
            shares |= {f"{first}_beside_{second}": found[0], f"{second}_beside_{first}": found[1]}
        return Contention(**shares)

    def _repeat(self, name: str, size: int, times: int, task: Task) -> None:
        for _ in range(times):
            self._works[name].run(size)

    def _size(self, name: str, n: float) -> int:
        """Returns the size, in elements, of so many bytes or FLOP of a line."""
        return int(n / (2 * _SIDE)) if name == "gemm" else int(n / self._buffer.element_size())


def observe_steps(
    topology: Topology,
    plans: Sequence[Plan],
    costs: StepCosts,
    run: Callable[[Plan, int], Timeline],
    budget_s: float = STEPS_BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Returns what the parts of steps by these plans take, the same on every rank. Collective over all ranks.

    Args:
        costs: of the steps, before they are measured.
        run: does a step by a plan, in the round of this number, on this rank, and returns its timeline.
        budget_s: no step begins that would not end in so many seconds, but for the first two.
        clock: on this rank, in seconds.
    """
    steps: list[list[list[Timeline]]] = [[] for _ in plans]
    with WorkBar("measuring steps") as bar:
        # The first step of each plan is not counted: it takes memory that the system has to hand out first.
        run(plans[0], 0)
        began_s, taken_s, longest_s = clock(), 0.0, 0.0
        for number in range(_STEP_ROUNDS * len(plans)):
            which, round_ = number % len(plans), number // len(plans)
            in_turn = 2 if 0 < number < len(plans) else 1
            if taken_s + in_turn * longest_s > budget_s:
                break
            if in_turn == 2:
                run(plans[which], 0)
            timeline = run(plans[which], round_)
            ranks = all_gather_object(topology.world, (timeline, clock() - began_s), "measuring steps")
            steps[which].append([timeline for timeline, _ in ranks])
            before_s, taken_s = taken_s, max(seconds for _, seconds in ranks)
            longest_s = max(longest_s, (taken_s - before_s) / in_turn)
            if topology.is_first:
                bar.show(number + 1, _STEP_ROUNDS * len(plans))
    seen = Observed()
    for plan, timelines in zip(plans, steps, strict=True):
        seen |= observe(plan, costs, timelines)
    return seen
