"""The peak memory of live tensors during a call, on one thread."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Count the bytes of all storages that operations create inside, while they live.

    Attributes:
        now, peak: bytes.   largest: bytes of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._sizes: dict[int, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        place = storage._cdata
        if place in self._known or storage.data_ptr() in given:
            return
        self._sizes[place] = storage.nbytes()
        self._known[place] = weakref.ref(storage, lambda _: self._gone(place))
        self.now += storage.nbytes()
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, storage.nbytes())

    def _gone(self, place: int) -> None:
        if self._known.pop(place, None) is not None:
            self.now -= self._sizes.pop(place)
