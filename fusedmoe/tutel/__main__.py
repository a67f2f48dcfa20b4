"""`python -m fusedmoe.tutel script.py …` or `-m module …`: an unmodified client of Tutel on this library."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec

from fusedmoe.environment import integer, seconds
from fusedmoe.errors import ConfigError
from fusedmoe.tutel import EXAMPLES, install, real_name

_USAGE = "usage: python -m fusedmoe.tutel (script.py | -m module) [arguments …]"


def main(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        print(f"{__doc__}\n{_USAGE}")
        return
    if not arguments or arguments == ["-m"]:
        sys.exit(_USAGE)
    try:
        _check_environment()
    except ConfigError as error:
        sys.exit(f"fusedmoe.tutel: error: {error}")
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(_module(arguments[1]), run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    # As Python itself would have done for the script.
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def _check_environment() -> None:
    """Refuse variables with which the script could not start its ranks, in one line and before it runs."""
    seconds("TUTEL_GLOBAL_TIMEOUT_SEC", 1.0)
    ranks = integer("WORLD_SIZE", 1, 1)
    integer("RANK", 0, 0, ranks - 1)
    integer("LOCAL_RANK", 0, 0)
    integer("LOCAL_WORLD_SIZE", 1, 1)


def _module(name: str) -> str:
    """Returns the name under which a module can be run; ends the program where it comes with Tutel and is not here."""
    if name != EXAMPLES and not name.startswith(f"{EXAMPLES}."):
        return real_name(name)
    if find_spec(EXAMPLES) is None or find_spec(name) is None:
        sys.exit(
            f"{name} is not here: examples come with Tutel. Run this in a checkout of Tutel, the folder that holds "
            "tutel/examples, or put that folder on PYTHONPATH; they will run on this library. Its own training loop "
            "takes the flags of Tutel's helloworld: python examples/tutel_helloworld.py"
        )
    return name


if __name__ == "__main__":
    main(sys.argv[1:])
