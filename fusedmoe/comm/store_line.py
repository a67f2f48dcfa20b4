"""The line to the job's store: who asks it waits no longer than a bound.

A client of torch's TCPStore has no time-out for answers: where the process that hosts the store is stopped, a question
blocks for ever in native code. So a thread asks, over a connection of its own, and whoever wants to know leaves it
behind. The connection of `torch.distributed` may be blocked for as long as some rank has not come.

One connection serves a process for as long as its store is there. For each new one the store's only thread asks the
name service who that is (torch 2.13), and answers nobody meanwhile: five seconds where a name server is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
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
        self._broke = ""

    @property
    def broke(self) -> str:
        """How the connection broke; "" if it did not. Nothing is asked any more then: the client is noisy."""
        return self._broke

    @property
    def trouble(self) -> str:
        """Why the store does not answer; "" while it does."""
        silent_s = 0.0 if self._last is None or self._last.done() else time.monotonic() - self._since
        silent = f"no answer for {silent_s:.0f} s" if silent_s >= PATIENCE_S else ""
        return self._broke or silent

    def ask(self, question: Callable[[dist.Store], T], patience_s: float = PATIENCE_S) -> T | None:
        """The answer; None if it does not come. The seconds count from the oldest question that has none."""
        start = time.monotonic()
        if self._broke or not self._lock.acquire(timeout=patience_s):
            return None
        try:
            if self._last is not None and not self._last.done():
                start = self._since
                self._last.result(max(0.0, start + patience_s - time.monotonic()))
            last = self._helper.begin(partial(self._asked.answer, question))
            self._last, self._since = last, time.monotonic()  # type: ignore[assignment]
            found = last.result(max(0.0, start + patience_s - time.monotonic()))
        except NoAnswer:
            return None
        finally:
            self._lock.release()
        if isinstance(found, _Broken):
            self._broke = found.text
            return None
        return found


class _Broken(NamedTuple):
    """In place of an answer: in words, since an error holds on to whoever asked, and so to the line."""

    text: str


class _Asked:
    """What the thread asks: a connection of its own, made at the first question. It knows nothing of the line."""

    def __init__(self, store: dist.Store) -> None:
        self._given: dist.Store | None = store
        self._own: dist.Store

    def answer(self, question: Callable[[dist.Store], T]) -> T | _Broken:
        try:
            if self._given is not None:  # PyTorch 2.6 cannot have a second connection
                base = self._given.clone() if hasattr(self._given, "clone") else self._given
                self._own, self._given = dist.PrefixStore("fusedmoe", base), None
            return question(self._own)
        except RuntimeError as error:  # of the store's client; its own class is younger than some PyTorch
            return _Broken(f"the connection to it broke: {error}")


_LINES: WeakKeyDictionary[dist.Store, StoreLine] = WeakKeyDictionary()


def line_to(store: dist.Store) -> StoreLine:
    """The process's line to a store, the same for all stores that are prefixes of one."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    line = _LINES.get(store) or _LINES.get(base) or StoreLine(base)
    _LINES[store] = _LINES[base] = line
    return line
