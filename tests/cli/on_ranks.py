"""Run the command on ranks of `tests.cluster`, as a launcher would."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fusedmoe.cli.main import main


def command(rank: int, world: int, folder: str, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr. `folder`: the working directory."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        # Cluster ranks already have their process group. train has a name of its own, which its import binds.
        for module in ("train", "job"):
            patch.setattr(f"fusedmoe.cli.{module}.process_group", lambda *given: nullcontext())
        with redirect_stdout(out), redirect_stderr(error):
            code = main(arguments)
    return code, out.getvalue(), error.getvalue()


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
