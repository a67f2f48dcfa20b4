"""Timelines: start and end of each task on one rank's resources, predicted or measured.

The runtime's `Recorder` records measured timelines. `draw.py` renders timelines; `trace` converts them to trace-event
JSON for Perfetto (ui.perfetto.dev) and chrome://tracing.

    timeline = Timeline(rank=0, spans=(
        Span("dispatch", "dispatch", "inter", 0.000, 0.002, chunk=0),
        Span("expert", "expert", "compute", 0.002, 0.005, chunk=0),
    ))
    timeline.exposed_s()    # 0.002: the dispatch is not overlapped with computation
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json
from fusedmoe.schedule.task import KINDS, PHASES, RESOURCES

SOURCES = ("measured", "predicted")

_FORMAT = "fusedmoe-timeline"
_VERSION = 2


class Span(NamedTuple):
    """One task from `start_s` to `end_s`, in seconds since the timeline's zero. `Timeline` validates the values.

    A named tuple, because a simulation makes a thousand in a few milliseconds.
    """

    name: str
    kind: str  # one of KINDS
    resource: str  # one of RESOURCES
    start_s: float
    end_s: float
    chunk: int | None = None  # index within a chunked stage
    layer: int | None = None
    phase: str | None = None  # "forward", "backward", or None (optimizer)
    also: tuple[str, ...] = ()  # further resources: the link of a fused operation

    @property
    def resources(self) -> tuple[str, ...]:
        return (self.resource, *self.also)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one rank, sorted by start, then longer first. Spans of a resource may overlap.

    `anchor_s`: wall-clock time (`time.time()`) of the timeline's zero, used by `align`. None: the timelines share their
    zero, like predicted ones.

    Raises `ConfigError` with rank and span for an unknown kind, resource or phase, or invalid times.
    """

    rank: int = 0
    spans: tuple[Span, ...] = ()
    source: str = "measured"  # or "predicted"
    anchor_s: float | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.rank):
            raise ConfigError(f"timeline: the rank must be an integer >= 0, not {self.rank!r}")
        if self.source not in SOURCES:
            raise ConfigError(f"timeline of rank {self.rank}: source {self.source!r} is not one of {SOURCES}")
        if self.anchor_s is not None and not _is_valid_time(self.anchor_s):
            raise ConfigError(f"timeline of rank {self.rank}: anchor_s must be finite, not {self.anchor_s!r}")
        for span in self.spans:
            fault = _invalid_field(span)
            if fault:
                raise ConfigError(f"timeline of rank {self.rank}: {fault} in {span!r}")
        ordered = sorted(self.spans, key=lambda span: (span.start_s, -span.end_s))
        object.__setattr__(self, "spans", tuple(ordered))

    @property
    def start_s(self) -> float:
        return self.spans[0].start_s if self.spans else 0.0

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def resources(self) -> tuple[str, ...]:
        found = {resource for span in self.spans for resource in span.resources}
        return tuple(resource for resource in RESOURCES if resource in found)

    def on(self, resource: str) -> tuple[Span, ...]:
        """Return the spans that occupy a resource, by start."""
        require_known("resource", resource)
        return tuple(span for span in self.spans if span.resource == resource or resource in span.also)

    def busy_s(self, resource: str) -> float:
        """Return the seconds during which the resource is in use."""
        return sum(end - start for start, end in _disjoint_intervals(self.on(resource)))

    def exposed_s(self) -> float:
        """Return the seconds of exposed communication, during which a link is in use and `compute` is idle.

        Fused operations count as computation: waits inside them are not observable.
        """
        return sum(end - start for start, end in _disjoint_intervals(self.spans)) - self.busy_s("compute")

    def totals_s(self) -> dict[str, float]:
        """Return the total seconds of each kind, in the order of `KINDS`."""
        totals: dict[str, float] = {}
        for span in self.spans:
            totals[span.kind] = totals.get(span.kind, 0.0) + span.duration_s
        return {kind: totals[kind] for kind in KINDS if kind in totals}

    def by_task(self) -> dict[tuple[object, ...], Span]:
        """Return the spans by kind, chunk, layer, phase and repetition of the task."""
        times: Counter[tuple[object, ...]] = Counter()
        spans: dict[tuple[object, ...], Span] = {}
        for span in self.spans:
            task = (span.kind, span.chunk, span.layer, span.phase)
            spans[*task, times[task]] = span
            times[task] += 1
        return spans

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` is the inverse."""
        return json.dumps(self.as_dict(), allow_nan=False, separators=(",", ":"))

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, without span fields that are None or empty."""
        spans = [{k: v for k, v in span._asdict().items() if v is not None and v != ()} for span in self.spans]
        head = {"format": _FORMAT, "version": _VERSION, "rank": self.rank, "source": self.source}
        return {**head, "anchor_s": self.anchor_s, "spans": spans}

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Parse the result of `to_json`. Raises `ConfigError` if invalid."""
        return cls.from_dict(parse_json(text, "timeline"))

    @classmethod
    def from_dict(cls, data: Any) -> Timeline:
        """Read the result of `as_dict`. Raises `ConfigError` if invalid."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ConfigError(f'timeline: the JSON is not a timeline (no "format": "{_FORMAT}")')
        if data.get("version") != _VERSION:
            raise ConfigError(
                f"timeline: unknown version {data.get('version')!r}, expected {_VERSION}; "
                "read it with the release that wrote it"
            )
        try:
            spans = tuple(Span(**{**span, "also": tuple(span.get("also", ()))}) for span in data["spans"])
            return cls(data["rank"], spans, data["source"], data["anchor_s"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"timeline: missing or unknown field: {error}") from error


def align_timelines(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return the timelines, in order, on one clock whose zero is the earliest start.

    Timelines with an anchor share its clock; timelines without anchors share their zero. Both groups start at zero, to
    compare a prediction with a measurement.

    Anchors of different machines are as accurate as their clock synchronization.
    """
    first_anchor = min((t.anchor_s for t in timelines if t.anchor_s is not None), default=0.0)
    delays = [0.0 if t.anchor_s is None else t.anchor_s - first_anchor for t in timelines]
    starts: dict[bool, list[float]] = {True: [], False: []}  # key: has an anchor
    for timeline, delay in zip(timelines, delays, strict=True):
        if timeline.spans:
            starts[timeline.anchor_s is not None].append(timeline.start_s + delay)
    origins = {anchored: min(group, default=0.0) for anchored, group in starts.items()}
    result = []
    for timeline, delay in zip(timelines, delays, strict=True):
        origin = origins[timeline.anchor_s is not None]
        anchor_s = None if timeline.anchor_s is None else first_anchor + origin
        # In two steps, so that the span that defines the origin starts at exactly 0.0.
        spans = tuple(
            span._replace(start_s=span.start_s + delay - origin, end_s=span.end_s + delay - origin)
            for span in timeline.spans
        )
        result.append(replace(timeline, spans=spans, anchor_s=anchor_s))
    return result


def split_into_lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over the smallest number of lists without overlaps."""
    result: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        lane = next((lane for lane in result if lane[-1].end_s <= span.start_s), None)
        if lane is None:
            result.append([span])
        else:
            lane.append(span)
    return result


def trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """Return the aligned timelines in the Trace Event Format (Chromium), ready for `json.dump`.

    pid is the rank; further timelines of a rank (predicted and measured) have pids after the last rank and are sorted
    next to it. tid 1, 2, 3 are compute, intra, inter; 4, 5, 6 their second lanes, and so on. Spans are sorted by time,
    in microseconds. A span on several resources has one event each.
    """
    aligned = align_timelines([timelines] if isinstance(timelines, Timeline) else timelines)
    stride = max((timeline.rank for timeline in aligned), default=0) + 1
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    seen: dict[int, int] = {}
    for timeline in aligned:
        turn = seen.get(timeline.rank, 0)
        seen[timeline.rank] = turn + 1
        pid = timeline.rank + turn * stride
        names.append(_metadata("process_name", pid, 0, name=f"rank {timeline.rank} ({timeline.source})"))
        names.append(_metadata("process_sort_index", pid, 0, sort_index=timeline.rank * len(aligned) + turn))
        for index, resource in enumerate(RESOURCES):
            # Perfetto drops overlapping complete events ("ph": "X") of a thread, so each lane is a thread.
            for lane, spans in enumerate(split_into_lanes(timeline.on(resource))):
                # From 1: the viewer reserves thread 0 for the idle task.
                tid = 1 + index + lane * len(RESOURCES)
                label = resource if lane == 0 else f"{resource} ({lane + 1})"
                names.append(_metadata("thread_name", pid, tid, name=label))
                names.append(_metadata("thread_sort_index", pid, tid, sort_index=index * 1000 + lane))
                events.extend(_trace_event(span, pid, tid) for span in spans)
    events.sort(key=lambda event: (event["ts"], event["dur"], event["pid"], event["tid"]))
    other = {"anchor_s": next((t.anchor_s for t in aligned if t.anchor_s is not None), None)}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def save_trace(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    text = json.dumps(trace(timelines), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def require_known(field: str, word: str | None) -> None:
    """Raise `ConfigError` unless `word` is a known value of `field`: "kind", "resource" or "phase"."""
    known = {"kind": KINDS, "resource": RESOURCES, "phase": (None, *PHASES)}[field]
    if word not in known:
        raise ConfigError(f"timeline: {field} {word!r} is not one of {', '.join(map(str, known))}")


def idle_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Return the seconds from `start_s` to `end_s` that no span covers."""
    inside = [s._replace(start_s=max(s.start_s, start_s), end_s=min(s.end_s, end_s)) for s in spans]
    found = _disjoint_intervals(sorted((s for s in inside if s.end_s > s.start_s), key=lambda s: s.start_s))
    return max(0.0, end_s - start_s - sum(end - start for start, end in found))


def _disjoint_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the time covered by sorted spans as disjoint intervals."""
    result: list[tuple[float, float]] = []
    for span in spans:
        if result and span.start_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], span.end_s))
        else:
            result.append((span.start_s, span.end_s))
    return result


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_valid_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _invalid_field(span: Span) -> str | None:
    # Values from files may be unhashable: test membership in tuples.
    name, kind, resource, start_s, end_s, chunk, layer, phase, also = span
    if not isinstance(name, str) or not name:
        return "an empty or non-string name"
    if kind not in KINDS:
        return f"kind {kind!r} (known: {', '.join(KINDS)})"
    if resource not in RESOURCES:
        return f"resource {resource!r} (known: {', '.join(RESOURCES)})"
    others = [each for each in RESOURCES if each != resource]
    if also != () and not (isinstance(also, tuple) and sum(map(also.count, others)) == len(also) == len(set(also))):
        return f"further resources {also!r} (known: {', '.join(RESOURCES)}, each once)"
    if phase not in (None, *PHASES):
        return f"phase {phase!r} (known: {', '.join(PHASES)}, or None)"
    if not _is_valid_time(start_s) or not _is_valid_time(end_s):
        return "a time that is not a finite number"
    if end_s < start_s:
        return "an end before its start"
    if not (chunk is None or _is_count(chunk)) or not (layer is None or _is_count(layer)):
        return "a chunk or layer that is not an integer >= 0"
    return None


def _metadata(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _trace_event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    # In nanoseconds, the viewers' resolution: rounded durations could make adjacent spans overlap.
    start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
    args = {"kind": span.kind, "chunk": span.chunk, "layer": span.layer, "phase": span.phase}
    return {
        "ph": "X",
        "name": span.name if span.chunk is None else f"{span.name} {span.chunk}",
        "cat": span.kind if span.phase is None else f"{span.kind},{span.phase}",
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {key: value for key, value in args.items() if value is not None},
    }
