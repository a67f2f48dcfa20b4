"""Observed times: the parts of steps as they took where they ran, and the costs of steps by them.

    seen = observe(plan, costs, steps)      # timelines of steps that ran by this plan
    costs = refit(costs, seen)              # the same where nothing was seen

A sample is a kind of task in one pass, in so many chunks. Of one number of chunks, what is predicted of that kind is
multiplied; of several, a line goes through them, or a curve where large chunks take more than in proportion.
So lines of a machine, which know no model, become those of the layers that ran, with all that surrounds them: ranks
tell each other how many rows they will send, which is "count-exchange"; what else a pass takes beside its tasks is
"other", each layer's part of it; and what stands between the passes and after them is the loss and the optimizer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fusedmoe.schedule.cost import ALONE, Contention, Line, Observed, Sample, fit, line_through
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts, gradient_ranges
from fusedmoe.schedule.task import COUNTS, PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS, Task, TaskKind
from fusedmoe.schedule.timeline import Span, Timeline, idle_s

# No clock is finer.
_TICK_S = 1e-9
# What a step does by its plan, or autograd in its place: all else surrounds it.
_PARTS = frozenset((TaskKind.ATTENTION, *PIPELINE, *WEIGHT_GRADIENTS.values()))


def observe(plan: Plan, costs: StepCosts, steps: Sequence[Sequence[Timeline]]) -> Observed:
    """Returns what was seen of steps that ran by a plan: the mean of a part's tasks, as they would be with nothing
    beside them, in the middle ones of several steps.

    All parts are of the same steps: of parts that are medians each by itself, the one that was held up in each step
    would be missing, and their sum too short.

    Args:
        costs: of the step, before: it says what each all-reduce carries, and how resources disturb each other.
        steps: of each step the timelines of all ranks, from where it began (so not aligned). Of steps with a loss it is
            also seen what surrounds the plan's tasks.
    """
    by_length = sorted(steps, key=_step_s)
    disturbed = len(steps) // 3  # at either end
    taken: dict[Sample, list[float]] = {}
    for timelines in by_length[disturbed : len(steps) - disturbed]:
        for sample, seconds in _samples(plan, costs, timelines, costs.contention).items():
            taken.setdefault(sample, []).append(statistics.mean(seconds))
    return Observed({sample: statistics.mean(seconds) for sample, seconds in taken.items()})


def _step_s(timelines: Sequence[Timeline]) -> float:
    """Returns the seconds of a step on the slowest rank."""
    return max(timeline.end_s for timeline in timelines)


class Row(NamedTuple):
    """Seconds of all tasks of a part of a step; None: it is not predicted, or was not measured."""

    part: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """The difference of the prediction, as a share of what was measured."""
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s - 1.0


def compare(plan: Plan, costs: StepCosts, timelines: Sequence[Timeline]) -> list[Row]:
    """Compares a step with its prediction: each part, as long as it takes beside the others, and the whole step last.

    `timelines`: of all ranks, from where the step began.
    """
    predicted: dict[str, float] = {}
    for span in simulate(plan, costs).spans:
        part = _part_name(span.kind, span.phase)
        predicted[part] = predicted.get(part, 0.0) + span.duration_s
    measured: dict[str, float] = {}
    for sample, tasks_s in _samples(plan, costs, timelines).items():
        part = _part_name(sample.kind, sample.phase)
        measured[part] = measured.get(part, 0.0) + sum(tasks_s)
    rows = [Row(part, predicted.get(part), measured.get(part)) for part in dict.fromkeys([*predicted, *measured])]
    return [*rows, Row("step", makespan(plan, costs), _step_s(timelines))]


def _part_name(kind: str, phase: str | None) -> str:
    return kind if phase is None else f"{kind} {phase}"


def _last(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the spans from when the last rank began them to when the last one had ended them."""
    # A rank that is early waits in the next collective for one that is late. So that counts once, in what made the
    # other late, and the tasks of a step without a schedule add up to it.
    last: dict[tuple[object, ...], Span] = {}
    for timeline in timelines:
        times: Counter[tuple[object, ...]] = Counter()
        for span in timeline.spans:
            task = (span.kind, span.chunk, span.layer, span.phase)
            other = last.get((*task, times[task]), span)
            start_s, end_s = max(span.start_s, other.start_s), max(span.end_s, other.end_s)
            last[*task, times[task]] = other._replace(start_s=start_s, end_s=end_s)
            times[task] += 1
    return Timeline(spans=tuple(sorted(last.values(), key=lambda span: (span.start_s, -span.end_s))))


def _samples(
    plan: Plan, costs: StepCosts, timelines: Sequence[Timeline], contention: Contention | None = None
) -> dict[Sample, list[float]]:
    """Returns the seconds of each task of one step, over the ranks, by what it is a sample of.

    `contention`: by it, seconds are those that the tasks would take with nothing beside them, and the experts' without
    the copies between other chunks in the two passes; None: as they were.
    """
    timeline = _last(timelines)
    counts = Counter((task.kind, task.layer, task.phase) for task in plan)
    carried = {task[:4]: len(bucket) for task, bucket in gradient_ranges(plan, costs.gradient_bytes).items()}
    own = {task[:4] for task in plan if task.kind in _PARTS} | carried.keys()
    # Autograd runs attention that is in one piece, also that of layers without experts.
    in_one = any(task.kind == TaskKind.ATTENTION and task.chunk is None for task in plan)
    degrees, layers = plan.degrees, max(1, len(costs.layers))

    def runs(span: Span) -> bool:
        if span.kind == TaskKind.ATTENTION and span.chunk is None:
            return in_one
        return (span.kind, span.chunk, span.layer, span.phase) in own

    tasks: dict[Task, tuple[Sample, float]] = {}
    shared = _surrounding(timeline, runs)
    spans = [span for span in timeline.spans if runs(span)]
    for span, seconds in zip(spans, _alone_s(spans, contention or ALONE), strict=True):
        kind, chunk, layer, phase = span.kind, span.chunk, span.layer, span.phase
        task = Task(kind, chunk, layer, phase)
        if kind == TaskKind.ATTENTION and chunk is None:
            shared[Sample(kind, phase)] = shared.get(Sample(kind, phase), 0.0) + seconds
            continue
        if kind == TaskKind.GRADIENT_ALL_REDUCE:
            sample = Sample(kind, phase, carried[kind, chunk, layer, phase])
        else:
            assert layer is not None
            there, back = (degrees.get((one, layer)) for one in PHASES)
            alone = contention is not None and (kind, phase) == (TaskKind.EXPERT, "backward")
            if alone and there and back and there != back:
                seconds = max(0.0, seconds - costs.layers[layer].regroup_s / back)
            apart = (WEIGHT_GRADIENTS.get(kind), layer, phase) in counts
            sample = Sample(kind, phase, counts[kind, layer, phase], apart)
        tasks[task] = sample, seconds
    after = Sample(TaskKind.OPTIMIZER, None)
    if after in shared:
        # Gradients whose tasks nothing runs by itself are reduced at the end, with all others.
        late_s = sum(costs.all_reduce.seconds(size) for name, size in carried.items() if Task(*name) not in tasks)
        shared[after] = max(0.0, shared[after] - late_s)
    for sample, seconds in shared.items():
        each = [None] if sample.phase is None else range(layers)
        tasks |= {Task(sample.kind, None, layer, sample.phase): (sample, seconds / len(each)) for layer in each}
    samples: dict[Sample, list[float]] = {}
    for sample, seconds in tasks.values():
        samples.setdefault(sample, []).append(seconds)
    return samples


def _alone_s(spans: Sequence[Span], contention: Contention) -> list[float]:
    """Returns the seconds that each of some spans would take with nothing beside it: in each of its own seconds it has
    done as much as its speed was beside those that ran meanwhile."""
    changes = [
        (moment, RESOURCES.index(s.resource), by) for s in spans for moment, by in ((s.start_s, 1), (s.end_s, -1))
    ]
    running, done_s, now_s = [0] * len(RESOURCES), [0.0] * len(RESOURCES), 0.0
    at: dict[float, list[float]] = {}  # seconds of work that each resource can have done until then
    for moment, resource, by in sorted(changes):
        speeds = contention.speeds[sum(1 << number for number, count in enumerate(running) if count)]
        done_s = [done + speed * (moment - now_s) for done, speed in zip(done_s, speeds, strict=True)]
        at[moment], now_s = done_s, moment
        running[resource] += by
    on = (RESOURCES.index(span.resource) for span in spans)
    return [at[span.end_s][place] - at[span.start_s][place] for span, place in zip(spans, on, strict=True)]


def _surrounding(timeline: Timeline, runs: Callable[[Span], bool]) -> dict[Sample, float]:
    """Returns the seconds of a step beside its tasks: in each pass, between them, and after them."""
    # Without a loss the timeline is of layers by themselves, and nothing says where a pass ends.
    losses = [span for span in timeline.spans if span.kind == TaskKind.LOSS]
    if not losses:
        return {}
    # The loss divides the step: before it is the forward pass, after it the backward pass.
    begins_s, ends_s = min(span.start_s for span in losses), max(span.end_s for span in losses)
    reduced = [span for span in timeline.spans if span.kind == TaskKind.GRADIENT_ALL_REDUCE]
    after = [span.start_s for span in timeline.spans if span.kind == TaskKind.OPTIMIZER]
    passed_s = min((span.start_s for span in reduced if not runs(span)), default=min(after, default=timeline.end_s))
    reduced_s = max((span.end_s for span in reduced if runs(span)), default=0.0)
    counts = [span for span in timeline.spans if span.kind == COUNTS and span.end_s <= begins_s]
    beside = (TaskKind.GRADIENT_ALL_REDUCE, COUNTS)
    work = counts + [span for span in timeline.spans if span.kind not in beside and runs(span)]
    around = {
        Sample(TaskKind.OTHER, "forward"): idle_s(work, 0.0, begins_s),
        Sample(TaskKind.LOSS, None): ends_s - begins_s,
        Sample(TaskKind.OTHER, "backward"): idle_s(work, ends_s, passed_s),
        Sample(TaskKind.OPTIMIZER, None): max(0.0, timeline.end_s - max(passed_s, reduced_s)),
    }
    return {Sample(COUNTS, "forward"): sum(span.duration_s for span in counts), **around} if counts else around


def refit(costs: StepCosts, seen: Observed, share: float = 1.0) -> StepCosts:
    """Returns the costs of a step by what was seen of steps of these layers.

    `share`: the rows that were seen as a share of those that are costed, where these are others.
    """
    distinct = {id(layer): layer for layer in costs.layers}  # often one object many times
    layers = {key: _refit_layer(layer, seen, share, costs.task_s) for key, layer in distinct.items()}
    # Times between the passes and after them are measured as wholes, so they replace what was predicted.
    between, after = (seen.seconds.get(Sample(kind, None)) for kind in (TaskKind.LOSS, TaskKind.OPTIMIZER))
    before, back = (_around_s(seen, phase) for phase in PHASES)
    loss_s = costs.loss_s if between is None else between / share
    optimizer_s = costs.optimizer_s if after is None else after
    # What surrounds micro-batches that go through all layers is before them and after: with the loss and the optimizer.
    if costs.can_split and between is not None and before is not None and back is not None:
        loss_s = (loss_s or 0.0) + len(costs.layers) * before / share
        optimizer_s = (optimizer_s or 0.0) + len(costs.layers) * back / share
    return replace(
        costs,
        layers=tuple(layers[id(layer)] for layer in costs.layers),
        all_reduce=_refit_line(costs.all_reduce, seen.get(TaskKind.GRADIENT_ALL_REDUCE, "backward")),
        loss_s=loss_s,
        optimizer_s=optimizer_s,
    )


def _refit_layer(layer: LayerCosts, seen: Observed, share: float, task_s: float) -> LayerCosts:
    def fitted(part: StageTime, kind: str, phase: str, apart: bool = False) -> StageTime:
        time = _refit_stage(part, seen.get(kind, phase, apart), share)
        # No task takes less than the executor itself.
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
            for kind, of_rows in ((TaskKind.OTHER, share), (COUNTS, 1.0)):
                if (around_s := seen.seconds.get(Sample(kind, phase))) is not None:
                    part_s[kind] = around_s / of_rows
        return replace(layer, chunks=chunks, dense_s=dense_s)
    dense = all_fitted(micro.dense)
    # What surrounded a layer by itself goes with attention.
    for phase, of_phase in dense.items():
        around_s = _around_s(seen, phase)
        if around_s is not None and TaskKind.ATTENTION in of_phase and Sample(TaskKind.LOSS, None) not in seen.seconds:
            of_phase[TaskKind.ATTENTION] += StageTime(0.0, around_s / share)
    weights, apart_s = dict(micro.weights), micro.apart_s
    for kind, part in micro.weights.items():
        where, before = (chunks, layer.chunks) if kind in PIPELINE else (dense, micro.dense)
        whole, predicted = where["backward"][kind], before["backward"][kind]
        later = seen.get(WEIGHT_GRADIENTS[kind], "backward"), seen.get(kind, "backward", True)
        if all(later):
            own = fitted(part, WEIGHT_GRADIENTS[kind], "backward")
            rest = fitted(predicted + part * -1.0, kind, "backward", True)
            both_s = own.seconds(1) + rest.seconds(1)
            if not seen.get(kind, "backward"):
                whole = where["backward"][kind] = own + rest
            elif kind == TaskKind.EXPERT:
                apart_s = max(0.0, both_s - whole.seconds(1))
                both_s = min(both_s, whole.seconds(1))
            # As a share of all that is backward: what is left for the input is never less than nothing.
            weights[kind] = whole * min(1.0, own.seconds(1) / both_s)
        elif predicted.seconds(1) > 0:
            weights[kind] = part * (whole.seconds(1) / predicted.seconds(1))
    dense_s = {phase: {kind: part.seconds(1) for kind, part in part_s.items()} for phase, part_s in dense.items()}
    micro = MicroBatches(dense, weights, micro.waits, apart_s)
    return replace(layer, chunks=chunks, dense_s=dense_s, micro=micro)


def _around_s(seen: Observed, phase: str) -> float | None:
    """Returns the seconds that surrounded a layer in a pass; None where nothing is known of them."""
    around_s = seen.seconds.get(Sample(TaskKind.OTHER, phase))
    return None if around_s is None else around_s + seen.seconds.get(Sample(COUNTS, phase), 0.0)


def _refit_stage(part: StageTime, points: Mapping[int, float], share: float) -> StageTime:
    """`points`: seconds of a chunk by the number of chunks."""
    if not points:
        return part
    # Several numbers of chunks tell starts and work apart; one number only scales what was predicted.
    if len(points) > 1:
        return _stage_through(
            [(share / count, max(seconds, _TICK_S)) for count, seconds in points.items()], part.alpha_s
        )
    ((count, seconds),) = points.items()
    expected_s = part.seconds(count / share)
    return part * (seconds / expected_s) if expected_s > 0 else StageTime(0.0, seconds * count / share)


def _stage_through(points: Sequence[tuple[float, float]], start_s: float) -> StageTime:
    """Returns the best time through seconds by a chunk's share of all rows. `start_s`: what a chunk takes to start, by
    the lines of the machine."""
    if fit(points).alpha_s >= 0:
        line = line_through(points)
        return StageTime(line.alpha_s, line.beta_s)
    # A line that starts below zero would have many chunks take less than nothing: large chunks take more than in
    # proportion there, and each number of chunks that was seen is still to be met. What hides in that is how long a
    # chunk takes to start, which the machine's line knows.
    from scipy.optimize import nnls

    n, seconds = np.array(points).T
    start_s = min(start_s, float(seconds.min()) / 2)
    parts = np.stack([n / seconds, n * n / seconds], 1)
    (whole_s, excess_s), _ = nnls(parts, 1 - start_s / seconds)
    return StageTime(start_s, float(whole_s), float(excess_s))


def _refit_line(line: Line, points: Mapping[int, float]) -> Line:
    """`points`: seconds by bytes."""
    if not points:
        return line
    if len(points) > 1:
        return line_through(list(points.items()))
    ((size, seconds),) = points.items()
    expected_s = line.seconds(size)
    if expected_s <= 0:
        return Line(0.0, seconds / size)
    return Line(line.alpha_s * seconds / expected_s, line.beta_s * seconds / expected_s)
