"""Files: non-blocking reads, atomic writes, and cache files with a digest."""

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

#: Maximum size of a text file in bytes.
MAX_TEXT_BYTES = 2**28

#: Environment variable with the folder for cache files.
CACHE = "FUSEDMOE_CACHE"

_DIGEST = "sha256"
_PART = ".part"
# Older temporary files belong to a killed writer.
_STALE_S = 3600.0


def read_regular_file(path: Path, most: int) -> bytes:
    """Return the contents of a regular file. Raise `OSError` for other kinds, and for more than `most` bytes."""
    # O_NONBLOCK: do not wait for a pipe or device.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        # One more byte, in case the file has grown.
        data = b"" if found.st_size > most else file.read(most + 1)
        if max(found.st_size, len(data)) > most:
            raise OSError(f"more than {most} bytes")
        return data


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a UTF-8 file (`errors` as in `bytes.decode`). Raise `ConfigError` with the path."""
    try:
        return read_regular_file(path, MAX_TEXT_BYTES).decode(errors=errors)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new contents. An `OSError` leaves the old file."""
    part = path.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def parse_json(text: str, what: str) -> Any:
    """Parse JSON; verify and remove the digest of `dump_with_digest` if it has one.

    Raise `ConfigError` that starts with `what` if the text is not JSON or the digest differs.
    """
    held, digest = _split(text, what)
    if _has_damaged_key(held, digest) or digest not in (None, _digest(held)):
        raise ConfigError(f'{what}: damaged or edited (digest mismatch). If you edited it, remove its "{_DIGEST}"')
    return held


def _split(text: str, what: str) -> tuple[Any, Any]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: not JSON ({error})") from error
    return held, held.pop(_DIGEST, None) if isinstance(held, dict) else None


def cache_dir() -> Path:
    """Return the folder of cache files: `$FUSEDMOE_CACHE`, or ~/.cache/fusedmoe."""
    given = os.environ.get(CACHE)
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "fusedmoe"
    except RuntimeError:
        # Without a home folder nothing is cached: writing to this path raises `OSError`.
        return Path(os.devnull, "this user has no home folder")


def write_cache_file(path: Path, text: str) -> None:
    """Write a JSON object with its digest for `read_cache_file`. Safe for concurrent jobs."""
    held = json.loads(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Newer temporary files may belong to a running job.
    for part in path.parent.glob(f".*{_PART}"):
        with suppress(OSError):
            if part.stat().st_mtime < time.time() - _STALE_S:
                part.unlink()
    write_text(path, dump_with_digest(held, indent=1) + "\n")


def read_cache_file(path: Path) -> str | None:
    """Return the JSON written by `write_cache_file`; None if missing, or with a warning if damaged."""
    try:
        held = load_with_digest(read_text(path), str(path))
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            warn(f"{error}. The file is ignored and written again if possible", stacklevel=3)
        return None
    return json.dumps(held)


def dump_with_digest(held: dict[str, Any], indent: int | None = None) -> str:
    held = {key: value for key, value in held.items() if key != _DIGEST}
    return json.dumps(held | {_DIGEST: _digest(held)}, indent=indent)


def load_with_digest(text: str, what: str) -> dict[str, Any]:
    """Return the object passed to `dump_with_digest`. Raise `ConfigError` that starts with `what` if it is damaged."""
    held, digest = _split(text, f"{what} is damaged")
    if digest is None or digest != _digest(held):
        raise ConfigError(f"{what} is damaged (digest mismatch)")
    return dict(held)


def _has_damaged_key(held: Any, digest: Any) -> bool:
    """Return whether an object without a digest has one under another key."""
    values = held.values() if isinstance(held, dict) and digest is None else ()
    return any(isinstance(value, str) and len(value) == 2 * hashlib.sha256().digest_size for value in values)


def _digest(held: Any) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
