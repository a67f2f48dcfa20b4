"""Folders of checkpoints: one save at a time, replaced whole or not at all, read in parts.

torch.distributed.checkpoint calls collectives of its own, without bounds. Its planners do not; they say which parts of
tensors a rank writes and reads, so that a rank that fails or does not come ends the others by name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError, warn
from fusedmoe.training.checkpoint_index import (
    INDEX,
    FilePart,
    TensorPart,
    Written,
    has_elements,
    tensor_key,
    write_index,
    write_parts,
)
from fusedmoe.training.copies import local_part
from fusedmoe.training.plain_values import EncodedValue, encode_value, require_storable
from fusedmoe.training.shard_spec import RowShard

#: The index of formats 1 and 2.
EARLIER_INDEX = ".metadata"


def real(path: Path) -> Path:
    """Returns the place that a path means to saves and loads, whichever of its folders exist yet."""
    return Path(os.path.realpath(path))


def first_path(path: Path, topology: Topology, operation: str, one_place: bool = False) -> str:
    """Returns the path as rank 0 gives it, by which all ranks name the operation. Collective.

    With `one_place` it raises `RankError` where ranks name different places.
    """
    # Paths are one place where they are the same as they are written, or by what their links stand for.
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
    """Returns a hidden place in the same folder as `path`: a rename from there to `path` crosses no file system."""
    return path.parent / f".{path.name}.{suffix}"


def is_checkpoint(path: Path) -> bool:
    """Returns whether a checkpoint, of this format or an earlier one, lies at `path`: a folder with an index."""
    return (path / INDEX).is_file() or (path / EARLIER_INDEX).is_file()


def saved_at(path: Path) -> Path | None:
    """Returns the folder of the checkpoint that was saved to `path`, None without one."""
    path = real(path)
    if is_checkpoint(path):
        return path
    # A save was interrupted between its two renames: the checkpoint before it is whole, under its other name.
    previous = beside(path, "previous")
    return None if path.exists() or not is_checkpoint(previous) else previous


@contextmanager
def room(path: Path, room: Path) -> Iterator[str]:
    """Makes an empty folder `room`, gone at the end, whose job alone may change what is at `path`.

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

    # Another job may have removed the folder and made one of its own by this name, in spite of the lock.
    def isown_part() -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(folder), room.lstat())
        return False

    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the system drops when the process ends
            except BlockingIOError:
                raise busy from None
        if not isown_part():
            raise busy
        try:
            if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
                raise ConfigError(
                    f"{path} exists and is not a checkpoint; it will not be replaced. Save to another path."
                )
            for left in room.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            # By chance: a folder of this name on another disk may have the mark of an earlier save.
            mark = secrets.token_hex(8)
            (room / mark).touch()
            yield mark
        finally:
            if isown_part():
                _remove(room, f"saving to {path}: the folder in which the checkpoint is put together")
    finally:
        os.close(folder)


def install(partial: Path, path: Path) -> None:
    """Puts the finished folder in its place. At every moment either `path` or the folder beside it is whole."""
    previous = beside(path, "previous")
    _sync(partial)
    _sync(path.parent)
    # A folder cannot replace one that is not empty in one step: between these two renames `saved_at` finds the
    # earlier checkpoint under its other name.
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    try:
        partial.rename(path)
    except BaseException:
        with suppress(OSError):
            previous.rename(path)
        raise
    # The save has succeeded: a failure from here on is a warning.
    try:
        _sync(path.parent)
    except OSError as error:
        warn(f"checkpoint {path} is in place, and may be lost if the system fails now: {error}", stacklevel=2)
    _remove(previous, f"checkpoint {path} is in place. The previous one")


def _remove(folder: Path, what: str) -> None:
    """Remove a folder. A warning, which begins with `what`, names the folder if that fails."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # which goes on after the first file that stays
        if os.path.lexists(folder):
            warn(f"{what} could not be removed from {folder}: {error}. Remove that folder.", stacklevel=2)


def _sync(folder: Path) -> None:
    """Write the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(path: Path, entries: Callable[[], dict[str, Any]], topology: Topology, operation: str) -> None:
    """Write every rank's entries to `path`, replacing a checkpoint that stands there. Collective over all ranks.

    Args:
        entries: returns tensors, DTensors and plain values by key. An entry that several ranks hold is returned by one
            of them only.
    """
    path = real(path)  # what a link stands for is replaced, not the link
    own_room = beside(path, "partial")
    unfinished = own_room / "checkpoint"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = topology.is_first
    values: dict[str, EncodedValue] = {}

    def plan() -> SavePlan:
        # A value or tensor that a load would refuse is refused here, before a file is made.
        tensors, values_of_rank = split_entries(entries(), operation)
        values.update(values_of_rank)
        # PyTorch's planners deduplicate what several ranks hold; here one rank alone has each entry, by `writes`.
        planner.set_up_planner(tensors, None, first)
        return planner.create_local_plan()

    def write(own: SavePlan) -> Written:
        unfinished.mkdir(parents=True, exist_ok=True)
        return write_parts(unfinished, topology.world.index, _parts(own, planner), values)

    def finish(plans: list[SavePlan], of_ranks: list[Written]) -> None:
        for rank, written in zip(topology.world.ranks, of_ranks, strict=True):
            _check_there(unfinished, written.all(), rank)
        _, metadata = planner.create_global_plan(plans)
        write_index(unfinished, metadata, of_ranks)
        install(unfinished, path)

    def on_all(action: Callable[[], Any]) -> list[Any]:
        return on_all_ranks(topology.world, operation, action)

    # Five exchanges, each of which ends all ranks if one fails: plans; rank 0 makes the room; all see the same one;
    # data; and rank 0 puts it in its place.
    with ExitStack() as own:
        plans = on_all(plan)
        marks = on_all(lambda: own.enter_context(room(path, own_room)) if first else "")
        on_all(lambda: check_same(own_room, marks[0], path))
        of_ranks = on_all(lambda: write(plans[topology.world.index]))
        on_all(lambda: finish(plans, of_ranks) if first else None)


def split_entries(entries: dict[str, Any], operation: str) -> tuple[dict[str, Tensor], dict[str, EncodedValue]]:
    """Separate tensors, those of values included, from values. `ConfigError` for what checkpoints do not store."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, EncodedValue] = {}
    for key, entry in entries.items():
        if isinstance(entry, Tensor):
            require_writable(own_part(entry), f"{operation}: {key}")
            tensors[key] = entry
        else:
            values[key] = encode_value(entry, f"{operation}: {key}")
            tensors |= {tensor_key(key, number): one for number, one in enumerate(values[key].tensors)}
    return tensors, values


def own_part(entry: Tensor) -> Tensor:
    """Return the elements of an entry that this rank has."""
    return entry.part if isinstance(entry, RowShard) else local_part(entry)


def require_writable(tensor: Tensor, what: str) -> None:
    """Raise `ConfigError`, which begins with `what`, for a tensor that a load could not write into."""
    require_storable(tensor, what)
    if tensor.numel() and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ConfigError(f"{what} is expanded: several elements share memory. Make it a tensor of its own by clone().")


def _parts(plan: SavePlan, planner: DefaultSavePlanner) -> Iterator[tuple[TensorPart, Callable[[], Any]]]:
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        if has_elements(data.chunk.sizes, data.size):
            place = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            part = TensorPart(item.index.fqn, *place, data.properties.dtype, tuple(data.size))
            yield part, partial(planner.resolve_data, item)


def _check_there(partial: Path, items: Iterable[FilePart], rank: int) -> None:
    """Raises `ConfigError` if what a rank says that it wrote is not all here, where it is to be installed."""
    for name, of_file in groupby(sorted(items), key=lambda item: item.file):
        file, end = partial / name, max(item.offset + item.length for item in of_file)
        try:
            with file.open("rb") as opened:  # which has a network's file system look again
                size = os.fstat(opened.fileno()).st_size
        except FileNotFoundError:
            size = 0
        if size < end:
            raise ConfigError(
                f"{name}, which rank {rank} has written, has {size} bytes of {end} where the checkpoint is put "
                "together. Save to a file system that all ranks see. What was saved there before stands."
            )
