"""Ranks of two jobs at one MASTER_PORT refuse each other; ranks of one job may differ in paths and arguments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusedmoe.comm import job_identity, topology
from fusedmoe.comm.job_identity import read_identity, require_one_job
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from tests.cluster import Cluster
from tests.marks import slowly

ROOT = Path(__file__).parents[2]


def join_with_other_identity(rank: int, world: int, name: str, value: str) -> str:
    own = {"run": "a", "user": "ann", "program": "train"} | ({name: value} if rank == world - 1 else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "read_identity", lambda: own)
        if value == "":  # an unknown program, as in a notebook
            Topology.from_sizes(world, timeout_s=20)
            return ""
        with pytest.raises(RankError) as caught:
            Topology.from_sizes(world, timeout_s=20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world", "name", "value"),
    [(2, "program", "other"), *slowly((3, "run", "b1"), (2, "user", "eve"), (2, "program", ""))],
)
def test_ranks_of_different_jobs_reject_each_other(cluster: Cluster, world: int, name: str, value: str) -> None:
    for rank, text in enumerate(cluster.run(world, join_with_other_identity, name, value)):
        if value:
            assert text.startswith(f"rank {rank}: the ranks at ") and "belong to different jobs" in text
            assert f"the {name} is " in text and f"{value!r} on rank {world - 1}" in text and "MASTER_PORT" in text


def test_program_identity_ignores_path(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"/node1/run/train.py": "train", "./train.py": "train", "train": "train", "/b/jobs/train.py": "train"}
    paths |= {"/a/fusedmoe/__main__.py": "fusedmoe", "/usr/bin/fusedmoe": "fusedmoe", "-c": "", "": ""}
    for path, name in paths.items():
        monkeypatch.setattr(sys, "argv", [path, "--verbose"])
        assert read_identity()["program"] == name


def test_user_without_name_is_identified_by_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(job_identity.pwd, "getpwuid", unknown)
    assert read_identity()["user"] == str(os.getuid())


def test_unknown_identity_fields_match_any() -> None:
    one = {"run": "", "user": "ann", "program": "train"}
    require_one_job(0, [0, 1, 2], [one, one | {"program": ""}, one | {"user": ""}])
    with pytest.raises(RankError, match="the run is 'none' on rank 0, 'a' on rank 4"):
        require_one_job(0, [0, 4], [one, one | {"run": "a"}])


SCRIPT = """
import sys
from datetime import timedelta
import torch.distributed as dist
from fusedmoe import Topology
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
Topology.from_sizes(2, timeout_s=30)
print("met")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "meet"), [(("a/train.py", "b/train.py"), True), (("a/train.py", "a/eval.py"), False)]
)
def test_launched_processes_join_only_same_program(tmp_path: Path, names: tuple[str, str], meet: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, name in enumerate(names):
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(SCRIPT)
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *(["--verbose"] if rank else [])]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=os.environ | given, stdout=pipe, stderr=pipe, text=True))
    try:
        for process in ranks:
            out, err = process.communicate(timeout=100)
            assert ("met" in out) == meet and ("belong to different jobs" in err) != meet, err
    finally:
        for process in ranks:
            process.kill()
            process.wait()
