"""Checkpoints that somebody has tampered with who knows how they are made: pickles that run, with right checksums."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fusedmoe.training import checkpoint_checks, checkpoint_folder

# Takes the folder and its index, changes either, and returns what is to be the index; None: the changed one.
Change = Callable[[Path, Metadata], Any]


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = str(canary)

    def __reduce__(self) -> Any:
        return os.open, (self._canary, os.O_CREAT | os.O_WRONLY)


def tamper(path: Path, change: Change, sealed: bool = True) -> None:
    """`sealed`: with checksums that fit, else without any, as in the format before them."""
    metadata = FileSystemReader(path).read_metadata()
    index = change(path, metadata)
    infos = metadata.storage_data.values() if isinstance(metadata.storage_data, dict) else ()
    items = [checkpoint_folder._item(info) for info in infos if hasattr(info, "relative_path")]
    there, most = {one.name for one in path.iterdir()}, 2**62
    items = [one for one in items if [*map(type, one)] == [str, int, int] and one.file in there and one.offset < most]
    (path / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index or metadata))
    (path / ".checksums").unlink()
    if sealed:
        checkpoint_checks.write_digests(path, [checkpoint_checks.item_digests(path, items)])


def item(key: str, thing: Any) -> Change:
    """Another value in the place of an item."""

    def change(path: Path, metadata: Metadata) -> None:
        data = BytesIO()
        torch.save(thing, data)
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        with (path / info.relative_path).open("ab") as file:
            file.seek(0, os.SEEK_END)
            info.offset, info.length = file.tell(), file.write(data.getvalue())

    return change


def repacked(key: str, change: Callable[[zipfile.ZipFile], None], how: int = zipfile.ZIP_STORED) -> Change:
    """The bytes of an item written again, by other means."""

    def again(path: Path, metadata: Metadata) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        with (path / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            data, new = BytesIO(file.read(info.length)), BytesIO()
            with zipfile.ZipFile(data) as old, zipfile.ZipFile(new, "w", how) as archive:
                for record in old.namelist():
                    archive.writestr(record, old.read(record))
                change(archive)
            file.seek(0, os.SEEK_END)
            info.offset, info.length = file.tell(), file.write(new.getvalue())

    return again


def doubled(make: Callable[[Any], Any], times: int = 60) -> Any:
    """A few bytes in a pickle, and 2^60 elements for who walks through them."""
    thing = make(())
    for _ in range(times):
        thing = make((thing, thing))
    return thing


def in_index(field: str, thing: Any) -> Change:
    """Another value in a field of the index."""

    def change(path: Path, metadata: Metadata) -> None:
        setattr(metadata, field, thing)

    return change


def in_entry(key: str, field: str, thing: Any) -> Change:
    """Another value in what the index says of a tensor, or of where its first item lies."""

    def change(path: Path, metadata: Metadata) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        setattr(info if hasattr(info, field) else metadata.state_dict_metadata[key], field, thing)

    return change


def changes(canary: Path) -> dict[str, Change]:
    """What a load has to refuse, by name."""
    bad, big = Planted(canary), 10**300
    weight = "model.dense.weight"
    lists, tuples = doubled(list), doubled(tuple)
    key = b")" + b"2\x86" * 60  # the same tuple, which hashes itself for ever

    def without_items(path: Path, metadata: Metadata) -> None:
        metadata.storage_data = {}

    def without_a_part(path: Path, metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.experts.w1"].chunks.pop()

    def class_changed(path: Path, metadata: Metadata) -> bytes:
        """A BUILD of a class itself: its attributes would be others for the rest of the process."""
        name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        return pickle.PROTO + b"\x02" + name + b"N}(Vfusedmoe_was_here\nI1\nu\x86b."

    def with_field(field: str, thing: Any) -> Change:
        """Another value in every part of an index that has such a field, however it is nested."""

        def change(path: Path, metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata[weight]
            index, info = next(item for item in metadata.storage_data.items() if item[0].fqn == weight)
            for one in (entry, entry.properties, entry.chunks[0], info, index, metadata):
                if hasattr(one, field):
                    object.__setattr__(one, field, thing)

        return change

    def crowded(path: Path, metadata: Metadata) -> None:
        """Few bytes, and parts without number: entries share one list of parts that are empty."""
        entry = metadata.state_dict_metadata[weight]
        empty = replace(entry.chunks[0], offsets=torch.Size([0, 0]), sizes=torch.Size([0, 0]))
        entry.size, entry.chunks = torch.Size([0, 0]), [empty] * 1_000
        for number in range(1_000):
            metadata.state_dict_metadata[f"model.{number}"] = entry
            metadata.storage_data[MetadataIndex(f"model.{number}", (0, 0))] = metadata.storage_data[
                next(index for index in metadata.storage_data if index.fqn == weight)
            ]

    def with_key(key: bytes) -> Callable[[zipfile.ZipFile], None]:
        """The pickle of a dictionary with such a key comes before the item's own."""

        def change(archive: zipfile.ZipFile) -> None:
            names = archive.namelist()
            name = next(name for name in names if name.endswith("/data.pkl"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                archive.writestr(name, b"\x80\x02}" + key + b"Ns.")
            archive.filelist.sort(key=lambda record: record.filename != name)
            archive.filelist.pop(0)

        return change

    def many_times(archive: zipfile.ZipFile) -> None:
        archive.writestr("more", bytes(10**5))
        archive.filelist.extend([archive.filelist[-1]] * 100)

    fields = ("relative_path", "offset", "length", "transform_descriptors", "fqn", "size", "sizes", "offsets", "chunks")
    fields += ("properties", "dtype", "state_dict_metadata", "storage_data")
    things = {"lists": lists, "tuples": tuples, "a number": big, "words": "a" * 10**6}
    return {
        **{f"{name} for {field}": with_field(field, thing) for field in fields for name, thing in things.items()},
        "more parts than bytes": crowded,
        "a key of tuples": lambda path, metadata: b"\x80\x04}" + key + b"Ns.",
        "keys of tuples": lambda path, metadata: b"\x80\x04}(" + key + b"Nu.",
        "a dictionary of tuples": lambda path, metadata: b"\x80\x04(" + key + b"Nd.",
        "a set of tuples": lambda path, metadata: b"\x80\x04\x8f(" + key + b"\x90.",
        "a frozen set of tuples": lambda path, metadata: b"\x80\x04(" + key + b"\x91.",
        "a class of tuples": lambda path, metadata: (
            b"\x80\x04\x8c\x05torchX" + b"\xff\xff\0\0" + b"a" * 65535 + b"\x93."
        ),
        "packed": repacked(weight, lambda archive: None, zipfile.ZIP_DEFLATED),
        "packed values": repacked("extra", lambda archive: None, zipfile.ZIP_DEFLATED),
        "the same many times": repacked(weight, many_times),
        "a key of tuples in a value": repacked("extra", with_key(key)),
        "a key of tuples in a tensor": repacked(weight, with_key(key)),
        "a key of tuples for the stack": repacked("extra", with_key(b")" + b"\x85" * 200_000)),
        "names of groups without end": item("optimizer.param_groups", [{"params": [tuples]}]),
        "settings without end": item("fusedmoe", {"format": 2, "optimizer": {"kind": "AdamW", "settings": [lists]}}),
        "the whole index": lambda path, metadata: bad,
        "the planner's data": in_index("planner_data", bad),
        "the storage's data": in_index("storage_data", {"a": bad}),
        "its notes": in_index("storage_meta", bad),
        "its entries": in_index("state_dict_metadata", bad),
        "a size": in_entry(weight, "size", bad),
        "extra": item("extra", {"step": bad}),
        "extra that is none": item("extra", [1, 2]),
        "what it is": item("fusedmoe", bad),
        "another kind": item("fusedmoe", {"format": "two"}),
        "a kind of text": item("fusedmoe", "two"),
        "a format without end": item("fusedmoe", {"format": 10**300}),
        "groups": item("optimizer.param_groups", [bad]),
        "groups that are none": item("optimizer.param_groups", {"lr": 1.0}),
        "a tensor": item(weight, bad),
        "a tensor of another shape": item(weight, torch.zeros(7)),
        "a number for a tensor": item(weight, 7),
        "a file elsewhere": in_entry(weight, "relative_path", "../../../../etc/passwd"),
        "a device": in_entry(weight, "relative_path", "/dev/zero"),
        "a file of bytes": in_entry(weight, "relative_path", b"__0_0.distcp"),
        "a length without end": in_entry(weight, "length", big),
        "a length below zero": in_entry(weight, "length", -1),
        "an offset of text": in_entry(weight, "offset", "0"),
        "an offset past the end": in_entry(weight, "offset", 10**9),
        "items decoded": in_entry(weight, "transform_descriptors", ["zstd"]),
        "no items": without_items,
        "no part": without_a_part,
        "a changed class": class_changed,
        "no index": lambda path, metadata: b"",
        "an index of zeros": lambda path, metadata: bytes(1000),
        "an index of numbers": lambda path, metadata: 7,
        "an index for all memory": lambda path, metadata: b"\x80\x04Nr\xff\xff\xff\xff.",
        "a text for all memory": lambda path, metadata: b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b".",
        "a deep index": lambda path, metadata: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    }
