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


def test_layer_learns(capsys: pytest.CaptureFixture[str]) -> None:
    main = load("layer.py")["main"]
    last = main(steps=120)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.7 * first


def test_own_parts() -> None:
    count = load("own_parts.py")["main"]()  # type: ignore[operator]
    assert count.rows == {"forward": 200, "backward": 200}


def test_own_policy(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = load("own_policy.py")["main"]()  # type: ignore[operator]
    finally:
        POLICIES.pop("half_a_millisecond", None)
    assert found["half_a_millisecond"] < found["sequential"]
    assert "half_a_millisecond: " in capsys.readouterr().out


@pytest.mark.slow
def test_own_policy_over_ranks() -> None:
    assert "schedule='half_a_millisecond'" in run_on_ranks("own_policy.py", 2)


def test_functions() -> None:
    assert load("functions.py")["main"]().shape == (64, 16)  # type: ignore[operator]


@pytest.mark.slow
def test_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    last = load("blocks.py")["main"](steps=30)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.9 * first


def test_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    last = load("hugging_face.py")["main"](steps=8)  # type: ignore[operator]
    first = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert last < 0.9 * first


@pytest.mark.slow
def test_hugging_face_over_ranks() -> None:
    losses = [float(text.split()[0]) for text in run_on_ranks("hugging_face.py", 2).split("loss")[1:]]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_captured() -> None:
    # A process of its own: compiled code looks for its module by name.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    # One that hangs says where it stands.
    bounded = "import faulthandler, runpy; faulthandler.dump_traceback_later(80, exit=True); "
    command = [sys.executable, "-c", bounded + "runpy.run_path('examples/captured.py', run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=EXAMPLES.parent, env=environment)
    assert done.returncode == 0, done.stderr
    first, *_, last = (float(line.split()[0]) for line in done.stdout.split("loss")[1:])
    assert last < 0.9 * first
    assert done.stdout.count("4 all-to-alls") == 2 and "beside it" in done.stdout


def run_on_ranks(name: str, ranks: int, **environment: str) -> str:
    """What an example prints under torchrun."""
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
def test_parallel() -> None:
    printed = run_on_ranks("parallel.py", 4)
    assert printed.count("gradient norm") == 5 and "(4, 2, 32, 32)" in printed


@pytest.mark.slow
def test_puts() -> None:
    printed = run_on_ranks("puts.py", 2, TRITON_INTERPRET="1")
    differences = [float(number) for number in re.findall(r"largest difference (\S+)", printed)]
    assert len(differences) == 2 and max(differences) < 1e-6


@pytest.mark.slow
def test_placement() -> None:
    assert "step 12: loss" in run_on_ranks("placement.py", 1)
    printed = run_on_ranks("placement.py", 4)
    assert "step 12: loss" in printed and re.search(r"^3: [\d ]+(\+\d+ ?)+$", printed, re.MULTILINE)
