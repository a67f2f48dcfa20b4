"""Answers of `fusedmoe plan --config`: sizes, memory, chunks, and what overlap, two-level dispatch and replicas gain.

Predictions have an error: `PREDICTION_ERROR`, and the range that the sources of a machine's figures give. A gain within
the error is no reason to change a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from fusedmoe.cli.job import Launch, Sizes
from fusedmoe.cli.layouts import memory_facts, rank_memory
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import Planned, head_s, machine_costs, make_table, step_costs, unplanned_gradients
from fusedmoe.errors import printable
from fusedmoe.models.job_files import ExternalJob
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule import POLICIES, CostModel, makespan, simulate
from fusedmoe.schedule.draw import ms
from fusedmoe.schedule.machines import PREDICTION_ERROR, TESTBEDS, Datum, Machine
from fusedmoe.schedule.task import PHASES

# Largest error of steps that were predicted from costs measured on the same ranks (docs/results.md).
_MEASURED_ERROR = Datum(0.10, "steps of 2 and 4 ranks, from costs measured on the same ranks")
# By whether MP and ESP have the same size, as in FSMoE's layer.
_MP_ASSUMPTION = {
    True: (),
    False: ("the collectives of MP are charged as if MP had the ranks of ESP, so times with other sizes are rough",),
}
#: Policy that compares the dispatch algorithms: fast to plan, with overlap.
COMPARED = "fsmoe"


class Planning(NamedTuple):
    """A planned job and its costs. `machine`: None with costs from a file."""

    settings: Settings
    launch: Launch
    sizes: Sizes
    costs: CostModel
    machine: Machine | None
    meta: Transformer


def answer_facts(
    planning: Planning,
    plans: Mapping[str, Planned],
    policy: str,
    job: ExternalJob,
    copies: Mapping[str, Any] | None,
    layouts: int,
) -> dict[str, Any]:
    """Return the answer as plain types, times in seconds.

    Args:
        plans: of every policy (`plans_by_policy`); `policy` is the reported one.
        copies: facts about expert replicas with the policy `COMPARED`; None without expert parallelism.
        layouts: number of compared layouts; 0 if the sizes were given.
    """
    fixed_s, planned = _unplanned_s(planning, planning.costs, planning.machine), plans[policy]
    gradients_s = fixed_s - head_s(planning.settings, planning.sizes, planning.costs)
    timeline = simulate(*planned)
    step_s, sequential_s = timeline.end_s + fixed_s, makespan(*plans["sequential"]) + fixed_s
    is_published = any(planning.costs is testbed.costs for testbed in TESTBEDS.values())
    error = PREDICTION_ERROR if planning.machine is not None or is_published else _MEASURED_ERROR
    ends = (
        [_at_end(planning, planned, plans["sequential"], is_fast) for is_fast in (False, True)]
        if planning.machine
        else []
    )
    steps_s = [step_s, *(end_s for end_s, _ in ends)]
    gains = [1 - step_s / sequential_s, *(1 - end_s / alone_s for end_s, alone_s in ends)]
    facts: dict[str, Any] = {
        "assumptions": [*job.assumptions, *_MP_ASSUMPTION[planning.sizes.mp == planning.sizes.esp]],
        "layout": {**vars(planning.sizes), "dp": planning.launch.ranks // planning.sizes.mp},
        "layouts_compared": layouts,
        "memory_bytes": memory_facts(
            rank_memory(planning.settings, planning.launch, planning.sizes, planning.meta, job.state), planning.machine
        ),
        "chunks": {
            phase: sorted({degree for (where, _), degree in planned.plan.degrees.items() if where == phase} or {1})
            for phase in PHASES
        },
        "policy": policy,
        "step_s": step_s,
        "step_range_s": [min(steps_s) * (1 - error.value), max(steps_s) * (1 + error.value)],
        "exposed_s": timeline.exposed_s() + gradients_s,
        "gradients_after_s": gradients_s,
        "error": error.value,
        "error_source": error.source,
        "overlap": {"sequential_s": sequential_s, "gain": gains[0], "gain_range": [min(gains), max(gains)]},
        "two_level": _two_level(planning, fixed_s),
        "replicas": _replicas(copies, makespan(*plans[COMPARED]) + fixed_s if COMPARED in plans else None),
    }
    facts["overlap"]["pays"] = min(gains) > error.value
    if facts["two_level"] is not None:
        facts["two_level"]["pays"] = facts["two_level"]["gain"] > error.value
    return facts


def _unplanned_s(planning: Planning, costs: CostModel, machine: Machine | None) -> float:
    after_s = unplanned_gradients(
        planning.settings, planning.launch, planning.sizes, costs, machine, planning.meta
    ).seconds
    return after_s + head_s(planning.settings, planning.sizes, costs)


def _at_end(planning: Planning, planned: Planned, sequential: Planned, is_fast: bool) -> tuple[float, float]:
    """Return the step's seconds with and without overlap at the fast or slow end of the machine's figures."""
    assert planning.machine is not None
    machine = planning.machine.at_end(is_fast)
    costs = machine_costs(machine, planning.settings, planning.sizes, planning.launch.ranks)
    fixed_s = _unplanned_s(planning, costs, machine)
    both = {whole: step_costs(*planning[:3], costs, planning.meta, whole=whole) for whole in (False, True)}
    plan_s, alone_s = (makespan(one.plan, both[one.costs.can_split]) for one in (planned, sequential))
    return plan_s + fixed_s, alone_s + fixed_s


def _two_level(planning: Planning, fixed_s: float) -> dict[str, Any] | None:
    """Return step times by dispatch algorithm; None without a machine, or for EP with one node or one rank per node."""
    node = max(1, planning.sizes.ranks_per_node // planning.sizes.esp)
    if planning.machine is None or not 1 < node < planning.sizes.ep:
        return None
    times_s = {}
    for dispatch in ("direct", "2dh"):
        settings = replace(planning.settings, dispatch=dispatch)
        costs = machine_costs(planning.machine, settings, planning.sizes, planning.launch.ranks)
        step = step_costs(settings, planning.launch, planning.sizes, costs, planning.meta)
        times_s[dispatch] = makespan(POLICIES[COMPARED].plan(step), step) + fixed_s
    return {"policy": COMPARED, "seconds": times_s, "gain": 1 - times_s["2dh"] / times_s["direct"]}


def _replicas(copies: Mapping[str, Any] | None, without_s: float | None) -> dict[str, Any] | None:
    if copies is None or without_s is None:
        return None
    found = {name: copies[name] for name in ("overlap", "expert_bytes", "step_s")}
    return found | {"lengthens": copies["step_s"] / without_s - 1}


def print_answer(console: Console, facts: Mapping[str, Any]) -> None:
    table = make_table("answer", ("question", "answer", "why"))
    for row in _rows(facts):
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)
    for assumption in facts["assumptions"]:
        console.print(f"assumed: {assumption}", markup=False, soft_wrap=True)


def _rows(facts: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    layout, error = facts["layout"], facts["error"]
    sizes = ", ".join(f"{name} {layout[name]}" for name in ("ep", "esp", "mp", "dp"))
    compared = facts["layouts_compared"]
    why = f"least time per token of the {compared} layouts that fit" if compared else "given, or the default"
    memory = facts["memory_bytes"]
    if memory["fits"] is False:
        why = "least memory; none fits: try --recompute or more ranks" if compared else why
    low_s, high_s = facts["step_range_s"]
    chunks = "; ".join(f"{phase} {_span(degrees)}" for phase, degrees in facts["chunks"].items())
    return [
        ("parallel sizes", sizes, why),
        ("memory per rank", *_memory_words(memory)),
        ("chunks", chunks, f"policy {facts['policy']}"),
        ("step", f"{ms(facts['step_s'])} ({ms(low_s)} to {ms(high_s)})", f"±{error:.0%}: {facts['error_source']}"),
        ("exposed communication", ms(facts["exposed_s"]), _exposed_words(facts)),
        ("overlap", *_overlap_words(facts["overlap"], error)),
        ("two-level dispatch", *_two_level_words(facts["two_level"], error)),
        ("expert replicas", *_replica_words(facts["replicas"])),
    ]


def _span(numbers: Sequence[int]) -> str:
    return "–".join(dict.fromkeys((str(numbers[0]), str(numbers[-1]))))


def _memory_words(memory: Mapping[str, Any]) -> tuple[str, str]:
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    named = ", ".join(f"{part} {memory[part] / 1e9:.3g}" for part in parts)
    total = f"{memory['total'] / 1e9:.3g} GB"
    if memory["device"] is None:
        return total, f"GB: {named}"
    fits = "fits" if memory["fits"] else "DOES NOT FIT"
    return f"{total} of {memory['device'] / 1e9:.3g} GB: {fits}", f"GB: {named}"


def _exposed_words(facts: Mapping[str, Any]) -> str:
    share = f"{facts['exposed_s'] / facts['step_s']:.0%} of the step"
    after_s = facts["gradients_after_s"]
    return f"{share}, {ms(after_s)} of it gradients reduced after the step" if after_s else share


def _overlap_words(overlap: Mapping[str, Any], error: float) -> tuple[str, str]:
    low, high = overlap["gain_range"]
    gain = f"saves {overlap['gain']:.1%} of {ms(overlap['sequential_s'])}"
    gain += f" ({low:.1%} to {high:.1%} by the sources' ranges)" if high - low > 5e-4 else ""
    if overlap["pays"]:
        return "use it: schedule=auto", gain
    return "leave it off, or measure", f"{gain}; not more than the error of {error:.0%}"


def _two_level_words(two_level: Mapping[str, Any] | None, error: float) -> tuple[str, str]:
    if two_level is None:
        return (
            "leave it off",
            "EP ranks are all in one node or all in different nodes, or costs are measured for direct",
        )
    times = " and ".join(f"{ms(seconds)} {name}" for name, seconds in two_level["seconds"].items())
    if two_level["pays"]:
        return "use it: --dispatch 2dh", f"{times}: saves {two_level['gain']:.1%}"
    return "leave it off", f"{times}: not better by more than the error of {error:.0%}"


def _replica_words(replicas: Mapping[str, Any] | None) -> tuple[str, str]:
    if replicas is None:
        return "no", "experts are not spread over ranks"
    size = f"{replicas['overlap']} per layer ({replicas['expert_bytes'] / 2**20:.3g} MiB each)"
    cost = f"{size} lengthen the step by {max(0.0, replicas['lengthens']):.1%}"
    if not replicas["overlap"]:
        return "leave them off", "computation hides no expert's transfer"
    return "only for uneven loads", f"{cost}; predictions have uniform loads, so measure yours"
