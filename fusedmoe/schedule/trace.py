"""Timelines as trace-event JSON, the format that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process is one rank, one thread one resource; times in microseconds. A span that occupies several resources is an
event on the thread of each. Format: "Trace Event Format", the Chromium project. Complete events ("ph": "X") of one
thread must not overlap, or Perfetto loses some of them: spans that do overlap go to further threads of the same
resource.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedmoe.schedule.timeline import RESOURCES, Span, Timeline, align, lanes


def trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The trace of the timelines, aligned (`timeline.align`), as an object ready for `json.dump`.

    pid is the rank; when a rank comes with several timelines (predicted beside measured), the further ones
    get pids past the last rank and stand next to it. tid 1, 2, 3 are compute, intra, inter; 4, 5, 6 their
    second lanes, and so on. Names come first, then the spans in order of time.
    """
    aligned = align([timelines] if isinstance(timelines, Timeline) else timelines)
    stride = max((timeline.rank for timeline in aligned), default=0) + 1
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    seen: dict[int, int] = {}
    for timeline in aligned:
        turn = seen.get(timeline.rank, 0)
        seen[timeline.rank] = turn + 1
        pid = timeline.rank + turn * stride
        names.append(_name("process_name", pid, 0, name=f"rank {timeline.rank} ({timeline.source})"))
        names.append(_name("process_sort_index", pid, 0, sort_index=timeline.rank * len(aligned) + turn))
        for index, resource in enumerate(RESOURCES):
            for lane, spans in enumerate(lanes(timeline.on(resource))):
                # From 1: the viewer keeps thread 0 for the idle task.
                tid = 1 + index + lane * len(RESOURCES)
                label = resource if lane == 0 else f"{resource} ({lane + 1})"
                names.append(_name("thread_name", pid, tid, name=label))
                names.append(_name("thread_sort_index", pid, tid, sort_index=index * 1000 + lane))
                events.extend(_complete(span, pid, tid) for span in spans)
    events.sort(key=lambda event: (event["ts"], event["dur"], event["pid"], event["tid"]))
    other = {"anchor_s": next((t.anchor_s for t in aligned if t.anchor_s is not None), None)}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def save_trace(timelines: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Write the trace of the timelines to `path` (JSON)."""
    text = json.dumps(trace(timelines), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def _name(what: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    # Both ends are rounded to whole nanoseconds, the viewers' resolution: rounding the duration instead
    # could make two spans that touch overlap.
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
