"""Answers of `fusedmoe plan --config`: sizes, memory, chunks, and what overlap, two-level dispatch and replicas gain.

Predictions have an error: `PREDICTION_ERROR`, and the range that the sources of a machine's figures give. A gain within
the error is no reason to change a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from fusedmoe.cli.job import Sizes
from fusedmoe.cli.layouts import find_remedy, rank_memory
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import PlannedJob, PlanWithCosts, make_table, no_split_reason
from fusedmoe.errors import ConfigError, printable
from fusedmoe.models.external_job import ExternalJob
from fusedmoe.schedule import POLICIES, simulate
from fusedmoe.schedule.draw import format_ms
from fusedmoe.schedule.machines import PREDICTION_ERROR, TESTBEDS, SourcedValue
from fusedmoe.schedule.task import PHASES

# Largest error of steps that were predicted from costs measured on the same ranks (docs/results.md).
_MEASURED_ERROR = SourcedValue(0.10, "steps of 2 and 4 ranks, from costs measured on the same ranks")
#: Policy that replicas are added to: fast to plan, with overlap.
COMPARED = "fsmoe"


def pipeline_refusal(job: ExternalJob, settings: Settings, sizes: Sizes) -> str | None:
    """Return why the job's blocks cannot run in micro-batches; None: they can."""
    if job.pipeline is None:
        return "this integration has no pipeline"
    if sizes.ep * sizes.esp == 1:
        return "experts are not spread over ranks"
    if sizes.mp > 1:
        return "it does not support tensor parallelism"
    if settings.model.batch == 1:
        return "one sample per rank: --batch 2 plans with two"
    return no_split_reason(settings)


def runnable_policies(job: ExternalJob, settings: Settings, sizes: Sizes) -> list[str]:
    """Return the policies that the job's integration can run. Raises `ConfigError` if --schedule is none of them."""
    refusal = pipeline_refusal(job, settings, sizes)
    names = [name for name, policy in POLICIES.items() if refusal is None or not policy.uses_micro_batches]
    if settings.schedule not in ("auto", *names):
        raise ConfigError(f"--schedule {settings.schedule} plans whole models: {refusal}; use auto or another policy")
    return names


def answer_facts(
    planning: PlannedJob,
    plans: Mapping[str, PlanWithCosts],
    policy: str,
    job: ExternalJob,
    copies: Mapping[str, Any] | None,
    layouts: int,
) -> dict[str, Any]:
    """Return the answer as plain types, times in seconds.

    Args:
        policy: the reported policy of `plans`.
        copies: facts about expert replicas with the policy `COMPARED`; None without expert parallelism.
        layouts: number of compared layouts; 0 if the sizes were given.
    """
    settings, sizes, number, planned = planning.settings, planning.sizes, planning.micro_batches, plans[policy]
    exposed_s = simulate(*planned).exposed_s() + planning.recomputed_pass(planned).exposed_s()
    gradients_s = sum(planning.gradients_s.values())
    is_published = any(planning.costs is testbed.costs for testbed in TESTBEDS.values())
    error = PREDICTION_ERROR if planning.machine is not None or is_published else _MEASURED_ERROR
    step_s, overlap = planning.step_s(planned), _gain_facts(planning, planned, plans["sequential"], error.value)
    steps_s = [step_s, *overlap.pop("ends_s")]
    pipeline: dict[str, Any] = {"refusal": pipeline_refusal(job, settings, sizes)}
    if pipeline["refusal"] is not None:
        pipeline["pays"] = False
    else:
        keeps = ["all gathered blocks"] * (job.state.sharded == "all")
        keeps += ["the experts' activations"] * settings.recompute
        pipeline |= {"call": job.pipeline, "keeps": keeps}
        pipeline |= _gain_facts(planning, plans["joint"], plans["sequential"], error.value)
        del pipeline["ends_s"]
    return {
        "assumptions": _assumptions(planning, planned, job),
        "layout": {**vars(sizes), "dp": planning.ranks // sizes.mp},
        "layouts_compared": layouts,
        "memory_bytes": _memory(planning, job),
        "chunks": {
            phase: sorted({degree for (where, _), degree in planned.plan.degrees.items() if where == phase} or {1})
            for phase in PHASES
        },
        "policy": policy,
        "step_s": step_s,
        "step_range_s": [min(steps_s) * (1 - error.value), max(steps_s) * (1 + error.value)],
        "exposed_s": number * exposed_s + gradients_s,
        "gradients_after_s": gradients_s,
        "error": error.value,
        "error_source": error.source,
        "overlap": overlap,
        "pipeline": pipeline,
        "micro_batches": number,
        "two_level": _two_level(planning, policy, error.value),
        "replicas": _replicas(copies, planning.step_s(plans[COMPARED]) if COMPARED in plans else None),
    }


def _memory(planning: PlannedJob, job: ExternalJob) -> dict[str, Any]:
    machine, own = planning.machine, (planning.settings, planning.ranks, planning.sizes, planning.meta, job.state)
    memory = rank_memory(*own)
    facts: dict[str, Any] = asdict(memory) | {"total": memory.total, "device": None, "fits": None, "remedy": None}
    if machine is not None and machine.memory_bytes is not None:
        room = machine.memory_bytes.value
        facts |= {"device": room, "fits": memory.total <= room}
        facts["remedy"] = None if facts["fits"] else find_remedy(*own, room, machine)
    return facts


def _gain_facts(
    planning: PlannedJob, planned: PlanWithCosts, sequential: PlanWithCosts, error: float
) -> dict[str, Any]:
    """Return the gain of a plan over the sequential plan, and its range over both ends of the machine's figures.

    `ends_s`: seconds of the step at these ends. `pays`: the gain is more than the error in the whole range.
    """
    alone_s = planning.step_s(sequential)
    gains, ends_s = [1 - planning.step_s(planned) / alone_s], []
    for is_fast in (False, True) if planning.machine is not None else ():
        assert planning.machine is not None
        end = planning.on(planning.machine.at_bounds(is_fast))
        plan_s, end_alone_s = (
            end.step_s(PlanWithCosts(one.plan, end.step_costs(one.costs.can_split))) for one in (planned, sequential)
        )
        gains.append(1 - plan_s / end_alone_s)
        ends_s.append(plan_s)
    facts = {"sequential_s": alone_s, "gain": gains[0], "gain_range": [min(gains), max(gains)]}
    return facts | {"ends_s": ends_s, "pays": min(gains) > error}


def _assumptions(planning: PlannedJob, planned: PlanWithCosts, job: ExternalJob) -> list[str]:
    batch = "one micro-batch per replica and step, because the file has no global batch size"
    if job.global_batch is not None:
        batch = f"{planning.micro_batches} micro-batches per replica and step (global batch {job.global_batch}), "
        batch += "gradients reduced once"
    gradients = "all gradients are reduced after the backward pass, with and without a schedule; FSDP, DDP or "
    gradients += "overlap_grad_reduce hide a part of them"
    assumptions = [*job.assumptions, str(job.state), batch, gradients]
    if planning.settings.recompute and planned.costs.can_split:
        assumptions.append("dense parts run again in the backward pass, without dispatch and combine")
    elif planning.settings.recompute and planned.costs.loss_s is not None:
        assumptions.append("recomputed communication and experts are not in the step time")
    elif planning.settings.recompute:
        assumptions.append("each block's forward runs again in the backward pass, dispatch and combine included")
    elif job.selective is not None:
        assumptions.append(f"no recomputation ({job.selective} is selective)")
    # FSMoE's layer has MP and ESP of the same size.
    if planning.sizes.mp != planning.sizes.esp:
        assumptions.append(
            "the collectives of MP are charged as if MP had the ranks of ESP, so times with other sizes are rough"
        )
    return assumptions


def _two_level(planning: PlannedJob, policy: str, error: float) -> dict[str, Any] | None:
    """Return step times by a policy with each dispatch algorithm; None if EP stays in a node, or costs are measured.

    Policies for whole models are replaced by "auto".
    """
    node = max(1, planning.sizes.ranks_per_node // planning.sizes.esp)
    if planning.machine is None or not 1 < node < planning.sizes.ep:
        return None
    policy = "auto" if policy == "auto" or POLICIES[policy].uses_micro_batches else policy
    plan = POLICIES["joint" if policy == "auto" else policy].plan
    times_s = {}
    for dispatch in ("direct", "2dh"):
        job = planning.on(planning.machine, dispatch=dispatch)
        costs = job.step_costs()
        times_s[dispatch] = job.step_s(PlanWithCosts(plan(costs), costs))
    gain = 1 - times_s["2dh"] / times_s["direct"]
    return {"policy": policy, "seconds": times_s, "gain": gain, "pays": gain > error}


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
    layout, error, policy = facts["layout"], facts["error"], facts["policy"]
    is_whole = policy in POLICIES and POLICIES[policy].uses_micro_batches
    schedule = f"{facts['pipeline'].get('call')}(policy={policy!r})" if is_whole else f"schedule={policy}"
    sizes = ", ".join(f"{name} {layout[name]}" for name in ("ep", "esp", "mp", "dp"))
    compared = facts["layouts_compared"]
    why = "given, or the default"
    if compared:
        why = f"of {compared} EP sizes that fit, least memory within {PREDICTION_ERROR.value:.0%} of the least time"
    memory = facts["memory_bytes"]
    if memory["fits"] is False:
        why = "least memory: none fits" if compared else why
    low_s, high_s = facts["step_range_s"]
    step = f"{format_ms(facts['step_s'])} ({format_ms(low_s)} to {format_ms(high_s)})"
    batches = "" if facts["micro_batches"] == 1 else f"{facts['micro_batches']} micro-batches; "
    exposed, after_s = f"{facts['exposed_s'] / facts['step_s']:.0%} of the step", facts["gradients_after_s"]
    exposed += f", {format_ms(after_s)} of it gradients reduced after the step" if after_s else ""
    chunks = "; ".join(f"{phase} {_span(degrees)}" for phase, degrees in facts["chunks"].items())
    return [
        ("parallel sizes", sizes, why),
        ("memory per rank", *_memory_words(memory)),
        ("chunks", chunks, f"policy {policy}"),
        ("step", step, f"{batches}±{error:.0%}: {facts['error_source']}"),
        ("exposed communication", format_ms(facts["exposed_s"]), exposed),
        ("overlap", *_overlap_words(facts["overlap"], error, schedule)),
        ("overlap of whole blocks", *_pipeline_words(facts["pipeline"], error)),
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
    fits = "fits"
    if not memory["fits"]:
        remedy = memory["remedy"]
        cure = "needs more ranks" if remedy is None else f"{remedy['total'] / 1e9:.3g} GB with {remedy['changes']}"
        fits = f"DOES NOT FIT; {cure}"
    return f"{total} of {memory['device'] / 1e9:.3g} GB: {fits}", f"GB: {named}"


def _overlap_words(overlap: Mapping[str, Any], error: float, name: str) -> tuple[str, str]:
    low, high = overlap["gain_range"]
    gain = f"saves {overlap['gain']:.1%} of {format_ms(overlap['sequential_s'])}"
    gain += f" ({low:.1%} to {high:.1%} by the sources' ranges)" if high - low > 5e-4 else ""
    if overlap["pays"]:
        return f"use it: {name}", gain
    return "leave it off, or measure", f"{gain}; not more than the error of {error:.0%}"


def _pipeline_words(pipeline: Mapping[str, Any], error: float) -> tuple[str, str]:
    if "gain" not in pipeline:
        return "no", pipeline["refusal"]
    answer, why = _overlap_words(pipeline, error, f"{pipeline['call']}(…)")
    kept = f"; needs memory for {' and '.join(pipeline['keeps'])}" if pipeline["keeps"] else ""
    return answer, why + kept


def _two_level_words(two_level: Mapping[str, Any] | None, error: float) -> tuple[str, str]:
    if two_level is None:
        why = "EP ranks are all in one node or all in different nodes, or costs are measured for direct"
        return "leave it off", why
    times = " and ".join(f"{format_ms(seconds)} {name}" for name, seconds in two_level["seconds"].items())
    times += f" by {two_level['policy']}"
    if two_level["pays"]:
        gain = f"{times}: saves {two_level['gain']:.1%}; integrations send directly"
        return "only with MoELayer: dispatch='2dh'", gain
    return "leave it off", f"{times}: not better by more than the error of {error:.0%}"


def _replica_words(replicas: Mapping[str, Any] | None) -> tuple[str, str]:
    if replicas is None:
        return "no", "experts are not spread over ranks"
    size = f"{replicas['overlap']} per layer ({replicas['expert_bytes'] / 2**20:.3g} MiB each)"
    cost = f"{size} lengthen the step by {max(0.0, replicas['lengthens']):.1%}"
    if not replicas["overlap"]:
        return "leave them off", "computation hides no expert's transfer"
    return "only for uneven loads", f"{cost}; predictions have uniform loads, so measure yours"
