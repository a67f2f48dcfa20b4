"""`fusedmoe plan`: the schedule of a model's training step, and why it is that one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fusedmoe.cli.job import Launch, Sizes, choose_device, choose_sizes, make_topology, process_group
from fusedmoe.cli.plan_report import Report
from fusedmoe.cli.settings import Settings, add_flags, add_parser, changes_of, picture_to_write, read_costs
from fusedmoe.cli.trainer import compute_dtype
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.cache import cached_profile
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.draw import draw
from fusedmoe.schedule.grid import TESTBEDS
from fusedmoe.schedule.policies import POLICIES

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

What is printed is what fusedmoe train plans from the same costs, and nothing that it could not run:
operations that send and receive rows while they compute are for layers by themselves.

With --placement fssdp, how many experts may travel for each layer while the links between nodes have
nothing else to do (Hecate's overlap degree); the picture then has their sparse collectives, SAG and SRS.

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
  for how many copies of experts there is time:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B --placement fssdp
  this machine, measured now or before:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe.cli plan --ranks-per-node 2
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
    epilog = f"{EXAMPLES}\npolicies (--schedule; auto is joint):\n{policies}"
    parser = add_parser(commands, "plan", SUMMARY, DESCRIPTION, epilog, run)
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
        report = Report.from_costs(settings, launch, sizes, costs, again=arguments.again)
        if arguments.png is not None:
            draw(report.drawn, arguments.png, title=report.title)
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
