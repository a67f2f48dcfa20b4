"""The recorder: spans of bodies and of backward passes, and timelines from several threads."""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.runtime.recorder import Recorder, record_operation, span
from fusedmoe.schedule.timeline import Span, align_timelines


def test_spans_record_times_of_their_bodies():
    recorder = Recorder(rank=3)
    with span(recorder, "D", kind="dispatch", resource="inter", chunk=1, layer=2, phase="backward"):
        time.sleep(0.02)
    with span(recorder, "E", kind="expert"):
        pass
    timeline = recorder.timeline()
    assert (timeline.rank, timeline.source) == (3, "measured")
    first, second = timeline.spans
    assert first[:3] == ("D", "dispatch", "inter") and first[5:] == (1, 2, "backward", ())
    assert second[:3] == ("E", "expert", "compute") and second[5:] == (None, None, None, ())
    assert 0 <= first.start_s < first.end_s <= second.start_s <= second.end_s
    assert first.duration_s >= 0.02


def test_span_without_recorder_is_one_shared_context():
    contexts = {id(span(None, "x", kind="gate", chunk=i)) for i in range(3)}
    assert len(contexts) == 1
    with span(None, "x", kind="gate"), span(None, "y", kind="permute"):
        pass
    with pytest.raises(ZeroDivisionError), span(None, "x", kind="gate"):
        raise ZeroDivisionError


def test_span_helper_passes_all_fields_to_recorder():
    recorder = Recorder()
    with span(recorder, "C", kind="combine", resource="inter", chunk=0, layer=1, phase="forward"):
        pass
    (found,) = recorder.timeline().spans
    assert found._replace(start_s=0, end_s=0) == Span("C", "combine", "inter", 0, 0, 0, 1, "forward")


@pytest.mark.parametrize(
    "words", [{"kind": "sleep"}, {"kind": "gate", "resource": "gpu"}, {"kind": "gate", "phase": "up"}]
)
def test_unknown_kind_resource_or_phase_is_rejected(words):
    with pytest.raises(ConfigError, match="is not one of"):
        span(Recorder(), "x", **words)


def test_raising_body_leaves_no_span():
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), span(recorder, "x", kind="gate"):
        raise ZeroDivisionError
    with span(recorder, "y", kind="gate"):
        pass
    assert [s.name for s in recorder.timeline().spans] == ["y"]


def test_each_backward_pass_records_its_span():
    recorder = Recorder(clock=count().__next__)
    x = torch.ones(2, requires_grad=True)
    y = record_operation(recorder, torch.exp, x, kind="attention").sum()
    y.backward(retain_graph=True)
    y.backward()
    _, first, second = recorder.timeline().spans
    assert (first.phase, second.phase) == ("backward", "backward") and first.end_s < second.start_s


@pytest.mark.parametrize("grad", [False, True])
def test_no_backward_span_without_gradient(grad: bool):
    opened: list[str | None] = []

    class Noting(Recorder):
        def timer(self, what: Span):
            opened.append(what.phase)
            return super().timer(what)

    x = torch.ones(2, 2, requires_grad=not grad)
    with torch.set_grad_enabled(grad):
        record_operation(Noting(), torch.nn.Linear(2, 2), x, kind="attention")
    assert opened == ["forward"]


def test_clear_resets_time_and_discards_open_spans():
    recorder = Recorder()
    with span(recorder, "old", kind="gate"):
        pass
    with span(recorder, "open", kind="gate"):
        time.sleep(0.01)
        old_anchor_s = recorder.timeline().anchor_s
        recorder.clear()
    with span(recorder, "new", kind="gate"):
        pass
    timeline = recorder.timeline()
    assert [s.name for s in timeline.spans] == ["new"]
    assert 0 <= timeline.start_s < 0.01 + time.time() - timeline.anchor_s
    assert old_anchor_s + 0.009 < timeline.anchor_s <= time.time()


def test_threads_record_concurrently():
    recorder = Recorder()

    def work(chunk: int) -> None:
        for layer in range(200):
            with span(recorder, "g", kind="gate", chunk=chunk, layer=layer):
                pass

    threads = [threading.Thread(target=work, args=(chunk,)) for chunk in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(s.chunk, s.layer) for s in recorder.timeline().spans}
    assert found == {(chunk, layer) for chunk in range(4) for layer in range(200)}


def test_align_matches_recorders_with_different_clocks(monkeypatch: pytest.MonkeyPatch):
    """Each recorder has its own clock, as on two machines: only the wall clock is the same."""
    now_s = [0.0]
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + now_s[0])
    one = Recorder(rank=0, clock=lambda: 7.0 + now_s[0])
    now_s[0] = 0.05
    two = Recorder(rank=1, clock=lambda: 300.0 + now_s[0])
    with span(one, "a", kind="gate"), span(two, "b", kind="gate"):
        now_s[0] += 0.001
    raw = [recorder.timeline() for recorder in (one, two)]
    assert raw[0].start_s - raw[1].start_s == pytest.approx(0.05)
    assert [one.start_s for one in align_timelines(raw)] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_compiled_span_without_recorder_has_no_graph_break():
    def double(x: torch.Tensor, recorder: Recorder | None) -> torch.Tensor:
        with span(recorder, "E", kind="expert"):
            return 2 * x

    x = torch.rand(3)
    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, None), 2 * x)


class FakeDevice:
    """torch.cuda as the recorder uses it: a device that runs queued work late, and the events on its streams."""

    def __init__(self, lag_s: float) -> None:
        self.lag_s = lag_s
        self.work_s = 0.0  # seconds of the work queued so far
        self.synchronized = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.time_s = device.lag_s + device.work_s
                self.count = device.synchronized

            def elapsed_time(self, later: Event) -> float:
                assert device.synchronized > later.count, "read before the device was done"
                return (later.time_s - self.time_s) * 1e3

        self.Event = Event

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize(device: torch.device) -> None:
            self.synchronized += 1

        monkeypatch.setattr(torch.cuda, "Event", self.Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace())


def test_cuda_spans_use_event_times(monkeypatch):
    device = FakeDevice(lag_s=5.0)
    device.install(monkeypatch)
    recorder = Recorder(rank=1, device="cuda:0")
    waits = device.synchronized
    device.work_s += 0.5
    with span(recorder, "E", kind="expert", chunk=0):
        device.work_s += 0.25
    device.work_s += 0.125
    with span(recorder, "E", kind="expert", chunk=1):
        device.work_s += 1.0
    assert device.synchronized == waits  # recording does not wait
    timeline = recorder.timeline()
    times = [time_s for s in timeline.spans for time_s in (s.start_s, s.end_s)]
    assert times == pytest.approx([0.5, 0.75, 0.875, 1.875])
    assert timeline.rank == 1 and timeline.anchor_s == pytest.approx(time.time(), abs=60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_span_covers_kernel_time():
    recorder = Recorder(device="cuda")
    x = torch.rand(2048, 2048, device="cuda")
    for _ in range(3):  # the first ones load the kernels
        recorder.clear()
        with span(recorder, "E", kind="expert"):
            for _ in range(50):
                x @ x
        issued_s = recorder._now() - recorder._zero_s
        torch.cuda.synchronize()
        done_s = recorder._now() - recorder._zero_s
    (found,) = recorder.timeline().spans
    assert 0 <= found.start_s <= issued_s
    assert found.end_s == pytest.approx(done_s, abs=2e-3) and found.duration_s > 1e-4
