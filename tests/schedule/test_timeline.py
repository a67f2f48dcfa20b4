"""Timelines: spans, lanes, busy and exposed times against a grid, JSON, and alignment of ranks."""

from __future__ import annotations

import json
import pickle
import random
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.task import KINDS, RESOURCES, SYMBOLS
from fusedmoe.schedule.timeline import Span, Timeline, align_timelines, save_trace, split_into_lanes, trace
from tests.schedule.timelines import training_step

GOOD = Span("expert", "expert", "compute", 1.0, 2.0, chunk=0, layer=1, phase="forward")


def random_spans(rng: random.Random, count: int) -> tuple[Span, ...]:
    """Spans that overlap in any way, on a grid of milliseconds, which makes many ends and starts coincide."""
    spans = []
    for i in range(count):
        start = rng.randrange(200)
        end = start + rng.randrange(30)
        spans.append(Span(f"s{i}", rng.choice(KINDS), rng.choice(RESOURCES), start / 1e3, end / 1e3))
    return tuple(spans)


def grid(spans: tuple[Span, ...], resource: str) -> np.ndarray:
    """Millisecond cells in which the resource is in use: the naive reference."""
    cells = np.zeros(300, dtype=bool)
    for span in spans:
        if span.resource == resource:
            cells[round(span.start_s * 1e3) : round(span.end_s * 1e3)] = True
    return cells


def test_spans_are_sorted_by_start_then_length():
    timeline = training_step(random.Random())
    keys = [(span.start_s, -span.end_s) for span in timeline.spans]
    assert keys == sorted(keys)
    assert timeline.start_s == min(span.start_s for span in timeline.spans)
    assert timeline.end_s == max(span.end_s for span in timeline.spans)
    assert timeline.duration_s == timeline.end_s - timeline.start_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name"),
        ({"kind": "experts"}, "kind 'experts'"),
        ({"kind": ["expert"]}, "kind"),
        ({"resource": "network"}, "resource 'network'"),
        ({"phase": "sideways"}, "phase 'sideways'"),
        ({"start_s": float("nan")}, "finite"),
        ({"end_s": float("inf")}, "finite"),
        ({"start_s": "0"}, "finite"),
        ({"end_s": 0.5}, "end before its start"),
        ({"chunk": -1}, "chunk or layer"),
        ({"layer": 1.0}, "chunk or layer"),
        ({"chunk": True}, "chunk or layer"),
    ],
)
def test_invalid_span_error_names_rank_and_span(change, message):
    bad = GOOD._replace(**change)
    with pytest.raises(ConfigError, match=message) as caught:
        Timeline(3, (GOOD, bad))
    assert "rank 3" in str(caught.value) and repr(bad) in str(caught.value)


@pytest.mark.parametrize("fields", [{"rank": -1}, {"rank": "0"}, {"source": "guessed"}, {"anchor_s": float("nan")}])
def test_invalid_timeline_fields_are_rejected(fields):
    with pytest.raises(ConfigError, match="timeline"):
        Timeline(**fields)


def test_empty_timeline():
    timeline = Timeline()
    assert (timeline.start_s, timeline.end_s, timeline.exposed_s()) == (0.0, 0.0, 0.0)
    assert timeline.resources == () and timeline.totals_s() == {}
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize("anchor_s", [None, 1.7e9 + 1 / 3])
def test_json_and_pickle_round_trip(anchor_s):
    timeline = training_step(random.Random(), rank=2, anchor_s=anchor_s)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert pickle.loads(pickle.dumps(timeline)) == timeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a timeline"),
        ("{}", "not a timeline"),
        ('{"format":"fusedmoe-timeline","version":1}', "version 1"),
        ('{"format":"fusedmoe-timeline","version":2,"rank":0}', "missing"),
    ],
)
def test_from_json_rejects_other_formats(text, message):
    with pytest.raises(ConfigError, match=message):
        Timeline.from_json(text)


def test_from_dict_rejects_corrupt_spans():
    data = json.loads(training_step(random.Random()).to_json())
    for spoil in (lambda s: s.pop("kind"), lambda s: s.update(color="red"), lambda s: s.update(end_s="1")):
        copy = json.loads(json.dumps(data))
        spoil(copy["spans"][5])
        with pytest.raises(ConfigError):
            Timeline.from_dict(copy)


def test_busy_and_exposed_times_equal_grid():
    rng = random.Random()
    for _ in range(50):
        timeline = Timeline(0, random_spans(rng, rng.randrange(60)))
        cells = {resource: grid(timeline.spans, resource) for resource in RESOURCES}
        for resource in RESOURCES:
            assert timeline.busy_s(resource) == pytest.approx(cells[resource].sum() / 1e3, abs=1e-9)
        exposed = (cells["intra"] | cells["inter"]) & ~cells["compute"]
        assert timeline.exposed_s() == pytest.approx(exposed.sum() / 1e3, abs=1e-9)


def test_totals_are_sums_per_kind():
    timeline = training_step(random.Random())
    totals = timeline.totals_s()
    assert list(totals) == [kind for kind in KINDS if any(span.kind == kind for span in timeline.spans)]
    for kind, total in totals.items():
        assert total == pytest.approx(sum(s.end_s - s.start_s for s in timeline.spans if s.kind == kind))


def test_lanes_are_minimal_and_disjoint():
    rng = random.Random()
    for _ in range(50):
        spans = [s for s in random_spans(rng, 60) if s.end_s > s.start_s]
        found = split_into_lanes(spans)
        assert sorted(span for lane in found for span in lane) == sorted(spans)
        for lane in found:
            assert all(a.end_s <= b.start_s for a, b in zip(lane, lane[1:], strict=False))
        cells = np.zeros(300, dtype=int)
        for span in spans:
            cells[round(span.start_s * 1e3) : round(span.end_s * 1e3)] += 1
        assert len(found) == cells.max()


def test_sequential_resource_has_one_lane():
    timeline = training_step(random.Random())
    assert [len(split_into_lanes(timeline.on(resource))) for resource in RESOURCES] == [1, 1, 1]


def shifted(timeline: Timeline, by_s: float) -> Timeline:
    spans = [span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) for span in timeline.spans]
    return replace(timeline, spans=tuple(spans))


def test_align_maps_anchored_timelines_to_one_clock():
    rng = random.Random()
    timelines = [
        shifted(training_step(rng, rank, anchor_s=1.7e9 + rng.uniform(0, 5)), rng.random()) for rank in range(4)
    ]
    aligned = align_timelines(timelines)
    assert min(timeline.start_s for timeline in aligned) == 0.0
    assert len({timeline.anchor_s for timeline in aligned}) == 1
    for before, after in zip(timelines, aligned, strict=True):
        assert after.rank == before.rank and len(after.spans) == len(before.spans)
        # The wall-clock time of each span stays; a time.time() has steps of 0.24 µs.
        for old, new in zip(before.spans, after.spans, strict=True):
            assert new.start_s + after.anchor_s == pytest.approx(old.start_s + before.anchor_s, abs=1e-6, rel=0)


def test_align_of_docstring_example():
    spans = (Span("gate", "gate", "compute", 0.5, 0.6), Span("gate", "gate", "compute", 0.4, 0.6))
    aligned = align_timelines([Timeline(0, spans[:1], anchor_s=100.0), Timeline(1, spans[1:], anchor_s=100.2)])
    assert [timeline.start_s for timeline in aligned] == [0.0, pytest.approx(0.1)]


def test_align_starts_prediction_and_measurement_together():
    rng = random.Random()
    measured = [shifted(training_step(rng, rank), 7.0 + rank) for rank in range(2)]
    predicted = [
        shifted(training_step(rng, rank, source="predicted", anchor_s=None), 3.0 + rank / 8) for rank in range(2)
    ]
    found = align_timelines([*measured, *predicted, Timeline(9)])
    starts = [timeline.start_s for timeline in found]
    assert starts == pytest.approx([0.0, 1.0, 0.0, 0.125, 0.0], abs=1e-9)
    assert align_timelines([]) == []


def test_timelines_are_immutable_and_hashable():
    timeline = training_step(random.Random())
    assert replace(timeline) == timeline and hash(replace(timeline)) == hash(timeline)
    with pytest.raises(AttributeError):
        timeline.rank = 1  # type: ignore[misc]


def test_symbols_of_kinds_are_unique():
    assert tuple(SYMBOLS) == KINDS
    assert len(set(SYMBOLS.values())) == len(KINDS)
    assert all(re.fullmatch(r"[A-Za-z]*", symbol) for symbol in SYMBOLS.values())


def test_timeline_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, fusedmoe.schedule.timeline, fusedmoe.schedule.draw\n"
        "assert not sys.modules.keys() & {'torch', 'matplotlib'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def check_format(data: dict) -> tuple[list[dict], list[dict]]:
    """Check the trace-event format's rules that viewers rely on; return (metadata, complete events)."""
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


def test_trace_pid_is_rank_and_tid_is_resource():
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


def test_save_trace_writes_json(tmp_path):
    timeline = training_step(random.Random(), rank=3)
    save_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace([timeline])


def test_trace_places_overlapping_spans_on_separate_threads():
    rng = random.Random()
    spans = []
    for i in range(100):
        start_s = rng.random()
        spans.append(Span(f"d{i}", "dispatch", "inter", start_s, start_s + rng.random() / 10))
    names, events = check_format(trace(Timeline(1, tuple(spans))))
    assert sorted(e["name"] for e in events) == sorted(span.name for span in spans)
    labels = {e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert {"inter", "inter (2)"} <= labels


def test_trace_orders_predicted_next_to_measured():
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


def test_adjacent_spans_stay_disjoint_after_rounding():
    rng = random.Random()
    end_s, spans = 0.0, []
    for i in range(2000):
        start_s, end_s = end_s, end_s + rng.random() * 1e-8
        spans.append(Span(f"g{i}", "gate", "compute", start_s, end_s))
    names, _ = check_format(trace(Timeline(0, tuple(spans))))
    assert {e["args"]["name"] for e in names if e["name"] == "thread_name"} == {"compute"}


def test_trace_of_empty_timelines():
    assert trace([])["traceEvents"] == []
    names, events = check_format(trace(Timeline()))
    assert len(names) == 2 and not events
