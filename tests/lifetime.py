"""Processes that end with the one that started them.

A test session may be killed, or kill a process that has started others, while these compute, or wait for one another
in native code: nobody asks them to end then, and an end of a pipe is noticed only by those who read it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EVERY_S = 0.5


def end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, as soon as `parent`, which started it, has ended.

    The kernel sees to it on Linux; elsewhere a thread does, which has to wait for native code that keeps the GIL.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _end_without(parent)  # it may have ended before
    else:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int) -> None:
    while True:
        _end_without(parent)
        time.sleep(_EVERY_S)


def _end_without(parent: int) -> None:
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def left_in_shared_memory() -> set[str]:
    """Names of the library's files there, but for the memory of nodes: agents of other jobs may hold some of that."""
    return {path.name for path in Path("/dev/shm").glob("*fusedmoe*") if not path.name.startswith("fusedmoe-survive-")}
