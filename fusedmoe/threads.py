"""Worker threads with bounded waits.

Without memory, a thread may die before it starts its work or reports the result, and callers would block forever.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")
_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

# A thread usually starts in less than 1 ms, but with 40 processes on two cores it has taken more than 5 s.
_START_TIMEOUT_S, POLL_S = 30.0, 0.25
# Seconds that an exiting process waits for running calls.
_EXIT_WAIT_S = 1.0
_CURE = "Raise the memory limit (ulimit -v or the container's), or reduce the batch size"


class WorkerThread:
    """Thread that runs calls one after another.

    It exits after `end` is called or the last reference to this object is dropped, once started calls have returned.

    Raises:
        MemoryError: no memory for another thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        # A daemon that is never joined: a call may block at process exit or when the last reference is dropped.
        self._thread = _Thread(self._calls, name)
        try:
            self._thread.start()
            self.end = finalize(self, self._calls.put, None)
        except BaseException as error:
            # The thread may be running already.
            self._calls.put(None)
            if isinstance(error, RuntimeError):
                raise MemoryError(f"no memory for the thread {name!r}: {error}. {_CURE}") from error
            raise
        self.end.atexit = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._calls.put((call, done))
        return done

    def is_done(self, done: Future[Any]) -> bool:
        """Return whether a call is done. Raise its exception, or `MemoryError` if the thread died before."""
        # Read first: the thread may exit in between.
        alive = self._thread.is_alive()
        try:
            if done.done():
                done.result()
            elif not alive:
                raise MemoryError(f"the thread {self._thread.name!r} died: out of memory. {_CURE}")
            return done.done()
        finally:
            del done

    def result(self, done: Future[T]) -> T:
        """Wait for a call and return its result. Raises like `is_done`."""
        try:
            while not self.is_done(done):
                with suppress(NotDone):
                    done.exception(POLL_S)
            return done.result()
        finally:
            # The exception's traceback has this frame: break the reference cycle.
            del done

    def wait_for(self, done: Future[Any]) -> None:
        """Wait until a call has returned or raised, or its thread has died, without raising its exception."""
        while not done.done() and self._thread.is_alive():
            with suppress(NotDone):
                done.exception(POLL_S)


class _Thread(threading.Thread):
    def __init__(self, calls: _Calls, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls, self._started = calls, _StartedEvent()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            work, done = call
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            # They refer to objects of the caller.
            del call, work, done


class _StartedEvent(threading.Event):
    """Event of `Thread.start` with a bounded wait."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_START_TIMEOUT_S if timeout is None else timeout):
            raise MemoryError(f"no memory for a thread: it did not start within {_START_TIMEOUT_S:g} s. {_CURE}")
        return True


@atexit.register
def _end_threads() -> None:
    # A thread that returns from native code after the interpreter has been finalized aborts the process.
    deadline = time.monotonic() + _EXIT_WAIT_S
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread) and thread.is_alive()]
    for thread in threads:
        thread.calls.put(None)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
