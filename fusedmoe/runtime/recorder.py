"""Measuring what runs: a `Recorder` collects spans and gives them as a `Timeline`.

    recorder = Recorder(rank)                        # for the steps to be measured; None otherwise
    with span(recorder, "dispatch", kind="dispatch", resource="inter", chunk=0, phase="forward"):
        ...
    timelines = all_gather_object(world, recorder.timeline())

Whoever is measured holds a `Recorder | None` and calls the function `span`: with None it hands out one shared context
that does nothing, which also passes through `torch.compile` without a graph break. While a profiler of PyTorch's is on,
each span is a range of its, too (`torch.profiler.record_function`), recorder or not.

On a CPU the clock is `time.perf_counter`. With a CUDA device, a span is a pair of events on the stream that is current
where it opens and where it closes, so it shows when the device worked, and recording never waits for it; only
`timeline()` does.
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

from fusedmoe.compat.torch import profiler_is_on
from fusedmoe.kernels.derivatives import Function
from fusedmoe.schedule.timeline import Span, Timeline, check_word

_NOTHING: AbstractContextManager[None] = nullcontext()


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
    """Returns `recorder.span(...)`, or a shared context that does nothing when there is no recorder; and a range of
    PyTorch's profiler, where one is on."""
    # A layer's recorder adds the layer's number, and hands on to the one behind it.
    if isinstance(recorder, _LayerRecorder):
        layer, recorder = recorder.number, recorder.to
    if recorder is None and not profiling():
        return _NOTHING
    record = None
    if recorder is not None:
        record = recorder.span(name, kind=kind, resource=resource, chunk=chunk, layer=layer, phase=phase, also=also)
        if not profiling():
            return record
    numbers = [f"{what} {number}" for what, number in (("layer", layer), ("chunk", chunk)) if number is not None]
    return _Range(", ".join((f"fusedmoe: {name}", *numbers, *filter(None, (phase,)))), record)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def active_recorder() -> Recorder | None:
    """Return the recorder that `record_with` set on this thread; None without one, and in a graph."""
    return None if torch.compiler.is_compiling() else _active.recorder


def record_with(recorder: Recorder | None) -> AbstractContextManager[None]:
    """Return a context in which the parts of a layer report to this recorder, on this thread; None: to none."""
    # Without a recorder, inside and outside, a token's path has nothing to set.
    return _NOTHING if recorder is _active.recorder else _record_with(recorder)


@contextmanager
def _record_with(recorder: Recorder | None) -> Iterator[None]:
    outer, _active.recorder = _active.recorder, recorder
    try:
        yield
    finally:
        _active.recorder = outer


def profiling() -> bool:
    """Returns True if a profiler of PyTorch's is on."""
    return not torch.compiler.is_compiling() and profiler_is_on()


def in_layer(recorder: Recorder | None, number: int | None) -> Recorder | None:
    """Returns the recorder that the parts of a layer report to, so that their spans carry its number; None where nobody
    listens."""
    # A graph runs later than it is made: no clock of ours is in it.
    if torch.compiler.is_compiling() or (recorder is None and not profiling()):
        return None
    return _LayerRecorder(recorder, number)


def recorded(recorder: Recorder | None, operation: Callable[[Tensor], Tensor], x: Tensor, *, kind: str) -> Tensor:
    """Returns `operation(x)`, as a span of the forward and one of the backward pass when there is a recorder."""
    if recorder is None and not profiling():
        return operation(x)
    if not (x.requires_grad and torch.is_grad_enabled()):  # no gradient will come by to close a span of the backward
        with span(recorder, kind, kind=kind, phase="forward"):
            return operation(x)
    # Autograd runs the backward of a region on its own: going backward, the mark where the result leaves opens the
    # span, and the one where the input enters closes it.
    back = span(recorder, kind, kind=kind, phase="backward")
    with span(recorder, kind, kind=kind, phase="forward"):
        y = operation(_Mark.apply(x, lambda: back.__exit__(None, None, None)))
        return _Mark.apply(y, lambda: back.__enter__())


class _Mark(Function):
    """The identity; calls `action` when the gradient passes."""

    operation, twice = "a recorded part", True

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return gradients[0], None


class Recorder:
    """Collects the spans of one rank from its creation on. Spans may be opened on several threads.

    `device`: a CUDA device makes it measure with events on the current streams of that device; anything else, and
    None, with the host's `clock`, in seconds. Events count from creation (or `clear`) in float32 milliseconds: exact to
    a microsecond in the first ten seconds, so make a recorder for the steps to be measured, not for a whole run.
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
        """Forgets all spans, open ones too, and starts again at zero. Waits for the device, if any."""
        self._records: list[tuple[Span, Any, Any]] = []  # with the marks of its start and its end
        self._added: list[Span] = []
        # An idle device passes the event at once, so host and device zero are a few microseconds apart.
        self._wait()
        self._zero = self._mark()
        self._wait()
        self._zero_s, self._anchor_s = _wall_anchor(self._now)

    def _wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        """Returns this moment: the clock's, or an event on the device's current stream."""
        if self._device is None:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        """Returns the seconds from zero to a mark that the device has passed."""
        return mark - self._zero_s if self._device is None else float(self._zero.elapsed_time(mark)) * 1e-3

    def span(
        self,
        name: str,
        *,
        kind: str,
        resource: str = "compute",
        chunk: int | None = None,
        layer: int | None = None,
        phase: str | None = None,
        also: tuple[str, ...] = (),
    ) -> AbstractContextManager[None]:
        """Returns a context whose body is one span. A body that raises leaves none behind. `also`: see `Span`.

        Raises `ConfigError` for a kind, resource or phase that `fusedmoe.schedule.timeline` does not list.
        """
        check_word("kind", kind)
        check_word("phase", phase)
        for each in (resource, *also):
            check_word("resource", each)
        return _Record(self._mark, self._records, Span(name, kind, resource, 0.0, 0.0, chunk, layer, phase, also))

    def now(self) -> float:
        """Returns the seconds since zero on the host's clock, for `add`."""
        return self._now() - self._zero_s

    def add(self, span: Span) -> None:
        """Adds a span whose times are known: work that began on one thread and was seen to end on another."""
        self._added.append(span)

    def timeline(self) -> Timeline:
        """Returns all that was recorded so far. Waits for the device, if any; recording may go on afterwards."""
        records, added = tuple(self._records), tuple(self._added)  # before the wait: others may go on recording
        self._wait()
        seconds = self._seconds
        measured = [what._replace(start_s=seconds(start), end_s=seconds(end)) for what, start, end in records]
        return Timeline(self.rank, (*measured, *added), "measured", self._anchor_s)


class _LayerRecorder(Recorder):
    """Gives spans the number of their layer; they go to another recorder, if there is one, and to the profiler."""

    def __init__(self, recorder: Recorder | None, number: int | None) -> None:
        self.to, self.number = recorder, number

    def span(self, name: str, **what: Any) -> AbstractContextManager[None]:
        return span(self, name, **what)


class _Range(AbstractContextManager[None]):
    """A range of PyTorch's profiler, and a span of a recorder's inside it, if there is one."""

    def __init__(self, label: str, record: AbstractContextManager[None] | None) -> None:
        self._range, self._record = profiler.record_function(label), record or _NOTHING

    def __enter__(self) -> None:
        self._range.__enter__()
        self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._record.__exit__(*error)
        self._range.__exit__(*error)


class _Record:
    """A span that is being recorded, once for each time that it is entered."""

    __slots__ = ("_mark", "_records", "_what", "_start")

    def __init__(self, mark: Callable[[], Any], records: list[tuple[Span, Any, Any]], what: Span) -> None:
        # The list of now: a recorder that is cleared meanwhile has another one, and forgets this span.
        self._mark, self._records, self._what = mark, records, what

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._records.append((self._what, self._start, self._mark()))


def _wall_anchor(now: Callable[[], float]) -> tuple[float, float]:
    """Returns one instant on both clocks: (`now()`, `time.time()`)."""
    readings = [(now(), time.time(), now()) for _ in range(8)]
    # The reading with the least time between both clocks is the most exact.
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) / 2, wall


class Moment:
    """A moment in what the device does."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock_s = 0.0

    def note(self, device: torch.device) -> None:
        """Takes the time: now, or on CUDA when the current stream gets there."""
        self._clock_s = time.perf_counter()
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event(enable_timing=True)
            self._event.record()

    def after(self, other: Moment) -> float:
        """Returns the seconds from another moment. On CUDA this waits for both."""
        if self._event is None or other._event is None:
            return self._clock_s - other._clock_s
        other._event.synchronize()
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1000
