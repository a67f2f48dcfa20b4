"""Nothing waits for ever for a thread that runs out of memory, at its start or later."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotDone
from functools import partial
from pathlib import Path

import pytest

from fusedmoe import threads
from fusedmoe.runtime.execute import execute
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, Task
from fusedmoe.threads import WorkerThread


def count_running(name: str) -> int:
    """Threads of that name; threads of earlier tests may still be ending."""
    return sum(thread.is_alive() and thread.name.startswith(name) for thread in threading.enumerate())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_worker_runs_calls_in_order_and_ends_with_owner() -> None:
    made: list[int] = []

    def note(number: int) -> str:
        made.append(number)
        return threading.current_thread().name

    helper = WorkerThread("one")
    names = [helper.submit(partial(note, number)) for number in range(3)]
    with pytest.raises(ZeroDivisionError):
        helper.result(helper.submit(lambda: 1 // 0))
    assert made == [0, 1, 2] and {helper.result(name) for name in names} == {"one"}
    assert count_running("one") == 1
    del helper
    gc.collect()
    wait_until(lambda: not count_running("one"))


def test_interrupted_constructor_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threads._StartedEvent):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(threads, "_StartedEvent", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerThread("interrupted")
    wait_until(lambda: not count_running("interrupted"))


def test_worker_drops_references_after_call() -> None:
    held, helper = threading.Event(), WorkerThread("one")
    count = sys.getrefcount(held)
    helper.result(helper.submit(held.set))
    helper.result(helper.submit(int))  # the previous one has been released by then
    assert sys.getrefcount(held) == count


def test_thread_start_failure_raises_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda self: None)
    with pytest.raises(MemoryError, match=r"no memory for a thread: it did not start .* Raise the memory limit"):
        WorkerThread("one")


def test_early_thread_death_raises_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads._Thread, "run", lambda thread: None)
    helper = WorkerThread("one")
    with pytest.raises(MemoryError, match=r"the thread 'one' died: out of memory. Raise the memory limit"):
        helper.result(helper.submit(int))


@pytest.mark.parametrize("fails", ["to begin", "later"])
def test_plan_ends_when_link_thread_has_no_memory(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The other link, which waits for it, ends too."""
    begin, real = threads._START_TIMEOUT_S, threading.Thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(threads, "POLL_S", 0.05)
    monkeypatch.setattr(threads, "_START_TIMEOUT_S", 0.05 if fails == "to begin" else begin)

    def bootstrap(thread: threading.Thread) -> None:
        if thread.name != "fusedmoe inter":
            real(thread)
        elif fails == "later":
            thread.run = lambda: None  # type: ignore[method-assign]
            real(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    told, ran = list[BaseException](), list[Task]()
    with pytest.raises(MemoryError, match="Raise the memory limit"):
        execute(Plan.from_orders(three_queues(PIPELINE, 2)), dict.fromkeys(PIPELINE, ran.append), stop=told.append)
    assert [type(error) for error in told] == [MemoryError] and not ran
    wait_until(lambda: not count_running("fusedmoe int"))


LIMITED = """
import importlib.util, resource, sys
from functools import partial
from pathlib import Path
spec = importlib.util.spec_from_file_location("threads", sys.argv[1])
threads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(threads)
helper = threads.WorkerThread("before")
threads._START_TIMEOUT_S = 0.2
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
try:
    while True:
        helper = threads.WorkerThread("after")
except MemoryError as error:
    assert "Raise the memory limit" in str(error)
    print("no memory")
"""


def test_worker_in_process_without_memory_raises() -> None:
    """Either the system cannot start the thread, or the thread's first allocation fails."""
    command = [sys.executable, "-c", LIMITED, str(Path(threads.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "no memory\n", done.stderr


def test_result_of_blocked_call_times_out() -> None:
    stuck = threading.Event()
    waits = WorkerThread("one").submit(stuck.wait)
    with pytest.raises(NotDone):
        waits.result(0.01)
    stuck.set()
    assert waits.result(20)


def test_call_error_keeps_no_reference_to_waiter() -> None:
    """An exception raised where the owner is closed would hold that frame and its callers."""
    helper = WorkerThread("test")

    def fail() -> None:
        raise ValueError("it failed")

    def lines(error: BaseException | None) -> int:
        count, at = 0, error and error.__traceback__
        while at:
            count, at = count + 1, at.tb_next
        return count

    done = helper.submit(fail)
    helper.wait_for(done)
    own = lines(done.exception())
    helper.wait_for(done)
    assert lines(done.exception()) == own > 0
    with pytest.raises(ValueError, match="it failed") as caught:
        helper.result(done)
    frames = {frame.name: frame.frame.f_locals for frame in caught.traceback}
    for name in ("result", "is_done"):
        assert not any(value is done for value in frames[name].values()), name
    stuck = threading.Event()
    waits = helper.submit(lambda: stuck.wait(20))
    helper.end()
    threading.Timer(0.05, stuck.set).start()
    helper.wait_for(waits)
    assert waits.done()


ENDS = """
import time
from datetime import timedelta
from torch import distributed as dist
from fusedmoe.threads import WorkerThread

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.6)  # Python is being taken down

slow, helper = Slow(), WorkerThread("asks")
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
helper.submit(lambda: store.wait(["nothing"], timedelta(seconds=0.3)))
time.sleep(0.1)
"""


def test_process_exits_cleanly_during_running_call() -> None:
    """Native code that returned to the interpreter during its shutdown would abort the process."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
