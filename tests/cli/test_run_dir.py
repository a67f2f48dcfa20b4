"""loads.json of a run: counts of every step and rank, across stops and resumptions."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from fusedmoe.cli import run_dir
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.cli.main import main
from fusedmoe.cli.run_dir import LoadLog, RunDir
from fusedmoe.comm.topology import Topology
from tests.cli.test_train import TINY


def counts(steps: range, experts: int = 3) -> torch.Tensor:
    """[I, L, E] counts of two layers; all steps differ."""
    return torch.arange(2 * experts).reshape(2, experts) + 100 * torch.tensor(steps).reshape(-1, 1, 1)


def log_steps(folder: Path, steps: range, done: int = 0, experts: int = 3) -> None:
    """Log a job's steps and close."""
    writer = LoadLog(RunDir(folder), Topology(), "a job", done)
    for load_LE in counts(steps, experts):
        writer.record(load_LE)
    writer.flush()
    writer.flush()


def read(run: Path) -> LoadTrace:
    return LoadTrace.from_json((run / "loads.json").read_text())


@pytest.mark.parametrize("every", [1, 3, 4, 50])
def test_gathered_chunks_form_one_load_trace(tmp_path: Path, every: int) -> None:
    with mock.patch.object(run_dir, "GATHER_INTERVAL", every):
        log_steps(tmp_path, range(8))
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(8))) and trace.source == "a job"


def test_resumed_job_appends_loads(tmp_path: Path) -> None:
    log_steps(tmp_path, range(7))
    log_steps(tmp_path, range(5, 9), done=5)  # steps 5 and 6 are repeated
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(9))) and trace.source == "a job"


@pytest.mark.parametrize("before", ["missing", "too_short", "other_experts", "truncated"])
def test_incompatible_load_file_is_restarted(tmp_path: Path, before: str) -> None:
    if before != "missing":
        log_steps(tmp_path, range(3 if before == "too_short" else 5), experts=7 if before == "other_experts" else 3)
    if before == "truncated":  # cut within step 5, after its checkpoint
        path = tmp_path / "loads.json"
        path.write_text((text := path.read_text())[: text.rindex("]]]") - 2])
    log_steps(tmp_path, range(5, 9), done=5)
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(5, 9))) and trace.source == "a job, from step 6"
    assert trace.first == 6
    log_steps(tmp_path, range(8, 11), done=8)  # then resumes
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(5, 11))) and trace.first == 6
    assert trace.source == "a job, from step 6"


@pytest.mark.parametrize("left", [1, 4, 9, 30])
def test_load_file_of_killed_writer_is_continued(tmp_path: Path, left: int) -> None:
    """A file cut by a kill is complete up to the last checkpoint."""
    log_steps(tmp_path, range(7))
    path = tmp_path / "loads.json"
    path.write_text(path.read_text()[:-left])
    log_steps(tmp_path, range(5, 9), done=5)
    assert np.array_equal(read(tmp_path).tokens_ILWE[:, :, 0], counts(range(9)))


def test_damaged_metrics_lines_are_dropped_with_warning(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    for step in range(1, 5):
        folder.write_metrics(step, {"loss": 1.0})
    whole = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(whole[0] + b"\xff\x00{\n[1]\n" + b"[" * 100_000 + b"\n" + b"".join(whole[1:]) + b'{"st')
    with pytest.warns(UserWarning, match=f"{folder.metrics}: dropped 3 unreadable lines"):
        folder.drop_metrics_after(3)
    assert folder.metrics.read_bytes() == b"".join(whole[:3])
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_load_file_size_is_bounded(tmp_path: Path) -> None:
    with mock.patch.object(run_dir, "GATHER_INTERVAL", 2), mock.patch.object(run_dir, "MAX_LOG_BYTES", 200):
        log_steps(tmp_path, range(100))
        size = (tmp_path / "loads.json").stat().st_size
        log_steps(tmp_path, range(100, 110), done=100)
    assert size == (tmp_path / "loads.json").stat().st_size < 400
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(len(trace))))


def test_model_without_experts_writes_no_load_file(tmp_path: Path) -> None:
    flags = ["--data", str(Path(__file__).parent), "--pattern", "*.py", "--steps", "1", "--moe-every", "2"]
    assert main(["train", *TINY, *flags, "--run-dir", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "loads.json").exists()
