"""Asynchronous copies into shared memory: cp.async of threads, and bulk copies of the copy engine.

A cp.async lands any time until the wait for its group. A bulk copy lands any time until its barrier's phase is over,
which waits for it.
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
from tests.gluon_interpreter.faults import KernelFault
from tests.gluon_interpreter.schedule import EventOrder, Late
from tests.gluon_interpreter.shared import View, kernel_line
from tests.gluon_interpreter.values import Pointer, language_dtype


def cp_async(strand: str) -> str:
    """The actor that makes a partition's copies."""
    return f"cp.async of {strand}"


class ThreadCopies:
    """cp.async: groups end in order, copies of one group in any."""

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule = schedule
        self._open: defaultdict[str, list[Late]] = defaultdict(list)
        self._groups: defaultdict[str, list[list[Late]]] = defaultdict(list)

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
        self._groups[name].append(self._open.pop(name, []))

    def wait(self, outstanding: int) -> None:
        strand = self._schedule.running
        ended = len(self._groups[strand.name]) - outstanding
        for group in self._groups[strand.name][: max(ended, 0)]:
            while group:
                self._schedule.land(group.pop())
        if ended > 0:
            join(strand.clock.seen, {cp_async(strand.name): ended})


class Descriptor:
    """Of a tensor, for bulk copies of boxes of it; elements outside of it are zero."""

    def __init__(self, host: TensorDescriptor) -> None:
        self.base = host.base.as_strided([*host.shape], [*host.strides])
        self.block_shape, self.layout = [*host.block_shape], host.layout
        self.dtype = language_dtype(host.base.dtype)

    def box(self, at: Sequence[Any]) -> Tensor:
        out = torch.zeros(self.block_shape, dtype=self.base.dtype)
        low = [max(int(start), 0) for start in at]
        high = [
            min(int(start) + box, size) for start, box, size in zip(at, self.block_shape, self.base.shape, strict=True)
        ]
        if all(start < end for start, end in zip(low, high, strict=True)):
            source = tuple(slice(start, end) for start, end in zip(low, high, strict=True))
            place = tuple(slice(s - int(a), e - int(a)) for s, e, a in zip(low, high, at, strict=True))
            out[place] = self.base[source]
        return out


def bulk_copy(schedule: EventOrder, descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, view: View) -> None:
    """Starts one."""
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
