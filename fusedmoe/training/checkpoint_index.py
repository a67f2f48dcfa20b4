"""Files of a checkpoint: an index, tensors in safetensors files, values in JSON lines, and the digest of each part.

    index.jsonl                  the digest of the second line; tensors and values, where their bytes lie, and digests
    rank-00000.safetensors       parts of tensors that rank 0 has written; a second part of one tensor is in
    rank-00000-1.safetensors     the next file, since a safetensors file has each name once
    rank-00000.jsonl             values that rank 0 has written (`plain_values`), one a line

safetensors, `HuggingFaceStorageReader` of torch.distributed.checkpoint and Hugging Face's tools read the tensors, too:
their headers say where in the whole tensor each part begins. A load follows the index alone. SHA-256 takes as long as
reading does: 1.8 GB/s on one core with instructions for it, BLAKE2 0.9, CRC-32 4.2.
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
from fusedmoe.files import regular_bytes
from fusedmoe.training.plain_values import DTYPES, byte_buffer, dtype_name, size_of, tensor_bytes

#: The format of what is written. Formats 1 and 2 had an index and values in pickles.
FORMAT = 3
#: The file that makes a folder a checkpoint.
INDEX = "index.jsonl"

CURE = "Copy it again, or load another."

_CHUNK_BYTES = 2**20
# Of an index: that of a million parts is a tenth of it.
_MOST_BYTES = 2**31
_FILE = re.compile(r"rank-\d{5,9}(-\d{1,9})?\.(safetensors|jsonl)")
_DIGEST = re.compile(r"[0-9a-f]{64}")

# A dtype's name in safetensors, and how many of that type one element is.
_SAFE = {
    "bool": ("BOOL", 1),
    **{f"{sign}int{bits}": (f"{'U' if sign else 'I'}{bits}", 1) for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (f"F{bits}", 1) for bits in (16, 32, 64)},
    "bfloat16": ("BF16", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    # Those that not every reader of safetensors knows are stored as what they are made of.
    **{name: ("U8", 1) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")},
    "complex32": ("F16", 2),
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
}


class FilePart(NamedTuple):
    """A stretch of a checkpoint's file."""

    file: str
    offset: int
    length: int
    digest: str


class TensorPart(NamedTuple):
    """A part of a tensor to be written: its key, place in the whole, dtype and shape of the whole, and elements."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Written:
    """Stretches of the files that one rank has written: headers, parts of tensors by key and offsets, values by key."""

    headers: list[FilePart] = field(default_factory=list)
    parts: dict[tuple[str, tuple[int, ...]], FilePart] = field(default_factory=dict)
    values: dict[str, tuple[FilePart, int]] = field(default_factory=dict)

    def all(self) -> list[FilePart]:
        """List all stretches."""
        return [*self.headers, *self.parts.values(), *(stretch for stretch, _ in self.values.values())]


class Index(NamedTuple):
    """Contents of a checkpoint, and their places.

    Attributes:
        metadata: for torch.distributed.checkpoint's planners.
        written: by all ranks; of a value, also how many tensors belong to it.
        digest: of the index; no two saves have one in common.
    """

    metadata: Metadata
    written: Written
    digest: str


def tensor_key(key: str, number: int) -> str:
    """Return the key of a tensor that belongs to a value."""
    return f"values.{key}.{number}"


# Writing.


def write_parts(folder: Path, rank: int, parts: Iterable[tuple[TensorPart, Any]], values: dict[str, Any]) -> Written:
    """Write this rank's files.

    Args:
        parts: each with a function that returns its elements.
        values: `EncodedValue` by key.
    """
    written = Written()
    files: dict[int, dict[str, tuple[TensorPart, Any]]] = {}
    for part, elements in parts:
        # A file has each key once.
        number = 0
        while part.key in files.setdefault(number, {}):
            number += 1
        files[number][part.key] = part, elements
    for number, of_file in files.items():
        name = f"rank-{rank:05d}{f'-{number}' if number else ''}.safetensors"
        _write_tensors(folder / name, list(of_file.values()), written)
    if values:
        _write_values(folder / f"rank-{rank:05d}.jsonl", values, written)
    return written


def _write_tensors(path: Path, parts: list[tuple[TensorPart, Any]], written: Written) -> None:
    # Large elements first: each then begins where its type may.
    parts.sort(key=lambda one: -one[0].dtype.itemsize)
    header: dict[str, Any] = {}
    starts: dict[str, Any] = {}
    at = 0
    for part, _ in parts:
        safe, times = _SAFE[dtype_name(part.dtype)]
        end = at + prod(part.sizes) * part.dtype.itemsize
        more = [times] if times > 1 else []
        header[part.key] = {"dtype": safe, "shape": [*part.sizes, *more], "data_offsets": [at, end]}
        starts[part.key] = {"saved_offsets": [*part.offsets, *(0 for _ in more)]}
        at = end
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    text = json.dumps({"__metadata__": notes, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        written.headers.append(_write(file, path.name, len(text).to_bytes(8, "little") + text))
        for part, elements in parts:
            written.parts[part.key, part.offsets] = _write(file, path.name, byte_buffer(tensor_bytes(elements())))
        os.fsync(file.fileno())


def _write_values(path: Path, values: dict[str, Any], written: Written) -> None:
    with path.open("wb", buffering=0) as file:
        for key, one in values.items():
            line = b'{"key": %b, "value": %b}\n' % (json.dumps(key).encode(), one.text.encode())
            written.values[key] = _write(file, path.name, line), len(one.tensors)
        os.fsync(file.fileno())


def _write(file: FileIO, name: str, data: Any) -> FilePart:
    """Append bytes to a file and return their stretch. The digest is of the memory, so a load finds failed writes."""
    left = memoryview(data)
    stretch = FilePart(name, file.tell(), len(left), hashlib.sha256(left).hexdigest())
    while left:  # an unbuffered file may accept fewer bytes at once
        left = left[file.write(left) :]
    return stretch


def write_index(folder: Path, metadata: Metadata, of_ranks: Iterable[Written]) -> None:
    """Write the index of all ranks' files. `metadata`: of all tensors."""
    headers: dict[str, Any] = {}
    places: dict[str, list[Any]] = {}
    values: dict[str, Any] = {}
    for written in of_ranks:
        headers |= {one.file: [one.length, one.digest] for one in written.headers}
        values |= {key: [*stretch, count] for key, (stretch, count) in written.values.items()}
        for (key, offsets), stretch in written.parts.items():
            places.setdefault(key, []).append([offsets, stretch])
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        sizes = {
            tuple(chunk.offsets): list(chunk.sizes) for chunk in entry.chunks if has_elements(chunk.sizes, entry.size)
        }
        chunks = [[offsets, sizes[offsets], *stretch] for offsets, stretch in places.get(key, [])]
        tensors[key] = {"dtype": dtype_name(entry.properties.dtype), "shape": list(entry.size), "chunks": chunks}
    # By chance: no two saves have an index in common, by which ranks and loads tell them apart.
    body = {"format": FORMAT, "save": secrets.token_hex(8), "headers": headers, "tensors": tensors, "values": values}
    text = json.dumps(body).encode()
    with (folder / INDEX).open("wb") as file:
        file.write(_head(text) + text + b"\n")
        file.flush()
        os.fsync(file.fileno())


def has_elements(sizes: Iterable[int], shape: Iterable[int]) -> bool:
    """Return whether a part is written: one without elements only if the whole has none."""
    return prod(sizes) > 0 or prod(shape) == 0


# Reading.


def read_index(path: Path, folder: Path) -> Index:
    """Read and check the index of the checkpoint saved to `path`, which lies in `folder`.

    Raises:
        ConfigError: it is damaged, or of a later format.
    """
    damaged = f"the checkpoint {path} is damaged: {INDEX}"
    try:
        head, _, body = regular_bytes(folder / INDEX, _MOST_BYTES).partition(b"\n")
    except OSError as error:
        raise ConfigError(f"{damaged} cannot be read: {error}. {CURE}") from error
    # Not parsed before its digest fits.
    if head + b"\n" != _head(body.removesuffix(b"\n")) or not body.endswith(b"\n"):
        raise ConfigError(f"{damaged} is not as it was saved. {CURE}")
    try:
        held = json.loads(body)
        version = held["format"]
        if type(version) is not int or version < FORMAT:
            raise ValueError("it has no format")
        digest = hashlib.sha256(body.removesuffix(b"\n")).hexdigest()
        index = None if version > FORMAT else _parse(held, digest)
    except Exception as error:  # whatever parsing makes of text that save_checkpoint did not write
        raise ConfigError(f"{damaged} cannot be read ({error!s:.200}). {CURE}") from error
    if index is None:
        raise ConfigError(
            f"the checkpoint {path} is of format {version!s:.20}, and this version of fusedmoe reads format {FORMAT}. "
            "Load it with the version that saved it, or a later one."
        )
    return index


def stated_digest(folder: Path) -> str:
    """Return the digest of the index as its first line has it, without a check."""
    with (folder / INDEX).open("rb") as file:
        head = file.readline(len(_head(b""))).decode("ascii", "replace")
    found = _DIGEST.search(head)
    return head if found is None else found[0]


def _parse(held: dict[str, Any], digest: str) -> Index:
    entries: dict[str, Any] = {}
    written = Written()
    written.headers = [_placed([file, 0, *rest]) for file, rest in held["headers"].items()]
    for key, tensor in held["tensors"].items():
        dtype, shape, chunks = DTYPES[tensor["dtype"]], size_of(tensor["shape"]), []
        for offsets, sizes, *place in tensor["chunks"]:
            chunk, stretch = ChunkStorageMetadata(size_of(offsets), size_of(sizes)), _placed(place)
            if stretch.length != prod(chunk.sizes) * dtype.itemsize:
                raise ValueError(f"a part of {key[:100]!r} has a length of its own")
            chunks.append(chunk)
            written.parts[key, tuple(chunk.offsets)] = stretch
        if not fills(shape, chunks):
            raise ValueError(f"the parts of {key[:100]!r} do not make it up")
        entries[key] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    for key, (*place, count) in held["values"].items():
        if key in entries or type(count) is not int or any(tensor_key(key, n) not in entries for n in range(count)):
            raise ValueError(f"a tensor of {key[:100]!r} is missing")
        entries[key] = BytesStorageMetadata()
        written.values[key] = _placed(place), count
    return Index(Metadata(entries), written, digest)


def _placed(place: list[Any]) -> FilePart:
    file, offset, length, digest = place
    if not (_FILE.fullmatch(file) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"it names the file {file!r:.100}, or a digest that is none")
    size_of([offset, length])
    return FilePart(file, offset, length, digest)


def fills(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether parts lie inside a tensor and have as many elements as it."""
    # Two that overlap would pass: a save asks PyTorch for parts that do not, and a digest keeps them so.
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(at + many > most for at, many, most in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return False
    return sum(prod(chunk.sizes) for chunk in chunks) == prod(shape)


def ends_of_files(path: Path, places: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Return where the last stretch (file, offset, length) in each file of the checkpoint saved to `path` ends.

    Raises:
        ConfigError: two stretches share bytes. A small file could then fill any amount of memory.
    """
    ends: dict[str, int] = {}
    for name, offset, length in sorted(places):
        if offset < ends.get(name, 0):
            raise ConfigError(f"the checkpoint {path} is damaged: two parts share bytes of {name}. {CURE}")
        ends[name] = offset + length
    return ends


def check_part(path: Path, file: BufferedReader, stretch: FilePart) -> None:
    """Raise `ConfigError` if the bytes of a stretch of the checkpoint saved to `path` are not as they were saved."""
    if _digest(file, stretch.offset, stretch.length) != stretch.digest:
        raise damaged_at(path, stretch)


def damaged_at(path: Path, stretch: FilePart) -> ConfigError:
    """Return the error for a stretch of the checkpoint saved to `path`."""
    end = stretch.offset + stretch.length
    return ConfigError(
        f"the checkpoint {path} is damaged: {stretch.file} is not as it was saved between bytes {stretch.offset} and "
        f"{end}. {CURE}"
    )


def _digest(file: BufferedReader, offset: int, length: int) -> str:
    digest, left, chunk = hashlib.sha256(), length, memoryview(bytearray(min(length, _CHUNK_BYTES)))
    file.seek(offset)
    while left and (got := file.readinto(chunk[:left])):
        digest.update(chunk[:got])
        left -= got
    return digest.hexdigest()


def _head(body: bytes) -> bytes:
    return b'{"fusedmoe": "checkpoint", "sha256 of the next line": "%b"}\n' % hashlib.sha256(body).hexdigest().encode()
