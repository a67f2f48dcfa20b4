"""Requests to the job's store with bounded waits.

A torch TCPStore client has no timeout for answers: if the host of the store is stopped, a request blocks forever in
native code. Requests therefore run in a thread, over a separate connection, because that of `torch.distributed` may be
blocked until some rank joins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fusedmoe.threads import WorkerThread

T = TypeVar("T")

# A store answers within 1 ms, or within this time on an overloaded host.
REQUEST_TIMEOUT_S = 1.5


class StoreClient:
    """A store connection and a thread that sends one request at a time. Both end with the last reference."""

    def __init__(self, store: dist.Store) -> None:
        self._connection, self._worker = _Connection(store), WorkerThread("fusedmoe-store")
        self._lock = Lock()
        self._last_request: Future[object] | None = None
        self._last_request_start_s = 0.0
        #: Error text after the connection broke. No more requests are sent: the client logs each failure.
        self.connection_error = ""

    @property
    def failure_reason(self) -> str:
        silent_s = (
            0.0
            if self._last_request is None or self._last_request.done()
            else time.monotonic() - self._last_request_start_s
        )
        silent = f"no answer for {silent_s:.0f} s" if silent_s >= REQUEST_TIMEOUT_S else ""
        return self.connection_error or silent

    def request(self, request: Callable[[dist.Store], T], timeout_s: float = REQUEST_TIMEOUT_S) -> T | None:
        """Return the answer; None on timeout, counted from the oldest open request, or if the connection broke."""
        start = time.monotonic()
        if self.connection_error or not self._lock.acquire(timeout=timeout_s):
            return None
        try:
            # `failure_reason` must also count the time before an unanswered request was sent.
            last_start = start
            if self._last_request is not None and not self._last_request.done():
                start = self._last_request_start_s
                self._last_request.result(max(0.0, start + timeout_s - time.monotonic()))
                last_start = time.monotonic()
            last = self._worker.submit(partial(self._connection.answer, request, timeout_s))
            self._last_request, self._last_request_start_s = last, last_start  # type: ignore[assignment]
            answer = last.result(max(0.0, start + timeout_s - time.monotonic()))
        except NotDone:
            return None
        finally:
            self._lock.release()
        if isinstance(answer, _ConnectionLost):
            self.connection_error = answer.text
            return None
        return answer


class _ConnectionLost(NamedTuple):
    """An error text. An exception's frames would keep the caller and the connection alive."""

    text: str


class _Connection:
    """The thread's connection, opened at the first request. Holds no reference to its `StoreClient`."""

    def __init__(self, store: dist.Store) -> None:
        # The client lives as long as the Python object `store`, so `store` must not be held. A prefix store holds only
        # the underlying store.
        self._original_store: dist.PrefixStore | None = dist.PrefixStore("", store)
        self._connected_store: dist.Store
        self._connection_error = ""

    def answer(self, request: Callable[[dist.Store], T], timeout_s: float) -> T | _ConnectionLost:
        if self._connection_error:
            return _ConnectionLost(self._connection_error)
        try:
            return request(self._connect(timeout_s))
        except RuntimeError as error:
            self._connection_error = f"the connection to it broke: {error}"
            return _ConnectionLost(self._connection_error)

    def _connect(self, timeout_s: float) -> dist.Store:
        if self._original_store is not None:
            original, self._original_store = self._original_store, None
            try:
                self._connected_store = dist.PrefixStore(
                    "fusedmoe", _open_second_connection(original.underlying_store, timeout_s)
                )
            except (OSError, ValueError, MemoryError) as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from None
        return self._connected_store


def _open_second_connection(store: dist.Store, timeout_s: float) -> dist.Store:
    if isinstance(store, dist.TCPStore):
        # If the host is gone, the client retries until its timeout, in a clone the job's half an hour.
        bound, libuv = timedelta(seconds=timeout_s), getattr(store, "libuvBackend", True)
        return dist.TCPStore(store.host, store.port, timeout=bound, wait_for_workers=False, use_libuv=libuv)
    return store.clone()  # type: ignore[attr-defined]


# One connection per process and store: for each new client the store's only thread resolves the client's name (torch
# 2.13) and blocks all requests meanwhile, 5 s with a slow name server.
_CLIENT_BY_STORE: WeakKeyDictionary[dist.Store, StoreClient] = WeakKeyDictionary()


def shared_client(store: dist.Store) -> StoreClient:
    """Return the process's connection to a store, shared by all its prefixes."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    client = _CLIENT_BY_STORE.get(store) or _CLIENT_BY_STORE.get(base) or StoreClient(base)
    _CLIENT_BY_STORE[store] = _CLIENT_BY_STORE[base] = client
    return client
