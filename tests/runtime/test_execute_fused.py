"""Tasks that occupy several resources in the executor: nothing starts before what is ahead of it on any of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusedmoe.runtime import execute as module
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.orders import alternating, one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import FUSED, PIPELINE, Task, road_with
from tests.schedule.plans import random_costs, random_plan, with_fused
from tests.schedule.test_contention import any_plan

ORDERS = (three_queues, alternating, one_queue)
SHARDED = "compute: AGE0 AGE1\nintra: AGE0 AGE1 RS0 RS1\ninter: D0 D1 C0 C1"


def ahead(plan: Plan, task: Task) -> set[Task]:
    """All that has to have ended when a task starts."""
    orders = [plan.on(resource) for resource in plan.resources[task]]
    return {*plan.dependencies[task], *(one for order in orders for one in order[: order.index(task)])}


class Watch:
    """Bodies that tell when they begin and end, and dawdle a little, so that threads really meet."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan, self._rng, self._lock = plan, rng, threading.Lock()
        self.ended: list[Task] = []
        self.threads: dict[Task, str] = {}
        self.violations: list[tuple[Task, set[Task]]] = []

    def __call__(self, task: Task) -> None:
        with self._lock:
            missing = ahead(self.plan, task) - set(self.ended)
            if missing:
                self.violations.append((task, missing))
            self.threads[task] = threading.current_thread().name
            pause_s = self._rng.choice([0.0, 0.0, 2e-4])
        time.sleep(pause_s)
        with self._lock:
            self.ended.append(task)


def watch(plan: Plan, rng: random.Random) -> Watch:
    found = Watch(plan, rng)
    execute(plan, dict.fromkeys({task.kind for task in plan}, found), stop=pytest.fail)
    assert len(found.ended) == len(plan) and set(found.ended) == set(plan)
    assert not found.violations
    here = threading.current_thread().name
    assert all(found.threads[task] == here for task in plan.compute)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_every_road_runs_in_order(order: Callable[..., dict[str, list[Task]]]) -> None:
    rng = random.Random()
    for parts in (PIPELINE, PIPELINE[::2]):
        for kind in FUSED:
            road = road_with(kind, parts)
            if road is not None:
                for degree in (1, 2, 4):
                    watch(Plan.of(order(road, degree, "backward", 1)), rng)


def test_any_plan_runs_in_order() -> None:
    rng = random.Random()
    for _ in range(60):
        watch(any_plan(rng), rng)
    for _ in range(10):
        watch(random_plan(rng, with_fused(rng, random_costs(rng))), rng)


def test_the_other_link_goes_on_beside_it() -> None:
    """AGE0 and D1 wait for each other: only at the same time can both end."""
    both = threading.Barrier(2)

    def body(task: Task) -> None:
        if (task.kind, task.chunk) in (("all-gather-expert", 0), ("dispatch", 1)):
            both.wait(10)

    plan = Plan.parse(SHARDED)
    execute(plan, dict.fromkeys({task.kind for task in plan}, body), stop=pytest.fail)


def test_its_own_link_waits_for_it() -> None:
    """What is behind it on its link, and for no other reason, starts when it has ended."""
    plan = Plan.parse("compute: f0.AGE0 f5.A\nintra: f0.AGE0 f9.RS0\ninter: f0.D0\nafter f9.RS0:\nafter f5.A:")
    watched = Watch(plan, random.Random())

    def slow(task: Task) -> None:
        time.sleep(0.05)
        watched(task)

    bodies = dict.fromkeys({task.kind for task in plan}, watched) | {"all-gather-expert": slow}
    execute(plan, bodies, stop=pytest.fail)
    assert not watched.violations and watched.threads[Task("reduce-scatter", 0, 9)] == "fusedmoe intra"


def test_rows_are_there_when_they_are_read() -> None:
    """Chunks of rows through buffers that hold NaN until they are written, and again when they have been read."""
    rng = random.Random()
    for order in ORDERS:
        for kind in FUSED:
            for parts in (PIPELINE, PIPELINE[::2]):
                road = road_with(kind, parts)
                if road is None:
                    continue
                degree = rng.randint(1, 4)
                rows: list[list[Tensor]] = [[torch.full((3,), float(i))] for i in range(degree)]
                for places in rows:
                    places += [torch.full((3,), float("nan")) for _ in parts]

                def body(task: Task, rows: list[list[Tensor]] = rows, parts: tuple[str, ...] = parts) -> None:
                    for part in FUSED.get(task.kind, (task.kind,)):
                        place = parts.index(part)
                        source, target = rows[task.chunk or 0][place : place + 2]
                        time.sleep(rng.choice([0.0, 1e-4]))
                        target.copy_(source * 2 + place)
                        source.fill_(float("nan"))

                plan = Plan.of(order(road, degree))
                execute(plan, dict.fromkeys(road, body), stop=pytest.fail)
                for i, places in enumerate(rows):
                    expected = float(i)
                    for place in range(len(parts)):
                        expected = expected * 2 + place
                    assert places[-1].tolist() == [expected] * 3


@pytest.mark.parametrize("kind", ["all-gather-expert", "reduce-scatter", "dispatch"])
def test_what_a_body_raises_ends_all(kind: str) -> None:
    before = threading.active_count()
    told: list[BaseException] = []

    def body(task: Task) -> None:
        if (task.kind, task.chunk) == (kind, 1):
            raise MemoryError("no room")

    plan = Plan.parse(SHARDED)
    with pytest.raises(MemoryError, match="no room"):
        execute(plan, dict.fromkeys({task.kind for task in plan}, body), stop=told.append)
    assert [str(error) for error in told] == ["no room"] and threading.active_count() == before


def test_measured() -> None:
    recorder, plan = Recorder(), Plan.parse(SHARDED)
    execute(plan, dict.fromkeys({t.kind for t in plan}, lambda task: None), stop=pytest.fail, recorder=recorder)
    timeline = recorder.timeline()
    found = {(s.kind, s.chunk, s.resources) for s in timeline.spans}
    assert found == {(task.kind, task.chunk, plan.resources[task]) for task in plan}
    assert len(timeline.spans) == 8 and len(timeline.on("intra")) == 4


# Streams: without a GPU by what each of them has been told to wait for.


class Stream:
    """What has to be over before whatever is put on it next; events that it records pass that on."""

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


def on_streams(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> dict[str, Stream]:
    """Runs a plan on such streams, and checks for each task that all ahead of it is over where it runs."""
    streams = {resource: Stream() for resource in ("compute", "intra", "inter")}
    now = [streams["compute"]]

    @contextmanager
    def current(stream: Stream):  # type: ignore[no-untyped-def]
        now.append(stream)
        yield
        now.pop()

    def body(task: Task) -> None:
        assert ahead(plan, task) <= now[-1].over, (task, ahead(plan, task) - now[-1].over)
        now[-1].over.add(task)
        now[-1].tasks.append(task)

    cuda = SimpleNamespace(current_stream=lambda: streams["compute"], Event=Event, stream=current)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "cuda", cuda)
        bodies = dict.fromkeys({task.kind for task in plan}, body)
        execute(plan, bodies, stop=pytest.fail, streams=streams)  # type: ignore[arg-type]
    assert streams["compute"].over == set(plan)  # whoever goes on there finds all done
    return streams


def test_streams_wait_for_all_that_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random()
    plans = [any_plan(rng) for _ in range(100)]
    plans += [random_plan(rng, with_fused(rng, random_costs(rng))) for _ in range(10)]
    plans += [random_plan(rng, random_costs(rng)) for _ in range(5)]
    for plan in plans:
        streams = on_streams(monkeypatch, plan)
        assert streams["compute"].tasks == list(plan.compute)
        for link in ("intra", "inter"):
            assert streams[link].tasks == [task for task in plan.on(link) if task.kind not in FUSED]


def test_an_order_that_no_event_keeps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above finds a stream that does not wait for what another one runs ahead of it."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError, match="all-gather-expert"):
        on_streams(monkeypatch, Plan.parse(SHARDED))
