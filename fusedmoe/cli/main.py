"""The `fusedmoe` command and its subcommands."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper

from fusedmoe.cli import doctor, loads, plan_command, profile, simulate_command, trace, train
from fusedmoe.comm.uncaught import tell_others
from fusedmoe.errors import ConfigError, RankError

# How long other ranks wait for rank 0 to say what is wrong, and for the launcher to end them.
_RANK_0_SPEAKS_S = 3.0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each one sets `run`: a function of the arguments that returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fusedmoe",
        description="Mixture-of-experts training on PyTorch whose communication hides behind computation.",
        epilog="fusedmoe COMMAND --help explains a command. Under torchrun: torchrun … -m fusedmoe.cli COMMAND …",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train.add_command(commands)
    profile.add_command(commands)
    plan_command.add_command(commands)
    trace.add_command(commands)
    simulate_command.add_command(commands)
    loads.add_command(commands)
    doctor.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 1 for an error of a rank, 2 for arguments that cannot work.

    Under a launcher all ranks are given the same arguments and find the same faults in them: rank 0 says so, and the
    launcher ends the others. What only another rank has found is said by that rank.
    """
    rank = int(os.environ.get("RANK", 0))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be in no encoding
    try:
        parsed = _parse(arguments, quiet=rank > 0)
        return int(parsed.run(parsed))
    except ConfigError as error:
        if rank:
            time.sleep(_RANK_0_SPEAKS_S)
        print(f"fusedmoe: error: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"fusedmoe: error: {error}", file=sys.stderr, flush=True)
        return 1
    except RankError as error:
        print(f"fusedmoe: error: {error}", file=sys.stderr, flush=True)
        tell_others(error)
        return 1


def _parse(arguments: Sequence[str] | None, quiet: bool) -> argparse.Namespace:
    parser = make_parser()
    if not quiet:
        return parser.parse_args(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            return parser.parse_args(arguments)
        except SystemExit as end:
            if end.code:
                time.sleep(_RANK_0_SPEAKS_S)
            raise
