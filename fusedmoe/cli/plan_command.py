"""Show which schedule a model gets, and why.

Plans a training step of a model on a layout of ranks, and says why it is planned so: for each
layer in how many chunks it goes forward and backward, what its passes wait for, what every
policy would take, and the bound that no schedule beats.

Where the gate allows it, whole layers are split as well: micro-batches of equally many samples go
from layer to layer, gradient buckets of one size (S_p) beside them, weight gradients where
there is time. Such plans are searched once, which may take a minute for many layers, and kept in
$FUSEDMOE_CACHE, or else ~/.cache/fusedmoe.

Only what is on the critical path makes a step longer. A layer's pass is bound by what holds
most of the path while it lasts: computation, the links between nodes (dispatch, combine,
gradient all-reduce) or the links inside a node (all-gather, reduce-scatter).

What is printed is what fusedmoe train plans from the same costs, and nothing that it could not run:
operations that send and receive rows while they compute are for layers by themselves.

With --placement fssdp, how many experts may travel for each layer while the links between nodes have
nothing else to do (Hecate's overlap degree); the picture then has their sparse collectives, SAG and SRS.

Costs are measured under torchrun (or found, see fusedmoe profile --help), read from a file,
those of a published testbed, or a model of a machine; with the last three one process plans for
any number of ranks. What the model's own steps take is among them once fusedmoe train or trace has
measured that, and in the costs.json of a run.

--machine NAME takes data sheets and published measurements, whose sources are printed, and says
what collectives take on so many ranks of it by the model in fusedmoe/schedule/machines.py; ranks wait for
the slowest of them. --scale does so for 8 to 4,096 ranks: what the schedule is worth there, what
communication stays exposed and which chunks are chosen. Such numbers are for comparing machines
and layouts; on a machine that is there, measure.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from fusedmoe.cli.job import Launch, Sizes, in_words, ranks_of, settle
from fusedmoe.cli.scale import Scale, figures_dict, figures_table, machine_job
from fusedmoe.cli.settings import (
    STEP_FLAGS,
    Commands,
    Settings,
    add_flags,
    add_parser,
    changes_of,
    describe,
    picture_to_write,
    read_costs,
)
from fusedmoe.cli.step_plans import (
    compute_dtype,
    expert_bytes,
    follows_plan,
    kept_costs,
    make_console,
    make_table,
    plans_of,
    policy_followed,
    why_not_split,
)
from fusedmoe.errors import ConfigError, printable
from fusedmoe.placement.hecate import overlap_degree
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule import (
    POLICIES,
    TESTBEDS,
    CostModel,
    Costs,
    Plan,
    Timeline,
    draw,
    makespan,
    simulate,
    with_sparse,
)
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.draw import ms
from fusedmoe.schedule.machines import MACHINES, Machine
from fusedmoe.schedule.policies.sparse_collectives import hidden_s
from fusedmoe.schedule.simulate import at_work, critical_path, stretches
from fusedmoe.schedule.task import PHASES, WEIGHT_GRADIENTS, TaskKind

RESOURCES = {"compute": "computation", "inter": "links between nodes", "intra": "links inside the node"}


class Report:
    """A plan for a model on a layout, and its reasons.

    It plans by every policy that training could follow, and reports on that of the settings; where training follows
    none, on tasks one after the other.

    Attributes:
        policy, plan: of the settings.   step_s: seconds of a step by each policy.
        timeline: of the plan, simulated.   drawn: the same, with copies of experts under a placement that has any.
        facts: everything that is reported, in plain types, times in seconds.
    """

    def __init__(
        self, settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, again: bool = False
    ) -> None:
        self.policy = policy_followed(settings, sizes)
        plans = plans_of(settings, launch, sizes, costs, again=again)
        self.plan, step = plans[self.policy]
        self.step_s = {name: makespan(*planned) for name, planned in plans.items()}
        self.timeline = self.drawn = simulate(self.plan, step)
        self.title = f"{settings.model.name}, {in_words(launch.ranks)}, {self.policy}"
        self._model, self._passes = settings.model, stretches(self.plan, self.timeline)
        copies = None
        # Hecate's placement alone moves as much as links have time for; others move as much as they need.
        if settings.placement == "fssdp" and sizes.ep > 1:
            copies, self.drawn = _with_copies(settings, sizes, costs, self.plan, step, self.timeline)
        # Policies for layers and for whole blocks have costs of their own: the bound is that of both.
        bound = min(map(bound_s, {id(planned.costs): planned.costs for planned in plans.values()}.values()))
        path = critical_path(self.plan, self.timeline)
        by_kind_s = Timeline(0, path, "predicted").totals_s()
        # Several tasks of the path may run at once; each moment counts once, for what is at work.
        at_work_s = {name: sum(end_s - start_s for start_s, end_s in at_work(path)[name]) for name in RESOURCES}
        step_s = self.step_s[self.policy]
        self.facts: dict[str, Any] = {
            "model": vars(settings.model) | {"gate_options": dict(settings.model.gate_options)},
            "layout": {"ranks": launch.ranks, **vars(sizes), "dp": launch.ranks // sizes.mp},
            "machine": costs.machine,
            "policy": self.policy,
            "step_s": step_s,
            "bound_s": bound,
            "policies_s": self.step_s,
            "gap_to_bound": step_s / bound - 1,
            "micro_batches": {phase: self._micro_batches(phase) for phase in PHASES},
            "not_split": why_not_split(settings),
            "followed": follows_plan(settings, sizes.ep, sizes.esp),
            "bucket_bytes": self.plan.largest_bucket,
            "weight_gradients_apart": any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute),
            "critical_path_s": dict(sorted(((k, s) for k, s in by_kind_s.items() if s), key=lambda item: -item[1])),
            "critical_path_by_resource_s": at_work_s,
            "busy_s": {name: self.drawn.busy_s(name) for name in RESOURCES},
            "exposed_gradients_s": self.timeline.end_s - self._passes[-1].end_s,
            "layers": self._layers(),
            "plan": str(self.plan),
            "fingerprint": self.plan.fingerprint,
            "copies": copies,
        }

    def _micro_batches(self, phase: str) -> list[int]:
        """Returns each layer's number of micro-batches; 1 where the layer is not split."""
        attention = [task for task in self.plan.compute if task.kind == TaskKind.ATTENTION and task.phase == phase]
        numbers = Counter(task.layer for task in attention)
        return [numbers[layer] for layer in sorted({stretch.layer for stretch in self._passes})]

    def _layers(self) -> list[dict[str, Any]]:
        layers: dict[int, dict[str, Any]] = {}
        for stretch in self._passes:
            layers.setdefault(stretch.layer, {"layer": stretch.layer})[stretch.phase] = {
                "chunks": stretch.degree,
                "seconds": stretch.seconds,
                "bound_by": stretch.bound_by,
                "critical_path_s": stretch.waits_s,
                "gradient_all_reduce_s": stretch.gradient_s,
            }
        return [layers[layer] for layer in sorted(layers)]

    def print(self) -> None:
        """Prints tables of the passes and of the policies, and what they mean in words."""
        facts, console = self.facts, make_console()
        ranks, per_node, ep, esp, mp, dp = facts["layout"].values()
        console.print(describe(self._model), markup=False)
        console.print(f"{in_words(ranks)} ({ranks // per_node} × {per_node}): ep {ep}, esp {esp}, mp {mp}, dp {dp}")
        console.print(printable(f"costs: {facts['machine'] or 'of an unnamed machine'}"), markup=False)
        console.print(self._passes_table())
        console.print(self._splitting(), markup=False, soft_wrap=True)
        if not facts["followed"]:
            console.print("no rows travel: training takes one thing after the other, whatever --schedule says")
        if facts["copies"] is not None:
            console.print(_copies_in_words(facts["copies"], facts["step_s"]), soft_wrap=True)
        if facts["exposed_gradients_s"] > 0:
            console.print(f"after the last pass: {ms(facts['exposed_gradients_s'])} of gradients that nothing hides")
        for title, name, end_s in (
            ("critical path", "critical_path_s", self.timeline.end_s),
            ("on the path", "critical_path_by_resource_s", self.timeline.end_s),
            ("in use", "busy_s", self.drawn.end_s),
        ):
            shares = {RESOURCES.get(part, part): seconds / end_s for part, seconds in facts[name].items()}
            console.print(f"{title}: {', '.join(f'{part} {share:.0%}' for part, share in shares.items() if share > 0)}")
        console.print(self._policies_table())

    def _splitting(self) -> str:
        """Says what is split, into how many micro-batches and buckets."""
        facts = self.facts
        if facts["not_split"] is not None:
            return f"chunks end with their layer: {facts['not_split']}"
        words = []
        for phase, each in facts["micro_batches"].items():
            alike = [(number, len(list(layers))) for number, layers in groupby(each)]
            numbers = [str(number) if len(alike) == 1 else f"{number} ({n} layers)" for number, n in alike]
            words.append(f"{phase} {', '.join(numbers)}")
        size = facts["bucket_bytes"]
        buckets = "no gradients to reduce" if size is None else f"gradients in buckets of up to {size / 2**20:.3g} MiB"
        apart = "tasks of their own" if facts["weight_gradients_apart"] else "part of the backward pass"
        return f"micro-batches: {'; '.join(words)}; {buckets}; weight gradients are {apart}"

    def _passes_table(self) -> Table:
        """Makes the table of passes; layers whose rows would be the same share one."""
        table = make_table(
            f"{self.policy}: {ms(self.step_s[self.policy])} a step",
            ("layer", "pass", "chunks", "time", "critical path while it lasts", "bound by"),
            right=("layer", "chunks", "time"),
        )
        for (phase, degree, bound_by, time), group in groupby(
            self._passes, key=lambda stretch: (stretch.phase, stretch.degree, stretch.bound_by, ms(stretch.seconds))
        ):
            alike = list(group)
            layers = sorted(stretch.layer for stretch in alike)
            shares = {name: alike[0].waits_s[resource] / alike[0].seconds for resource, name in RESOURCES.items()}
            named = [f"{name.removeprefix('links ')} {share:.0%}" for name, share in shares.items() if share >= 0.005]
            span = f"{layers[0]}–{layers[-1]}" if len(layers) > 1 else str(layers[0])
            table.add_row(span, phase, str(degree), time, ", ".join(named), RESOURCES[bound_by])
        return table

    def _policies_table(self) -> Table:
        columns = ("policy", "a step", "over the bound", "faster than sequential")
        table = make_table("what every policy would take", columns, right=columns[1:])
        sequential_s, bound = self.step_s["sequential"], self.facts["bound_s"]
        # Slowest first, the bound last: the eye falls on what is left to gain.
        for name, seconds in sorted(self.step_s.items(), key=lambda item: -item[1]):
            over = max(0.0, seconds / bound - 1)
            style = "bold" if name == self.policy else None
            table.add_row(name, ms(seconds), f"{over:.1%}", f"{sequential_s / seconds:.2f} ×", style=style)
        table.add_row("bound", ms(bound), "", f"{sequential_s / bound:.2f} ×")
        return table


def _with_copies(
    settings: Settings, sizes: Sizes, model: CostModel, plan: Plan, costs: Costs, timeline: Timeline
) -> tuple[dict[str, Any], Timeline]:
    """Adds copies of experts to a plan, whose `timeline` has none.

    Returns:
        The facts, and the timeline of the step in which every layer has them: for how long the link between nodes
        hides a sparse collective of each layer (`hidden_s`), an expert's bytes as they travel, how many experts travel
        for each layer (`overlap`, t), and what a sparse collective of so many takes (`seconds`).
    """
    again, layers = settings.rematerialise, len({task.layer for task in plan if task.layer is not None})
    # The gaps of the link between nodes, layer by layer, as Hecate fills them.
    hidden_L = hidden_s(timeline, layers, again=again)
    nbytes, bytes_per_s = expert_bytes(settings, sizes), model.line("all-to-all/ep").per_s
    overlap = settings.placement_overlap
    if overlap is None:
        assert settings.model.experts is not None
        overlap = min(settings.model.experts, overlap_degree(statistics.mean(hidden_L), nbytes, bytes_per_s))
    seconds = overlap * nbytes / bytes_per_s
    # Simulated anew: a copy that does not fit its gap delays what follows it.
    copied = simulate(*with_sparse(plan, costs, [seconds] * layers, again=again))
    facts = {"hidden_s": list(hidden_L), "expert_bytes": nbytes, "overlap": overlap, "seconds": seconds}
    return facts | {"step_s": copied.end_s}, copied


def _copies_in_words(copies: dict[str, Any], step_s: float) -> str:
    longer = copies["step_s"] / step_s - 1
    most = "not at all" if longer < 0.0005 else f"by {longer:.1%}"
    experts = f"{copies['overlap']} expert{'s' * (copies['overlap'] != 1)}"
    return (
        f"copies of experts: the links between nodes hide {1e3 * statistics.mean(copies['hidden_s']):.3g} ms a layer; "
        f"sending {experts} of {copies['expert_bytes'] / 2**20:.3g} MiB for each makes the step longer {most}"
    )


EXAMPLES = """\
examples:
  8 nodes of 4 GPUs as in the FSMoE paper:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B
  how many chunks a longer sequence gets there, with a picture of the step:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B --seq-len 4096 --png step.png
  a cluster that was measured before, from anywhere:
    fusedmoe plan --model Mixtral-7B --costs costs.json --ranks 32 --ranks-per-node 8
  FlowMoE's plan of its own model, beside all others:
    fusedmoe plan --model BERT-Large-MoE --testbed A --schedule flowmoe
  for how many copies of experts there is time:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B --placement fssdp
  a machine that is not there, and what becomes of it on up to 4,096 ranks:
    fusedmoe plan --model Mixtral-7B --machine dgx-h100 --ranks 256
    fusedmoe plan --model DeepSeek-V3 --machine gb200-nvl72 --scale --png scale.png
  this machine, measured now or before:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe plan --ranks-per-node 2
"""


def add_command(commands: Commands) -> None:
    """Adds `plan` to the commands of `fusedmoe`."""
    policies = "\n".join(f"  {name:15}{policy.description}" for name, policy in POLICIES.items())
    machines = "\n".join(f"  {name:15}{machine.words}" for name, machine in MACHINES.items())
    head = "policies (--schedule; auto: here joint, in train the fastest as measured)"
    epilog = f"{EXAMPLES}\n{head}:\n{policies}\n\nmachines:\n{machines}"
    parser = add_parser(commands, "plan", __doc__, epilog, run)
    group = parser.add_argument_group("costs")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, metavar="FILE", help="of fusedmoe profile --json, or one that it kept")
    source.add_argument("--testbed", choices=TESTBEDS, help="of the FSMoE paper: A, 6 nodes of 8; B, 8 nodes of 4")
    source.add_argument("--machine", choices=MACHINES, metavar="NAME", help="of the list below, by a model of it")
    group.add_argument(
        "--spread",
        type=float,
        metavar="X",
        help="how much ranks of the --machine differ: the standard deviation of what computes, over its mean; "
        "fusedmoe trace measures it (default: the machine's)",
    )
    group.add_argument("--scale", action="store_true", help="8 to 4,096 ranks of the --machine")
    group.add_argument("--ranks", type=int, metavar="N", help="plan for so many ranks (default: the launcher's)")
    group.add_argument("--again", action="store_true", help="search for plans also where that was done before")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON, with the plan's text, instead of tables")
    output.add_argument(
        "--png", type=picture_to_write, metavar="FILE", help="the step, or the scale, as .png, .svg or .pdf"
    )
    moving = ("--placement", "--placement-overlap", "--rematerialise")
    add_flags(parser, (*STEP_FLAGS, *moving), Settings(schedule="auto"))


def run(arguments: argparse.Namespace) -> int:
    """Plans the step and prints it; returns the exit code."""
    running, changes = Launch.from_environment(), changes_of(arguments)
    settings = Settings(schedule="auto").changed(changes)
    if settings.schedule == "off":
        raise ConfigError("--schedule off is no plan: the layers work without one; choose auto or a policy")
    if arguments.machine is None and (arguments.scale or arguments.spread is not None):
        raise ConfigError("--scale and --spread are for a machine of the list: give --machine NAME")
    machine = None if arguments.machine is None else MACHINES[arguments.machine]
    if machine is not None:
        machine = machine if arguments.spread is None else machine.with_spread(arguments.spread)
        settings = settings if "dtype" in changes else settings.changed({"dtype": machine.dtype})
        if arguments.scale:
            return _scale(arguments, running, settings, machine)
    launch, settings = _planned_for(arguments, running, settings)
    sizes, settings = settle(settings, launch)
    costs = _costs(arguments, running, settings, sizes, machine)
    if running.rank > 0:
        return 0
    report = Report(settings, launch, sizes, costs, again=arguments.again)
    if arguments.png is not None:
        draw(report.drawn, arguments.png, title=report.title)
    if arguments.json:
        figures = {} if machine is None else {"figures": figures_dict(machine)}
        print(json.dumps(report.facts | figures, indent=2))
        return 0
    report.print()
    if machine is not None:
        make_console().print(figures_table(machine))
    return 0


def _scale(arguments: argparse.Namespace, running: Launch, settings: Settings, machine: Machine) -> int:
    if arguments.ranks is not None:
        raise ConfigError(f"--ranks {arguments.ranks}: --scale goes through numbers of ranks by itself")
    if running.rank > 0:
        return 0
    with WorkBar("planning") as bar:
        scale = Scale(settings, machine, arguments.machine, again=arguments.again, show=bar.show)
    if arguments.png is not None:
        scale.draw(arguments.png)
    if arguments.json:
        print(json.dumps(scale.facts, indent=2))
    else:
        scale.print(make_console())
    return 0


def _planned_for(arguments: argparse.Namespace, running: Launch, settings: Settings) -> tuple[Launch, Settings]:
    """Returns the ranks that the plan is for, those that run unless others are named, and the settings for them."""
    ranks, per_node = arguments.ranks, settings.ranks_per_node
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if arguments.testbed is not None:
        testbed = TESTBEDS[arguments.testbed]
        # The paper's cluster as a whole unless --ranks asks for a part of it.
        ranks, per_node = ranks or testbed.nodes * testbed.gpus, per_node or testbed.gpus
    elif arguments.machine is not None:
        if ranks is None:
            raise ConfigError("--machine needs --ranks N to plan for, or --scale")
        per_node = per_node or MACHINES[arguments.machine].node(ranks)
    elif arguments.costs is None:
        if ranks not in (None, running.ranks):
            raise ConfigError(
                f"what {ranks} ranks take cannot be measured on {running.ranks}: start as many under torchrun, or give "
                "--costs FILE, --testbed A|B or --machine NAME"
            )
        return running, settings
    elif ranks is None and running.ranks == 1:
        raise ConfigError("--costs needs --ranks N to plan for, and --ranks-per-node unless they share a node")
    ranks = ranks or running.ranks
    return Launch(0, ranks, 0, per_node or ranks), settings.changed({"ranks_per_node": per_node})


def _costs(
    arguments: argparse.Namespace, running: Launch, settings: Settings, sizes: Sizes, machine: Machine | None
) -> CostModel:
    if machine is not None:
        return machine_job(machine, settings, arguments.ranks)[1]
    if arguments.testbed is not None:
        return TESTBEDS[arguments.testbed].costs
    if arguments.costs is not None:
        return read_costs(arguments.costs)
    # Nothing is known of this machine: all ranks measure it, or read what they measured before.
    with ranks_of(settings, running, sizes, "fusedmoe plan") as (topology, device):
        costs = cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
        return kept_costs(costs, settings, topology, device)
