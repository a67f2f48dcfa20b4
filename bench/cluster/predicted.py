"""Predictions of a machine model for the two nodes (`fusedmoe.schedule.machines`), compared with measurements.

The machine is described only by its nominal link rates. Costs of collectives come from the model; steps combine them
with measured computation, so all differences are due to the model: at 2 ranks (computed), 4 (emulated, blocks) and 8
(emulated-8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.machines import Link, Machine, SourcedValue
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import LINKS, PHASES

# TCP payload fraction of an Ethernet frame of 1,500 bytes plus header; loopback frames have 64 KiB.
_FRAME, _LOOPBACK_FRAME = 1448 / 1514, 65483 / 65550

# Collective of each part of a layer.
_LINES = {"dispatch": "all-to-all/ep", "combine": "all-to-all/ep"}
_GATHERED = {"all-gather": "all-gather/esp", "reduce-scatter": "reduce-scatter/esp"}


def machine_of(setting: Mapping[str, Any]) -> Machine:
    """Return the machine of a setting, given as in results."""
    rate = "the rate that the link is held to"
    # A node's loopback is one bus for all of its ranks and both directions.
    inside = setting["intra_mbit"] * 1e6 / 8 / max(1, setting["ranks_per_node"])
    none = SourcedValue(0.0, "no rate says how long a message takes to start", True)
    return Machine(
        f"two nodes of {setting['ranks_per_node']}, {setting['inter_mbit']} Mbit/s between them",
        setting["ranks_per_node"],
        "fp32",
        flops=SourcedValue(1.0, "not used: what computes is measured", True),
        product_start_s=none,
        copied_bytes_per_s=SourcedValue(1.0, "not used: what computes is measured", True),
        start_s=none,
        intra=Link(none, SourcedValue(inside, rate), SourcedValue(_LOOPBACK_FRAME, "headers of TCP in 64 KiB")),
        inter=Link(
            none,
            SourcedValue(setting["inter_mbit"] * 1e6 / 8, rate),
            SourcedValue(_FRAME, "headers of TCP in 1,500 bytes"),
        ),
        cards=SourcedValue(1, "a pair of virtual interfaces"),
        spread=SourcedValue(0.0, "what computes is measured on the slowest rank"),
    )


def costs_of(found: Mapping[str, Any]) -> CostModel:
    """Return the model's costs of the collectives in a setting's results."""
    setting = found["setting"]
    esp = setting["ranks_per_node"]
    costs = machine_of(setting).costs(setting["ranks"], ep=setting["ranks"] // esp, esp=esp, mp=esp)
    # As measured: it does not follow from rates. Old results have one number, the speed fraction of each link kind.
    measured = found["profile"]["contention"]
    contention = Contention(**measured) if isinstance(measured, Mapping) else Contention.between_links(measured)
    return replace(costs, contention=contention)


def step_costs_of(found: Mapping[str, Any], costs: CostModel) -> StepCosts:
    """Return step costs: collectives from `costs`, computation as measured."""
    setting, profile = found["setting"], found["profile"]
    rows_bytes = 4 * setting["S"] * setting["M"]
    volumes = {name: (line, rows_bytes) for name, line in _LINES.items()}
    volumes |= {name: (line, rows_bytes * setting["ranks_per_node"]) for name, line in _GATHERED.items()}

    def part(kind: str, measured: Mapping[str, float]) -> StageTime:
        if kind not in LINKS:
            return StageTime(**measured)
        name, nbytes = volumes[kind]
        line = costs.line(name)
        return StageTime(line.alpha_s, line.beta_s * nbytes)

    chunks = {phase: {kind: part(kind, of) for kind, of in profile["chunks"][phase].items()} for phase in PHASES}
    micro = profile["micro"]
    if micro is not None:
        dense = {phase: {kind: StageTime(**of) for kind, of in micro["dense"][phase].items()} for phase in PHASES}
        weights = {kind: StageTime(**of) for kind, of in micro["weights"].items()}
        micro = MicroBatches(dense, weights, w_task_overhead_s=micro.get("apart_s", 0.0))  # missing in old results
    layer = LayerCosts(chunks, profile["dense_s"], profile["gradient_bytes"], micro)
    return StepCosts((layer,) * setting["layers"], costs.line("all-reduce/dp"), costs.contention)


def tables(name: str, found: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return tables of the collectives' costs, and of steps under every policy's plan."""
    costs = costs_of(found)
    title = f"by a model of machines, from the links' rates alone; {name}, {found['setting']['ranks']} ranks"
    lines, steps = Table(title=title, title_justify="left"), Table(title=title, title_justify="left")
    for column in ("collective", "start measured", "predicted", "bytes/s measured", "predicted", "error"):
        lines.add_column(column, justify="left" if column == "collective" else "right")
    for which, measured in found["profile"]["lines"].items():
        if which in costs.lines and which not in ("gemm", "copy"):
            was, line = Line(**measured), costs.line(which)
            starts = (f"{1e3 * one.alpha_s:.2f} ms" for one in (was, line))
            rates = (f"{one.per_s / 1e6:.2f} M" for one in (was, line))
            lines.add_row(which, *starts, *rates, f"{was.beta_s and line.beta_s / was.beta_s - 1:+.1%}")
    for column in ("policy", "measured", "by measured lines", "error", "by the model", "error"):
        steps.add_column(column, justify="left" if column == "policy" else "right")
    own = step_costs_of(found, costs)
    for policy, row in found["rows"].items():
        seconds = makespan(Plan.parse(row["plan"]), own)
        cells = [f"{1e3 * one:.0f} ms" for one in (row["median_s"], row["predicted_s"], seconds)]
        steps.add_row(policy, *cells[:2], f"{row['error']:+.1%}", cells[2], f"{seconds / row['median_s'] - 1:+.1%}")
    return lines, steps
