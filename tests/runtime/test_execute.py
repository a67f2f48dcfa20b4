"""The executor: order and overlap of tasks, and the behaviour after a task raises."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.runtime import execute as module
from fusedmoe.runtime.execute import Capabilities, execute, require_runnable, runnable_kinds
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.passes import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import fused_pass
from fusedmoe.schedule.task import FUSED, KINDS, PIPELINE, Task, resources_of
from tests.marks import slowly
from tests.schedule.plans import random_costs, random_plan
from tests.schedule.test_events import any_plan

ORDERS = {"three queues": three_queues, "one queue": one_queue}


def run_and_log(plan: Plan) -> list[tuple[Task, str, int]]:
    """(task, thread, number of tasks that had ended before its start), in the order in which tasks ended."""
    log: list[tuple[Task, str, int]] = []

    def body(task: Task) -> None:
        assert not torch.is_grad_enabled()
        begun = len(log)
        log.append((task, threading.current_thread().name, begun))

    execute(plan, dict.fromkeys({task.kind for task in plan}, body), stop=pytest.fail)
    return log


@pytest.mark.parametrize("kinds", [PIPELINE, PIPELINE[::2]], ids=["ep and esp", "ep only"])
@pytest.mark.parametrize("order", ORDERS)
def test_tasks_run_once_in_dependency_order(order: str, kinds: tuple[str, ...]) -> None:
    for degree, phase in itertools.product((1, 2, 5), ("forward", "backward")):
        plan = Plan.from_orders(ORDERS[order](kinds, degree, phase))
        log = run_and_log(plan)
        ended = [task for task, _, _ in log]
        assert sorted(ended, key=str) == sorted(plan, key=str)
        for task, _, begun in log:
            assert set(plan.dependencies[task]) <= set(ended[:begun]), task
        for resource in ("compute", "intra", "inter"):
            assert [task for task in ended if resource in plan.resources[task]] == list(plan.on(resource))
        here = threading.current_thread().name
        assert {thread for task, thread, _ in log if "compute" in plan.resources[task]} == {here}
        if degree == 1:
            assert {thread for _, thread, _ in log} == {here}  # a chain gains nothing from threads


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_link_threads_inherit_inference_and_autocast_modes(inference: bool, autocast: bool) -> None:
    seen: dict[str, tuple[bool, bool, torch.dtype]] = {}
    left = torch.ones(2, 2)

    def body(task: Task) -> None:
        seen[threading.current_thread().name] = (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            (left @ left).dtype,
        )

    with torch.inference_mode(inference), torch.autocast("cpu", torch.float16, enabled=autocast):
        execute(Plan.from_orders(three_queues(PIPELINE, 2)), dict.fromkeys(PIPELINE, body), stop=pytest.fail)
    assert len(seen) == 3
    assert set(seen.values()) == {(inference, False, torch.float16 if autocast else torch.float32)}


def test_links_and_computation_overlap() -> None:
    """The dispatch of chunk 1 and the expert of chunk 0 wait for each other: both end only if they overlap."""
    plan = Plan.from_orders(three_queues(("dispatch", "expert", "combine"), 2))
    both = threading.Barrier(2)

    def meet(kind: str, chunk: int) -> Callable[[Task], None]:
        return lambda task: both.wait(60) and None if (task.kind, task.chunk) == (kind, chunk) else None

    execute(
        plan,
        {"dispatch": meet("dispatch", 1), "expert": meet("expert", 0), "combine": lambda task: None},
        stop=pytest.fail,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["dispatch", "expert", "all-gather"])
def test_exception_in_task_ends_all_threads(kind: str, order: str) -> None:
    plan = Plan.from_orders(ORDERS[order](PIPELINE, 4))
    told: list[BaseException] = []
    ran: list[Task] = []

    def body(task: Task) -> None:
        if (task.kind, task.chunk) == (kind, 2):
            raise MemoryError("no room")
        ran.append(task)

    with pytest.raises(MemoryError, match="no room"):
        execute(plan, dict.fromkeys(PIPELINE, body), stop=told.append)
    assert [str(error) for error in told] == ["no room"]
    assert Task("combine", 3) not in ran
    deadline = time.monotonic() + 20
    while any(thread.is_alive() and thread.name.startswith("fusedmoe int") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the threads of the links do not end"
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["expert", *slowly(*(kind for kind in PIPELINE if kind != "expert"))])
def test_exception_releases_task_bodies(kind: str) -> None:
    """Objects that bodies hold, above all process groups, are freed with the exception, before garbage collection."""

    class Held:
        def fails(self, task: Task) -> None:
            if task.kind == kind:
                raise ValueError(str(task))

    held = Held()
    alive = weakref.ref(held)
    plan = Plan.from_orders(three_queues(PIPELINE, 2))
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            execute(plan, dict.fromkeys(PIPELINE, held.fails), stop=lambda error: None)
        del held
        assert alive() is None
    finally:
        gc.enable()


def test_stop_is_called_before_joining_waiting_thread() -> None:
    """A link that waits for other ranks ends only because `stop` is called."""
    plan = Plan.from_orders(three_queues(("dispatch", "expert", "combine"), 2))
    stopped = threading.Event()

    def dispatch(task: Task) -> None:
        if task.chunk == 1 and not stopped.wait(60):
            pytest.fail("nobody told")

    def expert(task: Task) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        bodies = {"dispatch": dispatch, "expert": expert, "combine": dispatch}
        execute(plan, bodies, stop=lambda error: stopped.set())


def test_recorder_has_one_span_per_task() -> None:
    plan = Plan.from_orders(three_queues(PIPELINE, 3, "backward", 5))
    recorder = Recorder()
    execute(plan, dict.fromkeys(PIPELINE, lambda task: None), stop=pytest.fail, recorder=recorder)
    spans = recorder.timeline().spans
    assert {(s.kind, s.chunk, s.layer, s.phase, s.resources) for s in spans} == {
        (*task[:4], plan.resources[task]) for task in plan
    }


def test_spans_use_resource_of_task_kind() -> None:
    """An all-gather is measured on the links inside a node, also where one queue has all links."""
    plan, recorder = Plan.from_orders(one_queue(PIPELINE, 2)), Recorder()
    execute(plan, dict.fromkeys(PIPELINE, lambda task: None), stop=pytest.fail, recorder=recorder)
    assert not plan.intra and {s.kind: s.resources for s in recorder.timeline().spans} == {
        kind: resources_of(kind) for kind in PIPELINE
    }


def test_empty_plan_runs() -> None:
    execute(Plan(), {}, stop=pytest.fail)


def test_missing_body_is_rejected_before_any_task_runs() -> None:
    ran: list[Task] = []
    with pytest.raises(
        ConfigError, match=r"f0\.AG0 \(all-gather\), which cannot run here; supported: dispatch, expert"
    ):
        bodies = dict.fromkeys(("dispatch", "expert", "reduce-scatter", "combine"), ran.append)
        execute(Plan.from_orders(three_queues(PIPELINE, 2)), bodies, stop=pytest.fail)
    for kind in FUSED:  # no plan runs tasks of it
        with pytest.raises(ConfigError, match=rf"\({kind}\), which cannot run here; supported: expert"):
            execute(fused_pass(kind, 2, "forward"), {kind: ran.append, "expert": ran.append}, stop=pytest.fail)
    assert not ran


def test_agreed_error_skips_same_tasks_on_all_ranks() -> None:
    """At any state of the threads: no rank waits for a part that another has skipped."""
    rng = random.Random()
    for _ in range(40):
        plan = random_plan(rng, random_costs(rng))
        last = rng.choice(plan.sequence)
        left_out: set[Task] = set()
        for task in plan.sequence:  # its order keeps that of each resource
            if task == last or not left_out.isdisjoint(tasks_ahead_of(plan, task)):
                left_out.add(task)
        ran: list[Task] = []

        def body(task: Task, last: Task = last, ran: list[Task] = ran, pauses: random.Random = rng) -> None:
            time.sleep(pauses.choice([0.0, 0.0, 2e-4]))
            if task == last:
                raise RankError("rank 1: refused", agreed=True)
            ran.append(task)

        with pytest.raises(RankError, match="rank 1: refused"):
            execute(plan, dict.fromkeys({task.kind for task in plan}, body), stop=lambda error: None)
        assert sorted(ran, key=str) == sorted(set(plan) - left_out, key=str)


def tasks_ahead_of(plan: Plan, task: Task) -> set[Task]:
    """Return all tasks that must have ended when a task starts."""
    orders = [plan.on(resource) for resource in plan.resources[task]]
    return {*plan.dependencies[task], *(one for order in orders for one in order[: order.index(task)])}


class Watch:
    """Bodies that record their begin and end, with short delays that make threads overlap."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan, self._rng, self._lock = plan, rng, threading.Lock()
        self.ended: list[Task] = []
        self.threads: dict[Task, str] = {}
        self.violations: list[tuple[Task, set[Task]]] = []

    def __call__(self, task: Task) -> None:
        with self._lock:
            missing = tasks_ahead_of(self.plan, task) - set(self.ended)
            if missing:
                self.violations.append((task, missing))
            self.threads[task] = threading.current_thread().name
            pause_s = self._rng.choice([0.0, 0.0, 2e-4])
        time.sleep(pause_s)
        with self._lock:
            self.ended.append(task)


def run_watched(plan: Plan, rng: random.Random) -> Watch:
    found = Watch(plan, rng)
    execute(plan, dict.fromkeys({task.kind for task in plan}, found), stop=pytest.fail)
    assert len(found.ended) == len(plan) and set(found.ended) == set(plan)
    assert not found.violations
    here = threading.current_thread().name
    assert all(found.threads[task] == here for task in plan.compute)
    return found


def test_random_plans_run_in_dependency_order() -> None:
    rng = random.Random()
    for _ in range(60):
        run_watched(any_plan(rng, fused=False), rng)
    for _ in range(10):
        run_watched(random_plan(rng, random_costs(rng)), rng)


# Streams: without a GPU, by the events that each of them waits for.


class Stream:
    """Tracks the work that must end before the stream's next work; events that it records pass it on."""

    def __init__(self) -> None:
        self.over: set[Task] = set()
        self.tasks: list[Task] = []

    def wait_event(self, event: Event) -> None:
        assert event.over is not None, "waits for an event that nobody has recorded"
        self.over |= event.over

    def wait_stream(self, stream: Stream) -> None:
        self.over |= stream.over


class Event:
    over: set[Task] | None = None

    def record(self, stream: Stream) -> None:
        self.over = set(stream.over)


def run_on_fake_streams(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> dict[str, Stream]:
    """Run a plan on fake streams, and check for each task that its predecessors have ended on its stream."""
    streams = {resource: Stream() for resource in ("compute", "intra", "inter")}
    now = [streams["compute"]]

    @contextmanager
    def current(stream: Stream):  # type: ignore[no-untyped-def]
        now.append(stream)
        yield
        now.pop()

    def body(task: Task) -> None:
        assert tasks_ahead_of(plan, task) <= now[-1].over, (task, tasks_ahead_of(plan, task) - now[-1].over)
        now[-1].over.add(task)
        now[-1].tasks.append(task)

    cuda = SimpleNamespace(current_stream=lambda: streams["compute"], Event=Event, stream=current)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "cuda", cuda)
        bodies = dict.fromkeys({task.kind for task in plan}, body)
        execute(plan, bodies, stop=lambda error: None, streams=streams)  # type: ignore[arg-type]
    assert streams["compute"].over == set(plan)  # the caller continues after all work is done
    return streams


def test_streams_wait_for_all_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random()
    plans = [any_plan(rng, fused=False) for _ in range(100)]
    plans += [random_plan(rng, random_costs(rng)) for _ in range(15)]
    for plan in plans:
        streams = run_on_fake_streams(monkeypatch, plan)
        for resource, stream in streams.items():
            assert stream.tasks == list(plan.on(resource))


def test_stream_check_detects_missing_event_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above detects a stream that does not wait for a predecessor on another stream."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError, match=r"kind='all-gather', .*\{Task\(kind='dispatch'"):
        run_on_fake_streams(monkeypatch, Plan.from_orders(three_queues(PIPELINE, 2)))


CUDA = torch.device("cuda", 0)
ALL = Capabilities(2, 1, dtype=torch.bfloat16, device=CUDA, has_heap=lambda: True)


@pytest.fixture(autouse=True)
def force_triton_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Triton's interpreter serves CPUs."""
    monkeypatch.setattr(module, "device_uses_triton", lambda device: device.type == "cuda")


def test_fused_kinds_require_all_capabilities() -> None:
    """Every combination: axes, the library's products, nothing between, a dtype and a device with kernels, a heap; and
    only in a layer that follows itself.
    """
    seen = set()
    for ep, esp, grouped, direct, dtype, device, heap in itertools.product(
        (1, 2, 8),
        (1, 4),
        (True, False),
        (True, False),
        (torch.float32, torch.bfloat16, torch.float64),
        (CUDA, torch.device("cpu")),
        (True, False),
    ):
        here = Capabilities(ep, esp, grouped, direct, dtype, device, lambda heap=heap: heap)
        parts = PIPELINE if esp > 1 else PIPELINE[::2]
        kinds = runnable_kinds(here, "itself")
        own = set(kinds) - set(parts)
        assert set(parts) <= set(kinds) and own <= FUSED.keys()
        can = grouped and direct and dtype != torch.float64 and device == CUDA and heap and ep * esp > 1
        assert own == ({"dispatch-expert-combine" if ep > 1 else "all-gather-expert-reduce-scatter"} if can else set())
        seen |= own
        for plan_owner in ("step", "blocks"):
            others = runnable_kinds(here, plan_owner)  # type: ignore[arg-type]
            assert set(parts) <= set(others) <= set(KINDS) and FUSED.keys().isdisjoint(others)
            assert ("weight-gradient" in others) == (plan_owner == "blocks") and "gradient-all-reduce" in others
    assert seen == FUSED.keys()  # each fused kind can run in some case


def test_heap_is_checked_last() -> None:
    """The heap's allocation is collective: a rank that called it alone would wait for the other ranks."""

    def asked() -> bool:
        raise AssertionError("asked for the heap")

    with pytest.raises(AssertionError, match="asked for the heap"):
        runnable_kinds(replace(ALL, has_heap=asked), "itself")
    for change in ({"ep": 1}, {"has_grouped_experts": False}, {"is_kernel_only": False}, {"dtype": torch.float64}):
        runnable_kinds(replace(ALL, has_heap=asked, **change), "itself")  # type: ignore[arg-type]
    runnable_kinds(replace(ALL, has_heap=asked, device=torch.device("cpu")), "itself")
    for plan_owner in ("step", "blocks"):
        runnable_kinds(replace(ALL, has_heap=asked), plan_owner)  # type: ignore[arg-type]


def test_unsupported_task_error_lists_supported_kinds() -> None:
    plan = Plan.parse("compute: b2.E0 b2.WG0\ninter: b2.D0 b2.C0")
    require_runnable(plan, runnable_kinds(ALL, "blocks"), "a plan")
    what = r"the backward plan has b2\.WG0 \(weight-gradient\), which cannot run here; supported: attention, gate,"
    with pytest.raises(ConfigError, match=what):
        require_runnable(plan, runnable_kinds(ALL, "step"), "the backward plan")
    for kind in FUSED:
        with pytest.raises(ConfigError, match=rf"\({kind}\), which cannot run here"):
            require_runnable(fused_pass(kind, 2, "forward"), runnable_kinds(ALL, "step"), "a plan")
