"""An exception that nobody catches is told to the other ranks at once, however long its process takes to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from weakref import WeakSet

from fusedmoe.comm.failure import Board

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_LONGEST = 500


class _TellOthers:
    """In place of `sys.excepthook`: does what that did, then posts a verdict to the boards of living topologies."""

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self.boards: WeakSet[Board] = WeakSet()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._before(kind, error, traceback)  # first: the store may be slow to answer
        for board in list(self.boards):
            with suppress(Exception):
                board.post_own("the program", f"{kind.__name__}: {error}"[:_LONGEST])


def tell_others_of_uncaught(board: Board) -> None:
    """From now on, while `board` is alive, an exception that nobody catches on the main thread is posted there.

    Without this the others learn of it when the process has ended, which threads of the user's may put off; on other
    hosts when their time is up.
    """
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
    sys.excepthook.boards.add(board)
