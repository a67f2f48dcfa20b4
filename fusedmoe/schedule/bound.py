"""The least that a training step can take, whatever the order of its tasks, and however it is split.

A resource has to do all tasks of any set of its own, one after the other: it starts when the first of them can, and
after the last one comes what hangs on it. So for every set of tasks

    the shortest way to a start in the set + the work of the set + the shortest way from an end in the set

is a bound, Carlier's for one machine ("The one-machine sequencing problem", 1982). Ways go along one micro-batch. So
the bound knows what waits for what, what each chunk costs to start, how pipelines fill and drain, and that gradients
are reduced only when there are any.

More chunks make ways shorter, and work longer. Each of these sums adds up over the layers' passes, and what a pass adds
hangs on its own chunks alone. A step takes at least the largest of the sums, so it takes at least any mean of them; and
a mean is least where each pass by itself has the chunks that are best for it. The weights of the mean that bound most
are found by a linear programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.schedule.passes import MAX_DEGREE
from fusedmoe.schedule.step_costs import (
    LayerCosts,
    StageTime,
    StepCosts,
    chunk_times,
    links_bound_s,
    pass_bound_s,
    work_s,
)
from fusedmoe.schedule.task import PIPELINE
from fusedmoe.schedule.timeline import PHASES


def bound_s(costs: StepCosts, limit: int = MAX_DEGREE) -> float:
    """Seconds that no plan of a step beats, in any order of its tasks, its gradients in whatever buckets.

    The lesser bound of two families of plans: layers that follow each other, their pipelines in up to `limit` equal
    chunks; and where layers can be split (`LayerCosts.micro`), micro-batches through all of them, in which each layer's
    dense part and its pipeline may have their own number of equal chunks in both passes, up to `limit`, with all weight
    gradients by themselves, or none.
    """
    best = _by_layer_s(costs.by_layer(), limit)
    if costs.can_split:
        best = min(best, *(_split_s(costs, limit, weights) for weights in (False, True)))
    return best


def _waits(layer: LayerCosts) -> bool:
    """Whether a layer's gradient has to wait for anything."""
    return any(kind in layer.dense_s["backward"] for kind in ("gate", "attention"))


class _Pass(NamedTuple):
    """What a layer's pass adds to sums, [limit²] each, for all numbers of chunks of its dense part and its pipeline.

    Seconds of one chunk: of the dense part, of dispatch, of combine, and of all it goes through (`way`). `together`: of
    one chunk of the dense part and all chunks of the pipeline that have anything of it, which all come after it, or
    all before it. Of all chunks: by resource, W tasks included; of the processor without these (`urgent`); and of the
    dense part's W tasks.
    """

    dense: Any
    dispatch: Any
    combine: Any
    way: Any
    together: Any
    compute: Any
    intra: Any
    inter: Any
    urgent: Any
    dense_later: Any


def _pass(layer: LayerCosts, phase: str, limit: int, weights: bool, share: float) -> _Pass:
    """`weights`: weight gradients are W tasks."""
    counts = np.arange(1.0, limit + 1)
    micro, chunks, free = layer.in_micro_batches(), layer.chunks[phase], StageTime(0.0, 0.0)
    later = micro.weights if weights and phase == "backward" else {}
    dense_count, rows_count = np.repeat(counts, limit), np.tile(counts, limit)
    of = {kind: part.alpha_s + part.whole_s / rows_count for kind, part in chunks.items()}
    dispatch, gathered, expert, reduced, combine = (of.get(kind, 0.0 * rows_count) for kind in PIPELINE)
    expert_later = later.get("expert", free) if "expert" in chunks else free
    if later and "expert" in chunks:
        expert = expert + micro.apart_s / rows_count
    urgent = expert - expert_later.alpha_s - expert_later.whole_s / rows_count
    dense_later = later.get("attention", free) if "attention" in micro.dense[phase] else free
    whole = sum(micro.dense[phase].values(), free)
    dense = whole + dense_later * -1.0
    one = dense.alpha_s + dense.whole_s / dense_count
    all_dense = dense_count * one
    of_one = np.ceil(rows_count / dense_count)
    inter, intra = (of_one - 1) * (dispatch + combine), of_one * (gathered + reduced)
    links = np.maximum(inter + share * intra, intra + share * inter)
    through = np.maximum(gathered + of_one * urgent + reduced, links)
    return _Pass(
        one,
        dispatch,
        combine,
        one + dispatch + gathered + urgent + reduced + combine,
        one + dispatch + through + combine,
        dense_count * whole.alpha_s + whole.whole_s + rows_count * expert,
        rows_count * (gathered + reduced),
        rows_count * (dispatch + combine),
        all_dense + rows_count * urgent,
        dense_count * dense_later.alpha_s + dense_later.whole_s,
    )


def _split_s(costs: StepCosts, limit: int, weights: bool) -> float:
    """Of micro-batches through all layers."""
    layers, count = costs.layers, len(costs.layers)
    share = min(1.0, (1 - costs.contention) / costs.contention)  # `links_bound_s`, which of the two is more
    known: dict[tuple[int, str], _Pass] = {}  # layers are often one object many times
    for layer in layers:
        for phase in PHASES if (id(layer), PHASES[0]) not in known else ():
            known[id(layer), phase] = _pass(layer, phase, limit, weights, share)
    there, back = ([known[id(layer), phase] for layer in layers] for phase in PHASES)
    passes = [*there, *reversed(back)]
    way = [one.way for one in passes]
    nothing = np.zeros(limit * limit)
    loss, optimizer = costs.loss_s or 0.0, costs.optimizer_s or 0.0
    # Of the loss what a micro-batch has of it; at the end the first layer's gradient.
    own = costs.gradient_bytes[0] if _waits(layers[0]) else 0
    along, end = loss / limit, (costs.all_reduce.seconds(own) if own else 0.0) + optimizer
    gradients = sum(costs.gradient_bytes)
    reduced = costs.all_reduce.seconds(gradients) if gradients else 0.0
    # A way from the start may take at each layer the last of the chunks that wait for one of the dense part; backward,
    # where this comes after, a way to the end the first of them.
    there_way, back_way = way[:count], [one.together for one in reversed(back)]
    sums: list[list[Any]] = [[*(one.together for one in there), *way[count:]], [*there_way, *back_way]]
    sums.append([one.compute for one in passes])
    fixed = [along + end, along + end, loss + optimizer]
    for first, stop in ((0, 2 * count), (0, count), (count, 2 * count)):
        last = stop - 1

        def with_ways(inside: Sequence[Any], first: int = first, stop: int = stop) -> list[Any]:
            """What is in the set, and the ways to it and from it."""
            return [*way[:first], *inside, *way[stop:]]

        sums.append(with_ways([one.urgent for one in passes[first:stop]]))
        fixed.append((loss if stop - first > count else along) + end)
        for inter, intra in ((1.0, share), (share, 1.0)):
            inside = [inter * one.inter + intra * one.intra for one in passes[first:stop]]
            if first == 0:
                inside[0] = inside[0] + passes[0].dense + (0.0 if inter else passes[0].dispatch)
            if stop > count:
                sums.append(with_ways(inside))  # with all gradients: nothing need follow them
                fixed.append(along + inter * reduced + optimizer)
                inside[-1] = inside[-1] + passes[last].dense
            if not inter:
                inside[-1] = inside[-1] + passes[last].combine
            sums.append(with_ways(inside))
            fixed.append(along + end)
    # From each layer's backward pass on, what is left of the gradients.
    for number in range(count):
        left = sum(costs.gradient_bytes[: number + 1])
        if _waits(layers[number]) and left:
            until, rest_s = 2 * count - number, costs.all_reduce.seconds(left) + optimizer
            before = [one.urgent for one in passes[:until]]
            before[-1] = before[-1] + passes[until - 1].dense_later
            sums.append([*before, *[nothing] * number])
            fixed.append(loss + rest_s)
            sums.append(
                [*there_way, *back_way[: until - count], *(one.inter + share * one.intra for one in passes[until:])]
            )
            fixed.append(along + rest_s)
    return _least_of_largest(np.array(sums), np.array(fixed))


def _least_of_largest(sums: Any, fixed: Any) -> float:
    """At most the largest of fixed[k] + Σ_p sums[k, p, c(p)], however c is chosen.

    Args:
        sums: [sums, passes, choices].   fixed: [sums].
    """
    from scipy.optimize import linprog

    count, passes, choices = sums.shape
    scale = float((fixed + sums.min(2).sum(1)).max()) or 1.0
    # Weights, and of each pass the least of its mean: as large as can be, and no larger than any choice's.
    rows = np.concatenate([-sums.transpose(1, 2, 0).reshape(-1, count), np.repeat(np.eye(passes), choices, 0)], 1)
    found = linprog(
        -np.concatenate([fixed, np.ones(passes)]) / scale,
        rows / scale,
        np.zeros(len(rows)),
        np.concatenate([np.ones(count), np.zeros(passes)])[None],
        [1.0],
        [(0, None)] * (count + passes),
    )
    weights = [*np.eye(count)]  # each sum by itself bounds as well
    if found.x is not None:
        weights.append(np.maximum(found.x[:count], 0.0) / np.maximum(found.x[:count], 0.0).sum())
    return max(float(of @ fixed + np.tensordot(of, sums, 1).min(1).sum()) for of in weights)


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
