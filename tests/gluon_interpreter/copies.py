"""Asynchronous copies into and out of shared memory: cp.async of threads, and bulk copies of the copy engine.

A cp.async lands at any time until the wait for its group, or before it arrives at a barrier. A bulk copy into shared
memory lands at any time until its barrier's phase completes, which waits for it. A bulk copy out of shared memory lands
until the thread that started it waits; the other threads learn of it at their next synchronization with that thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon_interpreter.barriers import Barrier
from tests.gluon_interpreter.clocks import Clock, join
from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.schedule import EventOrder, InOrder, Late
from tests.gluon_interpreter.shared import View, kernel_line
from tests.gluon_interpreter.values import Pointer, language_dtype


def cp_async(strand: str) -> str:
    """The actor name of a partition's copies."""
    return f"cp.async of {strand}"


def bulk_stores(strand: str) -> str:
    """The actor name of a partition's bulk copies out of shared memory."""
    return f"bulk stores of {strand}"


class ThreadCopies:
    """cp.async: groups complete in order, copies within a group in any order.

    A partition either waits for groups, or its copies arrive at barriers; the copies up to each arrival are a group.
    """

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule = schedule
        self._open: defaultdict[str, list[Late]] = defaultdict(list)
        self._groups: defaultdict[str, list[list[Late]]] = defaultdict(list)
        self._arriving: set[str] = set()

    def start(self, view: View, pointer: Pointer, mask: Any) -> None:
        if view.shape != pointer.shape:
            raise KernelFault(f"a copy from {pointer.shape} to {view.shape}")
        strand = self._schedule.running
        actor = cp_async(strand.name)
        view.write(actor, len(self._groups[strand.name]) + 1, strand.clock, by_threads=True)
        data = pointer.load(mask, 0).data  # zeros where masked

        def land() -> None:
            view.data.copy_(data)

        late = Late(f"{actor} in {kernel_line()}", land)
        self._schedule.late.append(late)
        self._open[strand.name].append(late)

    def commit(self) -> None:
        name = self._schedule.running.name
        self._refuse_both(name in self._arriving)
        self._groups[name].append(self._open.pop(name, []))

    def arrive(self, barrier: Barrier, threads: int) -> None:
        """Arrive at the barrier, once per thread, when all copies started so far are complete."""
        name = self._schedule.running.name
        self._refuse_both(bool(self._groups[name]) and name not in self._arriving)
        self._arriving.add(name)
        self._groups[name].append(self._open.pop(name, []))
        actor, tick = cp_async(name), len(self._groups[name])
        copies = [copy for group in self._groups[name] for copy in group]

        def land() -> None:
            barrier.arrive(Clock({actor: tick}), threads)

        def may_land() -> bool:
            return not any(copy in self._schedule.late for copy in copies)

        what = f"the arrival of {actor} at {barrier.name} in {kernel_line()}"
        self._schedule.late.append(Late(what, land, may_land))

    @staticmethod
    def _refuse_both(both: bool) -> None:
        if both:
            raise NotInterpreted("groups of copies and copies that arrive in one partition")

    def wait(self, outstanding: int) -> None:
        strand = self._schedule.running
        self._refuse_both(strand.name in self._arriving)
        ended = len(self._groups[strand.name]) - outstanding
        for group in self._groups[strand.name][: max(ended, 0)]:
            while group:
                self._schedule.land(group.pop())
        if ended > 0:
            join(strand.clock.seen, {cp_async(strand.name): ended})


class Descriptor:
    """A tensor descriptor for bulk copies of boxes; elements outside the tensor are zero."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.base = host.base.as_strided([*host.shape], [*host.strides])
        self.block_shape, self.layout = [*host.block_shape], host.layout
        self.dtype = language_dtype(host.base.dtype)

    def box(self, at: Sequence[Any]) -> Tensor:
        out = torch.zeros(self.block_shape, dtype=self.base.dtype)
        inside, place = self._inside(at)
        out[place] = self.base[inside]
        return out

    def store(self, at: Sequence[Any], box: Tensor) -> None:
        inside, place = self._inside(at)
        self.base[inside] = box[place]

    def _inside(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box inside the tensor, as slices of the tensor and of the box."""
        starts = [int(start) for start in at]
        low = [max(start, 0) for start in starts]
        ends = [start + box for start, box in zip(starts, self.block_shape, strict=True)]
        high = [max(min(end, size), start) for end, size, start in zip(ends, self.base.shape, low, strict=True)]
        inside = tuple(slice(*of) for of in zip(low, high, strict=True))
        return inside, tuple(slice(a - start, b - start) for a, b, start in zip(low, high, starts, strict=True))


class BulkStores:
    """Bulk copies out of shared memory, each in a separate group: they complete in order."""

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule = schedule
        self._stores = InOrder(schedule)
        self._ended: defaultdict[str, int] = defaultdict(int)

    def start(self, descriptor: Descriptor, at: Sequence[Any], view: View) -> None:
        if view.shape != descriptor.block_shape or view.dtype != descriptor.dtype:
            raise KernelFault(f"a bulk copy of {view.shape} to {descriptor.block_shape}")
        strand = self._schedule.running
        actor = bulk_stores(strand.name)
        view.read(actor, self._stores.next_number(), strand.clock, by_threads=False)
        self._stores.start(f"{actor} in {kernel_line()}", lambda: descriptor.store(at, view.data))

    def wait(self, outstanding: int) -> None:
        strand = self._schedule.running
        if ended := self._stores.wait(outstanding):
            self._ended[strand.name] = ended
            join(strand.clock.known_to_one, {bulk_stores(strand.name): ended})

    def end(self) -> None:
        """Check at program end, which frees the source memory, that all stores were waited for."""
        for name, started in self._stores.started.items():
            if self._ended[name] < started:
                raise KernelFault(f"ends without waiting for {bulk_stores(name)}")


def bulk_copy(schedule: EventOrder, descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, view: View) -> None:
    """Start a bulk copy into shared memory."""
    if view.shape != descriptor.block_shape or view.dtype != descriptor.dtype:
        raise KernelFault(f"a bulk copy of {descriptor.block_shape} to {view.shape}")
    barrier.awaits_bulk()
    actor, tick = f"bulk copies for {barrier.name}", barrier.phase + 1
    view.write(actor, tick, schedule.running.clock, by_threads=False)
    data = descriptor.box(at)

    def land() -> None:
        view.data.copy_(data)
        barrier.bytes_came(Clock({actor: tick}), data.numel() * data.element_size())

    schedule.late.append(Late(f"a bulk copy for {barrier.name} in {kernel_line()}", land))
