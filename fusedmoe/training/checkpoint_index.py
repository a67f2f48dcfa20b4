"""The index of a checkpoint: what it holds and where, read without running anything that it says.

torch.distributed.checkpoint writes its `Metadata` as a pickle, which may call whatever it names. Here only the names
below mean something, and they all mean the same: a note of what was asked for. The index is made anew from the notes,
each of whose values is checked.

A pickle refers to what it has made before, so a few hundred bytes of it can stand for lists in lists of 2^60 elements.
So nothing is printed, hashed, compared or walked through before its type is known, and no more is made of an index than
it has bytes.
"""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Callable
from io import BytesIO
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
_TENSOR = ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
_HASHING = {pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET}
_MOST_DIMS, _MOST_NAME = 64, 255
_MOST_ELEMENTS, _MOST_DEPTH = 2**16, 1000
_KNOWN = {
    *((f"{_CHECKPOINT}.metadata", name) for name in (*_METADATA, *_TENSOR)),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


def parse_index(data: bytes) -> Metadata:
    """The index that a pickle stands for.

    Raises:
        ValueError: it names something else, or does not fit together; and whatever else unpickling makes of damage.
    """
    note = _note(_Reader(BytesIO(data)).load())
    infos: dict[MetadataIndex, _StorageInfo] = {}
    for key, info in _dictionary(note["storage_data"]).items():
        at = None if _note(key)["offset"] is None else _sizes(key["offset"])
        infos[MetadataIndex(_word(key["fqn"]), at)] = _info(_note(info))
    held: dict[str, Any] = {}
    parts = 0
    for name, entry in _dictionary(note["state_dict_metadata"]).items():
        held[_word(name)] = _entry(_note(entry), len(data) - parts)
        chunks = getattr(held[name], "chunks", None)
        for at in [None] if chunks is None else [chunk.offsets for chunk in chunks]:
            parts += 1
            if MetadataIndex(name, at) not in infos:
                raise ValueError(f"of {reprlib.repr(name)} some part is nowhere")
    return Metadata(held, storage_data=infos)


class _Note:
    """What a pickle asks for: a call of `name` with `args`, and what it then sets."""

    name = ""

    def __new__(cls, *args: Any) -> _Note:
        note = super().__new__(cls)
        note.args, note.held = args, {}
        return note

    def __setstate__(self, state: Any) -> None:
        self.held = state

    args: tuple[Any, ...]
    held: Any

    def __getitem__(self, field: str) -> Any:
        return _dictionary(self.held).get(field)


# The one in C gives a file of a few bytes all the memory that it asks for, and the machine with it.
class _Reader(pickle._Unpickler):
    """Finds no class but notes, which are new ones each time: nothing that a pickle sets on them outlives it."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _KNOWN:
            raise ValueError(f"it names {reprlib.repr(f'{module}.{name}')}, which has no place in an index")
        return type("_Note", (_Note,), {"name": name})

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def _set_items(self, items: list[Any]) -> None:
        held = _dictionary(self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not isinstance(key, _Note):  # a tuple's hash walks through all that is in it
                raise ValueError(f"a {type(key).__name__} is no key")
            held[key] = value

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_many(self) -> None:
        self._set_items(self.pop_mark())

    # All that pickles of an index have, and what can hash is ours.
    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _HASHING},
        pickle.SETITEM[0]: _set_one,
        pickle.SETITEMS[0]: _set_many,
    }


def check_tuples(data: bytes) -> None:
    """Looks through the pickle of an item for tuples that no dictionary could have as a key: their hash would walk
    through all that they refer to, for ever or until the stack is full.

    Raises:
        ValueError: there is one; and whatever else unpickling makes of damage.
    """
    _TupleReader(data).load()


class _TupleReader(_Reader):
    """Reads any pickle, of whose classes nothing is found, and counts what its tuples hold."""

    def __init__(self, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._most = max(_MOST_ELEMENTS, len(data))
        self._sizes: dict[int, tuple[object, int, int]] = {}  # by identity: the tuple, its elements, its depth

    def find_class(self, module: str, name: str) -> Any:
        return type("_Note", (_Note,), {"name": name})

    def persistent_load(self, pid: Any) -> Any:
        return None

    def _tuple(self, values: list[Any]) -> None:
        held = [self._sizes.get(id(value), (None, 1, 0))[1:] for value in values]
        elements, depth = 1 + sum(size for size, _ in held), 1 + max((depth for _, depth in held), default=0)
        if elements > self._most or depth > _MOST_DEPTH:
            raise ValueError("a tuple has more elements than were written")
        made = tuple(values)
        self._sizes[id(made)] = made, elements, depth
        self.stack.append(made)

    def _tuple_of(self, count: int) -> None:
        values = self.stack[-count:]
        del self.stack[-count:]
        self._tuple(values)

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.TUPLE[0]: lambda self: self._tuple(self.pop_mark()),
        pickle.TUPLE1[0]: lambda self: self._tuple_of(1),
        pickle.TUPLE2[0]: lambda self: self._tuple_of(2),
        pickle.TUPLE3[0]: lambda self: self._tuple_of(3),
    }


def _info(note: _Note) -> _StorageInfo:
    """Where an item lies: in a file of the folder itself."""
    file = _word(note["relative_path"])
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(file) > _MOST_NAME:
        raise ValueError(f"it names the file {reprlib.repr(file)}, outside of its folder")
    if note["transform_descriptors"]:
        raise ValueError("its items are encoded")
    return _StorageInfo(file, _size(note["offset"]), _size(note["length"]))


def _entry(note: _Note, most: int) -> BytesStorageMetadata | TensorStorageMetadata:
    """The entry that a note stands for, of at most so many parts."""
    if note.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    properties = _note(note["properties"]).held
    dtype = properties[0] if type(properties) is tuple and properties else None
    if note.name != "TensorStorageMetadata" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{note.name} is no entry of an index")
    size, chunks = _sizes(note["size"]), note["chunks"]
    if type(chunks) is not list or len(chunks) > most:
        raise ValueError("a tensor has no list of parts, or more of them than were written")
    made = [ChunkStorageMetadata(_sizes(_note(one)["offsets"]), _sizes(one["sizes"])) for one in chunks]
    if not _fill(size, made):
        raise ValueError("the parts of a tensor do not make it up")
    return TensorStorageMetadata(TensorProperties(dtype), size, made)


def _fill(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether chunks inside a tensor have as many elements as it. None are there twice: who writes looks for that."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        if any(at + many > most for at, many, most in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(size)


def _sizes(note: Any) -> torch.Size:
    args = _note(note).args
    values = args[0] if len(args) == 1 else None
    if not isinstance(values, tuple | list) or len(values) > _MOST_DIMS:
        raise ValueError(f"a {type(values).__name__} is no shape")
    return torch.Size([_size(value) for value in values])


# What is of the wrong type is told by its type alone: its text may have no end.


def _size(value: Any) -> int:
    """A number of bytes, elements or places."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"a {type(value).__name__} is no size, or is out of bounds")
    return value


def _word(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} is no name")
    return value


def _note(value: Any) -> _Note:
    if not isinstance(value, _Note):
        raise ValueError(f"a {type(value).__name__} has no place in an index")
    return value


def _dictionary(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} is no dictionary")
    return value
