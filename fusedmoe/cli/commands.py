"""Help texts and flags of all subcommands. Does not import torch, so that --help and completion start fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fusedmoe.cli.settings import STEP_FLAGS, Settings, add_flags, parse_figure_path, parse_output_path
from fusedmoe.schedule.machines import MACHINES, TESTBEDS
from fusedmoe.schedule.policies import POLICIES

#: Default and upper limit of `profile --budget`, in seconds.
PROFILE_BUDGET_S, MAX_BUDGET_S = 30.0, 100.0
# Values of `profile --dtype`: `fusedmoe.runtime.cache.PRODUCT_DTYPES`.
PRODUCTS = ("fp32", "bf16", "fp16", "fp64")
# Flags that determine the parallel layout.
_PROFILE_FLAGS = (
    *("--heads", "--kv-heads", "--hidden", "--experts", "--experts-per-rank"),
    *("--ranks-per-node", "--ep", "--esp", "--mp", "--device", "--timeout"),
)

_TRAIN = """\
Train a mixture-of-experts language model.

Train a mixture-of-experts transformer on bytes of text and print its held-out loss. Without
torchrun, one process trains the model. Under torchrun, ranks form the layout of FSMoE:
experts spread over nodes (EP), each expert and the attention split inside a node (ESP, MP), data
parallel over the remaining ranks.

All files are written to a run folder, by default runs/<date-time>:
  config.json      all settings, and values chosen at startup
  metrics.jsonl    one line per step; every 10 steps the metrics of fusedmoe.metrics
  checkpoint/      the last checkpoint
  timeline.png     timeline of one step on all ranks; trace.json for ui.perfetto.dev
  loads.json       expert loads by step; drawn in loads.png
  costs.json, plan.txt    with a --schedule other than off: costs and plan, for a resumed job
  schedule.json    with --schedule auto or flowmoe: the plan chosen in the first steps, for a resumed job
  parts.txt        with a --schedule other than off: the recorded step compared with its prediction
  launch.json      under torchrun: the launch, whose later attempts (--max-restarts) continue here

--placement fssdp stores each expert once in the world and replicates popular experts in each step
on ranks that would otherwise send them tokens (Hecate). The losses do not change.

--schedule auto overlaps communication with computation: tokens in chunks, gradients in buckets
during the backward pass. Costs of this machine and of this model's tasks are measured once and
cached. The most promising plans are then tried in the first steps, and the fastest is used.

--survive N copies the state every N steps to the host memory of two nodes. After the loss of a rank
or node, torchrun restarts the ranks on the remaining nodes, and they continue from the copy. A node
that returns joins again. The cost of a copy is printed after the first step.

Ctrl-C finishes the step, saves a checkpoint and exits; --resume on as many ranks continues with the
same losses. On another number of ranks the sequences per step (--batch per data-parallel rank) and
their text change: train prints the --batch that keeps their number. --ep, --esp and --mp must divide
the new number of ranks. After a restart by torchrun (--max-restarts), train continues by itself.
"""

_TRAIN_EXAMPLES = """\
examples:
  one process:
    fusedmoe train
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2
  resume a job (with its settings; other flags override them):
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --resume runs/2026-01-31_12-00-00
  a paper's model with fewer layers, another gate and 16-bit dispatch:
    fusedmoe train --model GPT2-Tiny-MoE --layers 4 --gate gshard --wire-dtype bf16 --steps 50
  communication overlapped with computation:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2 --schedule auto
  popular experts replicated on the ranks of their tokens:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2 --placement fssdp
  2 nodes, surviving the loss of either (run on each; "meet" is a host that does not train):
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 100
      --rdzv-backend c10d --rdzv-endpoint meet:29500 --rdzv-id job
      --rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3
      -m fusedmoe train --survive 10 --timeout 60
  your own text:
    fusedmoe train --data ~/notes --pattern '*.md' --seq-len 256
"""

_PROFILE = """\
Measure the speed of links and matrix products.

Measure the costs that schedules are planned with: all-to-all between expert-parallel ranks,
all-gather and reduce-scatter between expert shards, all-reduce between replicas, and matrix
products, each at many sizes, on all ranks at once. Each cost is fitted by a line α + β·n, with n
in bytes or FLOP. The contention of matrix products and links is the fraction of their speed that
they keep while another of them is active.

Results are cached in $FUSEDMOE_CACHE (default: ~/.cache/fusedmoe), one file per machine, parallel
layout and dtype. Layers with schedule="auto" and fusedmoe train --schedule read them from there,
and measure once if the file is missing.
"""

_PROFILE_EXAMPLES = """\
examples:
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe profile --ranks-per-node 2
  measure again, and write JSON for fusedmoe plan --costs:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe profile --ranks-per-node 2 --again --json costs.json
  the parallel layout of a model, with bf16 matrix products:
    torchrun --nnodes 4 --nproc-per-node 8 … -m fusedmoe profile --model Mixtral-7B --dtype bf16
  matrix products only:
    fusedmoe profile --budget 5
"""

_PLAN = """\
Show the schedule of a model and its predicted step time.

Plan a training step of a model for a given parallel layout. Prints for each layer the number of
chunks in the forward and backward pass and its bottleneck, the predicted step time of every policy,
and a lower bound that no schedule can beat.

If the gate allows it, plans also split whole layers: micro-batches of equal size pass through all
layers, overlapped with gradient buckets of one size (S_p) and weight-gradient tasks. The search may
take a minute for many layers; its result is cached in $FUSEDMOE_CACHE (default: ~/.cache/fusedmoe).

Only tasks on the critical path lengthen a step. A pass is bound by the resource that holds most of
the critical path while the pass lasts: computation, links between nodes (dispatch, combine, gradient
all-reduce) or links inside a node (all-gather, reduce-scatter).

The plans are those that fusedmoe train would follow with the same costs; with --recompute they also
count recomputed passes, which train finds in measured steps only. One-sided operators, which
send and receive rows inside kernels, are available to single layers only and are not planned here.

With --placement fssdp, the command also prints how many experts per layer can be sent while the
links between nodes are idle (the overlap degree of Hecate), and the figure includes their sparse
collectives (SAG, SRS).

Costs come from a measurement under torchrun (cached, see fusedmoe profile --help), a file (--costs),
a published testbed (--testbed) or a machine model (--machine); with the last three, one process
plans for any number of ranks. Task times measured in the model's own steps are included if fusedmoe
train or trace has cached them, and in the costs.json of a run.

--config FILE reads the model of a job that trains with another framework, and its batch and parallel
sizes if the file states them. With --machine, an EP size that is not given is chosen: of those that
fit the memory of a GPU and are within 12% of the least time, the one with the least memory. The output
answers what to change: parallel sizes, memory per rank, chunks, and whether overlap, two-level
dispatch (--dispatch 2dh) and expert replicas gain more than the error of the prediction; if not, leave
them off. What the file leaves open is printed as an assumption.

--machine NAME models a machine from data sheets and published measurements; their sources are
printed. --ranks-per-node, --nics and --nic-bandwidth set the nodes of your cluster, e.g. for a slower
network. fusedmoe/schedule/machines.py models collectives on many ranks, including the wait for the
slowest rank. --scale prints step time, tokens per second, speed-up, exposed communication and chunks
for 8 to 4,096 ranks. These predictions are for comparing machines and layouts; measure if you have
the machine.
"""

_PLAN_EXAMPLES = """\
examples:
  8 nodes of 4 GPUs as in the FSMoE paper:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B
  a longer sequence there, with a figure of the step:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B --seq-len 4096 --png step.png
  a cluster measured earlier, planned on any machine:
    fusedmoe plan --model Mixtral-7B --costs costs.json --ranks 32 --ranks-per-node 8
  FlowMoE's plan of its own model, compared with all policies:
    fusedmoe plan --model BERT-Large-MoE --testbed A --schedule flowmoe
  how many expert replicas the communication can hide:
    fusedmoe plan --model Mixtral-7B --layers 4 --testbed B --placement fssdp
  a machine model, for 256 ranks and for up to 4,096:
    fusedmoe plan --model Mixtral-7B --machine dgx-h100 --ranks 256
    fusedmoe plan --model DeepSeek-V3 --machine gb200-nvl72 --scale --png scale.png
  your own layer, by its sizes (flags override those of --model):
    fusedmoe plan --machine dgx-h100 --ranks 16 --model-dim 2048 --hidden 1408 --experts 64 --k 6 --ep 16 --esp 1 --mp 1
  a job of another framework, with parallel sizes that fit the memory:
    fusedmoe plan --config config.json --machine dgx-h100 --ranks 64
    fusedmoe plan --config pretrain.sh --machine dgx-h100 --ranks 64 --batch 2
  this machine, from cached or new measurements:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe plan --ranks-per-node 2
"""

_TRACE = """\
Run training steps and compare their timeline with the prediction.

Run training steps of a model on random text and compare the median step with the prediction of
the simulator. Writes a figure with one group of rows per rank and a trace for ui.perfetto.dev and
chrome://tracing. Prints predicted and measured times, their ratio, and exposed communication: the
time in which a link is in use and computation waits.

The prediction uses task times measured in this model's own steps; they are measured once and
cached. With --costs it uses matrix products and collectives only: the predicted step ends when
gradients are reduced, and norms, gates, token permutation and the loss appear only in the
measured step.

The time of a task spans from its start on the last rank to its end on the last rank, so waiting
for a late rank counts once. "count-exchange" is the exchange of row counts between ranks. "other"
is the time of a pass outside its tasks: gate, permutation, norms, embedding.

--schedule off runs without a plan and compares with the prediction for the policy "sequential".
"""

_TRACE_EXAMPLES = """\
examples:
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe trace --ranks-per-node 2
  the same without overlap, to compare:
    torchrun … -m fusedmoe trace --ranks-per-node 2 --schedule off --png off.png --json off.json
  two layers of a large model by another policy:
    torchrun … -m fusedmoe trace --model Mixtral-7B --layers 2 --dtype bf16 --schedule fsmoe
"""

_DOCTOR = """\
Check which communication transports work on this machine.

Print versions, GPUs, CPU cores and threads, and the measured costs in the cache folder with their
layout, age and worst r² (a fit below 0.9 is poor: see fusedmoe profile --help).

Probe every transport for exchanging tokens between ranks. For each one that does not work, print
the reason and the fix.

Collectives use PyTorch process groups and can execute every plan: Gloo between CPUs, NCCL between
GPUs. Symmetric memory is for kernels that write directly into the memory of other ranks:
  host     processes of one host, with kernels in Triton's interpreter (for tests)
  symm     GPUs of one node
  nvshmem  GPUs of several nodes; optional, built by make nvshmem
Without symmetric memory, fusedmoe uses collectives.

The probes run on this machine only, change nothing, and take at most 10 s each.
"""

_DOCTOR_EXAMPLES = """\
examples:
  this machine:
    fusedmoe doctor
  every node of a job, under Slurm:
    srun --ntasks-per-node=1 fusedmoe doctor
  exit code 0 if any transport works, else 1; list the working ones:
    fusedmoe doctor --json | jq '.transports[] | select(.works) | .name'
"""


def _add_parser(commands: Any, name: str, text: str, epilog: str, module: str) -> argparse.ArgumentParser:
    """Add a parser to the result of `add_subparsers`. `text`: summary, blank line, description."""
    summary, _, description = text.partition("\n\n")
    parser = commands.add_parser(
        name,
        help=summary[:1].lower() + summary[1:].removesuffix("."),
        usage=f"fusedmoe {name} [FLAG ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=module)
    return parser


def _add_train(commands: Any) -> None:
    parser = _add_parser(commands, "train", _TRAIN, _TRAIN_EXAMPLES, "fusedmoe.cli.train")
    where = parser.add_argument_group("run folder")
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="new run folder (default: runs/<date-time>)")
    where.add_argument("--resume", type=Path, metavar="DIR", help="run folder of the job to resume")
    where.add_argument("--stop-at", type=int, metavar="N", help="save a checkpoint and stop after step N")
    add_flags(parser)


def _add_profile(commands: Any) -> None:
    parser = _add_parser(commands, "profile", _PROFILE, _PROFILE_EXAMPLES, "fusedmoe.cli.profile")
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--budget",
        type=float,
        default=PROFILE_BUDGET_S,
        metavar="S",
        help=f"time limit in seconds, less than {MAX_BUDGET_S:g} (default: %(default)g)",
    )
    group.add_argument("--again", action="store_true", help="measure even if cached")
    group.add_argument(
        "--dtype", dest="products", choices=PRODUCTS, default="fp32", help="dtype of matrix products (default: fp32)"
    )
    group.add_argument(
        "--duplex",
        action="store_true",
        help="two process groups per axis on CPUs (Topology.from_sizes(duplex=True)), as the layers of Hugging Face "
        "and Tutel have",
    )
    group.add_argument(
        "--json", type=parse_output_path, metavar="FILE", help="fitted lines and measured points as JSON"
    )
    add_flags(parser, _PROFILE_FLAGS)


def _add_plan(commands: Any) -> None:
    policies = "\n".join(f"  {name:15}{policy.description}" for name, policy in POLICIES.items())
    machines = "\n".join(f"  {name:15}{machine.description}" for name, machine in MACHINES.items())
    head = "policies (--schedule; auto: joint here, the fastest in measured steps in train)"
    epilog = f"{_PLAN_EXAMPLES}\n{head}:\n{policies}\n\nmachines:\n{machines}"
    parser = _add_parser(commands, "plan", _PLAN, epilog, "fusedmoe.cli.plan_command")
    parser.add_argument_group("job").add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="model and sizes of another framework's job: config.json of Hugging Face transformers, TOML of "
        "torchtitan, or arguments of Megatron-core as YAML or a command line. Other flags override them",
    )
    group = parser.add_argument_group("costs")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, metavar="FILE", help="costs file of fusedmoe profile (--json or cached)")
    source.add_argument("--testbed", choices=TESTBEDS, help="FSMoE's testbed: A, 6 nodes of 8 GPUs; B, 8 of 4")
    source.add_argument("--machine", choices=MACHINES, metavar="NAME", help="machine model, from the list below")
    group.add_argument(
        "--spread",
        type=float,
        metavar="X",
        help="spread of compute time over ranks (standard deviation / mean), as fusedmoe trace measures it "
        "(default: that of the --machine)",
    )
    group.add_argument(
        "--nics", type=int, metavar="N", help="network cards per node (default: as many per rank as the --machine)"
    )
    group.add_argument(
        "--nic-bandwidth",
        type=float,
        metavar="GBIT",
        help="line rate of a network card in Gbit/s, one direction (default: that of the --machine)",
    )
    group.add_argument("--scale", action="store_true", help="plan for 8 to 4,096 ranks of the --machine")
    group.add_argument("--ranks", type=int, metavar="N", help="number of ranks to plan for (default: WORLD_SIZE)")
    group.add_argument("--again", action="store_true", help="search for plans even if cached")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON, including the plan, instead of tables")
    output.add_argument(
        "--png", type=parse_figure_path, metavar="FILE", help="figure of the step or of --scale (.png, .svg or .pdf)"
    )
    moving = ("--placement", "--placement-overlap", "--rematerialise")
    add_flags(parser, (*STEP_FLAGS, *moving), Settings(schedule="auto"))


def _add_trace(commands: Any) -> None:
    parser = _add_parser(commands, "trace", _TRACE, _TRACE_EXAMPLES, "fusedmoe.cli.trace")
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--steps", type=int, default=5, metavar="N", help="measured steps, after 2 warm-ups (default: %(default)s)"
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="read costs from a file of fusedmoe profile --json")
    for flag, kind, what in (
        ("--png", parse_figure_path, "timeline figure"),
        ("--json", parse_output_path, "Chrome trace"),
    ):
        name = f"trace.{flag[2:]}"
        group.add_argument(flag, type=kind, default=Path(name), metavar="FILE", help=f"{what} (default: {name})")
    add_flags(parser, (*STEP_FLAGS, "--seed"), Settings(schedule="auto"))


def add_commands(commands: Any) -> None:
    """Add the parsers of all subcommands. Each sets `module`, whose `run` executes the command."""
    for add in (_add_train, _add_profile, _add_plan, _add_trace):
        add(commands)
    parser = _add_parser(commands, "doctor", _DOCTOR, _DOCTOR_EXAMPLES, "fusedmoe.cli.doctor")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
