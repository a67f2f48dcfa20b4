"""Checkpoints tampered with by someone who knows the format, with right checksums.

`changes` are of format 2: pickles that execute code. `rewritten` are of the index and the values of the present format.
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

# Receives the folder and its index, changes either, and returns the new index; None: the changed one.
Change = Callable[[Path, Metadata], Any]


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = str(canary)

    def __reduce__(self) -> Any:
        return os.open, (self._canary, os.O_CREAT | os.O_WRONLY)


def tamper(path: Path, change: Change, sealed: bool = True) -> None:
    """`sealed`: with matching checksums, else without any, as in the previous format."""
    metadata = FileSystemReader(path).read_metadata()
    index = change(path, metadata)
    infos = metadata.storage_data.values() if isinstance(metadata.storage_data, dict) else ()
    items = [
        earlier_formats.ByteRange(info.relative_path, info.offset, info.length)
        for info in infos
        if hasattr(info, "relative_path")
    ]
    there, most = {one.name for one in path.iterdir()}, 2**62
    items = [one for one in items if [*map(type, one)] == [str, int, int] and one.file in there and one.offset < most]
    (path / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index or metadata))
    (path / ".checksums").unlink()
    if sealed:
        _seal(path, items)


def _seal(path: Path, items: list[earlier_formats.ByteRange]) -> None:
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
    """Change the index of the present format, and update its digest."""
    body = json.loads((path / "index.jsonl").read_text().split("\n")[1])
    body = change(body) or body
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    (path / "index.jsonl").write_bytes(checkpoint_index._head(text) + text + b"\n")


def value(path: Path, key: str, text: str) -> Callable[[dict[str, Any]], None]:
    """Replace a value by another JSON text with a matching digest."""

    def change(body: dict[str, Any]) -> None:
        file, *_, count = body["values"][key]
        line = f'{{"key": {json.dumps(key)}, "value": {text}}}\n'.encode()
        at = (path / file).stat().st_size
        with (path / file).open("ab") as opened:
            opened.write(line)
        body["values"][key] = [file, at, len(line), hashlib.sha256(line).hexdigest(), count]

    return change


def rewritten(path: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Changes of a checkpoint of the present format that a load must refuse, by name."""
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
        "deeply nested value": "[" * 100_000 + "]" * 100_000,
        "value nested 900 levels": "[" * 900 + "]" * 900,
        "an unknown tag": '{"$object": ["os.system", "true"]}',
        "two tags": '{"$tuple": [], "$list": []}',
        "tag next to key": '{"a": 1, "$tuple": []}',
        "unhashable key": '{"$dict": [[[[], 1]]]}',
        "missing tensor": '{"a": {"$tensor": [7, "float32", [], false, "Tensor"]}}',
        "negative tensor number": '{"a": {"$tensor": [-1, "float32", [], false, "Tensor"]}}',
        "tensor of unknown class": '{"a": {"$tensor": [0, "float32", [], false, "Module"]}}',
        "tensor of invalid dtype": '{"a": {"$tensor": [0, "load", [], false, "Tensor"]}}',
        "torch attribute as dtype": '{"a": {"$dtype": "load"}}',
        "object array": '{"a": {"$ndarray": ["|O8", [1], "AAAAAAAAAAA="]}}',
        "array with too few bytes": '{"a": {"$ndarray": ["<f8", [1000000], "AAAA"]}}',
        "array of huge size": '{"a": {"$ndarray": ["<f8", [4611686018427387903], "AAAA"]}}',
        "infinity": "Infinity",
        "invalid base64": '{"a": {"$bytes": "\\u00e9"}}',
        "invalid date": '{"a": {"$date": "yesterday"}}',
        "list instead of dictionary": "[1, 2]",
        "truncated JSON": "{",
        "path with two arguments": '{"a": {"$path": ["a", "b"]}}',
        "OrderedDict with two versions": '{"a": {"$OrderedDict": [[], {}, {}]}}',
    }
    return {
        **{name: value(path, "extra", text) for name, text in values.items()},
        "invalid description": value(path, "fusedmoe", '{"format": 3, "optimizer": 7}'),
        "numbers as parameter groups": value(path, "optimizer.param_groups", "[7]"),
        "missing parameter groups": lambda body: body["values"].pop("optimizer.param_groups") and None,
        "missing description": lambda body: body["values"].pop("fusedmoe") and None,
        "text as format": at("format", thing="three"),
        "older format number": at("format", thing=2),
        "list instead of tensors": at("tensors", thing=[]),
        "invalid dtype": at("tensors", weight, "dtype", thing="load"),
        "other dtype": at("tensors", weight, "dtype", thing="float32"),
        "other shape": at("tensors", weight, "shape", thing=[7]),
        "huge shape": at("tensors", weight, "shape", thing=[2**70, 2]),
        "negative shape": at("tensors", weight, "shape", thing=[-5, -3]),
        "text as shape": at("tensors", weight, "shape", thing="53"),
        "missing part": at("tensors", weight, "chunks", thing=[]),
        "part outside of tensor": at(*chunk, 0, thing=[1, 0]),
        "part of other size": at(*chunk, 1, thing=[5, 2]),
        "path outside of folder": at(*chunk, 2, thing="../../../../etc/passwd"),
        "device file": at(*chunk, 2, thing="/dev/zero"),
        "number as file name": at(*chunk, 2, thing=7),
        "negative offset": at(*chunk, 3, thing=-8),
        "text as offset": at(*chunk, 3, thing="0"),
        "offset past end of file": at(*chunk, 3, thing=10**9),
        "other offset": at(*chunk, 3, thing=8),
        "huge length": at(*chunk, 4, thing=2**80),
        "empty digest": at(*chunk, 5, thing=""),
        "one part for many tensors": same_part,
        "huge tensor count": lambda body: body["values"]["extra"].__setitem__(-1, 10**12),
        "value instead of tensor": lambda body: body["values"].__setitem__(weight, body["values"]["extra"]),
        "two numbers instead of JSON": lambda body: b"7 7",
        "number as index": lambda body: b"7",
        "deeply nested index": lambda body: b"[" * 100_000 + b"]" * 100_000,
    }


def item(key: str, thing: Any) -> Change:
    """Replace the value of an item."""

    def change(path: Path, metadata: Metadata) -> None:
        data = BytesIO()
        torch.save(thing, data)
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        with (path / info.relative_path).open("ab") as file:
            file.seek(0, os.SEEK_END)
            info.offset, info.length = file.tell(), file.write(data.getvalue())

    return change


def repacked(key: str, change: Callable[[zipfile.ZipFile], None], how: int = zipfile.ZIP_STORED) -> Change:
    """Write an item's bytes again with another zip method."""

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
    """A few bytes in a pickle, and 2^60 elements for a recursive reader."""
    thing = make(())
    for _ in range(times):
        thing = make((thing, thing))
    return thing


def in_index(field: str, thing: Any) -> Change:
    """Replace the value of a field of the index."""

    def change(path: Path, metadata: Metadata) -> None:
        setattr(metadata, field, thing)

    return change


def in_entry(key: str, field: str, thing: Any) -> Change:
    """Replace a field of a tensor's index entry, or of its first item's position."""

    def change(path: Path, metadata: Metadata) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        setattr(info if hasattr(info, field) else metadata.state_dict_metadata[key], field, thing)

    return change


def changes(canary: Path) -> dict[str, Change]:
    """Changes that a load must refuse, by name."""
    bad, big = Planted(canary), 10**300
    weight = "model.dense.weight"
    lists, tuples = doubled(list), doubled(tuple)
    key = b")" + b"2\x86" * 60  # the same tuple, whose hash never ends

    def without_items(path: Path, metadata: Metadata) -> None:
        metadata.storage_data = {}

    def without_a_part(path: Path, metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.experts.w1"].chunks.pop()

    def class_changed(path: Path, metadata: Metadata) -> bytes:
        """A BUILD of a class itself, which would change its attributes for the rest of the process."""
        name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        return pickle.PROTO + b"\x02" + name + b"N}(Vfusedmoe_was_here\nI1\nu\x86b."

    def with_field(field: str, thing: Any) -> Change:
        """Replace the value of a field in every part of an index that has it, at any depth."""

        def change(path: Path, metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata[weight]
            index, info = next(item for item in metadata.storage_data.items() if item[0].fqn == weight)
            for one in (entry, entry.properties, entry.chunks[0], info, index, metadata):
                if hasattr(one, field):
                    object.__setattr__(one, field, thing)

        return change

    def crowded(path: Path, metadata: Metadata) -> None:
        """Few bytes, and an unbounded number of parts: entries share one list of empty parts."""
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
        """The pickle of a dictionary with such a key precedes the item's own pickle."""

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
    things = {"lists": lists, "tuples": tuples, "huge number": big, "long text": "a" * 10**6}
    return {
        **{f"{name} for {field}": with_field(field, thing) for field in fields for name, thing in things.items()},
        "more parts than bytes": crowded,
        "one part for many tensors": shared,
        "nested tuple as key": lambda path, metadata: b"\x80\x04}" + key + b"Ns.",
        "nested tuples as keys": lambda path, metadata: b"\x80\x04}(" + key + b"Nu.",
        "dictionary keyed by nested tuple": lambda path, metadata: b"\x80\x04(" + key + b"Nd.",
        "set of nested tuples": lambda path, metadata: b"\x80\x04\x8f(" + key + b"\x90.",
        "frozen set of nested tuples": lambda path, metadata: b"\x80\x04(" + key + b"\x91.",
        "overlong class name": lambda path, metadata: (
            b"\x80\x04\x8c\x05torchX" + b"\xff\xff\0\0" + b"a" * 65535 + b"\x93."
        ),
        "compressed tensor": repacked(weight, lambda archive: None, zipfile.ZIP_DEFLATED),
        "compressed values": repacked("extra", lambda archive: None, zipfile.ZIP_DEFLATED),
        "repeated zip records": repacked(weight, many_times),
        "nested tuple as key in value": repacked("extra", with_key(key)),
        "nested tuple as key in tensor": repacked(weight, with_key(key)),
        "tuple nested 200,000 levels as key": repacked("extra", with_key(b")" + b"\x85" * 200_000)),
        "exponential parameter names": item("optimizer.param_groups", [{"params": [tuples]}]),
        "exponential settings": item("fusedmoe", {"format": 2, "optimizer": {"kind": "AdamW", "settings": [lists]}}),
        "object as index": lambda path, metadata: bad,
        "object in planner data": in_index("planner_data", bad),
        "object in storage data": in_index("storage_data", {"a": bad}),
        "object in storage metadata": in_index("storage_meta", bad),
        "object in state_dict metadata": in_index("state_dict_metadata", bad),
        "object as size": in_entry(weight, "size", bad),
        "object in extra": item("extra", {"step": bad}),
        "list instead of extra": item("extra", [1, 2]),
        "object as description": item("fusedmoe", bad),
        "text as format": item("fusedmoe", {"format": "two"}),
        "text as description": item("fusedmoe", "two"),
        "huge format number": item("fusedmoe", {"format": 10**300}),
        "object in parameter groups": item("optimizer.param_groups", [bad]),
        "dictionary instead of parameter groups": item("optimizer.param_groups", {"lr": 1.0}),
        "object instead of tensor": item(weight, bad),
        "tensor of other shape": item(weight, torch.zeros(7)),
        "number instead of tensor": item(weight, 7),
        "path outside of folder": in_entry(weight, "relative_path", "../../../../etc/passwd"),
        "device file": in_entry(weight, "relative_path", "/dev/zero"),
        "bytes as file name": in_entry(weight, "relative_path", b"__0_0.distcp"),
        "huge length": in_entry(weight, "length", big),
        "negative length": in_entry(weight, "length", -1),
        "text as offset": in_entry(weight, "offset", "0"),
        "offset past end of file": in_entry(weight, "offset", 10**9),
        "unknown transform": in_entry(weight, "transform_descriptors", ["zstd"]),
        "missing items": without_items,
        "missing part": without_a_part,
        "pickle that changes class": class_changed,
        "empty index": lambda path, metadata: b"",
        "zero bytes as index": lambda path, metadata: bytes(1000),
        "number as index": lambda path, metadata: 7,
        "index of 4 GiB memo": lambda path, metadata: b"\x80\x04Nr\xff\xff\xff\xff.",
        "text of 2^62 bytes": lambda path, metadata: b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b".",
        "deeply nested index": lambda path, metadata: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    }
