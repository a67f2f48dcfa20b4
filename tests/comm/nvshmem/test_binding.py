"""The binding over a made-up C library in Python: reasons, bounds, and what ranks tell each other."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.one_sided import nvshmem
from fusedmoe.comm.one_sided.nvshmem import FUNCTIONS, PREFIX, NvshmemHeap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels import libraries
from tests.cluster import Cluster
from tests.marks import slowly

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@dataclass
class Fake:
    """As `nvshmem.Library`. `fails`: operation -> the reason; `hangs`: operations that wait until `release`."""

    owner: int = 0
    pe: int = -1
    pes: int = 0
    job: bytes = bytes(128)
    fails: dict[str, str] = field(default_factory=dict)
    hangs: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)
    release: Event = field(default_factory=Event)
    rooms: dict[int, Any] = field(default_factory=dict)

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name in self.hangs:
            self.release.wait(60)
        if name in self.fails:
            raise nvshmem._Failed(self.fails[name])
        if name == "init":
            self.owner, self.job, self.pe, self.pes = 1, arguments[0], *arguments[2:]

    def state(self) -> nvshmem._State:
        return nvshmem._State(self.owner, self.pe, self.pes, self.job)

    def unique_id(self) -> bytes:
        self.call("unique_id")
        return b"made".ljust(128)

    def allocate(self, size: int) -> int:
        self.call("allocate")
        room = (ctypes.c_uint8 * size)(*[238] * size)
        self.rooms[ctypes.addressof(room)] = room
        return ctypes.addressof(room)

    def peer(self, address: int, pe: int) -> int:
        if "peer" in self.fails:
            raise nvshmem._Failed(self.fails["peer"])
        return address if pe == self.pe else 0


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def install(patch: pytest.MonkeyPatch, fake: Fake, reason: str = "") -> Fake:
    for name, value in (
        ("why_not", lambda: reason),
        ("load", lambda: fake),
        ("make_current", lambda device: None),
        ("record", lambda device: lambda: True),
        ("tensor_at", tensor_at),
        ("nvshmem_bitcode", dict),
    ):
        patch.setattr(nvshmem, name, value)
    return fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = install(monkeypatch, Fake())
    yield made
    made.release.set()


def test_the_binding_has_the_functions_of_the_header() -> None:
    header = (ROOT / "csrc" / "nvshmem" / "fusedmoe_nvshmem.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = {
        name: 0 if arguments.strip() == "void" else len(arguments.split(","))
        for name, arguments in re.findall(rf"\b{PREFIX}(\w+)\(([^)]*)\);", text)
    }
    assert declared == {name: len(arguments) for name, arguments in FUNCTIONS.items()}
    assert f"{PREFIX.upper()}ID_BYTES {nvshmem._ID_BYTES}\n" in header


def test_one_rank_opens_allocates_and_closes(fake: Fake) -> None:
    with NvshmemHeap(Group("ep"), CPU) as heap:
        memory = heap.allocate((48,), torch.uint8)
        assert memory.own.dtype == torch.uint8 and memory.own.tolist() == [0] * 48
        assert memory.table.tolist() == [memory.own.data_ptr()] and heap.network is None
    # A spare signal first, by which the ranks see who is far.
    order = ["unique_id", "init", "allocate", "allocate", "free", "free", "finalize"]
    assert fake.calls == order
    heap.close()
    assert fake.calls == order


def test_after_an_error_nothing_waits_for_others(fake: Fake) -> None:
    with pytest.raises(ZeroDivisionError), NvshmemHeap(Group("ep"), CPU) as heap:
        heap.allocate((8,), torch.uint8)
        raise ZeroDivisionError
    assert fake.calls == ["unique_id", "init", "allocate", "allocate"]
    with pytest.raises(RankError, match="this heap was left after an error"):
        heap.allocate((8,), torch.uint8)


@pytest.mark.parametrize("name", ["unique_id", "init"])
def test_what_the_library_says_is_an_error_of_the_rank(fake: Fake, name: str) -> None:
    fake.fails[name] = "it says no"
    with pytest.raises(RankError, match="rank 0: opening NVSHMEM: it says no"):
        NvshmemHeap(Group("ep"), CPU)
    # A job may be open by then; none is left so.
    assert fake.calls == {"unique_id": ["unique_id"], "init": ["unique_id", "init", "finalize"]}[name]


@pytest.mark.parametrize("name", ["allocate", *slowly("init", "free", "finalize")])
def test_a_call_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = install(monkeypatch, Fake(hangs=frozenset([name])))
    start = time.monotonic()
    try:
        with pytest.raises(RankError, match="did not end within 1 s; see the logs"):
            NvshmemHeap(Group("ep", job=Job(timeout_s=0.6)), CPU).close()
    finally:
        fake.release.set()
    assert 0.5 < time.monotonic() - start < 40


@pytest.mark.slow
def test_a_stream_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    heap = NvshmemHeap(Group("ep", job=Job(timeout_s=0.4)), CPU)
    monkeypatch.setattr(nvshmem, "record", lambda device: lambda: False)
    with pytest.raises(RankError, match="rank 0: closing NVSHMEM: it did not end"):
        heap.close()
    assert "free" not in fake.calls


def test_a_job_that_is_there_is_joined_or_refused(fake: Fake) -> None:
    fake.owner, fake.pe, fake.pes = 2, 0, 1
    with NvshmemHeap(Group("ep"), CPU):
        assert fake.calls == ["adopt", "allocate"]
    fake.pes = 4
    with pytest.raises(ConfigError, match="takes part in one NVSHMEM job.*rank 0: is PE 0 of 4"):
        NvshmemHeap(Group("ep"), CPU)
    assert fake.calls == ["adopt", "allocate", "free", "finalize"]


# (owner, PE, PEs, job) of each rank, and what is said.
STATES = {
    "others of one job": ([(2, 1, 2, 0), (2, 0, 2, 0)], ""),
    "ours of one job": ([(1, 0, 2, 7), (1, 1, 2, 7)], ""),
    "two jobs of ours": ([(1, 0, 2, 7), (1, 1, 2, 8)], "rank 0: is PE 0 of 2; rank 1: is PE 1 of 2"),
    "the same place of two jobs": ([(2, 0, 2, 0), (2, 0, 2, 0)], "rank 0: is PE 0 of 2; rank 1: is PE 0 of 2"),
    "one in none": ([(0, -1, 0, 0), (1, 1, 2, 7)], "rank 0: is in none; rank 1: is PE 1 of 2"),
    "a larger job": ([(2, 0, 4, 0), (2, 1, 4, 0)], "rank 0: is PE 0 of 4"),
}


def open_on_ranks(rank: int, world: int) -> list[str]:
    ep = Topology.from_sizes(ep=world, timeout_s=20).ep
    said = []
    with pytest.MonkeyPatch.context() as patch:
        # Nobody has it, rank 1 has it not, and then each state of affairs.
        fake = install(patch, Fake())
        with NvshmemHeap(ep, CPU) as heap:
            assert (fake.pe, fake.pes, fake.job) == (rank, world, b"made".ljust(128))
            memory = heap.allocate((24,), torch.uint8)
            assert [address != 0 for address in memory.table.tolist()] == [other == rank for other in range(world)]
            assert heap.network is not None and heap.network.pe_W.tolist() == [0, 1]
        began = ["unique_id"] * (rank == 0) + ["init"]
        assert fake.calls == [*began, "allocate", "allocate", "free", "free", "finalize"]
        install(patch, Fake(), "there is no NVIDIA driver here" if rank == 1 else "")
        with pytest.raises(ConfigError) as caught:
            NvshmemHeap(ep, CPU)
        said.append(str(caught.value))
        for states, words in STATES.values():
            owner, pe, pes, job_id = states[rank]
            fake = install(patch, Fake(owner, pe, pes, bytes([job_id] * 128)))
            try:
                with NvshmemHeap(ep, CPU) as heap:
                    assert heap.network is not None
                assert heap.network.pe_W.tolist() == [state[1] for state in states]
                assert fake.calls == ["adopt", "allocate", "free", "finalize"]
                said.append("")
            except ConfigError as error:
                assert words and not fake.calls
                said.append(str(error))
    return said


def test_ranks_agree_on_what_they_join(cluster: Cluster) -> None:
    said, others = cluster.run(2, open_on_ranks)
    assert others == said
    assert said[0] == "NVSHMEM over the ep group [0, 1]: rank 1: there is no NVIDIA driver here"
    for text, (_, words) in zip(said[1:], STATES.values(), strict=True):
        assert (words in text) if words else text == ""


def fail_on_rank_1(rank: int, world: int, name: str) -> str:
    ep = Topology.from_sizes(ep=world, timeout_s=30).ep
    with pytest.MonkeyPatch.context() as patch:
        fake = install(patch, Fake(hangs=frozenset([name])) if rank == 0 else Fake(fails={name: "it says no"}))
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            NvshmemHeap(ep, CPU)
        fake.release.set()
        assert time.monotonic() - start < 25
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "operation"), [("allocate", "allocating symmetric memory"), *slowly(("init", "opening NVSHMEM"))]
)
def test_all_end_with_the_rank_that_failed(cluster: Cluster, name: str, operation: str) -> None:
    """The others wait for it inside the library meanwhile."""
    for rank, said in enumerate(cluster.run(2, fail_on_rank_1, name)):
        blame = "ended because rank 1 failed in"
        assert said == f"rank {rank}: {operation} over the ep group [0, 1] {blame} {operation}: it says no"


def fails_alone(rank: int, world: int, name: str) -> str:
    """One rank's own call fails, which waits for nobody; the board is out of sight, as in a collective of NCCL."""
    ep = Topology.from_sizes(ep=world, timeout_s=30).ep
    fails = rank == (0 if name == "unique_id" else 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ep.board), "read", lambda self, wait_s=0.0: None)
        owned = {"owner": 2, "pe": rank, "pes": 2} if name == "adopt" else {}
        install(patch, Fake(fails={name: "it says no"} if fails else {}, **owned))
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            NvshmemHeap(ep, CPU)
        assert time.monotonic() - start < 25
    return str(caught.value)


@pytest.mark.parametrize("name", ["unique_id", "adopt", "peer"])
def test_all_learn_what_failed_on_one(cluster: Cluster, name: str) -> None:
    operation = "allocating symmetric memory" if name == "peer" else "opening NVSHMEM"
    culprit = 0 if name == "unique_id" else 1
    for rank, said in enumerate(cluster.run(2, fails_alone, name)):
        ended = f"ended because rank {culprit} failed in {operation}: it says no"
        assert said == f"rank {rank}: {operation} over the ep group [0, 1] {ended}"


def test_other_threads_use_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own current GPU is the first one."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **more: tensor(*args, **more))
    for device in (torch.device("cuda"), torch.device("cuda", 3)):
        install(monkeypatch, Fake())
        monkeypatch.setattr(nvshmem, "make_current", used.append)
        NvshmemHeap(Group("ep"), device)
    # To begin and to allocate.
    assert used == [torch.device("cuda", 3)] * 4


def refuses(*arguments: Any) -> None:
    raise nvshmem._Failed("nothing to be had")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"no_gpu": lambda: "no driver"}, "no driver"),
        ({"nvshmem_home": lambda: None}, "NVSHMEM's package is not installed: pip install 'fusedmoe\\[nvshmem\\]'"),
        ({"nvshmem_packages": lambda: {12: "3.4.5"}}, "PyTorch is for CUDA 13.0, but .* is nvidia-nvshmem-cu12: pip"),
        ({"LIBRARY": Path("/nowhere/lib.so")}, "lib.so is not built; .* make nvshmem"),
        ({"load": lambda: ctypes.CDLL("/nowhere/lib.so")}, "cannot be loaded .*nowhere.*; .* make nvshmem"),
        ({"load": lambda: nvshmem.Library(ctypes.CDLL(None))}, "is of other sources .*_nvshmem_probe.*make nvshmem"),
        ({"versions": ((3, 4, 5), (3, 6, 1))}, "was built with NVSHMEM 3.4.5, and 3.6.1 is loaded; .*make nvshmem"),
        ({"versions": ((3, 4, 5), (3, 4, 9)), "call": refuses}, "nothing to be had"),
        ({"versions": ((3, 4, 5), (3, 4, 9)), "cuda": False}, "PyTorch for CUDA 13.0 finds no GPU"),
        ({"versions": ((3, 4, 5), (3, 4, 9))}, ""),
    ],
)
def test_reasons(changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib.so").touch()
    made = Fake()
    made.versions = lambda: changes.get("versions", ((3, 4, 5), (3, 4, 5)))  # type: ignore[attr-defined]
    if "call" in changes:
        made.call = changes["call"]  # type: ignore[method-assign]
    settled: dict[str, Any] = {
        "no_gpu": lambda: "",
        "nvshmem_home": lambda: tmp_path,
        "nvshmem_packages": lambda: {13: "3.4.5"},
        "LIBRARY": tmp_path / "lib.so",
        "load": lambda: made,
    }
    for name, value in settled.items():
        monkeypatch.setattr(nvshmem, name, changes.get(name, value))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: changes.get("cuda", True))
    reason = nvshmem.why_not()
    assert re.search(says, reason) if says else reason == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "load", lambda: pytest.fail("it must not be loaded"))
    reason = nvshmem.why_not()
    assert reason == nvshmem.no_gpu() and ("driver" in reason)
    with pytest.raises(ConfigError, match="NVSHMEM over the ep group .0.: rank 0: .*driver"):
        NvshmemHeap(Group("ep"), CPU)


def test_the_version_is_the_one_that_is_pinned() -> None:
    for name in ("cpu", "cuda", "oldest"):
        pins = (ROOT / "constraints" / f"{name}.txt").read_text()
        for cuda in (12, 13):
            assert f"nvidia-nvshmem-cu{cuda}=={libraries.NVSHMEM_VERSION}\n" in pins
