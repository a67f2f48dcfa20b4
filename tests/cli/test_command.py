"""The command itself: how it is started, and what it says to flags that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from io import FileIO, TextIOWrapper
from pathlib import Path

import pytest

from fusedmoe import __version__
from fusedmoe.cli.main import main

COMMANDS = ("train", "profile", "plan", "trace", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_helps_and_refuses_flags_by_its_own_usage(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and f"usage: fusedmoe {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([command, "--no-such-flag", "3"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and f"usage: fusedmoe {command}" in error
    assert f"fusedmoe {command} --help lists what there is" in error


def test_a_flag_that_is_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--layerss=3"])
    assert "unrecognized arguments: --layerss=3; did you mean --layers?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("buffered", [True, False])
def test_whoever_reads_the_output_may_stop(
    buffered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `fusedmoe doctor --json | head -1` does."""
    monkeypatch.setattr("fusedmoe.cli.doctor.examine", lambda: {"transports": [{"works": True}]})
    read, write = os.pipe()
    os.close(read)
    with TextIOWrapper(FileIO(write, "w") if not buffered else open(write, "wb"), write_through=not buffered) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["doctor", "--json"]) == 1
    assert capsys.readouterr().err == ""


def test_python_runs_the_package() -> None:
    found = subprocess.run([sys.executable, "-m", "fusedmoe", "--version"], capture_output=True, text=True, timeout=200)
    assert (found.returncode, found.stdout) == (0, f"fusedmoe {__version__}\n")


def test_convert_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = Path(__file__).parents[1] / "data" / "checkpoint_format_2", tmp_path / "new"
    assert main(["convert-checkpoint", str(old), str(new)]) == 0
    assert capsys.readouterr().out == f"converted {old} to {new}\n"
    assert main(["convert-checkpoint", str(new), str(old)]) == 2
    assert "needs no conversion" in capsys.readouterr().err and (old / ".metadata").is_file()
