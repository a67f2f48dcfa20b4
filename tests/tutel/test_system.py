"""Startup, timing and utilities; the launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.tutel import system, system_init
from fusedmoe.tutel.launcher import execl, run
from tests.tutel.test_install import ROOT


def test_init_in_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delattr(system.init_data_model_parallel, "default_env", raising=False)
    with pytest.raises(ConfigError, match="init_data_model_parallel"):
        system.record_time()
    assert system.record_time(is_cuda=False) <= system.record_time(is_cuda=False)
    with pytest.raises(ConfigError, match="choose nccl or gloo"):
        system.init_data_model_parallel(backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="give backend='gloo'"):
            system.init_data_model_parallel()
    env = system_init.init_data_model_parallel(backend="gloo")
    assert system.get_local_session() is env
    assert (env.global_size, env.global_rank, env.group_count, env.data_rank) == (1, 0, 1, 0)
    assert (env.model_size, env.model_rank, env.local_rank, env.local_size) == (1, 0, 0, 1)
    assert env.data_group is env.model_group is env.global_group is None
    assert (env.local_device, env.is_cuda, env.is_distributed) == (torch.device("cpu"), False, False)
    assert system.record_time() <= system.record_time()


def test_save_load_and_logging_utilities(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(3, 2, requires_grad=True)
    system.save(x, "x.npy")
    assert torch.equal(system.load("x.npy"), x.detach())
    named = system.apply_rank_size_from_pattern("out/{rank}-of-{size}.ckpt", 3, 8)
    assert named == "out/3-of-8.ckpt" and Path("out").is_dir() and not caplog.records
    system.apply_rank_size_from_pattern("all.ckpt", 3, 8)
    assert "no {rank}" in caplog.text
    cache = system.cache()
    cache.set("a", 1)
    cache.set("b", 2)
    assert (cache.get("a"), cache.get()) == (1, [1, 2])
    cache.reset()
    assert cache.get() == []
    calls: list[int] = []
    monkeypatch.setattr(system, "record_time", lambda: float(len(calls)))
    assert system.perform(lambda: calls.append(1), num_runs=4) == 1.0 and len(calls) == 9
    assert "Function Latency = 1.0" in capsys.readouterr().out
    Path("source").write_text("text")
    assert system.from_url((tmp_path / "source").as_uri(), "copy") == "copy" == system.from_url("nowhere", "copy")
    assert Path("copy").read_text() == "text"


@pytest.mark.parametrize("rank,per_node,cpus", [(0, 1, {0, 2}), (1, 1, {1, 3}), (3, 2, {1, 3}), (2, 1, {0, 2})])
def test_affinity_binds_rank_to_numa_node(
    rank: int, per_node: int, cpus: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, own in enumerate(((0, 2), (1, 3))):
        for cpu in own:
            (tmp_path / f"node{node}" / f"cpu{cpu}").mkdir(parents=True)
    bound: list[set[int]] = []
    monkeypatch.setattr(system, "_NODES", str(tmp_path))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: bound.append(set(chosen)))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("NUMA_TYPE", str(per_node))
    system.init_affinity_at_program_beginning()
    monkeypatch.setenv("NUMA_TYPE", "0")
    system.init_affinity_at_program_beginning()
    assert bound == [cpus]


def test_launcher_commands() -> None:
    alone = run.command({}, ["-m", "package.script", "--flag"])
    assert alone[1:] == [
        *("-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=1", "--node_rank=0"),
        *("--master_addr=localhost", "--master_port=23232"),
        *("-m", "fusedmoe.tutel.launcher.execl", "-m", "package.script", "--flag"),
    ]
    host = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "LOCAL_SIZE": "8", "MASTER_PORT": "5"}
    with pytest.raises(ConfigError, match="need MASTER_ADDR"):
        run.command(host, ["script.py"])
    found = run.command(host | {"MASTER_ADDR": "first"}, ["script.py"])
    assert {"--nproc_per_node=8", "--nnodes=4", "--node_rank=2", "--master_addr=first", "--master_port=5"} < set(found)
    assert execl.command(["script.py", "3"]) == [sys.executable, "-m", "fusedmoe.tutel", "script.py", "3"]
    assert execl.command(["-m", "package"]) == [sys.executable, "-m", "fusedmoe.tutel", "-m", "package"]
    assert execl.command(["sh", "-c", "true"])[0].endswith("/sh")
    for nothing in ([], ["-m"]):
        with pytest.raises(ConfigError, match="name a program"):
            execl.command(nothing)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.slow
def test_unmodified_script_launches_on_two_ranks() -> None:
    environment = {**os.environ, "LOCAL_SIZE": "2", "MASTER_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fusedmoe.tutel.launcher.run", "tests/tutel/client.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("client") == done.stdout.count("[] __main__ 2") == 2  # lines may mix


OPEN_MPI = """
import sys, time, torch
from fusedmoe.tutel import moe, system
env = system.init_data_model_parallel(backend="gloo")
assert (env.global_size, env.global_rank, env.local_rank, env.local_size) == (2, int(sys.argv[1]), int(sys.argv[1]), 2)
experts = {"type": "ffn", "hidden_size_per_expert": 8}
layer = moe.moe_layer({"type": "top"}, 4, experts, seeds=(1, env.global_rank + 1, 1))
x = torch.randn(6, 4)
layer(x)
if env.global_rank == 1:
    time.sleep(200)  # comes too late
layer(x)
"""


@pytest.mark.slow
def test_open_mpi_environment_and_timeout() -> None:
    world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": free_port()}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", OPEN_MPI, rank],
            env={name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
            | {"PYTHONPATH": str(ROOT), "TUTEL_GLOBAL_TIMEOUT_SEC": "10", **world}
            | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    )
    try:
        assert "not all ranks joined within 10 s: rank 1 is not waiting" in first.communicate(timeout=100)[1]
    finally:
        first.kill()
        second.kill()
        first.wait()
        second.communicate()


def test_unreadable_numa_nodes_keep_affinity(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(system, "_NODES", "/nowhere")
    before = os.sched_getaffinity(0)
    system.init_affinity_at_program_beginning()
    assert os.sched_getaffinity(0) == before and "stays on all CPUs" in caplog.text
