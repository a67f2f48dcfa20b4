"""A line to the job's store: a rank that asks it waits no longer than a bound.

A client of torch's TCPStore has no time-out for answers: where the process that hosts the store is stopped, a question
blocks for ever in native code. So a thread asks, over a connection of its own, and the rank leaves it behind when its
patience ends. The connection of `torch.distributed` may be blocked for as long as some rank has not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fusedmoe.threads import Helper

T = TypeVar("T")

# A store answers in less than a millisecond; one whose host is short of time, in less than this.
PATIENCE_S = 1.5


class StoreLine:
    """A connection to a store and a thread that asks it, one question at a time. Both end with the last reference."""

    def __init__(self, store: dist.Store) -> None:
        self._asked, self._helper = _Asked(store), Helper("fusedmoe-store")
        self._lock = Lock()
        self._last: Future[object] | None = None
        self._since = 0.0
        #: The words of the error with which the connection broke, after which it asks nothing, as the client is noisy.
        self.broke = ""

    @property
    def trouble(self) -> str:
        """The reason why the store does not answer; "" while it does."""
        silent_s = 0.0 if self._last is None or self._last.done() else time.monotonic() - self._since
        silent = f"no answer for {silent_s:.0f} s" if silent_s >= PATIENCE_S else ""
        return self.broke or silent

    def ask(self, question: Callable[[dist.Store], T], patience_s: float = PATIENCE_S) -> T | None:
        """Returns the answer; None if it does not come. The seconds count from the oldest open question."""
        start = time.monotonic()
        if self.broke or not self._lock.acquire(timeout=patience_s):
            return None
        try:
            # From the moment the wait is counted from: else a question that had no answer in time would not be one
            # that `trouble` names, for as long as it took to begin it.
            since = start
            if self._last is not None and not self._last.done():
                start = self._since
                self._last.result(max(0.0, start + patience_s - time.monotonic()))
                since = time.monotonic()
            last = self._helper.begin(partial(self._asked.answer, question, patience_s))
            self._last, self._since = last, since  # type: ignore[assignment]
            answer = last.result(max(0.0, start + patience_s - time.monotonic()))
        except NoAnswer:
            return None
        finally:
            self._lock.release()
        if isinstance(answer, _Broken):
            self.broke = answer.text
            return None
        return answer


class _Broken(NamedTuple):
    """A failure in words, in place of an answer: an exception's frames would hold on to the asker and the line."""

    text: str


class _Asked:
    """The connection that the thread asks, made at the first question. It does not refer to the line, which ends it."""

    def __init__(self, store: dist.Store) -> None:
        # The line lives as long as the Python object `store`, which must not be held here: a prefix of it holds what
        # is below that, and until the first question only.
        self._given: dist.PrefixStore | None = dist.PrefixStore("", store)
        self._own: dist.Store
        self._broken = ""

    def answer(self, question: Callable[[dist.Store], T], patience_s: float) -> T | _Broken:
        if self._broken:
            return _Broken(self._broken)
        try:
            return question(self._connected(patience_s))
        except RuntimeError as error:
            # Of the store's client, whose own class of errors is younger than some PyTorch.
            self._broken = f"the connection to it broke: {error}"
            return _Broken(self._broken)

    def _connected(self, patience_s: float) -> dist.Store:
        if self._given is not None:
            given, self._given = self._given, None
            try:
                self._own = dist.PrefixStore("fusedmoe", _second(given.underlying_store, patience_s))
            except (OSError, ValueError, MemoryError) as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from None
        return self._own


def _second(store: dist.Store, patience_s: float) -> dist.Store:
    """Connects to the same store once more."""
    if isinstance(store, dist.TCPStore):
        # Where its host is gone the client tries again until its time-out has passed. A clone would have that of the
        # job's store, half an hour; a rank waits no longer than for the first answer.
        bound, libuv = timedelta(seconds=patience_s), getattr(store, "libuvBackend", True)
        return dist.TCPStore(store.host, store.port, timeout=bound, wait_for_workers=False, use_libuv=libuv)
    return store.clone()  # type: ignore[attr-defined]


# One connection serves a process for as long as its store is there. For each new one the store's only thread asks the
# name service about the client (torch 2.13), and answers no question meanwhile: 5 s where a name server is slow.
_LINES: WeakKeyDictionary[dist.Store, StoreLine] = WeakKeyDictionary()


def line_to(store: dist.Store) -> StoreLine:
    """Returns the process's line to a store, the same for all stores that are prefixes of one."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    line = _LINES.get(store) or _LINES.get(base) or StoreLine(base)
    _LINES[store] = _LINES[base] = line
    return line
