from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest

from fusedmoe.schedule.timeline import RESOURCES, Span, Timeline, save_trace, trace
from tests.schedule.timelines import training_step


def check_format(data: dict) -> tuple[list[dict], list[dict]]:
    """The rules of the trace-event format that viewers rely on; gives (metadata, complete events)."""
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"} and data["displayTimeUnit"] == "ms"
    names = [event for event in data["traceEvents"] if event["ph"] == "M"]
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert data["traceEvents"] == names + events
    for event in data["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        assert isinstance(event["args"], dict)
    assert {e["name"] for e in names} <= {
        "process_name",
        "process_sort_index",
        "thread_name",
        "thread_sort_index",
    }
    threads = defaultdict(list)
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0 and type(event["cat"]) is str
        threads[event["pid"], event["tid"]].append(event)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    named = {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}
    assert named == set(threads)
    assert {e["pid"] for e in names if e["name"] == "process_name"} >= {pid for pid, _ in threads}
    for thread in threads.values():
        for event, following in zip(thread, thread[1:], strict=False):
            # In whole nanoseconds, as a viewer reads them.
            assert round(event["ts"] * 1e3) + round(event["dur"] * 1e3) <= round(following["ts"] * 1e3)
    return names, events


def test_pid_is_the_rank_and_tid_the_resource():
    rng = random.Random()
    timelines = [training_step(rng, rank, anchor_s=1.7e9 + rng.uniform(0, 0.1)) for rank in range(4)]
    names, events = check_format(trace(timelines))
    labels = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert labels == {(rank, 1 + i): resource for rank in range(4) for i, resource in enumerate(RESOURCES)}
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes == {rank: f"rank {rank} (measured)" for rank in range(4)}
    first_s = min(t.start_s + (t.anchor_s - 1.7e9) for t in timelines)
    for timeline in timelines:
        for resource in RESOURCES:
            spans = timeline.on(resource)
            found = [e for e in events if (e["pid"], labels[e["pid"], e["tid"]]) == (timeline.rank, resource)]
            assert len(found) == len(spans)
            for span, event in zip(spans, found, strict=True):
                start_us = (span.start_s + (timeline.anchor_s - 1.7e9) - first_s) * 1e6
                assert event["ts"] == pytest.approx(start_us, abs=1.0)
                assert event["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6, abs=0.0011)
                assert event["args"]["kind"] == span.kind == event["cat"].split(",")[0]
                assert event["args"].get("chunk") == span.chunk and event["args"].get("phase") == span.phase


def test_the_file_is_json_that_holds_the_trace(tmp_path):
    timeline = training_step(random.Random(), rank=3)
    save_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace([timeline])


def test_spans_that_overlap_go_to_threads_of_their_own():
    rng = random.Random()
    spans = []
    for i in range(100):
        start_s = rng.random()
        spans.append(Span(f"d{i}", "dispatch", "inter", start_s, start_s + rng.random() / 10))
    names, events = check_format(trace(Timeline(1, tuple(spans))))
    assert sorted(e["name"] for e in events) == sorted(span.name for span in spans)
    labels = {e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert {"inter", "inter (2)"} <= labels


def test_predicted_stands_next_to_measured():
    rng = random.Random()
    timelines = [
        training_step(rng, rank, source=source, anchor_s=1.7e9 if source == "measured" else None)
        for source in ("measured", "predicted")
        for rank in (0, 1)
    ]
    names, events = check_format(trace(timelines))
    order = {e["args"]["sort_index"]: e["pid"] for e in names if e["name"] == "process_sort_index"}
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert [processes[order[i]] for i in sorted(order)] == [
        "rank 0 (measured)",
        "rank 0 (predicted)",
        "rank 1 (measured)",
        "rank 1 (predicted)",
    ]
    assert len(events) == sum(len(timeline.spans) for timeline in timelines)


def test_spans_that_touch_stay_apart_after_rounding():
    rng = random.Random()
    end_s, spans = 0.0, []
    for i in range(2000):
        start_s, end_s = end_s, end_s + rng.random() * 1e-8
        spans.append(Span(f"g{i}", "gate", "compute", start_s, end_s))
    names, _ = check_format(trace(Timeline(0, tuple(spans))))
    assert {e["args"]["name"] for e in names if e["name"] == "thread_name"} == {"compute"}


def test_no_timeline_and_no_span_are_fine():
    assert trace([])["traceEvents"] == []
    names, events = check_format(trace(Timeline()))
    assert len(names) == 2 and not events
