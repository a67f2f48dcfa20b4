"""Nobody waits for ever for a thread that found no memory, to begin with or later."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoAnswer
from functools import partial
from pathlib import Path

import pytest

from fusedmoe import threads
from fusedmoe.runtime.execute import execute
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task
from fusedmoe.threads import Helper


def running(name: str) -> int:
    """Threads of that name: others, of earlier tests, end when they like."""
    return sum(thread.is_alive() and thread.name.startswith(name) for thread in threading.enumerate())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_calls_are_made_in_order_and_the_thread_ends_with_its_owner() -> None:
    made: list[int] = []

    def note(number: int) -> str:
        made.append(number)
        return threading.current_thread().name

    helper = Helper("one")
    names = [helper.begin(partial(note, number)) for number in range(3)]
    with pytest.raises(ZeroDivisionError):
        helper.result(helper.begin(lambda: 1 // 0))
    assert made == [0, 1, 2] and {helper.result(name) for name in names} == {"one"}
    assert running("one") == 1
    del helper
    gc.collect()
    until(lambda: not running("one"))


def test_an_owner_that_is_interrupted_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threads._Begun):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(threads, "_Begun", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Helper("interrupted")
    until(lambda: not running("interrupted"))


def test_what_a_call_holds_is_gone_when_it_is_made() -> None:
    held, helper = threading.Event(), Helper("one")
    count = sys.getrefcount(held)
    helper.result(helper.begin(held.set))
    helper.result(helper.begin(int))  # the one before it has been let go of by then
    assert sys.getrefcount(held) == count


def test_a_thread_that_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_BEGIN_S", 0.05)
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda self: None)
    with pytest.raises(MemoryError, match=r"no memory for a thread: it did not begin .* Raise the limit"):
        Helper("one")


def test_a_thread_that_ends_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads._Thread, "run", lambda thread: None)
    helper = Helper("one")
    with pytest.raises(MemoryError, match=r"the thread 'one' has ended: the memory was out. Raise the limit"):
        helper.result(helper.begin(int))


@pytest.mark.parametrize("fails", ["to begin", "later"])
def test_a_plan_ends_where_a_link_finds_no_memory(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The other link, too, which waits for it."""
    begin, real = threads._BEGIN_S, threading.Thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    monkeypatch.setattr(threads, "_BEGIN_S", 0.05 if fails == "to begin" else begin)

    def bootstrap(thread: threading.Thread) -> None:
        if thread.name != "fusedmoe inter":
            real(thread)
        elif fails == "later":
            thread.run = lambda: None  # type: ignore[method-assign]
            real(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    told, ran = list[BaseException](), list[Task]()
    with pytest.raises(MemoryError, match="Raise the limit"):
        execute(Plan.from_orders(three_queues(PIPELINE, 2)), dict.fromkeys(PIPELINE, ran.append), stop=told.append)
    assert [type(error) for error in told] == [MemoryError] and not ran
    until(lambda: not running("fusedmoe int"))


LIMITED = """
import importlib.util, resource, sys
from functools import partial
from pathlib import Path
spec = importlib.util.spec_from_file_location("threads", sys.argv[1])
threads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(threads)
helper = threads.Helper("before")
threads._BEGIN_S = 0.2
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
try:
    while True:
        helper = threads.Helper("after")
except MemoryError as error:
    assert "Raise the limit" in str(error)
    print("no memory")
"""


def test_a_process_without_memory() -> None:
    """Whether the system has no thread for it, or the thread no memory to begin with."""
    command = [sys.executable, "-c", LIMITED, str(Path(threads.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "no memory\n", done.stderr


def test_a_call_that_does_not_end_is_left_behind() -> None:
    stuck = threading.Event()
    waits = Helper("one").begin(stuck.wait)
    with pytest.raises(NoAnswer):
        waits.result(0.01)
    stuck.set()
    assert waits.result(20)


def test_an_error_does_not_hold_who_waits_for_its_end() -> None:
    """Raised where the owner is closed it would hold that frame, and all that called it."""
    helper = Helper("test")

    def fail() -> None:
        raise ValueError("it failed")

    def lines(error: BaseException | None) -> int:
        count, at = 0, error and error.__traceback__
        while at:
            count, at = count + 1, at.tb_next
        return count

    done = helper.begin(fail)
    helper.settle(done)
    own = lines(done.exception())
    helper.settle(done)
    assert lines(done.exception()) == own > 0
    with pytest.raises(ValueError, match="it failed") as caught:
        helper.result(done)
    frames = {frame.name: frame.frame.f_locals for frame in caught.traceback}
    for name in ("result", "check"):
        assert not any(value is done for value in frames[name].values()), name
    stuck = threading.Event()
    waits = helper.begin(lambda: stuck.wait(20))
    helper.end()
    threading.Timer(0.05, stuck.set).start()
    helper.settle(waits)
    assert waits.done()


ENDS = """
import time
from datetime import timedelta
from torch import distributed as dist
from fusedmoe.threads import Helper

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.6)  # Python is being taken down

slow, helper = Slow(), Helper("asks")
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
helper.begin(lambda: store.wait(["nothing"], timedelta(seconds=0.3)))
time.sleep(0.1)
"""


def test_a_process_ends_while_a_question_is_under_way() -> None:
    """Native code that came back to it during its end would abort it."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
