"""Threads that make calls for their owner, and are never waited for without a bound.

Where memory is out a thread may end before it does anything, or before it tells of what it did. `Thread.start` waits
for ever for that thread, and so would a caller that waits for its work.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")
_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

# A thread begins in less than a millisecond, but where 40 processes want two cores it has taken more than 5 s. A look
# costs nothing.
_BEGIN_S, LOOK_S = 30.0, 0.25
# So long a process that ends waits for calls that are under way.
_END_S = 1.0
_CURE = "Raise the limit of its memory (ulimit -v, the container's), or make its batch smaller"


class Helper:
    """A thread that makes calls, one after another.

    It ends with the last reference to this, or with a call of `end`, once those calls are made that have begun.

    Raises:
        MemoryError: the process has no memory for another thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        # A daemon that nobody joins: a call may block when the process ends, or when the last reference goes.
        self._thread = _Thread(self._calls, name)
        try:
            self._thread.start()
            self.end = finalize(self, self._calls.put, None)
        except BaseException as error:
            # It may run already.
            self._calls.put(None)
            if isinstance(error, RuntimeError):
                raise MemoryError(f"no memory for the thread {name!r}: {error}. {_CURE}") from error
            raise
        self.end.atexit = False

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Starts a call; the future gets what it returns or raises."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        return done

    def check(self, done: Future[Any]) -> bool:
        """Returns whether a call is done. Raises what it raised, or `MemoryError` if the thread ended before that."""
        # Before the other question: it may end in between.
        alive = self._thread.is_alive()
        try:
            if done.done():
                done.result()
            elif not alive:
                raise MemoryError(f"the thread {self._thread.name!r} has ended: the memory was out. {_CURE}")
            return done.done()
        finally:
            del done

    def result(self, done: Future[T]) -> T:
        """Waits for a call; returns what it returns and raises what it raises, or as `check`."""
        try:
            while not self.check(done):
                with suppress(NoAnswer):
                    done.exception(LOOK_S)
            return done.result()
        finally:
            # Its error has this frame, by which the two would hold each other.
            del done

    def settle(self, done: Future[Any]) -> None:
        """Waits until a call has returned or raised, or its thread has ended. Its error stays as it is: raised once
        more, it would also hold on to whoever waits here."""
        while not done.done() and self._thread.is_alive():
            with suppress(NoAnswer):
                done.exception(LOOK_S)


class _Thread(threading.Thread):
    def __init__(self, calls: _Calls, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls, self._started = calls, _Begun()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            work, done = call
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            # They refer to the caller's objects.
            del call, work, done


class _Begun(threading.Event):
    """Event that tells `Thread.start` that a thread has begun, within a bound."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGIN_S if timeout is None else timeout):
            raise MemoryError(f"no memory for a thread: it did not begin within {_BEGIN_S:g} s. {_CURE}")
        return True


@atexit.register
def _end_threads() -> None:
    # A rank that waited long may have asked the store, and not needed the answer. Where native code comes back to a
    # Python that is no more, C++ aborts the process.
    deadline = time.monotonic() + _END_S
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread) and thread.is_alive()]
    for thread in threads:
        thread.calls.put(None)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
