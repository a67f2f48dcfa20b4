"""Profiler: time of collectives, matrix products and copies on this machine (FSMoE §4.1).

    found = profile(topology, device)
    found.costs                         # fitted lines with r², and contention

Collectives run through the library's functions, on all ranks at once, as in a layer. The global random state is not
used.
"""

from __future__ import annotations

import json
import math
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
    max_over_ranks_s,
    reduce_scatter_rows,
)
from fusedmoe.comm.one_sided.heaps import find_backend, open_heap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import device_uses_triton, require_float_dtype
from fusedmoe.runtime.execute import Streams, execute
from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.cost import (
    NO_CONTENTION,
    Contention,
    CostModel,
    FusedCosts,
    Line,
    Observed,
    fit_large_sizes,
    fit_nonnegative_line,
    speed_fractions,
)
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import observe_task_times
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import LINKS, PIPELINE, Task, TaskKind
from fusedmoe.schedule.timeline import Timeline

if TYPE_CHECKING:
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll

#: Default time limit of a profile, in seconds.
BUDGET_S = 30.0

#: Time limit of `observe_steps`, in seconds.
STEPS_BUDGET_S = 60.0

#: Measurements per size; the median is used.
ROUNDS = 5

# Measured steps per plan.
_STEP_ROUNDS = 5

# Sizes of the paper: 1 to 24 (1 to 12) units of elements, of a collective's fp32 buffer and of a product's left factor.
# Copies are as large as the saved tensors of a layer.
_UNIT, _STEPS = 2**18, 24
_GEMM_UNIT, _GEMM_STEPS = 2**19, 12
_COPY_UNIT, _COPY_STEPS = 2**21, 12
# Fractions of a unit that are measured too. They bound the start-up time, which large sizes do not determine.
_SMALL_PARTS = (64, 4)
# The right factor is a square of at most this size; copied rows have this many elements.
_SIDE = 1024
# To fit the time limit, first the number of sizes is halved down to the first value, then the unit down to this
# fraction: few distant sizes fit a line better than many small ones.
_MIN_STEPS, _MIN_UNIT_DIVISOR = 6, 2**8
_NUM_PROBES = 3
# Fraction of the time limit for probes and estimation errors.
_RESERVE = 0.25

# Task and line that occupy each resource while contention is measured.
_CONTENDERS = {
    "compute": (Task(TaskKind.EXPERT, 0), "gemm"),
    "intra": (Task(TaskKind.ALL_GATHER, 0), "all-gather/esp"),
    "inter": (Task(TaskKind.DISPATCH, 0), "all-to-all/ep"),
}
# Exchanges of one row per measurement.
_NUM_SIGNALS = 8
_EMPTY_PLAN, _NUM_EMPTY_ROUNDS = Plan.from_orders(three_queues(PIPELINE, 8)), 9

Show = Callable[[int, int], None]
Clock = Callable[[], float]
T = TypeVar("T")

Sample = tuple[str, int]  # a line and a size


@dataclass(frozen=True)
class Profile:
    """Fitted costs of a machine, and their `points` (n, median seconds) with n in bytes or FLOP."""

    costs: CostModel
    points: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    seconds: float = 0.0  # duration of the measurement

    def to_json(self) -> str:
        data = json.loads(self.costs.to_json()) | {"points": dict(self.points), "seconds": self.seconds}
        return json.dumps(data, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> Profile:
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
    """Measure and fit the costs of this machine; equal results on all ranks. Collective over all ranks.

    Operations and sizes:

    - all-to-all over EP, all-gather and reduce-scatter over ESP, all-reduce over DP, for groups of several ranks:
      1/64, 1/4 and 1 to 24 times 2¹⁸ fp32 elements
    - products with a square matrix, up to 1024×1024: 1/64, 1/4 and 1 to 12 times 2¹⁹ elements
    - permuting copies of rows of 1024 elements, as a layer makes if its two passes have different chunks: 1/64, 1/4 and
      1 to 12 times 2²¹ elements

    The n of a collective is the bytes that a rank sends (for an all-gather: receives). Each time is the median of five
    rounds, each on the slowest rank.

    Args:
        device: compute device; with CUDA the current device.
        dtype: of matrix products.
        budget_s: time limit. Fewer sizes are measured to stay within it, then smaller sizes, then fewer rounds.
        machine: for `CostModel.machine`.
        show: called with (done, total).
        clock: timer on CPUs, in seconds.
    Raises:
        ConfigError: the time limit is not positive, or the dtype is not floating point.
        RankError: a rank failed or did not join.
    """
    if not budget_s > 0:
        raise ConfigError(f"profile: budget_s must be positive, not {budget_s}")
    require_float_dtype("profile", dtype)
    # Autocast would change the dtype of the products.
    with topology.guard("profile"), torch.no_grad(), torch.autocast(device.type, enabled=False):
        return _Profiler(topology, device, dtype, budget_s, show or _do_nothing, clock).run(machine)


def _do_nothing(*_: object) -> None:
    pass


def line_names(topology: Topology) -> tuple[str, ...]:
    sizes = {
        "all-to-all/ep": topology.ep.size,
        "all-gather/esp": topology.esp.size,
        "reduce-scatter/esp": topology.esp.size,
        "all-reduce/dp": topology.size,  # with one replica: norms and gates are replicated on all ranks
    }
    return (*(name for name, size in sizes.items() if size > 1), "gemm", "copy")


class _Operation(NamedTuple):
    """A measured operation. Sizes are numbers of fp32 elements (for a product: of its left factor)."""

    unit: int
    steps: int
    run: Callable[[int], Any]
    n: Callable[[int], int]  # size -> bytes or FLOP


class _Profiler:
    def __init__(
        self, topology: Topology, device: torch.device, dtype: torch.dtype, budget_s: float, show: Show, clock: Clock
    ) -> None:
        self._topology, self._device, self._budget_s, self._show = topology, device, budget_s, show
        self._clock, self._began_s = clock, clock()
        self._recorder = Recorder(topology.rank, device=device, clock=clock)
        self._stop, self._streams = partial(topology.stop, "profile"), Streams()
        self._comm_device = device_of(topology.world, device)
        self._buffer = torch.zeros(_UNIT * _STEPS, device=self._comm_device)
        operations = {**self._collectives(), "gemm": self._gemm_operation(dtype), "copy": self._copy_operation()}
        self._operations = {name: operations[name] for name in line_names(topology)}

    def run(self, machine: str) -> Profile:
        samples = self._choose_samples()
        resources = [resource for resource, (_, name) in _CONTENDERS.items() if name in self._operations]
        pairs = list(combinations(resources, 2))
        total = ROUNDS * (len(samples) + (len(resources) + len(pairs)) * bool(pairs))
        rounds: list[np.ndarray] = []
        round_s = 0.0
        while len(rounds) < ROUNDS and (not rounds or self._elapsed_s() + round_s < self._budget_s):
            before_s = self._elapsed_s()
            rounds.append(self._measure_round(samples, len(rounds) * len(samples), total))
            round_s = self._elapsed_s() - before_s
        medians = np.median(rounds, axis=0)
        points: dict[str, list[tuple[float, float]]] = {}
        for (name, size), seconds in zip(samples, medians, strict=True):
            points.setdefault(name, []).append((float(self._operations[name].n(size)), float(seconds)))
        # Start-up time includes at least the executor's overhead per task.
        task_s = float(self._max_over_ranks([self._measure_task_s()])[0])
        fitted = {name: fit_large_sizes(of) for name, of in points.items()}
        fitted = {name: replace(line, alpha_s=max(line.alpha_s, task_s)) for name, line in fitted.items()}
        lines = self._broadcast_rank_0(fitted)
        contention = self._measure_contention(resources, pairs, lines, points, total) if pairs else NO_CONTENTION
        ranges = {name: (of[0][0], of[-1][0]) for name, of in points.items()}
        tiled, fused = self._device.type == "cpu", self._fused_costs()
        costs = CostModel(lines, contention, machine, fused, tiled, task_s, ranges=ranges)
        return Profile(costs, {name: tuple(pairs) for name, pairs in points.items()}, self._elapsed_s())

    def _measure_task_s(self) -> float:
        bodies = dict.fromkeys(PIPELINE, _do_nothing)
        taken = []
        for _ in range(_NUM_EMPTY_ROUNDS):
            began = self._clock()
            execute(_EMPTY_PLAN, bodies, stop=self._stop, streams=self._streams.on(self._device))
            taken.append((self._clock() - began) / len(_EMPTY_PLAN))
        return statistics.median(taken)

    def _fused_costs(self) -> FusedCosts | None:
        """Return the signal latency between kernels, by link with symmetric memory on all ranks; None without one."""
        if not device_uses_triton(self._device):
            return None
        from fusedmoe.comm.one_sided.receive_buffers import TOKEN_TILE, OneSidedAllToAll

        signal_s = {}
        for link, group in (("inter", self._topology.ep), ("intra", self._topology.esp)):
            if group.size == 1:
                continue
            has = bool(find_backend(group, self._device)[0])
            if not all(all_gather_object(self._topology.world, has, "profile")):
                continue
            with open_heap(group, self._device) as heap:
                signal_s[link] = self._measure_signal_s(OneSidedAllToAll(heap, rows=1))
        return self._broadcast_rank_0(FusedCosts(TOKEN_TILE, signal_s)) if signal_s else None

    def _measure_signal_s(self, through: OneSidedAllToAll) -> float:
        each = [1] * through.heap.group.size
        row = torch.zeros(len(each), dtype=torch.uint8, device=self._device)
        taken = []
        for _ in range(1 + ROUNDS):  # the first round compiles kernels
            self._warm_up()
            self._wait_for_ranks()
            with span(self._recorder, "signals", kind=TaskKind.OTHER):
                for _ in range(_NUM_SIGNALS):
                    through.exchange(row, each, each, 1, "profile")
            taken.append(float(self._max_over_ranks([self._recorder.timeline().duration_s])[0]) / _NUM_SIGNALS)
        return statistics.median(taken[1:])

    def _collectives(self) -> dict[str, _Operation]:
        topology, buffer = self._topology, self._buffer
        ep, esp = topology.ep, topology.esp
        dp = topology.world if topology.dp.size == 1 < topology.size else topology.dp

        def work(ranks: int, run: Callable[[list[int]], Any]) -> _Operation:
            return _Operation(
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

    def _gemm_operation(self, dtype: torch.dtype) -> _Operation:
        # Zeros would run faster on a GPU.
        chance = torch.Generator(self._device).manual_seed(0)

        left, right = (
            torch.rand(rows, _SIDE, generator=chance, device=self._device).to(dtype)
            for rows in (_GEMM_UNIT * _GEMM_STEPS // _SIDE, _SIDE)
        )
        out = torch.empty_like(left)

        def shape(size: int) -> tuple[int, int]:
            # Small factors are square: products with few rows are limited by memory.
            side = min(_SIDE, math.isqrt(size))
            return size // side, side

        def product(size: int) -> None:
            rows, side = shape(size)
            torch.mm(left[:rows, :side], right[:side, :side], out=out[:rows, :side])

        return _Operation(_GEMM_UNIT, _GEMM_STEPS, product, lambda size: 2 * math.prod(shape(size)) * shape(size)[1])

    def _copy_operation(self) -> _Operation:
        rows = torch.ones(_COPY_UNIT * _COPY_STEPS // _SIDE, _SIDE, device=self._device)
        chance = torch.Generator().manual_seed(0)
        order = torch.randperm(len(rows), generator=chance, device="cpu").to(self._device)
        return _Operation(
            _COPY_UNIT,
            _COPY_STEPS,
            lambda size: rows[order[: size // _SIDE]],
            lambda size: size // _SIDE * _SIDE * rows.element_size(),
        )

    def _choose_samples(self) -> list[Sample]:
        """Return the sizes to measure of each operation, within its share of the time limit. Collective."""
        ends = [(name, work.unit // part) for name, work in self._operations.items() for part in _SMALL_PARTS]
        self._measure_round(ends, 0, 0)  # warm-up
        # Minimum: one outlier would halve the samples.
        probed = np.min([self._measure_round(ends, 0, 0) for _ in range(_NUM_PROBES)], axis=0)
        both = {name: (2 * place, 2 * place + 1) for place, name in enumerate(self._operations)}
        # Lines of bytes or FLOP: small products have smaller right factors.
        guesses = {
            name: fit_nonnegative_line([(self._operations[name].n(ends[n][1]), probed[n]) for n in two])
            for name, two in both.items()
        }

        def sizes_of(name: str, unit: int, steps: int) -> list[int]:
            # At least one row, and one element per rank.
            least = _SIDE if name in ("gemm", "copy") else self._topology.size
            whole = {max(least, unit) * step for step in range(1, steps + 1)}
            return sorted(whole | {max(least, unit // part) for part in _SMALL_PARTS})

        def total_s(name: str, unit: int, steps: int) -> float:
            of = self._operations[name].n
            return sum(guesses[name].seconds(of(size)) for size in sizes_of(name, unit, steps)) * ROUNDS

        left_s = self._budget_s * (1 - _RESERVE) - self._elapsed_s()
        sizes: dict[str, list[int]] = {}
        # Shortest first: longer operations get the unused time.
        for name, work in sorted(self._operations.items(), key=lambda one: total_s(one[0], one[1].unit, one[1].steps)):
            share_s = left_s / (len(self._operations) - len(sizes) + 1)  # plus contention
            unit, steps = work.unit, work.steps
            while total_s(name, unit, steps) > share_s and steps > _MIN_STEPS:
                steps //= 2
            while total_s(name, unit, steps) > share_s and unit > work.unit // _MIN_UNIT_DIVISOR:
                unit //= 2
            left_s -= total_s(name, unit, steps)
            sizes[name] = sizes_of(name, unit, steps)
        return self._broadcast_rank_0([(name, size) for name in self._operations for size in sizes[name]])

    def _measure_round(self, samples: Sequence[Sample], done: int, total: int) -> np.ndarray:
        """Return the seconds of each sample on the slowest rank. Collective."""
        self._warm_up()
        for number, (name, size) in enumerate(samples):
            self._wait_for_ranks()
            with span(self._recorder, name, kind=TaskKind.OTHER):
                self._operations[name].run(size)
            if total:
                self._show(done + number + 1, total)
        return self._max_over_ranks([span.duration_s for span in self._recorder.timeline().spans])

    def _warm_up(self) -> None:
        self._recorder.clear()
        if self._device.type == "cuda":
            # Keep the GPU busy for at least 10 ms: launches run ahead and are not measured.
            matrix = torch.zeros(2048, 2048, device=self._device)
            for _ in range(64):
                torch.mm(matrix, matrix)

    def _wait_for_ranks(self) -> None:
        all_reduce(self._topology.world, torch.zeros(1, device=self._comm_device), operation="profile")

    def _max_over_ranks(self, seconds: Sequence[float]) -> np.ndarray:
        return np.array(max_over_ranks_s(self._topology.world, seconds, "profile"))

    def _broadcast_rank_0(self, value: T) -> T:
        # Fits may round differently on different processors, but all ranks need equal plans.
        result: T = all_gather_object(self._topology.world, value, "profile")[0]
        return result

    def _elapsed_s(self) -> float:
        """Return the seconds since the start on the slowest rank. Collective."""
        return float(self._max_over_ranks([self._clock() - self._began_s])[0])

    def _measure_contention(
        self,
        resources: Sequence[str],
        pairs: Sequence[tuple[str, str]],
        lines: Mapping[str, Line],
        points: Mapping[str, Sequence[tuple[float, float]]],
        total: int,
    ) -> Contention:
        plans = [(each,) for each in resources] + list(pairs)
        left_s = max(0.1 * self._budget_s, self._budget_s - self._elapsed_s())
        # Sizes with equal durations within the time limit and the measured range; products may be repeated.
        longest_s = min(
            *(points[_CONTENDERS[r][1]][-1][1] for r in resources if r in LINKS.values()), left_s / (8 * ROUNDS)
        )
        bodies: dict[str, Callable[[Task], None]] = {}
        for resource in resources:
            task, name = _CONTENDERS[resource]
            (least, _), *_, (most, most_s) = points[name]
            times = max(1, round(longest_s / most_s))
            size = self._num_elements(name, min(max(lines[name].amount(longest_s / times), least), most))
            bodies[task.kind] = partial(self._repeat, name, size, times)
        rounds = []
        for number in range(ROUNDS):
            seconds: list[float] = []
            for together in plans:
                tasks = {resource: [_CONTENDERS[resource][0]] for resource in together}
                plan = Plan.from_orders(tasks, {_CONTENDERS[resource][0]: () for resource in together})
                self._warm_up()
                self._wait_for_ranks()
                execute(plan, bodies, stop=self._stop, streams=self._streams.on(self._device), recorder=self._recorder)
                spans = {span.resource: span for span in self._recorder.timeline().spans}
                began_s = min(span.start_s for span in spans.values())
                seconds += [spans[resource].end_s - began_s for resource in together]
                self._show(total - (ROUNDS - number) * len(plans) + plans.index(together) + 1, total)
            rounds.append(self._max_over_ranks(seconds))
        medians = iter(np.median(rounds, axis=0).tolist())
        alone_s = {resource: next(medians) for resource in resources}
        shares: dict[str, float] = {}
        for first, second in pairs:
            found = speed_fractions((alone_s[first], alone_s[second]), (next(medians), next(medians)))
            shares |= {f"{first}_beside_{second}": found[0], f"{second}_beside_{first}": found[1]}
        return Contention(**shares)

    def _repeat(self, name: str, size: int, times: int, task: Task) -> None:
        for _ in range(times):
            self._operations[name].run(size)

    def _num_elements(self, name: str, n: float) -> int:
        if name == "gemm":
            return int(max(n / (2 * _SIDE), min(_SIDE**2, (n / 2) ** (2 / 3))))
        return int(n / self._buffer.element_size())


def observe_steps(
    topology: Topology,
    plans: Sequence[Plan],
    costs: StepCosts,
    run: Callable[[Plan, int], Timeline],
    budget_s: float = STEPS_BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Measure task times in steps of these plans; equal results on all ranks. Collective over all ranks.

    Args:
        costs: predicted costs of the steps.
        run: `run(plan, round)` runs one step on this rank and returns its timeline.
        budget_s: no step starts that would end later than this, except the first two.
    """
    steps: list[list[list[Timeline]]] = [[] for _ in plans]
    with ProgressBar("measuring steps", budget_s) as bar:
        # The first step of each plan is not counted: it allocates memory.
        run(plans[0], 0)
        began_s, taken_s, longest_s = clock(), 0.0, 0.0
        for number in range(_STEP_ROUNDS * len(plans)):
            which, round_ = number % len(plans), number // len(plans)
            num_runs = 2 if 0 < number < len(plans) else 1
            if taken_s + num_runs * longest_s > budget_s:
                break
            if num_runs == 2:
                run(plans[which], 0)
            timeline = run(plans[which], round_)
            ranks = all_gather_object(topology.world, (timeline, clock() - began_s), "measuring steps")
            steps[which].append([timeline for timeline, _ in ranks])
            before_s, taken_s = taken_s, max(seconds for _, seconds in ranks)
            longest_s = max(longest_s, (taken_s - before_s) / num_runs)
            if topology.is_first:
                bar.show(number + 1, _STEP_ROUNDS * len(plans))
        bar.finish("measured steps")
    observed = Observed()
    for plan, timelines in zip(plans, steps, strict=True):
        observed |= observe_task_times(plan, costs, timelines)
    return observed
