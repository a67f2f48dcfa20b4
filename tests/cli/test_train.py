"""The command as a user runs it: outputs, stopping, and bitwise resumption."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fusedmoe.cli.commands import _TRAIN
from fusedmoe.cli.job import Launch, StopRequest, choose_sizes, make_model, make_topology
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.cli.main import main
from fusedmoe.cli.run_dir import RunDir
from fusedmoe.cli.settings import Settings, read_settings
from fusedmoe.cli.step_plans import selected_policy
from fusedmoe.cli.train import TrainingJob, _needs_timeline, _remaining_steps, count_parameters
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.profiler import Profile
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.schedule.plan_chooser import PlanChooser
from tests.cli.on_ranks import command, is_picture
from tests.cluster import Cluster
from tests.marks import slowly

# The gate draws noise, so a resume has to restore its generator.
MODEL: dict[str, Any] = dict(
    layers=2, model_dim=16, heads=4, hidden=8, experts=4, gate="gshard", seq_len=16, batch=2, capacity_factor=1.0
)
TINY = ["--layers", "1", "--model-dim", "16", "--hidden", "8", "--experts", "4", "--seq-len", "16", "--batch", "2"]
TINY += ["--gate", "gshard", "--eval-batches", "2", "--checkpoint-every", "0"]
ROOT = Path(__file__).parents[2]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "aux_loss", "grad_norm", "dropped", "held_out_loss")
    return [tuple(record.get(key) for key in keys) for record in metrics(run)]


def check_losses(run: Path, right: Path) -> None:
    """Require the losses of another run, up to the order of sums."""
    for found, expected in zip(losses(run), losses(right), strict=True):
        for a, b in zip(found, expected, strict=True):
            assert a == b if b is None else a == pytest.approx(b, rel=1e-9)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip pictures, which take longer than the steps."""
    for drawing in ("fusedmoe.cli.train.draw", "fusedmoe.cli.run_dir.plot_loads"):
        monkeypatch.setattr(drawing, mock.Mock())


def test_single_process_training_writes_run_folder(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--steps", "4", "--data", str(text), "--timeline-step", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    (run,) = (tmp_path / "runs").iterdir()
    assert any(line.endswith(f"runs/{run.name}") for line in printed)
    assert {path.name for path in run.iterdir()} == {
        *("config.json", "metrics.jsonl", "loads.json", "loads.png", "checkpoint", "timeline.png", "trace.json")
    }
    # The help lists these files without a condition.
    listed = re.findall(r"^  (\w+\.\w+|\w+/) {2,}(?! |with |under )", _TRAIN, re.MULTILINE)
    assert len(listed) >= 5 and all((run / name).exists() for name in listed), listed
    assert is_picture(run / "loads.png")
    records = metrics(run)
    assert "moe/max_vio" not in records[2] and "exposed_s" in records[1]
    assert records[3]["moe/dropped"] == pytest.approx(statistics.mean(record["dropped"] for record in records[:4]))
    counts = np.array(json.loads((run / "loads.json").read_text())["tokens"]).sum((0, 1, 2))
    assert records[3]["moe/max_vio"] == pytest.approx(counts.max() / counts.mean() - 1)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 4]
    assert printed[-1] == f"held-out loss: {records[-1]['held_out_loss']:.4f} nats per byte"
    assert 4 < records[-1]["held_out_loss"] < 7
    config = json.loads((run / "config.json").read_text())
    assert config["chosen"]["sequences_per_step"] == 2
    assert read_settings(run).model.layers == 1
    assert config["layout"] == {"ranks": 1, "ranks_per_node": 1, "ep": 1, "esp": 1, "mp": 1}
    assert config["parameters"] > config["active_parameters"] > 0
    trace = json.loads((run / "trace.json").read_text())
    found = {event["args"].get("kind") for event in trace["traceEvents"]}
    assert {"attention", "gate", "expert", "loss", "optimizer"} <= found
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")

    assert main(["train", *TINY, "--run-dir", str(run)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_resumed_job_has_bitwise_equal_losses(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    flags = [*TINY, "--steps", "6", "--data", str(text)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", *flags, "--run-dir", str(whole)]) == 0
    assert main(["train", *flags, "--run-dir", str(parts), "--stop-at", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"Continue with: fusedmoe train --resume {parts}")
    with (parts / "metrics.jsonl").open("a") as file:  # as if it had been killed later, within a line
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    (parts / "checkpoint").rename(parts / ".checkpoint.previous")  # and during the swap of the next checkpoint
    assert main(["train", "--resume", str(parts)]) == 0
    assert losses(parts) == losses(whole)
    assert "steps 4 to 6" in capsys.readouterr().out
    assert main(["train", "--resume", str(parts)]) == 0  # for a finished job: evaluates the held-out loss again
    assert "6 of 6 steps are done: nothing left to do" in capsys.readouterr().out
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("command", ["train", "trace"])
def test_schedule_unsupported_by_gate_fails_before_connecting(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error comes before the ranks connect: measuring would take half a minute and leave a folder."""
    monkeypatch.chdir(tmp_path)
    for name, number in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    for module in ("train", "job"):
        monkeypatch.setattr(f"fusedmoe.cli.{module}.process_group", lambda *_: pytest.fail("ranks would meet"))
    assert main([command, "--gate", "expert_choice", "--schedule", "flowmoe"]) == 2
    assert "splits whole layers, but gate expert_choice needs the whole batch" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("done", "last", "steps", "said"),
    [
        (0, 9, 9, "9 steps"),
        (0, 4, 9, "steps 1 to 4 of 9"),
        (5, 9, 9, "steps 6 to 9"),
        (9, 9, 9, "9 of 9 steps are done: nothing left to do"),
        (12, 9, 9, "12 of 9 steps are done: nothing left to do"),  # --steps was lowered
        (5, 4, 9, "5 of 9 steps are done: nothing left to do until step 4"),
    ],
)
def test_remaining_steps_are_reported(done: int, last: int, steps: int, said: str) -> None:
    assert _remaining_steps(done, last, steps) == said


def test_chosen_plan_is_drawn_not_trial_plan() -> None:
    """The drawn plan is the chosen plan, not the plan on trial at the timeline's step; a later choice is drawn too."""

    def drawn(follows: list[tuple[str, bool]], picture: str | None = None) -> list[int]:
        settings = Settings(steps=len(follows), timeline_step=2)
        found = []
        for step, (plan, settled) in enumerate(follows):
            trainer: Any = SimpleNamespace(plan_name=plan, is_settled=settled)
            if _needs_timeline(settings, step, trainer, picture):
                picture = plan
                found.append(step)
        return found

    assert drawn([("off", True)] * 6) == [2]
    assert drawn([("a", False), ("b", False), ("a", False), ("b", False), ("a", True), ("a", True)]) == [4]
    assert drawn([("a", True)] * 3 + [("b", False), ("b", False), ("b", True), ("b", True)]) == [2, 5]
    assert drawn([("a", True)] * 3 + [("b", False), ("a", True)]) == [2]
    assert drawn([("a", False)] * 4) == [3]  # the last step in any case
    assert drawn([("off", True)] * 2) == [1]
    assert drawn([("off", True)] * 6, picture="off") == []  # for a resumed job


def test_masked_model_trains_in_every_precision(tmp_path: Path, text: Path, no_pictures: None) -> None:
    held_out = []
    for dtype in ("fp32", "bf16", "fp64"):
        flags = ["--model", "BERT-Large-MoE", *TINY, "--heads", "4", "--steps", "2", "--data", str(text)]
        flags += ["--gate", "topk"]  # noise depends on the precision
        run = tmp_path / dtype
        assert main(["train", *flags, "--dtype", dtype, "--recompute", "--run-dir", str(run)]) == 0
        held_out.append(metrics(run)[-1]["held_out_loss"])
    assert held_out[0] == pytest.approx(held_out[2], rel=1e-5)
    assert held_out[1] == pytest.approx(held_out[2], rel=0.02)
    assert len(set(held_out)) == 3


def train_with_slow_picture(rank: int, world: int, folder: str, *arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.cli.train.METRICS_EVERY", 2)
        patch.setattr("fusedmoe.cli.train.draw", lambda *_, **__: time.sleep(8))
        return command(rank, world, folder, *arguments)[0]


def test_exposed_time_excludes_drawing_of_timeline(
    cluster: Cluster, tmp_path: Path, text: Path, no_pictures: None
) -> None:
    """Rank 0 draws after step 3; the exposed communication of step 4 is recorded."""
    layout = ["--ep", "2", "--esp", "1", "--mp", "1", "--timeline-step", "2", "--steps", "4"]
    arguments = ["train", *TINY, *layout, "--data", str(text), "--run-dir", str(tmp_path / "run")]
    assert cluster.run(2, train_with_slow_picture, str(tmp_path), *arguments) == [0, 0]
    records = metrics(tmp_path / "run")
    assert (
        "exposed_s" in records[2] and 0 < records[3]["moe/exposed_s"] < 3.5
    )  # half of it, the mean of two ranks, would be 4


def test_resume_reports_changed_layout_and_batch_that_keeps_it(
    cluster: Cluster, tmp_path: Path, text: Path, no_pictures: None
) -> None:
    run = tmp_path / "run"
    flags = ["train", *TINY, "--steps", "2", "--data", str(text), "--timeline-step", "1000000", "--batch", "6"]
    layout = ["--ep", "2", "--esp", "1", "--mp", "1"]
    first = [*flags, *layout, "--run-dir", str(run), "--stop-at", "1"]
    code, out, error = cluster.run(2, command, str(tmp_path), *first)[0]
    assert code == 0, error
    assert out.splitlines()[-1].endswith(f"--resume {run} (on fewer ranks, change --ep to divide them)")
    resumed = cluster.run(2, command, str(tmp_path), "train", "--resume", str(run), "--stop-at", "1")[0]
    assert "Note: the saved run" not in resumed[1]
    changed = cluster.run(3, command, str(tmp_path), "train", "--resume", str(run), "--ep", "1", "--stop-at", "1")[0]
    saved, now = "2 ranks (ep 2, esp 1, mp 1) with 12", "3 ranks (ep 1, esp 1, mp 1) with 18"
    said = f"Note: the saved run trained on {saved} sequences per step, this job on {now} sequences per step"
    assert f"{said}: losses will differ. --batch 4 keeps 12.\n" in changed[1]
    one = cluster.run(2, command, str(tmp_path), "train", "--resume", str(run), "--batch", "7", "--stop-at", "1")[0]
    assert "this job on 2 ranks (ep 1, esp 1, mp 1) with 14 sequences per step: losses will differ. --batch 9" in one[1]


def test_non_finite_loss_ends_job_with_rank(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = [*TINY, "--steps", "9", "--lr", "1e30", "--warmup", "0", "--clip", "0", "--data", str(text)]
    assert main(["train", *flags, "--run-dir", str(run)]) != 0
    error = capsys.readouterr().err
    assert "rank 0" in error and "finite" in error and "Traceback" not in error


def test_full_disk_error_names_rank(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """The failed write itself names no file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = tmp_path / "run"
    monkeypatch.setattr(RunDir, "write_metrics", full)
    assert main(["train", *TINY, "--steps", "2", "--data", str(text), "--run-dir", str(run)]) == 1
    error = capsys.readouterr().err
    assert f"rank 0 failed writing a file of {run}: No space left on device. Free some space" in error
    assert "Traceback" not in error


def test_error_names_step_of_last_checkpoint(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    write, run = RunDir.write_metrics, tmp_path / "run"

    def full_after_step_3(folder: RunDir, step: int, record: dict[str, Any]) -> None:
        if step > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, step, record)

    monkeypatch.setattr(RunDir, "write_metrics", full_after_step_3)
    flags = [*TINY, "--steps", "5", "--checkpoint-every", "2", "--data", str(text), "--run-dir", str(run)]
    assert main(["train", *flags]) == 1
    assert "The last checkpoint (step 2) is intact. Continue with: fusedmoe train" in capsys.readouterr().err


def test_training_with_closed_stdout_pipe_is_not_file_error(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """As in `fusedmoe train | head`: a closed pipe is not a failed file."""

    def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(RunDir, "write_metrics", broken)
    monkeypatch.setattr("fusedmoe.cli.main._has_stdout_reader", lambda: False)
    assert main(["train", *TINY, "--steps", "2", "--data", str(text), "--run-dir", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"ranks_per_node": 2},
        {"ep": 4, "esp": 1, "mp": 1, "dispatch": "2dh", "ranks_per_node": 2, "wire_dtype": "bf16"},
        {"ep": 4, "esp": 1, "mp": 1, "dispatch": "2dh", "ranks_per_node": 2, "wire_dtype": "fp8"},
    ],
    ids=["papers-layout", "ep4-bf16-wire", "ep4-fp8-wire"],
)
def test_four_rank_job_resumes_to_same_losses(
    cluster: Cluster, tmp_path: Path, text: Path, changes: dict[str, Any]
) -> None:
    settings = Settings(
        model=ModelConfig(**MODEL), steps=4, data=str(text), eval_batches=2, checkpoint_every=0, timeline_step=1
    )
    settings = settings.changed(changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ends = cluster.run(4, train, settings, whole, None, None)
    assert len(set(ends)) == 1 and ends[0].startswith("held-out loss: ")
    cluster.run(4, train, settings, parts, None, 2)
    cluster.run(4, train, settings, None, parts, None)
    assert losses(parts) == losses(whole)
    trace = json.loads((whole / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
    loads = (whole / "loads.json").read_text()
    assert loads == (parts / "loads.json").read_text()
    tokens_ILWE = LoadTrace.from_json(loads).tokens_ILWE
    assert tokens_ILWE.shape == (4, 2, 4, 4)
    # Two choices per byte of a batch, shared by the ranks that split attention.
    assert (tokens_ILWE.sum(axis=3) == 2 * 2 * 16 // changes.get("mp", 2)).all()


@pytest.mark.parametrize("stops", [False, *slowly(True)])
def test_schedule_preserves_losses_and_resumes(cluster: Cluster, tmp_path: Path, text: Path, stops: bool) -> None:
    settings = Settings(model=ModelConfig(**MODEL), steps=4, data=str(text), eval_batches=2, checkpoint_every=0)
    settings = settings.changed({"ranks_per_node": 2, "timeline_step": 1, "dtype": "fp64"})
    off, whole, parts = (tmp_path / name for name in ("off", "whole", "parts"))
    cluster.run(4, train, settings, off, None, None)
    settings = settings.changed({"schedule": "fsmoe"})
    cluster.run(4, train_by_costs, settings, whole, None, None, COSTS)
    check_losses(whole, off)
    assert CostModel.from_json((whole / "costs.json").read_text()) == COSTS
    plan = (whole / "plan.txt").read_text()
    assert "f0.D1" in plan and "b1.AR0" in plan  # chunks, and gradient buckets
    kinds = {event["args"].get("kind") for event in json.loads((whole / "trace.json").read_text())["traceEvents"]}
    assert {"dispatch", "all-gather", "expert", "gradient-all-reduce"} <= kinds
    parts_text = (whole / "parts.txt").read_text()
    assert all(part in parts_text for part in ("predicted", "measured", "expert backward", "optimizer", "step"))
    if not stops:
        return

    cluster.run(4, train_by_costs, settings, parts, None, 2, COSTS)
    other = replace(COSTS, lines={name: Line(1.0, 1.0) for name in COSTS.lines})  # costs under which nothing is chunked
    cluster.run(4, train_by_costs, settings, None, parts, None, other)
    assert losses(parts) == losses(whole)
    assert (parts / "plan.txt").read_text() == plan


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["flowmoe", "lancet", "auto"])
def test_step_schedule_preserves_losses(cluster: Cluster, tmp_path: Path, text: Path, schedule: str) -> None:
    settings = Settings(model=ModelConfig(**MODEL), steps=12, data=str(text), eval_batches=2, checkpoint_every=0)
    settings = settings.changed({"ranks_per_node": 2, "timeline_step": 1, "dtype": "fp64"})
    off, whole = tmp_path / "off", tmp_path / "whole"
    cluster.run(4, train, settings, off, None, None)
    cluster.run(4, train_by_costs, settings.changed({"schedule": schedule}), whole, None, None, COSTS)
    check_losses(whole, off)
    plan = (whole / "plan.txt").read_text()
    assert "b0.A" in plan and "b1.AR0" in plan
    kinds = {event["args"].get("kind") for event in json.loads((whole / "trace.json").read_text())["traceEvents"]}
    assert {"attention", "dispatch", "all-gather", "expert", "gradient-all-reduce", "loss", "optimizer"} <= kinds


@pytest.mark.slow
def test_measured_schedule_preserves_losses_and_resumes(cluster: Cluster, tmp_path: Path, text: Path) -> None:
    settings = Settings(model=ModelConfig(**MODEL), steps=60, data=str(text), eval_batches=2, checkpoint_every=0)
    settings = settings.changed({"ranks_per_node": 1, "timeline_step": 5, "dtype": "fp64"})
    off, whole, parts = (tmp_path / name for name in ("off", "whole", "parts"))
    cluster.run(2, train, settings, off, None, None)
    settings = settings.changed({"schedule": "auto"})
    cluster.run(2, train_by_costs, settings, whole, None, None, COSTS)
    check_losses(whole, off)
    choice = json.loads((whole / "schedule.json").read_text())
    assert choice["line"].startswith("schedule: ") and len(choice["table"]) > 3
    assert (whole / "plan.txt").read_text().splitlines() == choice["plans"][0]["plan"]
    head = (whole / "parts.txt").read_text().splitlines()[0]  # of the chosen plan, not of a plan on trial
    assert head.endswith(", " + choice["line"].split(":")[0] + choice["line"].split(":")[1]) and "tried" not in head
    # The plan was chosen before the stop, so it stays the same, and every bit with it.
    cluster.run(2, train_by_costs, settings, parts, None, 55, COSTS)
    assert (parts / "schedule.json").exists()
    cluster.run(2, train_by_costs, settings, None, parts, None, COSTS)
    assert losses(parts) == losses(whole)
    assert (parts / "plan.txt").read_text() == (whole / "plan.txt").read_text()


def test_step_schedule_rejects_gate_needing_whole_batch() -> None:
    settings = Settings().changed({"schedule": "flowmoe", "model.gate": "expert_choice"})
    with pytest.raises(ConfigError, match="needs the whole batch"):
        selected_policy(settings)
    assert selected_policy(settings.changed({"schedule": "auto"})) == "joint"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "stops", "balance"),
    [
        ("fssdp", False, "predicted"),
        *slowly(("fssdp", True, "predicted"), ("algorithm1", False, "predicted"), ("fssdp", True, "exact")),
    ],
)
def test_placement_preserves_losses_and_resumes(
    cluster: Cluster, tmp_path: Path, text: Path, placement: str, stops: bool, balance: str
) -> None:
    settings = Settings(model=ModelConfig(**MODEL), steps=6, data=str(text), eval_batches=2, checkpoint_every=0)
    settings = settings.changed({"ranks_per_node": 2, "timeline_step": 4, "dtype": "fp64", "ep": 4, "esp": 1})
    even, whole, parts = (tmp_path / name for name in ("even", "whole", "parts"))
    cluster.run(4, train, settings, even, None, None)
    settings = settings.changed({"placement": placement, "placement_overlap": 3, "rematerialise": True})
    settings = settings.changed({"placement_balance": balance})
    cluster.run(4, train, settings, whole, None, None)
    check_losses(whole, even)
    kinds = {event["args"].get("kind") for event in json.loads((whole / "trace.json").read_text())["traceEvents"]}
    assert placement != "fssdp" or {"sparse-all-gather", "sparse-reduce-scatter", "dispatch"} <= kinds
    assert (whole / "loads.json").read_text() == (even / "loads.json").read_text()
    if stops:
        # Resume while owners are changed, without an argument for that.
        cluster.run(4, train, settings, parts, None, 4)
        cluster.run(4, train, settings, None, parts, None)
        assert losses(parts) == losses(whole)


def total_parameters(rank: int, world: int, placement: str) -> tuple[int, int]:
    settings = Settings(model=ModelConfig(**{**MODEL, "experts": 3})).changed({"placement": placement})
    topology = Topology.from_sizes(ep=world) if world > 1 else Topology()
    return count_parameters(SimpleNamespace(model=make_model(settings, settings.model, topology, torch.device("cpu"))))


def test_parameter_count_is_independent_of_placement(cluster: Cluster) -> None:
    assert cluster.run(2, total_parameters, "fssdp") == 2 * cluster.run(1, total_parameters, "ep")


def test_placement_requires_unsplit_experts_on_all_ranks() -> None:
    settings = Settings().changed({"placement": "fssdp", "ranks_per_node": 2})
    sizes = choose_sizes(settings, Launch(0, 4, 0, 4))
    assert (sizes.ep, sizes.esp) == (4, 1)
    with pytest.raises(ConfigError, match="placement"):
        settings.changed({"placement": "anywhere"})
    with pytest.raises(ConfigError, match="placement fssdp"):
        selected_policy(settings.changed({"schedule": "flowmoe"}))


# Balanced costs: experts and links take about equally long, and launch overhead is small.
COSTS = CostModel(
    {name: Line(1e-7, 1e-12 if name == "gemm" else 1e-10) for name in LINES}, Contention.between_links(0.8), "made up"
)


def test_different_text_on_ranks_is_reported(cluster: Cluster, tmp_path: Path, text: Path) -> None:
    settings = Settings(model=ModelConfig(**MODEL), steps=1, data=str(text), pattern="*.txt")
    for message in cluster.run(2, train_on_different_text, settings, tmp_path / "run"):
        assert "on rank 1 differs from rank 0" in message


def train(rank: int, world: int, settings: Settings, run: Path | None, resume: Path | None, stop: int | None) -> str:
    launch = Launch(rank, world, rank, world)
    sizes = choose_sizes(settings, launch)
    topology = make_topology(sizes, 60.0)
    job = TrainingJob(settings, launch, sizes, topology, torch.device("cpu"), StopRequest())
    # Pictures take longer than the steps.
    with mock.patch("fusedmoe.cli.train.draw"), mock.patch("fusedmoe.cli.run_dir.plot_loads"):
        return job.run(run, resume, stop)[0]


def train_by_costs(
    rank: int, world: int, settings: Settings, run: Path | None, resume: Path | None, stop: int | None, costs: CostModel
) -> str:
    """Train as if measurements gave these costs; model steps are not measured and take the predicted time."""

    def note(tuning: PlanChooser, seconds: float) -> None:
        noted(tuning, tuning.current_candidate.predicted_s)

    noted, folder = PlanChooser.note, run or resume
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder and folder / "cache"))
        patch.setattr("fusedmoe.cli.train.cached_profile", lambda *_, **__: (Profile(costs), Path()))
        patch.setattr(Trainer, "with_measured_times", lambda self, costs: costs)
        patch.setattr(PlanChooser, "note", note)
        return train(rank, world, settings, run, resume, stop)


def train_on_different_text(rank: int, world: int, settings: Settings, run: Path) -> str:
    try:
        train(rank, world, replace(settings, pattern=f"*[{rank}-9].txt"), run, None, None)
    except RuntimeError as error:
        return str(error)
    return ""


def start_process(*command: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline, "no step within 200 s"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Return the processes below `pid`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: set[int] = set()
    rest = [pid]
    while rest:
        rest += (new := set(children.get(rest.pop(), [])) - found)
        found |= new
    return found


# The test of Ctrl-C on ranks, below, is not slow.
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=["sigint", "sigterm"]
)
def test_signal_saves_checkpoint_and_exits_130(tmp_path: Path, text: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    flags = [*TINY, "--steps", "1000000", "--data", str(text), "--run-dir", str(run)]
    process = start_process("fusedmoe", "train", *flags, cwd=tmp_path)
    try:
        wait_for_steps(process, run)
        process.send_signal(number)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert out.splitlines()[-1].endswith(f"checkpoint saved. Continue with: fusedmoe train --resume {run}")
    steps = metrics(run)[-1]["step"]
    assert main(["train", "--resume", str(run), "--stop-at", str(steps + 1)]) == 0
    assert [record["step"] for record in metrics(run)] == list(range(1, steps + 2))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes through /proc")
def test_sigint_under_torchrun_saves_and_ends_all_processes(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*TINY, "--steps", "1000000", "--data", str(text), "--run-dir", str(run)]
    process = start_process(*launcher, "-m", "fusedmoe", "train", *flags, cwd=tmp_path)
    below: set[int] = set()
    try:
        wait_for_steps(process, run)
        below = descendants(process.pid)
        assert len(below) >= 2
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    command = f"torchrun --nproc-per-node 2 --standalone -m fusedmoe train --resume {run}"
    assert f"checkpoint saved. Continue with: {command}" in out, out
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert (run / "checkpoint").is_dir()
