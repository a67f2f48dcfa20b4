"""The backends of a symmetric heap, and which of them works on all ranks.

- `HostHeap`: processes of one host, for kernels in Triton's interpreter. Each rank makes anonymous files (memfd), which
  the others open through its process. Nothing ever has a name in /dev/shm, so nothing is left there either, wherever a
  rank is killed. The memory lives as long as a process maps it: a peer that is late writes into memory that nobody
  reads any more, never into freed memory.
- `SymmHeap`: GPUs of a node, by PyTorch's symmetric memory, which they address over NVLink or PCIe.
- `NvshmemHeap`: GPUs of several nodes. Those of a node address each other, the others are far.
- `LocalHeap`: virtual ranks of one process, for tests and for measurements of what kernels cost without a network.

`SymmHeap` was read against torch 2.11 and 2.13, which agree in what it uses (`INTERFACE`; a test holds the installed
torch to it). What their signatures do not say:

- `symmetric_memory.empty` takes memory from a pool that gives it out anew as soon as it is freed, and `rendezvous` of
  memory that has been through one returns what it found then, without asking the other ranks. After an error, or where
  ranks have freed different tensors, a heap would address memory that belongs to something else by now.
  `empty_strided_p2p` makes an allocation of its own each time. Freed, it is gone here once the device is done; for
  peers it stays until they free theirs.
- Backends other than "CUDA" (`TORCH_SYMMMEM`, `set_backend`) know no address of peers that only their functions reach.
- The device must have an index.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
from pathlib import Path

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.failure.blame import lost
from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.one_sided import nvshmem
from fusedmoe.comm.one_sided.heap import Heap, no_gpu, not_for_torch
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.one_sided import Network


def open_heap(group: Group, device: torch.device, backend: str | None = None) -> Heap:
    """Opens a heap over the group; by default the first backend that works for the device on all ranks. Collective.

    Raises:
        ConfigError: the backend does not work everywhere; it names the ranks, with the reasons and what to do. All
            ranks raise it.
    """
    name, reason = find_backend(group, device, backend)
    if reason:
        raise ConfigError(f"no symmetric heap over the {group} on {device.type}: {reason}")
    return BACKENDS[name](group, device)


def find_backend(group: Group, device: torch.device, backend: str | None = None) -> tuple[str, str]:
    """Returns the first backend that works for all ranks, else "" and why none does. Collective.

    All ranks return the same.

    Raises:
        ConfigError: there is no backend of that name.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"unknown heap backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    choice = (backend,) if backend is not None else ("symm", "nvshmem") if device.type == "cuda" else ("host",)
    own = (_host(), [BACKENDS[name].why_not(device) for name in choice])
    answers = dict(zip(group.ranks, all_gather_object(group, own, "choosing a symmetric heap"), strict=True))
    hosts = {rank: host for rank, (host, _) in answers.items()}
    reasons = []
    for place, name in enumerate(choice):
        why = [f"rank {rank}: {refusals[place]}" for rank, (_, refusals) in answers.items() if refusals[place]]
        if BACKENDS[name].one_host and len({*hosts.values()}) > 1:
            first, host = next(iter(hosts.items()))
            second = next(rank for rank in hosts if hosts[rank] != host)
            names = f"rank {first} is on {host[0]}, rank {second} on {hosts[second][0]}"
            why.append(f"it joins ranks of one host, but {names}")
        if not why:
            return name, ""
        reasons.append(f"{name}: {'; '.join(why)}")
    return "", ". ".join(reasons)


def _host() -> tuple[str, str]:
    """Returns the name of this host, and its boot's number, since two hosts may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


class HostHeap(Heap):
    """The heap over processes of one host, for kernels in Triton's interpreter."""

    backend = "host"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._views: list[Tensor] = []

    @staticmethod
    def why_not(device: torch.device) -> str:
        if device.type != "cpu":
            return "it is memory of the host; GPUs take symm or nvshmem"
        if not hasattr(os, "memfd_create"):
            return "it needs Linux (memfd)"
        try:
            file = _new_file(mmap.PAGESIZE)
            try:
                _view(f"/proc/{os.getpid()}/fd/{file}", mmap.PAGESIZE, os.fstat(file).st_ino)
            finally:
                os.close(file)
        except OSError as error:
            return (
                f"shared memory cannot be made or opened through /proc ({error}); mount /proc, or raise memory limits"
            )
        return ""

    def abandon(self) -> None:
        super().abandon()
        self._free()

    def _free(self) -> None:
        self._views = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        group, operation = self.group, "allocation on the host heap"
        try:
            file = _new_file(size)
        except OSError as error:
            group.refuse(operation, f"no memory for {size} bytes ({error}). Raise its limits, or make batches smaller")
        try:
            files = self._gather((os.getpid(), file, os.fstat(file).st_ino))
            try:
                views = [_view(f"/proc/{pid}/fd/{number}", size, inode) for pid, number, inode in files]
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    group.refuse(operation, f"no memory to map {size} bytes of each rank ({error}). Raise its limits")
                # A peer that has failed meanwhile has closed its file; another file may have its number by now.
                raise lost(group.board, group.ranks, operation, f"the {group}", str(error)) from error
            self._gather("mapped")  # before a rank closes the file that the others open
        finally:
            os.close(file)
        self._views += views
        return views[self.group.index], [view.data_ptr() for view in views]


def _new_file(size: int) -> int:
    file = os.memfd_create("fusedmoe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _view(path: str, size: int, inode: int) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_ino != inode:
            raise FileNotFoundError(errno.ENOENT, "it is another file by now", path)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)  # the tensor keeps the mapping
    finally:
        os.close(file)


#: What `SymmHeap` calls, with the arguments given here, and reads of `torch._C._distributed_c10d._SymmetricMemory`.
INTERFACE: dict[str, tuple[str, ...] | None] = {
    "empty_strided_p2p": ("size", "stride", "dtype", "device"),
    "rendezvous": ("tensor", "group_name"),
    "buffer_ptrs": None,
    "rank": None,
}


class SymmHeap(Heap):
    """The heap over GPUs of a node that address each other's memory."""

    backend = "symm"

    def __init__(self, group: Group, device: torch.device) -> None:
        indexed = device if device != torch.device("cuda") else torch.device("cuda", torch.cuda.current_device())
        super().__init__(group, indexed)
        self._buffers: list[Tensor] = []

    @staticmethod
    def why_not(device: torch.device) -> str:
        if device.type != "cuda":
            return "it is memory of CUDA GPUs; CPUs take host"
        if reason := no_gpu() or not_for_torch():
            return reason
        count = torch.cuda.device_count()
        for gpu in range(count):
            for peer in range(count):
                if gpu != peer and not torch.cuda.can_device_access_peer(gpu, peer):
                    pair = f"GPUs {gpu} and {peer}"
                    return (
                        f"{pair} do not reach each other's memory (see nvidia-smi topo -p2p r); collectives do without"
                    )
        return ""

    def abandon(self) -> None:
        super().abandon()
        self._free()

    def _free(self) -> None:
        self._buffers = []

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        from torch._C._distributed_c10d import _SymmetricMemory

        assert self.group.handle is not None
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device).zero_()
        self._buffers.append(own)
        torch.cuda.synchronize(self.device)
        handle = _SymmetricMemory.rendezvous(own, self.group.handle.group_name)
        addresses = [int(address) for address in handle.buffer_ptrs]
        known = all(addresses) and addresses[handle.rank] == own.data_ptr()
        # The gather is also the barrier by which all copies are zero before a rank writes.
        without = [rank for rank, knows in zip(self.group.ranks, self._gather(known), strict=True) if not knows]
        if without:
            raise ConfigError(
                f"rank {self.group.job.rank}: PyTorch's symmetric memory has no addresses of all peers on ranks "
                f"{without}, so that kernels cannot reach them. Leave its backend at CUDA (TORCH_SYMMMEM), or take "
                "backend='nvshmem'."
            )
        return own, addresses


class NvshmemHeap(Heap):
    """The heap over GPUs of several nodes: one use of the process's NVSHMEM job (`nvshmem.Nvshmem`)."""

    backend = "nvshmem"
    one_host = False

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._job = nvshmem.Nvshmem(group, device)
        first = self._job.allocate(8)
        if any(self._gather(not first.table.all())):
            self.network = Network(first.pe_W, first.own.view(torch.int64), nvshmem_bitcode())

    @staticmethod
    def why_not(device: torch.device) -> str:
        if device.type != "cuda":
            return "it is memory of CUDA GPUs; CPUs take host"
        if reason := nvshmem.why_not():
            return reason
        try:
            nvshmem_bitcode()
        except ConfigError as error:
            return str(error)
        return ""

    def abandon(self) -> None:
        super().abandon()
        self._job.abandon()

    def _free(self) -> None:
        self._job.close()

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        memory = self._job.allocate(size)
        return memory.own, memory.table.tolist()


#: The backends by name. Virtual ranks have no group to open one over: they are made together (`local_heaps`).
BACKENDS: dict[str, type[Heap]] = {heap.backend: heap for heap in (HostHeap, SymmHeap, NvshmemHeap)}


class LocalHeap(Heap):
    """The heap of one virtual rank. `everything`: the allocations, which all virtual ranks share."""

    backend = "local"

    def __init__(self, index: int, size: int, device: torch.device, everything: list[Tensor], job: Job) -> None:
        super().__init__(Group("virtual", tuple(range(size)), index, job=job), device)
        self._everything, self._taken = everything, 0

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        if self._taken == len(self._everything):
            # The first virtual rank makes the memory of all; the others allocate in the same order after it.
            self._everything.append(torch.zeros((self.group.size, size), dtype=torch.uint8, device=self.device))
        all_Wb = self._everything[self._taken]
        self._taken += 1
        return all_Wb[self.group.index], [copy.data_ptr() for copy in all_Wb]

    def _gather(self, value: object) -> list[object]:
        return [value] * self.group.size


def local_heaps(size: int, device: torch.device, timeout_s: float = 10.0) -> list[LocalHeap]:
    """Returns the heaps of `size` virtual ranks on one device, whose copies lie side by side in its memory.

    `timeout_s`: how long a kernel waits for another virtual rank. No rank is slow to start in one process: one that
    does not come soon never will, and a GPU can do nothing else meanwhile.
    """
    everything: list[Tensor] = []
    return [LocalHeap(index, size, device, everything, Job(index, timeout_s)) for index in range(size)]
