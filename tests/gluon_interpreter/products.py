"""Warp-group products (wgmma): they read shared memory at any time until the wait for them, and complete in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.gluon_interpreter.clocks import join
from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.schedule import EventOrder, InOrder
from tests.gluon_interpreter.shared import View, kernel_line
from tests.gluon_interpreter.values import Pending, Value


class TensorCores:
    """The products of all partitions."""

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule = schedule
        self._products = InOrder(schedule)

    def start(self, a: Any, b: Any, accumulator: Any) -> Pending:
        if not isinstance(a, View) or not isinstance(b, View):
            raise NotInterpreted("a product of what is not in shared memory")
        strand = self._schedule.running
        (rows, depth), (depth_of_b, columns) = a.shape, b.shape
        if depth != depth_of_b or _held(accumulator).shape != (rows, columns) or a.dtype != b.dtype:
            raise KernelFault(f"a product of {a.shape} and {b.shape}")
        number = self._products.next_number()
        actor = f"wgmma of {strand.name}"
        for operand in (a, b):
            operand.read(actor, number, strand.clock, by_threads=False)
        result = Pending(number, kernel_line())
        result.value = before = _held(accumulator).clone()

        def land() -> None:
            # The accumulator may itself have been in flight at the start.
            start = _held(accumulator) if isinstance(accumulator, Pending) else before
            result.value = start + a.data.float() @ b.data.float()

        self._products.start(f"{actor} in {result.line}", land)
        return result

    def wait(self, outstanding: int, results: Sequence[Any]) -> Any:
        strand = self._schedule.running
        if ended := self._products.wait(outstanding):
            join(strand.clock.seen, {f"wgmma of {strand.name}": ended})
        ready = tuple(
            Value(result.value) if isinstance(result, Pending) and result.number <= ended else result
            for result in results
        )
        return ready[0] if len(ready) == 1 else ready


def _held(accumulator: Any) -> Tensor:
    if isinstance(accumulator, Pending):
        return accumulator.value
    if isinstance(accumulator, Value):
        return accumulator.data
    raise NotInterpreted(f"{type(accumulator).__name__} as an accumulator")
