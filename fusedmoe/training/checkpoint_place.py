"""The place of a checkpoint: the same for saves and loads, one save at a time, replaced whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError

#: The file that makes a folder a checkpoint.
INDEX = ".metadata"


def real(path: Path) -> Path:
    """The place that a path means to saves and loads, whichever of its folders exist yet."""
    return Path(os.path.realpath(path))


def first_path(path: Path, topology: Topology, operation: str, one_place: bool = False) -> str:
    """Returns the path as rank 0 gives it, by which all ranks name the operation. Collective.

    Args:
        one_place: refuse paths that are not one, neither as they are written nor by what their links stand for.
    Raises:
        RankError: ranks name different places.
    """
    written = os.fspath(path), os.path.abspath(path), str(real(path))
    (first, *places), *others = all_gather_object(topology.world, written, operation)
    for rank, (_, *other) in zip(topology.world.ranks[1:], others, strict=True):
        if one_place and not {*other} & {*places}:
            raise RankError(
                f"rank {topology.rank}: {operation} over the {topology.world} ended because rank "
                f"{topology.world.ranks[0]} gives {places[0]} and rank {rank} {other[0]}. "
                "Give all ranks one path: send them rank 0's, above all if it has the time in it.",
                agreed=True,
            )
    return str(first)


def check_same(room: Path, mark: str, path: Path) -> None:
    """Raises `ConfigError` if the room that rank 0 has made for a save, with a file `mark` in it, is not here."""
    if not os.path.lexists(room / mark):
        raise ConfigError(
            f"{path} is another folder here than on rank 0, on a disk of this node's own. Save to a file system that "
            "all ranks see. What was saved there before stands."
        )


def beside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{suffix}"


def is_checkpoint(path: Path) -> bool:
    return (path / INDEX).is_file()


def saved_at(path: Path) -> Path | None:
    """The folder of the checkpoint that was saved to `path`, None without one."""
    path = real(path)
    if is_checkpoint(path):
        return path
    previous = beside(path, "previous")  # a save was interrupted between its two renames
    return None if path.exists() or not is_checkpoint(previous) else previous


@contextmanager
def room(path: Path, room: Path) -> Iterator[str]:
    """An empty folder `room` that is this job's alone, and gone at the end. Who has it may change what is at `path`.

    Yields:
        the name of a file in it, by which other ranks know it.
    """
    busy = ConfigError(f"another job is saving to {path}. Save to another path, or when it is done.")
    try:
        room.mkdir(parents=True, exist_ok=True)
        folder = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if isinstance(error, FileExistsError | FileNotFoundError) and (room.is_dir() or not os.path.lexists(room)):
            raise busy from error  # it has just gone
        with suppress(OSError):
            room.rmdir()
        raise

    def is_own() -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(folder), room.lstat())
        return False

    try:
        locked = True
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the system drops when the process ends
        except BlockingIOError:
            locked = False
        except OSError:  # a file system without locks
            pass
        if not locked or not is_own():
            raise busy
        try:
            if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
                raise ConfigError(
                    f"{path} exists and is not a checkpoint; it will not be replaced. Save to another path."
                )
            for left in room.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            mark = secrets.token_hex(8)
            (room / mark).touch()
            yield mark
        finally:
            if is_own():
                shutil.rmtree(room, ignore_errors=True)
    finally:
        os.close(folder)


def install(partial: Path, path: Path) -> None:
    """Puts the finished folder in its place. At every moment either `path` or the folder beside it is whole."""
    previous = beside(path, "previous")
    with _synced(partial), _synced(path.parent):
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        try:
            partial.rename(path)
        except BaseException:
            with suppress(OSError):
                previous.rename(path)
            raise
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def _synced(folder: Path) -> Iterator[None]:
    """The names of what is in a folder are on the disk at the start and, as the block leaves them, at the end."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
