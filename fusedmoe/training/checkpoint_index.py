"""The index of a checkpoint: what it holds and where, read without running anything that it says.

torch.distributed.checkpoint writes its `Metadata` as a pickle, which may call whatever it names. Here only the names
below mean something, and they all mean the same: a note of what was asked for. The index is made anew from the notes,
each of whose values is checked.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from math import prod
from typing import Any

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
    note = _Reader(BytesIO(data)).load()
    infos: dict[MetadataIndex, _StorageInfo] = {}
    for key, info in note["storage_data"].items():
        at = None if key.held.get("offset") is None else _sizes(key["offset"])
        infos[MetadataIndex(_word(key["fqn"]), at)] = _info(info)
    held: dict[str, Any] = {}
    for name, entry in note["state_dict_metadata"].items():
        held[_word(name)] = _entry(entry)
        chunks = getattr(held[name], "chunks", None)
        for at in [None] if chunks is None else [chunk.offsets for chunk in chunks]:
            if MetadataIndex(name, at) not in infos:
                raise ValueError(f"of {name} some part is nowhere")
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
        return self.held[field]


# The one in C gives a file of a few bytes all the memory that it asks for, and the machine with it.
class _Reader(pickle._Unpickler):
    """Finds no class but notes, which are new ones each time: nothing that a pickle sets on them outlives it."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _KNOWN:
            raise ValueError(f"it names {module}.{name}, which has no place in an index")
        return type("_Note", (_Note,), {"name": name})


def _info(note: _Note) -> _StorageInfo:
    """Where an item lies: in a file of the folder itself."""
    file, offset, length = _word(note["relative_path"]), note["offset"], note["length"]
    if file in ("", ".", "..") or "/" in file or "\0" in file:
        raise ValueError(f"it names the file {file!r}, outside of its folder")
    if note.held.get("transform_descriptors"):
        raise ValueError("its items are encoded")
    _sizes_of([offset, length])
    return _StorageInfo(file, offset, length)


def _entry(note: _Note) -> BytesStorageMetadata | TensorStorageMetadata:
    if note.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    dtype, size = note["properties"].held[0], _sizes(note["size"])
    if note.name != "TensorStorageMetadata" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{note.name} is no entry of an index")
    chunks = [ChunkStorageMetadata(_sizes(one["offsets"]), _sizes(one["sizes"])) for one in note["chunks"]]
    if not _fill(size, chunks):
        raise ValueError("the parts of a tensor do not make it up")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _fill(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether chunks inside a tensor have as many elements as it. None are there twice: who writes looks for that."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        if any(at + many > most for at, many, most in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(size)


def _sizes(note: _Note) -> torch.Size:
    (values,) = note.args
    return torch.Size(_sizes_of(values))


def _sizes_of(values: Any) -> list[int]:
    """Numbers of bytes, elements or places."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**62:
            raise ValueError(f"{value!r} is no size")
    return list(values)


def _word(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is no name")
    return value
