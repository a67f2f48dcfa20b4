"""The least time that a training step can take, whatever the schedule."""

from __future__ import annotations

from fusedmoe.schedule.chunks import work_s
from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.passes import chunk_times, links_bound_s, pass_bound_s
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.timeline import PHASES


def bound_s(costs: StackCosts, limit: int = MAX_DEGREE) -> float:
    """Seconds that no plan of a step beats, with up to `limit` equal chunks, in any order of the tasks.

    Where layers can be split (`LayerCosts.micro`), no resource takes less than its work in the fewest pieces.
    Otherwise:

    Layers follow each other, so the step takes at least the sum of their passes (`pass_bound_s`) and dense parts. And
    from the end of any layer's backward pass on, the links between nodes have to carry the gradients that are ready
    only now, in one piece at best, and all passes that follow. The largest of these sums, one for each layer.
    """
    if costs.can_split:
        return _resource_bound_s(costs)
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


def _resource_bound_s(costs: StackCosts) -> float:
    compute, inter, intra = (costs.loss_s or 0.0) + (costs.optimizer_s or 0.0), 0.0, 0.0
    for layer in costs.layers:
        for phase in PHASES:
            work = work_s(layer.chunks[phase])
            compute += work["compute"] + layer.dense_total_s(phase)
            inter, intra = inter + work["inter"], intra + work["intra"]
    total = sum(costs.gradient_bytes)
    inter += costs.all_reduce.seconds(total) if total else 0.0
    return max(compute, links_bound_s(inter, intra, costs.contention))


def _pass_s(layer: LayerCosts, phase: str, costs: StackCosts, limit: int) -> float:
    chunks = layer.chunks[phase]
    passes = (pass_bound_s(r, chunk_times(chunks, r), contention=costs.contention) for r in range(1, limit + 1))
    return min(passes) + layer.dense_total_s(phase)
