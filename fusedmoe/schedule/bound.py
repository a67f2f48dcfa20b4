"""Lower bound of the time of a training step over all task orders and numbers of chunks.

A resource runs one task at a time. For every set of tasks of one resource,

    the shortest path to a start in the set + the work of the set + the shortest path from an end in the set

is a lower bound (Carlier, "The one-machine sequencing problem", 1982). The sets used here are all tasks of a resource
between a part of one layer and a part of a later layer; paths follow one micro-batch. The bounds of both passes add up.

More chunks shorten paths and increase work. A pass takes at least any weighted mean of the sums. A layer's term of a
sum depends only on its own chunk counts, so the minimum of a mean is found layer by layer; a linear program finds the
best weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.cost import Contention
from fusedmoe.schedule.simulate import ROUNDING
from fusedmoe.schedule.step_costs import (
    MAX_DEGREE,
    LayerCosts,
    StageTime,
    StepCosts,
    chunk_times,
    map_shared,
    pass_bound_s,
    resource_work_s,
)
from fusedmoe.schedule.task import LINKS, PIPELINE, RESOURCES, TaskKind

# Ranges of blocks start in the first `_NUM_END_LAYERS` layers and stop in the last `_NUM_END_LAYERS` layers.
_NUM_END_LAYERS = 2
# Maximum number of layers at which the remaining gradients bound the backward pass. Layers between two of them share a
# variable of the linear program.
_MAX_CUT_LAYERS = 8
_MAX_LP_ROUNDS = 20


def bound_s(costs: StepCosts, max_degree: int = MAX_DEGREE) -> float:
    """Return a lower bound of the step time in seconds over orders, gradient buckets and up to `max_degree` chunks.

    Layers run in sequence with chunked pipelines, or, if `costs.can_split`, micro-batches pass through all layers.
    Chunks have equal sizes; each dense part and each pipeline has its own number. All weight gradients are W tasks, or
    none is.
    """
    best = _layerwise_bound_s(costs.by_layer(), max_degree)
    return min(best, _micro_batch_bound_s(costs, max_degree)) if costs.can_split else best


def _has_gradient_dependencies(layer: LayerCosts) -> bool:
    return any(kind in layer.dense_s["backward"] for kind in (TaskKind.OTHER, TaskKind.GATE, TaskKind.ATTENTION))


class _BlockTimes(NamedTuple):
    """The dense part of a layer's pass, or one part of its pipeline."""

    resource: str
    # Seconds of one chunk and of all chunks, each [max_degree²]: every pair of chunk counts of dense part and pipeline.
    chunk_s: Any
    total_s: Any


class _PassTimes(NamedTuple):
    blocks: tuple[_BlockTimes, ...]  # in execution order, without W tasks
    dense_index: int
    overlap_path_s: Any  # one dense chunk and the pipeline chunks that share rows with it
    dense_w_tasks_s: Any
    w_tasks_s: Any

    def path_s(self, start: int = 0, stop: int | None = None) -> Any:
        return sum(block.chunk_s for block in self.blocks[start:stop])

    def work_s(self, weights: Mapping[str, float], start: int = 0, stop: int | None = None) -> Any:
        return (
            sum(weights.get(block.resource, 0.0) * block.total_s for block in self.blocks[start:stop])
            + 0.0 * self.overlap_path_s
        )

    @property
    def overlap_pipeline_s(self) -> Any:
        return self.overlap_path_s - self.blocks[self.dense_index].chunk_s


def _make_pass_times(
    layer: LayerCosts, phase: str, max_degree: int, has_w_tasks: bool, contention: Contention
) -> _PassTimes:
    counts = np.arange(1.0, max_degree + 1)
    micro, chunks, free = layer.micro_batch_costs(), layer.chunks[phase], StageTime(0.0, 0.0)
    later = micro.weights if has_w_tasks and phase == "backward" else {}
    dense_count, rows_count = np.repeat(counts, max_degree), np.tile(counts, max_degree)
    chunk_s = {kind: part.seconds(rows_count) for kind, part in chunks.items()}
    expert_later = later.get(TaskKind.EXPERT, free) if TaskKind.EXPERT in chunks else free
    if TaskKind.EXPERT in later and TaskKind.EXPERT in chunks:
        chunk_s[TaskKind.EXPERT] += micro.w_task_overhead_s / rows_count - expert_later.seconds(rows_count)
    dense_later = later.get(TaskKind.ATTENTION, free) if TaskKind.ATTENTION in micro.dense[phase] else free
    dense = sum(micro.dense[phase].values(), free) + dense_later * -1.0
    dense_s = dense.seconds(dense_count)
    dispatch, gathered, urgent, reduced, combine = (chunk_s.get(kind, 0.0 * rows_count) for kind in PIPELINE)
    of_one = np.ceil(rows_count / dense_count)
    inter, intra = (of_one - 1) * (dispatch + combine), of_one * (gathered + reduced)
    at_least = (c * of_one * urgent + i * intra + x * inter for c, i, x in contention.lower_bound_weights)
    through = reduce(np.maximum, at_least, gathered + of_one * urgent + reduced)
    parts_s = ((kind, chunk_s[kind]) for kind in PIPELINE if kind in chunk_s)
    blocks = [_BlockTimes(LINKS.get(kind, "compute"), one_s, rows_count * one_s) for kind, one_s in parts_s]
    place = 0 if phase == "forward" else len(blocks)
    blocks.insert(place, _BlockTimes("compute", dense_s, dense_count * dense_s))
    dense_later_s = dense_count * dense_later.seconds(dense_count)
    later_s = dense_later_s + rows_count * expert_later.seconds(rows_count)
    return _PassTimes(tuple(blocks), place, dense_s + dispatch + through + combine, dense_later_s, later_s)


#: Seconds per layer of a pass, and a constant in seconds.
_LayerSums = tuple[list[Any], float]

_BlockIndex = tuple[int, int]  # indices of a pass and of its block


def _work_and_path_sums(
    passes: Sequence[_PassTimes], weights: Mapping[str, float], first: _BlockIndex, last: _BlockIndex
) -> list[Any]:
    """Return, per layer, the weighted work of blocks `first` to `last` plus the paths to and from them."""
    (p, b), (q, e) = first, last
    # Dense chunks run in order. Forward, a range that ends with a dense part precedes all pipeline chunks that share
    # rows with its last chunk. Backward, a range that starts with a dense part follows those of its first chunk.
    forward = passes[0].dense_index == 0
    after_all, before_all = forward and e == 0, not forward and b == passes[p].dense_index
    before = map_shared(lambda layer: layer.overlap_path_s if before_all else layer.path_s(), passes[:p])
    after = map_shared(lambda layer: layer.overlap_path_s if after_all else layer.path_s(), passes[q + 1 :])
    # Shared sums keep the linear program small.
    sums = [*before, *map_shared(lambda layer: layer.work_s(weights), passes[p : q + 1]), *after]
    for number in {p, q}:
        layer = passes[number]
        seconds = layer.work_s(weights, b if number == p else 0, e + 1 if number == q else None)
        if number == p:
            seconds = seconds + (layer.overlap_pipeline_s if before_all else layer.path_s(0, b))
        if number == q:
            seconds = seconds + (layer.overlap_pipeline_s if after_all else layer.path_s(e + 1))
        sums[number] = seconds
    return sums


def _all_work_and_path_sums(
    passes: Sequence[_PassTimes], weightings: Sequence[Mapping[str, float]], constant_s: float
) -> Iterator[_LayerSums]:
    count, dense = len(passes), passes[0].dense_index
    for weights in weightings:
        on = [
            (p, b) for p, one in enumerate(passes) for b, block in enumerate(one.blocks) if weights.get(block.resource)
        ]
        for first, last in product(on, on):
            if first <= last and first[0] < _NUM_END_LAYERS and last[0] >= count - _NUM_END_LAYERS:
                yield _work_and_path_sums(passes, weights, first, last), constant_s
    # No range may include the dense part at one end.
    end = (0, 0) if dense == 0 else (count - 1, dense)
    yield _work_and_path_sums(passes, weightings[0], end, end), constant_s


def _micro_batch_bound_s(costs: StepCosts, max_degree: int) -> float:
    compute = {"compute": 1.0}
    weightings = [dict(zip(RESOURCES, weights, strict=True)) for weights in costs.contention.lower_bound_weights]
    weightings = [compute, *(weights for weights in weightings if weights["intra"] or weights["inter"])]

    def passes(phase: str, has_w_tasks: bool) -> list[_PassTimes]:
        return map_shared(
            lambda layer: _make_pass_times(layer, phase, max_degree, has_w_tasks, costs.contention), costs.layers
        )

    forward_s = _min_max_bound_s(_all_work_and_path_sums(passes("forward", False), weightings, 0.0))
    # Nothing can overlap the all-reduce of the first layer's gradient.
    size = costs.gradient_bytes[0] if _has_gradient_dependencies(costs.layers[0]) else 0
    first_s = costs.all_reduce.seconds(size) if size else 0.0
    backward_s = math.inf
    for has_w_tasks in (False, True):
        back = passes("backward", has_w_tasks)[::-1]
        sums = list(_all_work_and_path_sums(back, weightings, first_s))
        head = back[0].path_s(0, [block.resource for block in back[0].blocks].index("compute"))
        nothing = 0.0 * back[0].overlap_path_s
        all_s = map_shared(lambda layer: layer.work_s(compute) + layer.w_tasks_s, back)
        sums.append(([head + all_s[0], *all_s[1:]], 0.0))  # no task depends on W tasks
        for done in sorted({round(cut) for cut in np.linspace(0, len(back), min(len(back), _MAX_CUT_LAYERS) + 1)}):
            layer = min(len(back) - done, len(back) - 1)
            left = sum(costs.gradient_bytes[: layer + 1])
            if left and (done == 0 or _has_gradient_dependencies(costs.layers[layer])):
                rest_s, before = costs.all_reduce.seconds(left), [layer.overlap_path_s for layer in back[:done]]
                for weighting in weightings[1:]:
                    work = map_shared(lambda layer, by=weighting: layer.work_s(by), back[done:])  # type: ignore[misc]
                    sums.append(([*before, *work], weighting["inter"] * rest_s))
                if done:
                    urgent = map_shared(lambda layer: layer.work_s(compute), back[:done])
                    urgent[0], urgent[-1] = urgent[0] + head, urgent[-1] + back[done - 1].dense_w_tasks_s
                    sums.append(([*urgent, *[nothing] * (len(back) - done)], rest_s))
        backward_s = min(backward_s, _min_max_bound_s(sums))
    return forward_s + (costs.loss_s or 0.0) + backward_s + (costs.optimizer_s or 0.0)


def _min_max_bound_s(sums: Iterable[_LayerSums]) -> float:
    """Return a lower bound of max over k of fixed[k] + Σ_p sums[k, p, c(p)] for every choice c of chunk counts."""
    from scipy.optimize import linprog

    found = list(sums)
    fixed = np.array([constant_s for _, constant_s in found])
    # [sums, choices] of each kind of pass.
    by_pass = {tuple(map(id, layer_sums)): layer_sums for layer_sums in zip(*(sums for sums, _ in found), strict=True)}
    numbers = Counter(tuple(map(id, layer_sums)) for layer_sums in zip(*(sums for sums, _ in found), strict=True))
    passes = [_remove_dominated_columns(np.stack(layer_sums, 0)) for layer_sums in by_pass.values()]
    times = np.array([numbers[key] for key in by_pass], dtype=float)
    count = len(fixed)
    sums_s = sum(n * layer_sums.min(1) for n, layer_sums in zip(times, passes, strict=True))
    scale = float((fixed + sums_s).max()) or 1.0
    # Column generation: start with the choices that minimise a single sum, then add those that minimise the weighted
    # mean. Any weights give a valid bound, also if the solver fails or rounds.
    chosen = [{*map(int, layer_sums.argmin(1))} for layer_sums in passes]
    best = float((fixed + sums_s).max())
    for _ in range(_MAX_LP_ROUNDS):
        some = [layer_sums[:, sorted(places)] for layer_sums, places in zip(passes, chosen, strict=True)]
        # Variables: the weights, and for each kind of pass the minimum of its weighted mean over its choices.
        which = np.repeat(np.eye(len(passes)), [layer_sums.shape[1] for layer_sums in some], axis=0)
        matrix = np.concatenate([-np.concatenate(some, 1).T, which], 1)
        solved = linprog(
            -np.concatenate([fixed, times]) / scale,
            matrix / scale,
            np.zeros(len(matrix)),
            np.concatenate([np.ones(count), np.zeros(len(passes))])[None],
            [1.0],
            [(0, None)] * (count + len(passes)),
        )
        if solved.x is None:
            break
        mean = np.maximum(solved.x[:count], 0.0) / np.maximum(solved.x[:count], 0.0).sum()
        means = [mean @ layer_sums for layer_sums in passes]
        best = max(best, float(mean @ fixed + times @ [of_choices.min() for of_choices in means]))
        if best >= -solved.fun * scale * (1 - ROUNDING):
            break
        for places, of_choices in zip(chosen, means, strict=True):
            places.add(int(of_choices.argmin()))
    return best


def _remove_dominated_columns(sums: Any) -> Any:
    """Return the columns of `sums` [sums, choices] that no other column equals or beats in all rows."""
    left, kept = sums[:, np.argsort(sums.sum(0), kind="stable")], []
    while left.size:
        kept.append(left[:, 0])
        left = left[:, ~(left >= left[:, :1]).all(0)]
    return np.stack(kept, 1)


def _layerwise_bound_s(costs: StepCosts, max_degree: int) -> float:
    layers = costs.layers
    head = sum(_layer_pass_bound_s(costs, layer, "forward", max_degree) for layer in layers) + (costs.loss_s or 0.0)
    head += sum(_layer_pass_bound_s(costs, layer, "backward", max_degree) for layer in layers)
    # After a layer's backward pass, the link reduces its gradients (fastest in one piece) while later passes run.
    best, after = head, 0.0
    gradient, compute, inter, intra = 0, 0.0, 0.0, 0.0  # of earlier layers
    for layer in layers:
        if _has_gradient_dependencies(layer):
            gradient += layer.gradient_bytes
        reduced = costs.all_reduce.seconds(gradient) if gradient else 0.0
        best = max(best, head - after + costs.contention.lower_bound_s(compute, intra, inter + reduced))
        after += _layer_pass_bound_s(costs, layer, "backward", max_degree)
        work = resource_work_s(layer.chunks["backward"])
        inter, intra = inter + work["inter"], intra + work["intra"]
        compute += work["compute"] + layer.dense_total_s("backward")
    return best + (costs.optimizer_s or 0.0)


def _layer_pass_bound_s(costs: StepCosts, layer: LayerCosts, phase: str, max_degree: int) -> float:
    times = ((r, chunk_times(layer.chunks[phase], r)) for r in range(1, max_degree + 1))
    return min(pass_bound_s(r, chunk, contention=costs.contention) for r, chunk in times) + layer.dense_total_s(phase)
