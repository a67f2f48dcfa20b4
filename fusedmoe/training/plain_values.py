"""JSON encoding of checkpoint values: a closed set of types that round-trip with type and value.

JSON lacks tuples, bytes, infinities and non-string keys. Such a value is encoded as an object with one key, a tag that
starts with "$". Tensors are numbered in order of first occurrence and stored separately. Decoding looks up the tag in a
table.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from enum import Enum
from functools import partial
from math import isfinite, prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError

#: Storable dtypes by name: PyTorch can copy them between all devices.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
}

#: fetch(number, dtype, shape): returns the tensor with this number. Called once per number.
Fetch = Callable[[int, torch.dtype, torch.Size], Tensor]

# JSON parsers recurse: a deeper value could be writable on one stack and unreadable on another.
_MAX_DEPTH = 100
_TENSORS = {"Tensor": Tensor, "Parameter": nn.Parameter}
_SCALAR_KINDS = "biufcMm"
_ARRAY_KINDS = f"{_SCALAR_KINDS}SU"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[a-zA-Zμ]{{1,7}}\])?")
_CONVERSION_ADVICE = {
    torch.Generator: "Store its get_state()",
    random.Random: "Store its getstate()",
    datetime: "Convert it to UTC, by astimezone(timezone.utc)",
    np.random.Generator: "Store its bit_generator.state",
    np.random.RandomState: "Store its get_state()",
    np.random.BitGenerator: "Store its state",
    time: "Store its isoformat()",
    complex: "Store [value.real, value.imag]",
    Enum: "Store its value",
}


class EncodedValue(NamedTuple):
    """JSON text of a value and the tensors to which it refers by number."""

    text: str
    tensors: list[Tensor]

    def digest(self) -> str:
        """Return a hash that does not depend on the order of dictionaries."""
        digests = [hashlib.sha256(byte_buffer(tensor_bytes(tensor))).hexdigest() for tensor in self.tensors]
        text = json.dumps(_sorted(json.loads(self.text), digests), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def pack(self) -> Tensor:
        """Return text and tensors as one buffer [n] uint8 for `unpack_value`."""
        text = self.text.encode("ascii")
        head = bytearray(struct.pack("<Q", len(text)) + text)
        return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *map(tensor_bytes, self.tensors)])


def encode_value(value: Any, label: str) -> EncodedValue:
    """Encode a value. Raise `ConfigError`, prefixed with `label`, that names the first unsupported part."""
    encoder = _Encoder(label)
    held = encoder.encode(value, "")
    text = json.dumps(held, allow_nan=False)
    encoded = EncodedValue(text, encoder.tensors)
    # Verify the round trip: JSON joins two consecutive surrogates, for example.
    inexact = ConfigError(f"{label} cannot be stored exactly. Convert it to plain values.")
    try:
        read = decode_value(text, lambda number, dtype, shape: encoder.tensors[number])
    except ValueError as error:
        raise inexact from error
    again = _Encoder(label).encode(read, "")
    if json.dumps(again, ensure_ascii=False) != json.dumps(held, ensure_ascii=False):
        raise inexact
    return encoded


def decode_value(text: str | bytes, fetch: Fetch) -> Any:
    """Decode the text of `encode_value`. Raise `ValueError` for other text."""
    made: dict[int, Tensor] = {}

    def tensor(number: int, *about: Any) -> Tensor:
        if number not in made:
            made[number] = _from_tensor(fetch, number, *about)
        return made[number]

    try:
        return _decode(json.loads(text, parse_constant=_refuse_constant), tensor)
    except ConfigError:
        raise
    except Exception as error:  # a payload of the wrong type, or nested too deeply
        raise ValueError(f"it is no value of a checkpoint ({type(error).__name__}: {error})"[:300]) from error


def unpack_value(data: Tensor) -> Any:
    """Decode a buffer from `EncodedValue.pack`. Raise `ValueError` for other buffers."""
    raw = data.numpy().tobytes()
    (length,) = struct.unpack_from("<Q", raw)
    at = 8 + length
    if at > len(raw):
        raise ValueError("its text is cut off")
    expected = 0

    def fetch(number: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        nonlocal at, expected
        size = prod(shape) * dtype.itemsize
        if number != expected or at + size > len(raw):
            raise ValueError("its tensors are cut off")
        buffer = torch.frombuffer(bytearray(raw[at : at + size]), dtype=torch.uint8) if size else data[:0].clone()
        at, expected = at + size, expected + 1
        return buffer.view(dtype).view(shape)

    return decode_value(raw[8 : 8 + length], fetch)


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in row-major order as bytes [n] uint8 on the CPU."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def byte_buffer(data: Tensor) -> Any:
    """Return the memory of a uint8 tensor [n]. NumPy arrays have no buffer type before Python 3.12."""
    return data.numpy()


def require_storable(tensor: Tensor, label: str) -> None:
    """Raise `ConfigError`, prefixed with `label`, for a tensor without dense storage of a dtype in `DTYPES`."""
    problem = fix = ""
    if nn.parameter.is_lazy(tensor):
        problem, fix = "is not initialised", "Run one forward pass first"
    elif tensor.is_meta:
        problem, fix = "is on the meta device", "Give it memory first: model.to_empty(device=…)"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem, fix = f"is of class {_name(type(tensor))}", "Convert it, or leave it out"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        problem, fix = (
            f"has layout {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}",
            "Convert it by to_dense()",
        )
    elif tensor.dtype not in DTYPES.values():
        problem, fix = f"has dtype {dtype_name(tensor.dtype)}", "Convert it, or leave it out"
    if problem:
        raise ConfigError(f"{label} {problem}, and checkpoints do not store it. {fix}.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_of(values: Any) -> torch.Size:
    """Parse a JSON list as a shape. Raise `ValueError` for anything else."""
    if (
        type(values) is not list
        or len(values) > 64
        or any(type(one) is not int or not 0 <= one < 2**62 for one in values)
    ):
        raise ValueError(f"a {type(values).__name__} is no shape, or one of its sizes is out of bounds")
    return torch.Size(values)


class _Encoder:
    def __init__(self, label: str) -> None:
        self._label = label
        self._open_containers: set[int] = set()
        self._tensor_numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def encode(self, value: Any, where: str) -> Any:
        """Return the JSON representation of a value. Errors name its position, `where`."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
        if kind is float:
            return value if isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is torch.dtype and value not in DTYPES.values():
            raise ConfigError(
                f"{self._label}{where[:200]} is {value}, which checkpoints do not store. Store its name: str(dtype)."
            )
        if kind in _SCALARS:
            tag, encode, _ = _SCALARS[kind]
            return {tag: encode(value)}
        if kind in _TENSORS.values():
            return {"$tensor": self._tensor(value, where)}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return {"$ndarray": [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
        if isinstance(value, np.generic) and kind is value.dtype.type and value.dtype.kind in _SCALAR_KINDS:
            return {"$numpy": [value.dtype.str, _base64(value.tobytes())]}
        if kind is datetime and _is_stored_zone(value.tzinfo):
            return {"$datetime": [value.isoformat(), value.fold]}
        if kind not in _CONTAINERS:
            raise self._unsupported_class_error(value, where)
        if id(value) in self._open_containers or len(self._open_containers) >= _MAX_DEPTH:
            raise ConfigError(
                f"{self._label}{where[:200]} contains itself, or is nested in more than {_MAX_DEPTH} containers."
            )
        self._open_containers.add(id(value))
        found = self._container(value, where)
        self._open_containers.remove(id(value))
        return found

    def _container(self, value: Any, where: str) -> Any:
        kind, tag = type(value), _CONTAINERS[type(value)]
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(element, f"{where}[{key!r}]") for key, element in value.items()}
        if isinstance(value, dict):
            pairs = [
                [self._key(key, where), self.encode(element, f"{where}[{_safe_repr(key)}]")]
                for key, element in value.items()
            ]
            attributes = getattr(value, "__dict__", {})
            for name in attributes.keys() - {"_metadata"}:
                raise ConfigError(f"{self._label}{where} has an attribute {name!r}, which checkpoints do not store.")
            # A module's state_dict() stores versions in `_metadata`, used by later releases to convert it.
            return {tag: [pairs, *(self.encode(element, f"{where}._metadata") for element in attributes.values())]}
        if isinstance(value, set | frozenset):
            return {tag: sorted((self.encode(element, where) for element in value), key=json.dumps)}
        elements = [self.encode(element, f"{where}[{index}]") for index, element in enumerate(value)]
        return elements if kind is list else {tag: elements}

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, Tensor):
            raise self._unsupported_class_error(key, f"{where}: a key")
        return self.encode(key, f"{where}: the key {_safe_repr(key)}")

    def _tensor(self, tensor: Tensor, where: str) -> list[Any]:
        require_storable(tensor, f"{self._label}{where}")
        number = self._tensor_numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return [number, dtype_name(tensor.dtype), list(tensor.shape), tensor.requires_grad, type(tensor).__name__]

    def _unsupported_class_error(self, value: Any, where: str) -> ConfigError:
        kind, plain = type(value), (dict, list, tuple, str, int, float, set, Tensor, np.ndarray)
        base = next((known for known in plain if isinstance(value, known)), None)
        advice = next((_CONVERSION_ADVICE[known] for known in kind.__mro__ if known in _CONVERSION_ADVICE), None)
        if advice is None and is_dataclass(kind):
            advice = "Store dataclasses.asdict() of it"
        if advice is None:
            advice = (
                "Store its state_dict() or plain values" if base is None else f"Convert it to a plain {base.__name__}"
            )
        if kind in (np.ndarray, np.void, np.object_):
            advice = f"Its dtype is {value.dtype}: convert it to numbers or text"
        return ConfigError(
            f"{self._label}{where[:200]} is of class {_name(kind)}, which checkpoints do not store. {advice}."
        )


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _safe_repr(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return _name(type(key))


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _is_stored_zone(zone: tzinfo | None) -> bool:
    """Return whether `isoformat` round-trips a time zone: None, or a fixed offset without a name."""
    return zone is None or (type(zone) is timezone and str(zone) == str(timezone(zone.utcoffset(None))))


def _elements(payload: Any, tag: str, number: int) -> list[Any]:
    if type(payload) is not list or len(payload) != number:
        found = f"{len(payload)} elements" if type(payload) is list else type(payload).__name__
        raise ValueError(f"{tag} has {found}; expected a list of {number}")
    return payload


def _path(payload: Any) -> Path:
    if type(payload) is not str:
        raise ValueError(f"$path has {type(payload).__name__}; expected str")
    return Path(payload)


def _datetime(text: str, fold: int) -> datetime:
    return datetime.fromisoformat(text).replace(fold=fold)


# Tag, encoder and decoder.
_SCALARS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("$bytes", _base64, partial(b64decode, validate=True)),
    date: ("$date", date.isoformat, date.fromisoformat),
    timedelta: (
        "$timedelta",
        attrgetter("days", "seconds", "microseconds"),
        lambda payload: timedelta(*_elements(payload, "$timedelta", 3)),
    ),
    torch.dtype: ("$dtype", dtype_name, DTYPES.__getitem__),
    torch.device: ("$device", str, torch.device),
    type(Path()): ("$path", str, _path),
}

_CONTAINERS: dict[type, str] = {
    list: "",
    dict: "$dict",
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    OrderedDict: "$OrderedDict",
    Counter: "$Counter",
    torch.Size: "$Size",
}


def _decode(held: Any, tensor: Callable[..., Tensor]) -> Any:
    if type(held) is list:
        return [_decode(element, tensor) for element in held]
    if type(held) is not dict:
        return held
    if not any(key.startswith("$") for key in held):
        return {key: _decode(element, tensor) for key, element in held.items()}
    ((tag, payload),) = held.items()
    if tag == "$tensor":
        return tensor(*_elements(payload, tag, 5))
    if tag in _DECODERS:
        return _DECODERS[tag](payload)
    kind: Any = _CLASSES_BY_TAG[tag]
    if not issubclass(kind, dict):
        if type(payload) is not list:
            raise ValueError("a container has no list of elements")
        return size_of(payload) if kind is torch.Size else kind([_decode(element, tensor) for element in payload])
    pairs, *versions = payload
    made = kind()
    for key, element in pairs:
        made[_decode(key, tensor)] = _decode(element, tensor)
    if versions:
        (made._metadata,) = (_decode(element, tensor) for element in versions)
    return made


def _from_tensor(fetch: Fetch, number: Any, dtype: Any, shape: Any, requires_grad: Any, kind: Any) -> Tensor:
    if type(number) is not int or number < 0 or type(requires_grad) is not bool:
        raise ValueError("a tensor has no number")
    tensor, made = fetch(number, DTYPES[dtype], size_of(shape)), _TENSORS[kind]
    if type(tensor) is not made:
        tensor = nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad and not tensor.requires_grad else tensor


def _array(dtype: str, shape: Any, text: str) -> Any:
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError("no dtype of an array")
    return np.ndarray(tuple(size_of(shape)), np.dtype(dtype), bytearray(b64decode(text, validate=True)))


def _number(dtype: str, text: str) -> Any:
    return _array(dtype, [1], text)[0]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$ndarray": lambda payload: _array(*_elements(payload, "$ndarray", 3)),
    "$numpy": lambda payload: _number(*_elements(payload, "$numpy", 2)),
    "$datetime": lambda payload: _datetime(*_elements(payload, "$datetime", 2)),
    **{tag: decode for tag, _, decode in _SCALARS.values()},
}
_CLASSES_BY_TAG: dict[str, type] = {tag: kind for kind, tag in _CONTAINERS.items() if tag}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} has no place in JSON")


def _sorted(held: Any, digests: list[str]) -> Any:
    """Return a parsed encoding that is equal for equal values: sorts the items of plain dictionaries.

    Args:
        held: parsed JSON of an `EncodedValue`. Its tensors are indices into `digests`, by which they are replaced.
        digests: digest of each tensor.
    """
    if isinstance(held, list):
        return [_sorted(element, digests) for element in held]
    if not isinstance(held, dict):
        return held
    if "$tensor" in held:
        number, *about = held["$tensor"]
        return {"$tensor": [digests[number], *about]}
    if "$dict" in held:
        pairs: Iterable[Any] = (_sorted(pair, digests) for pair in held["$dict"][0])
        return {"$dict": sorted(pairs, key=lambda pair: json.dumps(pair, sort_keys=True))}
    return {key: _sorted(element, digests) for key, element in held.items()}
