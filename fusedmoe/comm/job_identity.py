"""Job identity: detects that ranks at one MASTER_ADDR:MASTER_PORT belong to different jobs."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath

from fusedmoe.errors import RankError

Identity = Mapping[str, str]


def read_identity() -> dict[str, str]:
    """Return this process's launcher run id, user and program; "" for an unknown field.

    Arguments, folders and package names are excluded, as they may differ between ranks of one job.
    """
    return {"run": os.environ.get("TORCHELASTIC_RUN_ID", ""), "user": _user_name(), "program": _program_path()}


def require_one_job(rank: int, ranks: Sequence[int], identities: Sequence[Identity]) -> None:
    """Check that all ranks belong to one job. An unknown user or program matches any.

    Raises:
        RankError: on every rank, if the ranks belong to different jobs.
    """
    for name in ("run", "user", "program"):
        by_rank = {peer: job[name] for peer, job in zip(ranks, identities, strict=True) if job[name] or name == "run"}
        if len(set(by_rank.values())) > 1:
            each = ", ".join(f"{value or 'none'!r} on rank {peer}" for peer, value in by_rank.items())
            address = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
            raise RankError(
                f"rank {rank}: the ranks at {address} belong to different jobs: the {name} is {each}. Give each job "
                "its own MASTER_PORT, and start all ranks of a job as one user with one program"
            )


def _user_name() -> str:
    # Containers may have users without a name.
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _program_path() -> str:
    """Return the name of the running script or module without folder, package and suffix; "" if unknown."""
    # Under a profiler or debugger, __main__ is that tool.
    path = PurePath(sys.argv[0] if sys.argv else "")
    if path.name == "-c":
        return ""
    return path.parent.name if path.stem == "__main__" else path.stem
