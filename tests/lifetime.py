"""Processes that end with their parent.

A test session may be killed, or kill a process that has started others, while these compute, or wait for one another in
native code: no process requests their end then, and only a reader notices a closed pipe.
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
    """End this process, in any state, as soon as its parent process `parent` has ended.

    Linux's kernel does this; elsewhere a thread does, which has to wait for native code that keeps the GIL.
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
    """Names of the library's files in shared memory, except node memory, which agents of other jobs may hold."""
    return {path.name for path in Path("/dev/shm").glob("*fusedmoe*") if not path.name.startswith("fusedmoe-survive-")}
