"""A store wrapper that overrides the caller's timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class FixedTimeoutStore(dist.Store):
    """Wrapper around the job's store that uses one timeout for all waits and ignores the backend's.

    Gloo has a single timeout: a wait for a key uses it once, a wait for a connection five times over.
    """

    def __init__(self, store: dist.Store, patience: timedelta) -> None:
        super().__init__()
        self._store, self._timeout = store, patience

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), self._timeout)

    def has_extended_api(self) -> bool:
        return False
