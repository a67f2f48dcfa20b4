"""`fusedmoe plan`: the schedule of a model's training step, and the reasons: its passes and what they wait for.

Under Hecate's placement it also plans copies of experts: how many may travel for a layer, and the step with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusedmoe.cli.job import Launch, Sizes, choose_device, choose_sizes, make_topology, process_group
from fusedmoe.cli.scale import Scale, figures_dict, figures_table, machine_job
from fusedmoe.cli.settings import Settings, add_flags, add_parser, changes_of, describe, picture_to_write, read_costs
from fusedmoe.cli.step_plans import (
    compute_dtype,
    expert_bytes,
    follows_plan,
    kept_costs,
    plans_of,
    policy_followed,
    why_not_split,
)
from fusedmoe.errors import ConfigError
from fusedmoe.measuring import WorkBar, cached_profile
from fusedmoe.plans import (
    MACHINES,
    PHASES,
    POLICIES,
    TESTBEDS,
    WEIGHT_GRADIENTS,
    CostModel,
    Costs,
    Machine,
    Plan,
    TaskKind,
    Timeline,
    at_work,
    bound_s,
    critical_path,
    draw,
    hidden_s,
    makespan,
    overlap_degree,
    simulate,
    stretches,
    with_sparse,
)

RESOURCES = {"compute": "computation", "inter": "links between nodes", "intra": "links inside the node"}


class Report:
    """A plan for a model on a layout, and its reasons.

    It plans by every policy that training could follow, and reports on that of the settings; where training follows
    none, on tasks one after the other.

    Attributes:
        machine: what the costs are of.   policy: by which the plan was made.   timeline: of the plan, simulated.
        passes: each layer's passes in the timeline.   step_s: seconds of a step by each policy.
        bound_s: seconds that no schedule beats.   refusal: why layers are not split; None where they can be.
        followed: training follows the plan.   copies: of experts, under a placement.
    Raises:
        ConfigError: the policy splits what cannot be split, or costs lack what the layout needs.
    """

    def __init__(
        self, settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, again: bool = False
    ) -> None:
        self.settings, self.launch, self.sizes, self.machine = settings, launch, sizes, costs.machine
        self.policy = policy_followed(settings, sizes)
        plans = plans_of(settings, launch, sizes, costs, again=again)
        self.plan, step = plans[self.policy]
        self.timeline = simulate(self.plan, step)
        self.passes = stretches(self.plan, self.timeline)
        self.step_s = {name: makespan(*planned) for name, planned in plans.items()}
        self.bound_s = min(map(bound_s, {id(planned.costs): planned.costs for planned in plans.values()}.values()))
        self.refusal, self.followed = why_not_split(settings), follows_plan(settings, sizes.ep, sizes.esp)
        self.copies = Copies.from_plan(settings, sizes, costs, self.plan, step, self.timeline)

    @property
    def title(self) -> str:
        return f"{self.settings.model.name}, {self.launch.ranks} ranks, {self.policy}"

    @property
    def drawn(self) -> Timeline:
        """The step, with copies of experts if there are any."""
        return self.timeline if self.copies is None else self.copies.timeline

    @property
    def rest_s(self) -> float:
        """Seconds after the last pass: gradients that nothing hides."""
        return self.timeline.end_s - self.passes[-1].end_s

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of the largest gradient all-reduce, S_p; None without any."""
        return max(
            (task.size or 0 for task in self.plan.inter if task.kind == TaskKind.GRADIENT_ALL_REDUCE), default=None
        )

    @property
    def weights_apart(self) -> bool:
        """Tells whether weight gradients are tasks of their own (W tasks)."""
        return any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute)

    def micro_batches(self, phase: str) -> list[int]:
        """Returns each layer's number of micro-batches; 1 where the layer is not split."""
        numbers = Counter(
            task.layer for task in self.plan.compute if task.kind == TaskKind.ATTENTION and task.phase == phase
        )
        return [numbers[layer] for layer in sorted({stretch.layer for stretch in self.passes})]

    def path_s(self) -> dict[str, float]:
        """Returns seconds of the critical path by kind of task, the longest first; without kinds that take no time."""
        path = Timeline(0, critical_path(self.plan, self.timeline), "predicted").totals_s()
        return dict(sorted(((kind, seconds) for kind, seconds in path.items() if seconds), key=lambda item: -item[1]))

    def path_by_resource_s(self) -> dict[str, float]:
        """Returns seconds of the critical path by the resource at work."""
        # Several tasks of the path may run at once; each moment counts once, for what is at work.
        spans = at_work(critical_path(self.plan, self.timeline))
        return {name: sum(end_s - start_s for start_s, end_s in spans[name]) for name in RESOURCES}

    def busy_s(self) -> dict[str, float]:
        """Returns seconds that each resource is in use, in the step as it is drawn."""
        return {name: self.drawn.busy_s(name) for name in RESOURCES}

    def as_dict(self) -> dict[str, Any]:
        """Returns everything in plain types, times in seconds."""
        layers: dict[int, dict[str, Any]] = {}
        for stretch in self.passes:
            layers.setdefault(stretch.layer, {"layer": stretch.layer})[stretch.phase] = {
                "chunks": stretch.degree,
                "seconds": stretch.seconds,
                "bound_by": stretch.bound_by,
                "critical_path_s": stretch.waits_s,
                "gradient_all_reduce_s": stretch.gradient_s,
            }
        return {
            "model": vars(self.settings.model) | {"gate_options": dict(self.settings.model.gate_options)},
            "layout": {"ranks": self.launch.ranks, **vars(self.sizes), "dp": self.launch.ranks // self.sizes.mp},
            "machine": self.machine,
            "policy": self.policy,
            "step_s": self.step_s[self.policy],
            "bound_s": self.bound_s,
            "policies_s": self.step_s,
            "gap_to_bound": self.step_s[self.policy] / self.bound_s - 1,
            "micro_batches": {phase: self.micro_batches(phase) for phase in PHASES},
            "not_split": self.refusal,
            "followed": self.followed,
            "bucket_bytes": self.bucket_bytes,
            "weight_gradients_apart": self.weights_apart,
            "critical_path_s": self.path_s(),
            "critical_path_by_resource_s": self.path_by_resource_s(),
            "busy_s": self.busy_s(),
            "exposed_gradients_s": self.rest_s,
            "layers": [layers[layer] for layer in sorted(layers)],
            "plan": str(self.plan),
            "fingerprint": self.plan.fingerprint,
            "copies": None if self.copies is None else self.copies.as_dict(),
        }

    def print(self) -> None:
        """Prints tables of the passes and of the policies, and what they mean in words."""
        console = _console()
        sizes, ranks = self.sizes, self.launch.ranks
        console.print(describe(self.settings.model), markup=False)
        nodes = f"{ranks // sizes.ranks_per_node} × {sizes.ranks_per_node}"
        console.print(f"{ranks} ranks ({nodes}): ep {sizes.ep}, esp {sizes.esp}, mp {sizes.mp}, dp {ranks // sizes.mp}")
        console.print(f"costs: {self.machine or 'of an unnamed machine'}", markup=False)
        console.print(self._passes_table())
        console.print(self._splitting(), soft_wrap=True)
        if not self.followed:
            console.print("no rows travel: training takes one thing after the other, whatever --schedule says")
        if self.copies is not None:
            console.print(self.copies.words(self.step_s[self.policy]), soft_wrap=True)
        if self.rest_s > 0:
            console.print(f"after the last pass: {_ms(self.rest_s)} of gradients that nothing hides")
        for what, seconds_by_name, end_s in (
            ("critical path", self.path_s(), self.timeline.end_s),
            ("on the path", _in_words(self.path_by_resource_s()), self.timeline.end_s),
            ("in use", _in_words(self.busy_s()), self.drawn.end_s),
        ):
            shares = [f"{name} {seconds / end_s:.0%}" for name, seconds in seconds_by_name.items() if seconds > 0]
            console.print(f"{what}: {', '.join(shares)}")
        console.print(self._policies_table())

    def _splitting(self) -> str:
        """Says what is split, into how many micro-batches and buckets."""
        if self.refusal is not None:
            return f"chunks end with their layer: {self.refusal}"
        words = []
        for phase in PHASES:
            alike = [(number, len(list(layers))) for number, layers in groupby(self.micro_batches(phase))]
            numbers = [str(number) if len(alike) == 1 else f"{number} ({n} layers)" for number, n in alike]
            words.append(f"{phase} {', '.join(numbers)}")
        size = self.bucket_bytes
        buckets = "no gradients to reduce" if size is None else f"gradients in buckets of up to {size / 2**20:.3g} MiB"
        apart = "tasks of their own" if self.weights_apart else "part of the backward pass"
        return f"micro-batches: {'; '.join(words)}; {buckets}; weight gradients are {apart}"

    def _passes_table(self) -> Table:
        """Makes the table of passes; layers whose rows would be the same share one."""
        table = Table(title=f"{self.policy}: {_ms(self.step_s[self.policy])} a step", title_justify="left")
        for column in ("layer", "pass", "chunks", "time", "critical path while it lasts", "bound by"):
            table.add_column(column, justify="right" if column in ("layer", "chunks", "time") else "left")
        for (phase, degree, bound_by, time), group in groupby(
            self.passes, key=lambda stretch: (stretch.phase, stretch.degree, stretch.bound_by, _ms(stretch.seconds))
        ):
            alike = list(group)
            layers = sorted(stretch.layer for stretch in alike)
            shares = {name: alike[0].waits_s[resource] / alike[0].seconds for resource, name in RESOURCES.items()}
            named = [f"{name.removeprefix('links ')} {share:.0%}" for name, share in shares.items() if share >= 0.005]
            span = f"{layers[0]}–{layers[-1]}" if len(layers) > 1 else str(layers[0])
            table.add_row(span, phase, str(degree), time, ", ".join(named), RESOURCES[bound_by])
        return table

    def _policies_table(self) -> Table:
        table = Table(title="what every policy would take", title_justify="left")
        for column in ("policy", "a step", "over the bound", "faster than sequential"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        # Slowest first, the bound last: the eye falls on what is left to gain.
        for name, seconds in sorted(self.step_s.items(), key=lambda item: -item[1]):
            over, faster = max(0.0, seconds / self.bound_s - 1), self.step_s["sequential"] / seconds
            style = "bold" if name == self.policy else None
            table.add_row(name, _ms(seconds), f"{over:.1%}", f"{faster:.2f} ×", style=style)
        table.add_row("bound", _ms(self.bound_s), "", f"{self.step_s['sequential'] / self.bound_s:.2f} ×")
        return table


def _in_words(seconds: dict[str, float]) -> dict[str, float]:
    return {RESOURCES[name]: value for name, value in seconds.items()}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


@dataclass(frozen=True)
class Copies:
    """Copies of experts in a planned step.

    Attributes:
        hidden_s: [L], for how long the link between nodes hides a sparse collective of each layer.
        expert_bytes: of one expert's parameters, as they travel.
        overlap: t, experts that travel for each layer: as many as the mean of `hidden_s` hides, or as asked for.
        seconds: of a sparse collective with so many.
        timeline: of the step in which every layer has them.
    """

    hidden_s: tuple[float, ...]
    expert_bytes: int
    overlap: int
    seconds: float
    timeline: Timeline

    @classmethod
    def from_plan(
        cls, settings: Settings, sizes: Sizes, model: CostModel, plan: Plan, costs: Costs, timeline: Timeline
    ) -> Copies | None:
        """Adds copies to a plan, whose `timeline` has none. None but under Hecate's placement: others have no more
        copies than links have time for."""
        if settings.placement != "fssdp" or sizes.ep == 1:
            return None
        again = settings.rematerialise
        layers = len({task.layer for task in plan if task.layer is not None})
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
        return cls(hidden_L, nbytes, overlap, seconds, copied)

    def as_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "timeline"}
        return own | {"hidden_s": list(self.hidden_s), "step_s": self.timeline.end_s}

    def words(self, step_s: float) -> str:
        """Says what copies cost, beside a step without them that takes `step_s` seconds."""
        longer = self.timeline.end_s / step_s - 1
        most = "not at all" if longer < 0.0005 else f"by {longer:.1%}"
        return (
            f"copies of experts: the links between nodes hide {1e3 * statistics.mean(self.hidden_s):.3g} ms a layer; "
            f"{self.overlap} experts of {self.expert_bytes / 2**20:.3g} MiB for each make the step longer {most}"
        )


SUMMARY = "show which schedule a model gets, and why"

DESCRIPTION = """\
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

_FLAGS = (
    *("--batch", "--seq-len", "--dtype", "--layers", "--model-dim", "--heads", "--kv-heads"),
    *("--expert", "--hidden", "--experts", "--experts-per-rank", "--moe-every", "--k", "--capacity-factor"),
    *("--gate", "--order", "--ranks-per-node", "--ep", "--esp", "--mp", "--wire-dtype", "--schedule", "--device"),
    *("--placement", "--placement-overlap", "--rematerialise", "--timeout"),
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the commands of `fusedmoe`."""
    policies = "\n".join(f"  {name:15}{policy.description}" for name, policy in POLICIES.items())
    machines = "\n".join(f"  {name:15}{machine.words}" for name, machine in MACHINES.items())
    head = "policies (--schedule; auto: here joint, in train the fastest as measured)"
    epilog = f"{EXAMPLES}\n{head}:\n{policies}\n\nmachines:\n{machines}"
    parser = add_parser(commands, "plan", SUMMARY, DESCRIPTION, epilog, run)
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
    add_flags(parser, _FLAGS, Settings(schedule="auto"))


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
    sizes = choose_sizes(settings, launch)
    settings = settings.changed({"model": settings.model.with_experts(launch.ranks, sizes.ep)})
    costs = _costs(arguments, running, settings, sizes, machine)
    if running.rank > 0:
        return 0
    report = Report(settings, launch, sizes, costs, again=arguments.again)
    if arguments.png is not None:
        draw(report.drawn, arguments.png, title=report.title)
    if arguments.json:
        figures = {} if machine is None else {"figures": figures_dict(machine)}
        print(json.dumps(report.as_dict() | figures, indent=2))
        return 0
    report.print()
    if machine is not None:
        _console().print(figures_table(machine))
    return 0


def _scale(arguments: argparse.Namespace, running: Launch, settings: Settings, machine: Machine) -> int:
    if arguments.ranks is not None:
        raise ConfigError(f"--ranks {arguments.ranks}: --scale goes through numbers of ranks by itself")
    if running.rank > 0:
        return 0
    with WorkBar("planning") as bar:
        scale = Scale.simulated(settings, machine, arguments.machine, again=arguments.again, show=bar.show)
    if arguments.png is not None:
        scale.draw(arguments.png)
    if arguments.json:
        print(json.dumps(scale.as_dict(), indent=2))
    else:
        scale.print(_console())
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _planned_for(arguments: argparse.Namespace, running: Launch, settings: Settings) -> tuple[Launch, Settings]:
    """Returns the ranks that the plan is for, those that run unless others are named, and the settings for them."""
    ranks = arguments.ranks
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if arguments.testbed is not None:
        testbed = TESTBEDS[arguments.testbed]
        # The paper's cluster as a whole unless --ranks asks for a part of it.
        ranks = ranks or testbed.nodes * testbed.gpus
        settings = settings.changed({"ranks_per_node": settings.ranks_per_node or testbed.gpus})
    elif arguments.machine is not None:
        if ranks is None:
            raise ConfigError("--machine needs --ranks N to plan for, or --scale")
        settings = settings.changed(
            {"ranks_per_node": settings.ranks_per_node or MACHINES[arguments.machine].node(ranks)}
        )
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
    return Launch(0, ranks, 0, settings.ranks_per_node or ranks), settings


def _costs(
    arguments: argparse.Namespace, running: Launch, settings: Settings, sizes: Sizes, machine: Machine | None
) -> CostModel:
    if machine is not None:
        return machine_job(machine, settings, arguments.ranks)[1]
    if arguments.testbed is not None:
        return TESTBEDS[arguments.testbed].costs
    if arguments.costs is not None:
        return read_costs(arguments.costs)
    device = choose_device(settings, running)
    # Nothing is known of this machine: all ranks measure it, or read what they measured before.
    with process_group(running, device, settings.timeout_s):
        topology = make_topology(sizes, settings.timeout_s)
        with topology.guard("fusedmoe plan"):
            costs = cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs
            return kept_costs(costs, settings, topology, device)
