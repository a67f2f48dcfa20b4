"""Descriptions of user-constructed parts that ranks can compare: constructor arguments and derived attributes.

Equally constructed parts have equal texts on all ranks, without addresses, device indices and hash order. Functions are
described by code, defaults and closure, tensors by a digest, and opaque objects (locks, process groups) by their class.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

# Longer values are cut.
_MAX_CHARACTERS = 160
_MAX_DEPTH = 12
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_arguments"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OPAQUE_PACKAGES = sys.stdlib_module_names | {"torch", "fusedmoe", "numpy"}
_FUNCTION_TYPES = types.FunctionType, types.CodeType, types.MethodType, functools.partial


class Description(str):
    """String without quotation marks in its repr, for values in error messages."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Constructed:
    """Base of parts whose constructor arguments are compared between ranks, including those of subclasses.

    Attributes:
        rank_specific: names of arguments and attributes that may differ between ranks, in addition to those of base
            classes.
    """

    rank_specific: ClassVar[Collection[str]] = ()
    _arguments: dict[str, Description]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Subclasses cannot forget to call `__new__`, and it sees the arguments before they change.
        made = super().__new__(cls)
        object.__setattr__(made, "_arguments", describe_arguments(cls, args, kwargs))
        return made


def describe_arguments(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Description]:
    """Describe a constructor's arguments by name, including defaults. Empty if they do not match its signature."""
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except (TypeError, ValueError):
        return {}  # the constructor raises; or this is a copy, with the attributes of its original
    bound.apply_defaults()
    return {name: describe(value) for name, value in list(bound.arguments.items())[1:]}


def describe_part(part: Constructed, name: str, *, only_arguments: bool = False) -> dict[str, Description]:
    """Describe a part by class, constructor arguments, child modules and attributes that are not tensors.

    Keys start with `name`. `only_arguments`: only attributes named like a constructor argument, for parts with mutable
    state.
    """
    hidden = {own for base in type(part).__mro__ for own in vars(base).get("rank_specific", ())}
    arguments = {key: value for key, value in part._arguments.items() if key not in hidden}
    attributes = {key: value for key, value in vars(part).items() if key not in hidden | _MODULE_ATTRIBUTES}
    if only_arguments:
        named = {own for base in type(part).__mro__ if "__init__" in vars(base) for own in _parameters(base)}
        attributes = {key: value for key, value in attributes.items() if key in named}
    facts = {name: Description(_name_of(type(part)))}
    facts |= {f"{name} argument {key}": value for key, value in arguments.items()}
    facts |= {f"{name}.{key}": describe(value) for key, value in attributes.items() if not isinstance(value, Tensor)}
    if isinstance(part, nn.Module):
        facts |= {f"{name}.{key}": describe(module) for key, module in part.named_children()}
    return facts


def describe(value: object) -> Description:
    """Describe a value as a text; a long text is cut and has a digest of the whole."""
    text = _describe_nested(value, ())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}… (digest {_digest(text.encode())})"
    return Description(text)


def _parameters(cls: type) -> Collection[str]:
    return inspect.signature(cls.__init__).parameters  # type: ignore[misc]


def _describe_nested(value: Any, around: tuple[int, ...]) -> str:
    plain = _describe_plain(value)
    if plain is not None:
        return plain
    if id(value) in around or len(around) > _MAX_DEPTH:
        return f"{_name_of(type(value))} again"
    around = (*around, id(value))

    def inner(part: Any) -> str:
        return _describe_nested(part, around)

    def mapping(items: Mapping[Any, Any]) -> str:
        return f"{{{', '.join(sorted(f'{inner(key)}: {inner(item)}' for key, item in items.items()))}}}"

    if isinstance(value, Mapping):
        return mapping(value)
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, _FUNCTION_TYPES):
        return _describe_function(value, inner)
    if isinstance(value, Constructed):
        return mapping(describe_part(value, "part", only_arguments=True))
    if isinstance(value, nn.Module):
        own = {
            key: attribute
            for key, attribute in vars(value).items()
            if key not in _MODULE_ATTRIBUTES and _is_config(key, attribute)
        }
        tensors = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        shapes = {key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in tensors}
        return f"{_name_of(type(value))}({mapping(own | shapes | dict(value.named_children()))})"
    return _describe_object(value, mapping)


def _is_config(key: str, value: object) -> bool:
    """Return whether a module's attribute is configuration: a public plain value or function.

    Other objects and names with an underscore are excluded: wrappers such as FSDP keep per-rank state in them.
    """
    if key.startswith("_") or isinstance(value, (Tensor, np.ndarray)):
        return False
    if isinstance(value, (list, tuple)):
        return all(_describe_plain(each) is not None for each in value)
    return isinstance(value, _FUNCTION_TYPES) or _describe_plain(value) is not None


def _describe_plain(value: Any) -> str | None:
    """Describe a value that contains no other values; None for other values."""
    if isinstance(value, enum.Enum):
        return str(value)
    # A subclass may print an address, and NumPy's float prints its class.
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, np.generic):
        return _describe_plain(value.item()) or repr(value)
    if isinstance(value, torch.device):
        return value.type  # device indices differ between ranks
    if value is None or isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {list(value.shape)} {_digest(value.tobytes())}"
    if isinstance(value, Tensor):
        return f"tensor of {value.dtype} {list(value.shape)}{_tensor_digest(value)}"
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        return _name_of(value)
    return None


def _describe_function(value: Any, inner: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if isinstance(value, types.MethodType):
        owner = value.__self__  # the state of other owners, such as a trainer, is not configuration
        described = inner(owner) if isinstance(owner, (Constructed, nn.Module, type)) else _name_of(type(owner))
        return f"{inner(value.__func__)} of {described}"
    if isinstance(value, types.CodeType):  # without line numbers and paths
        return f"{value.co_name}{inner(value.co_consts)}{value.co_names}{value.co_freevars}{value.co_code.hex()}"
    closure = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            closure[name] = "unassigned"
    given = [inner(each) for each in (closure, value.__defaults__, value.__kwdefaults__) if each]
    return f"{_name_of(value)}({', '.join(given)}) {_digest(inner(value.__code__).encode())}"


def _describe_object(value: Any, mapping: Any) -> str:
    cls = type(value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return f"{_name_of(cls)}({mapping(fields)})"
    root = cls.__module__.partition(".")[0]
    if root not in _OPAQUE_PACKAGES:
        return f"{_name_of(cls)}({mapping(getattr(value, '__dict__', {}))})"
    # Values of the standard library, such as paths and dates, compare by value.
    if root in sys.stdlib_module_names and cls.__eq__ is not object.__eq__:
        own = getattr(value, "__dict__", None)
        return f"{_name_of(cls)}({mapping(own)})" if own else _ADDRESS.sub("", repr(value))
    return _name_of(cls)


def _name_of(value: Any) -> str:
    # Spawned processes rename the main module.
    module = str(getattr(value, "__module__", "builtins")).replace("__mp_main__", "__main__")
    name = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__))
    return name if module in ("builtins", "None") else f"{module}.{name}"


@torch.no_grad()
def _tensor_digest(tensor: Tensor) -> str:
    # A rank does not have all bits of a DTensor or a fake tensor.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return ""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f" {_digest(flat.view(torch.uint8).numpy().tobytes())}" if flat.numel() else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def describe_parts(
    parts: Mapping[str, Constructed | None], hooks: Sequence[Constructed]
) -> Iterator[Mapping[str, str]]:
    for name, part in parts.items():
        yield {name: Description(None)} if part is None else describe_part(part, name)
    yield {"hooks": Description([_name_of(type(hook)) for hook in hooks])}
    for number, hook in enumerate(hooks):
        yield describe_part(hook, f"hooks[{number}]", only_arguments=True)
