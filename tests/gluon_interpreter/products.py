"""Products of a group of warps (wgmma): they read shared memory any time until the wait for them, and end in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.gluon_interpreter.clocks import join
from tests.gluon_interpreter.faults import KernelFault, NotInterpreted
from tests.gluon_interpreter.schedule import EventOrder, Late
from tests.gluon_interpreter.shared import View, kernel_line
from tests.gluon_interpreter.values import Pending, Value


class TensorCores:
    """The products of all partitions."""

    def __init__(self, schedule: EventOrder) -> None:
        self._schedule = schedule
        self._started: defaultdict[str, int] = defaultdict(int)
        self._queues: defaultdict[str, deque[Late]] = defaultdict(deque)

    def start(self, a: Any, b: Any, accumulator: Any) -> Pending:
        if not isinstance(a, View) or not isinstance(b, View):
            raise NotInterpreted("a product of what is not in shared memory")
        strand = self._schedule.running
        (rows, depth), (depth_of_b, columns) = a.shape, b.shape
        if depth != depth_of_b or _held(accumulator).shape != (rows, columns) or a.dtype != b.dtype:
            raise KernelFault(f"a product of {a.shape} and {b.shape}")
        self._started[strand.name] = number = self._started[strand.name] + 1
        actor = f"wgmma of {strand.name}"
        for operand in (a, b):
            operand.read(actor, number, strand.clock, by_threads=False)
        result = Pending(number, kernel_line())
        result.value = before = _held(accumulator).clone()
        queue = self._queues[strand.name]

        def land() -> None:
            queue.popleft()
            # What it adds to may itself have been under way when it started.
            start = _held(accumulator) if isinstance(accumulator, Pending) else before
            result.value = start + a.data.float() @ b.data.float()

        late = Late(f"{actor} in {result.line}", land, lambda: queue[0] is late)
        queue.append(late)
        self._schedule.late.append(late)
        return result

    def wait(self, outstanding: int, results: Sequence[Any]) -> Any:
        strand = self._schedule.running
        queue = self._queues[strand.name]
        while len(queue) > outstanding:
            self._schedule.land(queue[0])
        ended = self._started[strand.name] - outstanding
        if ended > 0:
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
