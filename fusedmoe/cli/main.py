"""The `fusedmoe` command and its subcommands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any

from fusedmoe import __version__
from fusedmoe.cli import convert, doctor, plan_command, profile, trace, train
from fusedmoe.comm.failure.board import tell_others
from fusedmoe.environment import integer
from fusedmoe.errors import ConfigError, RankError, printable

# How long other ranks wait for rank 0 to say what is wrong, and for the launcher to end them.
_RANK_0_SPEAKS_S = 3.0


class _Command(argparse.ArgumentParser):
    """The parser of one command, which refuses unknown arguments itself, with its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            flags = re.findall(r"--[\w-]+", self.format_help())
            # A misspelt flag is the commonest mistake; argparse itself suggests nothing.
            near = difflib.get_close_matches(rest[0].partition("=")[0], flags, n=1, cutoff=0.7)
            advice = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists what there is"
            self.error(f"unrecognized arguments: {' '.join(rest)}; {advice}")
        return parsed, rest


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands. Each sets `run`: a function of the arguments that returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fusedmoe",
        description="Mixture-of-experts training on PyTorch whose communication hides behind computation.",
        epilog="fusedmoe COMMAND --help explains a command. Under torchrun: torchrun … -m fusedmoe COMMAND …",
    )
    parser.add_argument("--version", action="version", version=f"fusedmoe {__version__}")
    kind: type[argparse.ArgumentParser] = _Command
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=kind)
    for command in (train, profile, plan_command, trace, doctor, convert):
        command.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 1 for an error of a rank, 2 for arguments that cannot work.

    Under a launcher all ranks get the same arguments and find the same faults in them: rank 0 reports them, and the
    launcher ends the other ranks. A fault that only another rank has found is reported by that rank.
    """
    rank = 0
    # Names of files may be in no encoding, and printing one must not end a job.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        rank = integer("RANK", 0, 0)
        parsed = _parse(arguments, quiet=rank > 0)
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if _is_read():
            raise
        return 1
    except ConfigError as error:
        if rank:
            time.sleep(_RANK_0_SPEAKS_S)
        print(f"fusedmoe: error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        # Without a file's name it is no mistake of the user's, and the traceback is wanted.
        if error.filename is None:
            raise
        print(f"fusedmoe: error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except RankError as error:
        print(f"fusedmoe: error: {printable(str(error))}", file=sys.stderr, flush=True)
        # The others wait somewhere else for this rank: they end with its reason.
        tell_others(error)
        return 1


def _is_read() -> bool:
    """Returns whether anybody still reads the output; else what is left of it goes nowhere."""
    look = select.poll()
    look.register(sys.stdout, 0)
    if not look.poll(0):
        return True
    # `head`, say, has seen enough. Python flushes once more at its end, and would complain.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return False


def _parse(arguments: Sequence[str] | None, quiet: bool) -> argparse.Namespace:
    parser = make_parser()
    if not quiet:
        return parser.parse_args(arguments)
    # Rank 0 prints usage and errors; the same from every rank would be unreadable.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            return parser.parse_args(arguments)
        except SystemExit as end:
            if end.code:
                time.sleep(_RANK_0_SPEAKS_S)
            raise
