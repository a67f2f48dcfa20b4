"""`fusedmoe plan`: plans and tables of testbeds and of this machine, and refused arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.cli import step_plans
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import Launch, StopRequest, choose_sizes, make_topology
from fusedmoe.cli.main import main
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import PlannedJob, make_meta_model, step_workload
from fusedmoe.cli.trainer import Trainer
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.profiler import Profile
from fusedmoe.schedule.cost import MeasuredPart, Observed
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch, micro_batch_policies
from fusedmoe.schedule.task import RESOURCES
from tests.cli.on_ranks import command, is_picture
from tests.cluster import Cluster
from tests.marks import slowly

MODEL = ["--model", "Mixtral-7B", "--layers", "3"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_plan_for_testbed_reports_layout_and_best_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = planned(capsys, *MODEL, "--testbed", "B", "--png", str(tmp_path / "step.png"))
    assert data["layout"] == {"ranks": 32, "ranks_per_node": 4, "ep": 8, "esp": 4, "mp": 4, "dp": 8}
    assert data["machine"] == TESTBEDS["B"].costs.machine and data["policy"] == "joint"
    assert data["policies_s"].keys() == POLICIES.keys()
    assert data["step_s"] == min(data["policies_s"].values()) == data["policies_s"]["joint"]
    assert 0 < data["bound_s"] <= data["step_s"] * (1 + 1e-9)
    after_s = sum(data["gradients_after_step_s"].values())
    assert 0 < after_s == data["gradients_after_step_s"]["dense_s"]
    assert sum(data["critical_path_s"].values()) == pytest.approx(data["step_s"] - after_s)
    plan = Plan.parse(data["plan"])
    assert plan.fingerprint == data["fingerprint"]
    passes_s = 0.0
    for number, layer in enumerate(data["layers"]):
        for phase in ("forward", "backward"):
            found = layer[phase]
            assert layer["layer"] == number and found["chunks"] == plan.degrees[phase, number] > 1
            assert found["bound_by"] in RESOURCES
            assert found["critical_path_s"][found["bound_by"]] == max(found["critical_path_s"].values())
            passes_s += found["seconds"]
    assert len(data["layers"]) == 3
    assert passes_s + data["exposed_gradients_s"] == pytest.approx(data["step_s"] - after_s)
    assert is_picture(tmp_path / "step.png")


def test_plan_builds_the_model_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built, make = [], step_plans.make_model
    monkeypatch.setattr(step_plans, "make_model", lambda *arguments: built.append(1) or make(*arguments))
    planned(capsys, *MODEL, "--testbed", "B")
    assert len(built) == 1


@pytest.mark.parametrize(
    ("line", "bound", "policy"),
    [
        ("all-to-all/ep", "inter", "fsmoe"),
        *slowly(("gemm", "compute", "tutel"), ("reduce-scatter/esp", "intra", "fsmoe")),
    ],
)
def test_reported_bottleneck_follows_costs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, bound: str, policy: str
) -> None:
    costs = json.loads(TESTBEDS["B"].costs.to_json())
    costs["lines"][line]["beta_s"] *= 100
    costs["lines"][line]["r2"] = 0.28
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    layout = ["--ranks", "32", "--ranks-per-node", "4", "--costs", str(tmp_path / "costs.json")]
    data = planned(capsys, *MODEL, *layout, "--schedule", policy)
    assert data["poor_fits"] == f"{line} (r² 0.28)"
    assert data["policy"] == policy and data["step_s"] == data["policies_s"][policy]
    for layer in data["layers"]:
        assert layer["forward"]["bound_by"] == layer["backward"]["bound_by"] == bound


def test_plan_with_poorly_fitted_costs_names_the_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = json.loads(TESTBEDS["B"].costs.to_json())
    costs["lines"]["all-reduce/dp"]["r2"] = 0.4
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    flags = ["--ranks", "32", "--ranks-per-node", "4", "--costs", str(tmp_path / "costs.json"), "--schedule", "fsmoe"]
    assert main(["plan", *MODEL, *flags]) == 0
    out = capsys.readouterr().out
    assert "poor fits: all-reduce/dp (r² 0.40). Predictions may be wrong" in out and "profile --again" in out


def test_plan_names_costs_outside_the_measured_range(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A small layer extrapolates start-up times; task times measured in its own steps replace the lines."""
    ranges = {"gemm": (2.0**24, 2e10), "all-to-all/ep": (2.0**13, 2.5e7), "all-gather/esp": (2.0**13, 2.5e7)}
    costs = replace(TESTBEDS["B"].costs, ranges=ranges)
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    small = ["--model-dim", "64", "--hidden", "64", "--heads", "4", "--batch", "1", "--seq-len", "64", "--layers", "1"]
    flags = ["--costs", str(path), "--ranks", "4", "--ranks-per-node", "2", "--schedule", "fsmoe"]
    assert main(["plan", *small, *flags]) == 0
    out = capsys.readouterr().out
    assert "costs outside the measured range, extrapolated: gemm of 262 kFLOP and " in out
    assert "(measured 16.8 MFLOP to 20 GFLOP)" in out and "all-to-all/ep of" not in out
    shapes = step_workload(Settings().changed({"model.model_dim": 64, "model.hidden": 64}), 2, 2, 2).shapes
    path.write_text(replace(costs, observed={shapes: Observed({MeasuredPart("expert", "forward"): 1e-3})}).to_json())
    assert main(["plan", *small, *flags]) == 0
    assert "outside the measured range" not in capsys.readouterr().out
    assert main(["plan", "--model-dim", "1024", *flags]) == 0
    assert "outside the measured range" not in capsys.readouterr().out


def test_plan_prints_tables_of_layers_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--testbed", "A", "--schedule", "fsmoe", "--experts", "6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Mixtral-7B with layers=3, experts=6: 3 layers") and "poor fits" not in out
    assert "48 ranks (6 × 8): ep 6, esp 8, mp 8, dp 6" in out and TESTBEDS["A"].costs.machine in out
    assert "bound by" in out and "critical path: gradient-all-reduce" in out and "over bound" in out
    assert all(name in out for name in POLICIES)
    assert "micro-batches: forward 1; backward 1; gradients in buckets of up to" in out and "utilization: " in out
    assert "0–2" in out  # equal layers share a row


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_free_replicas_fit_in_idle_link_time(capsys: pytest.CaptureFixture[str], tmp_path: Path, again: bool) -> None:
    """With slow computation, links send some replicas for free; more replicas cost the excess time."""
    costs = json.loads(TESTBEDS["B"].costs.to_json())
    costs["lines"]["gemm"]["beta_s"] *= 30
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    flags = [*MODEL, "--ranks", "32", "--ranks-per-node", "4", "--costs", str(tmp_path / "costs.json")]
    flags += ["--schedule", "fsmoe", "--placement", "fssdp", "--hidden", "512", *["--rematerialise"] * again]
    data = planned(capsys, *flags, "--png", str(tmp_path / "step.png"))
    assert is_picture(tmp_path / "step.png")
    copies, model = data["copies"], data["model"]
    assert copies["expert_bytes"] == 3 * model["model_dim"] * 512 * 4 // data["layout"]["esp"]
    assert 0 < copies["overlap"] <= model["experts"] and copies["seconds"] <= sum(copies["hidden_s"]) / 3
    some = planned(capsys, *flags, "--placement-overlap", "1")["copies"]
    assert some["seconds"] == pytest.approx(copies["seconds"] / copies["overlap"])
    assert some["seconds"] < min(some["hidden_s"]) and some["step_s"] == pytest.approx(data["step_s"])
    many = planned(capsys, *flags, "--placement-overlap", str(50 * copies["overlap"]))["copies"]
    assert many["step_s"] > data["step_s"] + 40 * copies["seconds"]
    assert main(["plan", *flags]) == 0
    assert f"{copies['overlap']} experts of" in capsys.readouterr().out
    for placement in ("ep", "algorithm1"):
        assert planned(capsys, *flags, "--placement", placement)["copies"] is None


def test_replicas_are_planned_for_zero_slope_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A fitted cost line may have slope zero."""
    costs = json.loads(TESTBEDS["B"].costs.to_json())
    costs["lines"]["all-to-all/ep"]["beta_s"] = 0.0
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    flags = [*MODEL, "--ranks", "32", "--ranks-per-node", "4", "--costs", str(tmp_path / "costs.json")]
    data = planned(capsys, *flags, "--schedule", "fsmoe", "--placement", "fssdp", "--placement-overlap", "4")
    assert data["copies"]["step_s"] == pytest.approx(data["step_s"])


FLOWMOE = ["--model", "LLaMA2-MoE", "--layers", "3", "--testbed", "B"]


@pytest.mark.slow
def test_flowmoe_plan_splits_whole_layers_into_micro_batches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    data = planned(capsys, *FLOWMOE, "--schedule", "flowmoe", "--png", str(tmp_path / "step.png"))
    assert data["policy"] == "flowmoe" and data["not_split"] is None and not data["weight_gradients_apart"]
    plan = Plan.parse(data["plan"])
    for phase in ("forward", "backward"):
        (degree,) = {plan.degrees[phase, layer] for layer in range(3)}
        assert data["micro_batches"][phase] == [degree] * 3 and degree in (2, 4)  # 4 samples
        assert sum(task.kind == "attention" and task.phase == phase for task in plan) == 3 * degree
    assert data["bucket_bytes"] == max(task.size or 0 for task in plan if task.kind == "gradient-all-reduce")
    after_s = sum(data["gradients_after_step_s"].values())
    assert sum(data["critical_path_by_resource_s"].values()) == pytest.approx(data["step_s"] - after_s)
    assert all(0 < busy <= data["step_s"] for busy in data["busy_s"].values())
    assert data["gap_to_bound"] == pytest.approx(data["step_s"] / data["bound_s"] - 1)
    assert data["policies_s"]["joint"] == min(data["policies_s"].values())
    lancet = planned(capsys, *FLOWMOE, "--schedule", "lancet")
    assert lancet["weight_gradients_apart"] and lancet["step_s"] == data["policies_s"]["lancet"]

    # A gate over whole batches, and a model without a split.
    other = planned(capsys, *FLOWMOE, "--gate", "expert_choice")
    assert "expert_choice needs the whole batch" in other["not_split"] and "flowmoe" not in other["policies_s"]
    assert other["micro_batches"]["forward"] == [1, 1, 1]
    assert planned(capsys, *FLOWMOE, "--batch", "1", "--schedule", "flowmoe")["micro_batches"]["backward"] == [1, 1, 1]


@pytest.mark.slow
def test_searched_plans_are_cached(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    first = planned(capsys, *FLOWMOE)
    assert len(list(tmp_path.glob("plan-*.json"))) == len(micro_batch_policies())
    monkeypatch.setattr(PlanSearch, "plan", None)
    assert planned(capsys, *FLOWMOE) == first
    with pytest.raises(TypeError):
        main(["plan", *FLOWMOE, "--again"])


@pytest.mark.slow
def test_capacity_with_k2_adds_permute_task(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, waits in ((["--k", "2"], True), (["--k", "2", "--capacity-factor", "none"], False)):
        plan = Plan.parse(planned(capsys, *FLOWMOE, *flags, "--schedule", "flowmoe")["plan"])
        assert any(task.kind == "permute" for task in plan) == waits


# A model's shape, and whether all of a batch is routed before the first row is sent; None: no micro-batches.
SHAPES: list[tuple[dict[str, Any], bool | None]] = [
    ({}, True),  # along positions
    ({"batch": 2}, False),
    ({"objective": "masked"}, False),
    ({"order": "dropless"}, False),
    ({"batch": 2, "k": 2}, True),
    ({"batch": 2, "k": 2, "gate": "switch"}, False),  # one choice, whatever k is
    ({"gate": "expert_choice"}, None),
]


def compare_plan_and_training_costs(rank: int, world: int) -> None:
    shape: dict[str, Any] = dict(batch=1, k=1, layers=2, model_dim=8, heads=2, hidden=8, seq_len=8, experts=4)
    launch, costs = Launch(rank, world, 0, 1), TESTBEDS["B"].costs
    for changes, waits in SHAPES:
        policy = "fsmoe" if waits is None else "flowmoe"
        settings = Settings(ModelConfig(**{**shape, **changes}), ranks_per_node=1, schedule=policy)
        sizes = choose_sizes(settings, launch)
        topology = make_topology(sizes, 60.0)
        trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**10), StopRequest())
        _, trained = trainer.set_plan(costs)
        job = PlannedJob(settings, world, sizes, costs, make_meta_model(settings))
        planned = job.step_costs(waits is not None)
        assert planned == trained and all(trained.gradient_bytes), changes
        assert all((layer.micro and layer.micro.waits) == waits for layer in trained.layers), changes


def test_plan_uses_costs_of_training(cluster: Cluster) -> None:
    cluster.run(2, compare_plan_and_training_costs)


def test_testbed_with_fewer_ranks_uses_smaller_layout(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, *MODEL, "--testbed", "B", "--ranks", "4")  # one node
    assert data["layout"] == {"ranks": 4, "ranks_per_node": 4, "ep": 1, "esp": 4, "mp": 4, "dp": 1}
    # One replica, whose ranks all have norms and gates: only these are reduced.
    reduced = {task.size for task in Plan.parse(data["plan"]) if task.kind == "gradient-all-reduce"}
    model = data["model"]
    assert max(size or 0 for size in reduced) <= 4 * 3 * model["model_dim"] * (2 + model["experts"])


@pytest.mark.slow
def test_plan_uses_profile_measured_on_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """`profile` measures under ranks, `plan` loads the profile there, and a single process reads it from a file."""
    layout = ["--ranks-per-node", "2"]
    ranks = cluster.run(4, command, str(tmp_path), "profile", "--budget", "0.4", *layout, "--json", "costs.json")
    assert [code for code, *_ in ranks] == [0] * 4
    (code, out, _), *others = cluster.run(4, command, str(tmp_path), "plan", *layout, "--json")
    assert code == 0 and others == [(0, "", "")] * 3
    here = json.loads(out)
    found = Profile.from_json((tmp_path / "costs.json").read_text())
    assert here["machine"] == found.costs.machine
    (code, out, _), *_ = cluster.run(
        1, command, str(tmp_path), "plan", *layout, "--json", "--ranks", "4", "--costs", "costs.json"
    )
    assert code == 0 and json.loads(out) == here


@pytest.mark.slow
def test_single_rank_plan_has_no_communication(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(1, command, str(tmp_path), "profile", "--budget", "0.5")
    ((code, out, _),) = cluster.run(1, command, str(tmp_path), "plan", "--json")
    data = json.loads(out)
    assert code == 0 and data["critical_path_s"].keys() == {"expert", "attention"}
    assert data["layers"][0]["forward"]["chunks"] == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ranks", "8"], "cannot measure costs of 8 ranks on 1: start as many with torchrun, or use --costs"),
        (
            ["--costs", "nowhere.json", "--ranks", "8"],
            "--costs nowhere.json: nowhere.json cannot be read: No such",
        ),
        (["--costs", "text.json"], "--costs needs --ranks"),
        (["--costs", "text.json", "--ranks", "8"], "--costs text.json: cost model: not JSON"),
        (["--costs", "lines.json", "--ranks", "8"], "'all-gather/esp' was not measured; run fusedmoe profile"),
        (["--testbed", "A", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--testbed", "A", "--schedule", "off"], "--schedule off has no plan"),
        (
            ["--testbed", "A", "--schedule", "flowmoe", "--gate", "expert_choice"],
            "gate expert_choice needs the whole batch",
        ),
        (
            ["--testbed", "A", "--schedule", "lancet", "--placement", "fssdp"],
            "--placement fssdp moves experts of whole layers",
        ),
        (["--testbed", "A", "--layers", "1", "--moe-every", "2"], "the model has no MoE layer"),
        (["--testbed", "A", "--costs", "text.json"], "not allowed with"),
        (["--testbed", "A", "--png", "no/such/step.png"], "folder no/such does not exist"),
    ],
)
def test_plan_rejects_invalid_flags_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("no costs")
    lines = json.loads(TESTBEDS["A"].costs.to_json())
    del lines["lines"]["all-gather/esp"]
    Path("lines.json").write_text(json.dumps(lines))
    try:
        code = main(["plan", *flags])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and says in " ".join(error.split())


def test_help_of_plan_profile_and_trace_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command_name, words in (
        ("plan", ("examples:", "--testbed", "critical path", "--again", *POLICIES)),
        ("profile", ("examples:", "contention", "FUSEDMOE_CACHE", "--json")),
        ("trace", ("examples:", "ui.perfetto.dev", "--schedule")),
    ):
        with pytest.raises(SystemExit) as end:
            main([command_name, "--help"])
        out = capsys.readouterr().out
        assert end.value.code == 0 and all(word in out for word in words)


@pytest.mark.parametrize("flags", [["--order", "einsum"], ["--wire", "fp8"], *slowly(["--wire-dtype", "bf16"])])
def test_plan_accepts_einsum_order_and_wire_dtype(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--testbed", "A", "--layers", "2", "--schedule", "lancet", *flags]) == 0
    assert "lancet" in capsys.readouterr().out


def test_recomputation_adds_forward_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of blocks repeat all of the forward pass; micro-batches repeat dense parts only."""
    flags = (*MODEL, "--testbed", "B", "--schedule", "fsmoe")
    saved, again = planned(capsys, *flags), planned(capsys, *flags, "--recompute")
    assert saved["recomputed_s"] == 0.0 and again["plan"] == saved["plan"]
    forward_s = sum(layer["forward"]["seconds"] for layer in saved["layers"])
    assert again["recomputed_s"] == pytest.approx(forward_s)
    assert again["step_s"] == pytest.approx(saved["step_s"] + again["recomputed_s"])
    for policy, seconds in again["policies_s"].items():
        assert seconds > saved["policies_s"][policy] and seconds >= again["bound_s"] * (1 - 1e-9)
    lengthened = {name: again["policies_s"][name] - saved["policies_s"][name] for name in ("fsmoe", "flowmoe")}
    assert 0 < lengthened["flowmoe"] < lengthened["fsmoe"]
    assert main(["plan", *flags, "--recompute"]) == 0
    assert "run again by activation checkpoints" in capsys.readouterr().out


def test_near_names_are_suggested_and_aliases_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, near in ((("--machine", "h100"), "dgx-h100"), (("--model", "mixtral"), "Mixtral-7B")):
        with pytest.raises(SystemExit):
            main(["plan", *flags])
        assert f"did you mean {near}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--machine", "xyz"])
    assert "did you mean" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "Mixtral-8x7B is Mixtral-7B" in " ".join(capsys.readouterr().out.split())
