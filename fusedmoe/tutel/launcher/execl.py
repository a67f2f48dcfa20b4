"""Run one rank's program, bound to its NUMA node: `python -m fusedmoe.tutel.launcher.execl [-m] program …`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError
from fusedmoe.tutel.system import init_affinity_at_program_beginning


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line to execute: a script or module under `python -m fusedmoe.tutel`, or an executable."""
    if not arguments or list(arguments) == ["-m"]:
        raise ConfigError("name a program: a script, `-m module`, or an executable")
    if arguments[0] == "-m" or arguments[0].endswith(".py"):
        return [sys.executable, "-m", "fusedmoe.tutel", *arguments]
    return [shutil.which(arguments[0]) or arguments[0], *arguments[1:]]


if __name__ == "__main__":
    try:
        started = command(sys.argv[1:])
        # Ranks with many threads are not bound to a node.
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # one number per nesting level
        if read_integer("OMP_NUM_THREADS", 1, given={"OMP_NUM_THREADS": threads}) <= 1:
            init_affinity_at_program_beginning()
    except ConfigError as error:
        sys.exit(f"fusedmoe.tutel.launcher.execl: error: {error}")
    os.execv(started[0], started)
