"""Values of a forward pass, such as replayed expert choices, that its recomputation by an activation checkpoint reuses.

A value is freed with its checkpoint. `fusedmoe.compat.torch.checkpoints` lists the recognised kinds of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch

from fusedmoe.compat.torch import Checkpoints, checkpoints, disable_current_modes, require_checkpoints
from fusedmoe.engine.dispatcher import is_in_selective_checkpoint, is_recomputing
from fusedmoe.errors import ConfigError

Value = TypeVar("Value")


def is_counting_tokens() -> bool:
    """Return whether to count the tokens of this forward: a forward with gradients counts once, recomputed or not.

    Under a reentrant checkpoint (torch's, Megatron's) the recomputation counts, which alone has gradients; otherwise
    the forward counts.
    """
    if not torch.is_grad_enabled():
        return False
    if not is_recomputing():
        return True
    again = checkpoints().recomputation
    return again is not None and isinstance(again.checkpoint, torch.autograd.function.BackwardCFunction)


def without_selective_checkpoint() -> AbstractContextManager[Any]:
    """Return a context in which a selective checkpoint saves no results: it recomputes and sends all of them again."""
    # Such a checkpoint matches operators by their count, but a metadata exchange runs other operators when recomputed.
    return disable_current_modes() if is_in_selective_checkpoint() else nullcontext()


class CheckpointedValues(Generic[Value]):
    """One value per forward of a module, returned again when an activation checkpoint recomputes that forward.

    The values of several forwards in a checkpoint are stored in order. Copies of this object hold no values.

    Raises:
        ConfigError: the checkpoints of this PyTorch version are not recognised.
    """

    def __init__(self) -> None:
        require_checkpoints()
        self._values_by_checkpoint: WeakKeyDictionary[Any, _ForwardValues[Value]] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Return whether any activation checkpoint still holds a value, which its recomputation may need."""
        return any(True for _ in self._values_by_checkpoint)

    def __reduce__(self) -> Any:
        return CheckpointedValues, ()

    def store(self, value: Value, enclosing: Checkpoints) -> None:
        """Store the value of this forward in the activation checkpoints that contain the forward."""
        current = enclosing.recomputation
        recomputed = None if current is None else self._values_by_checkpoint.get(current.checkpoint)
        for key in enclosing.forward:
            # A checkpoint that runs backward inside another's forward recomputes for itself, not for the outer one.
            if recomputed is None or key not in recomputed.checkpoints:
                self._values_by_checkpoint.setdefault(key, _ForwardValues(enclosing.forward)).values.append(value)

    def stored_value(self, enclosing: Checkpoints) -> Value | None:
        """Return the value of the forward that is being recomputed; None if none is recomputed or it has no value."""
        if enclosing.recomputation is None:
            return None
        values = self._values_by_checkpoint.get(enclosing.recomputation.checkpoint)
        return None if values is None else values.next(enclosing.recomputation.run_id)

    def on_release(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no activation checkpoint holds a value: immediately if none holds one now."""

        def call_if_empty() -> None:
            if not self:
                call()

        for key in list(self._values_by_checkpoint):
            finalize(key, call_if_empty)
        call_if_empty()


class _ForwardValues(Generic[Value]):
    """Values of one activation checkpoint, and the index of the value that the recomputation reads next.

    Attributes:
        checkpoints: this checkpoint, and all checkpoints that contained its first forward.
    """

    def __init__(self, checkpoints: list[Any]) -> None:
        self.values: list[Value] = []
        self.checkpoints: WeakSet[Any] = WeakSet(checkpoints)
        self._run: Any = None
        self._num_returned = 0

    def next(self, run: Any) -> Value:
        if run != self._run:
            self._run, self._num_returned = run, 0
        if self._num_returned == len(self.values):
            raise ConfigError(
                f"an activation checkpoint calls a module more often in its recomputation than in its forward "
                f"({self._num_returned} times); both must call the same modules"
            )
        self._num_returned += 1
        return self.values[self._num_returned - 1]
