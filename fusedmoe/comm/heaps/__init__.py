"""Where symmetric memory can be had: the backends of a heap by name, and which of them works on all ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import Group
from fusedmoe.comm.heap import Heap
from fusedmoe.comm.heaps import host, nvshmem_heap, symm
from fusedmoe.errors import ConfigError


def open_heap(group: Group, device: torch.device, backend: str | None = None) -> Heap:
    """A heap over the group; by default the first backend that works for the device on all ranks. Collective.

    Raises:
        ConfigError: the backend does not work everywhere; it names the ranks, with the reasons and what to do. All
            ranks raise it.
    """
    name, reason = find_backend(group, device, backend)
    if reason:
        raise ConfigError(f"no symmetric heap over the {group} on {device.type}: {reason}")
    return BACKENDS[name].open(group, device)


def find_backend(group: Group, device: torch.device, backend: str | None = None) -> tuple[str, str]:
    """The first backend that works for all ranks, else "" and why none does; the same on all ranks. Collective.

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
        why = [f"rank {rank}: {of[place]}" for rank, (_, of) in answers.items() if of[place]]
        if BACKENDS[name].one_host and len({*hosts.values()}) > 1:
            first, host = next(iter(hosts.items()))
            other = next(rank for rank in hosts if hosts[rank] != host)
            names = f"rank {first} is on {host[0]}, rank {other} on {hosts[other][0]}"
            why.append(f"it joins ranks of one host, but {names}")
        if not why:
            return name, ""
        reasons.append(f"{name}: {'; '.join(why)}")
    return "", ". ".join(reasons)


def _host() -> tuple[str, str]:
    """This host: its name, and what tells it from others of that name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


@dataclass(frozen=True)
class Backend:
    """`why_not(device)`: why it does not work there, and what to do; "" where it does. `one_host`: joins no others."""

    open: Callable[[Group, torch.device], Heap]
    why_not: Callable[[torch.device], str]
    one_host: bool = True


#: By name. Virtual ranks (`host.local_heaps`) have no group to open one over: they are made together.
BACKENDS = {
    "host": Backend(host.HostHeap, host.why_not),
    "symm": Backend(symm.SymmHeap, symm.why_not),
    "nvshmem": Backend(nvshmem_heap.NvshmemHeap, nvshmem_heap.why_not, one_host=False),
}
