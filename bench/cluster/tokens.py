"""Compare a layer that sends each token once per rank with one that sends a row per (token, k) pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import fusedmoe
from bench.cluster.layer import both_passes, make_layer, run
from bench.cluster.setting import Setting
from bench.cluster.turns import in_turns, row
from fusedmoe.comm import all_to_all, collectives
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.kernels.deduplicate import SentTokens, deduplicate_tokens
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.layer_plans import LayerParts
from fusedmoe.layers.measure import time_layer
from fusedmoe.layers.schedule import Schedule, ScheduledPlans
from fusedmoe.names import ALGORITHMS
from fusedmoe.runtime.cache import measured_costs
from fusedmoe.schedule.simulate import makespan


@contextmanager
def travelling(what: str) -> Iterator[None]:
    """Send "tokens" once per rank, or "pairs": one row per pair."""

    def every_pair(layout: Layout, peers: int) -> SentTokens:
        return SentTokens(layout)

    with patch.object(all_to_all, "deduplicate_tokens", deduplicate_tokens if what == "tokens" else every_pair):
        yield


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time both passes without a schedule and under "auto"; count bytes sent by the rank. Collective."""
    x_SM = torch.randn(setting.S // setting.k, setting.M).requires_grad_()
    dy_SM = torch.randn(setting.S // setting.k, setting.M)
    auto = Schedule.named("auto")
    assert auto is not None
    layers, predicted_s, sent = {}, {}, {}
    for what in ("tokens", "pairs"):
        with travelling(what):
            off = make_layer(setting, topology, None)
            workload = off.experts.workload(setting.S, 4, setting.ep, setting.esp)
            costs = measured_costs(topology, x_SM.device, x_SM.dtype)
            step = workload.step_costs(costs, [0], off.parts)
            parts = LayerParts(topology, off.gate, off.order, off.experts)
            seen = time_layer(topology, parts.gate, parts.order, parts.experts, x_SM.detach(), step)
            model = replace(costs, observed={workload.shapes: seen})
            layers[what, "off"] = off
            layers[what, "auto"] = made = make_layer(setting, topology, replace(auto, costs=model))
            sent[what] = _bytes_sent(off, x_SM, dy_SM)
            run(made, x_SM, dy_SM)
            assert isinstance(made.plans, ScheduledPlans)
            plans = next(iter(made.plans.plans_by_workload.values()))
            after = workload.step_costs(model, [0], off.parts)
            predicted_s[what] = makespan(both_passes(plans, after), after)

    def step_of(what: str, schedule: str) -> None:
        with travelling(what):
            run(layers[what, schedule], x_SM, dy_SM)

    runs = {f"{schedule}, {what}": partial(step_of, what, schedule) for what, schedule in layers}
    rows = {name: row(seconds) for name, seconds in in_turns(topology, runs, rounds).items()}
    for what, seconds in predicted_s.items():
        found = rows[f"auto, {what}"]
        found["predicted_s"], found["error"] = seconds, seconds / found["median_s"] - 1
    ratios = {of: rows[f"{of}, pairs"]["median_s"] / rows[f"{of}, tokens"]["median_s"] for of in ("off", "auto")}
    found: dict[str, Any] = {"rows": rows, "ratios": ratios, "bytes": sent}
    return found | ({"levels": _levels(setting, rounds)} if setting.ranks_per_node > 1 else {})


def _levels(setting: Setting, rounds: int) -> dict[str, Any]:
    """Time a layer with negligible computation on all ranks, by dispatch algorithm, and report "auto"'s. Collective."""
    topology = Topology.from_sizes(setting.ranks, ranks_per_node=setting.ranks_per_node)
    x_SM = torch.randn(setting.S // setting.k, setting.M).requires_grad_()
    dy_SM, layers = torch.randn(setting.S // setting.k, setting.M), {}
    for dispatch in (*ALGORITHMS, "auto"):
        torch.manual_seed(0)
        gate, experts = fusedmoe.gates.Random(setting.E, k=setting.k), fusedmoe.experts.FeedForward(8)
        layers[dispatch] = fusedmoe.MoELayer(setting.M, gate, experts, topology=topology, dispatch=dispatch)
    runs = {name: partial(run, layer, x_SM, dy_SM) for name, layer in layers.items()}
    rows = {name: row(seconds) for name, seconds in in_turns(topology, runs, rounds).items()}
    ratios = {name: rows["direct"]["median_s"] / rows[name]["median_s"] for name in rows}
    chosen = layers["auto"].dispatcher
    assert isinstance(chosen, Collectives)
    return {"rows": rows, "ratios": ratios, "auto": chosen.all_to_all.identity.split()[0]}


def _bytes_sent(layer: fusedmoe.MoELayer, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> int:
    """Return the bytes that all-to-alls send from this rank to others in both passes of a layer."""
    total = 0
    own = layer.topology.ep.index
    move = collectives.all_to_all_rows

    def counted(group: Any, rows: torch.Tensor, send: list[int], *more: Any, **named: Any) -> torch.Tensor:
        nonlocal total
        row_bytes = rows.itemsize * rows[:1].numel() if len(rows) else 0
        total += row_bytes * (sum(send) - send[own]) if len(send) == layer.topology.ep.size else 0
        return move(group, rows, send, *more, **named)

    with patch("fusedmoe.comm.all_to_all.all_to_all_rows", counted):
        run(layer, x_SM, dy_SM)
    return total
