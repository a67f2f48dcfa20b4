"""The grouped kernels as they are compiled ahead of time: every configuration that can be chosen, for every target.

All activations, gathered rows and rows in order, with and without bias or router weights: not every combination, but
each with each configuration of bf16 and float32; fp16 differs from bf16 in conversions only and is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.grouped.configs import OPERATIONS, Config, candidates
from fusedmoe.kernels.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.grouped.dweight import dweight_kernel
from fusedmoe.kernels.grouped.product import product_kernel
from fusedmoe.kernels.grouped.specialised import specialised_kernel
from fusedmoe.kernels.grouped.up import up_kernel

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Dim and hidden width: sizes that are even, and others.
_EVEN, _RAGGED = (4096, 1024), (4101, 1027)
# Tensor cores and bulk copies of each generation; the fifth has its own names for both.
_EXPECT = {80: ("HMMA", "LDGSTS"), 90: ("HGMMA", "UTMALDG"), 100: ("UTCHMMA", "UTMALDG")}
# Warp groups that hand registers to one another: nothing else tells that warps are specialised indeed.
_EXPECT_SPECIALISED = ("HGMMA", "UTMALDG", "USETMAXREG")


class _Form(NamedTuple):
    """One form of an operation; `extra`: a bias or router weights."""

    gather: bool
    extra: bool
    activation: int = 0
    gated: bool = True

    def __str__(self) -> str:
        act = f"act={self.activation}{'' if self.gated else ' plain'}"
        return " ".join(filter(None, [act, "gather" * self.gather, "extra" * self.extra]))


_WITH_ACTIVATION = (
    _Form(True, True),
    _Form(False, False, 1),
    _Form(True, False, 2, False),
    _Form(False, True, 3, False),
)
_FORMS = {
    "up": _WITH_ACTIVATION,
    "dhidden": _WITH_ACTIVATION,
    "down": (_Form(False, True), _Form(False, False)),
    "dinput": (_Form(False, False),),
    "dw1": (_Form(True, False), _Form(False, False)),
    "dw2": (_Form(True, False), _Form(False, False)),
}


class _Launch(NamedTuple):
    operation: str
    dtype: torch.dtype
    target: int
    even: bool
    form: _Form
    config: Config

    @property
    def bulk(self) -> bool:
        return self.even and self.target >= 90

    def box(self, *sizes: int) -> Any:
        """A descriptor of boxes, or without bulk copies a pointer."""
        text = ", ".join(str(size) for size in sizes)
        return f"tensordesc<{_TYPES[self.dtype]}[{text}]>" if self.bulk else self.dtype


def aot_cases() -> list[AotCase]:
    return [_case(launch) for target in (80, 90, 100) for launch in _launches(target)] + list(_bias_gradients())


def _launches(target: int) -> Iterator[_Launch]:
    for dtype in _TYPES:
        for operation in OPERATIONS:
            forms = _FORMS[operation][: 1 if dtype == torch.float16 else None]
            for even in (True, False):
                for candidate in candidates(operation, dtype, divmod(target, 10), even):
                    for form in forms:
                        yield _Launch(operation, dtype, target, even, form, candidate.config)


def _case(launch: _Launch) -> AotCase:
    operation, dtype, target, even, form, config = launch
    kernel, arguments = _KERNELS[operation](launch)
    arguments |= {"BM": config.bm, "BN": config.bn, "BP": config.bm, "BQ": config.bn, "BK": config.bk}
    arguments |= {"GROUP": config.group, "EVEN_K": even, "DESCRIPTORS": launch.bulk}
    arguments |= {"PRECISION": "ieee", "INTERPRET": False}
    known = {parameter.name for parameter in kernel.params}
    expect = _EXPECT_SPECIALISED if config.specialised else _EXPECT[target]
    first = candidates(operation, dtype, divmod(target, 10))[0].config
    return AotCase(
        f"{operation} {_TYPES[dtype]} {form}{'' if even else ' ragged'} {config} sm_{target}",
        kernel,
        {name: value for name, value in arguments.items() if name in known},
        {"num_warps": config.warps, "num_stages": config.stages},
        targets=(target,),
        expect={target: expect} if even and dtype != torch.float32 else {},
        quick=even and dtype == torch.bfloat16 and config is first and form is _FORMS[operation][0],
    )


def _up(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, form, config = launch.dtype, launch.form, launch.config
    halves = 2 if form.gated else 1
    tensors = {
        "x_ptr": dtype,
        "source_ptr": torch.int64 if form.gather else None,
        "w1": launch.box(halves, config.bn // halves, config.bk),
        "b1_ptr": dtype if form.extra else None,
        "h_ptr": dtype,
        "a_ptr": dtype,
    }
    flags = {"ACT": form.activation, "GATED": form.gated, "GATHER": form.gather, "BIAS": form.extra}
    return up_kernel, {**tensors, **_tables(), **_sides(launch, "M", "H"), **flags}


def _dhidden(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, form, config = launch.dtype, launch.form, launch.config
    weight = torch.float32 if form.extra else None
    tensors = {
        "dy_ptr": dtype,
        "source_ptr": torch.int64 if form.gather else None,
        "w2": launch.box(1, config.bk, config.bn),
        "weight_ptr": weight,
        "h_ptr": dtype,
        "dh_ptr": dtype,
        "a_ptr": dtype,
        "ds_ptr": weight,
        "rows": "i32",
    }
    flags = {"ACT": form.activation, "GATED": form.gated, "GATHER": form.gather, "WEIGHTED": form.extra}
    return dhidden_kernel, {**tensors, **_tables(), **_sides(launch, "M", "H"), **flags}


def _product(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, form, config = launch.dtype, launch.form, launch.config
    transposed = launch.operation == "down"
    flags = {"TRANSPOSED": transposed, "BIAS": form.extra}
    if config.specialised:
        tensors = {
            "a_ptr": dtype,
            "b_ptr": dtype,
            "bias_ptr": dtype if form.extra else None,
            "out_ptr": dtype,
            "used_ptr": torch.int32,
            "rows": "i32",
            "E": 128,
            "bias_start": "i32",
            "bias_columns": "i32",
        }
        return specialised_kernel, {**tensors, **_tables(), **_sides(launch, "N", "K"), **flags}
    tensors = {
        "a": launch.box(config.bm, config.bk),
        "b": launch.box(*((1, config.bn, config.bk) if transposed else (1, config.bk, config.bn))),
        "bias_ptr": dtype if form.extra else None,
        "out_ptr": dtype,
        "bias_start": "i32",
        "bias_columns": "i32",
    }
    return product_kernel, {**tensors, **_tables(), **_sides(launch, "N", "K"), **flags}


def _dweight(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, form, config = launch.dtype, launch.form, launch.config
    left = launch.operation == "dw2" and form.gather
    tensors = {
        "left_ptr": dtype,
        "right_ptr": dtype,
        "solid": launch.box(config.bk, config.bn if left else config.bm),
        "source_ptr": torch.int64 if form.gather else None,
        "out_ptr": dtype,
        "starts_ptr": torch.int32,
    }
    flags = {"GATHER_LEFT": left, "GATHER_RIGHT": form.gather and not left}
    return dweight_kernel, {**tensors, **_sides(launch, "P", "Q"), **flags}


_KERNELS = {"up": _up, "dhidden": _dhidden, "down": _product, "dinput": _product, "dw1": _dweight, "dw2": _dweight}


def _bias_gradients() -> Iterator[AotCase]:
    """Sums over an expert's rows: products with a matrix of one column."""
    for target in (80, 90, 100):
        for gather in (False, True):
            config = candidates("dw1", torch.bfloat16, divmod(target, 10), even=False)[0].config
            case = _case(_Launch("dw1", torch.bfloat16, target, False, _Form(gather, False), config))
            name = f"db bf16{' gather' if gather else ''} sm_{target}"
            yield AotCase(name, case.kernel, {**case.arguments, "P": 1, "Q": 4096}, case.options, case.targets)


def _sides(launch: _Launch, dim: str, hidden: str) -> dict[str, int]:
    return dict(zip((dim, hidden), _EVEN if launch.even else _RAGGED, strict=True))


def _tables() -> dict[str, Any]:
    return {"tiles_ptr": torch.int32, "ends_ptr": torch.int32, "n_row_tiles": "i32"}
