"""Checkpoints of formats 1 and 2, which contain pickles: read-only, for conversion. To be removed in the next version.

Format 2 has a file `.checksums` of two lines: the digest of the second line, and JSON with the digests of the index
(`.metadata`) and of the items by file. An item is a part of a tensor or a value. Format 1 has no checksums.

The index is a pickle, which may call any function. This reader records the calls of the names below as inert notes, and
rebuilds the index from the notes. A few hundred bytes of pickle can describe nested lists of 2^60 elements: nothing is
printed, hashed, compared or traversed before its type is checked, and the index may not have more parts than bytes.
Values are read with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import reprlib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, BytesIO
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fusedmoe.comm.topology import Topology
from fusedmoe.compat.python import PythonUnpickler
from fusedmoe.errors import ConfigError, warn
from fusedmoe.files import read_regular_file
from fusedmoe.training.checkpoint import ABOUT, metadata_problem
from fusedmoe.training.checkpoint_folder import EARLIER_INDEX, find_checkpoint, write_folder
from fusedmoe.training.checkpoint_index import DAMAGE_FIX, end_offsets, is_covered, range_digest
from fusedmoe.training.checkpoint_reader import PlainPlanner

#: Last format with pickles.
FORMAT = 2
CHECKSUMS = ".checksums"

_MAX_INDEX_BYTES = 2**31

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
_TENSOR = ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
_HASHING = {pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET}
_MAX_DIMS, _MAX_NAME_LENGTH = 64, 255
_MAX_ELEMENTS, _MAX_DEPTH = 2**16, 1000
_ALLOWED_NAMES = {
    *((f"{_CHECKPOINT}.metadata", name) for name in (*_METADATA, *_TENSOR)),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


def convert_checkpoint(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Convert the checkpoint of format 1 or 2 at `old` to the current format at `new`.

    Runs in one process and holds the whole checkpoint in memory. Resolves only classes that `torch.load` with
    `weights_only=True` allows.

    Raises:
        ConfigError: no such checkpoint at `old`; it is damaged, was not written by `save_checkpoint`, or contains a
            class that the current format does not support; or `new` exists and is not a checkpoint.
    """
    path = Path(old)
    write_folder(Path(new), lambda: _entries(path), Topology(), f"converting checkpoint {path}")


def _entries(path: Path) -> dict[str, Any]:
    folder = find_checkpoint(path)
    if folder is None:
        raise ConfigError(f"there is no checkpoint at {path}; pass the path of a save")
    if not (folder / EARLIER_INDEX).is_file():
        raise ConfigError(f"the checkpoint {path} needs no conversion: load_checkpoint reads it")
    damaged = f"the checkpoint {path} is damaged: {EARLIER_INDEX}"
    try:
        index, digest = read_index(folder)
    except OSError as error:
        raise ConfigError(f"{damaged} cannot be read: {error}. {DAMAGE_FIX}") from error
    digests = read_digests(path, folder)
    if digests is not None and digests.of_index != digest:
        raise ConfigError(f"{damaged} does not match its digest. {DAMAGE_FIX}")
    try:
        metadata = parse_index(index)
    except Exception as error:  # any exception from unpickling damaged data
        raise ConfigError(f"{damaged} cannot be read ({error}). {DAMAGE_FIX}") from error
    entries: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    if ABOUT not in entries:
        raise ConfigError(f"{path}: save_checkpoint did not write it. Read it with torch.distributed.checkpoint.")
    reader, planner = FileSystemReader(folder), _UnpicklingPlanner()
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner(entries, metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    _check_sizes(path, folder, metadata)
    infos = [metadata.storage_data[part.storage_index] for part in plan.items]
    check_items(path, folder, {ByteRange(info.relative_path, info.offset, info.length) for info in infos}, digests)
    try:
        reader.read_data(plan, planner).wait()
    except UnpicklingError as error:
        raise refused_class_error(path, error) from error
    difference = metadata_problem(entries)
    if difference is not None:
        raise ConfigError(f"checkpoint {path} was not converted: {difference}")
    about = entries[ABOUT]
    if digests is None and about.get("format") != 1:
        raise ConfigError(f"the checkpoint {path} is damaged: {CHECKSUMS} is missing. {DAMAGE_FIX}")
    if digests is None:
        warn(
            f"checkpoint {path} is of format 1, without checksums: most damage to its data is detected, damage to "
            "its index is not",
            stacklevel=2,
        )
    return entries


class _UnpicklingPlanner(PlainPlanner):
    """Load planner that reads values, which formats 1 and 2 pickle."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _check_sizes(path: Path, folder: Path, metadata: Metadata) -> None:
    places = ((info.relative_path, info.offset, info.length) for info in metadata.storage_data.values())
    for name, end in end_offsets(path, places).items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size < end:
            raise ConfigError(f"the checkpoint {path} is damaged: {name} has {size} bytes of {end}. {DAMAGE_FIX}")


class StoredItem(NamedTuple):
    """File, offset and length of an item, as PyTorch's file-system reader expects it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def parse_index(data: bytes) -> Metadata:
    """Parse a pickled index without executing it. Raise `ValueError` for unknown names or inconsistent content."""
    note = _require_note(_Reader(BytesIO(data)).load())
    infos: dict[MetadataIndex, StoredItem] = {}
    for key, info in _require_dict(note["storage_data"]).items():
        at = None if _require_note(key)["offset"] is None else _parse_size(key["offset"])
        infos[MetadataIndex(_require_str(key["fqn"]), at)] = _parse_item(_require_note(info))
    held: dict[str, Any] = {}
    parts = 0
    for name, entry in _require_dict(note["state_dict_metadata"]).items():
        held[_require_str(name)] = _parse_entry(_require_note(entry), len(data) - parts)
        chunks = getattr(held[name], "chunks", None)
        for at in [None] if chunks is None else [chunk.offsets for chunk in chunks]:
            parts += 1
            if MetadataIndex(name, at) not in infos:
                raise ValueError(f"a part of {reprlib.repr(name)} is missing")
    return Metadata(held, storage_data=infos)


class _Note:
    """Inert record of an object that a pickle would create: class name, arguments, and state."""

    name = ""
    args: tuple[Any, ...]
    held: Any

    def __new__(cls, *args: Any) -> _Note:
        note = super().__new__(cls)
        note.args, note.held = args, {}
        return note

    def __setstate__(self, state: Any) -> None:
        self.held = state

    def __getitem__(self, field: str) -> Any:
        return _require_dict(self.held).get(field)


class _Reader(PythonUnpickler):
    """Unpickler that creates inert `_Note`s instead of objects.

    Each class name yields a new `_Note` subclass: a pickle cannot change a class that a later load uses.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        # dtypes are values without side effects.
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED_NAMES:
            raise ValueError(f"it names {reprlib.repr(f'{module}.{name}')}, which has no place in an index")
        return type("_Note", (_Note,), {"name": name})

    def _set_items(self, items: list[Any]) -> None:
        held = _require_dict(self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not isinstance(key, _Note):  # hashing a tuple would traverse its elements
                raise ValueError(f"a {type(key).__name__} is no key")
            held[key] = value

    # Excludes opcodes that hash arbitrary objects; `_set_items` checks the type of each key first.
    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in PythonUnpickler.dispatch.items() if bytes([code]) not in _HASHING},
        pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
    }


def check_tuples(data: bytes) -> None:
    """Raise `ValueError` if an item's pickle contains a tuple that is too large or too deep to hash."""
    _TupleReader(data).load()


class _ItemsNote(_Note):
    """`_Note` of a container, such as an OrderedDict: discards the items that a pickle adds."""

    def __setitem__(self, key: Any, value: Any) -> None:
        hash(key)

    def append(self, value: Any) -> None:
        """Discard an element that a pickle appends."""


class _TupleReader(_Reader):
    """Unpickler that resolves no class and counts the elements of tuples."""

    def __init__(self, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._max_elements = max(_MAX_ELEMENTS, len(data))
        # By id: the tuple (kept alive to keep its id unique), its element count, its depth.
        self._sizes: dict[int, tuple[object, int, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        return type("_ItemsNote", (_ItemsNote,), {"name": name})

    def persistent_load(self, pid: Any) -> Any:
        return None

    def _tuple(self, values: list[Any]) -> None:
        held = [self._sizes.get(id(value), (None, 1, 0))[1:] for value in values]
        elements, depth = 1 + sum(size for size, _ in held), 1 + max((depth for _, depth in held), default=0)
        if elements > self._max_elements or depth > _MAX_DEPTH:
            raise ValueError("a tuple has more elements than were written")
        made = tuple(values)
        self._sizes[id(made)] = made, elements, depth
        self.stack.append(made)

    def _tuple_of(self, count: int) -> None:
        values = self.stack[-count:]
        del self.stack[-count:]
        self._tuple(values)

    dispatch: ClassVar[dict[int, Any]] = {
        **PythonUnpickler.dispatch,
        pickle.TUPLE[0]: lambda self: self._tuple(self.pop_mark()),
        pickle.TUPLE1[0]: lambda self: self._tuple_of(1),
        pickle.TUPLE2[0]: lambda self: self._tuple_of(2),
        pickle.TUPLE3[0]: lambda self: self._tuple_of(3),
    }


def _parse_item(note: _Note) -> StoredItem:
    file = _require_str(note["relative_path"])
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(file) > _MAX_NAME_LENGTH:
        raise ValueError(f"it names the file {reprlib.repr(file)}, outside of its folder")
    if note["transform_descriptors"]:
        raise ValueError("its items are encoded")
    return StoredItem(file, _require_size(note["offset"]), _require_size(note["length"]))


def _parse_entry(note: _Note, max_parts: int) -> BytesStorageMetadata | TensorStorageMetadata:
    if note.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    properties = _require_note(note["properties"]).held
    dtype = properties[0] if type(properties) is tuple and properties else None
    if note.name != "TensorStorageMetadata" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{note.name} is no entry of an index")
    size, chunks = _parse_size(note["size"]), note["chunks"]
    if type(chunks) is not list or len(chunks) > max_parts:
        raise ValueError("a tensor has no list of parts, or more of them than were written")
    made = [
        ChunkStorageMetadata(_parse_size(_require_note(one)["offsets"]), _parse_size(one["sizes"])) for one in chunks
    ]
    if not is_covered(size, made):
        raise ValueError("the parts of a tensor do not add up to its shape")
    return TensorStorageMetadata(TensorProperties(dtype), size, made)


def _parse_size(note: Any) -> torch.Size:
    args = _require_note(note).args
    values = args[0] if len(args) == 1 else None
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMS:
        raise ValueError(f"a {type(values).__name__} is no shape")
    return torch.Size([_require_size(value) for value in values])


# Errors name only the type of an object: its repr may not terminate.


def _require_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"a {type(value).__name__} is no size, or is out of bounds")
    return value


def _require_str(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} is no name")
    return value


def _require_note(value: Any) -> _Note:
    if not isinstance(value, _Note):
        raise ValueError(f"a {type(value).__name__} has no place in an index")
    return value


def _require_dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} is no dictionary")
    return value


class ByteRange(NamedTuple):
    """Byte range of one item."""

    file: str
    offset: int
    length: int


class Digests(NamedTuple):
    """Digests of the index and of the items of a checkpoint of format 2."""

    of_index: str
    of_items: dict[ByteRange, str]


def read_digests(path: Path, folder: Path) -> Digests | None:
    """Read the digests; return None for format 1. Raise `ConfigError` if they are damaged."""
    if not (folder / CHECKSUMS).is_file():
        return None
    damaged = f"the checkpoint {path} is damaged: {CHECKSUMS}"
    try:
        head, _, body = read_regular_file(folder / CHECKSUMS, _MAX_INDEX_BYTES).partition(b"\n")
    except OSError as error:
        raise ConfigError(f"{damaged} cannot be read: {error}. {DAMAGE_FIX}") from error
    # Verify the digest before parsing: malicious JSON can exhaust memory.
    if head != _head(body):
        raise ConfigError(f"{damaged} does not match its digest. {DAMAGE_FIX}")
    try:
        held: dict[str, Any] = json.loads(body)
        of_files = held["items"].items()
        items = {ByteRange(file, *place): digest for file, of_file in of_files for *place, digest in of_file}
        digests = Digests(held["index"], items)
    except Exception as error:
        raise ConfigError(f"{damaged} cannot be read ({error}). {DAMAGE_FIX}") from error
    return digests


def read_index(folder: Path) -> tuple[bytes, str]:
    data = read_regular_file(folder / EARLIER_INDEX, _MAX_INDEX_BYTES)
    return data, hashlib.sha256(data).hexdigest()


def check_items(path: Path, folder: Path, items: Iterable[ByteRange], digests: Digests | None) -> None:
    """Raise `ConfigError` for a damaged item, or one that could exhaust memory when it is loaded.

    Items of format 1 are also loaded, to refuse classes whose loading may execute code.

    Args:
        digests: expected digests of the items; None for format 1, which has only the CRC-32 of zip records.
    """
    for item, file in _open_items(folder, items):
        if digests is not None and digests.of_items.get(item) != range_digest(file, item.offset, item.length):
            raise _damaged(path, item)
        # Before torch.load: decompressed data could exhaust memory.
        _check_unpacked(path, item, file)
        if digests is None:
            _check_crc(path, item, file)


def _open_items(folder: Path, items: Iterable[ByteRange]) -> Iterator[tuple[ByteRange, BufferedReader]]:
    for name, of_file in groupby(sorted(items), key=lambda item: item.file):
        with (folder / name).open("rb") as file:
            for item in of_file:
                yield item, file


def _check_unpacked(path: Path, item: ByteRange, file: BufferedReader) -> None:
    """Raise `ConfigError` if a zip file is damaged, or decompresses to more bytes than it occupies."""
    try:
        file.seek(item.offset)
        with zipfile.ZipFile(BytesIO(file.read(item.length))) as archive:
            records = archive.infolist()
            packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            # Records of one name may refer to the same bytes many times.
            packed |= sum(record.file_size for record in records) > item.length
            for record in [] if packed else records:
                if record.filename.lower().endswith("data.pkl"):
                    del record.CRC  # 0 after torch.serialization.set_crc32_options(False); would be verified
                    check_tuples(archive.read(record))
    except Exception as error:  # any exception from parsing damaged data
        raise _damaged(path, item) from error
    if packed:
        raise ConfigError(
            f"the checkpoint {path} is damaged: {item.file} has compressed or duplicate records from byte "
            f"{item.offset} on, which save_checkpoint never writes. {DAMAGE_FIX}"
        )


def _check_crc(path: Path, item: ByteRange, file: BufferedReader) -> None:
    """Verify an item of format 1 by the CRC-32 that most items contain, and by loading it."""
    file.seek(item.offset)
    data = BytesIO(file.read(item.length))
    try:
        with zipfile.ZipFile(data) as archive:
            for record in archive.infolist():
                if record.CRC:  # 0 after torch.serialization.set_crc32_options(False)
                    archive.read(record)
        data.seek(0)
        torch.load(data, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise refused_class_error(path, error) from error
    except Exception as error:  # any exception from parsing damaged data
        raise _damaged(path, item) from error


def refused_class_error(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the checkpoint {path} was not converted: it holds {unknown_class(error)}, and reading it may execute code. "
        "Save again with its state_dict() or plain values in place of that object."
    )


def unknown_class(error: Exception) -> str:
    name = re.search(r"GLOBAL (\S+)", str(error))
    return "something of no known class" if name is None else f"something of {name[1]}"


def _damaged(path: Path, item: ByteRange) -> ConfigError:
    end = item.offset + item.length
    return ConfigError(
        f"the checkpoint {path} is damaged: {item.file} does not match its digest between bytes {item.offset} and "
        f"{end}. {DAMAGE_FIX}"
    )


def _head(body: bytes) -> bytes:
    return b"fusedmoe checkpoint, sha256 of the next line: " + hashlib.sha256(body).hexdigest().encode()
