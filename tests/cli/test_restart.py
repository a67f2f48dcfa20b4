"""`torchrun --max-restarts`: attempts after the first continue the run of the same launch, and no other."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fusedmoe.cli.main import main
from fusedmoe.cli.restart import _describe_rank, _find_run, find_attempt, write_launch
from tests.cli.test_train import TINY, descendants, metrics, start_process
from tests.cluster import Cluster


def ranks_of(launcher: int) -> list[int]:
    """Return the training processes below a torchrun."""
    found = []
    for pid in descendants(launcher):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"\0LOCAL_RANK=" in environment:
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("named", [False, True])
def test_killed_rank_restarts_from_newest_checkpoint(tmp_path: Path, text: Path, named: bool) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    flags = [*TINY, "--steps", "60", "--data", str(text), "--timeline-step", "1000000"]
    flags += ["--checkpoint-every", "5", *(["--run-dir", "runs/mine"] if named else [])]
    process = start_process(*launcher, "-m", "fusedmoe", "train", *flags, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not list((tmp_path / "runs").glob("*/checkpoint")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, out
    (run,) = (tmp_path / "runs").iterdir()
    assert f"restart by torchrun: run folder runs/{run.name} of the earlier attempt: continuing after step " in out
    assert "held-out loss" in out.splitlines()[-1]
    steps = [record["step"] for record in metrics(run) if "loss" in record]
    assert steps == list(range(1, 61))


def test_run_folder_of_another_launch_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fusedmoe", "train", "--seed", "2"])
    own, _ = _describe_rank()
    for name, agents in (("first", ["host boot 17 4711"]), ("second", ["host boot 18 4712", own])):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_launch(Path("runs", name), agents)
    assert _find_run(None, frozenset([own])) == Path("runs/second")
    assert _find_run(Path("runs/first"), frozenset([own])) is None
    # A node that joined later is in the file, too.
    write_launch(Path("runs/second"), ["other boot 3 5"])
    assert _find_run(None, frozenset(["other boot 3 5"])) == Path("runs/second")
    # Another program of the same launch.
    monkeypatch.setattr(sys, "argv", ["fusedmoe", "train", "--seed", "3"])
    assert _find_run(None, frozenset([own])) is None
    # The explicitly given folder of another job remains an error in every attempt.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "runs/first/config.json").write_text("{}")
    assert main(["train", *TINY, "--run-dir", "runs/first"]) == 2
    assert "contains a run: use --resume runs/first" in capsys.readouterr().err


def test_restart_continues_from_checkpoint_or_step_1_with_message(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--steps", "2", "--data", str(text), "--timeline-step", "1000000"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", *flags]) == 0
    assert "no run folder of an earlier attempt found, starting at step 1 in runs/" in capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    (run / "checkpoint").rename(tmp_path / "checkpoint")
    assert main(["train", *flags]) == 0
    assert "it has no checkpoint yet, starting at step 1" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert [record["step"] for record in metrics(run)] == [1, 2, 2]
    assert main(["train", *flags]) == 0
    assert f"run folder runs/{run.name} of the earlier attempt: continuing after step 2" in capsys.readouterr().out


def find_on_ranks(rank: int, world: int, folder: str) -> tuple[str | None, int]:
    """Return the earlier run folder and the restarts, where each rank has its own working directory and count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(folder, str(rank)))
        patch.setenv("TORCHELASTIC_RUN_ID", "none")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        attempt = find_attempt(None, 60.0)
    return attempt.earlier and str(attempt.earlier), attempt.restarts


def test_all_ranks_continue_the_folder_that_rank_0_finds(cluster: Cluster, tmp_path: Path) -> None:
    agents = cluster.run(2, agent_of_rank)
    for rank in range(2):
        (tmp_path / str(rank) / "runs" / f"of {rank}").mkdir(parents=True)
    cluster.run(2, write_on_rank_0, str(tmp_path / "0" / "runs" / "of 0"), agents[1:])
    assert cluster.run(2, find_on_ranks, str(tmp_path)) == [("runs/of 0", 1)] * 2


def agent_of_rank(rank: int, world: int) -> str:
    return _describe_rank()[0]


def write_on_rank_0(rank: int, world: int, folder: str, agents: list[str]) -> None:
    if rank == 0:
        write_launch(Path(folder), agents)
