"""Files: read without waiting, written whole or not at all, and what a job keeps for the next ones with its digest."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError, warn

#: No file that is read as text is larger, by far.
MOST_BYTES = 2**28

#: The environment variable that says where files lie that jobs keep for the next ones.
CACHE = "FUSEDMOE_CACHE"

_DIGEST = "sha256"
_PART = ".part"
# What is still a part after so long, its writer was killed.
_STALE_S = 3600.0


def regular_bytes(path: Path, most: int) -> bytes:
    """Returns what is in a file. Raises `OSError` for anything but a file, and for one of more than `most` bytes."""
    # A pipe or a device is not waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is a pipe or a device, and not a file")
        # It may have grown since: one byte more than it may have tells.
        data = b"" if found.st_size > most else file.read(most + 1)
        if max(found.st_size, len(data)) > most:
            raise OSError(f"it has more than {most} bytes")
        return data


def read_text(path: Path, errors: str = "strict") -> str:
    """Returns the text of a file in UTF-8, with `errors` as in `bytes.decode`. A `ConfigError` names the file."""
    try:
        return regular_bytes(path, MOST_BYTES).decode(errors=errors)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write_text(path: Path, text: str) -> None:
    """Puts a file in its place: a reader sees the old one or the new one, never a part. After an `OSError` the old one
    is still there, and nothing else."""
    part = path.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def parse_json(text: str, what: str) -> Any:
    """Reads JSON; an object that `sealed` wrote is checked and loses its digest. A `ConfigError` begins with `what`."""
    held, digest = _split(text, what)
    if digest not in (None, _digest(held)):
        raise ConfigError(f'{what}: not as it was written. If you have changed it, take its "{_DIGEST}" out')
    return held


def _split(text: str, what: str) -> tuple[Any, Any]:
    """Separates an object in JSON from its digest, which is None where it has none."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: not JSON ({error})") from error
    return held, held.pop(_DIGEST, None) if isinstance(held, dict) else None


def cache_dir() -> Path:
    """Returns the folder of kept files: `$FUSEDMOE_CACHE`, or else ~/.cache/fusedmoe."""
    given = os.environ.get(CACHE)
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "fusedmoe"
    except RuntimeError:
        # Without HOME, and without an entry in the password file: a folder that cannot be made, so that nothing is
        # kept, and whoever writes gets an `OSError`.
        return Path(os.devnull, "this user has no home folder")


def write_kept(path: Path, text: str) -> None:
    """Writes an object in JSON and its digest, for `read_kept`; any number of jobs may do so at once. Of what cannot be
    written (`OSError`) nothing is left."""
    held = json.loads(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Parts whose writers were killed; younger ones may still be written by another job.
    for part in path.parent.glob(f".*{_PART}"):
        with suppress(OSError):
            if part.stat().st_mtime < time.time() - _STALE_S:
                part.unlink()
    write_text(path, sealed(held, indent=1) + "\n")


def read_kept(path: Path) -> str | None:
    """Returns the object that `write_kept` wrote, in JSON; None without one, and with a warning for a damaged one."""
    try:
        held = unsealed(read_text(path), str(path))
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            warn(f"{error}. It is ignored, and written anew where that is possible", stacklevel=3)
        return None
    return json.dumps(held)


def sealed(held: dict[str, Any], indent: int | None = None) -> str:
    """Returns an object in JSON with its digest, for `parse_json` and `unsealed`."""
    held = {key: value for key, value in held.items() if key != _DIGEST}
    return json.dumps(held | {_DIGEST: _digest(held)}, indent=indent)


def unsealed(text: str, what: str) -> dict[str, Any]:
    """Returns the object that `sealed` was given, as JSON gives it back. A `ConfigError` begins with `what`."""
    held, digest = _split(text, f"{what} is damaged")
    if digest is None or digest != _digest(held):
        raise ConfigError(f"{what} is not as it was written")
    return dict(held)


def _digest(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
