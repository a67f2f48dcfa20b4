"""Every kernel as it is compiled ahead of time: in all configurations that its launcher can choose.

Each module here has a function `aot_cases() -> list[AotCase]`. The check (tests/kernels/aot.py) finds these functions
by itself, compiles each case for each target without a GPU, and refuses spills and missing instructions. What it found
is kept in bench/aot.json; a test fails where a case is not there.
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
        arguments: every parameter by name. A constexpr parameter: its value. A pointer: the dtype (taken as aligned to
            16 bytes, as tensors are). A number: an example, specialised as a launch would (1, and multiples of 16), or
            its type as text ("i32") for one of no special value. Anything else as Triton's signature text, e.g.
            "tensordesc<bf16[128,64]>". None: the argument is not given.
        options: num_warps, num_stages, maxnreg, …
        targets: of `TARGETS`.
        expect: for a target, instructions that the machine code must have, e.g. {90: ("HGMMA", "UTMALDG")}.
        quick: belongs to the small selection that every test run compiles.
        rare: is left out of the slow tests and of the record, which would take hours; compiled where asked for by name.
        libraries: gives the libraries of device functions that it is linked with, as a launch's `extern_libs`; raises a
            ConfigError where they are not installed, and then the case is left out.
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
        """What `triton.compiler.ASTSource` takes: signature, constexprs and attributes."""
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
