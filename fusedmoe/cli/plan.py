"""`fusedmoe plan`: the schedule of a model's training step, and why it is that one."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusedmoe.cli.costs import picture_to_write, read_costs
from fusedmoe.cli.flags import add_flags, changes_of, describe
from fusedmoe.cli.layout import Launch, Sizes, choose_device, choose_sizes, make_topology, process_group
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import along, compute_dtype, cuttable, policy_of, step_workload, unsplit
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.stage import must_wait
from fusedmoe.models.parts import make_gate, make_order
from fusedmoe.runtime.plan_cache import cached_plans
from fusedmoe.runtime.profile_cache import cached_profile
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.critical import Stretch, critical_path, stretches
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.task import LINKS, WEIGHT_GRADIENTS
from fusedmoe.schedule.testbeds import TESTBEDS
from fusedmoe.schedule.timeline import PHASES, Timeline
from fusedmoe.schedule.whole_policies import WHOLE_POLICIES
from fusedmoe.schedule.workload import StackCosts

SUMMARY = "show which schedule a model gets, and why"

DESCRIPTION = """\
Plans a training step of a model on a layout of ranks, and says why it is planned so: for each
layer in how many chunks it goes forward and backward, what its passes wait for, what every
policy would take, and the bound that no schedule beats.

Where the gate allows it, whole layers are split as well: micro-batches of equally many samples go
from layer to layer, gradients in pieces of one size (S_p) beside them, weight gradients where
there is time. Such plans are searched once, which may take a minute for many layers, and kept in
$FUSEDMOE_CACHE, or else ~/.cache/fusedmoe.

Only what is on the critical path makes a step longer. A layer's pass is bound by what holds
most of the path while it lasts: computation, the links between nodes (dispatch, combine,
gradient all-reduce) or the links inside a node (all-gather, reduce-scatter).

Costs are measured under torchrun (or found, see fusedmoe profile --help), read from a file, or
those of a published testbed; with the last two one process plans for any number of ranks.
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
  this machine, measured now or before:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe.cli plan --ranks-per-node 2
"""

_FLAGS = (
    *("--batch", "--seq-len", "--dtype", "--layers", "--model-dim", "--heads", "--kv-heads"),
    *("--expert", "--hidden", "--experts", "--experts-per-rank", "--moe-every", "--k", "--capacity-factor"),
    *("--gate", "--order", "--ranks-per-node", "--ep", "--esp", "--mp", "--wire-dtype", "--schedule", "--device"),
    "--timeout",
)

# What each does. Of two of the same name, the one of whole models counts.
_POLICIES = {
    **{name: policy.description for name, policy in POLICIES.items()},
    **{name: (policy.__doc__ or "").rstrip(".") for name, policy in WHOLE_POLICIES.items()},
}

RESOURCES = {"compute": "computation", "inter": "links between nodes", "intra": "links inside the node"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the commands of `fusedmoe`."""
    parser = commands.add_parser(
        "plan",
        help=SUMMARY,
        usage="fusedmoe plan [FLAG ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES
        + "\npolicies (--schedule; auto is joint):\n"
        + "\n".join(f"  {name:15}{description}" for name, description in _POLICIES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("costs")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, metavar="FILE", help="of fusedmoe profile --json, or one that it kept")
    source.add_argument("--testbed", choices=TESTBEDS, help="of the FSMoE paper: A, 6 nodes of 8; B, 8 nodes of 4")
    group.add_argument("--ranks", type=int, metavar="N", help="plan for so many ranks (default: the launcher's)")
    group.add_argument("--again", action="store_true", help="search for plans also where that was done before")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON, with the plan's text, instead of tables")
    output.add_argument("--png", type=picture_to_write, metavar="FILE", help="the step as .png, .svg or .pdf")
    add_flags(parser, _FLAGS, Settings(schedule="auto"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans the step and prints it."""
    running = Launch.from_environment()
    settings = Settings(schedule="auto").changed(changes_of(arguments))
    if settings.schedule == "off":
        raise ConfigError("--schedule off is no plan: the layers work without one; choose auto or a policy")
    launch, settings = _planned_for(arguments, running, settings)
    sizes = choose_sizes(settings, launch)
    settings = settings.changed({"model": settings.model.with_experts(launch.ranks, sizes.ep)})
    costs = _costs(arguments, running, settings, sizes)
    if running.rank == 0:
        report = Report.of(settings, launch, sizes, costs, again=arguments.again)
        if arguments.png is not None:
            draw(report.timeline, arguments.png, title=report.title)
        if arguments.json:
            print(json.dumps(report.as_dict(), indent=2))
        else:
            report.print()
    return 0


def _planned_for(arguments: argparse.Namespace, running: Launch, settings: Settings) -> tuple[Launch, Settings]:
    """The ranks that the plan is for; those that run unless others are named."""
    ranks = arguments.ranks
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    if arguments.testbed is not None:
        testbed = TESTBEDS[arguments.testbed]
        ranks = ranks or testbed.nodes * testbed.gpus
        settings = settings.changed({"ranks_per_node": settings.ranks_per_node or testbed.gpus})
    elif arguments.costs is None:
        if ranks not in (None, running.ranks):
            raise ConfigError(
                f"what {ranks} ranks take cannot be measured on {running.ranks}: start as many under torchrun, or give "
                "--costs FILE or --testbed A|B"
            )
        return running, settings
    elif ranks is None and running.ranks == 1:
        raise ConfigError("--costs needs --ranks N to plan for, and --ranks-per-node unless they share a node")
    ranks = ranks or running.ranks
    return Launch(0, ranks, 0, settings.ranks_per_node or ranks), settings


def _costs(arguments: argparse.Namespace, running: Launch, settings: Settings, sizes: Sizes) -> CostModel:
    if arguments.testbed is not None:
        return TESTBEDS[arguments.testbed].costs
    if arguments.costs is not None:
        return read_costs(arguments.costs)
    device = choose_device(settings, running)
    with process_group(running, device, settings.timeout_s):
        topology = make_topology(sizes, settings.timeout_s)
        with topology.guard("fusedmoe plan"):
            return cached_profile(topology, device, dtype=compute_dtype(settings))[0].costs


@dataclass(frozen=True)
class Report:
    """A plan for a model on a layout, and what there is to say about it."""

    settings: Settings
    launch: Launch
    sizes: Sizes
    machine: str
    policy: str
    plan: Plan
    timeline: Timeline
    passes: Sequence[Stretch]
    step_s: dict[str, float]  # by policy
    bound_s: float
    refusal: str | None  # why layers are not split

    @classmethod
    def of(
        cls, settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, again: bool = False
    ) -> Report:
        """Plans by every policy; the chosen one is the settings'.

        Raises:
            ConfigError: the policy splits what cannot be split, or costs lack what the layout needs.
        """
        policy, refusal = policy_of(settings), unsplit(settings)
        step = step_costs(settings, launch, sizes, costs, whole=refusal is None)
        whole = {} if refusal is not None else WHOLE_POLICIES
        plans = {name: layered.plan(step) for name, layered in POLICIES.items() if name not in whole}
        plans |= cached_plans(whole, Topology(), step, samples=cuttable(settings, sizes.mp), again=again)
        plan = plans[policy]
        timeline = simulate(plan, step)
        return cls(
            settings,
            launch,
            sizes,
            costs.machine,
            policy,
            plan,
            timeline,
            stretches(plan, timeline),
            {name: makespan(one, step) for name, one in plans.items()},
            bound_s(step),
            refusal,
        )

    @property
    def title(self) -> str:
        return f"{self.settings.model.name}, {self.launch.ranks} ranks, {self.policy}"

    @property
    def rest_s(self) -> float:
        """After the last pass: gradients that nothing hides."""
        return self.timeline.end_s - self.passes[-1].end_s

    @property
    def piece_bytes(self) -> int | None:
        """S_p: of the largest gradient all-reduce; None without any."""
        return max((task.size or 0 for task in self.plan.inter if task.kind == "gradient-all-reduce"), default=None)

    @property
    def weights_apart(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return any(task.kind in WEIGHT_GRADIENTS.values() for task in self.plan.compute)

    def micro_batches(self, phase: str) -> list[int]:
        """Of each layer: in how many its attention goes; 1 where the layer is not split."""
        parts = Counter(task.layer for task in self.plan.compute if task.kind == "attention" and task.phase == phase)
        return [parts[layer] for layer in sorted({one.layer for one in self.passes})]

    def path_s(self) -> dict[str, float]:
        """Seconds of the critical path by kind of task, the longest first."""
        path = Timeline(0, critical_path(self.plan, self.timeline), "predicted").totals_s()
        return dict(sorted(path.items(), key=lambda item: -item[1]))

    def path_by_resource_s(self) -> dict[str, float]:
        """The same by what is at work, as the kinds of tasks have it."""
        found = dict.fromkeys(RESOURCES, 0.0)
        for kind, seconds in self.path_s().items():
            found[LINKS.get(kind, "compute")] += seconds
        return found

    def busy_s(self) -> dict[str, float]:
        """Seconds that each resource works in a step."""
        found = dict.fromkeys(RESOURCES, 0.0)
        for span in self.timeline.spans:
            found[LINKS.get(span.kind, "compute")] += span.duration_s
        return found

    def as_dict(self) -> dict[str, Any]:
        """In plain types, times in seconds."""
        layers: dict[int, dict[str, Any]] = {}
        for one in self.passes:
            layers.setdefault(one.layer, {"layer": one.layer})[one.phase] = {
                "chunks": one.degree,
                "seconds": one.seconds,
                "bound_by": one.bound_by,
                "critical_path_s": one.waits_s,
                "gradient_all_reduce_s": one.gradient_s,
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
            "piece_bytes": self.piece_bytes,
            "weight_gradients_apart": self.weights_apart,
            "critical_path_s": self.path_s(),
            "critical_path_by_resource_s": self.path_by_resource_s(),
            "busy_s": self.busy_s(),
            "exposed_gradients_s": self.rest_s,
            "layers": [layers[layer] for layer in sorted(layers)],
            "plan": str(self.plan),
            "fingerprint": self.plan.fingerprint,
        }

    def print(self) -> None:
        """Tables of the passes and of the policies."""
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        sizes, ranks = self.sizes, self.launch.ranks
        nodes = f"{ranks // sizes.ranks_per_node} × {sizes.ranks_per_node}"
        axes = f"ep {sizes.ep}, esp {sizes.esp}, mp {sizes.mp}, dp {ranks // sizes.mp}"
        console.print(describe(self.settings.model), markup=False)
        console.print(f"{ranks} ranks ({nodes}): {axes}")
        console.print(f"costs: {self.machine or 'of an unnamed machine'}", markup=False)
        console.print(self._passes())
        console.print(self._splitting(), soft_wrap=True)
        if self.rest_s > 0:
            console.print(f"after the last pass: {_ms(self.rest_s)} of gradients that nothing hides")
        for what, shares in (
            ("critical path", self.path_s()),
            ("on the path", {RESOURCES[name]: seconds for name, seconds in self.path_by_resource_s().items()}),
            ("at work", {RESOURCES[name]: seconds for name, seconds in self.busy_s().items()}),
        ):
            parts = [f"{name} {seconds / self.timeline.end_s:.0%}" for name, seconds in shares.items() if seconds > 0]
            console.print(f"{what}: {', '.join(parts)}")
        console.print(self._policies())

    def _splitting(self) -> str:
        """In words: what is split, into how many pieces."""
        if self.refusal is not None:
            return f"chunks end with their layer: {self.refusal}"
        words = []
        for phase in PHASES:
            alike = [(count, len(list(group))) for count, group in groupby(self.micro_batches(phase))]
            counts = [str(count) if len(alike) == 1 else f"{count} ({n} layers)" for count, n in alike]
            words.append(f"{phase} {', '.join(counts)}")
        size = self.piece_bytes
        pieces = "no gradients to reduce" if size is None else f"gradients in pieces of up to {size / 2**20:.3g} MiB"
        apart = "tasks of their own" if self.weights_apart else "part of the backward pass"
        return f"micro-batches: {'; '.join(words)}; {pieces}; weight gradients are {apart}"

    def _passes(self) -> Table:
        table = Table(title=f"{self.policy}: {_ms(self.step_s[self.policy])} a step", title_justify="left")
        for column in ("layer", "pass", "chunks", "time", "critical path while it lasts", "bound by"):
            table.add_column(column, justify="right" if column in ("layer", "chunks", "time") else "left")
        for _, group in groupby(self.passes, key=lambda one: (one.phase, one.degree, one.bound_by, _ms(one.seconds))):
            alike = list(group)
            one, layers = alike[0], sorted(stretch.layer for stretch in alike)
            shares = {name: one.waits_s[resource] / one.seconds for resource, name in RESOURCES.items()}
            named = [f"{name.removeprefix('links ')} {share:.0%}" for name, share in shares.items() if share >= 0.005]
            span = f"{layers[0]}–{layers[-1]}" if len(layers) > 1 else str(layers[0])
            table.add_row(span, one.phase, str(one.degree), _ms(one.seconds), ", ".join(named), RESOURCES[one.bound_by])
        return table

    def _policies(self) -> Table:
        table = Table(title="what every policy would take", title_justify="left")
        for column in ("policy", "a step", "over the bound", "faster than sequential"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, seconds in sorted(self.step_s.items(), key=lambda item: -item[1]):
            over, faster = max(0.0, seconds / self.bound_s - 1), self.step_s["sequential"] / seconds
            style = "bold" if name == self.policy else None
            table.add_row(name, _ms(seconds), f"{over:.1%}", f"{faster:.2f} ×", style=style)
        table.add_row("bound", _ms(self.bound_s), "", f"{self.step_s['sequential'] / self.bound_s:.2f} ×")
        return table


def step_costs(
    settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, whole: bool = False
) -> StackCosts:
    """What the model's layers with experts cost in a step, without making the model.

    `whole`: micro-batches can go through all of a layer.

    Raises:
        ConfigError: costs that lack what the layout needs.
    """
    workload = step_workload(settings, sizes.ep, sizes.esp, sizes.mp)
    model = settings.model
    layers = model.layers // model.moe_every
    if layers < 1:
        raise ConfigError(f"--layers {model.layers} with --moe-every {model.moe_every}: no experts")
    reduced = workload.gradient_bytes() if launch.ranks > sizes.mp else 0
    waits = must_wait(make_gate(model), make_order(model), along(settings, sizes.mp) == "positions")
    return workload.step_costs(costs, [reduced] * layers, workload.volumes(), whole=whole, waits=waits)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"
