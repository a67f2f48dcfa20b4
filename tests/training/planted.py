"""Checkpoints that somebody has tampered with who knows how they are made, with right checksums.

`changes` are of format 2: pickles that run. `rewritten` are of the index and the values of the present format.
"""

from __future__ import annotations

import hashlib
import json
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

from fusedmoe.training import checkpoint_index, earlier_formats

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
    items = [
        earlier_formats.Item(info.relative_path, info.offset, info.length)
        for info in infos
        if hasattr(info, "relative_path")
    ]
    there, most = {one.name for one in path.iterdir()}, 2**62
    items = [one for one in items if [*map(type, one)] == [str, int, int] and one.file in there and one.offset < most]
    (path / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index or metadata))
    (path / ".checksums").unlink()
    if sealed:
        _seal(path, items)


def _seal(path: Path, items: list[earlier_formats.Item]) -> None:
    """Write the checksums of format 2."""
    digests: dict[str, list[Any]] = {}
    for each in items:
        with (path / each.file).open("rb") as file:
            file.seek(each.offset)
            digest = hashlib.sha256(file.read(min(each.length, 2**30))).hexdigest()
        digests.setdefault(each.file, []).append((each.offset, each.length, digest))
    _, index = earlier_formats.read_index(path)
    body = json.dumps({"format": 2, "index": index, "items": digests}).encode()
    (path / ".checksums").write_bytes(earlier_formats._head(body) + b"\n" + body)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index of the present format, whose digest is right again."""
    body = json.loads((path / "index.jsonl").read_text().split("\n")[1])
    body = change(body) or body
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    (path / "index.jsonl").write_bytes(checkpoint_index._head(text) + text + b"\n")


def value(path: Path, key: str, text: str) -> Callable[[dict[str, Any]], None]:
    """Another JSON text in the place of a value, with a digest that is right."""

    def change(body: dict[str, Any]) -> None:
        file, *_, count = body["values"][key]
        line = f'{{"key": {json.dumps(key)}, "value": {text}}}\n'.encode()
        at = (path / file).stat().st_size
        with (path / file).open("ab") as opened:
            opened.write(line)
        body["values"][key] = [file, at, len(line), hashlib.sha256(line).hexdigest(), count]

    return change


def rewritten(path: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Changes of a checkpoint of the present format that a load has to refuse, by name."""
    weight = "model.dense.weight"

    def at(*keys: Any, thing: Any) -> Callable[[dict[str, Any]], None]:
        def change(body: dict[str, Any]) -> None:
            held: Any = body
            for key in keys[:-1]:
                held = held[key]
            held[keys[-1]] = thing

        return change

    def same_part(body: dict[str, Any]) -> None:
        body["tensors"] |= {f"values.extra.{number}": body["tensors"][weight] for number in range(1000)}
        tensors = [{"$tensor": [number, "float64", [5, 3], False, "Tensor"]} for number in range(1000)]
        value(path, "extra", json.dumps({"tensors": tensors}))(body)
        body["values"]["extra"][-1] = 1000

    chunk = ("tensors", weight, "chunks", 0)
    values = {
        "a deep value": "[" * 100_000 + "]" * 100_000,
        "a value nested as deep as Python goes": "[" * 900 + "]" * 900,
        "an unknown tag": '{"$object": ["os.system", "true"]}',
        "two tags": '{"$tuple": [], "$list": []}',
        "a tag beside a key": '{"a": 1, "$tuple": []}',
        "a key that cannot hash": '{"$dict": [[[[], 1]]]}',
        "a tensor that is not there": '{"a": {"$tensor": [7, "float32", [], false, "Tensor"]}}',
        "a tensor of no number": '{"a": {"$tensor": [-1, "float32", [], false, "Tensor"]}}',
        "a tensor of another kind": '{"a": {"$tensor": [0, "float32", [], false, "Module"]}}',
        "a tensor of no dtype": '{"a": {"$tensor": [0, "load", [], false, "Tensor"]}}',
        "an attribute of torch": '{"a": {"$dtype": "load"}}',
        "an array of objects": '{"a": {"$ndarray": ["|O8", [1], "AAAAAAAAAAA="]}}',
        "an array too short": '{"a": {"$ndarray": ["<f8", [1000000], "AAAA"]}}',
        "an array without end": '{"a": {"$ndarray": ["<f8", [4611686018427387903], "AAAA"]}}',
        "an infinity": "Infinity",
        "no base64": '{"a": {"$bytes": "\\u00e9"}}',
        "no date": '{"a": {"$date": "yesterday"}}',
        "no dictionary": "[1, 2]",
        "no JSON": "{",
        "a path of two parts": '{"a": {"$path": ["a", "b"]}}',
        "versions that are many": '{"a": {"$OrderedDict": [[], {}, {}]}}',
    }
    return {
        **{name: value(path, "extra", text) for name, text in values.items()},
        "another kind of checkpoint": value(path, "fusedmoe", '{"format": 3, "optimizer": 7}'),
        "groups of numbers": value(path, "optimizer.param_groups", "[7]"),
        "no groups": lambda body: body["values"].pop("optimizer.param_groups") and None,
        "no description": lambda body: body["values"].pop("fusedmoe") and None,
        "a format of text": at("format", thing="three"),
        "a format below": at("format", thing=2),
        "no tensors": at("tensors", thing=[]),
        "a dtype of no tensor": at("tensors", weight, "dtype", thing="load"),
        "another dtype": at("tensors", weight, "dtype", thing="float32"),
        "another shape": at("tensors", weight, "shape", thing=[7]),
        "a shape without end": at("tensors", weight, "shape", thing=[2**70, 2]),
        "a negative shape": at("tensors", weight, "shape", thing=[-5, -3]),
        "a shape of text": at("tensors", weight, "shape", thing="53"),
        "no part": at("tensors", weight, "chunks", thing=[]),
        "a part outside": at(*chunk, 0, thing=[1, 0]),
        "a part of another size": at(*chunk, 1, thing=[5, 2]),
        "a file elsewhere": at(*chunk, 2, thing="../../../../etc/passwd"),
        "a device": at(*chunk, 2, thing="/dev/zero"),
        "a file of numbers": at(*chunk, 2, thing=7),
        "an offset below zero": at(*chunk, 3, thing=-8),
        "an offset of text": at(*chunk, 3, thing="0"),
        "an offset past the end": at(*chunk, 3, thing=10**9),
        "another offset": at(*chunk, 3, thing=8),
        "a length without end": at(*chunk, 4, thing=2**80),
        "a digest of nothing": at(*chunk, 5, thing=""),
        "one part for many tensors": same_part,
        "a value of many tensors": lambda body: body["values"]["extra"].__setitem__(-1, 10**12),
        "a value for a tensor": lambda body: body["values"].__setitem__(weight, body["values"]["extra"]),
        "no JSON at all": lambda body: b"7 7",
        "a number": lambda body: b"7",
        "a deep index": lambda body: b"[" * 100_000 + b"]" * 100_000,
    }


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

    def shared(path: Path, metadata: Metadata) -> None:
        """One tensor of the files under many names."""
        index = next(index for index in metadata.storage_data if index.fqn == weight)
        for number in range(1000):
            metadata.state_dict_metadata[f"model.{number}"] = metadata.state_dict_metadata[weight]
            metadata.storage_data[replace(index, fqn=f"model.{number}")] = metadata.storage_data[index]

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
        "one part for many tensors": shared,
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
