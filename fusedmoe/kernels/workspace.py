"""Memory that is used again from one step to the next, on a CPU.

The C library asks the system anew for every large tensor, and the system clears each page of it: a step of fixed shapes
would pay for hundreds of megabytes of zeros that nobody reads. (On CUDA PyTorch's allocator keeps memory by itself.)

A tensor from a workspace is one like any other, with a storage of its own, except that this cannot be resized. Its
memory comes back when that storage has gone, and so when nothing refers to it any more: no tensor or view, no graph, no
array of NumPy, no collective under way. Whoever keeps an activation or a gradient keeps it unharmed, for as long as
they like.

All layers of a process share one workspace, which goes with the last of them. Operators take tensors and numbers only,
so it cannot be an argument: they ask for the one that layers hold, and where there is none for new memory.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Bytes from which tensors come out of a workspace: the C library may ask the system for each that is larger.
_SMALLEST = 1 << 17
# Ragged batches differ a little from step to step: a new buffer has room for an eighth more than was asked for (the
# system hands out no page before somebody touches it), and a buffer serves what takes at least two thirds of it.
_ROOM, _WASTE = 1.125, 1.5
# What nobody has asked for is given back after this many requests, and four times as many as ever lay between two uses.
_PATIENCE = 256
# Results of operations leave the library: users may hoard them, and so these are as many of a size (to twice it).
_RESULTS = 8


class _Free(NamedTuple):
    """A buffer that waits for its next use. `since`: the number of requests when it came back."""

    size: int
    since: int
    buffer: np.ndarray


class Workspace:
    """Buffers, given out and taken back. Any thread may ask for some, and any may let go of them.

    A request takes the smallest free buffer that fits, so there are about as many as were in use at once in a step.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[_Free] = []  # by size
        # Tensors may go at any moment, inside a request too: what comes back waits here.
        self._returned: deque[np.ndarray] = deque()
        self._results: dict[int, deque[None]] = defaultdict(lambda: deque([None] * _RESULTS))
        self._requests = self._longest = 0

    def __reduce__(self) -> tuple[Callable[[], Workspace], tuple[()]]:
        return shared_workspace, ()  # copies of layers, in other processes too, share the one that is there

    @property
    def free_bytes(self) -> int:
        """Of memory that waits to be used again."""
        with self._lock:
            self._take_back()
            return sum(free.size for free in self._free)

    def clear(self) -> None:
        """Gives back what is free."""
        with self._lock:
            self._take_back()
            self._free.clear()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, result: bool = False) -> Tensor | None:
        """A contiguous tensor of at least one element, uninitialised; None: for too many results that are kept."""
        count = prod(shape)
        size = count * dtype.itemsize
        places = self._results[size.bit_length()] if result else deque([None])
        try:
            places.pop()
        except IndexError:
            return None
        try:
            buffer = self._buffer(size)
        except BaseException:
            places.append(None)
            raise
        lease = buffer[:size]
        weakref.finalize(lease, _give_back, weakref.ref(self), buffer, places).atexit = False
        flat = torch.frombuffer(lease, dtype=dtype, count=count)  # its storage holds `lease`
        # No view, as autograd sees it, and no storage that Python knows: autograd adds gradients up in place in what
        # nobody else refers to.
        return torch.empty(0, dtype=dtype).set_(flat, 0, shape)  # type: ignore[call-overload]

    def _buffer(self, size: int) -> np.ndarray:
        with self._lock:
            self._requests += 1
            self._take_back()
            at = bisect_left(self._free, size, key=_size)
            if at < len(self._free) and self._free[at].size <= _WASTE * size:
                found = self._free.pop(at)
                self._longest = max(self._longest, self._requests - found.since)
                return found.buffer
            oldest = self._requests - max(_PATIENCE, 4 * self._longest)
            self._free = [free for free in self._free if free.since >= oldest]
        return torch.empty(int(_ROOM * size), dtype=torch.uint8).numpy()  # aligned as PyTorch has it

    def _take_back(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            insort(self._free, _Free(buffer.nbytes, self._requests, buffer), key=_size)


_size = attrgetter("size")


def _give_back(workspace: weakref.ref[Workspace], buffer: np.ndarray, places: deque[None]) -> None:
    places.append(None)
    owner = workspace()
    if owner is not None:
        owner._returned.append(buffer)


_shared: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()


def shared_workspace() -> Workspace:
    """The workspace of this process, for a layer to hold; a new one where no layer holds any."""
    return _shared.setdefault("cpu", Workspace())


def empty(like: Tensor, shape: Sequence[int], result: bool = False) -> Tensor:
    """`like.new_empty(shape)`, in used memory where a layer holds a workspace and it is worth while.

    Args:
        result: it leaves the library.
    """
    plain = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
    workspace = _shared.get("cpu") if plain and prod(shape) * like.itemsize >= _SMALLEST else None
    made = None if workspace is None else workspace.empty(shape, like.dtype, result)
    if made is None:
        return like.new_empty(shape)
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        made.copy_(like.new_empty(shape))  # PyTorch fills what is new; this looks the same
    return made
