"""Where the costs of `fusedmoe plan` and `fusedmoe trace` come from: a file, a published testbed, or this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel


def file_to_write(text: str) -> Path:
    """A path in a folder that is there."""
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def picture_to_write(text: str) -> Path:
    """The same, with an ending that says which kind of picture."""
    path = file_to_write(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path.name} ends in none of .png, .svg and .pdf")
    return path


def read_costs(path: Path) -> CostModel:
    """The costs in a file of `fusedmoe profile`, or of `CostModel.to_json`.

    Raises:
        ConfigError: no such file, or none of these.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--costs {path} cannot be read ({error}); fusedmoe profile --json FILE writes such a file"
        ) from error
    return CostModel.from_json(text)
