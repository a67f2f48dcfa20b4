"""Script that removes a job's files from a node's memory after its agent (torchrun) ends, for whatever reason.

Imports only the standard library, to start fast and use a few megabytes.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

# A rank that outlives the agent may still be writing.
_SECOND_DELETION_DELAY_S = 2.0


def start_time(process: int) -> str:
    """Return a process's start time in clock ticks, "" if it is gone; with the PID it identifies the process."""
    # The process name may contain spaces and brackets.
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def remove_files(folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        if path.name.startswith(prefix):
            with suppress(OSError):
                path.unlink()


def main(agent: int, since: str, folder: Path, prefix: str) -> None:
    """Wait until process `agent`, started at `since`, ends; then delete the files in `folder` that start with `prefix`.

    The files are deleted twice, `_SECOND_DELETION_DELAY_S` apart. Returns at once if another keeper holds the lock.
    """
    try:
        lock = os.open(folder / f"{prefix}keeper", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(lock).st_uid == os.geteuid():  # ignore another user's lock: two keepers are harmless
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        pass
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(agent)
        if start_time(agent) == since:  # checked with the handle open: the PID may have been reused before
            select.select([handle], [], [])
    remove_files(folder, prefix)
    time.sleep(_SECOND_DELETION_DELAY_S)
    remove_files(folder, prefix)


if __name__ == "__main__" and os.fork() == 0:
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
