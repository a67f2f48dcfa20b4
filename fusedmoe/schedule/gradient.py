"""The stream of gradients and the pieces that all-reduces cut off it (see `task.Task`)."""

from __future__ import annotations

from collections.abc import Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.text import name

#: Pieces start and end at multiples of this many bytes, or at the end of a layer's gradient.
ALIGNMENT = 256


class Stream:
    """Cuts pieces off the gradients of a stack of layers, last layer first.

    `gradient_bytes[l]`: of layer l.
    """

    def __init__(self, gradient_bytes: Sequence[int]) -> None:
        self.start = 0
        # ends[l]: where layer l's gradient ends in the stream.
        self.ends = [0] * len(gradient_bytes)
        total = 0
        for layer in reversed(range(len(gradient_bytes))):
            total += gradient_bytes[layer]
            self.ends[layer] = total
        self._cut: dict[int, int] = {}

    def available(self, layer: int) -> int:
        """Bytes that are ready, and not yet cut off, once the backward pass of `layer` has ended."""
        end = self.ends[layer] if layer < len(self.ends) else 0
        return max(0, end - self.start)

    def cut(self, size: float, layer: int) -> Task | None:
        """The next piece of about `size` bytes, from what is ready after `layer`; None where that is nothing."""
        ready = self.available(layer)
        size = ready if size >= ready - ALIGNMENT else int(size) // ALIGNMENT * ALIGNMENT
        if size <= 0:
            return None
        self.start += size
        last = max(at for at, end in enumerate(self.ends) if end >= self.start)
        number = self._cut.get(last, 0)
        self._cut[last] = number + 1
        return Task("gradient-all-reduce", number, last, "backward", size)


def gradient_ranges(plan: Plan, gradient_bytes: Sequence[int]) -> dict[Task, range]:
    """The bytes of the stream that each gradient-all-reduce of the plan of a whole step carries.

    Raises `ConfigError` for a piece of a layer that has ended before, or that reaches into the next.
    """
    ends = Stream(gradient_bytes).ends
    start = 0
    result = {}
    for task in plan.inter:
        if task.kind != "gradient-all-reduce":
            continue
        if task.layer is None or task.layer >= len(ends):
            raise ConfigError(f"plan: {name(task)} is of a layer that is not there; the stack has {len(ends)}")
        end = ends[task.layer]
        stop = end if task.size is None else start + task.size
        if not start < stop <= end:
            raise ConfigError(
                f"plan: {name(task)} carries bytes {start} to {stop}, but layer {task.layer}'s gradient ends at {end}; "
                "change its size, or its layer"
            )
        result[task] = range(start, stop)
        start = stop
    return result
