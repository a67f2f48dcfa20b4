"""Backends of the symmetric heap, and their selection.

- `HostHeap`: processes of one host, for kernels in Triton's interpreter.
- `SymmHeap`: GPUs of one node with PyTorch symmetric memory, over NVLink or PCIe.
- `nvshmem.NvshmemHeap`: GPUs of several nodes. GPUs of one node address each other; GPUs of other nodes are remote.
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
from fusedmoe.comm.failure.blame import connection_lost_error
from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heap import Heap, no_gpu_reason, no_torch_cuda_reason
from fusedmoe.comm.one_sided.nvshmem import NvshmemHeap
from fusedmoe.compat.torch import SymmetricMemory
from fusedmoe.errors import ConfigError


def open_heap(group: Group, device: torch.device, backend: str | None = None) -> Heap:
    """Open a heap with the named backend, by default the first that works on all ranks. Collective.

    Raises:
        ConfigError: on all ranks; names the ranks without a working backend, the reasons and fixes.
    """
    name, reason = find_backend(group, device, backend)
    if reason:
        raise ConfigError(f"no symmetric heap over the {group} on {device.type}: {reason}")
    return BACKENDS[name](group, device)


def find_backend(group: Group, device: torch.device, backend: str | None = None) -> tuple[str, str]:
    """Return (name, "") of the first backend that works on all ranks, or ("", reasons). Collective.

    Raises `ConfigError` for an unknown backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"unknown heap backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    candidates = (backend,) if backend is not None else ("symm", "nvshmem") if device.type == "cuda" else ("host",)
    own = (_host_identity(), [BACKENDS[name].unavailable_reason(device) for name in candidates])
    availability = dict(zip(group.ranks, all_gather_object(group, own, "choosing a symmetric heap"), strict=True))
    hosts = {rank: host for rank, (host, _) in availability.items()}
    reasons = []
    for index, name in enumerate(candidates):
        why = [f"rank {rank}: {refusals[index]}" for rank, (_, refusals) in availability.items() if refusals[index]]
        if BACKENDS[name].is_single_host and len({*hosts.values()}) > 1:
            first, host = next(iter(hosts.items()))
            second = next(rank for rank in hosts if hosts[rank] != host)
            names = f"rank {first} is on {host[0]}, rank {second} on {hosts[second][0]}"
            why.append(f"all ranks must be on one host, but {names}")
        if not why:
            return name, ""
        reasons.append(f"{name}: {'; '.join(why)}")
    return "", ". ".join(reasons)


def _host_identity() -> tuple[str, str]:
    """Return the host's name and boot id: two hosts may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


class HostHeap(Heap):
    """Heap over processes of one host: each rank creates anonymous files, which its peers open through /proc.

    Memory lives as long as any process maps it, so a late peer never writes into freed memory.
    """

    backend = "host"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str:
        if device.type != "cpu":
            return "it uses host memory; use symm or nvshmem on GPUs"
        if not hasattr(os, "memfd_create"):
            return "it requires Linux (memfd)"
        try:
            file = _create_anonymous_file(mmap.PAGESIZE)
            try:
                _map_file(f"/proc/{os.getpid()}/fd/{file}", mmap.PAGESIZE, os.fstat(file).st_ino)
            finally:
                os.close(file)
        except OSError as error:
            return (
                f"shared memory cannot be created or opened through /proc ({error}); mount /proc or raise memory limits"
            )
        return ""

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        group, operation = self.group, "allocation on the host heap"
        try:
            file = _create_anonymous_file(size)
        except OSError as error:
            group.refuse(operation, f"no memory for {size} bytes ({error}). Raise its limits, or use smaller batches")
        try:
            files = self._all_gather((os.getpid(), file, os.fstat(file).st_ino))
            try:
                views = [_map_file(f"/proc/{pid}/fd/{number}", size, inode) for pid, number, inode in files]
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    group.refuse(operation, f"no memory to map {size} bytes of each rank ({error}). Raise its limits")
                # A failed peer has closed its file, whose number may be reused.
                raise connection_lost_error(group.board, group.ranks, operation, f"the {group}", str(error)) from error
            self._all_gather("mapped")
        finally:
            os.close(file)
        self._mappings += views
        return views[self.group.index], [view.data_ptr() for view in views]


def _create_anonymous_file(size: int) -> int:
    # Anonymous: no file is left in /dev/shm after a kill.
    file = os.memfd_create("fusedmoe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _map_file(path: str, size: int, inode: int) -> Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_ino != inode:
            raise FileNotFoundError(errno.ENOENT, "the file was replaced", path)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


class SymmHeap(Heap):
    """Heap over GPUs of one node that address each other's memory."""

    backend = "symm"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str:
        if device.type != "cuda":
            return "it uses memory of CUDA GPUs; use host on CPUs"
        if reason := no_gpu_reason() or no_torch_cuda_reason():
            return reason
        count = torch.cuda.device_count()
        for gpu in range(count):
            for peer in range(count):
                if gpu != peer and not torch.cuda.can_device_access_peer(gpu, peer):
                    pair = f"GPUs {gpu} and {peer}"
                    return f"{pair} have no peer access (see nvidia-smi topo -p2p r); collectives do not need it"
        return ""

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        assert self.group.handle is not None
        # Not `symmetric_memory.empty`: its pool reuses freed memory, for which `rendezvous` returns its earlier result
        # without communication. After an error a heap would address memory that peers have reused.
        own = SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device).zero_()
        self._mappings.append(own)
        torch.cuda.synchronize(self.device)
        handle = SymmetricMemory.rendezvous(own, self.group.handle.group_name)
        addresses = [int(address) for address in handle.buffer_ptrs]
        # Backends other than "CUDA" may lack addresses of peers.
        has_addresses = all(addresses) and addresses[handle.rank] == own.data_ptr()
        # Also the barrier after which all copies are zero.
        ranks_without_addresses = [
            rank for rank, knows in zip(self.group.ranks, self._all_gather(has_addresses), strict=True) if not knows
        ]
        if ranks_without_addresses:
            raise ConfigError(
                f"rank {self.group.job.rank}: PyTorch symmetric memory has no addresses of all peers on ranks "
                f"{ranks_without_addresses}, so kernels cannot reach them. Leave its backend at CUDA (TORCH_SYMMMEM), "
                "or use backend='nvshmem'."
            )
        return own, addresses


BACKENDS: dict[str, type[Heap]] = {heap.backend: heap for heap in (HostHeap, SymmHeap, NvshmemHeap)}
