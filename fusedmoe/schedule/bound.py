"""The least that a training step can take, whatever the order of its tasks.

A resource has to do all tasks of any set of its own, one after the other: it starts when the first of them can, and
after the last one comes what hangs on it. So for every set of tasks

    the earliest start in the set + the work of the set + the shortest time from an end in the set to the step's end

is a bound, Carlier's for one machine ("The one-machine sequencing problem", 1982). Starts and ends are bounded the same
way: what comes before a task, or after it, is a set on each of the resources. So the bound knows what waits for what,
what each chunk costs to start, how pipelines fill and drain, and that gradients are reduced only when there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from fusedmoe.schedule.events import followers_of, issue_order
from fusedmoe.schedule.lancet import LONGEST, PARTS, best_ranges
from fusedmoe.schedule.passes import MAX_DEGREE
from fusedmoe.schedule.step import StepSplit
from fusedmoe.schedule.step_costs import (
    LayerCosts,
    StepCosts,
    chunk_times,
    links_bound_s,
    pass_bound_s,
    resource_bound_s,
    work_s,
)
from fusedmoe.schedule.task import Task, resources_of, standard_dependencies
from fusedmoe.schedule.timeline import PHASES, RESOURCES

_GRADIENT = "gradient-all-reduce"
# With more tasks what comes before and after each is the longest way alone: what is known of pairs takes their square.
_MOST_TASKS = 600
_NEVER = -np.inf
_BOTH = (False, True)


def bound_s(costs: StepCosts, limit: int = MAX_DEGREE) -> float:
    """Seconds that no plan of a step beats, with up to `limit` equal chunks, in any order of the tasks.

    The least of what bounds three families of plans: layers that follow each other, their pipelines in any chunks; and
    where layers can be split (`LayerCosts.micro`), equally many micro-batches through all layers of a pass, and
    Lancet's ranges of layers forward before a backward pass in one piece.
    """
    best = _by_layer_s(costs.by_layer(), limit)
    if not costs.can_split:
        return best
    degrees = range(1, limit + 1)
    # Passes in other numbers of micro-batches follow each other.
    backward = {degree: min(_pass_s(costs, "backward", degree, weights) for weights in _BOTH) for degree in degrees}
    best = min(best, _ranges_s(costs, limit) + backward[1])
    best = min(best, min(_pass_s(costs, "forward", degree) for degree in degrees) + min(backward.values()))
    for split in [StepSplit(degree, degree) for degree in degrees]:
        if _work_s(costs, split) < best:
            best = min(best, *(split_bound_s(costs, split._replace(weights=weights)) for weights in _BOTH))
    return best


def split_bound_s(costs: StepCosts, split: StepSplit) -> float:
    """Seconds that no order of a step that is split so beats, in whatever buckets gradients go."""
    return max(_work_s(costs, split), _tasks_s(costs, split._replace(bucket_bytes=None).tasks(costs)))


def _pass_s(costs: StepCosts, phase: str, degree: int, weights: bool = False) -> float:
    """Of one pass, the forward one with the loss, the backward one with the optimizer."""
    also = {"forward": "loss", "backward": "optimizer"}[phase]
    tasks = StepSplit(degree, degree, None, weights).tasks(costs)
    return _tasks_s(costs, [task for task in tasks if phase == task.phase or task.kind == also])


def _ranges_s(costs: StepCosts, limit: int) -> float:
    """Of a forward pass in ranges of layers that follow each other, each in its own number of micro-batches."""
    layers, alone = costs.layers, replace(costs, loss_s=None)

    @cache
    def seconds_of(which: tuple[int, ...], degree: int) -> float:
        return _pass_s(replace(alone, layers=tuple(by_id[one] for one in which)), "forward", degree)

    by_id = {id(layer): layer for layer in layers}  # layers are often one object many times
    parts = [k for k in PARTS if k <= limit]
    found = best_ranges(
        len(layers), lambda start, stop, k: seconds_of(tuple(map(id, layers[start:stop])), k), parts, LONGEST
    )
    return found[1] + (costs.loss_s or 0.0)


def _work_s(costs: StepCosts, split: StepSplit) -> float:
    """Of a split step, in no time to speak of: each resource's work, and of the gradients what is left of it when the
    processor has come to their layer."""
    there, back = split[:2]
    before, total, known = costs.loss_s or 0.0, 0.0, {}
    for layer in costs.layers:
        if id(layer) not in known:  # layers are often one object many times
            micro = layer.in_micro_batches()
            dense_s = [layer.dense_total_s(*of) for of in (("forward", there), ("backward", back))]
            experts_s = [
                degree * layer.chunks[phase]["expert"].seconds(degree) if "expert" in layer.chunks[phase] else 0.0
                for phase, degree in zip(PHASES, (there, back), strict=True)
            ]
            apart_s = sum(back * part.seconds(back) for part in micro.weights.values())
            known[id(layer)] = dense_s[0] + experts_s[0], dense_s[1] + experts_s[1] - apart_s
        before += known[id(layer)][0]
    left = sum(layer.gradient_bytes for layer in costs.layers if _waits(layer))
    for layer in reversed(costs.layers):
        before += known[id(layer)][1]
        if _waits(layer) and left:
            total = max(total, before + costs.all_reduce.seconds(left))
            left -= layer.gradient_bytes
    return max(resource_bound_s(costs, (there, back)), total + (costs.optimizer_s or 0.0))


def _waits(layer: LayerCosts) -> bool:
    """Whether a layer's gradient has to wait for anything."""
    return any(kind in layer.dense_s["backward"] for kind in ("gate", "attention"))


def _tasks_s(costs: StepCosts, tasks: Sequence[Task]) -> float:
    """Seconds that no order of these tasks beats. Each layer's gradient is one of them, which may be cut anywhere."""
    found = costs.durations(tasks)
    seconds = np.array([found[task] for task in tasks])
    gradients = [place for place, task in enumerate(tasks) if task.kind == _GRADIENT]
    # One bucket at least has to start, and one with the last bytes not before these are there.
    seconds[gradients[:-1]] -= costs.all_reduce.alpha_s
    number = {task: place for place, task in enumerate(tasks)}
    waits = standard_dependencies(tasks)
    before = [[number[one] for one in waits[task]] for task in tasks]
    followers = followers_of(before)
    order = issue_order(before, followers)
    on = np.array([RESOURCES.index(resources_of(task.kind)[0]) for task in tasks])
    work = np.where(np.arange(len(RESOURCES))[:, None] == on, seconds, 0.0)

    # At least so long from the end of one task to the start of another.
    pairs = len(tasks) <= _MOST_TASKS
    between = np.full((len(tasks), len(tasks)) if pairs else 0, _NEVER)
    for place in order if pairs else ():
        for one in before[place]:
            way = between[:, one] + seconds[one]
            way[one] = 0.0
            np.maximum(between[:, place], way, out=between[:, place])
    start, rest = np.zeros(len(tasks)), np.zeros(len(tasks))
    last = max((task.chunk or 0 for task in tasks), default=0)
    for place in order:
        start[place] = max((start[one] + seconds[one] for one in before[place]), default=0.0)
        if pairs and (tasks[place].chunk == last or tasks[place].kind == _GRADIENT):  # most comes before these
            of = np.flatnonzero(between[:, place] > _NEVER)
            start[place] = max(start[place], _set_s(start[of], work[:, of], between[of, place], costs.contention))
    for place in reversed(order):
        rest[place] = max((rest[one] + seconds[one] for one in followers[place]), default=0.0)
        if pairs and tasks[place].chunk == 0:  # most comes after these
            of = np.flatnonzero(between[place] > _NEVER)
            rest[place] = max(rest[place], _set_s(between[place, of], work[:, of], rest[of], costs.contention))
    return _set_s(start, work, rest, costs.contention)


def _set_s(start: Any, work: Any, rest: Any, contention: float) -> float:
    """Carlier's bound for tasks [n] with work [resources, n]: of sets of them, by the processor and by the links.

    The sets are all tasks that start no earlier than one, and all that have no less behind them than one.
    """
    best = 0.0
    for of in (work[0] > 0, work[0] == 0):
        for first, second in ((start[of], rest[of]), (rest[of], start[of])):
            down = np.argsort(-first)
            if len(down):
                compute, intra, inter = work[:, of][:, down].cumsum(1)
                share = min(1.0, (1 - contention) / contention)
                links = np.maximum(intra, inter) + share * np.minimum(intra, inter)
                found = first[down] + np.maximum(compute, links) + np.minimum.accumulate(second[down])
                best = max(best, float(found.max()))
    return best


def _by_layer_s(costs: StepCosts, limit: int) -> float:
    """Of layers that follow each other: the step takes at least the sum of their passes (`pass_bound_s`) and dense
    parts. And from the end of any layer's backward pass on, the links between nodes have to carry the gradients that
    are ready only now, in one piece at best, and all passes that follow. The largest of these sums, one for each layer.
    """
    layers = costs.layers
    head = sum(_layer_pass_s(costs, layer, "forward", limit) for layer in layers) + (costs.loss_s or 0.0)
    head += sum(_layer_pass_s(costs, layer, "backward", limit) for layer in layers)
    best, after = head, 0.0
    gradient, inter, intra = 0, 0.0, 0.0  # of the layers before, which follow in the backward pass
    for layer in layers:
        if _waits(layer):
            gradient += layer.gradient_bytes
        reduced = costs.all_reduce.seconds(gradient) if gradient else 0.0
        best = max(best, head - after + links_bound_s(inter + reduced, intra, costs.contention))
        after += _layer_pass_s(costs, layer, "backward", limit)
        work = work_s(layer.chunks["backward"])
        inter, intra = inter + work["inter"], intra + work["intra"]
    return best + (costs.optimizer_s or 0.0)


def _layer_pass_s(costs: StepCosts, layer: LayerCosts, phase: str, limit: int) -> float:
    chunks = layer.chunks[phase]
    passes = (pass_bound_s(r, chunk_times(chunks, r), contention=costs.contention) for r in range(1, limit + 1))
    return min(passes) + layer.dense_total_s(phase)
