"""Folders of checkpoints in PyTorch's format: one save at a time, replaced whole or not at all, read in parts.

torch.distributed.checkpoint calls collectives of its own, without bounds. Its planners, reader and writer do not; they
are driven here, so that a rank that fails or does not come ends the others by name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training.checkpoint_checks import (
    CURE,
    INDEX,
    Item,
    check_items,
    item_digests,
    parse_index,
    read_digests,
    read_index,
    refused,
    write_digests,
)

# So many are looked at at once, in float64 beside those that were read.
_NUMBERS = 2**20
# Integers up to here are exact in float64.
_EXACT = 2**53


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
    """Returns whether a checkpoint lies at `path`: a folder with an index."""
    return (path / INDEX).is_file()


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
    def is_own() -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(folder), room.lstat())
        return False

    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the system drops when the process ends
            except BlockingIOError:
                raise busy from None
        if not is_own():
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
            if is_own():
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
        warnings.warn(f"checkpoint {path} is in place, and may be lost if the system fails now: {error}", stacklevel=2)
    _remove(previous, f"checkpoint {path} is in place. The previous one")


def _remove(folder: Path, what: str) -> None:
    """Remove a folder. A warning, which begins with `what`, names the folder if that fails."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # which goes on after the first file that stays
        if os.path.lexists(folder):
            warnings.warn(f"{what} could not be removed from {folder}: {error}. Remove that folder.", stacklevel=2)


def _sync(folder: Path) -> None:
    """Write the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(
    path: Path,
    entries: dict[str, Any],
    place: Callable[[str], tuple[str, ...]],
    topology: Topology,
    operation: str,
) -> None:
    """Writes every rank's entries to `path`, replacing a checkpoint that stands there. Collective over all ranks.

    Args:
        entries: tensors, DTensors and anything that can be pickled, by key; what several ranks hold is in the entries
            of one of them only.
        place: where a key's value stands in the nested dictionary that PyTorch's tools make of the folder.
    """
    path = real(path)  # what a link stands for is replaced, not the link
    own_room = beside(path, "partial")
    partial = own_room / "checkpoint"
    writer = FileSystemWriter(partial)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({})
    first = topology.is_first

    def plan() -> Any:
        # PyTorch's planners deduplicate what several ranks hold; here one rank alone has each entry, by `writes`.
        planner.set_up_planner(entries, None, first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write(plans: list[Any]) -> Any:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        own = writer.prepare_global_plan(plans)[topology.world.index]
        written = writer.write_data(planner.finish_plan(own), planner)
        written.wait()
        results = written.value()
        # Digests are of what is on the disk, not of what was to be written: they find what went wrong in between.
        return results, item_digests(partial, [_item(result.storage_data) for result in results])

    def finish(of_ranks: list[tuple[Any, dict[Item, str]]]) -> None:
        for rank, (_, items) in zip(topology.world.ranks, of_ranks, strict=True):
            _check_there(partial, items, rank)
        places = {key: place(key) for key in metadata.state_dict_metadata}
        writer.finish(replace(metadata, planner_data=places), [results for results, _ in of_ranks])
        write_digests(partial, [digests for _, digests in of_ranks])
        install(partial, path)

    def on_all(action: Callable[[], Any]) -> list[Any]:
        return on_all_ranks(topology.world, operation, action)

    # Five exchanges, each of which ends all ranks if one fails: rank 0 makes the room; all see the same one; plans;
    # data; and rank 0 puts it in its place.
    with ExitStack() as own:
        marks = on_all(lambda: own.enter_context(room(path, own_room)) if first else "")
        on_all(lambda: check_same(own_room, marks[0], path))
        plans = on_all(plan)
        of_ranks = on_all(lambda: write(plans))
        on_all(lambda: finish(of_ranks) if first else None)


def _check_there(partial: Path, items: Iterable[Item], rank: int) -> None:
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


def index_digest(path: Path) -> str | None:
    """Return the digest of the index at `path`, which changes with each save; None without one."""
    folder = saved_at(path)
    try:
        return None if folder is None else read_index(folder)[1]
    except OSError:
        return None


class Folder:
    """The folder with the checkpoint saved to `path`, opened for loading.

    Attributes:
        metadata: what it says it holds.
        digest: of the index, which no two saves have in common.
        digests: of its items; None in format 1, which had none.
    Raises:
        ConfigError: there is none, it is of a later format, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        folder = saved_at(path)
        if folder is None:
            raise ConfigError(f"there is no checkpoint at {path}; give the path of a save, one that all ranks can see")
        self._path, self._folder = path, folder
        damaged = f"the checkpoint {path} is damaged: {INDEX}"
        try:
            index, self.digest = read_index(folder)
        except OSError as error:
            raise ConfigError(f"{damaged} cannot be read: {error}. {CURE}") from error
        self.digests = read_digests(path, folder)
        if self.digests is not None and self.digests.of_index != self.digest:
            raise ConfigError(f"{damaged} is not as it was saved. {CURE}")
        try:
            self.metadata = parse_index(index)
        except Exception as error:  # whatever unpickling makes of damage
            raise ConfigError(f"{damaged} cannot be read ({error}). {CURE}") from error
        self._check_sizes()
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self.metadata, True)

    def check(self, targets: dict[str, Any]) -> None:
        """Raises `ConfigError` if a part of the files that `read` would read is damaged."""
        plan, _ = self._plan(targets, PlainPlanner())
        items = {_item(self.metadata.storage_data[part.storage_index]) for part in plan.items}
        check_items(self._path, self._folder, items, self.digests)

    def check_numbers(self, targets: dict[str, Any], become: dict[str, torch.dtype]) -> None:
        """Raises `ConfigError` if some number that `read` would read is lost in the dtype it is to have, by key."""
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        # Most loads convert nothing, and read nothing twice.
        narrowed = {key: targets[key] for key, dtype in become.items() if may_lose(saved[key].properties.dtype, dtype)}
        if narrowed:
            self._read(*self._plan(narrowed, _NumberPlanner(become, self._path)))

    def read(self, targets: dict[str, Any]) -> None:
        """Reads the entries whose keys are in `targets`: tensors and DTensors in place, others into the dictionary.

        Raises:
            ConfigError: another checkpoint has come to `path` since this one was opened, or a value would run code.
        """
        plan, planner = self._plan(targets, PlainPlanner())
        # Values first: one that is refused, though it was checked, has changed no tensor yet.
        plan = replace(plan, items=sorted(plan.items, key=lambda item: item.type is not LoadItemType.BYTE_IO))
        # Looked at afterwards: a save that has replaced the folder in between left some ranks reading the new one.
        try:
            self._read(plan, planner)
        finally:
            if not is_checkpoint(self._folder) or read_index(self._folder)[1] != self.digest:
                raise ConfigError(
                    f"the checkpoint {self._path} was replaced while it was loaded, and what was loaded is of both. "
                    "Load it again; save to another path as long as others load."
                )

    def _read(self, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
        try:
            self._reader.read_data(plan, planner).wait()
        except UnpicklingError as error:
            raise refused(self._path, error) from error

    def _plan(self, targets: dict[str, Any], planner: PlainPlanner) -> tuple[LoadPlan, PlainPlanner]:
        planner.set_up_planner(targets, self.metadata, True)
        plan = planner.create_local_plan()
        return planner.finish_plan(self._reader.prepare_local_plan(plan)), planner

    def _check_sizes(self) -> None:
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            file = self._folder / name
            size = file.stat().st_size if file.is_file() else 0
            if size < end:
                raise ConfigError(f"the checkpoint {self._path} is damaged: {name} has {size} bytes of {end}. {CURE}")


class PlainPlanner(DefaultLoadPlanner):
    """Plan of a load that reads plain values alone beside tensors: PyTorch's would run whatever they say."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _NumberPlanner(PlainPlanner):
    """Reads tensors in the dtype in which they were saved, looks at their numbers, and keeps nothing."""

    def __init__(self, become: dict[str, torch.dtype], path: Path) -> None:
        super().__init__()
        self._become, self._path = become, path

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        saved: Any = self.metadata
        dtype = saved.state_dict_metadata[read_item.dest_index.fqn].properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        refuse_lost(f"checkpoint {self._path} was not loaded", key, tensor, self._become[key])


def _item(info: Any) -> Item:
    return Item(info.relative_path, info.offset, info.length)


# Numbers that a load would change by more than rounding: too large, cut to integers, without their imaginary part.


def may_lose(have: torch.dtype, become: torch.dtype) -> bool:
    """Returns whether some number of dtype `have` is lost as `become`, so that they must be looked at."""
    if have.is_complex and become.is_complex:
        have, become = have.to_real(), become.to_real()
    if have.is_floating_point and become.is_floating_point:
        return torch.finfo(have).max > torch.finfo(become).max
    return have not in (become, torch.bool)


def lost_number(value: Tensor, dtype: torch.dtype) -> str | None:
    """Describes the first number that a conversion would not keep, in words that follow a tensor's name; else None."""
    # Kept are floating-point numbers but for rounding (and what is too small, as zero), infinities and NaN where they
    # exist, integers exactly, and what is 0 or 1 as a bool.
    if not may_lose(value.dtype, dtype):
        return None
    if value.is_complex():
        parts = torch.view_as_real(value.detach().resolve_conj())
        if dtype.is_complex:
            return lost_number(parts, dtype.to_real())
        lost = parts[..., 1] != 0
        return _told(value[lost][0], dtype) if lost.any() else lost_number(parts[..., 0], dtype)
    if dtype.is_complex:
        dtype = dtype.to_real()
    for chunk in value.detach().reshape(-1).split(_NUMBERS):
        lost = ~_kept(chunk, dtype)
        if lost.any():
            return _told(chunk[lost][0], dtype)
    return None


def refuse_lost(operation: str, key: str, value: Tensor, dtype: torch.dtype) -> None:
    """Raises `ConfigError`, which begins with `operation`, if `lost_number` finds one in what is called `key`."""
    lost = lost_number(value, dtype)
    if lost is not None:
        raise ConfigError(f"{operation}: {key} {lost}. Give the model a dtype that can, or convert what was saved.")


def _kept(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [n] bool: which numbers of value [n] stay as they are, to rounding."""
    exact = value.double()  # which has all numbers of all floating-point dtypes
    if dtype == torch.bool:
        return (exact == 0) | (exact == 1)
    if not value.is_floating_point():
        return _kept_integers(value, dtype)
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        return (exact == exact.trunc()) & (exact >= float(bounds.min)) & (exact < float(bounds.max + 1))
    after, eps, least = value.to(dtype).double(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounded = exact.isfinite() & ((after - exact).abs() <= eps * exact.abs().clamp_min(least))
    return (after == exact) | (after.isnan() & exact.isnan()) | rounded


def _kept_integers(value: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch computes little in unsigned integers. The larger half of those of 64 bits is below zero as int64.
    wide = value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
    small = wide >= 0 if value.dtype == torch.uint64 else torch.ones_like(wide, dtype=torch.bool)
    if dtype.is_floating_point:
        return small & (wide.abs() <= _EXACT) & (wide.to(dtype).double() == wide.double())
    bounds = torch.iinfo(dtype)
    return small & (wide >= bounds.min) & (wide <= min(bounds.max, torch.iinfo(torch.int64).max))


def _told(number: Tensor, dtype: torch.dtype) -> str:
    have, become = (str(one).removeprefix("torch.") for one in (number.dtype, dtype))
    return f"has the {have} number {number.item()}, which {become} cannot hold"
