"""Timelines for tests: one training step of a model with MoE layers, with random durations."""

from __future__ import annotations

import random

from fusedmoe.schedule.timeline import Span, Timeline


def training_step(
    rng: random.Random,
    rank: int = 0,
    *,
    layers: int = 2,
    degree: int = 4,
    source: str = "measured",
    anchor_s: float | None = 1.7e9,
) -> Timeline:
    """Forward and backward, each resource in its own first-in-first-out order, chunks in a pipeline."""
    spans: list[Span] = []
    free_s = {"compute": 0.0, "intra": 0.0, "inter": 0.0}

    def run(kind: str, resource: str, ms: float, after_s: float = 0.0, **where: int | str) -> float:
        start_s = max(free_s[resource], after_s)
        free_s[resource] = start_s + ms * 1e-3 * rng.uniform(0.5, 2.0)
        chunk, layer, phase = where.get("chunk"), where.get("layer"), where.get("phase")
        spans.append(Span(kind, kind, resource, start_s, free_s[resource], chunk, layer, phase))  # type: ignore[arg-type]
        return free_s[resource]

    for phase, order in (("forward", range(layers)), ("backward", reversed(range(layers)))):
        for layer in order:
            here: dict[str, int | str] = {"layer": layer, "phase": phase}
            cost = 1 if phase == "forward" else 2
            run("attention", "compute", 4 * cost, max(free_s.values()), **here)
            run("gate", "compute", 0.5, **here)
            ready_s = run("permute", "compute", 0.5, **here)
            for chunk in range(degree):
                here["chunk"] = chunk
                sent_s = run("dispatch", "inter", 1.6, ready_s, **here)
                gathered_s = run("all-gather", "intra", 0.8, sent_s, **here)
                done_s = run("expert", "compute", 1.7 * cost, gathered_s, **here)
                reduced_s = run("reduce-scatter", "intra", 0.7, done_s, **here)
                run("combine", "inter", 1.6, reduced_s, **here)
            del here["chunk"]
            run("unpermute", "compute", 0.5, max(free_s.values()), **here)
            if phase == "backward":
                run("weight-gradient", "compute", 2.0, **here)
                run("gradient-all-reduce", "inter", 2.0, **here)
        if phase == "forward":
            run("loss", "compute", 1.0)
    run("optimizer", "compute", 3.0, max(free_s.values()))
    rng.shuffle(spans)
    return Timeline(rank, tuple(spans), source, anchor_s)
