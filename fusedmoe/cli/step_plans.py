"""Plans of a job's training step: which policy it follows, what a step costs, what its parts were measured to take."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedmoe import Along, Topology
from fusedmoe.cli.job import WIRE_DTYPES, Launch, Sizes, make_model
from fusedmoe.cli.settings import Settings
from fusedmoe.errors import ConfigError, printable
from fusedmoe.experts import Place
from fusedmoe.models.transformer import block_workload, make_experts, make_gate
from fusedmoe.runtime.cache import cached_plans, kept_observed, machine_facts
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule import POLICIES, ChunkedPass, CostModel, Plan, StepCosts, Workload, step_plan, three_queues
from fusedmoe.schedule.cost import Observed
from fusedmoe.schedule.policies import layer_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.refit import Row
from fusedmoe.schedule.workload import IN_LAYERS
from fusedmoe.training.gradient_buckets import bucketed_bytes

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Settings that the time of a step depends on.
_TIMED = ("model", "dispatch", "wire_dtype", "dtype", "recompute")
# Chunks of the steps that are done to be measured, beside one.
_DEGREES = (2, 3, 4)


def probes(costs: StepCosts, samples: int) -> list[Plan]:
    """Makes plans whose steps show what their tasks take: in one chunk and in several, both passes alike; for layers
    that can be split also with W tasks.

    `samples`: the number of samples that micro-batches are cut from.
    """
    if costs.can_split:
        # Micro-batches are of equally many samples, so the number must divide them.
        several = max((degree for degree in _DEGREES if samples % degree == 0), default=1)
        splits = [StepSplit(degree, degree, weights=apart) for apart in (False, True) for degree in (1, several)]
        return [micro_schedule(costs, split).plan() for split in dict.fromkeys(splits)]
    passes = ([ChunkedPass(three_queues, degree)] * len(costs.layers) for degree in (1, max(_DEGREES)))
    return [step_plan(costs, chunked, chunked) for chunked in passes]


def policy_of(settings: Settings) -> str:
    """Returns the policy that the settings' schedule names."""
    policy = "joint" if settings.schedule == "auto" else settings.schedule
    refusal = why_not_split(settings)
    # Such a policy would plan nothing at all here.
    if not POLICIES[policy].by_layer and refusal is not None:
        raise ConfigError(f"--schedule {policy} splits whole layers, but {refusal}; choose auto, or another policy")
    return policy


def splits_layers(settings: Settings) -> bool:
    """Returns whether micro-batches go through all layers by the settings' schedule."""
    return POLICIES[policy_of(settings)].whole and why_not_split(settings) is None


def with_observed(
    costs: CostModel,
    settings: Settings,
    topology: Topology,
    device: torch.device,
    look: Callable[[dict[str, Any], bool], Observed | None],
) -> CostModel:
    """Adds to costs what this model's own steps took, as far as `look` knows it. Collective over all ranks.

    `look`: is given all that the time of a step's tasks depends on, in plain types, the same on every rank, and whether
    micro-batches go through whole layers.
    """
    workload = step_workload(settings, topology.ep.size, topology.esp.size, topology.mp.size)
    whole = splits_layers(settings)
    # Blocks do not look at the entry of layers; "auto" compares plans of both forms, each by its own measurement.
    forms = {workload.shapes + IN_LAYERS: False} if whole and settings.schedule == "auto" else {}
    observed, known = dict(costs.observed), settings.to_json()
    for name, of_blocks in {**forms, workload.shapes: whole}.items():
        facts = machine_facts(topology, device, compute_dtype(settings))
        facts |= {name: known[name] for name in _TIMED} | {"blocks": of_blocks}
        if (seen := look(facts, of_blocks)) is not None:
            observed[name] = seen
    return replace(costs, observed=observed)


def kept_costs(costs: CostModel, settings: Settings, topology: Topology, device: torch.device) -> CostModel:
    """Adds to costs what this model's steps took when an earlier job measured them (`Trainer.measured`), if one did.
    Collective over all ranks."""
    if not follows_plan(settings, topology.ep.size, topology.esp.size) or settings.placement != "ep":
        return costs
    return with_observed(costs, settings, topology, device, lambda facts, _: kept_observed(topology, facts))


def follows_plan(settings: Settings, ep: int, esp: int) -> bool:
    """Returns whether steps follow a plan: where no rows travel they are as without a schedule."""
    return settings.schedule != "off" and ep * esp > 1


def split_axis(settings: Settings, mp: int) -> Along:
    """Returns the axis of micro-batches: a batch's samples, or the positions of a single sample that allows it."""
    single = settings.model.batch == 1 and settings.model.objective == "causal" and mp == 1
    return "positions" if single else "samples"


def micro_batch_limit(settings: Settings, mp: int) -> int:
    """Returns how many samples or positions micro-batches can be cut from."""
    return settings.model.seq_len if split_axis(settings, mp) == "positions" else settings.model.batch


def why_not_split(settings: Settings) -> str | None:
    """Says why micro-batches cannot go through the layers of a model; None where they can."""
    if settings.placement != "ep":
        return f"with --placement {settings.placement} experts are whole layers'"
    return None if make_gate(settings.model).splits else f"gate {settings.model.gate} looks at whole batches"


def compute_dtype(settings: Settings) -> torch.dtype:
    """Returns the dtype of matrix products."""
    return _COMPUTE[settings.dtype]


def step_workload(settings: Settings, ep: int, esp: int, mp: int) -> Workload:
    """Returns the workload of one layer in a step, as one of so many ranks sees it."""
    travels = WIRE_DTYPES.get(settings.wire_dtype, compute_dtype(settings))
    return block_workload(settings.model, ep, esp, mp, travels.itemsize)


def step_costs(settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, whole: bool = False) -> StepCosts:
    """Returns what a step of the model's layers with experts costs, as in training, without asking other ranks.

    `whole`: micro-batches can go through all of a layer.
    """
    workload = step_workload(settings, sizes.ep, sizes.esp, sizes.mp)
    model = settings.model
    if model.layers < model.moe_every:
        raise ConfigError(f"--layers {model.layers} with --moe-every {model.moe_every}: no experts")
    cut = split_axis(settings, sizes.mp)
    # On the meta device: shapes are enough to know what is reduced, and no memory is taken.
    made = make_model(settings, model, Topology(), torch.device("meta"))
    blocks = made.in_micro_batches(cut) if whole else None
    # Gradients that travel in buckets, by layer; the rest is reduced after the step.
    reduced = bucketed_bytes(made, launch.ranks, sizes.mp, None if blocks is None else blocks.dense_parameters)
    kinds = runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if whole else "step")
    waits = blocks is not None and blocks.waits[0]
    return workload.step_costs(costs, reduced, kinds, whole=whole, waits=waits)


class Planned(NamedTuple):
    """A plan of a step, and the costs by which it was made."""

    plan: Plan
    costs: StepCosts


def policy_followed(settings: Settings, sizes: Sizes) -> str:
    """Returns the policy of the settings; where training follows none, tasks run one after the other."""
    return policy_of(settings) if follows_plan(settings, sizes.ep, sizes.esp) else "sequential"


def plans_of(
    settings: Settings,
    launch: Launch,
    sizes: Sizes,
    costs: CostModel,
    *,
    policies: Collection[str] | None = None,
    again: bool = False,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Planned]:
    """Makes the plans of a step by these policies (None: all) that training could follow, as it would itself
    (`Trainer.set_plan`). Policies for whole models plan layers that are split, the others layers that are not.
    """
    policies = POLICIES if policies is None else policies
    layered = step_costs(settings, launch, sizes, costs)
    if not follows_plan(settings, sizes.ep, sizes.esp):
        return {"sequential": Planned(POLICIES["sequential"].plan(layered), layered)}
    whole = [name for name in POLICIES if name in policies and POLICIES[name].whole and why_not_split(settings) is None]
    by_layer = [name for name in layer_policies() if name in policies and name not in whole]
    plans = {name: Planned(POLICIES[name].plan(layered), layered) for name in by_layer}
    if whole:
        split = step_costs(settings, launch, sizes, costs, whole=True)
        limit = micro_batch_limit(settings, sizes.mp)
        made = cached_plans(whole, Topology(), split, samples=limit, again=again, show=show)
        plans |= {name: Planned(plan, split) for name, plan in made.items()}
    for name, planned in plans.items():
        kinds = runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if name in whole else "step")
        require_runnable(planned.plan, kinds, f"the plan by {name}")
    return plans


def expert_bytes(settings: Settings, sizes: Sizes) -> int:
    """Returns the bytes of a rank's shard of one expert's parameters, which are also those of its gradients."""
    expert = make_experts(settings.model)
    expert.setup(settings.model.model_dim, Place(shards=sizes.esp), device="meta")
    return sum(p.numel() for p in expert.parameters()) * (8 if settings.dtype == "fp64" else 4)


def make_table(title: str, columns: Sequence[str], right: Collection[str] = ()) -> Table:
    """Makes a table without rows; the columns in `right` end at the right."""
    table = Table(title=Text(printable(title), "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def make_console() -> Console:
    """Makes the console of a command's tables; a file or a pipe gets lines of 120 characters."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def table_of(rows: Sequence[Row]) -> str:
    """Tabulates milliseconds of each kind of task, last of the step, and by how much predictions are off."""
    columns = ("", "predicted", "measured", "error")
    table = make_table("seconds at work, ms", columns, right=columns[1:])
    for row in rows:
        seconds = ("–" if s is None else f"{1e3 * s:.2f}" for s in (row.predicted_s, row.measured_s))
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(
            Text(printable(row.part)),
            *seconds,
            error,
            style="bold" if row is rows[-1] else None,
            end_section=row is rows[-2],
        )
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(table)
    return text.getvalue()
