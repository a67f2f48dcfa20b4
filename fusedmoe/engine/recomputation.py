"""Activation checkpoints around a call: which will compute it again, and which does so now.

What is decided once for a forward and must be the same when a checkpoint computes it again (here, experts that are
replayed) is kept with the checkpoint, and goes with it. Known are torch's checkpoints, reentrant or not, selective or
not, and whatever else is an autograd function whose backward calls the forward again (Megatron's, DeepSpeed's).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from fusedmoe.engine.dispatcher import recomputing, selects

Value = TypeVar("Value")


class Checkpoints(NamedTuple):
    """Objects that live as long as the graphs of checkpoints.

    Attributes:
        forward: of those whose first forward this call is in, the innermost first.
        again: of the innermost that computes this call again; None: none does.
    """

    forward: list[Any]
    again: Any


def enclosing_checkpoints() -> Checkpoints:
    """Finds the checkpoints around the caller, on Python's stack.

    Torch has no interface for this: it keeps a checkpoint in local variables of its functions.
    """
    forward: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        of_torch = code.co_filename == checkpoint.__file__
        if of_torch and code.co_name == "checkpoint" and (generator := frame.f_locals.get("gen")) is not None:
            if generator.gi_frame is not None:
                forward.append(generator.gi_frame.f_locals["new_frame"])
        elif of_torch and code.co_name == "unpack_hook":
            # Whatever is further out has nothing to do with this forward: it only called the backward pass.
            return Checkpoints(forward, frame.f_locals["frame"])
        elif code.co_name in ("forward", "backward") and "ctx" in code.co_varnames[: code.co_argcount]:
            ctx = frame.f_locals["ctx"]
            if not isinstance(ctx, torch.autograd.function.BackwardCFunction):
                pass
            elif code.co_name == "backward":
                return Checkpoints(forward, ctx)
            else:
                forward.append(ctx)
        frame = frame.f_back
    return Checkpoints(forward, None)


def trains_tokens() -> bool:
    """Return whether this forward counts its tokens: gradients are enabled, and no other forward counts them.

    A non-reentrant checkpoint enables gradients twice, so its recomputation does not count. A reentrant checkpoint
    (torch's, Megatron's) enables them in its recomputation alone, which counts.
    """
    if not torch.is_grad_enabled():
        return False
    return not recomputing() or isinstance(enclosing_checkpoints().again, torch.autograd.function.BackwardCFunction)


def unselected() -> AbstractContextManager[Any]:
    """Makes a context of which a selective activation checkpoint keeps nothing: its backward computes all of it again,
    and sends again."""
    # Such a checkpoint counts operators, and an exchange of sizes has others the second time.
    return _disable_current_modes() if selects() else nullcontext()


@contextmanager
def unpacked() -> Iterator[None]:
    """A context in which activation checkpoints (`use_reentrant=False`) leave alone what autograd saves."""
    hooks, autograd = [], torch._C._autograd
    # Of hooks the innermost are called, so whatever lies under the checkpoints takes their place.
    while (top := autograd._top_saved_tensors_default_hooks(True)) and top[0].__module__ == checkpoint.__name__:
        autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack_and_unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pack_and_unpack)


class Remembered(Generic[Value]):
    """A value of each forward of one module, which a checkpoint that computes the forward again gets again.

    A checkpoint has the values of its forwards in their order, and they go with it. Copies have none.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, _Values[Value]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Remembered, ()

    def keep(self, value: Value, around: Checkpoints) -> None:
        """Keeps a value of a forward in these checkpoints."""
        for key in around.forward:
            self._kept.setdefault(key, _Values()).all.append(value)

    def again(self, around: Checkpoints) -> Value | None:
        """Returns the value of the forward that is computed again; None: it had none."""
        values = self._kept.get(around.again)
        return None if values is None else values.next()

    def when_gone(self, call: Callable[[], None]) -> None:
        """Calls when no checkpoint with a value is left, which may be now."""

        def gone() -> None:
            # Looked through, for a key that is just going still counts.
            if not list(self._kept):
                call()

        for key in list(self._kept):
            finalize(key, gone)
        gone()


class _Values(Generic[Value]):
    """Values of a checkpoint's forwards, and how many of them a pass that computes it again has had."""

    def __init__(self) -> None:
        self.all: list[Value] = []
        self._pass, self._had = -1, 0

    def next(self) -> Value:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass, self._had = number, 0
        self._had += 1
        return self.all[self._had - 1]
