"""`python -m fusedmoe.tutel script.py …` or `-m module …`: an unmodified client of Tutel on this library."""

from __future__ import annotations

import os
import runpy
import sys

from fusedmoe.tutel.aliases import install, real_name

_USAGE = "usage: python -m fusedmoe.tutel (script.py | -m module) [arguments …]"


def main(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        print(f"{__doc__}\n{_USAGE}")
        return
    if not arguments or arguments == ["-m"]:
        sys.exit(_USAGE)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(real_name(arguments[1]), run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
