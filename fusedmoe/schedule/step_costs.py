"""The step cost model: what a training step of a stack of layers takes, task by task.

It is made of what each part of a layer takes in chunks and in one piece, and gives the durations of the tasks of any
plan, and what their work takes at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import ALONE, Contention, Line
from fusedmoe.schedule.plan import Plan, name
from fusedmoe.schedule.task import LINKS, PHASES, PIPELINE, RESOURCES, WEIGHT_GRADIENTS, Task, TaskKind

#: The largest degree that is tried, unless the caller says otherwise.
MAX_DEGREE = 16

# What weight gradients are cut off from.
_SOURCES = {kind: source for source, kind in WEIGHT_GRADIENTS.items()}


@dataclass(frozen=True)
class StageTime:
    """Seconds of a kind of tasks in chunks: each of r chunks takes alpha_s + whole_s/r + excess_s/r².

    `excess_s`: what a large chunk takes beyond its share of the whole, as where it is too large for caches or for the
    buffers of a link.
    """

    alpha_s: float
    whole_s: float
    excess_s: float = 0.0

    def seconds(self, degree: Any) -> Any:
        """Returns the seconds of one of so many chunks; of an array of degrees an array."""
        return self.alpha_s + (self.whole_s + self.excess_s / degree) / degree

    @property
    def moved_s(self) -> float:
        """Seconds in one chunk without its start."""
        return self.whole_s + self.excess_s

    def __add__(self, other: StageTime) -> StageTime:
        """Adds the time of what follows."""
        excess_s = self.excess_s + other.excess_s
        return StageTime(self.alpha_s + other.alpha_s, self.whole_s + other.whole_s, excess_s)

    def __mul__(self, times: float) -> StageTime:
        return StageTime(self.alpha_s * times, self.whole_s * times, self.excess_s * times)


def work_s(parts: Mapping[str, StageTime], degree: int = 1) -> dict[str, float]:
    """Returns the seconds that each resource has to work for all chunks of parts by kind."""
    work = dict.fromkeys(RESOURCES, 0.0)
    for kind, part in parts.items():
        work[LINKS.get(kind, "compute")] += degree * part.seconds(degree)
    return work


class ChunkTimes(NamedTuple):
    """Seconds of each part of one chunk. A part that a layer does not have takes none."""

    dispatch: float = 0.0
    all_gather: float = 0.0
    expert: float = 0.0
    reduce_scatter: float = 0.0
    combine: float = 0.0


def chunk_times(chunks: Mapping[str, StageTime], degree: int) -> ChunkTimes:
    """Returns the times of one of `degree` chunks of a layer's pass (F9)."""
    return ChunkTimes(*(chunks[kind].seconds(degree) if kind in chunks else 0.0 for kind in PIPELINE))


@dataclass(frozen=True)
class MicroBatches:
    """Costs of a layer where micro-batches go through all of it, and where weight gradients are W tasks.

    `waits`: forward, all micro-batches are routed before the first is sent, as where second choices compete for an
    expert's places; a "permute" for all of them then stands between, which takes no time.
    """

    dense: Mapping[str, Mapping[str, StageTime]]  # by phase and kind
    # How much of the backward pass of "expert" and "attention" is weight gradients; frozen ones have none, nor W tasks.
    weights: Mapping[str, StageTime]
    waits: bool = False
    apart_s: float = 0.0  # that the experts' backward pass takes longer with W tasks, for which it keeps activations


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer; a plan for it has the parts that are here."""

    chunks: Mapping[str, Mapping[str, StageTime]]  # the parts of its pipeline, by phase and kind
    dense_s: Mapping[str, Mapping[str, float]]  # of the parts outside the pipeline, each in one piece
    gradient_bytes: int = 0  # of its dense gradient, as far as it is reduced
    micro: MicroBatches | None = None  # None where dense parts cannot be split
    # Seconds that the experts' backward pass takes longer where it has other chunks than the forward pass: it copies
    # the rows.
    regroup_s: float = 0.0

    def with_parts(self, kinds: Collection[str]) -> LayerCosts:
        """Returns the layer with these parts of the pipeline; those that were not in it take no time."""
        parts, free = [kind for kind in PIPELINE if kind in kinds], StageTime(0.0, 0.0)
        chunks = {phase: {kind: of.get(kind, free) for kind in parts} for phase, of in self.chunks.items()}
        return replace(self, chunks=chunks)

    def dense_total_s(self, phase: str, degree: int | None = None) -> float:
        """Returns the seconds of all dense parts of a pass, each in one piece or in so many micro-batches."""
        if degree is None:
            return sum(self.dense_s[phase].values())
        return sum(degree * part.seconds(degree) for part in self.in_micro_batches().dense[phase].values())

    def in_micro_batches(self) -> MicroBatches:
        """Returns its costs in micro-batches. Raises `ConfigError` where nothing is known of these."""
        if self.micro is None:
            raise ConfigError(
                "micro-batches: a layer cannot be split; nothing is known of what its dense part takes then"
            )
        return self.micro


@dataclass(frozen=True)
class StepCosts:
    """Costs of a training step of a stack of layers (`cost.Costs`).

    Attributes:
        layers: often one object many times.
        all_reduce: the line of gradient all-reduces.
        loss_s, optimizer_s: None for a step without them.
        task_s: seconds that the executor takes for a task, whatever it does.
        workload: the `Workload` of one of the layers; None where it is not known.
    """

    layers: tuple[LayerCosts, ...]
    all_reduce: Line = field(default_factory=lambda: Line(0.0, 0.0))
    contention: Contention = ALONE
    loss_s: float | None = None
    optimizer_s: float | None = None
    task_s: float = 0.0
    workload: object = None

    @property
    def can_split(self) -> bool:
        """True if micro-batches can go through all layers."""
        return bool(self.layers) and all(layer.micro is not None for layer in self.layers)

    def by_layer(self) -> StepCosts:
        """Returns the step where nothing but the layers' pipelines goes in chunks."""
        found = {id(layer): replace(layer, micro=None) for layer in self.layers}  # often one object many times
        return replace(self, layers=tuple(found[id(layer)] for layer in self.layers))

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's dense gradient."""
        return tuple(layer.gradient_bytes for layer in self.layers)

    def seconds(self, plan: Plan) -> dict[Task, float]:
        """Returns the duration of each task of a plan. Raises `ConfigError` for a part that is not in the costs."""
        # A bucket without a size carries what is left of its layer's gradient: only the whole plan says how much.
        carried = {task: len(bucket) for task, bucket in gradient_ranges(plan, self.gradient_bytes).items()}
        return self.durations(plan.sequence, carried)

    def durations(self, tasks: Collection[Task], carried: Mapping[Task, int] | None = None) -> dict[Task, float]:
        """Returns the duration of each of some tasks that have all chunks of their stages among them.

        `carried`: the bytes of each gradient-all-reduce; None: as they say themselves.
        """
        result: dict[Task, float] = {}
        known: dict[tuple[str, int | None, str | None], float] = {}
        counts = Counter((kind, layer, phase) for kind, _, layer, phase, _ in tasks)
        for task in tasks:
            kind, _, layer, phase, size = task
            nbytes = size if carried is None else carried.get(task)
            if nbytes is not None:
                result[task] = self.all_reduce.seconds(nbytes)
                continue
            # All chunks of a part are equal, so one number serves them all.
            where = (kind, layer, phase)
            if where not in known:
                without = (WEIGHT_GRADIENTS.get(kind), layer, phase) in counts
                known[where] = self._task_s(task, counts[where], without)
                there = counts.get((kind, layer, "forward"), counts[where])
                # Where the two passes have other chunks, the experts' backward pass first copies their rows.
                if kind == TaskKind.EXPERT and phase == "backward" and there != counts[where] and layer is not None:
                    known[where] += self.layers[layer].regroup_s / counts[where]
            result[task] = known[where]
        return result

    def _task_s(self, task: Task, count: int, without_weights: bool) -> float:
        """Returns the duration of a task, apart from gradient-all-reduces, whose stage has `count` chunks."""
        kind, chunk, layer, phase, _ = task
        if layer is None:
            wholes_s: dict[str, float | None] = {TaskKind.LOSS: self.loss_s, TaskKind.OPTIMIZER: self.optimizer_s}
            if (whole_s := wholes_s.get(kind)) is not None:
                return whole_s / count
        elif layer < len(self.layers) and phase is not None:
            if chunk is None and kind in self.layers[layer].dense_s[phase] and not without_weights:
                return self.layers[layer].dense_s[phase][kind]
            part = _part(self.layers[layer], phase, kind, without_weights)
            if part is not None:
                return part.seconds(count)
        raise ConfigError(f"costs: nothing is known of {name(task)} ({task.kind}); the plan is not for these layers")


def _part(layer: LayerCosts, phase: str, kind: str, without_weights: bool) -> StageTime | None:
    """Returns the time of chunks of a kind; None: the layer has none of it."""
    micro = layer.micro
    if kind in PIPELINE:
        part = layer.chunks[phase].get(kind)
    elif micro is None:
        part = None
    elif kind == TaskKind.PERMUTE and micro.waits:
        part = StageTime(0.0, 0.0)
    elif kind in _SOURCES:
        part = micro.weights.get(_SOURCES[kind]) if phase == "backward" else None
    else:
        part = micro.dense[phase].get(kind)
    if part is None or not without_weights:
        return part
    weights = None if micro is None else micro.weights.get(kind)
    if micro is None or weights is None:
        return None
    return part + weights * -1.0 + StageTime(0.0, micro.apart_s if kind == TaskKind.EXPERT else 0.0)


def gradient_ends(gradient_bytes: Sequence[int]) -> list[int]:
    """Returns the end of each layer's gradient among the bytes of all (see `task.Task`), the last layer's first."""
    return list(accumulate(reversed(gradient_bytes)))[::-1]


def gradient_ranges(plan: Plan, gradient_bytes: Sequence[int]) -> dict[Task, range]:
    """Returns the bytes of the gradients that each gradient-all-reduce of the plan of a whole step carries.

    Raises `ConfigError` for a bucket of a layer that has ended before, or that reaches into the next.
    """
    ends = gradient_ends(gradient_bytes)
    start = 0
    result = {}
    for task in plan.inter:
        if task.kind != TaskKind.GRADIENT_ALL_REDUCE:
            continue
        if task.layer is None or task.layer >= len(ends):
            raise ConfigError(f"plan: {name(task)} is of a layer that is not there; the stack has {len(ends)}")
        end = ends[task.layer]
        stop = end if task.size is None else start + task.size
        if not start < stop <= end:
            raise ConfigError(
                f"plan: {name(task)} carries bytes {start} to {stop}, but layer {task.layer}'s gradient ends at {end}; "
                "change its size, or its layer"
            )
        result[task] = range(start, stop)
        start = stop
    return result


def resource_bound_s(
    costs: StepCosts, degrees: Mapping[str, Sequence[tuple[int | None, int]]], buckets: Iterable[int] | None = None
) -> float:
    """Returns the seconds that no order of a step beats: the busiest resource's tasks.

    `degrees`: by phase, for each layer the chunks of its dense part (None: it is in one piece) and of its pipeline.
    `buckets`: bytes of each gradient all-reduce; None: one for all.
    """
    compute, inter, intra = (costs.loss_s or 0.0) + (costs.optimizer_s or 0.0), 0.0, 0.0
    known: dict[tuple[int, str, int | None, int], dict[str, float]] = {}  # layers are often one object many times
    for phase in PHASES:
        for layer, (dense, rows) in zip(costs.layers, degrees[phase], strict=True):
            where = (id(layer), phase, dense, rows)
            if where not in known:
                work = known[where] = work_s(layer.chunks[phase], rows)
                work["compute"] += layer.dense_total_s(phase, dense)
            work = known[where]
            compute, inter, intra = compute + work["compute"], inter + work["inter"], intra + work["intra"]
    reduced = [sum(costs.gradient_bytes)] if buckets is None else buckets
    inter += sum(costs.all_reduce.seconds(size) for size in reduced if size)
    return costs.contention.least_s(compute, intra, inter)


def pass_bound_s(r: int, times: ChunkTimes, gar: float = 0.0, contention: Contention = ALONE) -> float:
    """Returns the seconds that no order beats: what each resource has to do, with what must come before and after."""
    d, ag, x, rs, c = times
    # Before the first dispatch has ended and after the last combine has begun nothing else has anything to do.
    return max(
        d + ag + r * x + rs + c,
        d + contention.least_s(r * x, r * (ag + rs), (r - 1) * (d + c) + gar) + c,
    )
