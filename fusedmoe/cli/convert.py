"""Convert a checkpoint of an earlier version, which holds pickles.

Reads the checkpoint OLD and writes it to NEW as safetensors and JSON files, which this version
loads. Every byte of OLD is checked first, and nothing in it is executed. OLD stays as it is.
The machine needs as much free memory as the checkpoint has bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusedmoe.cli.settings import Commands, add_parser
from fusedmoe.errors import printable
from fusedmoe.training import convert_checkpoint

EXAMPLES = """\
examples:
  a run's checkpoint, to go on with:
    fusedmoe convert-checkpoint runs/7/checkpoint runs/7/checkpoint.new
"""


def add_command(commands: Commands) -> None:
    """Add `convert-checkpoint` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "convert-checkpoint", __doc__, EXAMPLES, run)
    parser.usage = "fusedmoe convert-checkpoint OLD NEW"
    parser.add_argument("old", type=Path, metavar="OLD", help="the checkpoint to read")
    parser.add_argument("new", type=Path, metavar="NEW", help="where to write it; a checkpoint there is replaced")


def run(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint and return the exit code."""
    convert_checkpoint(arguments.old, arguments.new)
    print(printable(f"converted {arguments.old} to {arguments.new}"))
    return 0
