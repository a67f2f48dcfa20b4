"""Ranks of two nodes on one host: a symmetric heap that hides peers, and a simulated NVSHMEM to reach them.

The kernels are the real kernels for remote peers, in Triton's interpreter; only NVSHMEM's device functions are replaced
(`Wire`). The replacements allow everything that NVSHMEM does not forbid: put data is read late and arrives in any order
that no fence forbids; the reader's GPU does not see it before it asks (`arrived`); and a put from memory that is not
symmetric is an error.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedmoe.comm.group import Group
from fusedmoe.comm.one_sided.heaps import HostHeap
from fusedmoe.kernels.one_sided import Network
from fusedmoe.kernels.triton.grouped import dhidden, up
from fusedmoe.kernels.triton.one_sided import network, put, remote

PLACES = {
    "put_nbi": (network,),
    "put_signal_nbi": (put,),
    "signal_pe": (network, put),
    "fence": (network,),
    "arrived": (remote, up, dhidden),
}


@dataclass(eq=False)
class Op:
    """Operation in flight. `fences`: this rank's earlier fences. `first`: the put that must precede this signal."""

    kind: str
    pe: int
    dest: int
    fences: int
    source: int = 0
    size: int = 0
    value: int = 0
    first: Op | None = None


def number(value: Any) -> int:
    """Convert the interpreter's scalars and pointers."""
    return int(np.asarray(value.handle.data).reshape(-1)[0]) if hasattr(value, "handle") else int(value)


@dataclass
class Wire:
    """One rank's end of the network. One thread sends the kernels' puts; one thread per peer receives.

    Attributes:
        breaks: rules to violate: "fence" (a fence orders nothing), "arrived" (asking makes nothing visible).
        puts: sizes of the puts.   asked: how often `arrived` was called.
    """

    draw: random.Random
    breaks: Sequence[str] = ()
    memory: list[tuple[int, int]] = field(default_factory=list)
    puts: list[int] = field(default_factory=list)
    asked: int = 0
    _ops: list[Op] = field(default_factory=list)
    _fences: int = 0
    _limbo: list[tuple[int, int, bytes]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: bool = True
    _may_send: threading.Event = field(default_factory=threading.Event)

    def connect(self, group: Group, gather: Any) -> None:
        self._may_send.set()
        listener = Listener(backlog=16)
        addresses = gather(listener.address)
        self._peers: list[Connection] = [Client(address) for address in addresses]
        self._from = [listener.accept() for _ in addresses]
        listener.close()
        for run in (self._send, *(lambda one=one: self._receive(one) for one in self._from)):
            threading.Thread(target=run, daemon=True).start()

    def hold(self, most_s: float) -> None:
        """Send nothing until `let_go` is called, or until the given time has passed."""
        self._may_send.clear()
        timer = threading.Timer(most_s, self.let_go)
        timer.daemon = True
        timer.start()

    def let_go(self) -> bool:
        """Resume sending; return whether any operation was still held."""
        held = not self._may_send.is_set()
        self._may_send.set()
        return held

    # Device functions that kernels call.

    def put_nbi(self, dest: Any, source: Any, size: Any, pe: Any) -> Op:
        op = Op("put", number(pe), number(dest), self._fences, number(source), number(size))
        assert op.size > 0, "nothing to put"
        self._place(op.source, op.size)
        self.puts.append(op.size)
        with self._lock:
            self._ops.append(op)
        return op

    def put_signal_nbi(self, dest: Any, source: Any, size: Any, signal: Any, value: Any, pe: Any) -> None:
        put = self.put_nbi(dest, source, size, pe)
        with self._lock:
            self._ops.append(Op("signal", put.pe, number(signal), self._fences, value=number(value), first=put))

    def signal_pe(self, signal: Any, value: Any, pe: Any, spare: Any) -> None:
        self._place(number(spare), 8)
        with self._lock:
            self._ops.append(Op("signal", number(pe), number(signal), self._fences, value=number(value)))

    def fence(self) -> None:
        if "fence" not in self.breaks:
            self._fences += 1

    def arrived(self, signal: Any, value: Any) -> int:
        self.asked += 1
        place = number(signal)
        self._place(place, 8)
        if ctypes.c_int64.from_address(place).value < number(value):
            return 0
        if "arrived" not in self.breaks:
            self._see()
        return 1

    def _see(self) -> None:
        with self._lock:
            for place, offset, rows in self._limbo:
                ctypes.memmove(self.memory[place][0] + offset, rows, len(rows))
            self._limbo.clear()

    def _place(self, address: int, size: int) -> tuple[int, int]:
        """Locate symmetric memory: allocation and offset."""
        for place, (start, length) in enumerate(self.memory):
            if start <= address and address + size <= start + length:
                return place, address - start
        raise AssertionError(f"{size} bytes at {address:#x} are not symmetric memory")

    # Threads.

    def _send(self) -> None:
        while self._open:
            self._may_send.wait()
            with self._lock:
                may = [op for op in self._ops if self._may_go(op)]
                # Signals first; rows only if a signal must follow them.
                ready = [op for op in may if op.kind == "signal"] or [op for op in may if self._must_go(op)]
                op = self.draw.choice(ready) if ready else None
            if op is None:
                time.sleep(0.0005)
                continue
            if self.draw.random() < 0.2:
                time.sleep(self.draw.random() * 0.002)
            place, offset = self._place(op.dest, op.size or 8)
            rows = ctypes.string_at(op.source, op.size)  # read as late as possible
            peer = len(self._peers) - 1 - op.pe
            try:
                self._peers[peer].send((op.kind, place, offset, rows, op.value))
            except OSError:  # that rank has exited
                return
            with self._lock:
                self._ops.remove(op)

    def _may_go(self, op: Op) -> bool:
        if op.first in self._ops:
            return False
        return not any(other.pe == op.pe and other.fences < op.fences for other in self._ops)

    def _must_go(self, op: Op) -> bool:
        later = (other for other in self._ops if other.kind == "signal" and other.pe == op.pe)
        return any(one.first is op or one.fences > op.fences for one in later)

    def _receive(self, peer: Connection) -> None:
        while self._open:
            try:
                kind, place, offset, rows, value = peer.recv()
            except (EOFError, OSError):
                return
            if kind == "put":
                with self._lock:
                    self._limbo.append((place, offset, rows))
            else:
                ctypes.c_int64.from_address(self.memory[place][0] + offset).value = value

    def settle(self) -> None:
        """Wait until every required operation is sent."""
        while any(op.kind == "signal" for op in self._ops):
            time.sleep(0.001)

    def close(self) -> None:
        self._open = False
        for one in (*self._peers, *self._from):
            one.close()


class FarHeap(HostHeap):
    """Shared memory, in which ranks of other nodes are far.

    Args:
        nodes: node of each rank.   breaks: as `Wire.breaks`.
    """

    def __init__(self, group: Group, device: torch.device, nodes: Sequence[int], breaks: Sequence[str] = ()) -> None:
        super().__init__(group, device)
        self._nodes = nodes
        self.wire = Wire(random.Random(group.index), breaks)
        self._kept = [(module, name, getattr(module, name)) for name, of in PLACES.items() for module in of]
        for module, name, _ in self._kept:
            setattr(module, name, getattr(self.wire, name))
        self.wire.connect(group, self._all_gather)
        spare, _ = self._map(256)
        # A PE number differs from the rank.
        pe_W = torch.arange(group.size - 1, -1, -1, dtype=torch.int32)
        self.network = Network(pe_W, spare[:8].view(torch.int64), {})

    def close(self) -> None:
        if not self.is_abandoned:
            self.wire.settle()
            self._all_gather("settled")
        super().close()

    def abandon(self) -> None:
        super().abandon()
        self.wire.close()
        for module, name, function in self._kept:
            setattr(module, name, function)

    def _map(self, size: int) -> tuple[Tensor, list[int]]:
        own, addresses = super()._map(size)
        self.wire.memory.append((own.data_ptr(), size))
        here = self._nodes[self.group.index]
        return own, [address if node == here else 0 for address, node in zip(addresses, self._nodes, strict=True)]
