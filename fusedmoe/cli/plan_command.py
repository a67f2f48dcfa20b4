"""`fusedmoe plan`: the schedule of a model, its predicted step time under every policy, and a lower bound."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from itertools import groupby
from typing import Any

from rich.table import Table

from fusedmoe.cli.answer import COMPARED, answer_facts, print_answer, runnable_policies
from fusedmoe.cli.job import Launch, Sizes, command_group, format_ranks, resolve_sizes
from fusedmoe.cli.layouts import chosen_settings, layouts
from fusedmoe.cli.scale import Scale, figures_dict, figures_table
from fusedmoe.cli.settings import Settings, describe, given_settings, read_costs
from fusedmoe.cli.step_plans import (
    PlannedJob,
    PlanWithCosts,
    compute_dtype,
    describe_costs,
    expert_bytes,
    followed_policy,
    follows_plan,
    machine_costs,
    make_console,
    make_meta_model,
    make_table,
    no_split_reason,
    sizes_outside_ranges,
    with_cached_tasks,
)
from fusedmoe.errors import ConfigError, printable
from fusedmoe.models.external_job import ExternalJob
from fusedmoe.models.job_files import read_job
from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.schedule import POLICIES, CostModel, draw, simulate
from fusedmoe.schedule.draw import format_ms
from fusedmoe.schedule.machines import MACHINES, TESTBEDS, Machine
from fusedmoe.schedule.policies.sparse_collectives import hidden_s, with_sparse_collectives
from fusedmoe.schedule.simulate import busy_intervals, critical_path, layer_passes
from fusedmoe.schedule.task import PHASES, WEIGHT_GRADIENTS, TaskKind
from fusedmoe.schedule.timeline import Timeline

RESOURCES = {"compute": "computation", "inter": "links between nodes", "intra": "links inside the node"}
# On one node both groups of links are inside it.
ONE_NODE = RESOURCES | {"inter": "links of EP and DP", "intra": "links of ESP and MP"}


class PlanReport:
    """Plan for a model and layout, with its analysis.

    Reports on the policy of the settings, or on "sequential" if training follows no plan.

    Args:
        job: another framework's job, whose questions `facts["answer"]` then answers.
        compared: number of layouts that were compared.
        can_trace: `fusedmoe trace` can measure the tasks on these ranks.
    Attributes:
        policy, plan: the reported policy and its plan.
        step_s: predicted step time of each policy, in seconds.
        timeline, drawn_timeline: simulation of the plan, and with expert replicas if the placement has any.
        facts: all reported values as plain types, times in seconds.
    """

    def __init__(
        self,
        planned_job: PlannedJob,
        *,
        again: bool = False,
        job: ExternalJob | None = None,
        compared: int = 0,
        can_trace: bool = False,
    ) -> None:
        self._job, self._can_trace = planned_job, can_trace
        settings, sizes, costs, ranks = planned_job.settings, planned_job.sizes, planned_job.costs, planned_job.ranks
        self.policy, number = followed_policy(settings, sizes), planned_job.micro_batches
        if job is not None and settings.schedule == "auto" and follows_plan(settings, sizes.ep, sizes.esp):
            self.policy = "auto"
        policies = POLICIES if job is None else runnable_policies(job, settings, sizes)
        plans = planned_job.plans(policies, again=again)
        self.plan, step = planned = plans[self.policy]
        self.step_s = {name: planned_job.step_s(by_policy) for name, by_policy in plans.items()}
        self.timeline = self.drawn_timeline = simulate(self.plan, step)
        self.title = f"{settings.model.label}, {format_ranks(ranks)}, {self.policy}"
        self._resources = RESOURCES if ranks > sizes.ranks_per_node else ONE_NODE
        self._passes = layer_passes(self.plan, self.timeline)
        self._is_measured = not step.can_split and step.loss_s is not None
        copies = None
        # Only Hecate fills the idle links; other policies send as many experts as they need.
        if settings.placement == "fssdp" and sizes.ep > 1:
            copies, self.drawn_timeline = _with_replicas(planned_job, planned, self.timeline)
        bound = planned_job.bound_s(plans.values())
        path = critical_path(self.plan, self.timeline)
        by_kind_s = Timeline(0, path, "predicted").totals_s()
        # Tasks of the path may run at the same time.
        at_work_s = {name: sum(end_s - start_s for start_s, end_s in busy_intervals(path)[name]) for name in RESOURCES}
        step_s = self.step_s[self.policy]
        self.facts: dict[str, Any] = {
            "model": vars(settings.model) | {"gate_options": dict(settings.model.gate_options)},
            "layout": {"ranks": ranks, **vars(sizes), "dp": ranks // sizes.mp},
            "machine": costs.machine,
            "poor_fits": costs.poor_fits,
            "outside_ranges": sizes_outside_ranges(settings, sizes, costs),
            "policy": self.policy,
            "step_s": step_s,
            "bound_s": bound,
            "tokens_per_s": number * planned_job.tokens / step_s,
            "micro_batches_per_step": number,
            "recomputed_s": number * planned_job.recomputed_pass(planned).end_s,
            "policies_s": self.step_s,
            "gap_to_bound": step_s / bound - 1,
            "micro_batches": {phase: self._micro_batches(phase) for phase in PHASES},
            "not_split": no_split_reason(settings),
            "followed": follows_plan(settings, sizes.ep, sizes.esp),
            "bucket_bytes": self.plan.largest_bucket,
            "weight_gradients_apart": any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute),
            "critical_path_s": dict(sorted(((k, s) for k, s in by_kind_s.items() if s), key=lambda item: -item[1])),
            "critical_path_by_resource_s": at_work_s,
            "busy_s": {name: self.drawn_timeline.busy_s(name) for name in RESOURCES},
            "exposed_gradients_s": self.timeline.end_s - self._passes[-1].end_s,
            "gradients_after_step_s": planned_job.gradients_s,
            "layers": self._layers(),
            "plan": str(self.plan),
            "fingerprint": self.plan.fingerprint,
            "copies": copies,
        }
        if job is not None:
            replicas = None
            if sizes.ep > 1 and COMPARED in plans:
                replicas, _ = _with_replicas(planned_job, plans[COMPARED], simulate(*plans[COMPARED]))
            self.facts["answer"] = answer_facts(planned_job, plans, self.policy, job, replicas, compared)

    def _micro_batches(self, phase: str) -> list[int]:
        attention = [task for task in self.plan.compute if task.kind == TaskKind.ATTENTION and task.phase == phase]
        numbers = Counter(task.layer for task in attention)
        return [numbers[layer] for layer in sorted({layer_pass.layer for layer_pass in self._passes})]

    def _layers(self) -> list[dict[str, Any]]:
        layers: dict[int, dict[str, Any]] = {}
        for layer_pass in self._passes:
            layers.setdefault(layer_pass.layer, {"layer": layer_pass.layer})[layer_pass.phase] = {
                "chunks": layer_pass.degree,
                "seconds": layer_pass.seconds,
                "bound_by": layer_pass.bound_by,
                "critical_path_s": layer_pass.critical_s,
                "gradient_all_reduce_s": layer_pass.gradient_s,
            }
        return [layers[layer] for layer in sorted(layers)]

    def print(self) -> None:
        facts, console = self.facts, make_console()
        ranks, per_node, ep, esp, mp, dp = facts["layout"].values()
        settings = self._job.settings
        model = settings.model
        console.print(describe(model), markup=False)
        console.print(f"{format_ranks(ranks)} ({ranks // per_node} × {per_node}): ep {ep}, esp {esp}, mp {mp}, dp {dp}")
        number = facts["micro_batches_per_step"]
        batches = f"{number} micro-batches of " if number > 1 else ""
        console.print(
            f"per replica and step {batches}{model.batch} × {model.seq_len} tokens, {settings.dtype}: "
            f"{facts['tokens_per_s']:,.0f} tokens/s by {self.policy}"
        )
        console.print(describe_costs(self._job.costs), markup=False, soft_wrap=True)
        if outside := facts["outside_ranges"]:
            cure = "; run fusedmoe trace first, which measures them" if self._can_trace else ""
            text = f"costs outside the measured range, extrapolated: {outside}{cure}"
            console.print(printable(text), markup=False, soft_wrap=True)
        if (answer := facts.get("answer")) is not None:
            print_answer(console, answer)
            console.print(self._policies_table())
            return
        console.print(self._passes_table())
        console.print(self._describe_splitting(), markup=False, soft_wrap=True)
        if not facts["followed"]:
            console.print("no communication between ranks: training ignores --schedule")
        if facts["copies"] is not None:
            console.print(_describe_replicas(facts["copies"], facts["step_s"]), soft_wrap=True)
        if facts["exposed_gradients_s"] > 0:
            console.print(
                f"after the last pass: {format_ms(facts['exposed_gradients_s'])} of exposed gradient all-reduce"
            )
        if facts["recomputed_s"]:
            console.print(f"forward passes run again by activation checkpoints: {format_ms(facts['recomputed_s'])}")
        elif settings.recompute and self._is_measured:
            console.print("recomputed communication and experts are not in measured step times")
        after_s = dict(zip(("embedding, head", "experts"), self._job.gradients_s.values(), strict=True))
        if named := ", ".join(f"{part} {format_ms(seconds)}" for part, seconds in after_s.items() if seconds):
            console.print(f"gradients reduced after the step, by every policy: {named}", soft_wrap=True)
        for title, name, end_s in (
            ("critical path", "critical_path_s", self.timeline.end_s),
            ("critical path by resource", "critical_path_by_resource_s", self.timeline.end_s),
            ("utilization", "busy_s", self.drawn_timeline.end_s),
        ):
            shares = {self._resources.get(part, part): seconds / end_s for part, seconds in facts[name].items()}
            console.print(f"{title}: {', '.join(f'{part} {share:.0%}' for part, share in shares.items() if share > 0)}")
        console.print(self._policies_table())

    def _describe_splitting(self) -> str:
        facts = self.facts
        if facts["not_split"] is not None:
            return f"layers are not split into micro-batches: {facts['not_split']}"
        words = []
        for phase, each in facts["micro_batches"].items():
            alike = [(number, len(list(layers))) for number, layers in groupby(each)]
            numbers = [str(number) if len(alike) == 1 else f"{number} ({n} layers)" for number, n in alike]
            words.append(f"{phase} {', '.join(numbers)}")
        size = facts["bucket_bytes"]
        buckets = "no gradients to reduce" if size is None else f"gradients in buckets of up to {size / 2**20:.3g} MiB"
        apart = "separate tasks" if facts["weight_gradients_apart"] else "part of the backward pass"
        return f"micro-batches: {'; '.join(words)}; {buckets}; weight gradients are {apart}"

    def _passes_table(self) -> Table:
        table = make_table(
            f"{self.policy}: {format_ms(self.step_s[self.policy])} per step",
            ("layer", "pass", "chunks", "time", "share of critical path", "bound by"),
            right=("layer", "chunks", "time"),
        )
        for (phase, degree, bound_by, time), group in groupby(
            self._passes,
            key=lambda layer_pass: (
                layer_pass.phase,
                layer_pass.degree,
                layer_pass.bound_by,
                format_ms(layer_pass.seconds),
            ),
        ):
            alike = list(group)
            layers = sorted(layer_pass.layer for layer_pass in alike)
            shares = {
                name: alike[0].critical_s[resource] / alike[0].seconds for resource, name in self._resources.items()
            }
            named = [
                f"{name.removeprefix('links ').removeprefix('of ')} {share:.0%}"
                for name, share in shares.items()
                if share >= 0.005
            ]
            span = f"{layers[0]}–{layers[-1]}" if len(layers) > 1 else str(layers[0])
            table.add_row(span, phase, str(degree), time, ", ".join(named), self._resources[bound_by])
        return table

    def _policies_table(self) -> Table:
        columns = ("policy", "step time", "over bound", "speed-up over sequential")
        table = make_table("predicted step time of every policy", columns, right=columns[1:])
        sequential_s, bound = self.step_s["sequential"], self.facts["bound_s"]
        for name, seconds in sorted(self.step_s.items(), key=lambda item: -item[1]):
            over = max(0.0, seconds / bound - 1)
            style = "bold" if name == self.policy else None
            table.add_row(name, format_ms(seconds), f"{over:.1%}", f"{sequential_s / seconds:.2f} ×", style=style)
        table.add_row("bound", format_ms(bound), "", f"{sequential_s / bound:.2f} ×")
        return table


def _with_replicas(job: PlannedJob, planned: PlanWithCosts, timeline: Timeline) -> tuple[dict[str, Any], Timeline]:
    """Add sparse collectives of expert replicas to a plan and simulate it. Return facts and the new timeline.

    Facts: seconds of each layer that the inter-node link can hide (`hidden_s`), bytes of one expert (`expert_bytes`),
    experts sent per layer (`overlap`), seconds to send them (`seconds`), and the new step time (`step_s`).
    """
    settings = job.settings
    again, layers = settings.rematerialise, settings.model.num_moe_layers
    hidden_L = hidden_s(timeline, layers, again=again)
    nbytes, bytes_per_s = expert_bytes(settings, job.sizes), job.costs.line("all-to-all/ep").per_s
    overlap = settings.placement_overlap
    if overlap is None:
        assert settings.model.experts is not None
        overlap = min(settings.model.experts, overlap_degree(statistics.mean(hidden_L), nbytes, bytes_per_s))
    seconds = overlap * nbytes / bytes_per_s
    # A replica that does not fit its gap delays later tasks.
    copied = simulate(*with_sparse_collectives(*planned, [seconds] * layers, again=again))
    step_s = job.step_s(planned) + job.micro_batches * (copied.end_s - timeline.end_s)
    facts = {"hidden_s": list(hidden_L), "expert_bytes": nbytes, "overlap": overlap, "seconds": seconds}
    return facts | {"step_s": step_s}, copied


def _describe_replicas(copies: dict[str, Any], step_s: float) -> str:
    longer = copies["step_s"] / step_s - 1
    most = "not at all" if longer < 0.0005 else f"by {longer:.1%}"
    experts = f"{copies['overlap']} expert{'s' * (copies['overlap'] != 1)}"
    return (
        f"expert replicas: the links between nodes hide {1e3 * statistics.mean(copies['hidden_s']):.3g} ms per layer; "
        f"sending {experts} of {copies['expert_bytes'] / 2**20:.3g} MiB per layer lengthens the step {most}"
    )


def run(arguments: argparse.Namespace) -> int:
    launched, changes = Launch.from_environment(), given_settings(arguments)
    settings, job = Settings(schedule="auto"), None
    if arguments.scale and arguments.ranks is not None:
        raise ConfigError(f"--ranks {arguments.ranks}: --scale chooses the numbers of ranks; leave out --ranks")
    if arguments.config is not None:
        if "model" in changes:
            raise ConfigError("--config and --model both describe the model; leave one out")
        job = read_job(arguments.config.expanduser())
        job, arguments.ranks = job.one_stage(arguments.ranks, changes.get("model.layers"))
        settings = settings.changed({"model": job.model, **job.settings})
    settings = settings.changed(changes)
    if job is None:
        settings.model.require_byte_vocabulary()
    if settings.schedule == "off":
        raise ConfigError("--schedule off has no plan; use auto or a policy")
    machine = _find_machine(arguments, settings)
    if machine is not None:
        # The machine has them.
        settings = settings.changed({"ranks_per_node": None, "dtype": changes.get("dtype", machine.dtype)})
        if settings.dtype != machine.dtype:
            raise ConfigError(f"--dtype {settings.dtype}: this machine model supports {machine.dtype} only")
        if arguments.scale:
            return _scale(arguments, launched, settings, machine)
    elif job is not None and launched.ranks == 1 and arguments.costs is None and arguments.testbed is None:
        raise ConfigError(
            "--config: costs of one rank are no costs of a job; pass --machine NAME, --costs FILE or run under torchrun"
        )
    launch, settings = _resolve_launch(arguments, launched, settings, machine)
    compared, meta = 0, None
    if job is not None and machine is not None and None in (settings.ep, settings.esp, settings.mp):
        meta = make_meta_model(settings)
        found = layouts(settings, launch.ranks, machine, job, meta)
        compared, settings = 0 if settings.ep else len(found), chosen_settings(settings, found)
    sizes, settings = resolve_sizes(settings, launch)
    costs = _find_costs(arguments, launched, settings, sizes, machine)
    if launched.rank > 0:
        return 0
    can_trace = job is None and machine is None and arguments.costs is None and arguments.testbed is None
    number = 1 if job is None else job.micro_batches(settings.model.batch, launch.ranks // sizes.mp)
    meta = meta or make_meta_model(settings)
    planned = PlannedJob(settings, launch.ranks, sizes, costs, meta, machine, job is not None, number)
    report = PlanReport(planned, again=arguments.again, job=job, compared=compared, can_trace=can_trace)
    if arguments.png is not None:
        draw(report.drawn_timeline, arguments.png, title=report.title)
    if arguments.json:
        figures = {} if machine is None else {"figures": figures_dict(machine)}
        print(json.dumps(report.facts | figures, indent=2))
        return 0
    report.print()
    if machine is not None and job is None:
        make_console().print(figures_table(machine))
    return 0


def _find_machine(arguments: argparse.Namespace, settings: Settings) -> Machine | None:
    """Return the --machine with the values that flags give; None without --machine."""
    if arguments.machine is None:
        needed = {"scale": False, "spread": None, "nics": None, "nic_bandwidth": None}
        if given := [name for name, unset in needed.items() if getattr(arguments, name) != unset]:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --machine NAME")
        return None
    gbit_s = arguments.nic_bandwidth
    return MACHINES[arguments.machine].with_values(
        ranks_per_node=settings.ranks_per_node,
        cards=arguments.nics,
        card_bytes_per_s=None if gbit_s is None else gbit_s * 1e9 / 8,
        spread=arguments.spread,
    )


def _scale(arguments: argparse.Namespace, launched: Launch, settings: Settings, machine: Machine) -> int:
    if launched.rank > 0:
        return 0
    with ProgressBar("planning") as bar:
        scale = Scale(settings, machine, arguments.machine, again=arguments.again, show=bar.show)
    if arguments.png is not None:
        scale.figure().savefig(arguments.png)
    if arguments.json:
        print(json.dumps(scale.facts, indent=2))
    else:
        scale.print(make_console())
    return 0


def _resolve_launch(
    arguments: argparse.Namespace, launched: Launch, settings: Settings, machine: Machine | None
) -> tuple[Launch, Settings]:
    ranks, per_node = arguments.ranks, settings.ranks_per_node
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if arguments.testbed is not None:
        testbed = TESTBEDS[arguments.testbed]
        ranks, per_node = ranks or testbed.nodes * testbed.gpus, per_node or testbed.gpus
    elif machine is not None:
        if ranks is None:
            raise ConfigError("--machine needs --ranks N or --scale")
        per_node = machine.node(ranks)
    elif arguments.costs is None:
        if ranks not in (None, launched.ranks):
            raise ConfigError(
                f"cannot measure costs of {ranks} ranks on {launched.ranks}: start as many with torchrun, or use "
                "--costs FILE, --testbed A|B or --machine NAME"
            )
        return launched, settings
    elif ranks is None and launched.ranks == 1:
        raise ConfigError("--costs needs --ranks N, and --ranks-per-node for more than one node")
    ranks = ranks or launched.ranks
    return Launch(0, ranks, 0, per_node or ranks), settings.changed({"ranks_per_node": per_node})


def _find_costs(
    arguments: argparse.Namespace, launched: Launch, settings: Settings, sizes: Sizes, machine: Machine | None
) -> CostModel:
    if machine is not None:
        return machine_costs(machine, settings, sizes, arguments.ranks)
    if arguments.testbed is not None:
        return TESTBEDS[arguments.testbed].costs
    if arguments.costs is not None:
        return read_costs(arguments.costs)
    with command_group(settings, launched, sizes, "fusedmoe plan") as (topology, device):
        costs = cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
        return with_cached_tasks(costs, settings, topology, device)
