"""Node memory that outlives its ranks: files in /dev/shm that exist as long as the agent that starts the ranks.

A snapshot consists of two files: the bytes, and a JSON header with digests of itself and of each part of the bytes. The
header exists only while the bytes are complete, whenever the writer is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError, RankError, warn
from fusedmoe.files import MAX_TEXT_BYTES, dump_with_digest, load_with_digest
from fusedmoe.training.survival import keeper

_FAMILY = "fusedmoe-survive-"
_HEADER, _NEW = ".json", ".new"
_SLOT = re.compile(r"\d{1,18}-\d{1,9}-\d")


class NodeMemory:
    """Memory of a host shared by an agent's ranks across restarts. Removes files of ended agents on construction.

    Args:
        agent: PID of the process that starts this node's ranks; by default this process's parent, as under torchrun.
        folder: in a memory file system.
    Attributes:
        name: identifies the node within the job; equal on all its ranks.
    Raises:
        ConfigError: the folder does not exist.
    """

    def __init__(self, agent: int | None = None, folder: Path = Path("/dev/shm")) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"survival: {folder} does not exist; survival needs Linux with a memory file system there"
            )
        self._agent, self._folder = os.getppid() if agent is None else agent, folder
        # PIDs are reused; the start time distinguishes agents.
        self._agent_start_time = keeper.start_time(self._agent)
        self._prefix = f"{_name_prefix()}{self._agent}-{self._agent_start_time}-"
        self.name = f"{socket.gethostname()}:{folder}/{self._prefix}"
        self._sweep()

    def _sweep(self) -> None:
        # An agent killed together with its keeper leaves files.
        for path in self._folder.glob(f"{_name_prefix()}*"):
            with suppress(OSError, ValueError):
                agent, since = path.name.removeprefix(_name_prefix()).split("-")[:2]
                if keeper.start_time(int(agent)) != since and path.lstat().st_uid == os.geteuid():
                    path.unlink()

    def keep(self) -> None:
        """Start a detached process that deletes this memory's files when the agent ends.

        Call on one rank per node; idempotent.
        """
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self._agent), self._agent_start_time]
        nowhere: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run([*command, str(self._folder), self._prefix], **nowhere, start_new_session=True, check=True)

    def check(self) -> None:
        """Raise `RankError` if the agent has ended: nothing would remove files written now."""
        if keeper.start_time(self._agent) != self._agent_start_time:
            raise RankError("survival: the process that started this rank (torchrun) has ended; restart the job")

    def slot(self, name: str) -> Slot:
        return Slot(self._folder / f"{self._prefix}{name}")

    def headers(self) -> dict[str, dict[str, Any] | None]:
        """Return the headers of all complete snapshots by slot; None, with a warning, for a damaged header."""
        headers: dict[str, dict[str, Any] | None] = {}
        for path in sorted(self._folder.glob(f"{self._prefix}*{_HEADER}")):
            name = path.name.removeprefix(self._prefix).removesuffix(_HEADER)
            try:
                text = _read(path)
                if text is not None and _SLOT.fullmatch(name):
                    headers[name] = load_with_digest(text, f"survival: {path}")
            except ConfigError as error:
                warn(f"{error}; using another copy or an older state", stacklevel=2)
                headers[name] = None
        return headers

    def slots(self) -> list[str]:
        names = set()
        for path in self._folder.glob(f"{self._prefix}*"):
            name = path.name.removeprefix(self._prefix).split(".")[0]
            with suppress(OSError):
                if _SLOT.fullmatch(name) and _ownership_problem(path.lstat()) is None:
                    names.add(name)
        return sorted(names)

    def remove(self, name: str) -> None:
        # Header first: a header without bytes would be reported as damage.
        for suffix in (_HEADER, ""):
            (self._folder / f"{self._prefix}{name}{suffix}").unlink(missing_ok=True)

    def write_note(self, note: dict[str, Any]) -> None:
        _write(self._folder / f"{self._prefix}note", dump_with_digest(note))

    def note(self) -> dict[str, Any] | None:
        """Return the last note written by any rank of the node, or None. Raise `ConfigError` if it is damaged."""
        path = self._folder / f"{self._prefix}note"
        try:
            text = _read(path)
            return None if text is None else load_with_digest(text, f"survival: {path}")
        except ConfigError as error:
            raise ConfigError(f"{error}. Remove it, and restart from a checkpoint") from error


class Slot:
    """Storage of one snapshot: its bytes, and the header that marks them complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._header = path, path.with_name(path.name + _HEADER)
        self._bytes: Tensor | None = None

    def __str__(self) -> str:
        return str(self._path)

    def begin(self, size: int) -> Tensor:
        """Invalidate the snapshot and return writable memory [size] uint8.

        Raises:
            ConfigError: another user owns a file of this name.
            OSError: not enough memory.
        """
        with _foreign_name_errors(self._header):
            self._header.unlink(missing_ok=True)
        # Memory of the right size stays mapped: its pages are allocated.
        if self._bytes is None or len(self._bytes) != size:
            self._bytes = None
            with _create_file(self._path) as file:
                try:
                    os.ftruncate(file.fileno(), size)
                    os.posix_fallocate(file.fileno(), 0, max(1, size))  # without it, a full file system raises SIGBUS
                except OSError as error:
                    with suppress(OSError):
                        self._path.unlink()
                    room = os.statvfs(folder := self._path.parent)
                    raise OSError(
                        f"no room in {folder} for a copy of {size / 1e6:.0f} MB ({error.strerror}; "
                        f"{room.f_bavail * room.f_frsize / 1e6:.0f} MB are free). Enlarge it (mount -o "
                        "remount,size=…; docker --shm-size), or train without survival"
                    ) from error
                self._bytes = _map_memory(file.fileno(), size, mmap.ACCESS_WRITE)
        return self._bytes

    def complete(self, header: dict[str, Any]) -> None:
        _write(self._header, dump_with_digest(header))

    def read(self, size: int) -> Tensor:
        """Return the bytes of a complete snapshot, [size] uint8, as a copy-on-write mapping.

        Raises:
            ConfigError: the file cannot be read or is too short.
        """
        try:
            file = _open_own_file(self._path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"survival: {self._path} cannot be read: {error}") from error
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes < size:
                raise ConfigError(f"survival: {self._path} is damaged: it has {num_bytes} bytes of {size}")
            return _map_memory(file.fileno(), size, mmap.ACCESS_COPY)


def _map_memory(file: int, size: int, access: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(file, size, access=access), dtype=torch.uint8)


# Other users can write to the folder, and names are predictable: never read, write or wait for their files.


def _ownership_problem(found: os.stat_result) -> str | None:
    """Return why `_create_file` cannot have created a file; None if it can have."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & 0o077 or found.st_nlink > 1:
        return "others can open it, or it has a second name"
    return None


def _open_own_file(path: Path, flags: int) -> BinaryIO:
    # O_NOFOLLOW rejects symbolic links; O_NONBLOCK avoids blocking on a named pipe.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    # Another user may rebind the name at any time.
    why = _ownership_problem(os.fstat(file))
    if why is not None:
        os.close(file)
        raise PermissionError(errno.EPERM, why, str(path))
    return os.fdopen(file, "r+b" if flags & os.O_RDWR else "rb")


def _create_file(path: Path) -> BinaryIO:
    """Create a file only for this user, replacing a file of this user. `ConfigError` if another user owns the name."""
    with _foreign_name_errors(path):
        with suppress(FileNotFoundError):
            why = _ownership_problem(path.lstat())
            if why is not None:
                raise PermissionError(errno.EPERM, why, str(path))
            path.unlink()
        return _open_own_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


@contextmanager
def _foreign_name_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (PermissionError, FileExistsError, IsADirectoryError) as error:
        raise ConfigError(
            f"survival: {path} is not this job's: {error.strerror}. Another user owns this name; remove "
            "the file and restart the job"
        ) from error


def _read(path: Path) -> str | None:
    """Read a file of this user; return None if it is missing or, with a warning, cannot be opened."""
    try:
        with _open_own_file(path, os.O_RDONLY) as file:
            if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
                raise ConfigError(f"survival: {path} is damaged: it has more than {MAX_TEXT_BYTES} bytes")
            return file.read(MAX_TEXT_BYTES).decode(errors="replace")
    except FileNotFoundError:  # another rank may have removed it
        return None
    except OSError as error:
        why = error.strerror or error
        warn(f"survival: {path} is not this job's and is ignored: {why}", stacklevel=3)
        return None


def _write(path: Path, text: str) -> None:
    """Write a file atomically. The temporary file has the same prefix: the keeper would remove it, too."""
    part = path.with_name(f"{path.name}-{os.getpid()}{_NEW}")
    with _create_file(part) as file:
        file.write(text.encode())
    try:
        with _foreign_name_errors(path):
            part.replace(path)
    except ConfigError:
        part.unlink()
        raise


def _name_prefix() -> str:
    # PID namespaces: containers that share /dev/shm have overlapping PIDs.
    return f"{_FAMILY}{os.stat('/proc/self/ns/pid').st_ino}-"
