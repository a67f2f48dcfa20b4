"""Shared memory: contents, and the permitted order of accesses.

Every access records its location, actor and time. A later access is compared with the records on the same elements: a
write must be ordered after all earlier reads and writes, a read after all earlier writes. Uninitialized memory is NaN,
and so is memory during a write.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gluon_interpreter.clocks import Clock, Ticks
from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.schedule import EventOrder, Strand
from tests.gluon_interpreter.values import Value

Box = tuple[tuple[int, int], ...]
_HERE = str(Path(__file__).parent)


def kernel_line() -> str:
    """Locate the current line of the kernel's source."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass(frozen=True)
class Access:
    """A recorded access.

    `by_threads`: by threads or their asynchronous copies. Tensor cores need a fence to read their writes, and bulk
    copies
    need a fence to overwrite data they have accessed.
    """

    write: bool
    by_threads: bool
    box: Box
    actor: str
    tick: int
    line: str

    def before(self, ticks: Ticks) -> bool:
        return ticks.get(self.actor, 0) >= self.tick

    def meets(self, box: Box) -> bool:
        return all(low < high and start < end for (low, end), (start, high) in zip(self.box, box, strict=True))

    def __str__(self) -> str:
        return f"the {'write' if self.write else 'read'} by {self.actor} in {self.line}"


class Allocation:
    """One allocation."""

    def __init__(self, schedule: EventOrder, number: int, data: Tensor) -> None:
        self.schedule, self.number, self.data = schedule, number, data
        self._notes: dict[tuple[bool, bool, Box, str], Access] = {}

    def read(self, box: Box, actor: str, tick: int, clock: Clock, by_threads: bool) -> None:
        """Record a read; raise if it is not ordered after the writes it reads."""
        writes = [note for note in self._notes.values() if note.write and note.meets(box)]
        if not writes:
            raise KernelFault(f"{self._at(box)} is read before anything was written there")
        for note in writes:
            if not note.before(clock.seen):
                raise KernelFault(f"{self._at(box)} is read without waiting for {note}")
            if note.by_threads and not by_threads and not clock.has_fenced(note.actor, note.tick):
                raise KernelFault(f"{self._at(box)} is read without a fence after {note}")
        self._note(Access(False, by_threads, box, actor, tick, kernel_line()))

    def write(self, box: Box, actor: str, tick: int, clock: Clock, by_threads: bool) -> None:
        """Record a write; raise if earlier reads or writes may still be pending."""
        for key, note in [*self._notes.items()]:
            if not note.meets(box):
                continue
            if not note.before(clock.seen):
                raise KernelFault(f"{self._at(box)} is written without waiting for {note}")
            if note.by_threads and not by_threads and not clock.has_fenced(note.actor, note.tick):
                raise KernelFault(f"{self._at(box)} is written without a fence after {note}")
            if all(low <= start and end <= high for (start, end), (low, high) in zip(note.box, box, strict=True)):
                del self._notes[key]  # ordered after this write implies ordered after that access
        self._note(Access(True, by_threads, box, actor, tick, kernel_line()))

    def _note(self, access: Access) -> None:
        # An order after an actor's later access implies an order after its earlier one.
        self._notes[access.write, access.by_threads, access.box, access.actor] = access

    def _at(self, box: Box) -> str:
        return f"shared memory {self.number}[{', '.join(f'{start}:{end}' for start, end in box)}]"


@dataclass(frozen=True, eq=False)
class View:
    """A part of an allocation, possibly permuted: the language's shared memory descriptor."""

    memory: Allocation
    box: Box
    data: Tensor
    order: tuple[int, ...]  # the allocation's dimension for each dimension
    dtype: Any

    @property
    def shape(self) -> list[int]:
        return [*self.data.shape]

    def __getattr__(self, name: str) -> Any:
        raise NotInterpreted(f"{name} of shared memory")

    def index(self, index: Any) -> View:
        return self._part(0, int(index), 1, drop=True)

    def slice(self, start: Any, length: int, dim: int = 0) -> View:
        return self._part(dim, int(start), length, drop=False)

    def permute(self, order: Sequence[int]) -> View:
        order = tuple(order)
        return View(self.memory, self.box, self.data.permute(order), tuple(self.order[i] for i in order), self.dtype)

    def load(self, layout: Any) -> Value:
        """Load to registers."""
        strand = self._by_threads("load")
        self.read(strand.name, strand.tick(), strand.clock, by_threads=True)
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        """Store from registers."""
        strand = self._by_threads("store")
        self.write(strand.name, strand.tick(), strand.clock, by_threads=True)
        self.data.copy_(value.data)

    def _by_threads(self, what: str) -> Strand:
        self.memory.schedule.event(f"{what} of shared memory {self.memory.number}")
        return self.memory.schedule.running

    def _part(self, dim: int, start: int, length: int, drop: bool) -> View:
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            raise KernelFault(
                f"{start}:{start + length} of a dimension of {self.data.shape[dim]} of shared memory, {kernel_line()}"
            )
        of, box = self.order[dim], [*self.box]
        box[of] = (box[of][0] + start, box[of][0] + start + length)
        data = self.data.select(dim, start) if drop else self.data.narrow(dim, start, length)
        order = self.order[:dim] + self.order[dim + 1 :] if drop else self.order
        return View(self.memory, tuple(box), data, order, self.dtype)

    def read(self, actor: str, tick: int, clock: Clock, by_threads: bool) -> None:
        self.memory.read(self.box, actor, tick, clock, by_threads)

    def write(self, actor: str, tick: int, clock: Clock, by_threads: bool) -> None:
        """Record a write in progress."""
        self.memory.write(self.box, actor, tick, clock, by_threads)
        if self.data.is_floating_point():
            self.data.fill_(torch.nan)


class SharedMemory:
    """The allocations of a program."""

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule, self._numbers = schedule, count()

    def allocate(self, dtype: Any, torch_dtype: torch.dtype, shape: Sequence[int]) -> View:
        data = torch.full([*shape], torch.nan if torch_dtype.is_floating_point else 0, dtype=torch_dtype)
        memory = Allocation(self._schedule, next(self._numbers), data)
        return View(memory, tuple((0, size) for size in shape), data, tuple(range(len(shape))), dtype)
