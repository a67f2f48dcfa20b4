"""Plans and costs of a job's training step, by the policy in its settings."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedmoe import Topology
from fusedmoe.blocks.pipeline import Along
from fusedmoe.cli.job import WIRE_DTYPES, Sizes, make_model
from fusedmoe.cli.settings import Settings
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.errors import ConfigError, printable
from fusedmoe.experts.networks import Place
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer, block_workload, make_experts, make_gate
from fusedmoe.names import FP8_WIRES
from fusedmoe.runtime.cache import cached_plans, machine_facts, read_cached_tasks
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule import (
    POLICIES,
    ChunkedPass,
    CostModel,
    Plan,
    StepCosts,
    Workload,
    step_plan,
    three_queues,
)
from fusedmoe.schedule.bound import bound_s
from fusedmoe.schedule.cost import Observed
from fusedmoe.schedule.machines import Machine
from fusedmoe.schedule.policies import layer_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.refit import PartComparison
from fusedmoe.schedule.simulate import ROUNDING, makespan, simulate
from fusedmoe.schedule.step import extract_phase
from fusedmoe.schedule.step_costs import MAX_DEGREE, LayerCosts, chunk_times, pass_bound_s
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import PER_LAYER_SUFFIX, DenseWork
from fusedmoe.training.gradient_buckets import reduced_bytes

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Settings that affect the step time.
_TIMING_SETTINGS = ("model", "dispatch", "wire_dtype", "dtype", "recompute")
# Multiple of the largest measured size up to which a fitted line is trusted.
_MAX_EXTRAPOLATION_FACTOR = 10
# Numbers of chunks tried in measurement steps, in addition to 1.
_DEGREES = (2, 3, 4)


def measurement_plans(costs: StepCosts, samples: int) -> list[Plan]:
    """Return plans with one chunk and with several, to measure the tasks of a step.

    If layers can be split, also with separate weight-gradient tasks; `samples` are cut into micro-batches.
    """
    if costs.can_split:
        # Micro-batches have equal size.
        several = max((degree for degree in _DEGREES if samples % degree == 0), default=1)
        splits = [StepSplit(degree, degree, weights=apart) for apart in (False, True) for degree in (1, several)]
        return [micro_schedule(costs, split).plan() for split in dict.fromkeys(splits)]
    passes = ([ChunkedPass(three_queues, degree)] * len(costs.layers) for degree in (1, max(_DEGREES)))
    return [step_plan(costs, chunked, chunked) for chunked in passes]


def selected_policy(settings: Settings) -> str:
    """Return the policy ("joint" for "auto"). Raise `ConfigError` if it splits layers that cannot be split."""
    policy = "joint" if settings.schedule == "auto" else settings.schedule
    refusal = no_split_reason(settings)
    if not POLICIES[policy].chunks_only_pipelines and refusal is not None:
        raise ConfigError(f"--schedule {policy} splits whole layers, but {refusal}; use auto or another policy")
    return policy


def uses_micro_batches(settings: Settings) -> bool:
    """Return whether the selected schedule may run micro-batches through whole layers."""
    return POLICIES[selected_policy(settings)].uses_micro_batches and no_split_reason(settings) is None


def with_measured_tasks(
    costs: CostModel,
    settings: Settings,
    topology: Topology,
    device: torch.device,
    lookup: Callable[[dict[str, Any], bool], Observed | None],
) -> CostModel:
    """Add task times measured in this model's own steps to the costs. Collective over all ranks.

    `lookup` returns measured times, or None if unknown. Its arguments: all facts that task times depend on (plain
    types, the same on every rank), and whether micro-batches pass through whole layers.
    """
    workload = step_workload(settings, topology.ep.size, topology.esp.size, topology.mp.size)
    whole = uses_micro_batches(settings)
    # Blocks do not measure the per-layer entry; "auto" compares plans of both forms.
    forms = {workload.shapes + PER_LAYER_SUFFIX: False} if whole and settings.schedule == "auto" else {}
    observed, known = dict(costs.observed), settings.to_dict()
    for name, of_blocks in {**forms, workload.shapes: whole}.items():
        facts = machine_facts(topology, device, compute_dtype(settings))
        facts |= {name: known[name] for name in _TIMING_SETTINGS} | {"blocks": of_blocks}
        if (seen := lookup(facts, of_blocks)) is not None:
            observed[name] = seen
    return replace(costs, observed=observed)


def with_cached_tasks(costs: CostModel, settings: Settings, topology: Topology, device: torch.device) -> CostModel:
    """Add an earlier job's task times of this model, if training follows a plan with static experts. Collective."""
    if not follows_plan(settings, topology.ep.size, topology.esp.size) or settings.placement != "ep":
        return costs
    return with_measured_tasks(costs, settings, topology, device, lambda facts, _: read_cached_tasks(topology, facts))


def follows_plan(settings: Settings, ep: int, esp: int) -> bool:
    """Return whether steps follow a plan. Without communication between ranks they do not."""
    return settings.schedule != "off" and ep * esp > 1


def split_axis(settings: Settings, mp: int) -> Along:
    """Return the axis of micro-batches: samples, or positions for a single causal sample without MP."""
    single = settings.model.batch == 1 and settings.model.objective == "causal" and mp == 1
    return "positions" if single else "samples"


def micro_batch_axis_size(settings: Settings, mp: int) -> int:
    return settings.model.seq_len if split_axis(settings, mp) == "positions" else settings.model.batch


def no_split_reason(settings: Settings) -> str | None:
    """Return why micro-batches cannot pass through whole layers; None if they can."""
    if settings.placement != "ep":
        return f"--placement {settings.placement} moves experts of whole layers"
    return None if make_gate(settings.model).splits else f"gate {settings.model.gate} needs the whole batch"


def compute_dtype(settings: Settings) -> torch.dtype:
    return _COMPUTE[settings.dtype]


def step_workload(settings: Settings, ep: int, esp: int, mp: int) -> Workload:
    travels = WIRE_DTYPES.get(settings.wire_dtype, compute_dtype(settings))
    workload = block_workload(settings.model, ep, esp, mp, travels.itemsize)
    wire = find_wire_format(settings.wire_dtype) if settings.wire_dtype in FP8_WIRES else None
    return workload if wire is None else workload.encoded(*wire.element_bytes(workload.model_dim))


def make_meta_model(settings: Settings) -> Transformer:
    return make_model(settings, settings.model, Topology(), torch.device("meta"))


def _with_recomputed_dense(costs: StepCosts) -> StepCosts:
    """Add the dense parts' forward to their backward: micro-batches recompute dense parts only."""

    def changed(layer: LayerCosts) -> LayerCosts:
        micro = layer.micro_batch_costs()
        forward, backward = (micro.dense[phase] for phase in PHASES)
        dense = {"forward": forward, "backward": {kind: part + forward[kind] for kind, part in backward.items()}}
        dense_s = {phase: {kind: part.seconds(1) for kind, part in parts.items()} for phase, parts in dense.items()}
        return replace(layer, dense_s=dense_s, micro=replace(micro, dense=dense))

    layers = {id(layer): changed(layer) for layer in {id(layer): layer for layer in costs.layers}.values()}
    return replace(costs, layers=tuple(layers[id(layer)] for layer in costs.layers))


def require_moe_layers(model: ModelConfig) -> None:
    if not model.num_moe_layers:
        raise ConfigError(
            f"--layers {model.layers} with --moe-every {model.moe_every} and --dense-layers {model.dense_layers}: the "
            "model has no MoE layer"
        )


def _dense_blocks(model: ModelConfig) -> list[list[DenseWork]]:
    """Return the blocks without experts before each MoE layer; empty for presets without `head_dim`."""
    groups: list[list[DenseWork]] = [[]]
    for layer in range(model.layers):
        if model.has_experts(layer):
            groups.append([])
        else:
            groups[-1].append(model.dense_work(layer))
    return [] if model.head_dim is None else groups[:-1]


@lru_cache(maxsize=8)
def _reduced_bytes(meta: Transformer, ranks: int, mp: int) -> tuple[list[int], int]:
    return reduced_bytes(meta, ranks, mp, meta.dense_parameters())


def machine_costs(machine: Machine, settings: Settings, sizes: Sizes, ranks: int) -> CostModel:
    """Return the costs of a machine for the layout and the dispatch algorithm of a job ("2dh": in two levels)."""
    model = settings.model.with_experts(ranks, sizes.ep)
    assert model.experts is not None
    if model.experts % sizes.ep:
        raise ConfigError(
            f"{model.experts} experts are not divisible by ep = {sizes.ep}; set --ep to a divisor of {model.experts}"
        )
    if model.hidden % sizes.esp:
        raise ConfigError(f"esp = {sizes.esp} does not divide the expert hidden dimension {model.hidden}")
    share, ranks_per_node = None, max(1, sizes.ranks_per_node // sizes.esp)
    if settings.dispatch == "2dh" and sizes.ep > ranks_per_node:
        by_node, by_rank = (
            block_workload(model, ep, sizes.esp, sizes.mp, 1) for ep in (sizes.ep // ranks_per_node, sizes.ep)
        )
        share = by_node.share / by_rank.share
    return machine.costs(ranks, sizes.ep, sizes.esp, sizes.mp, crossing_share=share)


class PlanWithCosts(NamedTuple):
    """Plan of a step and the costs it was made from."""

    plan: Plan
    costs: StepCosts


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A job with its parallel sizes and costs, whose steps are planned and predicted without communication.

    Attributes:
        meta: the job's model, by `make_meta_model`.
        machine: gives the cost of the experts' all-reduce; None: "all-reduce/dp" of `costs`.
        is_external: another framework reduces all gradients, and micro-batches are cut from samples.
        micro_batches: per replica and step.
    """

    settings: Settings
    ranks: int
    sizes: Sizes
    costs: CostModel
    meta: Transformer
    machine: Machine | None = None
    is_external: bool = False
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step's micro-batches, one of each replica."""
        return self.settings.model.batch * self.settings.model.seq_len * (self.ranks // self.sizes.mp)

    def on(self, machine: Machine, **settings: Any) -> PlannedJob:
        """Return the job on another machine or with other settings, with the costs of that machine."""
        changed = replace(self.settings, **settings)
        costs = machine_costs(machine, changed, self.sizes, self.ranks)
        return replace(self, settings=changed, machine=machine, costs=costs)

    def step_costs(self, whole: bool = False) -> StepCosts:
        """Return the costs of a step over the MoE layers. `whole`: micro-batches can pass through whole layers."""
        settings, sizes, model = self.settings, self.sizes, self.settings.model
        workload = step_workload(settings, sizes.ep, sizes.esp, sizes.mp)
        require_moe_layers(model)
        bucketed, _ = _reduced_bytes(self.meta, self.ranks, sizes.mp)
        bucketed = [0] * len(bucketed) if self.is_external else bucketed
        kinds = runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if whole else "step")
        along: Along = "samples" if self.is_external else split_axis(settings, sizes.mp)
        waits = whole and self.meta.pipeline_blocks(along).routes_first[0]
        found = workload.step_costs(self.costs, bucketed, kinds, whole=whole, waits=waits, before=_dense_blocks(model))
        # Measured backward tasks include the recomputation.
        return _with_recomputed_dense(found) if settings.recompute and whole and found.loss_s is None else found

    def plans(
        self,
        policies: Collection[str] = POLICIES,
        *,
        again: bool = False,
        show: Callable[[int, int], None] | None = None,
    ) -> dict[str, PlanWithCosts]:
        """Return the plans of a step by these policies that training could execute.

        Policies for whole models split layers if possible; other policies plan each layer separately. "auto" is the
        plan of layers with schedule="auto" in an external framework. If training follows no plan, the result has only
        "sequential". `show` is called with completed and total work.
        """
        settings, sizes, layered = self.settings, self.sizes, self.step_costs()
        if not follows_plan(settings, sizes.ep, sizes.esp):
            return {"sequential": PlanWithCosts(POLICIES["sequential"].plan(layered), layered)}
        can_split = no_split_reason(settings) is None
        whole = [name for name in POLICIES if name in policies and POLICIES[name].uses_micro_batches and can_split]
        by_layer = [name for name in layer_policies() if name in policies and name not in whole]
        plans = {name: PlanWithCosts(POLICIES[name].plan(layered), layered) for name in by_layer}
        if whole:
            split = self.step_costs(whole=True)
            limit = settings.model.batch if self.is_external else micro_batch_axis_size(settings, sizes.mp)
            found = cached_plans(whole, Topology(), split, samples=limit, again=again, show=show)
            plans |= {name: PlanWithCosts(plan, split) for name, plan in found.items()}
        if self.is_external:
            plans["auto"] = PlanWithCosts(POLICIES["joint"].plan(layered), layered)
        # A policy for single layers may be faster than the joint plan.
        if "joint" in plans:
            steps_s = {name: self._batch_s(planned) for name, planned in plans.items()}
            fastest = min(steps_s, key=steps_s.__getitem__)
            if steps_s[fastest] < steps_s["joint"] * (1 - ROUNDING):
                plans["joint"] = plans[fastest]
        for name, planned in plans.items():
            kinds = runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if planned.costs.can_split else "step")
            require_runnable(planned.plan, kinds, f"the plan by {name}")
        return plans

    def step_s(self, planned: PlanWithCosts) -> float:
        """Return the seconds of a step of all micro-batches, recomputed forward passes included."""
        return self.micro_batches * self._batch_s(planned) + self.unplanned_s

    def bound_s(self, plans: Iterable[PlanWithCosts]) -> float:
        """Return a lower bound of the seconds of a step by any plan with the costs of these."""
        # Policies for layers and for whole blocks have different costs: take the smaller bound.
        distinct = {id(planned.costs): planned.costs for planned in plans}.values()
        batch_s = min(bound_s(costs) + self._recomputation_bound_s(costs) for costs in distinct)
        return self.micro_batches * batch_s + self.unplanned_s

    def recomputed_pass(self, planned: PlanWithCosts) -> Timeline:
        """Return the forward passes that activation checkpoints run again in the backward pass; empty without.

        A checkpoint repeats its block's forward before the block's backward, dispatch and combine included. Steps in
        micro-batches recompute dense parts in their backward tasks (`step_costs`).
        """
        if not self._repeats_forward(planned.costs):
            return Timeline(0, (), "predicted")
        return simulate(extract_phase(planned.plan, "forward"), planned.costs)

    @property
    def unplanned_s(self) -> float:
        """Seconds of a step that no plan contains: gradients, and the output head of all micro-batches."""
        return sum(self.gradients_s.values()) + self.micro_batches * self.head_s

    @cached_property
    def gradients_s(self) -> dict[str, float]:
        """Seconds of the gradient all-reduces that no plan contains and that follow every step.

        "dense_s": parameters of no MoE layer (embedding, head, blocks after the last MoE layer), or all parameters
        outside experts if another framework reduces them. "experts_s": experts that several ranks hold.
        """
        settings, sizes = self.settings, self.sizes
        bucketed, rest = _reduced_bytes(self.meta, self.ranks, sizes.mp)
        reduced = [size for size in (rest, *(bucketed if self.is_external else ())) if size]
        dense_s = sum(self.costs.line("all-reduce/dp").seconds(size) for size in reduced)
        holders = self.ranks // (sizes.ep * sizes.esp)
        if holders == 1:
            return {"dense_s": dense_s, "experts_s": 0.0}
        assert settings.model.experts is not None
        if self.machine is None:
            line = self.costs.line("all-reduce/dp")
        else:
            line = self.machine.all_reduce(self.ranks, holders, sizes.ep * sizes.esp)
        layer_bytes = expert_bytes(settings, sizes) * settings.model.experts // sizes.ep
        return {"dense_s": dense_s, "experts_s": settings.model.num_moe_layers * line.seconds(layer_bytes)}

    @property
    def head_s(self) -> float:
        """Seconds of the output head's matrix products, forward and backward.

        0 for a byte-level model (`vocab_size` is None), whose head is small.
        """
        model = self.settings.model
        if model.vocab_size is None:
            return 0.0
        tokens = model.batch * model.seq_len / self.sizes.mp
        # Forward, and gradients of input and weights.
        return 3 * self.costs.line("gemm").seconds(2 * tokens * model.model_dim * model.vocab_size)

    def _batch_s(self, planned: PlanWithCosts) -> float:
        return makespan(*planned) + self.recomputed_pass(planned).end_s

    def _repeats_forward(self, costs: StepCosts) -> bool:
        return self.settings.recompute and not costs.can_split and costs.loss_s is None

    def _recomputation_bound_s(self, costs: StepCosts) -> float:
        """Return a lower bound of the seconds of `recomputed_pass` for any plan."""
        if not self._repeats_forward(costs):
            return 0.0

        def least_s(layer: LayerCosts) -> float:
            passes_s = (
                pass_bound_s(degree, chunk_times(layer.chunks["forward"], degree), contention=costs.contention)
                for degree in range(1, MAX_DEGREE + 1)
            )
            return layer.dense_total_s("forward") + min(passes_s)

        return sum(map(least_s, costs.layers))


def followed_policy(settings: Settings, sizes: Sizes) -> str:
    """Return the policy that training follows; "sequential" if steps follow no plan."""
    return selected_policy(settings) if follows_plan(settings, sizes.ep, sizes.esp) else "sequential"


def expert_bytes(settings: Settings, sizes: Sizes) -> int:
    """Return the bytes of this rank's shard of one expert's parameters."""
    expert = make_experts(settings.model)
    expert.setup(settings.model.model_dim, Place(shards=sizes.esp), device="meta")
    return sum(p.numel() for p in expert.parameters()) * (8 if settings.dtype == "fp64" else 4)


def describe_costs(costs: CostModel) -> str:
    named = printable(f"costs: {costs.machine or 'unnamed machine'}")
    if not costs.poor_fits:
        return named
    again = "start fusedmoe profile --again --budget 60 on the idle machine, with the same ranks"
    return f"{named}\npoor fits: {costs.poor_fits}. Predictions may be wrong and plans slow; {again}"


def sizes_outside_ranges(settings: Settings, sizes: Sizes, costs: CostModel) -> str:
    """Name the costs that are extrapolated far beyond their measured sizes; empty if none is, or tasks are measured."""
    workload, named = step_workload(settings, sizes.ep, sizes.esp, sizes.mp), []
    if any(shapes.startswith(workload.shapes) for shapes in costs.observed):
        return ""
    for line, needed in workload.operation_sizes().items():
        least, most = costs.ranges.get(line, (0.0, math.inf))
        unit = "FLOP" if line == "gemm" else "B"
        # A slope has the same relative error at any larger size, but a start-up time dominates small ones.
        if outside := [n for n in needed if 0 < n < least or n > _MAX_EXTRAPOLATION_FACTOR * most]:
            measured = f"measured {format_scaled(least, unit)} to {format_scaled(most, unit)}"
            named.append(f"{line} of {' and '.join(format_scaled(n, unit) for n in outside)} ({measured})")
    return ", ".join(named)


def format_scaled(value: float, unit: str) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def make_table(title: str, columns: Sequence[str], right: Collection[str] = ()) -> Table:
    table = Table(title=Text(printable(title), "table.title"), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def make_console() -> Console:
    """Return the console for tables, 120 characters wide if stdout is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def format_rows(rows: Sequence[PartComparison]) -> str:
    """Format milliseconds by kind of task as a table; the last row is the whole step."""
    columns = ("", "predicted", "measured", "error")
    table = make_table("busy time, ms; –: not predicted, or not measured by itself", columns, right=columns[1:])
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
