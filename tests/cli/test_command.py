"""The command: its entry points, and its errors for unknown flags."""

from __future__ import annotations

import os
import subprocess
import sys
from io import FileIO, TextIOWrapper

import pytest

from fusedmoe import __version__, names
from fusedmoe.cli.commands import PROFILE_BUDGET_S
from fusedmoe.cli.main import main
from fusedmoe.cli.settings import describe_error
from fusedmoe.errors import TIMEOUT_CURE, RankError
from fusedmoe.gates import GATES
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.orders import ORDERS
from fusedmoe.runtime.profiler import BUDGET_S

COMMANDS = ("train", "profile", "plan", "trace", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_prints_own_usage_for_help_and_bad_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and f"usage: fusedmoe {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([command, "--no-such-flag", "3"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and f"usage: fusedmoe {command}" in error
    assert f"fusedmoe {command} --help lists all flags" in error


def test_command_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: fusedmoe" in capsys.readouterr().out


def test_only_rank_0_prints_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main([]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    """An import of torch takes over a second."""
    program = (
        "import atexit, sys; from fusedmoe.cli.main import main; "
        "atexit.register(lambda: print('imported:', *sorted({'torch', 'scipy', 'rich'} & sys.modules.keys()))); "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "imported:", ended.stdout[-300:] + ended.stderr


def test_names_of_the_command_are_those_of_the_library() -> None:
    assert (tuple(ACTIVATIONS), tuple(GATES), tuple(ORDERS)) == (names.ACTIVATIONS, names.GATES, names.ORDERS)
    assert PROFILE_BUDGET_S == BUDGET_S


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_has_commands_models_and_machines(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert end.value.code == 0
    assert all(word in script for word in (*COMMANDS, "DeepSeek-V3", "gb200-nvl72", "--ranks-per-node", "fsmoe"))


def test_completion_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_misspelled_flag_error_suggests_correction(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--layerss=3"])
    assert "unrecognized arguments: --layerss=3; did you mean --layers?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("buffered", [True, False])
def test_closed_stdout_pipe_ends_without_traceback(
    buffered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `fusedmoe doctor --json | head -1`."""
    monkeypatch.setattr("fusedmoe.cli.doctor.examine", lambda: {"transports": [{"works": True}]})
    read, write = os.pipe()
    os.close(read)
    with TextIOWrapper(FileIO(write, "w") if not buffered else open(write, "wb"), write_through=not buffered) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["doctor", "--json"]) == 1
    assert capsys.readouterr().err == ""


def test_python_m_fusedmoe_prints_version() -> None:
    found = subprocess.run([sys.executable, "-m", "fusedmoe", "--version"], capture_output=True, text=True, timeout=200)
    assert (found.returncode, found.stdout) == (0, f"fusedmoe {__version__}\n")


def test_command_errors_name_timeout_flag() -> None:
    """The library's fix names an argument of `Topology`, which a user of the command does not create."""
    error = RankError(f"rank 0: adding ended because rank 1 did not join adding: it is slow; {TIMEOUT_CURE}. Continue")
    assert describe_error(error).endswith("did not join adding: it is slow; use a larger --timeout. Continue")
