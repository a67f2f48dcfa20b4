"""loads.json of a run: the counts of every step, rank by rank, over stops and resumptions."""

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
    """[I, L, E]: of two layers; all steps differ."""
    return torch.arange(2 * experts).reshape(2, experts) + 100 * torch.tensor(steps).reshape(-1, 1, 1)


def log(folder: Path, steps: range, done: int = 0, experts: int = 3) -> None:
    """A job's steps, and its end."""
    writer = LoadLog(RunDir(folder), Topology(), "a job", done)
    for load_LE in counts(steps, experts):
        writer.note(load_LE)
    writer.flush()
    writer.flush()


def read(run: Path) -> LoadTrace:
    return LoadTrace.from_json((run / "loads.json").read_text())


@pytest.mark.parametrize("every", [1, 3, 4, 50])
def test_chunks_make_one_file(tmp_path: Path, every: int) -> None:
    with mock.patch.object(run_dir, "EVERY", every):
        log(tmp_path, range(8))
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(8))) and trace.source == "a job"


def test_a_resumed_job_goes_on(tmp_path: Path) -> None:
    log(tmp_path, range(7))
    log(tmp_path, range(5, 9), done=5)  # steps 5 and 6 are done again
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(9))) and trace.source == "a job"


@pytest.mark.parametrize("before", ["nothing", "too little", "other experts", "cut"])
def test_a_file_that_cannot_go_on_begins_anew(tmp_path: Path, before: str) -> None:
    if before != "nothing":
        log(tmp_path, range(3 if before == "too little" else 5), experts=7 if before == "other experts" else 3)
    if before == "cut":  # in the middle of step 5, whose checkpoint is there
        path = tmp_path / "loads.json"
        path.write_text((text := path.read_text())[: text.rindex("]]]") - 2])
    log(tmp_path, range(5, 9), done=5)
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(5, 9))) and trace.source == "a job, from step 6"
    assert trace.first == 6
    log(tmp_path, range(8, 11), done=8)  # and then goes on
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(5, 11))) and trace.first == 6
    assert trace.source == "a job, from step 6"


@pytest.mark.parametrize("left", [1, 4, 9, 30])
def test_a_file_whose_writer_was_killed_goes_on(tmp_path: Path, left: int) -> None:
    """Up to the last checkpoint it is whole."""
    log(tmp_path, range(7))
    path = tmp_path / "loads.json"
    path.write_text(path.read_text()[:-left])
    log(tmp_path, range(5, 9), done=5)
    assert np.array_equal(read(tmp_path).tokens_ILWE[:, :, 0], counts(range(9)))


def test_metrics_that_are_damaged_are_left_out_with_a_word(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    for step in range(1, 5):
        folder.note(step, {"loss": 1.0})
    whole = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(whole[0] + b"\xff\x00{\n[1]\n" + b"[" * 100_000 + b"\n" + b"".join(whole[1:]) + b'{"st')
    with pytest.warns(UserWarning, match=f"{folder.metrics}: 3 lines that cannot be read"):
        folder.forget_after(3)
    assert folder.metrics.read_bytes() == b"".join(whole[:3])
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_stops_growing(tmp_path: Path) -> None:
    with mock.patch.object(run_dir, "EVERY", 2), mock.patch.object(run_dir, "MOST_BYTES", 200):
        log(tmp_path, range(100))
        size = (tmp_path / "loads.json").stat().st_size
        log(tmp_path, range(100, 110), done=100)
    assert size == (tmp_path / "loads.json").stat().st_size < 400
    trace = read(tmp_path)
    assert np.array_equal(trace.tokens_ILWE[:, :, 0], counts(range(len(trace))))


def test_a_model_without_experts_has_no_loads(tmp_path: Path) -> None:
    flags = ["--data", str(Path(__file__).parent), "--pattern", "*.py", "--steps", "1", "--moe-every", "2"]
    assert main(["train", *TINY, *flags, "--run-dir", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "loads.json").exists()
