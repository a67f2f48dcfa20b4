"""Folders in the format of torch.distributed.checkpoint, with checksums: written whole or not at all, read in parts.

`.checksums` is two lines: the digest of the second one; and JSON with the format's version, the digest of the index
(`.metadata`), and those of the items by file. An item is what one rank wrote at once, a part of a tensor or a value:
who loads reads whole items, and checks those alone. SHA-256 takes as long as reading does (1.8 GB/s on one core with
instructions for it, BLAKE2 0.9, CRC-32 4.2), and nothing that differs has the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import BufferedReader, BytesIO
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.files import regular_bytes
from fusedmoe.training.checkpoint_index import check_tuples, parse_index
from fusedmoe.training.checkpoint_place import (
    INDEX,
    beside,
    check_same,
    install,
    is_checkpoint,
    real,
    room,
    saved_at,
)
from fusedmoe.training.narrowing import may_lose, refuse_lost

#: Of what is written. Format 1 had no checksums.
FORMAT = 2

NAME = ".checksums"

CURE = "Copy it again, or load another."

_CHUNK_BYTES = 2**20
# Of an index or of checksums: those of a million items are a tenth of it.
_MOST_BYTES = 2**31


class Item(NamedTuple):
    """Where in a checkpoint's files the bytes of one item lie."""

    file: str
    offset: int
    length: int


class Checksums:
    """The digests of a checkpoint.

    Raises:
        ConfigError: the file that has them is damaged, or of a later format.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
        try:
            head, _, body = regular_bytes(folder / NAME, _MOST_BYTES).partition(b"\n")
        except OSError as error:
            raise ConfigError(f"the checkpoint {path} is damaged: {NAME} cannot be read: {error}. {CURE}") from error
        if head != _head(body):
            raise ConfigError(f"the checkpoint {path} is damaged: {NAME} is not as it was saved. {CURE}")
        try:
            held: dict[str, Any] = json.loads(body)
            later = held["format"] > FORMAT
            self._index: str = held["index"]
            self._digests = {
                Item(file, offset, length): digest
                for file, items in held["items"].items()
                for offset, length, digest in items
            }
        except Exception as error:  # it was not save_checkpoint that wrote it
            raise ConfigError(f"the checkpoint {path} is damaged: {NAME} cannot be read ({error}). {CURE}") from error
        if later:
            raise ConfigError(
                f"the checkpoint {path} is of format {held['format']}, and this version of fusedmoe reads formats up "
                f"to {FORMAT}. Load it with the version that saved it, or a later one."
            )

    def check_index(self, digest: str) -> None:
        """Raises `ConfigError` if the index, of this digest, is not as it was saved."""
        if digest != self._index:
            raise ConfigError(f"the checkpoint {self._path} is damaged: {INDEX} is not as it was saved. {CURE}")

    def check(self, items: Iterable[Item]) -> None:
        """Raises `ConfigError` if the bytes of some item are not as they were saved."""
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        for item, file in _each(self._folder, items):
            if self._digests.get(item) != _digest(file, item, chunk):
                raise _damaged(self._path, item)
            _check_unpacked(self._path, item, file)


class _ItemView(_ReaderView):
    """Part of a file as a file. PyTorch's own takes a place counted from the end for one before it."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = max(0, self.len + offset), os.SEEK_SET
        return super().seek(offset, whence)


def _check_unpacked(path: Path, item: Item, file: BufferedReader) -> None:
    """Checks that an item, which is a zip file, takes no more memory than it has bytes, nor more time.

    A save packs nothing; what is packed, or is there several times by name, may grow a thousandfold when it is read.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        with zipfile.ZipFile(_ItemView(file, item.offset, item.length)) as archive:
            records = archive.infolist()
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            packed |= sum(record.file_size for record in records) > item.length
            if not packed:
                for record in records:
                    if record.filename.lower().endswith("data.pkl"):
                        del record.CRC  # torch.serialization.set_crc32_options(False) leaves 0, which would be checked
                        check_tuples(archive.read(record))
    except Exception as error:  # whatever a parser makes of damage
        raise _damaged(path, item) from error
    if packed:
        raise ConfigError(
            f"the checkpoint {path} is damaged: {item.file} has something packed from byte {item.offset} on, which "
            f"save_checkpoint never writes and which would grow when it is read. {CURE}"
        )


def check_without(path: Path, folder: Path, items: Iterable[Item]) -> None:
    """What can be checked of format 1: items are zip files, most of whose bytes have a CRC-32 in them.

    Raises:
        ConfigError: an item is damaged.
    """
    for item, file in _each(folder, items):
        _check_unpacked(path, item, file)
        file.seek(item.offset)
        data = BytesIO(file.read(item.length))
        try:
            with zipfile.ZipFile(data) as archive:
                for record in archive.infolist():
                    if record.CRC:  # torch.serialization.set_crc32_options(False) leaves 0
                        archive.read(record)
            data.seek(0)
            torch.load(data, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise refused(path, error) from error
        except Exception as error:  # whatever a parser makes of damage
            raise _damaged(path, item) from error


def digests(folder: Path, items: Iterable[Item]) -> dict[Item, str]:
    """The digest of each item, as it is on the disk."""
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    return {item: _digest(file, item, chunk) for item, file in _each(folder, items)}


def _digest(file: BufferedReader, item: Item, chunk: memoryview) -> str:
    digest, left = hashlib.sha256(), item.length
    while left and (got := file.readinto(chunk[:left])):
        digest.update(chunk[:got])
        left -= got
    return digest.hexdigest()


def _each(folder: Path, items: Iterable[Item]) -> Iterator[tuple[Item, BufferedReader]]:
    """Every item, and its file at the place where it begins."""
    for name, of_file in groupby(sorted(items), key=lambda item: item.file):
        with (folder / name).open("rb") as file:
            for item in of_file:
                file.seek(item.offset)
                yield item, file


def refused(path: Path, error: Exception) -> ConfigError:
    """For a value that would run code when it is read."""
    return ConfigError(
        f"the checkpoint {path} was not loaded: it holds {unknown_class(error)}, and reading more than tensors and "
        "plain values may run code. If you trust it, name the class with torch.serialization.add_safe_globals."
    )


def unknown_class(error: Exception) -> str:
    """The class, or function, over which `torch.load` with `weights_only=True` stumbled."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return "something of no known class" if found is None else f"something of {found[1]}"


def index_digest(folder: Path) -> str:
    """The digest of the index, which is another one after each save."""
    return hashlib.sha256(regular_bytes(folder / INDEX, _MOST_BYTES)).hexdigest()


def write_checksums(folder: Path, of_ranks: Iterable[dict[Item, str]]) -> None:
    """Writes the digests of all ranks' items and of the index, which are there already."""
    items: dict[str, list[tuple[int, int, str]]] = {}
    for found in of_ranks:
        for item, digest in found.items():
            items.setdefault(item.file, []).append((item.offset, item.length, digest))
    held = {"format": FORMAT, "index": index_digest(folder), "items": items}
    body = json.dumps(held).encode()
    with (folder / NAME).open("wb") as file:
        file.write(_head(body) + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())


def _damaged(path: Path, item: Item) -> ConfigError:
    end = item.offset + item.length
    return ConfigError(
        f"the checkpoint {path} is damaged: {item.file} is not as it was saved between bytes {item.offset} and {end}. "
        f"{CURE}"
    )


def _head(body: bytes) -> bytes:
    return b"fusedmoe checkpoint, sha256 of the next line: " + hashlib.sha256(body).hexdigest().encode()


# torch.distributed.checkpoint calls collectives of its own, without bounds. Its planners, reader and writer do not;
# they are driven here, so that a rank that fails or does not come ends the others by name.


def write_folder(
    path: Path,
    entries: dict[str, Any],
    place: Callable[[str], tuple[str, ...]],
    topology: Topology,
    operation: str,
) -> None:
    """Writes every rank's entries to `path`, replacing a checkpoint that stands there. Collective over all ranks.

    The folder comes into being beside `path` and is renamed when all is on the disk.

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
        return results, digests(partial, [_item(result.storage_data) for result in results])

    def finish(of_ranks: list[tuple[Any, dict[Item, str]]]) -> None:
        for rank, (_, items) in zip(topology.world.ranks, of_ranks, strict=True):
            _check_there(partial, items, rank)
        places = {key: place(key) for key in metadata.state_dict_metadata}
        writer.finish(replace(metadata, planner_data=places), [results for results, _ in of_ranks])
        write_checksums(partial, [found for _, found in of_ranks])
        install(partial, path)

    with ExitStack() as own:
        marks = on_all_ranks(
            topology.world, operation, lambda: own.enter_context(room(path, own_room)) if first else ""
        )
        on_all_ranks(topology.world, operation, lambda: check_same(own_room, marks[0], path))
        plans = on_all_ranks(topology.world, operation, plan)
        of_ranks = on_all_ranks(topology.world, operation, lambda: write(plans))
        on_all_ranks(topology.world, operation, lambda: finish(of_ranks) if first else None)


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


class Folder:
    """The folder with the checkpoint saved to `path`, opened for loading.

    Attributes:
        metadata: what it says it holds.
        digest: of the index, which no two saves have in common.
        checksums: None in format 1, which had none.
    Raises:
        ConfigError: there is none, it is of a later format, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        folder = saved_at(path)
        if folder is None:
            raise ConfigError(f"there is no checkpoint at {path}; give the path of a save, one that all ranks can see")
        self._path, self._folder = path, folder
        try:
            index = regular_bytes(folder / INDEX, _MOST_BYTES)
        except OSError as error:
            raise ConfigError(f"the checkpoint {path} is damaged: {INDEX} cannot be read: {error}. {CURE}") from error
        self.digest = hashlib.sha256(index).hexdigest()
        self.checksums: Checksums | None = None
        if (folder / NAME).is_file():
            self.checksums = Checksums(path, folder)
            self.checksums.check_index(self.digest)
        try:
            self.metadata = parse_index(index)
        except Exception as error:  # whatever unpickling makes of damage
            raise ConfigError(f"the checkpoint {path} is damaged: {INDEX} cannot be read ({error}). {CURE}") from error
        self._check_sizes()
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self.metadata, True)

    def check(self, targets: dict[str, Any]) -> None:
        """Raises `ConfigError` if a part of the files that `read` would read is damaged."""
        plan, _ = self._plan(targets, PlainPlanner())
        items = {_item(self.metadata.storage_data[one.storage_index]) for one in plan.items}
        if self.checksums is None:
            check_without(self._path, self._folder, items)
        else:
            self.checksums.check(items)

    def check_numbers(self, targets: dict[str, Any], become: dict[str, torch.dtype]) -> None:
        """Raises `ConfigError` if some number that `read` would read is lost in the dtype it is to have, by key."""
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        narrowed = {key: targets[key] for key, dtype in become.items() if may_lose(saved[key].properties.dtype, dtype)}
        if narrowed:
            self._read(*self._plan(narrowed, _NumberPlanner(become, self._path)))

    def read(self, targets: dict[str, Any]) -> None:
        """Reads the entries whose keys are in `targets`: tensors and DTensors in place, others into the dictionary.

        Values come before tensors: of a checkpoint with one that is refused, no tensor is read.

        Raises:
            ConfigError: another checkpoint has come to `path` since this one was opened, or a value would run code.
        """
        plan, planner = self._plan(targets, PlainPlanner())
        plan = replace(plan, items=sorted(plan.items, key=lambda item: item.type is not LoadItemType.BYTE_IO))
        try:
            self._read(plan, planner)
        finally:
            if not is_checkpoint(self._folder) or index_digest(self._folder) != self.digest:
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
    """Of what is no tensor, reads plain values alone: PyTorch's would run whatever they say."""

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
