"""Memory of a node that outlives its ranks: files under /dev/shm that live as long as the agent that starts the ranks.

A snapshot is two files: bytes, and a header in JSON that says what they are. The header is removed before the first
byte changes and comes back, by a rename, after the last one: where it is, the bytes are whole, whenever the writer was
killed. Nothing is written to a disk. A header has its own digest, and those of the parts of the bytes.
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
from fusedmoe.files import MOST_BYTES, sealed, unsealed
from fusedmoe.training.survival import keeper

_FAMILY = "fusedmoe-survive-"
_HEADER, _NEW = ".json", ".new"
_SLOT = re.compile(r"\d{1,18}-\d{1,9}-\d")


class NodeMemory:
    """Memory of a host for an agent's ranks, those of now and those after a restart.

    Making it removes what agents that are gone have left there.

    Args:
        agent: the process that starts this node's ranks; by default this process's parent, as under torchrun.
        folder: a file system in memory.
    Attributes:
        name: tells this node from others of the job, the same on all its ranks.
    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, agent: int | None = None, folder: Path = Path("/dev/shm")) -> None:
        if not folder.is_dir():
            raise ConfigError(f"survival: this system has no {folder}, in which copies are kept; it needs Linux")
        self._agent, self._folder = os.getppid() if agent is None else agent, folder
        # Process numbers are given out again: with its start time an agent is told from a later one of its number.
        self._since = keeper.began(self._agent)
        self._prefix = f"{_family()}{self._agent}-{self._since}-"
        self.name = f"{socket.gethostname()}:{folder}/{self._prefix}"
        self._sweep()

    def _sweep(self) -> None:
        # An agent that was killed with its keeper has left its memory: the next job on this host removes it.
        for path in self._folder.glob(f"{_family()}*"):
            with suppress(OSError, ValueError):  # it is gone already, or no file of ours
                agent, since = path.name.removeprefix(_family()).split("-")[:2]
                if keeper.began(int(agent)) != since and path.lstat().st_uid == os.geteuid():
                    path.unlink()

    def keep(self) -> None:
        """Has a process remove all of it when the agent ends. For one rank of the node; again does no harm."""
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self._agent), self._since]
        nowhere: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        # The process holds nothing of this one, and is no child of it.
        subprocess.run([*command, str(self._folder), self._prefix], **nowhere, start_new_session=True, check=True)

    def check(self) -> None:
        """Raises `RankError` if the agent is gone: what is written now nobody would ever remove."""
        if keeper.began(self._agent) != self._since:
            raise RankError("survival: the process that started this rank (torchrun) is gone; start the job again")

    def slot(self, name: str) -> Slot:
        """Returns the slot of this name, whether anything is in it or not."""
        return Slot(self._folder / f"{self._prefix}{name}")

    def headers(self) -> dict[str, dict[str, Any] | None]:
        """Reads the headers of all whole snapshots here, by slot; None for one that is damaged, with a warning."""
        headers: dict[str, dict[str, Any] | None] = {}
        for path in sorted(self._folder.glob(f"{self._prefix}*{_HEADER}")):
            name = path.name.removeprefix(self._prefix).removesuffix(_HEADER)
            try:
                text = _read(path)
                if text is not None and _SLOT.fullmatch(name):
                    headers[name] = unsealed(text, f"survival: {path}")
            except ConfigError as error:
                warn(f"{error}; another copy is looked for, or an older state", stacklevel=2)
                headers[name] = None
        return headers

    def slots(self) -> list[str]:
        """Lists all slots of this user that there are, whole or not."""
        names = set()
        for path in self._folder.glob(f"{self._prefix}*"):
            name = path.name.removeprefix(self._prefix).split(".")[0]
            with suppress(OSError):
                if _SLOT.fullmatch(name) and _stranger(path.lstat()) is None:
                    names.add(name)
        return sorted(names)

    def remove(self, name: str) -> None:
        """Removes a slot, if it is there."""
        # The header first, at any kill: a header without its bytes would pass for a snapshot that is damaged.
        for suffix in (_HEADER, ""):
            (self._folder / f"{self._prefix}{name}{suffix}").unlink(missing_ok=True)

    def write_note(self, note: dict[str, Any]) -> None:
        """Keeps a few facts of the job, in plain types."""
        _write(self._folder / f"{self._prefix}note", sealed(note))

    def note(self) -> dict[str, Any] | None:
        """Returns what `write_note` was given last, by any rank of this node; None before, `ConfigError` if damaged."""
        path = self._folder / f"{self._prefix}note"
        try:
            text = _read(path)
            return None if text is None else unsealed(text, f"survival: {path}")
        except ConfigError as error:
            raise ConfigError(f"{error}. Remove it, and start again from a checkpoint") from error


class Slot:
    """Place for one snapshot: its bytes, and the header that says that they are whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._header = path, path.with_name(path.name + _HEADER)
        self._bytes: Tensor | None = None

    def __str__(self) -> str:
        return str(self._path)

    def begin(self, size: int) -> Tensor:
        """Returns the memory to write into, [size] uint8. What was there before is no snapshot from now on.

        Raises:
            ConfigError: another user has taken its name.
            OSError: there is no room; the message says how much it takes.
        """
        with _taken(self._header):
            self._header.unlink(missing_ok=True)
        # Memory of the right size is kept mapped: pages that are there cost nothing at the next refresh.
        if self._bytes is None or len(self._bytes) != size:
            self._bytes = None
            with _made(self._path) as file:
                try:
                    os.ftruncate(file.fileno(), size)
                    os.posix_fallocate(file.fileno(), 0, max(1, size))  # without it a full file system ends the process
                except OSError as error:
                    with suppress(OSError):
                        self._path.unlink()
                    room = os.statvfs(folder := self._path.parent)
                    raise OSError(
                        f"no room in {folder} for a copy of {size / 1e6:.0f} MB ({error.strerror}; "
                        f"{room.f_bavail * room.f_frsize / 1e6:.0f} MB are free). Give it more (mount -o "
                        "remount,size=…; docker --shm-size), or train without copies"
                    ) from error
                self._bytes = _mapped(file.fileno(), size, mmap.ACCESS_WRITE)
        return self._bytes

    def commit(self, header: dict[str, Any]) -> None:
        """Writes the header: the bytes are whole, and it says what they are."""
        _write(self._header, sealed(header))

    def read(self, size: int) -> Tensor:
        """Returns the bytes of a whole snapshot, [size] uint8; writing into them changes no file."""
        try:
            file = _opened(self._path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"survival: {self._path} cannot be read: {error}") from error
        with file:
            there = os.fstat(file.fileno()).st_size
            if there < size:
                raise ConfigError(f"survival: {self._path} is damaged: it has {there} bytes of {size}")
            return _mapped(file.fileno(), size, mmap.ACCESS_COPY)


def _mapped(file: int, size: int, access: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(file, size, access=access), dtype=torch.uint8)


# Others can write to the folder, too, and know the names: nothing of theirs is read, written or waited for.


def _stranger(found: os.stat_result) -> str | None:
    """Says why a file is none that `_made` made; None if it is one."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & 0o077 or found.st_nlink > 1:
        return "others can open it, or it has a second name"
    return None


def _opened(path: Path, flags: int) -> BinaryIO:
    """Opens a file of this user's own; raises `OSError` where there is none, or it is somebody else's."""
    # O_NOFOLLOW: no link of another user's leads elsewhere; O_NONBLOCK: no pipe of theirs is waited for.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    # Checked is what was opened, whatever the name means later.
    why = _stranger(os.fstat(file))
    if why is not None:
        os.close(file)
        raise PermissionError(errno.EPERM, why, str(path))
    return os.fdopen(file, "r+b" if flags & os.O_RDWR else "rb")


def _made(path: Path) -> BinaryIO:
    """Opens a new file for this user alone, in the place of an own one; `ConfigError` where the name is taken."""
    with _taken(path):
        with suppress(FileNotFoundError):
            why = _stranger(path.lstat())
            if why is not None:
                raise PermissionError(errno.EPERM, why, str(path))
            path.unlink()
        return _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


@contextmanager
def _taken(path: Path) -> Iterator[None]:
    """Says what it means that a name cannot be had."""
    try:
        yield
    except (PermissionError, FileExistsError, IsADirectoryError) as error:
        raise ConfigError(
            f"survival: {path} is not this job's: {error.strerror}. Somebody has taken the name; have it removed, and "
            "start again"
        ) from error


def _read(path: Path) -> str | None:
    """Reads a file of this user's own; returns None where there is none, with a warning where it is another's."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise ConfigError(f"survival: {path} is damaged: it has more than {MOST_BYTES} bytes")
            return file.read(MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:  # another rank may have just removed it
        return None
    except OSError as error:
        why = error.strerror or error
        warn(f"survival: {path} is not this job's and is ignored: {why}", stacklevel=3)
        return None


def _write(path: Path, text: str) -> None:
    """Puts a file in its place whole. Its part has the same beginning of a name, by which it is removed."""
    part = path.with_name(f"{path.name}-{os.getpid()}{_NEW}")
    with _made(part) as file:
        file.write(text.encode())
    try:
        with _taken(path):
            part.replace(path)
    except ConfigError:
        part.unlink()
        raise


def _family() -> str:
    """Returns the beginning of names, of agents whose processes can be seen from here."""
    # The number of the PID namespace: containers that share /dev/shm number their processes apart.
    return f"{_FAMILY}{os.stat('/proc/self/ns/pid').st_ino}-"
