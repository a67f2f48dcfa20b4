"""The binding over a fake C library in Python: reasons, bounds, and errors exchanged between ranks."""

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
class FakeLibrary:
    """Fake of `nvshmem.Library`. `fails`: operation -> the reason; `hangs`: operations that wait until `release`."""

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
            raise nvshmem._LibraryError(self.fails[name])
        if name == "init":
            self.owner, self.job, self.pe, self.pes = 1, arguments[0], *arguments[2:]

    def state(self) -> nvshmem._ProcessState:
        return nvshmem._ProcessState(self.owner, self.pe, self.pes, self.job)

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
            raise nvshmem._LibraryError(self.fails["peer"])
        return address if pe == self.pe else 0


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def install(patch: pytest.MonkeyPatch, fake: FakeLibrary, reason: str = "") -> FakeLibrary:
    for name, value in (
        ("unavailable_reason", lambda: reason),
        ("load", lambda: fake),
        ("make_current", lambda device: None),
        ("record_event", lambda device: lambda: True),
        ("tensor_at", tensor_at),
        ("nvshmem_bitcode", dict),
    ):
        patch.setattr(nvshmem, name, value)
    return fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    made = install(monkeypatch, FakeLibrary())
    yield made
    made.release.set()


def test_binding_declares_functions_of_header() -> None:
    header = (ROOT / "csrc" / "nvshmem" / "fusedmoe_nvshmem.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = {
        name: 0 if arguments.strip() == "void" else len(arguments.split(","))
        for name, arguments in re.findall(rf"\b{PREFIX}(\w+)\(([^)]*)\);", text)
    }
    assert declared == {name: len(arguments) for name, arguments in FUNCTIONS.items()}
    assert f"{PREFIX.upper()}ID_BYTES {nvshmem._ID_BYTES}\n" in header


def test_single_rank_heap_opens_allocates_and_closes(fake: FakeLibrary) -> None:
    with NvshmemHeap(Group("ep"), CPU) as heap:
        memory = heap.allocate((48,), torch.uint8)
        assert memory.own.dtype == torch.uint8 and memory.own.tolist() == [0] * 48
        assert memory.table.tolist() == [memory.own.data_ptr()] and heap.network is None
    # The first allocation is a spare signal, used to detect distant ranks.
    order = ["unique_id", "init", "allocate", "allocate", "free", "free", "finalize"]
    assert fake.calls == order
    heap.close()
    assert fake.calls == order


def test_heap_is_abandoned_without_waiting_after_error(fake: FakeLibrary) -> None:
    with pytest.raises(ZeroDivisionError), NvshmemHeap(Group("ep"), CPU) as heap:
        heap.allocate((8,), torch.uint8)
        raise ZeroDivisionError
    assert fake.calls == ["unique_id", "init", "allocate", "allocate"]
    with pytest.raises(RankError, match="this heap was abandoned after an error"):
        heap.allocate((8,), torch.uint8)


@pytest.mark.parametrize("name", ["unique_id", "init"])
def test_library_error_raises_rank_error(fake: FakeLibrary, name: str) -> None:
    fake.fails[name] = "it says no"
    with pytest.raises(RankError, match="rank 0: opening NVSHMEM: it says no"):
        NvshmemHeap(Group("ep"), CPU)
    # A job may be open at the failure; it must be closed.
    assert fake.calls == {"unique_id": ["unique_id"], "init": ["unique_id", "init", "finalize"]}[name]


@pytest.mark.parametrize("name", ["allocate", *slowly("init", "free", "finalize")])
def test_hanging_library_call_times_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = install(monkeypatch, FakeLibrary(hangs=frozenset([name])))
    start = time.monotonic()
    try:
        with pytest.raises(RankError, match="did not complete within 1 s; see the logs"):
            NvshmemHeap(Group("ep", job=Job(timeout_s=0.6)), CPU).close()
    finally:
        fake.release.set()
    assert 0.5 < time.monotonic() - start < 40


@pytest.mark.slow
def test_close_times_out_on_hanging_stream(monkeypatch: pytest.MonkeyPatch, fake: FakeLibrary) -> None:
    heap = NvshmemHeap(Group("ep", job=Job(timeout_s=0.4)), CPU)
    monkeypatch.setattr(nvshmem, "record_event", lambda device: lambda: False)
    with pytest.raises(RankError, match="rank 0: closing NVSHMEM: it did not complete"):
        heap.close()
    assert "free" not in fake.calls


def test_existing_nvshmem_job_is_adopted_or_rejected(fake: FakeLibrary) -> None:
    fake.owner, fake.pe, fake.pes = 2, 0, 1
    with NvshmemHeap(Group("ep"), CPU):
        assert fake.calls == ["adopt", "allocate"]
    fake.pes = 4
    with pytest.raises(ConfigError, match="takes part in one NVSHMEM job.*rank 0: is PE 0 of 4"):
        NvshmemHeap(Group("ep"), CPU)
    assert fake.calls == ["adopt", "allocate", "free", "finalize"]


# (owner, PE, PEs, job) of each rank, and the error.
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
        # Missing on all ranks, missing on rank 1, and then each state.
        fake = install(patch, FakeLibrary())
        with NvshmemHeap(ep, CPU) as heap:
            assert (fake.pe, fake.pes, fake.job) == (rank, world, b"made".ljust(128))
            memory = heap.allocate((24,), torch.uint8)
            assert [address != 0 for address in memory.table.tolist()] == [other == rank for other in range(world)]
            assert heap.network is not None and heap.network.pe_W.tolist() == [0, 1]
        began = ["unique_id"] * (rank == 0) + ["init"]
        assert fake.calls == [*began, "allocate", "allocate", "free", "free", "finalize"]
        install(patch, FakeLibrary(), "there is no NVIDIA driver here" if rank == 1 else "")
        with pytest.raises(ConfigError) as caught:
            NvshmemHeap(ep, CPU)
        said.append(str(caught.value))
        for states, words in STATES.values():
            owner, pe, pes, job_id = states[rank]
            fake = install(patch, FakeLibrary(owner, pe, pes, bytes([job_id] * 128)))
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


def test_ranks_agree_on_adopting_nvshmem_job(cluster: Cluster) -> None:
    said, others = cluster.run(2, open_on_ranks)
    assert others == said
    assert said[0] == "NVSHMEM over the ep group [0, 1]: rank 1: there is no NVIDIA driver here"
    for text, (_, words) in zip(said[1:], STATES.values(), strict=True):
        assert (words in text) if words else text == ""


def fail_on_rank_1(rank: int, world: int, name: str) -> str:
    ep = Topology.from_sizes(ep=world, timeout_s=30).ep
    with pytest.MonkeyPatch.context() as patch:
        fake = install(
            patch, FakeLibrary(hangs=frozenset([name])) if rank == 0 else FakeLibrary(fails={name: "it says no"})
        )
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            NvshmemHeap(ep, CPU)
        fake.release.set()
        assert time.monotonic() - start < 25
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "operation"), [("allocate", "allocating symmetric memory"), *slowly(("init", "opening NVSHMEM"))]
)
def test_blocking_call_ends_when_peer_rank_fails(cluster: Cluster, name: str, operation: str) -> None:
    """The other ranks wait for the failed rank inside the library."""
    for rank, said in enumerate(cluster.run(2, fail_on_rank_1, name)):
        blame = "ended because rank 1 failed in"
        assert said == f"rank {rank}: {operation} over the ep group [0, 1] {blame} {operation}: it says no"


def fail_locally(rank: int, world: int, name: str) -> str:
    """One rank's local call fails; the board is not read, as in an NCCL collective."""
    ep = Topology.from_sizes(ep=world, timeout_s=30).ep
    fails = rank == (0 if name == "unique_id" else 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ep.board), "read", lambda self, wait_s=0.0: None)
        owned = {"owner": 2, "pe": rank, "pes": 2} if name == "adopt" else {}
        install(patch, FakeLibrary(fails={name: "it says no"} if fails else {}, **owned))
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            NvshmemHeap(ep, CPU)
        assert time.monotonic() - start < 25
    return str(caught.value)


@pytest.mark.parametrize("name", ["unique_id", "adopt", "peer"])
def test_local_failure_is_raised_on_every_rank(cluster: Cluster, name: str) -> None:
    operation = "allocating symmetric memory" if name == "peer" else "opening NVSHMEM"
    culprit = 0 if name == "unique_id" else 1
    for rank, said in enumerate(cluster.run(2, fail_locally, name)):
        ended = f"ended because rank {culprit} failed in {operation}: it says no"
        assert said == f"rank {rank}: {operation} over the ep group [0, 1] {ended}"


def test_library_calls_use_current_gpu_of_creating_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's current GPU is the first one."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **more: tensor(*args, **more))
    for device in (torch.device("cuda"), torch.device("cuda", 3)):
        install(monkeypatch, FakeLibrary())
        monkeypatch.setattr(nvshmem, "make_current", used.append)
        NvshmemHeap(Group("ep"), device)
    # At initialization and allocation.
    assert used == [torch.device("cuda", 3)] * 4


def raise_failed(*arguments: Any) -> None:
    raise nvshmem._LibraryError("nothing to be had")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"no_gpu_reason": lambda: "no driver"}, "no driver"),
        ({"nvshmem_home": lambda: None}, "NVSHMEM's package is not installed: pip install 'fusedmoe\\[nvshmem\\]'"),
        ({"nvshmem_packages": lambda: {12: "3.4.5"}}, "PyTorch is for CUDA 13.0, but .* is nvidia-nvshmem-cu12: pip"),
        ({"LIBRARY": Path("/nowhere/lib.so")}, "lib.so is not built; .* make nvshmem"),
        ({"load": lambda: ctypes.CDLL("/nowhere/lib.so")}, "cannot be loaded .*nowhere.*; .* make nvshmem"),
        (
            {"load": lambda: nvshmem.Library(ctypes.CDLL(None))},
            "built from other sources .*_nvshmem_probe.*make nvshmem",
        ),
        ({"versions": ((3, 4, 5), (3, 6, 1))}, "was built with NVSHMEM 3.4.5, but 3.6.1 is loaded; .*make nvshmem"),
        ({"versions": ((3, 4, 5), (3, 4, 9)), "call": raise_failed}, "nothing to be had"),
        ({"versions": ((3, 4, 5), (3, 4, 9)), "cuda": False}, "PyTorch for CUDA 13.0 finds no GPU"),
        ({"versions": ((3, 4, 5), (3, 4, 9))}, ""),
    ],
)
def test_unavailable_reason_names_missing_part(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib.so").touch()
    made = FakeLibrary()
    made.versions = lambda: changes.get("versions", ((3, 4, 5), (3, 4, 5)))  # type: ignore[attr-defined]
    if "call" in changes:
        made.call = changes["call"]  # type: ignore[method-assign]
    settled: dict[str, Any] = {
        "no_gpu_reason": lambda: "",
        "nvshmem_home": lambda: tmp_path,
        "nvshmem_packages": lambda: {13: "3.4.5"},
        "LIBRARY": tmp_path / "lib.so",
        "load": lambda: made,
    }
    for name, value in settled.items():
        monkeypatch.setattr(nvshmem, name, changes.get(name, value))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: changes.get("cuda", True))
    reason = nvshmem.unavailable_reason()
    assert re.search(says, reason) if says else reason == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported_without_loading_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "load", lambda: pytest.fail("it must not be loaded"))
    reason = nvshmem.unavailable_reason()
    assert reason == nvshmem.no_gpu_reason() and ("driver" in reason)
    with pytest.raises(ConfigError, match="NVSHMEM over the ep group .0.: rank 0: .*driver"):
        NvshmemHeap(Group("ep"), CPU)


def test_nvshmem_version_equals_pins() -> None:
    for name in ("cpu", "cuda", "oldest"):
        pins = (ROOT / "constraints" / f"{name}.txt").read_text()
        for cuda in (12, 13):
            assert f"nvidia-nvshmem-cu{cuda}=={libraries.NVSHMEM_VERSION}\n" in pins
