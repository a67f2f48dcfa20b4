"""Random plans and costs for tests."""

from __future__ import annotations

import random

from fusedmoe.schedule.cost import NO_CONTENTION, Contention, Line
from fusedmoe.schedule.passes import GradientPartition, alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts

ORDERS = (three_queues, alternating, one_queue)

DENSE = {
    "forward": ("attention", "gate", "permute", "unpermute"),
    "backward": ("permute", "unpermute", "gate", "attention"),
}


def random_layer(rng: random.Random) -> LayerCosts:
    """Draw a mix of short and long parts; at times without an expert or sharding group, or without a gradient."""
    kinds = ["expert"]
    if rng.random() < 0.8:
        kinds += ["dispatch", "combine"]
    if rng.random() < 0.8:
        kinds += ["all-gather", "reduce-scatter"]

    def chunks() -> dict[str, StageTime]:
        return {kind: StageTime(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-4, -1.5)) for kind in kinds}

    dense = {
        phase: {kind: 10 ** rng.uniform(-5, -2) for kind in found if rng.random() < 0.7}
        for phase, found in DENSE.items()
    }
    gradient = rng.choice([0, 256, rng.randrange(1, 10**8)])
    return LayerCosts({"forward": chunks(), "backward": chunks()}, dense, gradient)


def random_contention(rng: random.Random) -> Contention:
    """Draw no contention, contention between links, or contention between any pair of resources."""
    some = Contention(*(rng.choice([1.0, rng.uniform(0.2, 1.0)]) for _ in range(6)))
    return rng.choice([NO_CONTENTION, Contention.between_links(rng.uniform(0.3, 0.99)), some])


def random_costs(rng: random.Random, contention: Contention | None = None) -> StepCosts:
    """Draw costs of up to four layers, equal or different."""
    layers = [random_layer(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.5:
        layers = layers[:1] * len(layers)
    if contention is None:
        contention = random_contention(rng)
    line = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8.5))
    return StepCosts(
        tuple(layers), line, contention, loss_s=rng.choice([None, 1e-3]), optimizer_s=rng.choice([None, 2e-3])
    )


def random_plan(rng: random.Random, costs: StepCosts) -> Plan:
    """Draw a valid plan: any order and degree of each pass, and gradients anywhere."""

    def passes() -> list[ChunkedPass]:
        return [ChunkedPass(rng.choice(ORDERS), rng.randint(1, 6)) for _ in costs.layers]

    def amounts() -> tuple[float, ...]:
        return tuple(rng.choice([0.0, rng.uniform(0, 5e7)]) for _ in costs.layers)

    partition = GradientPartition(amounts(), amounts())
    return step_plan(costs, passes(), passes(), partition, exposed=rng.random() < 0.3)
