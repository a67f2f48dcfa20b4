"""Register contents of a kernel: numbers, tensors of numbers, and pointers.

Numbers created in a kernel (`range`, constants) are Python numbers. Layouts are ignored: the compiler checks them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor

from tests.gluon_interpreter.faults import KernelFault, NotInterpreted

_DTYPES: tuple[tuple[Any, torch.dtype], ...] = (
    (gl.bfloat16, torch.bfloat16),
    (gl.float16, torch.float16),
    (gl.float32, torch.float32),
    (gl.float64, torch.float64),
    (gl.int1, torch.bool),
    (gl.int32, torch.int32),
    (gl.int64, torch.int64),
)


def torch_dtype(dtype: Any) -> torch.dtype:
    for theirs, ours in _DTYPES:
        if theirs == dtype:
            return ours
    raise NotInterpreted(f"numbers of {dtype}")


def language_dtype(dtype: torch.dtype) -> Any:
    for theirs, ours in _DTYPES:
        if ours == dtype:
            return theirs
    raise NotInterpreted(f"numbers of {dtype}")


def numbers(value: Any) -> Any:
    """The tensor of a value; Python numbers unchanged."""
    if isinstance(value, Value):
        return value.data
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Pending):
        raise value.unready("a number")
    raise NotInterpreted(f"{type(value).__name__} as a number")


def _pair(left: Any, right: Any) -> tuple[Any, Any]:
    """Promote both to one type: torch would convert a scalar of a wider type to the tensor's type."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        dtype = torch.promote_types(left.dtype, right.dtype)
        return left.to(dtype), right.to(dtype)
    return left, right


class Value:
    """A tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Any:
        return language_dtype(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        return [*self.data.shape]

    def to(self, dtype: Any) -> Value:
        return Value(self.data.to(torch_dtype(dtype)))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(_flat(shape)))

    def permute(self, *order: Any) -> Value:
        return Value(self.data.permute(_flat(order)))

    def split(self) -> tuple[Value, Value]:
        if self.data.shape[-1] != 2:
            raise NotInterpreted(f"split of a last dimension of {self.data.shape[-1]}")
        first, second = self.data.unbind(-1)
        return Value(first), Value(second)

    def __getitem__(self, index: Any) -> Value:
        parts = index if isinstance(index, tuple) else (index,)
        if any(part is not None and part != slice(None) for part in parts):
            raise NotInterpreted("an index other than None and :")
        return Value(self.data[index])

    def __getattr__(self, name: str) -> Any:
        raise NotInterpreted(f"{name} of a tensor")

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


class Pointer:
    """Pointers into one tensor: `places` indexes its elements."""

    def __init__(self, base: Tensor, places: Tensor) -> None:
        self.base, self.places = base, places

    @property
    def dtype(self) -> Any:
        return gl.pointer_type(language_dtype(self.base.dtype))

    @property
    def shape(self) -> list[int]:
        return [*self.places.shape]

    def __add__(self, other: Any) -> Pointer:
        places = numbers(other)
        return Pointer(self.base, self.places + (places.to(torch.int64) if isinstance(places, Tensor) else places))

    def __getattr__(self, name: str) -> Any:
        raise NotInterpreted(f"{name} of a pointer")

    def inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Broadcast places and mask to one shape; raise if an unmasked place is outside the tensor."""
        mask = torch.tensor(True) if mask is None else torch.as_tensor(numbers(mask))
        places, mask = torch.broadcast_tensors(self.places, mask)
        wrong = mask & ((places < 0) | (places >= self.base.numel()))
        if wrong.any():
            raise KernelFault(f"element {int(places[wrong][0])} of a tensor of {self.base.numel()} elements")
        return torch.where(mask, places, 0), mask

    def load(self, mask: Any, other: Any) -> Value:
        """Load elements; masked elements are `other`, or NaN (an arbitrary integer for integer types) by default."""
        places, mask = self.inside(mask)
        nothing = torch.nan if self.base.is_floating_point() else 0x3ABCDEF0
        fill = nothing if other is None else numbers(other)
        if not self.base.numel():
            return Value(torch.full(places.shape, fill, dtype=self.base.dtype))
        found = self.base.view(-1)[places]
        return Value(torch.where(mask, found, torch.as_tensor(fill, dtype=self.base.dtype)))

    def store(self, value: Any, mask: Any) -> None:
        places, mask = self.inside(mask)
        data = torch.as_tensor(numbers(value)).to(self.base.dtype).broadcast_to(places.shape)
        self.base.view(-1)[places[mask]] = data[mask]


def _flat(numbers_: Sequence[Any]) -> list[int]:
    first = numbers_[0]
    return [int(number) for number in (first if isinstance(first, list | tuple) else numbers_)]


def _divided(left: Any, right: Any) -> Any:
    # Truncation as in hardware; positive Python numbers are computed outside this function.
    return torch.div(left, right, rounding_mode="trunc")


def _remainder(left: Any, right: Any) -> Any:
    return torch.fmod(left, right)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": _divided,
    "mod": _remainder,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def calculate(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Value:
    """Apply a function to two values, or to a value and a number."""
    return Value(torch.as_tensor(function(*_pair(numbers(left), numbers(right)))))


def _method(function: Callable[[Any, Any], Any], swap: bool) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if not isinstance(other, Value | bool | int | float):
            return NotImplemented
        left, right = (other, self) if swap else (self, other)
        if swap and function in (_divided, _remainder) or isinstance(left, float):
            left = Value(torch.as_tensor(left, dtype=self.data.dtype))
        return calculate(function, left, right)

    return method


for _name, _function in _BINARY.items():
    setattr(Value, f"__{_name}__", _method(_function, swap=False))
    setattr(Value, f"__r{_name}__", _method(_function, swap=True))
for _name in _COMPARISONS:
    setattr(Value, f"__{_name}__", _method(getattr(operator, _name), swap=False))


class Pending:
    """The result of a product in flight, readable only by a wait or by a product that accumulates into it."""

    def __init__(self, number: int, line: str) -> None:
        self.number, self.line, self.value = number, line, torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        raise self.unready(name)

    def unready(self, name: str) -> KernelFault:
        return KernelFault(f"registers of the product in {self.line} are read ({name}) before a wait for it")


def _unready(name: str) -> Callable[..., Any]:
    def method(self: Pending, *others: Any) -> Any:
        raise self.unready(name)

    return method


for _name in [*(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r")), "__getitem__", "__neg__"]:
    setattr(Pending, _name, _unready(_name))
