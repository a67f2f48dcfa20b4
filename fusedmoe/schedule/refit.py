"""Measured task times, and step costs fitted to them.

    observed = observe(plan, costs, steps)      # timelines of steps that followed this plan
    costs = refit(costs, observed)              # unchanged where nothing was measured

A sample is a kind of task in one pass with a number of chunks. With samples of one number of chunks, the predicted
times are scaled; with several, a line is fitted, or a curve if large chunks take more than in proportion. Time outside
of tasks is included: "count-exchange", "other" (the remaining time of a pass, per layer), loss and optimizer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line, MeasuredPart, Observed, fit, fit_nonnegative_line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts, gradient_ranges, map_shared
from fusedmoe.schedule.task import COUNT_EXCHANGE, PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.timeline import Span, Timeline, idle_s

# Clock resolution.
_CLOCK_RESOLUTION_S = 1e-9
# Kinds that the plan runs, or autograd in its place.
_PLANNED_KINDS = frozenset((TaskKind.ATTENTION, *PIPELINE, *WEIGHT_GRADIENTS.values()))


def observe_task_times(plan: Plan, costs: StepCosts, steps: Sequence[Sequence[Timeline]]) -> Observed:
    """Return task times without contention of steps that followed a plan: means over the median third of the steps.

    All parts are averaged over the same steps. Medians per part would omit delays that hit another part in each step.

    Args:
        costs: predicted costs of the step, for the bytes of each all-reduce and the contention.
        steps: for each step the timelines of all ranks, which start at the beginning of the step (not aligned). Times
            outside of tasks need steps with a loss.
    """
    by_length = sorted(steps, key=_step_s)
    disturbed = len(steps) // 3  # shortest and longest steps to drop
    taken: dict[MeasuredPart, list[float]] = {}
    for timelines in by_length[disturbed : len(steps) - disturbed]:
        for sample, seconds in _task_times_by_part(plan, costs, timelines, costs.contention).items():
            taken.setdefault(sample, []).append(statistics.mean(seconds))
    return Observed({sample: statistics.mean(seconds) for sample, seconds in taken.items()})


def _step_s(timelines: Sequence[Timeline]) -> float:
    return max(timeline.end_s for timeline in timelines)


class PartComparison(NamedTuple):
    """Total seconds of one part of a step; None if it is not predicted or not measured."""

    part: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def error(self) -> float | None:
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s - 1.0


def compare_parts(plan: Plan, costs: StepCosts, timelines: Sequence[Timeline]) -> list[PartComparison]:
    """Compare predicted and measured times of all parts of a step with contention; the last row is the whole step.

    `timelines`: of all ranks, starting at the beginning of the step.
    """
    predicted: dict[str, float] = {}
    for span in simulate(plan, costs).spans:
        part = _part_name(span.kind, span.phase)
        predicted[part] = predicted.get(part, 0.0) + span.duration_s
    measured: dict[str, float] = {}
    for sample, tasks_s in _task_times_by_part(plan, costs, timelines).items():
        part = _part_name(sample.kind, sample.phase)
        measured[part] = measured.get(part, 0.0) + sum(tasks_s)
    # The last synchronization reduces the gradients that no task has reduced. `refit` adds it to the optimizer.
    timeline, part = _slowest_rank_spans(timelines), _part_name(TaskKind.GRADIENT_ALL_REDUCE, "backward")
    reduced = [span for span in timeline.spans if span.kind == TaskKind.GRADIENT_ALL_REDUCE]
    if part in predicted and (last := [span for span in reduced if span.layer is None]):
        began_s = max((span.end_s for span in reduced if span.layer is not None), default=0.0)
        last_s = sum(max(0.0, span.end_s - max(span.start_s, began_s)) for span in last)
        measured[part] = measured.get(part, 0.0) + last_s
        measured.pop(TaskKind.OPTIMIZER, None)
        if any(span.kind == TaskKind.OPTIMIZER for span in timeline.spans):
            measured[TaskKind.OPTIMIZER] = max(0.0, timeline.end_s - max(span.end_s for span in last))
    rows = [
        PartComparison(part, predicted.get(part), measured.get(part)) for part in dict.fromkeys([*predicted, *measured])
    ]
    return [*rows, PartComparison("step", makespan(plan, costs), _step_s(timelines))]


def _part_name(kind: str, phase: str | None) -> str:
    return kind if phase is None else f"{kind} {phase}"


def _slowest_rank_spans(timelines: Sequence[Timeline]) -> Timeline:
    # From the latest start to the latest end over ranks: an early rank's wait for a late rank counts once, in the task
    # that made the rank late.
    last: dict[tuple[object, ...], Span] = {}
    for timeline in timelines:
        for task, span in timeline.by_task().items():
            other = last.get(task, span)
            start_s, end_s = max(span.start_s, other.start_s), max(span.end_s, other.end_s)
            last[task] = other._replace(start_s=start_s, end_s=end_s)
    return Timeline(spans=tuple(sorted(last.values(), key=lambda span: (span.start_s, -span.end_s))))


def _number_chunks(timeline: Timeline, counts: Mapping[tuple[str, int | None, str | None], int]) -> Timeline:
    """Number the chunks of a step without a schedule, whose spans are the single chunks of the plan's tasks."""
    if any(span.kind in PIPELINE and span.chunk is not None for span in timeline.spans):
        return timeline
    spans = (
        span._replace(chunk=0)
        if span.kind in PIPELINE and counts.get((span.kind, span.layer, span.phase)) == 1
        else span
        for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


def _task_times_by_part(
    plan: Plan, costs: StepCosts, timelines: Sequence[Timeline], contention: Contention | None = None
) -> dict[MeasuredPart, list[float]]:
    """Return the seconds of each task of one step over all ranks, by sample.

    `contention`: removed from the times, as is rechunking between different degrees of the passes; None: keep both.
    """
    counts = Counter((task.kind, task.layer, task.phase) for task in plan)
    timeline = _number_chunks(_slowest_rank_spans(timelines), counts)
    carried = {task[:4]: len(bucket) for task, bucket in gradient_ranges(plan, costs.gradient_bytes).items()}
    own = {task[:4] for task in plan if task.kind in _PLANNED_KINDS} | carried.keys()
    # Autograd runs unchunked attention, also in layers without experts.
    in_one = any(task.kind == TaskKind.ATTENTION and task.chunk is None for task in plan)
    degrees, layers = plan.degrees, max(1, len(costs.layers))

    def is_of_plan(span: Span) -> bool:
        if span.kind == TaskKind.ATTENTION and span.chunk is None:
            return in_one
        return (span.kind, span.chunk, span.layer, span.phase) in own

    tasks: dict[Task, tuple[MeasuredPart, float]] = {}
    shared = _measure_times_outside_tasks(timeline, is_of_plan)
    spans = [span for span in timeline.spans if is_of_plan(span)]
    for span, seconds in zip(spans, _uncontended_s(spans, contention or NO_CONTENTION), strict=True):
        kind, chunk, layer, phase = span.kind, span.chunk, span.layer, span.phase
        task = Task(kind, chunk, layer, phase)
        if kind == TaskKind.ATTENTION and chunk is None:
            shared[MeasuredPart(kind, phase)] = shared.get(MeasuredPart(kind, phase), 0.0) + seconds
            continue
        if kind == TaskKind.GRADIENT_ALL_REDUCE:
            sample = MeasuredPart(kind, phase, carried[kind, chunk, layer, phase])
        else:
            assert layer is not None
            there, back = (degrees.get((one, layer)) for one in PHASES)
            alone = contention is not None and (kind, phase) == (TaskKind.EXPERT, "backward")
            if alone and there and back and there != back:
                seconds = max(0.0, seconds - costs.layers[layer].rechunk_s / back)
            has_w_tasks = (WEIGHT_GRADIENTS.get(kind), layer, phase) in counts
            sample = MeasuredPart(kind, phase, counts[kind, layer, phase], has_w_tasks)
        tasks[task] = sample, seconds
    after = MeasuredPart(TaskKind.OPTIMIZER, None)
    if after in shared:
        # Gradients without a task are reduced at the end of the step.
        late_s = sum(costs.all_reduce.seconds(size) for name, size in carried.items() if Task(*name) not in tasks)
        shared[after] = max(0.0, shared[after] - late_s)
    for sample, seconds in shared.items():
        each = [None] if sample.phase is None else range(layers)
        tasks |= {Task(sample.kind, None, layer, sample.phase): (sample, seconds / len(each)) for layer in each}
    samples: dict[MeasuredPart, list[float]] = {}
    for sample, seconds in tasks.values():
        samples.setdefault(sample, []).append(seconds)
    return samples


def _uncontended_s(spans: Sequence[Span], contention: Contention) -> list[float]:
    """Return the seconds of each span without contention: the integral of its speed over its duration."""
    changes = [
        (time_s, RESOURCES.index(s.resource), by) for s in spans for time_s, by in ((s.start_s, 1), (s.end_s, -1))
    ]
    running, done_s, now_s = [0] * len(RESOURCES), [0.0] * len(RESOURCES), 0.0
    at: dict[float, list[float]] = {}  # seconds of work that each resource could have done until then
    for time_s, resource, by in sorted(changes):
        speeds = contention.speeds[sum(1 << number for number, count in enumerate(running) if count)]
        done_s = [done + speed * (time_s - now_s) for done, speed in zip(done_s, speeds, strict=True)]
        at[time_s], now_s = done_s, time_s
        running[resource] += by
    on = (RESOURCES.index(span.resource) for span in spans)
    return [at[span.end_s][place] - at[span.start_s][place] for span, place in zip(spans, on, strict=True)]


def _measure_times_outside_tasks(timeline: Timeline, is_of_plan: Callable[[Span], bool]) -> dict[MeasuredPart, float]:
    """Return the seconds of a step within, between and after the passes but outside its tasks."""
    # Without a loss, the end of a pass is unknown.
    losses = [span for span in timeline.spans if span.kind == TaskKind.LOSS]
    if not losses:
        return {}
    loss_start_s, loss_end_s = min(span.start_s for span in losses), max(span.end_s for span in losses)
    reduced = [span for span in timeline.spans if span.kind == TaskKind.GRADIENT_ALL_REDUCE]
    after = [span.start_s for span in timeline.spans if span.kind == TaskKind.OPTIMIZER]
    passed_s = min(
        (span.start_s for span in reduced if not is_of_plan(span)), default=min(after, default=timeline.end_s)
    )
    reduced_s = max((span.end_s for span in reduced if is_of_plan(span)), default=0.0)
    counts = [span for span in timeline.spans if span.kind == COUNT_EXCHANGE and span.end_s <= loss_start_s]
    beside = (TaskKind.GRADIENT_ALL_REDUCE, COUNT_EXCHANGE)
    work = counts + [span for span in timeline.spans if span.kind not in beside and is_of_plan(span)]
    around = {
        MeasuredPart(TaskKind.OTHER, "forward"): idle_s(work, 0.0, loss_start_s),
        MeasuredPart(TaskKind.LOSS, None): loss_end_s - loss_start_s,
        MeasuredPart(TaskKind.OTHER, "backward"): idle_s(work, loss_end_s, passed_s),
        MeasuredPart(TaskKind.OPTIMIZER, None): max(0.0, timeline.end_s - max(passed_s, reduced_s)),
    }
    return (
        {MeasuredPart(COUNT_EXCHANGE, "forward"): sum(span.duration_s for span in counts), **around}
        if counts
        else around
    )


def refit(costs: StepCosts, observed: Observed, row_ratio: float = 1.0) -> StepCosts:
    """Return step costs fitted to measured times of these layers. `row_ratio`: measured rows / rows of these costs."""
    between, after = (observed.seconds.get(MeasuredPart(kind, None)) for kind in (TaskKind.LOSS, TaskKind.OPTIMIZER))
    before, back = (_observed_outside_tasks_s(observed, phase) for phase in PHASES)
    loss_s = costs.loss_s if between is None else between / row_ratio
    optimizer_s = costs.optimizer_s if after is None else after
    # Times outside of micro-batches are before and after all layers.
    if costs.can_split and between is not None and before is not None and back is not None:
        loss_s = (loss_s or 0.0) + len(costs.layers) * before / row_ratio
        optimizer_s = (optimizer_s or 0.0) + len(costs.layers) * back / row_ratio
    return replace(
        costs,
        layers=tuple(map_shared(lambda layer: _refit_layer(layer, observed, row_ratio, costs.task_s), costs.layers)),
        all_reduce=_refit_line(costs.all_reduce, observed.get(TaskKind.GRADIENT_ALL_REDUCE, "backward")),
        loss_s=loss_s,
        optimizer_s=optimizer_s,
    )


def _refit_layer(layer: LayerCosts, observed: Observed, row_ratio: float, task_s: float) -> LayerCosts:
    def fitted(part: StageTime, kind: str, phase: str, has_w_tasks: bool = False) -> StageTime:
        time = _refit_stage_time(part, observed.get(kind, phase, has_w_tasks), row_ratio)
        # No task takes less than the executor's overhead.
        return time if time is part else replace(time, alpha_s=max(time.alpha_s, task_s))

    def all_fitted(parts: Mapping[str, Mapping[str, StageTime]]) -> dict[str, dict[str, StageTime]]:
        return {phase: {kind: fitted(part, kind, phase) for kind, part in of.items()} for phase, of in parts.items()}

    chunks = all_fitted(layer.chunks)
    dense_s = {phase: dict(part_s) for phase, part_s in layer.dense_s.items()}
    for phase, part_s in dense_s.items():
        part_s |= {kind: fitted(StageTime(0.0, whole_s), kind, phase).seconds(1) for kind, whole_s in part_s.items()}
    micro = layer.micro
    if micro is None:
        for phase, part_s in dense_s.items():
            for kind, of_rows in ((TaskKind.OTHER, row_ratio), (COUNT_EXCHANGE, 1.0)):
                if (around_s := observed.seconds.get(MeasuredPart(kind, phase))) is not None:
                    part_s[kind] = around_s / of_rows
        return replace(layer, chunks=chunks, dense_s=dense_s)
    dense = all_fitted(micro.dense)
    # Without a step's loss to add them to, times outside of tasks are added to attention.
    for phase, of_phase in dense.items():
        around_s = _observed_outside_tasks_s(observed, phase)
        if (
            around_s is not None
            and TaskKind.ATTENTION in of_phase
            and MeasuredPart(TaskKind.LOSS, None) not in observed.seconds
        ):
            of_phase[TaskKind.ATTENTION] += StageTime(0.0, around_s / row_ratio)
    weights, apart_s = dict(micro.weights), micro.w_task_overhead_s
    for kind, part in micro.weights.items():
        where, before = (chunks, layer.chunks) if kind in PIPELINE else (dense, micro.dense)
        whole, predicted = where["backward"][kind], before["backward"][kind]
        later = observed.get(WEIGHT_GRADIENTS[kind], "backward"), observed.get(kind, "backward", True)
        if all(later):
            own = fitted(part, WEIGHT_GRADIENTS[kind], "backward")
            rest = fitted(predicted + part * -1.0, kind, "backward", True)
            both_s = own.seconds(1) + rest.seconds(1)
            if not observed.get(kind, "backward"):
                whole = where["backward"][kind] = own + rest
            elif kind == TaskKind.EXPERT:
                apart_s = max(0.0, both_s - whole.seconds(1))
                both_s = min(both_s, whole.seconds(1))
            # As a fraction of the whole, so that the part for input gradients is never negative.
            weights[kind] = whole * min(1.0, own.seconds(1) / both_s)
        elif predicted.seconds(1) > 0:
            weights[kind] = part * (whole.seconds(1) / predicted.seconds(1))
    dense_s = {phase: {kind: part.seconds(1) for kind, part in part_s.items()} for phase, part_s in dense.items()}
    micro = MicroBatches(dense, weights, micro.waits, apart_s)
    return replace(layer, chunks=chunks, dense_s=dense_s, micro=micro)


def _observed_outside_tasks_s(observed: Observed, phase: str) -> float | None:
    around_s = observed.seconds.get(MeasuredPart(TaskKind.OTHER, phase))
    return None if around_s is None else around_s + observed.seconds.get(MeasuredPart(COUNT_EXCHANGE, phase), 0.0)


def _refit_stage_time(part: StageTime, points: Mapping[int, float], row_ratio: float) -> StageTime:
    """Fit a predicted stage time to `points`, measured seconds of one chunk by number of chunks, if there are any."""
    if not points:
        return part
    # Several numbers of chunks separate start-up from work.
    if len(points) > 1:
        return _fit_stage_time(
            [(row_ratio / count, max(seconds, _CLOCK_RESOLUTION_S)) for count, seconds in points.items()], part.alpha_s
        )
    ((count, seconds),) = points.items()
    expected_s = part.seconds(count / row_ratio)
    return part * (seconds / expected_s) if expected_s > 0 else StageTime(0.0, seconds * count / row_ratio)


def _fit_stage_time(points: Sequence[tuple[float, float]], start_s: float) -> StageTime:
    """Fit a stage time to `points`: pairs of a fraction of all rows and its seconds. `start_s`: predicted start-up."""
    if fit(points).alpha_s >= 0:
        line = fit_nonnegative_line(points)
        return StageTime(line.alpha_s, line.beta_s)
    # A negative intercept: large chunks take more than in proportion. Fit this excess, with the predicted start-up
    # time, which the points do not determine.
    from scipy.optimize import nnls

    n, seconds = np.array(points).T
    start_s = min(start_s, float(seconds.min()) / 2)
    parts = np.stack([n / seconds, n * n / seconds], 1)
    (whole_s, excess_s), _ = nnls(parts, 1 - start_s / seconds)
    return StageTime(start_s, float(whole_s), float(excess_s))


def _refit_line(line: Line, points: Mapping[int, float]) -> Line:
    if not points:
        return line
    if len(points) > 1:
        return fit_nonnegative_line(list(points.items()))
    ((size, seconds),) = points.items()
    expected_s = line.seconds(size)
    if expected_s <= 0:
        return Line(0.0, seconds / size)
    return Line(line.alpha_s * seconds / expected_s, line.beta_s * seconds / expected_s)
