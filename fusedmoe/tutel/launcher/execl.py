"""Runs one rank's program, bound to its NUMA node: `python -m fusedmoe.tutel.launcher.execl [-m] program …`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from fusedmoe.errors import ConfigError
from fusedmoe.tutel.system import init_affinity_at_program_beginning

_HERE = "fusedmoe.tutel"


def command(environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs `-m module …` or `script.py …` with this package as `tutel`; another program runs
    as it is.

    Raises:
        ConfigError: no program.
    """
    if not arguments or list(arguments) == ["-m"]:
        raise ConfigError("name a program: a script, `-m module`, or an executable")
    if arguments[0] == "-m" or arguments[0].endswith(".py"):
        return [sys.executable, "-m", _HERE, *arguments]
    return [shutil.which(arguments[0]) or arguments[0], *arguments[1:]]


def main() -> None:
    started = command(os.environ, sys.argv[1:])
    if int(os.environ.get("OMP_NUM_THREADS", "1")) <= 1:
        init_affinity_at_program_beginning()
    os.execv(started[0], started)


if __name__ == "__main__":
    main()
