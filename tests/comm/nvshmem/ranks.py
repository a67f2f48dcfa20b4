"""A rank of a job over a fake NVSHMEM in host memory; started by test_library.py.

    python -m tests.comm.nvshmem.ranks SCENARIO RANK FOLDER LIBRARY

FOLDER has libcuda.so.1 and libnvshmem_host.so.3, which replace the real libraries. Prints "passed" at the end.
"""

from __future__ import annotations

import ctypes
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided import nvshmem
from fusedmoe.comm.one_sided.nvshmem import NvshmemHeap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.one_sided import define_addresses

CPU = torch.device("cpu")
WITH_FUNCTIONS, WITHOUT, REFUSED = 11, 12, 13


def stand_in(folder: Path, library: Path) -> None:
    """Load the fake libraries, and use a CPU as the GPU."""
    for name in ("libcuda.so.1", "libnvshmem_host.so.3"):
        ctypes.CDLL(str(folder / name))
    nvshmem.LIBRARY = library
    nvshmem.make_current = lambda device: None
    nvshmem.record_event = lambda device: lambda: True
    nvshmem.tensor_at = at
    torch.version.cuda, torch.cuda.is_available = "13.0", lambda: True


def at(address: int, size: int, device: torch.device) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def log(*without: str) -> list[str]:
    lines = Path(os.environ["FAKE_NVSHMEM"], f"log.{os.getpid()}").read_text().splitlines()
    return [line for line in lines if line not in without]


def exchange(heap: NvshmemHeap, group: Group, size: int = 1000) -> None:
    """Each rank puts distinct bytes to each rank, followed by a signal, by the library's functions on a stream."""
    call = nvshmem.load().call
    memory = heap.allocate((8 * group.size + size * group.size,), torch.uint8)
    assert memory.own.numel() == 8 * group.size + size * group.size and not memory.own.any()
    dist.barrier()
    signals, windows = memory.own[: 8 * group.size].view(torch.int64), memory.own[8 * group.size :].view(-1, size)
    for other in range(group.size):
        rows = torch.full((size,), 10 * group.index + other, dtype=torch.uint8)
        places = windows[group.index].data_ptr(), rows.data_ptr(), size, signals[group.index].data_ptr()
        call("put_signal", *places, 5, other, 0)
    for other in range(group.size):
        call("wait", signals[other].data_ptr(), 5, 0)
        assert (windows[other] == 10 * other + group.index).all()
    table = memory.table.tolist()
    assert table[group.index] == memory.own.data_ptr()
    for other, address in enumerate(table):
        if "FAKE_OTHER_NODE" in os.environ and other != group.index:
            assert address == 0
        else:
            assert at(address + 8 * group.size + group.index * size, 1, CPU) == 10 * group.index + other
    call("barrier", 0)


def shared(group: Group) -> None:
    """Several heaps share one job; closing the last heap ends it, and a new job starts."""
    first = NvshmemHeap(group, CPU)
    exchange(first, group)
    nvshmem.register_module(WITH_FUNCTIONS)
    nvshmem.register_module(WITH_FUNCTIONS)
    nvshmem.register_module(WITHOUT)
    with NvshmemHeap(group, CPU) as second:
        exchange(second, group, 17)
    began = f"init {group.index} of {group.size}"
    # Each heap has a spare signal and the memory of its exchange.
    assert log("malloc") == [began, "barrier", f"module {WITH_FUNCTIONS}", "barrier", "free", "free"]
    first.close()
    first.close()
    assert log("malloc")[6:] == ["free", "free", f"module {WITH_FUNCTIONS} out", "finalize"]
    with NvshmemHeap(group, CPU) as again:
        exchange(again, group)
    ended = ["barrier", "free", "free", f"module {WITH_FUNCTIONS} out", "finalize"]
    assert log("malloc")[10:] == [began, f"module {WITH_FUNCTIONS}", *ended]
    try:
        with NvshmemHeap(group, CPU):
            nvshmem.register_module(REFUSED)
        raise AssertionError("it was refused")
    except ConfigError as error:
        assert "nvshmemx_cumodule_init returned 5" in str(error), error


def adopted(group: Group) -> None:
    """Other code has started a job and continues to use it afterwards."""
    host = ctypes.CDLL("libnvshmem_host.so.3")
    made = ctypes.create_string_buffer(b"theirs", 128)
    host.nvshmemx_set_attr_uniqueid_args(group.index, group.size, made, None)
    host.nvshmemx_hostlib_init_attr(0, None)
    with NvshmemHeap(group, CPU) as heap:
        exchange(heap, group)
        with NvshmemHeap(group, CPU) as other:
            exchange(other, group)
    assert host.nvshmemx_init_status() == 2 and "finalize" not in log()
    try:
        NvshmemHeap(Group("one"), CPU)
        raise AssertionError("the job spans more ranks")
    except ConfigError as error:
        assert f"rank 0: is PE {group.index} of 2" in str(error), error


def heap(group: Group) -> None:
    """A heap over the library, windows in the heap, and a new heap after one ended by an error."""
    far = "FAKE_OTHER_NODE" in os.environ
    with NvshmemHeap(group, CPU) as opened:
        assert (opened.network is not None) == far
        rows = opened.allocate((2, 5), torch.float32)
        assert not rows.own.any() and int(rows.table[group.index]) == rows.own.data_ptr()
        assert [p for p, address in enumerate(rows.table.tolist()) if address == 0] == [1 - group.index] * far
        buffers = ReceiveBuffers(opened, BufferSizes(8, 2, 4, 16, torch.float32))
        assert (buffers.tokens.staging is not None) == far
        if opened.network is not None:
            assert opened.network.pe_W.tolist() == [0, 1] and opened.network.dummy_signal.tolist() == [0]
            assert Path(opened.network.libraries["libnvshmem_device"]).exists()
            peer_R, result_row_R = torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([3, 4, 0, 1])
            sent = define_addresses(peer_R, result_row_R, buffers.returned, 0, 0)
            own = buffers.results.rows[0, 0].data_ptr()
            assert sent.target_N is not None
            wanted = [0 if p == group.index else own + 64 * at for p, at in ((0, 3), (0, 4), (1, 0), (1, 1))]
            assert sent.target_N.tolist() == wanted
    assert log()[-1] == "finalize" and log().count("free") == log().count("malloc")
    try:
        with NvshmemHeap(group, CPU) as opened:
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert opened.is_abandoned and log()[-1] == "malloc"
    with NvshmemHeap(group, CPU) as opened:
        opened.allocate((3,), torch.uint8)


def no_room(group: Group) -> None:
    heap = NvshmemHeap(group, CPU)
    try:
        heap.allocate((1 << 21,), torch.uint8)
        raise AssertionError("there is no such room")
    except RankError as error:
        assert "allocating symmetric memory" in str(error) and "NVSHMEM_SYMMETRIC_SIZE" in str(error), error


def init_fails(group: Group) -> None:
    """Initialization fails on rank 1; rank 0, which waits for it, gets the error."""
    try:
        NvshmemHeap(group, CPU)
        raise AssertionError("rank 1 does not start")
    except RankError as error:
        assert "rank 1 failed in opening NVSHMEM: nvshmemx_hostlib_init_attr returned 7" in str(error), error


def module_refused(group: Group) -> None:
    """A module loaded before the job fails, alone and on rank 1 of two: no job stays open, and a new job starts."""
    nvshmem.register_module(WITH_FUNCTIONS)
    if group.index:
        nvshmem.register_module(REFUSED)
    for ranks in (Group("one"), group):
        try:
            with NvshmemHeap(ranks, CPU):
                assert not group.index and ranks.size == 1
        except RankError as error:
            assert "opening NVSHMEM: nvshmemx_cumodule_init returned 5" in str(error), error
        assert nvshmem.load().state().owner == (ranks.size == 2 and group.index == 0)
    refused = [f"module {REFUSED}", f"module {WITH_FUNCTIONS} out", "finalize"]
    for size in (1, 2) if group.index else ():
        started = log().index(f"init {size - 1} of {size}")
        assert log()[started + 1 : started + 5] == [f"module {WITH_FUNCTIONS}", *refused], log()


def one_without(group: Group) -> None:
    """Rank 1 has no GPU: all ranks report it."""
    if group.index:
        os.environ["FAKE_CUINIT"] = "100"
    try:
        NvshmemHeap(group, CPU)
        raise AssertionError("rank 1 has no GPU")
    except ConfigError as error:
        assert "rank 1: the NVIDIA driver does not start (cuInit returned 100)" in str(error), error
        assert "rank 0:" not in str(error), error


def main() -> None:
    scenario, rank, folder, library = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    stand_in(folder, library)
    store = dist.FileStore(str(Path(os.environ["FAKE_NVSHMEM"]) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    globals()[scenario](Topology.from_sizes(ep=2, timeout_s=20).ep)
    dist.barrier()
    print("passed", flush=True)
    os._exit(0)  # threads that wait for missing ranks are left behind


if __name__ == "__main__":
    main()
