"""The least that a training step can take, whatever the order of its tasks, and however it is split.

A resource has to do all tasks of any set of its own, one after the other: it starts when the first of them can, and
after the last one comes what hangs on it. So for every set of tasks

    the shortest way to a start in the set + the work of the set + the shortest way from an end in the set

is a bound, Carlier's for one machine ("The one-machine sequencing problem", 1982). The sets are all tasks of a resource
from one part of a layer on to a part of a later one. Ways go along one micro-batch. So the bound knows what waits for
what, what each chunk costs to start, how pipelines fill and drain, and that gradients are reduced only when there are
any. Nothing of the backward pass starts before the forward pass and the loss have ended: each pass has a bound of its
own, and a step takes at least their sum.

More chunks make ways shorter, and work longer. Each of these sums adds up over the layers, and what a layer adds hangs
on its own chunks alone. A pass takes at least the largest of the sums, so it takes at least any mean of them; and a
mean is least where each layer by itself has the chunks that are best for it. The weights of the mean that bound most
are found by a linear programme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.cost import Contention
from fusedmoe.schedule.step_costs import (
    MAX_DEGREE,
    LayerCosts,
    StageTime,
    StepCosts,
    chunk_times,
    pass_bound_s,
    work_s,
)
from fusedmoe.schedule.task import LINKS, PIPELINE, RESOURCES, TaskKind

# Ranges of blocks that are looked at begin in one of so many layers at one end, and end in one at the other.
_ENDS = 2


def bound_s(costs: StepCosts, limit: int = MAX_DEGREE) -> float:
    """Returns the seconds that no plan of a step beats, in any order of its tasks, its gradients in whatever buckets.

    The lesser bound of two families of plans: layers that follow each other, their pipelines in up to `limit` equal
    chunks; and where layers can be split (`LayerCosts.micro`), micro-batches through all of them, each dense part and
    pipeline in its own number of equal chunks, up to `limit`, with all weight gradients by themselves, or none.
    """
    best = _by_layer_s(costs.by_layer(), limit)
    return min(best, _split_s(costs, limit)) if costs.can_split else best


def _waits(layer: LayerCosts) -> bool:
    """Returns True if a layer's gradient has to wait for anything."""
    return any(kind in layer.dense_s["backward"] for kind in (TaskKind.OTHER, TaskKind.GATE, TaskKind.ATTENTION))


class _Block(NamedTuple):
    """A part of a layer's pass: its dense part, or one of its pipeline."""

    on: str  # its resource
    # Seconds of one chunk and of all, [limit²] each, for all numbers of chunks of the dense part and of the pipeline.
    one: Any
    all: Any


class _Pass(NamedTuple):
    """A layer's pass."""

    blocks: tuple[_Block, ...]  # in the order in which rows go through them, without W tasks
    dense: int  # the place of the dense part
    # Seconds of one chunk of the dense part and all chunks of the pipeline that have anything of it, which all come
    # after it (forward), or all before it.
    together: Any
    dense_later: Any  # seconds of the dense part's W tasks
    later: Any  # and of all W tasks

    def way(self, start: int = 0, stop: int | None = None) -> Any:
        """Returns the seconds of one chunk through some blocks."""
        return sum(block.one for block in self.blocks[start:stop])

    def work(self, weights: Mapping[str, float], start: int = 0, stop: int | None = None) -> Any:
        """Returns the seconds of all chunks of some blocks, by the weights of their resources."""
        return sum(weights.get(block.on, 0.0) * block.all for block in self.blocks[start:stop]) + 0.0 * self.together

    @property
    def beside(self) -> Any:
        """`together` without the dense part's chunk."""
        return self.together - self.blocks[self.dense].one


def _pass(layer: LayerCosts, phase: str, limit: int, weights: bool, contention: Contention) -> _Pass:
    """Returns a layer's pass for all numbers of chunks up to `limit`. `weights`: weight gradients are W tasks."""
    counts = np.arange(1.0, limit + 1)
    micro, chunks, free = layer.in_micro_batches(), layer.chunks[phase], StageTime(0.0, 0.0)
    later = micro.weights if weights and phase == "backward" else {}
    dense_count, rows_count = np.repeat(counts, limit), np.tile(counts, limit)
    chunk_s = {kind: part.seconds(rows_count) for kind, part in chunks.items()}
    expert_later = later.get(TaskKind.EXPERT, free) if TaskKind.EXPERT in chunks else free
    if TaskKind.EXPERT in later and TaskKind.EXPERT in chunks:
        chunk_s[TaskKind.EXPERT] += micro.apart_s / rows_count - expert_later.seconds(rows_count)
    dense_later = later.get(TaskKind.ATTENTION, free) if TaskKind.ATTENTION in micro.dense[phase] else free
    dense = sum(micro.dense[phase].values(), free) + dense_later * -1.0
    dense_s = dense.seconds(dense_count)
    dispatch, gathered, urgent, reduced, combine = (chunk_s.get(kind, 0.0 * rows_count) for kind in PIPELINE)
    of_one = np.ceil(rows_count / dense_count)
    inter, intra = (of_one - 1) * (dispatch + combine), of_one * (gathered + reduced)
    at_least = (c * of_one * urgent + i * intra + x * inter for c, i, x in contention.weights)
    through = reduce(np.maximum, at_least, gathered + of_one * urgent + reduced)
    parts_s = ((kind, chunk_s[kind]) for kind in PIPELINE if kind in chunk_s)
    blocks = [_Block(LINKS.get(kind, "compute"), one_s, rows_count * one_s) for kind, one_s in parts_s]
    place = 0 if phase == "forward" else len(blocks)
    blocks.insert(place, _Block("compute", dense_s, dense_count * dense_s))
    dense_later_s = dense_count * dense_later.seconds(dense_count)
    later_s = dense_later_s + rows_count * expert_later.seconds(rows_count)
    return _Pass(tuple(blocks), place, dense_s + dispatch + through + combine, dense_later_s, later_s)


#: Of a sum what each pass adds to it, and seconds beside.
_Sum = tuple[list[Any], float]

_Place = tuple[int, int]  # a pass, and a block of it


def _range(passes: Sequence[_Pass], weights: Mapping[str, float], first: _Place, last: _Place) -> list[Any]:
    """Returns the work of all blocks from one to another, by the weights of their resources, and the ways to and from
    it."""
    (p, b), (q, e) = first, last
    # Chunks of a dense part run in order. So what ends with one forward ends with its last chunk, and all chunks of the
    # pipeline that have anything of this one follow; and what begins with one backward begins with its first.
    forward = passes[0].dense == 0
    after_all, before_all = forward and e == 0, not forward and b == passes[p].dense
    sums = []
    for number, layer in enumerate(passes):
        if number < p:
            seconds = layer.together if before_all else layer.way()
        elif number > q:
            seconds = layer.together if after_all else layer.way()
        else:
            seconds = layer.work(weights, b if number == p else 0, e + 1 if number == q else None)
            if number == p:
                seconds = seconds + (layer.beside if before_all else layer.way(0, b))
            if number == q:
                seconds = seconds + (layer.beside if after_all else layer.way(e + 1))
        sums.append(seconds)
    return sums


def _ranges(passes: Sequence[_Pass], machines: Sequence[Mapping[str, float]], beside_s: float) -> Iterator[_Sum]:
    """Yields the sums of a pass of all layers, each from a block of the first layers to one of the last."""
    count, dense = len(passes), passes[0].dense
    for weights in machines:
        on = [(p, b) for p, one in enumerate(passes) for b, block in enumerate(one.blocks) if weights.get(block.on)]
        for first, last in product(on, on):
            if first <= last and first[0] < _ENDS and last[0] >= count - _ENDS:
                yield _range(passes, weights, first, last), beside_s
    # From the dense part at one end on no more than one way, in case it is not among those.
    end = (0, 0) if dense == 0 else (count - 1, dense)
    yield _range(passes, machines[0], end, end), beside_s


def _split_s(costs: StepCosts, limit: int) -> float:
    """Returns the bound of micro-batches through all layers."""
    compute = {"compute": 1.0}
    machines = [dict(zip(RESOURCES, weights, strict=True)) for weights in costs.contention.weights]
    machines = [compute, *(weights for weights in machines if weights["intra"] or weights["inter"])]

    def passes(phase: str, weights: bool) -> list[_Pass]:
        layers = {id(layer): layer for layer in costs.layers}  # often one object many times
        known = {key: _pass(layer, phase, limit, weights, costs.contention) for key, layer in layers.items()}
        return [known[id(layer)] for layer in costs.layers]

    forward_s = _least_of_largest(_ranges(passes("forward", False), machines, 0.0))
    backward_s = math.inf
    for weights in (False, True):
        back = passes("backward", weights)[::-1]
        sums = list(_ranges(back, machines, _own_gradient_s(costs)))
        head, nothing = back[0].way(0, [block.on for block in back[0].blocks].index("compute")), 0.0 * back[0].together
        all_s = [layer.work(compute) + layer.later for layer in back]
        sums.append(([head + all_s[0], *all_s[1:]], 0.0))  # nothing need follow W tasks
        for done in range(len(back) + 1):
            # After so many passes, what is left of the gradients, and the passes that follow.
            layer = min(len(back) - done, len(back) - 1)
            left = sum(costs.gradient_bytes[: layer + 1])
            if left and (done == 0 or _waits(costs.layers[layer])):
                rest_s, before = costs.all_reduce.seconds(left), [layer.together for layer in back[:done]]
                for of in machines[1:]:
                    sums.append(([*before, *(layer.work(of) for layer in back[done:])], of["inter"] * rest_s))
                if done:
                    urgent = [layer.work(compute) for layer in back[:done]]
                    urgent[0], urgent[-1] = urgent[0] + head, urgent[-1] + back[done - 1].dense_later
                    sums.append(([*urgent, *[nothing] * (len(back) - done)], rest_s))
        backward_s = min(backward_s, _least_of_largest(sums))
    return forward_s + (costs.loss_s or 0.0) + backward_s + (costs.optimizer_s or 0.0)


def _own_gradient_s(costs: StepCosts) -> float:
    """Returns the seconds of the first layer's gradient, which nothing hides."""
    size = costs.gradient_bytes[0] if _waits(costs.layers[0]) else 0
    return costs.all_reduce.seconds(size) if size else 0.0


def _least_of_largest(sums: Iterable[_Sum]) -> float:
    """Returns a number that is at most the largest of fixed[k] + Σ_p sums[k, p, c(p)], however c is chosen."""
    from scipy.optimize import linprog

    found = list(sums)
    # Seconds that a sum has beside the passes, whatever their chunks.
    fixed = np.array([beside_s for _, beside_s in found])
    # [sums, choices] of each pass, without what is no better than another choice in any sum.
    by_pass = zip(*(sums for sums, _ in found), strict=True)
    passes = [_undominated(np.stack(layer_sums, 0)) for layer_sums in by_pass]
    count = len(fixed)
    scale = float((fixed + sum(layer_sums.min(1) for layer_sums in passes)).max()) or 1.0
    # Weights, and of each pass the least of its mean: as large as can be, and no larger than any choice's.
    which = np.repeat(np.eye(len(passes)), [layer_sums.shape[1] for layer_sums in passes], axis=0)
    matrix = np.concatenate([-np.concatenate(passes, 1).T, which], 1)
    solved = linprog(
        -np.concatenate([fixed, np.ones(len(passes))]) / scale,
        matrix / scale,
        np.zeros(len(matrix)),
        np.concatenate([np.ones(count), np.zeros(len(passes))])[None],
        [1.0],
        [(0, None)] * (count + len(passes)),
    )
    # The programme may fail or round; any weights give a bound, so the best of all is taken.
    weights = [*np.eye(count)]  # each sum by itself bounds as well
    if solved.x is not None:
        weights.append(np.maximum(solved.x[:count], 0.0) / np.maximum(solved.x[:count], 0.0).sum())
    return max(float(mean @ fixed + sum((mean @ sums).min() for sums in passes)) for mean in weights)


def _undominated(sums: Any) -> Any:
    """Returns the choices [sums, choices] that no other choice equals or beats in all sums."""
    left, kept = sums[:, np.argsort(sums.sum(0), kind="stable")], []
    while left.size:
        kept.append(left[:, 0])
        left = left[:, ~(left >= left[:, :1]).all(0)]
    return np.stack(kept, 1)


def _by_layer_s(costs: StepCosts, limit: int) -> float:
    """Returns the bound of layers that follow each other: at least the sum of their passes and dense parts."""
    layers = costs.layers
    head = sum(_layer_pass_s(costs, layer, "forward", limit) for layer in layers) + (costs.loss_s or 0.0)
    head += sum(_layer_pass_s(costs, layer, "backward", limit) for layer in layers)
    # From the end of any layer's backward pass on, links have to carry the gradients that are ready only then, in one
    # piece at best, and all passes that follow.
    best, after = head, 0.0
    gradient, compute, inter, intra = 0, 0.0, 0.0, 0.0  # of the layers before, which follow in the backward pass
    for layer in layers:
        if _waits(layer):
            gradient += layer.gradient_bytes
        reduced = costs.all_reduce.seconds(gradient) if gradient else 0.0
        best = max(best, head - after + costs.contention.least_s(compute, intra, inter + reduced))
        after += _layer_pass_s(costs, layer, "backward", limit)
        work = work_s(layer.chunks["backward"])
        inter, intra = inter + work["inter"], intra + work["intra"]
        compute += work["compute"] + layer.dense_total_s("backward")
    return best + (costs.optimizer_s or 0.0)


def _layer_pass_s(costs: StepCosts, layer: LayerCosts, phase: str, limit: int) -> float:
    times = ((r, chunk_times(layer.chunks[phase], r)) for r in range(1, limit + 1))
    return min(pass_bound_s(r, chunk, contention=costs.contention) for r, chunk in times) + layer.dense_total_s(phase)
