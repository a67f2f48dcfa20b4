from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.orders import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task

ORDERS = {"three queues": three_queues, "one queue": one_queue}


def log_of(plan: Plan) -> list[tuple[Task, str, int]]:
    """(task, thread, how many tasks had ended before it began), in the order in which tasks ended."""
    log: list[tuple[Task, str, int]] = []

    def body(task: Task) -> None:
        assert not torch.is_grad_enabled()
        begun = len(log)
        log.append((task, threading.current_thread().name, begun))

    execute(plan, dict.fromkeys({task.kind for task in plan}, body), stop=pytest.fail)
    return log


@pytest.mark.parametrize("kinds", [PIPELINE, PIPELINE[::2]], ids=["esp", "ep alone"])
@pytest.mark.parametrize("order", ORDERS)
def test_tasks_run_once_in_order(order: str, kinds: tuple[str, ...]) -> None:
    for degree, phase in itertools.product((1, 2, 5), ("forward", "backward")):
        plan = Plan.of(ORDERS[order](kinds, degree, phase))
        log = log_of(plan)
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


def test_links_and_computation_overlap() -> None:
    """The dispatch of chunk 1 and the expert of chunk 0 wait for each other: only at the same time can both end."""
    plan = Plan.of(three_queues(("dispatch", "expert", "combine"), 2))
    both = threading.Barrier(2)

    def meet(kind: str, chunk: int) -> Callable[[Task], None]:
        return lambda task: both.wait(10) and None if (task.kind, task.chunk) == (kind, chunk) else None

    execute(
        plan,
        {"dispatch": meet("dispatch", 1), "expert": meet("expert", 0), "combine": lambda task: None},
        stop=pytest.fail,
    )


@pytest.mark.parametrize("kind", ["dispatch", "expert", "all-gather"])
def test_what_a_body_raises_ends_all(kind: str) -> None:
    plan = Plan.of(three_queues(PIPELINE, 4))
    before = threading.active_count()
    told: list[BaseException] = []
    ran: list[Task] = []

    def body(task: Task) -> None:
        if (task.kind, task.chunk) == (kind, 2):
            raise MemoryError("no room")
        ran.append(task)

    with pytest.raises(MemoryError, match="no room"):
        execute(plan, dict.fromkeys(PIPELINE, body), stop=told.append)
    assert [str(error) for error in told] == ["no room"]
    assert threading.active_count() == before
    assert Task("combine", 3) not in ran


@pytest.mark.parametrize("kind", PIPELINE)
def test_an_error_keeps_nothing(kind: str) -> None:
    """What bodies hold, process groups above all, is gone with the exception, and does not wait for the collector."""

    class Held:
        def fails(self, task: Task) -> None:
            if task.kind == kind:
                raise ValueError(str(task))

    held = Held()
    alive = weakref.ref(held)
    plan = Plan.of(three_queues(PIPELINE, 2))
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            execute(plan, dict.fromkeys(PIPELINE, held.fails), stop=lambda error: None)
        del held
        assert alive() is None
    finally:
        gc.enable()


def test_the_waiting_side_is_told_before_it_is_joined() -> None:
    """A link that waits for other ranks ends only because `stop` tells them."""
    plan = Plan.of(three_queues(("dispatch", "expert", "combine"), 2))
    stopped = threading.Event()

    def dispatch(task: Task) -> None:
        if task.chunk == 1 and not stopped.wait(10):
            pytest.fail("nobody told")

    def expert(task: Task) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        bodies = {"dispatch": dispatch, "expert": expert, "combine": dispatch}
        execute(plan, bodies, stop=lambda error: stopped.set())


def test_measured() -> None:
    plan = Plan.of(three_queues(PIPELINE, 3, "backward", 5))
    recorder = Recorder()
    execute(plan, dict.fromkeys(PIPELINE, lambda task: None), stop=pytest.fail, recorder=recorder)
    spans = recorder.timeline().spans
    assert {(s.kind, s.chunk, s.layer, s.phase, s.resources) for s in spans} == {
        (*task[:4], plan.resources[task]) for task in plan
    }


def test_no_tasks() -> None:
    execute(Plan(), {}, stop=pytest.fail)
