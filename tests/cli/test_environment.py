"""Invalid variables, a port in use, an unknown host: a one-line error that names them, from each entry point."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fusedmoe import Topology, environment
from fusedmoe.cli.job import Launch
from fusedmoe.cli.main import main
from fusedmoe.comm import rendezvous
from fusedmoe.comm.rendezvous import init_process_group
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.tutel import net, system
from fusedmoe.tutel.impls import communicate
from fusedmoe.tutel.launcher import run
from tests.marks import slowly

ROOT = Path(__file__).parents[2]
LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
WRONG = [
    ("RANK", "abc", "must be an integer"),
    ("RANK", "-1", "must be an integer"),
    ("RANK", "2", "must be an integer from 0 to 1"),
    ("WORLD_SIZE", "abc", "must be an integer of at least 1"),
    ("WORLD_SIZE", "0", "must be an integer of at least 1"),
    ("LOCAL_WORLD_SIZE", "0", "must be an integer of at least 1"),
    ("LOCAL_WORLD_SIZE", "1.5", "must be an integer of at least 1"),
    ("LOCAL_RANK", "one", "must be an integer of at least 0"),
]


def read_one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("fusedmoe: error: "), text
    return text


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
@pytest.mark.parametrize("command", ["train", "profile"])
def test_command_error_names_invalid_launch_variable(
    name: str, value: str, text: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for known, right in (LAUNCH | {name: value}).items():
        monkeypatch.setenv(known, right)
    assert main([command, "--device", "cpu"]) == 2
    said = read_one_line_error(capsys)
    assert f"{name}={value!r} in the environment {text}" in said


def test_launch_without_variables_is_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() == Launch()
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == Launch(0, 2, 0, 2)


def test_topology_error_names_invalid_launch_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE='0' in the environment must be an integer of at least 1"):
        Topology.from_sizes()
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ConfigError, match="WORLD_SIZE='abc'"):
        Topology.from_sizes()


@pytest.fixture
def port_in_use(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number: int = taken.getsockname()[1]
        for name, value in (LAUNCH | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number)}).items():
            monkeypatch.setenv(name, value)
        yield number  # type: ignore[misc]


def test_port_in_use_raises_rank_error_with_address(port_in_use: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as caught:
        init_process_group("gloo", 5.0)
    address = f"127.0.0.1:{port_in_use}"
    text = f"rank 0: cannot host the job's store at {address}: the port is in use. Choose another MASTER_PORT"
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert main(["train", "--device", "cpu", "--steps", "1"]) == 1
    assert text in read_one_line_error(capsys)
    assert not dist.is_initialized()


def test_tutel_init_with_port_in_use_raises_rank_error(port_in_use: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicate, "TUTEL_GLOBAL_TIMEOUT_SEC", 5.0)
    monkeypatch.setattr(communicate, "TUTEL_GROUPING_CACHE", {})
    with pytest.raises(RankError, match="rank 0: cannot host the job's store"):
        net.create_groups_from_world(1, include_init="gloo")


def test_unresolvable_master_addr_raises_rank_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_DNS_TIMEOUT_S", 0.0)
    for name, value in (LAUNCH | {"MASTER_ADDR": "no such host", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match="rank 0: the host MASTER_ADDR='no such host' cannot be resolved"):
        init_process_group("gloo", 5.0)
    assert main(["profile", "--device", "cpu"]) == 1
    assert "MASTER_ADDR='no such host' cannot be resolved" in read_one_line_error(capsys)


def test_missing_or_invalid_master_address_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT must be set in the environment"):
        init_process_group("gloo", 5.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port in ("abc", "70000", "-1"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT='{port}' in the environment must be an integer from 0"):
            init_process_group("gloo", 5.0)


def test_missing_store_host_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 alone: no process listens at the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in (LAUNCH | {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RankError, match=f"rank 1: the 2 ranks did not connect to 127.0.0.1:{port} within 2 s"
    ) as caught:
        init_process_group("gloo", 2.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OMPI_COMM_WORLD_SIZE", "x"), ("OMPI_COMM_WORLD_RANK", "3"), ("LOCAL_SIZE", "0"), ("MASTER_PORT", "p")],
)
def test_tutel_launcher_rejects_non_integer_variables(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}' in the environment must be an integer"):
        run.command({"MASTER_ADDR": "a", "OMPI_COMM_WORLD_SIZE": "2", name: value}, ["x.py"])


@pytest.mark.parametrize("name", ["NUMA_TYPE", "LOCAL_RANK", "TUTEL_CUDA_SANDBOX"])
def test_tutel_affinity_rejects_non_integer_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=f"{name}='abc' in the environment must be an integer"):
        system.init_affinity_at_program_beginning()


def test_timeout_variable_is_parsed_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("abc", "nan", "0", "-3", "inf"):
        monkeypatch.setenv("TUTEL_GLOBAL_TIMEOUT_SEC", text)
        with pytest.raises(ConfigError, match=f"TUTEL_GLOBAL_TIMEOUT_SEC='{text}' in the environment must be "):
            environment.read_seconds("TUTEL_GLOBAL_TIMEOUT_SEC", 1800.0)
    for text, found in (("12", 12.0), ("1e3", 1000.0), ("", 1800.0)):
        monkeypatch.setenv("TUTEL_GLOBAL_TIMEOUT_SEC", text)
        assert environment.read_seconds("TUTEL_GLOBAL_TIMEOUT_SEC", 1800.0) == found


@pytest.mark.parametrize(
    "arguments",
    [
        *slowly(
            ["-c", "from fusedmoe.tutel import moe"],
            ["-m", "fusedmoe.tutel.launcher.run", "x.py"],
            ["-m", "fusedmoe.tutel.launcher.execl", "x.py"],
            ["-m", "fusedmoe.tutel", "x.py"],
        )
    ],
)
def test_entry_points_reject_invalid_variables_in_one_line(arguments: list[str]) -> None:
    names = ("TUTEL_GLOBAL_TIMEOUT_SEC", "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK")
    given = os.environ | {"PYTHONPATH": str(ROOT)} | dict.fromkeys(names, "abc")
    ended = subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, timeout=100)
    assert ended.returncode != 0
    assert "='abc' in the environment must be " in ended.stderr.splitlines()[-1]
    assert arguments[0] == "-c" or len(ended.stderr.splitlines()) == 1


def test_printed_command_starts_no_more_ranks_than_the_topology_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topology over a part of the ranks, such as a pipeline stage, may be smaller than a node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "--nproc-per-node 2 --standalone" in environment.launch_command(2, "profile")
    assert "--nproc-per-node 4 --nnodes 2" in environment.launch_command(8, "profile")
