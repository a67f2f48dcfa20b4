"""Where metrics go: lines of JSON in a file, or TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fusedmoe.errors import ConfigError


class Sink(Protocol):
    """Takes what was collected; on one rank, as all of them collect the same."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...


class JsonLines:
    """A line of JSON for each collection, {"step": 20, "moe/max_vio": …}, added to what the file has.

    Each line is on its way to the disk when `write` returns, so that a job that is killed leaves the lines before.

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class TensorBoard:
    """Curves in TensorBoard, by `torch.utils.tensorboard`.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard needs its package ({error}): pip install tensorboard, or use JsonLines"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Writes what is kept."""
        self._writer.close()
