"""The grouped kernels as compiled ahead of time: every possible launch, in all its possible configurations.

`variants` enumerates the possible launches a second time, independently of the launchers; the configurations are those
of the choice at run time (`configs.candidates`). A test runs the launchers and finds each launch among these cases.

Sizes hardly affect the code: it depends only on whether they are even, multiples of 16, or 1. Sizes that are not even
have all these kinds for one variant of each operation and dtype, and are odd for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from bench.aot.standin import TARGETS, table_of
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.triton.grouped.configs import OPERATIONS, Config, Variant, candidates, has_bulk_copies
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from fusedmoe.kernels.triton.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.triton.grouped.dweight import dweight_kernel
from fusedmoe.kernels.triton.grouped.product import product_kernel
from fusedmoe.kernels.triton.grouped.up import up_kernel
from fusedmoe.kernels.triton.jit import MAX_REGISTERS
from tests.kernels.cases import AotCase

# Depth and columns of an expert's matrix: even, and not even; the first entry represents all if kinds do not matter.
EVEN = (4096, 1024)
ODD = ((4101, 1027), (4112, 1040), (4112, 1027), (4101, 1040), (1, 1027), (4101, 1))
# Sums over an expert's rows, for bias gradients, are products with a matrix of one column.
_BIAS_GRADIENTS = ((1, 4096), (1, 1027))

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PRECISIONS = (("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))
_WITH_ACTIVATION = ("up", "dhidden")
_WITH_GATHER = ("up", "dhidden", "dw1", "dw2")
_WITH_EXTRA = ("up", "down", "dhidden", "dw1", "dw2")
# Tensor cores of each generation.
_PRODUCT = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


def variants(bulk_copies: bool) -> Iterator[Variant]:
    """Enumerate every variant that the launchers distinguish, on GPUs with or without bulk copies."""
    for operation, (dtype, precision), even in product(OPERATIONS, _PRECISIONS, (True, False)):
        activations = ACTIVATIONS if operation in _WITH_ACTIVATION else ("",)
        gathers = (True, False) if operation in _WITH_GATHER else (False,)
        extras = (True, False) if operation in _WITH_EXTRA else (False,)
        for activation, gather, extra in product(activations, gathers, extras):
            yield Variant(operation, dtype, precision, activation, gather, extra, even, even and bulk_copies)


class _Launch(NamedTuple):
    """`in_flight`: rows are awaited, or results put; `nvshmem`: the peers are far.

    `widens`: the addend is in half precision, the sum in float32.
    """

    variant: Variant
    config: Config
    sides: tuple[int, int]
    in_flight: bool = False
    nvshmem: bool = False
    widens: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.variant.dtype)

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.variant.activation].gated

    def box(self, *sizes: int) -> Any:
        """Descriptor of boxes, or a pointer without bulk copies."""
        text = ", ".join(str(size) for size in sizes)
        return f"tensordesc<{_DTYPES[self.variant.dtype]}[{text}]>" if self.variant.bulk else self.dtype


def aot_cases() -> list[AotCase]:
    targets: dict[_Launch, list[int]] = {}
    for target in TARGETS:
        for launch in _launches(target):
            targets.setdefault(launch, []).append(target)
    return [_case(launch, at) for launch, at in targets.items()]


def _launches(target: int) -> Iterator[_Launch]:
    table = table_of(target)
    for variant in variants(has_bulk_copies(table)):
        all_sides: tuple[tuple[int, int], ...] = (EVEN,) if variant.even else ODD[:1]
        if not variant.even and is_common(variant):
            all_sides = ODD
        if not variant.even and variant.operation == "dw1":
            all_sides = tuple(dict.fromkeys(all_sides + _BIAS_GRADIENTS))
        for candidate in candidates(variant.operation, getattr(torch, variant.dtype), table, variant.even):
            for sides in all_sides:
                yield _Launch(variant, candidate.config, sides)
                if can_widen(variant):
                    yield _Launch(variant, candidate.config, sides, widens=True)
            if _can_be_in_flight(variant):
                yield _Launch(variant, candidate.config, all_sides[0], True)
                config = candidate.config
                if variant.operation in ("down", "dinput"):
                    config = replace(config, registers=MAX_REGISTERS)
                yield _Launch(variant, config, all_sides[0], True, True)


def _can_be_in_flight(variant: Variant) -> bool:
    """Whether rows are awaited in a window, or results put; some of these variants represent the rest."""
    if variant.operation in ("up", "dhidden"):
        return variant.gather and is_common(variant)
    return variant.operation in ("down", "dinput")


def can_widen(variant: Variant) -> bool:
    """Whether this is a matrix gradient in half precision, added to that of a first chunk."""
    return variant.operation in ("dw1", "dw2") and variant.extra and variant.dtype != "float32"


def is_common(variant: Variant) -> bool:
    """Select one variant of each operation, dtype and precision; two for matrix gradients: alone, and added."""
    gather, extra = variant.operation in _WITH_GATHER, variant.operation in _WITH_EXTRA
    if variant.operation in ("dw1", "dw2"):
        return variant.gather
    return variant.activation in ("", "swiglu") and (variant.gather, variant.extra) == (gather, extra)


def _case(launch: _Launch, targets: list[int]) -> AotCase:
    variant, config, sides, *_ = launch
    kernel, arguments = _KERNELS[variant.operation](launch)
    arguments |= {"BM": config.bm, "BN": config.bn, "BP": config.bm, "BQ": config.bn, "BK": config.bk}
    arguments |= {"GROUP": config.group, "EVEN_K": variant.even, "DESCRIPTORS": variant.bulk}
    arguments |= {"PRECISION": variant.precision, "INTERPRET": False}
    known = {parameter.name for parameter in kernel.params}
    first = [candidates(variant.operation, launch.dtype, table_of(at), variant.even)[0].config for at in targets]
    common, chosen = is_common(variant), config in first
    rare = not common or sides not in (EVEN, ODD[0])
    words = [str(variant), str(config), *([] if variant.even else ["{}x{}".format(*sides)])]
    return AotCase(
        " ".join(words) + " in flight" * launch.in_flight + " nvshmem" * launch.nvshmem + " widened" * launch.widens,
        kernel,
        {name: value for name, value in arguments.items() if name in known},
        config.options,
        tuple(targets),
        {target: _expect(launch, target) for target in targets if target == 90 or not rare},
        quick=common and variant.even and variant.dtype == "bfloat16" and chosen and not launch.nvshmem,
        rare=rare or ((launch.in_flight or launch.widens) and config not in first) or launch.nvshmem,
        libraries=nvshmem_bitcode if launch.nvshmem else dict,
    )


def _expect(launch: _Launch, target: int) -> tuple[str, ...]:
    """Instructions of tensor cores, and of copies that bypass registers."""
    variant = launch.variant
    words = []
    if variant.dtype != "float32":
        words.append(_PRODUCT[target])
    if variant.bulk:
        words.append("UTMALDG")
    bulk_alone = variant.bulk and not variant.gather and variant.operation in ("down", "dinput", "dw1", "dw2")
    if variant.even and not bulk_alone:
        words.append("LDGSTS")
    return tuple(words)


def _up(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, variant, config = launch.dtype, launch.variant, launch.config
    num_projections = 2 if launch.gated else 1
    tensors = {
        "x_ptr": dtype,
        "source_ptr": torch.int64 if variant.gather else None,
        "w1": launch.box(num_projections, config.bn // num_projections, config.bk),
        "b1_ptr": dtype if variant.extra else None,
        "h_ptr": dtype,
        "a_ptr": dtype,
    }
    flags = {"GATHER": variant.gather, "BIAS": variant.extra, **_activation(launch), **_waiting(launch)}
    return up_kernel, {**tensors, **_tables(), **_sides(launch, "M", "H"), **flags}


def _dhidden(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, variant, config = launch.dtype, launch.variant, launch.config
    weight = torch.float32 if variant.extra else None
    tensors = {
        "dy_ptr": dtype,
        "source_ptr": torch.int64 if variant.gather else None,
        "w2": launch.box(1, config.bk, config.bn),
        "weight_ptr": weight,
        "h_ptr": dtype,
        "dh_ptr": dtype,
        "a_ptr": dtype,
        "ds_ptr": weight,
        "rows": "i32",
    }
    flags = {
        "GATHER": variant.gather,
        "WEIGHTED": variant.extra,
        "PART": min(32, config.bn // 4),
        **_activation(launch),
        **_waiting(launch),
    }
    return dhidden_kernel, {**tensors, **_tables(), **_sides(launch, "M", "H"), **flags}


def _product(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, variant, config = launch.dtype, launch.variant, launch.config
    transposed = variant.operation == "down"
    bias = {
        "bias_ptr": dtype if variant.extra else None,
        "bias_start": "i32",
        "bias_columns": "i32",
        "BIAS": variant.extra,
    }
    common = {"out_ptr": dtype, "TRANSPOSED": transposed, **bias, **_tables(), **_sides(launch, "K", "N")}
    columns, depth = config.bn, config.bk
    own = {
        "a": launch.box(config.bm, depth),
        "b": launch.box(1, columns, depth) if transposed else launch.box(1, depth, columns),
    }
    return product_kernel, {**common, **own, **_putting(launch)}


def _dweight(launch: _Launch) -> tuple[Any, dict[str, Any]]:
    dtype, variant, config = launch.dtype, launch.variant, launch.config
    left, right = (variant.gather and variant.operation == name for name in ("dw2", "dw1"))
    tensors = {
        "left_ptr": dtype,
        "right_ptr": dtype,
        "left_rows": None if left or not variant.bulk else launch.box(config.bk, config.bm),
        "right_rows": None if right or not variant.bulk else launch.box(config.bk, config.bn),
        "source_ptr": torch.int64 if variant.gather else None,
        **totals(variant, launch.widens),
        "starts_ptr": torch.int32,
    }
    even = variant.even and launch.sides[0] % config.bm == 0 and launch.sides[1] % config.bn == 0
    flags = {"GATHER_LEFT": left, "GATHER_RIGHT": right, "EVEN": even, "NARROW": True}
    return dweight_kernel, {**tensors, **_sides(launch, "P", "Q"), **flags}


def totals(variant: Variant, widens: bool) -> dict[str, Any]:
    """Matrices to add to, and result matrices."""
    dtype = getattr(torch, variant.dtype)
    if not variant.extra:
        return {"total_ptr": None, "out_ptr": dtype}
    return {"total_ptr": dtype if widens else torch.float32, "out_ptr": torch.float32}


_KERNELS = {"up": _up, "dhidden": _dhidden, "down": _product, "dinput": _product, "dw1": _dweight, "dw2": _dweight}


def _activation(launch: _Launch) -> dict[str, Any]:
    return {"ACT": ACT_CODES[launch.variant.activation], "GATED": launch.gated}


def _waiting(launch: _Launch) -> dict[str, Any]:
    if not launch.in_flight:
        nothing = dict.fromkeys(("signals_ptr", "epoch_ptr", "stop_ptr", "record_ptr", "limit_ns"))
        return {**nothing, "WAIT_ROWS": 0, "NVSHMEM": False}
    words = dict.fromkeys(("signals_ptr", "epoch_ptr", "stop_ptr", "record_ptr"), torch.int64)
    return {**words, "limit_ns": "i64", "WAIT_ROWS": 128, "NVSHMEM": launch.nvshmem}


def _putting(launch: _Launch) -> dict[str, Any]:
    names = ("address_ptr", "weight_ptr", "peer_ptr", "counter_ptr", "num_rows_ptr", "signal_ptr", "epoch_ptr", "W")
    far = ("done_ptr", "target_ptr", "pe_ptr")
    if not launch.in_flight:
        return {**dict.fromkeys((*names, *far)), "PUT": False, "WEIGHTED": False, "ALIGNED": False, "NVSHMEM": False}
    # Weights are applied in the same kernel to results, but not to gradients.
    weighted = launch.variant.operation == "down"
    i32, i64 = torch.int32, torch.int64
    values = (i64, torch.float32 if weighted else None, i32, i32, i32, i64, i64, 8)
    more = (i32, i64, i32) if launch.nvshmem else (None,) * 3
    arguments = dict(zip((*names, *far), (*values, *more), strict=True))
    aligned = launch.sides[1] * launch.dtype.itemsize % 16 == 0
    return {**arguments, "PUT": True, "WEIGHTED": weighted, "ALIGNED": aligned, "NVSHMEM": launch.nvshmem}


def _sides(launch: _Launch, depth: str, columns: str) -> dict[str, int]:
    return dict(zip((depth, columns), launch.sides, strict=True))


def _tables() -> dict[str, Any]:
    return {"tiles_ptr": torch.int32, "ends_ptr": torch.int32, "n_row_tiles": "i32"}
