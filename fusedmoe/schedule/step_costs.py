"""Costs of a training step over a stack of layers: durations of all tasks of a plan, and lower bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.task import LINKS, PIPELINE, RESOURCES, WEIGHT_GRADIENTS, Task, TaskKind

#: Default limit for the number of chunks.
MAX_DEGREE = 16

_SOURCE_KIND_OF_W_TASK = {kind: source for source, kind in WEIGHT_GRADIENTS.items()}

T = TypeVar("T")
R = TypeVar("R")


def map_shared(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the result for each item; items that are one object, as layers often are, share one result."""
    results = {key: function(item) for key, item in {id(item): item for item in items}.items()}
    return [results[id(item)] for item in items]


@dataclass(frozen=True)
class StageTime:
    """Time of a kind of task: each of r chunks takes alpha_s + whole_s/r + excess_s/r² seconds.

    `excess_s`: additional time of large chunks, for example if they exceed caches or link buffers.
    """

    alpha_s: float
    whole_s: float
    excess_s: float = 0.0

    def seconds(self, degree: Any) -> Any:
        """Return the seconds of one of `degree` chunks. Accepts arrays."""
        return self.alpha_s + (self.whole_s + self.excess_s / degree) / degree

    @property
    def work_s(self) -> float:
        return self.whole_s + self.excess_s

    def __add__(self, other: StageTime) -> StageTime:
        excess_s = self.excess_s + other.excess_s
        return StageTime(self.alpha_s + other.alpha_s, self.whole_s + other.whole_s, excess_s)

    def __mul__(self, times: float) -> StageTime:
        return StageTime(self.alpha_s * times, self.whole_s * times, self.excess_s * times)


def resource_work_s(parts: Mapping[str, StageTime], degree: int = 1) -> dict[str, float]:
    """Return the busy seconds of each resource in a layer's pass of `degree` chunks."""
    work = dict.fromkeys(RESOURCES, 0.0)
    for kind, part in parts.items():
        work[LINKS.get(kind, "compute")] += degree * part.seconds(degree)
    return work


class ChunkTimes(NamedTuple):
    """Seconds of each part of one chunk; 0 if the layer lacks the part."""

    dispatch: float = 0.0
    all_gather: float = 0.0
    expert: float = 0.0
    reduce_scatter: float = 0.0
    combine: float = 0.0


def chunk_times(chunks: Mapping[str, StageTime], degree: int) -> ChunkTimes:
    return ChunkTimes(*(chunks[kind].seconds(degree) if kind in chunks else 0.0 for kind in PIPELINE))


@dataclass(frozen=True)
class MicroBatches:
    """Costs of a layer that can be split into micro-batches, with optional W tasks.

    `waits`: in the forward pass all micro-batches are routed before the first is sent, for example if second choices
    compete for an expert's capacity. A "permute" task of zero seconds then marks the end of routing.
    """

    dense: Mapping[str, Mapping[str, StageTime]]  # by phase and kind
    # Weight-gradient part of the backward "expert" and "attention". Frozen parameters have no entry and no W tasks.
    weights: Mapping[str, StageTime]
    waits: bool = False
    w_task_overhead_s: float = 0.0  # extra time of the experts' backward with W tasks, which need saved activations


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer. Its plans have exactly the pipelined and dense parts (kinds of task) listed here."""

    chunks: Mapping[str, Mapping[str, StageTime]]  # pipelined parts, by phase and kind
    dense_s: Mapping[str, Mapping[str, float]]  # seconds of unchunked parts, by phase and kind
    gradient_bytes: int = 0  # of the dense gradients that are all-reduced
    micro: MicroBatches | None = None  # None if dense parts cannot be split
    # Seconds to copy rows in the experts' backward pass if its chunks differ from the forward pass.
    rechunk_s: float = 0.0

    def with_parts(self, kinds: Collection[str]) -> LayerCosts:
        """Return the costs with these pipeline parts only; a part without costs takes no time. `dense_s` stays."""
        parts, free = [kind for kind in PIPELINE if kind in kinds], StageTime(0.0, 0.0)
        chunks = {phase: {kind: of.get(kind, free) for kind in parts} for phase, of in self.chunks.items()}
        return replace(self, chunks=chunks)

    def dense_total_s(self, phase: str) -> float:
        return sum(self.dense_s[phase].values())

    def micro_batch_costs(self) -> MicroBatches:
        """Return `micro`. Raises `ConfigError` if it is None."""
        if self.micro is None:
            raise ConfigError("micro-batches: the layer cannot be split; costs of its dense part in chunks are unknown")
        return self.micro


@dataclass(frozen=True)
class StepCosts:
    """Costs of a training step over a stack of layers (`cost.Costs`).

    Attributes:
        layers: costs of each layer, in order. Equal layers may share one object.
        all_reduce: cost of gradient all-reduces.
        loss_s, optimizer_s: seconds; None for a step without them.
        task_s: executor overhead per task in seconds.
        workload: the `Workload` of one layer; None: unknown.
    """

    layers: tuple[LayerCosts, ...]
    all_reduce: Line = field(default_factory=lambda: Line(0.0, 0.0))
    contention: Contention = NO_CONTENTION
    loss_s: float | None = None
    optimizer_s: float | None = None
    task_s: float = 0.0
    workload: object = None

    @property
    def can_split(self) -> bool:
        return bool(self.layers) and all(layer.micro is not None for layer in self.layers)

    def by_layer(self) -> StepCosts:
        """Return the costs without micro-batches: only the layers' pipelines can be chunked."""
        return replace(self, layers=tuple(map_shared(lambda layer: replace(layer, micro=None), self.layers)))

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return tuple(layer.gradient_bytes for layer in self.layers)

    def seconds(self, plan: Plan) -> dict[Task, float]:
        """Return the duration of each task of a plan. Raises `ConfigError` for parts without costs."""
        # The size of a bucket with `size=None` depends on the whole plan.
        carried = {task: len(bucket) for task, bucket in gradient_ranges(plan, self.gradient_bytes).items()}
        return self.durations(plan.sequence, carried)

    def durations(self, tasks: Collection[Task], carried: Mapping[Task, int] | None = None) -> dict[Task, float]:
        """Return the duration of each task. Chunk counts are those of `tasks`, which must contain whole stages.

        `carried`: bytes of each gradient-all-reduce; None: `Task.size`.
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
            where = (kind, layer, phase)
            if where not in known:
                without = (WEIGHT_GRADIENTS.get(kind), layer, phase) in counts
                known[where] = self._duration_of_task_s(task, counts[where], without)
                there = counts.get((kind, layer, "forward"), counts[where])
                if kind == TaskKind.EXPERT and phase == "backward" and there != counts[where] and layer is not None:
                    known[where] += self.layers[layer].rechunk_s / counts[where]
            result[task] = known[where]
        return result

    def _duration_of_task_s(self, task: Task, count: int, without_weights: bool) -> float:
        kind, chunk, layer, phase, _ = task
        if layer is None:
            wholes_s: dict[str, float | None] = {TaskKind.LOSS: self.loss_s, TaskKind.OPTIMIZER: self.optimizer_s}
            if (whole_s := wholes_s.get(kind)) is not None:
                return whole_s / count
        elif layer < len(self.layers) and phase is not None:
            if chunk is None and kind in self.layers[layer].dense_s[phase] and not without_weights:
                return self.layers[layer].dense_s[phase][kind]
            part = _find_stage_time(self.layers[layer], phase, kind, without_weights)
            if part is not None:
                return part.seconds(count)
        raise ConfigError(f"costs: no time for {task_name(task)} ({task.kind}); the plan does not match these layers")


def _find_stage_time(layer: LayerCosts, phase: str, kind: str, without_weights: bool) -> StageTime | None:
    micro = layer.micro or MicroBatches({phase: {}}, {})
    if kind in PIPELINE:
        part = layer.chunks[phase].get(kind)
    elif kind == TaskKind.PERMUTE and micro.waits:
        part = StageTime(0.0, 0.0)
    elif kind in _SOURCE_KIND_OF_W_TASK:
        part = micro.weights.get(_SOURCE_KIND_OF_W_TASK[kind]) if phase == "backward" else None
    else:
        part = micro.dense[phase].get(kind)
    if part is None or not without_weights:
        return part
    if kind not in micro.weights:
        return None
    return (
        part + micro.weights[kind] * -1.0 + StageTime(0.0, micro.w_task_overhead_s if kind == TaskKind.EXPERT else 0.0)
    )


def gradient_ends(gradient_bytes: Sequence[int]) -> list[int]:
    """Return the end offset of each layer's gradient in the array of all gradients (`task.Task`)."""
    return list(accumulate(reversed(gradient_bytes)))[::-1]


def gradient_ranges(plan: Plan, gradient_bytes: Sequence[int]) -> dict[Task, range]:
    """Return the byte range of each gradient-all-reduce in the plan of a whole step.

    Raises `ConfigError` for a bucket of a complete layer, or that extends into the next layer.
    """
    ends = gradient_ends(gradient_bytes)
    start = 0
    result = {}
    for task in plan.inter:
        if task.kind != TaskKind.GRADIENT_ALL_REDUCE:
            continue
        if task.layer is None or task.layer >= len(ends):
            raise ConfigError(f"plan: {task_name(task)} is in a layer that does not exist; the stack has {len(ends)}")
        end = ends[task.layer]
        stop = end if task.size is None else start + task.size
        if not start < stop <= end:
            raise ConfigError(
                f"plan: {task_name(task)} carries bytes {start} to {stop}, but layer {task.layer}'s gradient ends at "
                f"{end}; change its size or layer"
            )
        result[task] = range(start, stop)
        start = stop
    return result


def pass_bound_s(r: int, times: ChunkTimes, gar: float = 0.0, contention: Contention = NO_CONTENTION) -> float:
    """Return a lower bound of a pass in seconds from each resource's work and the first and last tasks."""
    d, ag, x, rs, c = times
    # During the first dispatch and the last combine, other resources are idle.
    return max(
        d + ag + r * x + rs + c,
        d + contention.lower_bound_s(r * x, r * (ag + rs), (r - 1) * (d + c) + gar) + c,
    )
