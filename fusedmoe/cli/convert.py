"""`fusedmoe convert-checkpoint`: checkpoints of an earlier version without pickles."""

from __future__ import annotations

import argparse

from fusedmoe.errors import printable
from fusedmoe.training.earlier_formats import convert_checkpoint


def run(arguments: argparse.Namespace) -> int:
    convert_checkpoint(arguments.old, arguments.new)
    print(printable(f"converted {arguments.old} to {arguments.new}"))
    return 0
