"""What `fusedmoe plan` prints is what training plans from the same costs, and only what it can run; in words and in the
picture alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, Sizes, StopRequest, choose_sizes, make_topology
from fusedmoe.cli.main import main
from fusedmoe.cli.plan_command import Report, plans_of
from fusedmoe.cli.settings import DTYPES, Settings
from fusedmoe.cli.step_plans import policy_of, why_not_split
from fusedmoe.cli.trainer import Trainer
from fusedmoe.models.config import ModelConfig, named_model
from fusedmoe.models.transformer import block_workload
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.cost import FusedCosts
from fusedmoe.schedule.draw import figure
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies, whole_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import RESOURCES
from tests.cluster import Cluster
from tests.marks import slowly

# Costs of fused operations so low that whoever may will take them.
FUSED_COSTS = replace(TESTBEDS["B"].costs, fused=FusedCosts(128, {"intra": 0.0, "inter": 0.0}))
SMALL: dict[str, Any] = dict(batch=4, k=1, layers=2, model_dim=16, heads=4, hidden=16, seq_len=8, experts=8)


def settings_of(
    schedule: str, ep: int, esp: int, mp: int, dtype: str = "fp32", **model: Any
) -> tuple[Settings, Launch, Sizes]:
    """On four ranks, two where these are enough."""
    launch = Launch(0, max(2, ep * esp), 0, 2)
    made = Settings(
        ModelConfig(**SMALL | model), ranks_per_node=2, ep=ep, esp=esp, mp=mp, dtype=dtype, schedule=schedule
    )
    return made, launch, choose_sizes(made, launch)


def can_run(policy: str, settings: Settings, sizes: Sizes) -> set[str]:
    split = policy in whole_policies() and not why_not_split(settings)
    return set(runnable_kinds(Capabilities(sizes.ep, sizes.esp), "blocks" if split else "step"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 2, 1), (2, 2, 2), *slowly(((1, 1, 1),), ((2, 1, 1),), ((4, 1, 2),), ((1, 2, 2),))]
)
@pytest.mark.parametrize("model", [{}, {"gate": "expert_choice"}], ids=["blocks", "layers"])
def test_every_plan_has_only_what_can_run(sizes: tuple[int, int, int], dtype: str, model: dict[str, Any]) -> None:
    settings, launch, found = settings_of("auto", *sizes, dtype, **model)
    plans = plans_of(settings, launch, found, FUSED_COSTS)
    several = {*layer_policies()} if model else {*POLICIES}
    assert plans.keys() == (several if found.ep * found.esp > 1 else {"sequential"})
    for name, (plan, _) in plans.items():
        assert {task.kind for task in plan} <= can_run(name, settings, found), name
        assert {"dispatch", "expert", "combine"} <= {task.kind for task in plan}


# Of each: the axes, a dtype, what the model has beside `SMALL`, and a schedule.
CASES: list[tuple[tuple[int, int, int], str, dict[str, Any], str]] = [
    ((2, 1, 1), "fp32", {"k": 2, "shared_hidden": 8}, "flowmoe"),
    ((1, 2, 2), "bf16", {"moe_every": 2, "layers": 5, "kv_heads": 2}, "auto"),
    ((2, 1, 1), "fp64", {"moe_every": 2, "layers": 5, "bias": True}, "fsmoe"),
    ((1, 2, 1), "fp32", {"gate": "expert_choice"}, "tutel"),
]
# Each pair of axes, model and schedule; a gate that looks at whole batches has no "lancet".
MORE = [
    (sizes, dtype, model | ({"kv_heads": sizes[2]} if "kv_heads" in model else {}), schedule)
    for row, sizes in enumerate(((4, 1, 1), (2, 2, 2), (1, 4, 4)))
    for column, (_, dtype, model, _) in enumerate(CASES)
    for schedules in [["auto", "pipemoe", *([] if "gate" in model else ["lancet"])]]
    for schedule in [schedules[(row + column) % len(schedules)]]
]


def trained(rank: int, world: int, folder: str, cases: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        for sizes, dtype, model, schedule in cases:
            settings, launch, found = settings_of(schedule, *sizes, dtype, **model)
            topology = make_topology(found, 60.0)
            trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**10), StopRequest())
            plan, costs = trainer.set_plan(FUSED_COSTS)
            policy = policy_of(settings)
            assert {task.kind for task in plan} <= can_run(policy, settings, found)
            if rank:
                continue
            printed = plans_of(settings, launch, found, FUSED_COSTS)[policy]
            assert costs == printed.costs, schedule
            if schedule != "flowmoe":  # of which training tries other sizes of buckets from the start
                report = Report(settings, launch, found, FUSED_COSTS)
                assert plan == report.plan and makespan(plan, costs) == report.step_s[policy], schedule


def test_what_is_printed_is_what_training_plans(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, trained, str(tmp_path), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_what_is_printed_is_what_training_plans_by_more_policies(cluster: Cluster, tmp_path: Path, case: Any) -> None:
    cluster.run(4, trained, str(tmp_path), [case])


def test_costs_of_what_training_cannot_run_change_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Mixtral on 32 ranks: by fused operations, which no step's plan can have, it would seem a tenth quicker."""
    costs = replace(TESTBEDS["B"].costs, fused=FusedCosts(128, {"intra": 5e-6, "inter": 1e-5}))
    (tmp_path / "costs.json").write_text(costs.to_json())
    flags = ["--model", "Mixtral-7B", "--layers", "2", "--ranks", "32", "--ranks-per-node", "4"]
    assert main(["plan", *flags, "--schedule", "joint", "--costs", str(tmp_path / "costs.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    # What the ranks reduce of a layer: projections of 32 heads and 8 of keys, a fourth on each; two norms; the gate.
    own = 4 * (4096 * (4096 + 2 * 1024 + 4096) // 4 + 2 * 4096 + 4096 * 8)
    model = named_model("Mixtral-7B").with_experts(32, 8)
    work = block_workload(model, 8, 4, 4, 4)
    step = work.step_costs(costs, [own] * 2, runnable_kinds(Capabilities(8, 4), "blocks"), whole=True, waits=True)
    plan = POLICIES["joint"].plan(step, samples=model.batch)
    assert data["step_s"] == pytest.approx(makespan(plan, step), rel=1e-9) and data["plan"] == str(plan)
    assert data["step_s"] == pytest.approx(0.211, abs=5e-4)


@pytest.mark.parametrize(
    ("placement", "schedule"),
    [("ep", "fsmoe"), ("fssdp", "joint")]
    + slowly(("ep", "tutel"), ("ep", "joint"), ("fssdp", "tutel"), ("fssdp", "fsmoe")),
)
def test_words_and_picture_say_the_same(capsys: pytest.CaptureFixture[str], schedule: str, placement: str) -> None:
    """For how much of the step a resource is in use, also with one queue for all links, and with copies of experts."""
    settings = Settings(
        ModelConfig(**SMALL | {"model_dim": 1024, "hidden": 4096, "seq_len": 1024}),
        ranks_per_node=4,
        schedule=schedule,
        placement=placement,
        placement_overlap=4 if placement == "fssdp" else None,
    )
    launch = Launch(0, 8, 0, 4)
    report = Report(settings, launch, Sizes(4, 2, 4, 1), TESTBEDS["A"].costs)
    report.print()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("in use: "))
    said = dict(zip(RESOURCES, ("computation", "links inside the node", "links between nodes"), strict=True))
    picture = figure(report.drawn)
    page = [text.get_text() for text in picture.axes[0].texts]
    for resource, words in said.items():
        share = page[page.index(resource) + 1]
        assert re.fullmatch(r"\d+%", share)
        assert re.search(rf"{words} {share}", line), (resource, share, line)
    # A row's share is that of the bars in it.
    for resource in RESOURCES:
        bars_s = sum(span.duration_s for span in report.drawn.on(resource))
        assert report.drawn.busy_s(resource) == pytest.approx(bars_s) and bars_s > 0
    assert {span.kind for span in report.drawn.on("intra")} == {"all-gather", "reduce-scatter"}
    assert str(report.plan) == str(Plan.parse(str(report.plan)))
