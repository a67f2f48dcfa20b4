"""The backends of a symmetric heap, and which of them works on all ranks.

- `HostHeap`: processes of one host, for kernels in Triton's interpreter.
- `SymmHeap`: GPUs of a node, by PyTorch's symmetric memory, which they address over NVLink or PCIe.
- `nvshmem.NvshmemHeap`: GPUs of several nodes. Those of a node address each other, the others are far.
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
from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heap import Heap, no_gpu, not_for_torch
from fusedmoe.comm.one_sided.nvshmem import NvshmemHeap
from fusedmoe.compat.torch import SymmetricMemory
from fusedmoe.errors import ConfigError


def open_heap(group: Group, device: torch.device, backend: str | None = None) -> Heap:
    """Opens a heap over the group; by default the first backend that works for the device on all ranks. Collective.

    Raises:
        ConfigError: on all ranks; it names those on which the backend does not work, with the reasons and what to do.
    """
    name, reason = find_backend(group, device, backend)
    if reason:
        raise ConfigError(f"no symmetric heap over the {group} on {device.type}: {reason}")
    return BACKENDS[name](group, device)


def find_backend(group: Group, device: torch.device, backend: str | None = None) -> tuple[str, str]:
    """Returns the first backend that works for all ranks, else "" and why none does; the same everywhere. Collective.

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
    """The heap over processes of one host: each rank makes anonymous files, which the others open through its process.

    The memory lives as long as a process maps it: a peer that is late writes into memory that nobody reads any more,
    never into freed memory.
    """

    backend = "host"

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
            # Only then may a rank close the file that the others open.
            self._gather("mapped")
        finally:
            os.close(file)
        self._memory += views
        return views[self.group.index], [view.data_ptr() for view in views]


def _new_file(size: int) -> int:
    # It has no name in /dev/shm, so nothing is left there wherever a rank is killed.
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
        # The tensor keeps the mapping.
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


class SymmHeap(Heap):
    """The heap over GPUs of a node that address each other's memory."""

    backend = "symm"

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

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        assert self.group.handle is not None
        # Not `symmetric_memory.empty`, whose pool gives memory out anew as soon as it is freed: `rendezvous` of memory
        # that has been through one returns what it found then, without asking the other ranks. After an error a heap
        # would address what belongs to something else by now. Freed, this is gone here once the device is done; for
        # peers it stays until they free theirs.
        own = SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device).zero_()
        self._memory.append(own)
        torch.cuda.synchronize(self.device)
        handle = SymmetricMemory.rendezvous(own, self.group.handle.group_name)
        addresses = [int(address) for address in handle.buffer_ptrs]
        # Backends other than "CUDA" know no address of peers that only their functions reach.
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


BACKENDS: dict[str, type[Heap]] = {heap.backend: heap for heap in (HostHeap, SymmHeap, NvshmemHeap)}
