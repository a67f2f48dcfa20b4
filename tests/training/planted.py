"""Checkpoints whose index and values were rewritten by someone who knows the format, with right digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedmoe.training import checkpoint_index


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index, and update its digest."""
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
    """Changes of a checkpoint that a load must refuse, by name."""
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
