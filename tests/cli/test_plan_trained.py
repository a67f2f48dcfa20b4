"""`fusedmoe plan` prints training's plan for the same costs, limited to runnable plans; text and picture agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe import Topology
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, Sizes, StopRequest, choose_sizes, make_topology, resolve_sizes
from fusedmoe.cli.main import main
from fusedmoe.cli.plan_command import PlanReport
from fusedmoe.cli.settings import DTYPES, Settings
from fusedmoe.cli.step_plans import (
    PlannedJob,
    machine_costs,
    make_meta_model,
    no_split_reason,
    selected_policy,
    step_workload,
)
from fusedmoe.cli.trainer import Trainer
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig, named_model
from fusedmoe.models.transformer import Transformer, block_workload
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.cost import CostModel, FusedCosts, MeasuredPart, Observed
from fusedmoe.schedule.draw import figure
from fusedmoe.schedule.machines import MACHINES, TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies, micro_batch_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import RESOURCES
from fusedmoe.schedule.workload import PER_LAYER_SUFFIX
from fusedmoe.training.gradient_buckets import reduced_bytes
from tests.cluster import Cluster
from tests.marks import slowly

# Costs of fused operations low enough that every policy allowed to use them does.
FUSED_COSTS = replace(TESTBEDS["B"].costs, fused=FusedCosts(128, {"intra": 0.0, "inter": 0.0}))
SMALL: dict[str, Any] = dict(batch=4, k=1, layers=2, model_dim=16, heads=4, hidden=16, seq_len=8, experts=8)


def settings_of(
    schedule: str, ep: int, esp: int, mp: int, dtype: str = "fp32", **model: Any
) -> tuple[Settings, Launch, Sizes]:
    """Settings on four ranks, or two if sufficient."""
    launch = Launch(0, max(2, ep * esp), 0, 2)
    made = Settings(
        ModelConfig(**SMALL | model), ranks_per_node=2, ep=ep, esp=esp, mp=mp, dtype=dtype, schedule=schedule
    )
    return made, launch, choose_sizes(made, launch)


def planned_job(settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel) -> PlannedJob:
    return PlannedJob(settings, launch.ranks, sizes, costs, make_meta_model(settings))


def runnable_task_kinds(policy: str, settings: Settings, sizes: Sizes) -> set[str]:
    split = policy in micro_batch_policies() and not no_split_reason(settings)
    return set(runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if split else "step"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 2, 1), (2, 2, 2), *slowly(((1, 1, 1),), ((2, 1, 1),), ((4, 1, 2),), ((1, 2, 2),))]
)
@pytest.mark.parametrize("model", [{}, {"gate": "expert_choice"}], ids=["blocks", "layers"])
def test_plans_have_only_runnable_tasks(sizes: tuple[int, int, int], dtype: str, model: dict[str, Any]) -> None:
    settings, launch, found = settings_of("auto", *sizes, dtype, **model)
    plans = planned_job(settings, launch, found, FUSED_COSTS).plans()
    several = {*layer_policies()} if model else {*POLICIES}
    assert plans.keys() == (several if found.ep * found.esp > 1 else {"sequential"})
    for name, (plan, _) in plans.items():
        assert {task.kind for task in plan} <= runnable_task_kinds(name, settings, found), name
        assert {"dispatch", "expert", "combine"} <= {task.kind for task in plan}


# Each case: the axes, a dtype, changes to `SMALL`, and a schedule.
CASES: list[tuple[tuple[int, int, int], str, dict[str, Any], str]] = [
    ((2, 1, 1), "fp32", {"k": 2, "shared_hidden": 8}, "flowmoe"),
    ((1, 2, 2), "bf16", {"moe_every": 2, "layers": 5, "kv_heads": 2}, "auto"),
    ((2, 1, 1), "fp64", {"moe_every": 2, "layers": 5, "bias": True}, "fsmoe"),
    ((1, 2, 1), "fp32", {"gate": "expert_choice"}, "tutel"),
]
# Each pair of axes, model and schedule; a gate over whole batches excludes "lancet".
MORE = [
    (sizes, dtype, model | ({"kv_heads": sizes[2]} if "kv_heads" in model else {}), schedule)
    for row, sizes in enumerate(((4, 1, 1), (2, 2, 2), (1, 4, 4)))
    for column, (_, dtype, model, _) in enumerate(CASES)
    for schedules in [["auto", "pipemoe", *([] if "gate" in model else ["lancet"])]]
    for schedule in [schedules[(row + column) % len(schedules)]]
]


def compare_printed_and_trained_plans(rank: int, world: int, folder: str, cases: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        for sizes, dtype, model, schedule in cases:
            settings, launch, found = settings_of(schedule, *sizes, dtype, **model)
            topology = make_topology(found, 60.0)
            trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**10), StopRequest())
            plan, costs = trainer.set_plan(FUSED_COSTS)
            policy = selected_policy(settings)
            assert {task.kind for task in plan} <= runnable_task_kinds(policy, settings, found)
            if rank:
                continue
            job = planned_job(settings, launch, found, FUSED_COSTS)
            printed = job.plans()[policy]
            assert costs == printed.costs, schedule
            if schedule != "flowmoe":  # training tries other bucket sizes from the start
                report = PlanReport(job)
                after_s = sum(job.gradients_s.values())
                assert plan == report.plan and makespan(plan, costs) + after_s == report.step_s[policy], schedule


def test_printed_plan_equals_training_plan(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, compare_printed_and_trained_plans, str(tmp_path), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_printed_plan_equals_training_plan_for_more_policies(cluster: Cluster, tmp_path: Path, case: Any) -> None:
    cluster.run(4, compare_printed_and_trained_plans, str(tmp_path), [case])


def test_fused_costs_do_not_change_predicted_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Mixtral on 32 ranks: fused operations, which no step's plan can use, would predict a 10% faster step."""
    costs = replace(TESTBEDS["B"].costs, fused=FusedCosts(128, {"intra": 5e-6, "inter": 1e-5}))
    (tmp_path / "costs.json").write_text(costs.to_json())
    flags = ["--model", "Mixtral-7B", "--layers", "2", "--ranks", "32", "--ranks-per-node", "4"]
    assert main(["plan", *flags, "--schedule", "joint", "--costs", str(tmp_path / "costs.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    # All-reduced parameters of a layer: projections of 32 heads and 8 key heads, 1/4 per rank; two norms; gate.
    own = 4 * (4096 * (4096 + 2 * 1024 + 4096) // 4 + 2 * 4096 + 4096 * 8)
    model = named_model("Mixtral-7B").with_experts(32, 8)
    work = block_workload(model, 8, 4, 4, 4)
    step = work.step_costs(costs, [own] * 2, runnable_kinds(Capabilities(8, 4), "blocks"), whole=True, waits=True)
    plan = POLICIES["joint"].plan(step, samples=model.batch)
    after_s = sum(data["gradients_after_step_s"].values())
    assert data["step_s"] == pytest.approx(makespan(plan, step) + after_s, rel=1e-9) and data["plan"] == str(plan)
    assert data["step_s"] - after_s == pytest.approx(0.211, abs=5e-4)


RANKS_OF_MACHINES = [("dgx-h100", 64), ("gb200-nvl72", 64), *slowly(*product(MACHINES, (8, 64, 512)))]


@pytest.mark.parametrize(("machine", "ranks"), RANKS_OF_MACHINES)
def test_joint_policy_is_never_slower_than_others(machine: str, ranks: int) -> None:
    """Every row of the table includes the same gradients, wherever a policy reduces them."""
    figures = MACHINES[machine]
    for name, layers in product(("bytes-small", "GPT2-XL-MoE", "DeepSeek-V3"), (1, 3)):
        model = named_model(name)
        settings = Settings(replace(model, layers=layers * model.moe_every), dtype=figures.dtype, schedule="auto")
        try:
            sizes, settings = resolve_sizes(settings, Launch(0, ranks, 0, figures.node(ranks)))
            costs = machine_costs(figures, settings, sizes, ranks)
        except ConfigError:
            continue  # the model has too few experts
        plans = planned_job(settings, Launch(0, ranks, 0, sizes.ranks_per_node), sizes, costs).plans()
        assert len({planned.costs.gradient_bytes for planned in plans.values()}) == 1
        seconds = {policy: makespan(*planned) for policy, planned in plans.items()}
        assert seconds.get("joint", 0.0) <= min(seconds.values()) * (1 + 1e-9), (name, layers, seconds)


def test_joint_policy_is_not_behind_a_policy_with_faster_measured_layers() -> None:
    """Chunks of layers were measured to be faster than micro-batches of the same layers."""
    settings, launch, sizes = settings_of("joint", 2, 2, 2)
    costs = TESTBEDS["B"].costs
    shapes = step_workload(settings, 2, 2, 2).shapes
    fast = {MeasuredPart("attention", phase): 1e-6 for phase in ("forward", "backward")}
    measured = {shapes + PER_LAYER_SUFFIX: Observed(fast), shapes: Observed(dict.fromkeys(fast, 1e-2))}
    plans = planned_job(settings, launch, sizes, replace(costs, observed=measured)).plans()
    seconds = {policy: makespan(*planned) for policy, planned in plans.items()}
    assert seconds["fsmoe"] < seconds["flowmoe"] and seconds["joint"] == min(seconds.values())


@pytest.mark.parametrize("changed", [{}, {"moe_every": 2, "layers": 5}, {"shared_hidden": 8}, {"bias": True}])
def test_every_gradient_is_reduced_exactly_once(changed: dict[str, Any]) -> None:
    """Buckets hold the dense parameters of the blocks; the rest and the experts follow the step."""
    model = Transformer(ModelConfig(**SMALL | changed), Topology())
    dense = model.dense_parameters()
    blocks = model.pipeline_blocks().dense_parameters
    assert [{*map(id, layer)} for layer in dense] == [{*map(id, layer)} for layer in blocks]
    layers, rest = reduced_bytes(model, 4, 1, dense)
    of_experts = sum(p.numel() for layer in model.moe_layers() for p in layer.experts.parameters())
    assert sum(layers) + rest == 4 * (sum(p.numel() for p in model.parameters()) - of_experts) and rest > 0


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [("ep", "fsmoe"), ("fssdp", "joint")]
    + slowly(("ep", "tutel"), ("ep", "joint"), ("fssdp", "tutel"), ("fssdp", "fsmoe")),
)
def test_printed_busy_shares_equal_timeline(capsys: pytest.CaptureFixture[str], schedule: str, placement: str) -> None:
    """The busy share of each resource, also with one queue for all links, and with replicas."""
    settings = Settings(
        ModelConfig(**SMALL | {"model_dim": 1024, "hidden": 4096, "seq_len": 1024}),
        ranks_per_node=4,
        schedule=schedule,
        placement=placement,
        placement_overlap=4 if placement == "fssdp" else None,
    )
    launch = Launch(0, 8, 0, 4)
    report = PlanReport(planned_job(settings, launch, Sizes(4, 2, 4, 1), TESTBEDS["A"].costs))
    report.print()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("utilization: "))
    said = dict(zip(RESOURCES, ("computation", "links inside the node", "links between nodes"), strict=True))
    picture = figure(report.drawn_timeline)
    page = [text.get_text() for text in picture.axes[0].texts]
    for resource, words in said.items():
        share = page[page.index(resource) + 1]
        assert re.fullmatch(r"\d+%", share)
        assert re.search(rf"{words} {share}", line), (resource, share, line)
    # The printed share equals the share of its bars.
    for resource in RESOURCES:
        bars_s = sum(span.duration_s for span in report.drawn_timeline.on(resource))
        assert report.drawn_timeline.busy_s(resource) == pytest.approx(bars_s) and bars_s > 0
    assert {span.kind for span in report.drawn_timeline.on("intra")} == {"all-gather", "reduce-scatter"}
    assert str(report.plan) == str(Plan.parse(str(report.plan)))
