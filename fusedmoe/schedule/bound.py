"""The least time that a training step can take, whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterable

from fusedmoe.schedule.step_costs import MAX_DEGREE, ChunkTimes, LayerCosts, StepCosts, chunk_times, work_s
from fusedmoe.schedule.timeline import PHASES


def bound_s(costs: StepCosts, limit: int = MAX_DEGREE) -> float:
    """Seconds that no plan of a step beats, with up to `limit` equal chunks, in any order of the tasks.

    Where layers can be split (`LayerCosts.micro`), no resource takes less than its work in the fewest pieces.
    Otherwise:

    Layers follow each other, so the step takes at least the sum of their passes (`pass_bound_s`) and dense parts. And
    from the end of any layer's backward pass on, the links between nodes have to carry the gradients that are ready
    only now, in one piece at best, and all passes that follow. The largest of these sums, one for each layer.
    """
    if costs.can_split:
        return resource_bound_s(costs)
    layers = costs.layers
    head = sum(_pass_s(layer, "forward", costs, limit) for layer in layers) + (costs.loss_s or 0.0)
    head += sum(_pass_s(layer, "backward", costs, limit) for layer in layers)
    best, after = head, 0.0
    gradient, inter, intra = 0, 0.0, 0.0  # of the layers before, which follow in the backward pass
    for layer in layers:
        if any(kind in layer.dense_s["backward"] for kind in ("gate", "attention")):  # else it waits for nothing
            gradient += layer.gradient_bytes
        reduced = costs.all_reduce.seconds(gradient) if gradient else 0.0
        best = max(best, head - after + links_bound_s(inter + reduced, intra, costs.contention))
        after += _pass_s(layer, "backward", costs, limit)
        work = work_s(layer.chunks["backward"])
        inter, intra = inter + work["inter"], intra + work["intra"]
    return best + (costs.optimizer_s or 0.0)


def resource_bound_s(
    costs: StepCosts, degrees: tuple[int, int] | None = None, pieces: Iterable[int] | None = None
) -> float:
    """Seconds that no order of a step beats: the busiest resource's tasks.

    Args:
        degrees: micro-batches of both passes, which go through all of the layers; None: each part in one piece.
        pieces: bytes of each gradient all-reduce; None: one for all.
    """
    there, back = degrees or (None, None)
    compute, inter, intra = (costs.loss_s or 0.0) + (costs.optimizer_s or 0.0), 0.0, 0.0
    known: dict[tuple[int, str], dict[str, float]] = {}  # layers are often one object many times
    for layer in costs.layers:
        for phase, degree in zip(PHASES, (there, back), strict=True):
            if (id(layer), phase) not in known:
                work = known[id(layer), phase] = work_s(layer.chunks[phase], degree or 1)
                work["compute"] += layer.dense_total_s(phase, degree)
            work = known[id(layer), phase]
            compute, inter, intra = compute + work["compute"], inter + work["inter"], intra + work["intra"]
    reduced = [sum(costs.gradient_bytes)] if pieces is None else pieces
    inter += sum(costs.all_reduce.seconds(size) for size in reduced if size)
    return max(compute, links_bound_s(inter, intra, costs.contention))


def pass_bound_s(r: int, times: ChunkTimes, gar: float = 0.0, contention: float = 1.0) -> float:
    """Seconds that no order beats: what each resource has to do, with what must come before and after it.

    Before the first dispatch has ended and after the last reduce-scatter the links inside the node have nothing to do.
    """
    d, ag, x, rs, c = times
    return max(
        d + ag + r * x + rs + c,
        d + links_bound_s((r - 1) * (d + c) + gar, r * (ag + rs), contention) + c,
    )


def links_bound_s(inter: float, intra: float, contention: float) -> float:
    """The least time for the work of both links. While they work together, each goes on at `contention` of its speed.

    Below a contention of one half they had better take turns.
    """
    less, more = sorted((inter, intra))
    return more + less * min(1.0, (1 - contention) / contention)


def _pass_s(layer: LayerCosts, phase: str, costs: StepCosts, limit: int) -> float:
    chunks = layer.chunks[phase]
    passes = (pass_bound_s(r, chunk_times(chunks, r), contention=costs.contention) for r in range(1, limit + 1))
    return min(passes) + layer.dense_total_s(phase)
