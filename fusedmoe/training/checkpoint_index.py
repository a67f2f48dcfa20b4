"""Checkpoint file format: a JSON index with SHA-256 digests, safetensors files, and JSON lines for values.

    index.jsonl                  line 1: digest of line 2; line 2: all entries with file, offset, length, digest
    rank-00000.safetensors       tensor parts written by rank 0
    rank-00000-1.safetensors     further parts of the same tensors: a safetensors file has each name once
    rank-00000.jsonl             values written by rank 0 (`plain_values`), one per line

Headers of the tensor files contain the offsets of each part in the full tensor, for safetensors, Hugging Face's tools
and torch.distributed.checkpoint's `HuggingFaceStorageReader`. Loading uses only the index. Throughput on one core:
SHA-256 with hardware instructions 1.8 GB/s (also the read rate), BLAKE2 0.9, CRC-32 4.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fusedmoe.errors import ConfigError
from fusedmoe.files import read_regular_file
from fusedmoe.training.plain_values import DTYPES, byte_buffer, dtype_name, size_of, tensor_bytes

#: Format version.
FORMAT = 3
#: A folder that contains this file is a checkpoint.
INDEX = "index.jsonl"

DAMAGE_FIX = "Copy it again, or load another checkpoint."

_CHUNK_BYTES = 2**20
_MAX_INDEX_BYTES = 2**31
_FILE = re.compile(r"rank-\d{5,9}(-\d{1,9})?\.(safetensors|jsonl)")
_DIGEST = re.compile(r"[0-9a-f]{64}")

# dtype name -> safetensors type, number of safetensors elements per element.
_SAFETENSORS_TYPES = {
    "bool": ("BOOL", 1),
    **{f"{sign}int{bits}": (f"{'U' if sign else 'I'}{bits}", 1) for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (f"F{bits}", 1) for bits in (16, 32, 64)},
    "bfloat16": ("BF16", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    # Types that some safetensors readers do not support are stored as their components.
    **{name: ("U8", 1) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")},
    "complex32": ("F16", 2),
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
}


class FilePart(NamedTuple):
    """Byte range of a checkpoint file and its SHA-256 digest."""

    file: str
    offset: int
    length: int
    digest: str


class TensorPart(NamedTuple):
    """Tensor part to write: key, offsets in the full tensor, sizes of the part, dtype."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class FileParts:
    """File parts written by one rank.

    Attributes:
        headers: of the safetensors files.
        parts: of tensors, by key and offsets in the full tensor.
        values: by key, each with the number of tensors in it.
    """

    headers: list[FilePart] = field(default_factory=list)
    parts: dict[tuple[str, tuple[int, ...]], FilePart] = field(default_factory=dict)
    values: dict[str, tuple[FilePart, int]] = field(default_factory=dict)

    def all(self) -> list[FilePart]:
        return [*self.headers, *self.parts.values(), *(file_part for file_part, _ in self.values.values())]


class Index(NamedTuple):
    """Parsed index of a checkpoint: input of DCP's planners, file parts of all ranks, and the index's own digest."""

    metadata: Metadata
    written: FileParts
    digest: str


def tensor_key(key: str, number: int) -> str:
    return f"values.{key}.{number}"


def write_parts(folder: Path, rank: int, parts: Iterable[tuple[TensorPart, Any]], values: dict[str, Any]) -> FileParts:
    """Write this rank's files. Each tensor part comes with a function that returns its elements."""
    written = FileParts()
    files: dict[int, dict[str, tuple[TensorPart, Any]]] = {}
    for part, elements in parts:
        number = 0
        while part.key in files.setdefault(number, {}):
            number += 1
        files[number][part.key] = part, elements
    for number, of_file in files.items():
        name = f"rank-{rank:05d}{f'-{number}' if number else ''}.safetensors"
        _write_tensors(folder / name, list(of_file.values()), written)
    if values:
        name = f"rank-{rank:05d}.jsonl"
        with (folder / name).open("wb", buffering=0) as file:
            for key, one in values.items():
                line = b'{"key": %b, "value": %b}\n' % (json.dumps(key).encode(), one.text.encode())
                written.values[key] = _write(file, name, line), len(one.tensors)
            os.fsync(file.fileno())
    return written


def _write_tensors(path: Path, parts: list[tuple[TensorPart, Any]], written: FileParts) -> None:
    # Descending element size keeps every part aligned to its element type.
    parts.sort(key=lambda one: -one[0].dtype.itemsize)
    header: dict[str, Any] = {}
    starts: dict[str, Any] = {}
    offset = 0
    for part, _ in parts:
        safe, times = _SAFETENSORS_TYPES[dtype_name(part.dtype)]
        end = offset + prod(part.sizes) * part.dtype.itemsize
        more = [times] if times > 1 else []
        header[part.key] = {"dtype": safe, "shape": [*part.sizes, *more], "data_offsets": [offset, end]}
        starts[part.key] = {"saved_offsets": [*part.offsets, *(0 for _ in more)]}
        offset = end
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    text = json.dumps({"__metadata__": notes, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        written.headers.append(_write(file, path.name, len(text).to_bytes(8, "little") + text))
        for part, elements in parts:
            written.parts[part.key, part.offsets] = _write(file, path.name, byte_buffer(tensor_bytes(elements())))
        os.fsync(file.fileno())


def _write(file: FileIO, name: str, data: Any) -> FilePart:
    """Append bytes to a file and return their range and digest, computed from memory to detect incorrect writes."""
    left = memoryview(data)
    file_part = FilePart(name, file.tell(), len(left), hashlib.sha256(left).hexdigest())
    while left:  # an unbuffered write may be partial
        left = left[file.write(left) :]
    return file_part


def write_index(folder: Path, metadata: Metadata, written_by_rank: Iterable[FileParts]) -> None:
    headers: dict[str, Any] = {}
    places: dict[str, list[Any]] = {}
    values: dict[str, Any] = {}
    for written in written_by_rank:
        headers |= {one.file: [one.length, one.digest] for one in written.headers}
        values |= {key: [*file_part, count] for key, (file_part, count) in written.values.items()}
        for (key, offsets), file_part in written.parts.items():
            places.setdefault(key, []).append([offsets, file_part])
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        sizes = {
            tuple(chunk.offsets): list(chunk.sizes) for chunk in entry.chunks if has_elements(chunk.sizes, entry.size)
        }
        chunks = [[offsets, sizes[offsets], *file_part] for offsets, file_part in places.get(key, [])]
        tensors[key] = {"dtype": dtype_name(entry.properties.dtype), "shape": list(entry.size), "chunks": chunks}
    # The random field makes the index, and its digest, unique to this save.
    body = {"format": FORMAT, "save": secrets.token_hex(8), "headers": headers, "tensors": tensors, "values": values}
    text = json.dumps(body).encode()
    with (folder / INDEX).open("wb") as file:
        file.write(_head(text) + text + b"\n")
        file.flush()
        os.fsync(file.fileno())


def has_elements(sizes: Iterable[int], shape: Iterable[int]) -> bool:
    """Return whether a part of `sizes` of a tensor of `shape` is stored: empty parts only if the tensor is empty."""
    return prod(sizes) > 0 or prod(shape) == 0


def read_index(path: Path, folder: Path) -> Index:
    """Read and verify the index in `folder`. Errors name `path`, where the checkpoint was saved.

    Raises:
        ConfigError: the index is missing, damaged, or of a later format.
    """
    damaged = f"the checkpoint {path} is damaged: {INDEX}"
    try:
        head, _, body = read_regular_file(folder / INDEX, _MAX_INDEX_BYTES).partition(b"\n")
    except OSError as error:
        raise ConfigError(f"{damaged} cannot be read: {error}. {DAMAGE_FIX}") from error
    if head + b"\n" != _head(body.removesuffix(b"\n")) or not body.endswith(b"\n"):
        raise ConfigError(f"{damaged} does not match its digest. {DAMAGE_FIX}")
    try:
        held = json.loads(body)
        version = held["format"]
        if type(version) is not int or version < FORMAT:
            raise ValueError("it has no format")
        digest = hashlib.sha256(body.removesuffix(b"\n")).hexdigest()
        index = None if version > FORMAT else _parse(held, digest)
    except Exception as error:  # parsing malformed content may raise any exception
        raise ConfigError(f"{damaged} cannot be read ({error!s:.200}). {DAMAGE_FIX}") from error
    if index is None:
        raise ConfigError(
            f"the checkpoint {path} has format {version!s:.20}, and this version of fusedmoe reads format {FORMAT}. "
            "Load it with the version that saved it, or a later version."
        )
    return index


def stored_digest(folder: Path) -> str:
    """Return the digest in the first line of the index, without verifying it."""
    with (folder / INDEX).open("rb") as file:
        head = file.readline(len(_head(b""))).decode("ascii", "replace")
    match = _DIGEST.search(head)
    return head if match is None else match[0]


def _parse(held: dict[str, Any], digest: str) -> Index:
    entries: dict[str, Any] = {}
    written = FileParts()
    written.headers = [_parse_file_part([file, 0, *rest]) for file, rest in held["headers"].items()]
    for key, tensor in held["tensors"].items():
        dtype, shape, chunks = DTYPES[tensor["dtype"]], size_of(tensor["shape"]), []
        for offsets, sizes, *place in tensor["chunks"]:
            chunk, file_part = ChunkStorageMetadata(size_of(offsets), size_of(sizes)), _parse_file_part(place)
            if file_part.length != prod(chunk.sizes) * dtype.itemsize:
                raise ValueError(f"a part of {key[:100]!r} has a wrong length")
            chunks.append(chunk)
            written.parts[key, tuple(chunk.offsets)] = file_part
        if not _is_covered(shape, chunks):
            raise ValueError(f"the parts of {key[:100]!r} do not add up to its shape")
        entries[key] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    for key, (*place, count) in held["values"].items():
        if key in entries or type(count) is not int or any(tensor_key(key, n) not in entries for n in range(count)):
            raise ValueError(f"a tensor of {key[:100]!r} is missing")
        entries[key] = BytesStorageMetadata()
        written.values[key] = _parse_file_part(place), count
    return Index(Metadata(entries), written, digest)


def _parse_file_part(place: list[Any]) -> FilePart:
    file, offset, length, digest = place
    if not (_FILE.fullmatch(file) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"invalid file name {file!r:.100}, or invalid digest")
    size_of([offset, length])
    return FilePart(file, offset, length, digest)


def _is_covered(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether the chunks lie inside the tensor and their element counts add up to its size."""
    # Overlaps are not detected: PyTorch's planner produces none, and the digest excludes later changes.
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(offset + length > size for offset, length, size in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(shape)


def require_intact(path: Path, file: BufferedReader, file_part: FilePart) -> None:
    digest, left = hashlib.sha256(), file_part.length
    chunk = memoryview(bytearray(min(left, _CHUNK_BYTES)))
    file.seek(file_part.offset)
    while left and (got := file.readinto(chunk[:left])):
        digest.update(chunk[:got])
        left -= got
    if digest.hexdigest() != file_part.digest:
        raise damage_error(path, file_part)


def damage_error(path: Path, file_part: FilePart) -> ConfigError:
    end = file_part.offset + file_part.length
    return ConfigError(
        f"the checkpoint {path} is damaged: {file_part.file} does not match its digest between bytes "
        f"{file_part.offset} and {end}. {DAMAGE_FIX}"
    )


def _head(body: bytes) -> bytes:
    return b'{"fusedmoe": "checkpoint", "sha256 of the next line": "%b"}\n' % hashlib.sha256(body).hexdigest().encode()
