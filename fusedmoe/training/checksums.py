"""What a checkpoint's files have to hold, byte by byte: a digest of each item, in a file beside them.

`.checksums` is two lines: the digest of the second one; and JSON with the format's version, the digest of the index
(`.metadata`), and those of the items by file. An item is what one rank wrote at once, a part of a tensor or a value:
who loads reads whole items, and checks those alone. SHA-256 takes as long as reading does (1.8 GB/s on one core with
instructions for it, BLAKE2 0.9, CRC-32 4.2), and nothing that differs has the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader, BytesIO
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from fusedmoe.errors import ConfigError

#: Of what is written. Format 1 had no checksums.
FORMAT = 2

NAME, INDEX = ".checksums", ".metadata"

CURE = "Copy it again, or load another."

_CHUNK_BYTES = 2**20


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
        head, _, body = (folder / NAME).read_bytes().partition(b"\n")
        if head != _head(body):
            raise ConfigError(f"the checkpoint {path} is damaged: {NAME} is not as it was saved. {CURE}")
        held: dict[str, Any] = json.loads(body)
        if held["format"] > FORMAT:
            raise ConfigError(
                f"the checkpoint {path} is of format {held['format']}, and this version of fusedmoe reads formats up "
                f"to {FORMAT}. Load it with the version that saved it, or a later one."
            )
        self._index: str = held["index"]
        self._digests = {
            Item(file, offset, length): digest
            for file, items in held["items"].items()
            for offset, length, digest in items
        }

    def check_index(self, digest: str) -> None:
        """Raises `ConfigError` if the index, of this digest, is not as it was saved."""
        if digest != self._index:
            raise ConfigError(f"the checkpoint {self._path} is damaged: {INDEX} is not as it was saved. {CURE}")

    def check(self, items: Iterable[Item]) -> None:
        """Raises `ConfigError` if the bytes of some item are not as they were saved."""
        for item, digest in digests(self._folder, items).items():
            if self._digests.get(item) != digest:
                raise _damaged(self._path, item)


def check_without(path: Path, folder: Path, items: Iterable[Item]) -> None:
    """What can be checked of format 1: items are zip files, most of whose bytes have a CRC-32 in them.

    Raises:
        ConfigError: an item is damaged.
    """
    for item, file in _each(folder, items):
        data = BytesIO(file.read(item.length))
        try:
            with zipfile.ZipFile(data) as archive:
                for record in archive.infolist():
                    if record.CRC:  # torch.serialization.set_crc32_options(False) leaves 0
                        archive.read(record)
            data.seek(0)
            with suppress(UnpicklingError):  # of more than tensors: whole all the same
                torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a parser makes of damage
            raise _damaged(path, item) from error


def digests(folder: Path, items: Iterable[Item]) -> dict[Item, str]:
    """The digest of each item, as it is on the disk."""
    found = {}
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    for item, file in _each(folder, items):
        digest, left = hashlib.sha256(), item.length
        while left and (got := file.readinto(chunk[:left])):
            digest.update(chunk[:got])
            left -= got
        found[item] = digest.hexdigest()
    return found


def _each(folder: Path, items: Iterable[Item]) -> Iterator[tuple[Item, BufferedReader]]:
    """Every item, and its file at the place where it begins."""
    for name, of_file in groupby(sorted(items), key=lambda item: item.file):
        with (folder / name).open("rb") as file:
            for item in of_file:
                file.seek(item.offset)
                yield item, file


def index_digest(folder: Path) -> str:
    """Of the index, which is another one after each save."""
    with (folder / INDEX).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, of_ranks: Iterable[dict[Item, str]]) -> None:
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
