"""A file that remembers verdicts and choices of one kind of GPU, for the next run."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path


class Record:
    """What is known, in memory and in a JSON file.

    The file serves only: one that is missing, damaged or cannot be written costs tuning again, never a run. Each
    process writes all it knows and what it finds, whole or not at all. Where two write at once, one's news may be lost
    until it writes again; what is there is always whole.

    Args:
        file: or None, to remember only as long as this object lives.
    Attributes:
        faults: of a configuration in a variant; "" where it is right.
        choices: of a key: {"config": ..., "microseconds": {config: ...}}.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.faults: dict[str, str] = {}
        self.choices: dict[str, dict[str, object]] = {}
        self._read()

    def save(self) -> None:
        if self._file is None:
            return
        self._read()
        text = json.dumps({"faults": self.faults, "choices": self.choices}, indent=1, sort_keys=True)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent, prefix=f".{self._file.name}.")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._file)
            except OSError:
                os.unlink(name)
                raise

    def _read(self) -> None:
        """Adds what the file knows and this object does not."""
        if self._file is None:
            return
        try:
            found = json.loads(self._file.read_text())
            faults, choices = dict(found["faults"]), dict(found["choices"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        faults = {name: fault for name, fault in faults.items() if isinstance(fault, str)}
        choices = {key: choice for key, choice in choices.items() if isinstance(choice, dict)}
        self.faults = {**faults, **self.faults}
        self.choices = {**choices, **self.choices}


def default_folder() -> Path | None:
    """$FUSEDMOE_CACHE, or ~/.cache/fusedmoe; None where there is no home."""
    named = os.environ.get("FUSEDMOE_CACHE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "fusedmoe"
    except RuntimeError:
        return None
