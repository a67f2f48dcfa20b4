"""An exception that nobody catches is told to the other ranks at once, and its process ends soon.

Before a process ends it destroys its process groups, and Gloo then waits for what a rank that will never come owes it:
for a minute or half an hour, while a launcher waits for the process. After an exception that nobody caught there is
nothing to wait for.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from weakref import WeakSet

from fusedmoe.comm.failure import Board

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_LONGEST = 500
_END_S = 5.0
# Ranks that wait look at the board a few times a second.
_LINGER_S = 2.0


class _TellOthers:
    """In place of `sys.excepthook`: does what that did, then posts a verdict to the boards of living topologies."""

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self._failed = False
        self.boards: WeakSet[Board] = WeakSet()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._before(kind, error, traceback)  # first: the store may be slow to answer
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        self._failed = True
        deadline = time.monotonic() + _LINGER_S
        for board in list(self.boards):
            with suppress(Exception):
                board.explain() or board.post_own("the program", f"{type(error).__name__}: {error}"[:_LONGEST])
                board.linger(deadline)

    def end(self) -> None:
        """Leaves what follows, the destructors, a few seconds. Native code then ends it with 1: no Python may run."""
        if not self._failed:
            return
        try:
            faulthandler.dump_traceback_later(_END_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        except RuntimeError:  # there was no memory for a thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(_END_S))


def tell_others_of_uncaught(board: Board) -> None:
    """From now on, while `board` is alive, an exception that nobody catches on the main thread is posted there.

    Without this the others learn of it when the process has ended, which threads of the user's may put off; on other
    hosts when their time is up.
    """
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
        atexit.register(sys.excepthook.end)  # before most others, and so it runs after them
    sys.excepthook.boards.add(board)


def tell_others(error: BaseException) -> None:
    """The same for an exception that was caught, but with which the process ends."""
    if isinstance(sys.excepthook, _TellOthers):
        sys.excepthook.tell(error)
