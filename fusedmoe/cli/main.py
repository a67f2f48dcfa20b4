"""The `fusedmoe` command: parser of all subcommands, dispatch and exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

from fusedmoe import __version__
from fusedmoe.cli.commands import add_commands
from fusedmoe.cli.settings import describe_error
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError, RankError, printable

# Rank 0 prints the error and the launcher terminates the other ranks within this time.
_RANK_0_PRINT_S = 3.0


class _CommandParser(argparse.ArgumentParser):
    """Parser of one subcommand, whose errors show the usage of that subcommand."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            flags = re.findall(r"--[\w-]+", self.format_help())
            near = difflib.get_close_matches(rest[0].partition("=")[0], flags, n=1, cutoff=0.7)
            advice = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists all flags"
            self.error(f"unrecognized arguments: {' '.join(rest)}; {advice}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        near = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), n=1) if found else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


class _PrintCompletion(argparse.Action):
    """Print the completion script of a shell and exit."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        try:
            shtab: Any = import_module("shtab")
        except ImportError as error:
            raise ConfigError("--print-completion needs the package shtab: pip install shtab") from error
        print(shtab.complete(parser, values))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands. Each sets `module`, whose `run` maps parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="fusedmoe",
        description="Train mixture-of-experts models with communication overlapped with computation.",
        epilog="Run fusedmoe COMMAND --help for its flags. With torchrun: torchrun … -m fusedmoe COMMAND …",
    )
    parser.set_defaults(module=None)
    parser.add_argument("--version", action="version", version=f"fusedmoe {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh"),
        action=_PrintCompletion,
        help="print a completion script for a shell (needs shtab): fusedmoe --print-completion bash > "
        "~/.local/share/bash-completion/completions/fusedmoe",
    )
    kind: type[argparse.ArgumentParser] = _CommandParser
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=kind)
    add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 1 for an error on a rank, 2 for invalid arguments.

    All ranks detect the same `ConfigError`: rank 0 prints it, and the launcher terminates the other ranks. An error
    that only another rank raises is printed by that rank.
    """
    rank = 0
    # Printing a file name that cannot be encoded must not raise.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        rank = read_integer("RANK", 0, 0)
        parsed = _parse(arguments, quiet=rank > 0)
        code = 0 if parsed.module is None else int(import_module(parsed.module).run(parsed))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if _has_stdout_reader():
            raise
        return 1
    except ConfigError as error:
        if rank:
            time.sleep(_RANK_0_PRINT_S)
        print(f"fusedmoe: error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        # Without a file name it is a bug, not a wrong path: keep the traceback.
        if error.filename is None:
            raise
        print(f"fusedmoe: error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except RankError as error:
        print(f"fusedmoe: error: {describe_error(error)}", file=sys.stderr, flush=True)
        # Other ranks may be waiting for this rank: they raise the same error.
        import_module("fusedmoe.comm.failure.board").post_fatal_exception(error)
        return 1


def _has_stdout_reader() -> bool:
    """Return whether stdout has a reader. If not (`head` has exited, say), redirect stdout to /dev/null."""
    look = select.poll()
    look.register(sys.stdout, 0)
    if not look.poll(0):
        return True
    # Python flushes stdout at exit and would raise again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return False


def _parse(arguments: Sequence[str] | None, quiet: bool) -> argparse.Namespace:
    parser = make_parser()
    # Only rank 0 prints usage and errors.
    with open(os.devnull, "w") as nowhere, ExitStack() as redirected:
        if quiet:
            redirected.enter_context(redirect_stdout(nowhere))
            redirected.enter_context(redirect_stderr(nowhere))
        try:
            parsed = parser.parse_args(arguments)
            if parsed.module is None:
                parser.print_help()
            return parsed
        except SystemExit as end:
            if quiet and end.code:
                time.sleep(_RANK_0_PRINT_S)
            raise
