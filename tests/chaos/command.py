"""Shared parts of the commands that write a record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_of(module: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser with `--json`, for `write_record`."""
    parser = argparse.ArgumentParser(
        f"python -m {module}", None, description, examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record there, too")
    return parser


def write_record(record: dict[str, Any], file: Path | None) -> None:
    """Write the record if a file was given."""
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
