"""Removes what is left in a node's memory of a job once its agent (torchrun) has ended, however it ended.

A script of its own, started by path: it imports the standard library alone, and so is a few megabytes of memory and no
time. It ends with the agent.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

# A rank that outlives the agent may be writing still.
_AGAIN_S = 2.0


def began(process: int) -> str:
    """Returns when a process began, in the system's ticks; "" if it is gone. With its number that is of no other."""
    # After the last ")": the name of a process stands before it and may have spaces and brackets.
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def remove(folder: Path, prefix: str) -> None:
    """Removes the files whose names begin so."""
    for path in folder.iterdir():
        if path.name.startswith(prefix):
            with suppress(OSError):
                path.unlink()


def main(agent: int, since: str, folder: Path, prefix: str) -> None:
    """Waits for the agent's end. A second keeper of the same memory ends at once."""
    try:
        lock = os.open(folder / f"{prefix}keeper", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(lock).st_uid == os.geteuid():  # a lock of another user's is none: two keepers do no harm
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        pass
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(agent)
        if began(agent) == since:  # looked at with the handle open: else the number may be another process's by now
            select.select([handle], [], [])
    remove(folder, prefix)
    time.sleep(_AGAIN_S)
    remove(folder, prefix)


if __name__ == "__main__" and os.fork() == 0:  # who starts it need not wait for it
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
