"""The identity of a job, by which ranks of two jobs that share a MASTER_PORT find out that they are not one job."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath

from fusedmoe.errors import RankError

#: What `identity` has, by the words of errors.
Identity = Mapping[str, str]


def identity() -> dict[str, str]:
    """Return the launcher's run id, the user and the program of this process; "" for what is unknown.

    Arguments, folders and packages of the program are not part of it: they may differ between ranks of one job.
    """
    return {"run": os.environ.get("TORCHELASTIC_RUN_ID", ""), "user": _user(), "program": _program()}


def require_one_job(rank: int, ranks: Sequence[int], identities: Sequence[Identity]) -> None:
    """Check that ranks that met are of one job. A user or a program that is unknown agrees with any.

    Raises:
        RankError: they are of different jobs; every rank raises it.
    """
    for name in ("run", "user", "program"):
        known = {of: its[name] for of, its in zip(ranks, identities, strict=True) if its[name] or name == "run"}
        if len(set(known.values())) > 1:
            each = ", ".join(f"{value or 'none'!r} on rank {of}" for of, value in known.items())
            address = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
            raise RankError(
                f"rank {rank}: the ranks at {address} are of different jobs: the {name} is {each}. Give each job a "
                "MASTER_PORT of its own, and start all ranks of a job as one user with one program"
            )


def _user() -> str:
    # A container may have users without a name.
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _program() -> str:
    """Return the name of the script or module that runs, without folder, package and suffix; "" where there is none."""
    # Not the main module: on one rank that may be a profiler or a debugger, which puts the script's name here.
    path = PurePath(sys.argv[0] if sys.argv else "")
    if path.name == "-c":
        return ""
    return path.parent.name if path.stem == "__main__" else path.stem
