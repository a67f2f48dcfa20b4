"""Run an unmodified Tutel script on fusedmoe: `python -m fusedmoe.tutel script.py …` or `-m module …`."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec

from fusedmoe.environment import read_integer, read_seconds
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
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def _check_environment() -> None:
    """Raise `ConfigError` if environment variables for starting ranks are invalid."""
    read_seconds("TUTEL_GLOBAL_TIMEOUT_SEC", 1.0)
    ranks = read_integer("WORLD_SIZE", 1, 1)
    read_integer("RANK", 0, 0, ranks - 1)
    read_integer("LOCAL_RANK", 0, 0)
    read_integer("LOCAL_WORLD_SIZE", 1, 1)


def _module(name: str) -> str:
    """Return the module to run. Exit if it is one of Tutel's examples, and Tutel is not installed."""
    if name != EXAMPLES and not name.startswith(f"{EXAMPLES}."):
        return real_name(name)
    if find_spec(EXAMPLES) is None or find_spec(name) is None:
        sys.exit(
            f"{name} was not found: the examples are part of Tutel. Run this in a Tutel checkout (the folder with "
            "tutel/examples), or add it to PYTHONPATH. Alternatively, this example accepts the flags of Tutel's "
            "helloworld: python examples/tutel_helloworld.py"
        )
    return name


if __name__ == "__main__":
    main(sys.argv[1:])
