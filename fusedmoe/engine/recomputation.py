"""Values of a forward that its recomputation by an activation checkpoint needs again.

A value that is chosen once for a forward and must be the same when a checkpoint computes the forward again (replayed
experts, a padding mask) is kept with the checkpoint and freed with it. `fusedmoe.compat.torch.checkpoints` lists the
kinds of checkpoints that are recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch

from fusedmoe.compat.torch import Checkpoints, checkpoints, disable_current_modes, require_checkpoints
from fusedmoe.engine.dispatcher import recomputing, selects
from fusedmoe.errors import ConfigError

Value = TypeVar("Value")


def trains_tokens() -> bool:
    """Return whether this forward counts its tokens: gradients are enabled, and no other forward counts them.

    A non-reentrant checkpoint enables gradients twice, so its recomputation does not count. A reentrant checkpoint
    (torch's, Megatron's) enables them in its recomputation alone, which counts.
    """
    if not torch.is_grad_enabled():
        return False
    if not recomputing():
        return True
    again = checkpoints().again
    return again is not None and isinstance(again.checkpoint, torch.autograd.function.BackwardCFunction)


def unselected() -> AbstractContextManager[Any]:
    """Makes a context of which a selective activation checkpoint keeps nothing: its backward computes all of it again,
    and sends again."""
    # Such a checkpoint counts operators, and an exchange of sizes has others the second time.
    return disable_current_modes() if selects() else nullcontext()


class Remembered(Generic[Value]):
    """A value of each forward of one module, returned again when a checkpoint computes that forward again.

    A checkpoint has the values of its forwards in their order, and they are freed with it. Copies have none.

    Raises:
        ConfigError: the checkpoints of this PyTorch are not recognised.
    """

    def __init__(self) -> None:
        require_checkpoints()
        self._kept: WeakKeyDictionary[Any, _Values[Value]] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Return whether some checkpoint may still ask for a value."""
        return any(True for _ in self._kept)

    def __reduce__(self) -> Any:
        return Remembered, ()

    def keep(self, value: Value, around: Checkpoints) -> None:
        """Keep a value of a forward in these checkpoints."""
        again = None if around.again is None else self._kept.get(around.again.checkpoint)
        for key in around.forward:
            # A checkpoint that runs backward inside another's forward recomputes for itself, not for the outer one.
            if again is None or key not in again.outer:
                self._kept.setdefault(key, _Values(around.forward)).all.append(value)

    def again(self, around: Checkpoints) -> Value | None:
        """Return the value of the forward that is computed again. None: it had none."""
        if around.again is None:
            return None
        values = self._kept.get(around.again.checkpoint)
        return None if values is None else values.next(around.again.run)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call when no checkpoint with a value is left, which may be now."""

        def gone() -> None:
            if not self:
                call()

        for key in list(self._kept):
            finalize(key, gone)
        gone()


class _Values(Generic[Value]):
    """Values of one checkpoint's forwards, and how many of them the current recomputation has taken.

    Attributes:
        outer: the checkpoints around its first forward, itself included.
    """

    def __init__(self, outer: list[Any]) -> None:
        self.all: list[Value] = []
        self.outer: WeakSet[Any] = WeakSet(outer)
        self._run: Any = None
        self._taken = 0

    def next(self, run: Any) -> Value:
        if run != self._run:
            self._run, self._taken = run, 0
        if self._taken == len(self.all):
            raise ConfigError(
                f"an activation checkpoint calls a module more often in its recomputation than in its forward "
                f"({self._taken} times); both must call the same modules"
            )
        self._taken += 1
        return self.all[self._taken - 1]
