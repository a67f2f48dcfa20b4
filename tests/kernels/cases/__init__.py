"""Every kernel as compiled ahead of time: in all configurations that its launcher can choose.

Each module here has a function `aot_cases() -> list[AotCase]`. The check (tests/kernels/aot.py) discovers these
functions, compiles each case for each target without a GPU, and rejects spills and missing instructions. The results
are kept in bench/aot.json; a test fails if a case is missing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.aot.standin import TARGETS

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, eq=False)
class AotCase:
    """One kernel in one configuration.

    Attributes:
        name: unique among all; starts with the operation, e.g. "gather_sum bf16 K=8 BLOCK=1024".
        kernel: the `triton.jit` function.
        arguments: every parameter by name. A constexpr parameter: its value. A pointer: the dtype (assumed aligned to
            16 bytes, as tensors are). A number: an example, specialised as in a launch (1, and multiples of 16), or
            its type as text ("i32") for a number without special value. Anything else as Triton's signature text, e.g.
            "tensordesc<bf16[128,64]>". None: the argument is absent.
        options: num_warps, num_stages, maxnreg, …
        targets: of `TARGETS`.
        expect: for a target, instructions that the machine code must contain, e.g. {90: ("HGMMA", "UTMALDG")}.
        quick: belongs to the small selection that every test run compiles.
        rare: excluded from the slow tests and from the record, where it would add hours; compiled on request by name.
        libraries: returns the libraries of device functions to link, as a launch's `extern_libs`; raises a
            ConfigError if they are not installed, and the case is then skipped.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[int, ...] = TARGETS
    expect: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    quick: bool = False
    rare: bool = False
    libraries: Callable[[], Mapping[str, str]] = dict

    def specialise(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """Return the arguments of `triton.compiler.ASTSource`: signature, constexprs and attributes."""
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        aligned = [["tt.divisibility", 16]]
        names = [parameter.name for parameter in self.kernel.params]
        if set(names) != set(self.arguments):
            odd = sorted(set(names) ^ set(self.arguments))
            raise ValueError(f"{self.name}: arguments and parameters differ in {', '.join(odd)}")
        for place, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[name], constexprs[name] = "constexpr", value
            elif isinstance(value, torch.dtype):
                signature[name], attributes[place,] = _POINTERS[value], aligned
            elif isinstance(value, str):
                signature[name] = value
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[name], constexprs[name] = "constexpr", 1
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[place,] = aligned
        return signature, constexprs, attributes
