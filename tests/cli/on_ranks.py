"""The command on ranks of `tests.cluster`, as a launcher would start it."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fusedmoe.cli.main import main


def command(rank: int, world: int, folder: str, *arguments: str) -> tuple[int, str, str]:
    """The exit code, and what went to stdout and stderr. `folder`: where it is started."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        # The ranks of a cluster have their process group already.
        patch.setattr("fusedmoe.cli.job.process_group", lambda *given: nullcontext())
        with redirect_stdout(out), redirect_stderr(error):
            code = main(arguments)
    return code, out.getvalue(), error.getvalue()


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
