"""A store whose waits have a time-out of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class PatientStore(dist.Store):
    """A job's store as a backend that connects sees it: every wait may last `patience`, whatever the backend asks for.

    Gloo has one time-out, of which a wait for a key takes all, and a wait for a connection five times as much.
    """

    def __init__(self, store: dist.Store, patience: timedelta) -> None:
        super().__init__()
        self._store, self._patience = store, patience

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
        self._store.wait(list(keys), self._patience)

    def has_extended_api(self) -> bool:
        return False
