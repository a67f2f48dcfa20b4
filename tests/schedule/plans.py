"""Plans and costs to test with."""

from __future__ import annotations

import random
from dataclasses import replace

from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.fused import Chunks, TiledChunks
from fusedmoe.schedule.orders import alternating, one_queue, three_queues
from fusedmoe.schedule.partition import Partition
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.stack_costs import LayerCosts, StackCosts
from fusedmoe.schedule.step import Pass, step_plan
from fusedmoe.schedule.task import FUSED, LINKS, road_with

ORDERS = (three_queues, alternating, one_queue)

DENSE = {"forward": ("attention", "gate", "order", "unorder"), "backward": ("order", "unorder", "gate", "attention")}


def random_layer(rng: random.Random) -> LayerCosts:
    """Any mix of short and long parts; sometimes without a group for experts or their shards, or without a gradient."""
    kinds = ["expert"]
    if rng.random() < 0.8:
        kinds += ["dispatch", "combine"]
    if rng.random() < 0.8:
        kinds += ["all-gather", "reduce-scatter"]

    def chunks() -> dict[str, Chunks]:
        return {kind: Chunks(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-4, -1.5)) for kind in kinds}

    dense = {
        phase: {kind: 10 ** rng.uniform(-5, -2) for kind in found if rng.random() < 0.7}
        for phase, found in DENSE.items()
    }
    gradient = rng.choice([0, 256, rng.randrange(1, 10**8)])
    return LayerCosts({"forward": chunks(), "backward": chunks()}, dense, gradient)


def random_costs(rng: random.Random, contention: float | None = None) -> StackCosts:
    """Up to four layers, alike or not."""
    layers = [random_layer(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.5:
        layers = layers[:1] * len(layers)
    if contention is None:
        contention = rng.choice([1.0, rng.uniform(0.3, 0.99)])
    line = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8.5))
    return StackCosts(
        tuple(layers), line, contention, loss_s=rng.choice([None, 1e-3]), optimizer_s=rng.choice([None, 2e-3])
    )


def with_fused(rng: random.Random, costs: StackCosts) -> StackCosts:
    """The same where layers have fused operations, some of them or all, dear ones and cheap ones."""
    found: dict[int, LayerCosts] = {}
    for layer in costs.layers:
        if id(layer) not in found:
            fused = {phase: _fused(rng, chunks) for phase, chunks in layer.chunks.items()}
            found[id(layer)] = replace(layer, fused=fused)
    return replace(costs, layers=tuple(found[id(layer)] for layer in costs.layers))


def _fused(rng: random.Random, parts: dict[str, Chunks]) -> dict[str, TiledChunks]:
    result = {}
    for kind, own in FUSED.items():
        if road_with(kind, parts) is not None and rng.random() < 0.7:
            place = own.index("expert")
            computed = parts["expert"].whole_s / 2 * rng.uniform(0.5, 1.5)
            steps = tuple(
                {LINKS[part]: parts[part].whole_s for part in of} | {"compute": computed}
                for of in (own[:place], own[place + 1 :])
            )
            start_s = parts["expert"].alpha_s
            weights = rng.choice([Chunks(0.0, 0.0), parts["expert"] * rng.random()])
            result[kind] = TiledChunks(start_s, 10 ** rng.uniform(-7, -4), steps, rng.uniform(0.001, 0.3), weights)
    return result


def random_plan(rng: random.Random, costs: StackCosts) -> Plan:
    """Any road, order and degree of each pass, gradients anywhere; not a good plan, but a plan."""

    def passes(phase: str) -> list[Pass]:
        found = []
        for layer in costs.layers:
            how = Pass(rng.choice(ORDERS), rng.randint(1, 6))
            if layer.fused:
                how = how._replace(road=tuple(rng.choice(layer.roads(phase))))
            found.append(how)
        return found

    def amounts() -> tuple[float, ...]:
        return tuple(rng.choice([0.0, rng.uniform(0, 5e7)]) for _ in costs.layers)

    partition = Partition(amounts(), amounts())
    return step_plan(costs, passes("forward"), passes("backward"), partition, exposed=rng.random() < 0.3)
