"""Every program in `examples/` runs, in one process and over ranks."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fusedmoe.schedule.policies import POLICIES

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> dict[str, object]:
    return runpy.run_path(str(EXAMPLES / name), run_name="example")


def test_layer_example_reduces_loss(capsys: pytest.CaptureFixture[str]) -> None:
    main = load("layer.py")["main"]
    last = main(steps=120)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.7 * first


def test_own_parts_example_counts_rows() -> None:
    count = load("own_parts.py")["main"]()  # type: ignore[operator]
    assert count.rows == {"forward": 200, "backward": 200}


def test_own_dispatcher_example_equals_direct() -> None:
    assert load("own_dispatcher.py")["main"]() < 1e-5  # type: ignore[operator]


@pytest.mark.slow
def test_own_dispatcher_example_over_ranks_equals_direct() -> None:
    differences = re.findall(r"largest difference ([\d.]+e[+-]\d\d)", run_on_ranks("own_dispatcher.py", 2))
    assert len(differences) == 2 and all(float(difference) < 1e-5 for difference in differences)


def test_own_policy_example_is_faster_than_sequential(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = load("own_policy.py")["main"]()  # type: ignore[operator]
    finally:
        POLICIES.pop("half_a_millisecond", None)
    assert found["half_a_millisecond"] < found["sequential"]
    assert "half_a_millisecond: " in capsys.readouterr().out


@pytest.mark.slow
def test_own_policy_example_runs_on_ranks() -> None:
    assert "schedule='half_a_millisecond in (" in run_on_ranks("own_policy.py", 2)


def test_functions_example_returns_expected_shape() -> None:
    assert load("functions.py")["main"]().shape == (64, 16)  # type: ignore[operator]


@pytest.mark.slow
def test_blocks_example_reduces_loss(capsys: pytest.CaptureFixture[str]) -> None:
    last = load("blocks.py")["main"](steps=30)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.9 * first


@pytest.mark.slow
def test_walkthrough_writes_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["walkthrough.py", str(tmp_path / "pictures")])
    load("walkthrough.py")
    assert {path.name for path in tmp_path.rglob("*.png")} == {
        "loads.png",
        "sequential.png",
        "joint.png",
        "policies.png",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fine_tuning() -> None:
    pytest.importorskip("peft")
    before, after = load("fine_tuning.py")["main"](steps=8)  # type: ignore[operator]
    assert after < before - 0.05


@pytest.mark.slow
def test_fine_tuning_over_ranks() -> None:
    pytest.importorskip("peft")
    found = re.search(r"base model ([\d.]+), of the merged model ([\d.]+)", run_on_ranks("fine_tuning.py", 2))
    assert found is not None and float(found[2]) < float(found[1]) - 0.1


def test_hugging_face_example_reduces_loss(capsys: pytest.CaptureFixture[str]) -> None:
    last = load("hugging_face.py")["main"](steps=8)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.9 * first


@pytest.mark.slow
def test_hugging_face_example_reduces_loss_on_ranks() -> None:
    losses = [float(text.split()[0]) for text in run_on_ranks("hugging_face.py", 2).split("loss")[1:]]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_captured_example_reduces_loss() -> None:
    # A separate process: compiled code imports its module by name.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    # A hanging program prints its stack.
    bounded = "import faulthandler, runpy; faulthandler.dump_traceback_later(80, exit=True); "
    command = [sys.executable, "-c", bounded + "runpy.run_path('examples/captured.py', run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=EXAMPLES.parent, env=environment)
    assert done.returncode == 0, done.stderr
    first, *_, last = (float(line.split()[0]) for line in done.stdout.split("loss")[1:])
    assert last < 0.9 * first
    assert done.stdout.count("4 all-to-alls") == 2 and "overlapped with" in done.stdout


def run_on_ranks(name: str, ranks: int, **environment: str) -> str:
    """Return the output of an example under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [*torchrun, f"examples/{name}"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=EXAMPLES.parent,
        env={**os.environ, **own, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_parallel_example_runs_on_four_ranks() -> None:
    printed = run_on_ranks("parallel.py", 4)
    assert printed.count("gradient norm") == 5 and "(4, 2, 32, 32)" in printed


@pytest.mark.slow
def test_puts_example_matches_collectives() -> None:
    printed = run_on_ranks("puts.py", 2, TRITON_INTERPRET="1")
    differences = [float(number) for number in re.findall(r"largest difference ([\d.]+e[+-]\d\d)", printed)]
    assert len(differences) == 2 and max(differences) < 1e-6


@pytest.mark.slow
def test_placement_example_moves_experts() -> None:
    assert "step 12: loss" in run_on_ranks("placement.py", 1)
    printed = run_on_ranks("placement.py", 4)
    assert "step 12: loss" in printed and re.search(r"^3: [\d ]+(\+\d+ ?)+$", printed, re.MULTILINE)
