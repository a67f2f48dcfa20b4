"""Recording of task times: a `Recorder` collects spans and returns a `Timeline`.

    recorder = Recorder(rank)                        # None to record nothing
    with span(recorder, "dispatch", kind="dispatch", resource="inter", chunk=0, phase="forward"):
        ...
    timelines = all_gather_object(world, recorder.timeline())

For a None recorder `span` returns a shared null context, which does not break graphs of `torch.compile`. While a
PyTorch profiler is active, each span is also a `torch.profiler.record_function` range, with or without a recorder.

On a CPU, the clock is `time.perf_counter`. With a CUDA device, a span is a pair of events on the current streams: it
measures device time without synchronizing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from fusedmoe.compat.torch import is_profiler_active
from fusedmoe.kernels.derivatives import before_backward
from fusedmoe.schedule.timeline import Span, Timeline, require_known

_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


def span(
    recorder: Recorder | None,
    name: str,
    *,
    kind: str,
    resource: str = "compute",
    chunk: int | None = None,
    layer: int | None = None,
    phase: str | None = None,
    also: tuple[str, ...] = (),
) -> AbstractContextManager[None]:
    """Return a context that records a span, in `recorder` and, if a PyTorch profiler is active, as its range.

    Nothing is recorded if the body raises. `also`: further resources that the span occupies. Raises `ConfigError` for
    an unknown kind, resource or phase.
    """
    if isinstance(recorder, _LayerRecorder):
        layer, recorder = recorder.layer, recorder.parent
    if recorder is None and not is_profiling():
        return _NULL_CONTEXT
    record = None
    if recorder is not None:
        record = recorder.timer(Span(name, kind, resource, 0.0, 0.0, chunk, layer, phase, also))
        if not is_profiling():
            return record
    numbers = [f"{what} {number}" for what, number in (("layer", layer), ("chunk", chunk)) if number is not None]
    return _Range(", ".join((f"fusedmoe: {name}", *numbers, *filter(None, (phase,)))), record)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def active_recorder() -> Recorder | None:
    """Return the recorder set by `record_with` on this thread; None without one or during compilation."""
    return None if torch.compiler.is_compiling() else _active.recorder


def part_span(kind: str) -> AbstractContextManager[None]:
    """Return a context that records the forward of a part of a layer with the active recorder."""
    # Inline `active_recorder` and an early return: every forward calls this five times.
    recorder = None if torch.compiler.is_compiling() else _active.recorder
    if recorder is None and not is_profiling():
        return _NULL_CONTEXT
    return span(recorder, kind, kind=kind, phase="forward")


def record_with(recorder: Recorder | None) -> AbstractContextManager[None]:
    """Return a context in which layers on this thread record to `recorder`; None disables recording."""
    return _NULL_CONTEXT if recorder is _active.recorder else _record_with(recorder)


@contextmanager
def _record_with(recorder: Recorder | None) -> Iterator[None]:
    outer, _active.recorder = _active.recorder, recorder
    try:
        yield
    finally:
        _active.recorder = outer


def is_profiling() -> bool:
    return not torch.compiler.is_compiling() and is_profiler_active()


def layer_recorder(recorder: Recorder | None, layer: int | None) -> Recorder | None:
    """Return a recorder that adds the layer index to spans; None if nothing records, or during compilation."""
    if torch.compiler.is_compiling() or (recorder is None and not is_profiling()):
        return None
    return _LayerRecorder(recorder, layer)


def record_operation(
    recorder: Recorder | None, operation: Callable[[Tensor], Tensor], x: Tensor, *, kind: str
) -> Tensor:
    """Return `operation(x)`, recorded as a forward and a backward span if there is a recorder."""
    if recorder is None and not is_profiling():
        return operation(x)
    if not (x.requires_grad and torch.is_grad_enabled()):  # no backward pass follows
        with span(recorder, kind, kind=kind, phase="forward"):
            return operation(x)
    # The backward pass reaches the callback on the output first, and the callback on the input last.
    back = span(recorder, kind, kind=kind, phase="backward")
    with span(recorder, kind, kind=kind, phase="forward"):
        y = operation(before_backward(x, lambda: back.__exit__(None, None, None), "a recorded part"))
        return before_backward(y, lambda: back.__enter__(), "a recorded part")


class Recorder:
    """Collects the spans of one rank since its creation. Thread-safe.

    `device`: with a CUDA device, spans use events on its current streams; otherwise the host's `clock` in seconds.
    Event times are exact to 1 µs in the first 10 s only: create a recorder for the measured steps, not for a whole run.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        device: torch.device | str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rank, self._now = rank, clock
        where = torch.device("cpu" if device is None else device)
        self._device = where if where.type == "cuda" else None
        self.clear()

    def clear(self) -> None:
        """Discard all spans, including open ones, and restart at zero. Synchronizes with the device."""
        self._records: list[tuple[Span, Any, Any]] = []  # span, start mark, end mark
        # An idle device executes the event at once.
        self._wait()
        self._zero_mark = self._mark()
        self._wait()
        self._zero_s, self._anchor_s = _wall_anchor(self._now)

    def _wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        if self._device is None:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        return mark - self._zero_s if self._device is None else float(self._zero_mark.elapsed_time(mark)) * 1e-3

    def timer(self, what: Span) -> AbstractContextManager[None]:
        """Return a context that records `what`, with the times of its body, unless its body raises."""
        require_known("kind", what.kind)
        require_known("phase", what.phase)
        for resource in what.resources:
            require_known("resource", resource)
        return _SpanTimer(self._mark, self._records, what)

    def timeline(self) -> Timeline:
        """Return everything recorded so far. Synchronizes with the device."""
        records = tuple(self._records)  # before the wait: others may record
        self._wait()
        seconds = self._seconds
        spans = tuple(what._replace(start_s=seconds(start), end_s=seconds(end)) for what, start, end in records)
        return Timeline(self.rank, spans, "measured", self._anchor_s)


class _LayerRecorder(Recorder):
    """Another recorder, or None, and the layer index that `span` adds."""

    def __init__(self, recorder: Recorder | None, layer: int | None) -> None:
        self.parent, self.layer = recorder, layer


class _Range(AbstractContextManager[None]):
    """A PyTorch profiler range with an optional recorder span inside."""

    def __init__(self, label: str, record: AbstractContextManager[None] | None) -> None:
        self._range, self._record = profiler.record_function(label), record or _NULL_CONTEXT

    def __enter__(self) -> None:
        self._range.__enter__()
        self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._record.__exit__(*error)
        self._range.__exit__(*error)


class _SpanTimer:
    """A span being recorded; may be entered several times."""

    __slots__ = ("_mark", "_records", "_span_name", "_start")

    def __init__(self, mark: Callable[[], Any], records: list[tuple[Span, Any, Any]], what: Span) -> None:
        # A recorder cleared meanwhile has a new list and discards this span.
        self._mark, self._records, self._span_name = mark, records, what

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._records.append((self._span_name, self._start, self._mark()))


def _wall_anchor(now: Callable[[], float]) -> tuple[float, float]:
    """Return the same instant on both clocks: (`now()`, `time.time()`)."""
    readings = [(now(), time.time(), now()) for _ in range(8)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) / 2, wall


class DeviceTime:
    """A point in time of the device's execution."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_s = 0.0

    def record(self, device: torch.device) -> None:
        """Record the current time; with CUDA, when the current stream reaches this point."""
        self._host_s = time.perf_counter()
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, other: DeviceTime) -> float:
        """Return the seconds since `other`. With CUDA, waits until the device has reached both."""
        if self._event is None or other._event is None:
            return self._host_s - other._host_s
        other._event.synchronize()
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1000
