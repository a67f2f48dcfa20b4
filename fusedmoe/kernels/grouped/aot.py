"""The grouped kernels as they are compiled ahead of time: every configuration that can be chosen, for every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.grouped.configs import Config, candidates
from fusedmoe.kernels.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.grouped.dweight import dweight_kernel
from fusedmoe.kernels.grouped.product import product_kernel
from fusedmoe.kernels.grouped.up import up_kernel

_DIM, _HIDDEN = 4096, 1024
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Tensor cores and bulk copies of each generation; the fifth has its own names for both.
_EXPECT = {80: ("HMMA", "LDGSTS"), 90: ("HGMMA", "UTMALDG"), 100: ("UTCHMMA", "UTMALDG")}


def aot_cases() -> list[AotCase]:
    return [case for target in (80, 90, 100) for dtype in _TYPES for case in _cases(target, dtype)]


def _cases(target: int, dtype: torch.dtype) -> Iterator[AotCase]:
    capability = divmod(target, 10)
    bulk = target >= 90
    for activation, gated in ((0, True), (1, False)):
        for config in candidates("up", dtype, capability):
            halves = 2 if gated else 1
            w1 = _box(dtype, halves, config.bn // halves, config.bk) if bulk else dtype
            arguments = {
                **_tables(),
                **{"x_ptr": dtype, "source_ptr": torch.int64, "w1": w1},
                **{"b1_ptr": dtype, "h_ptr": dtype, "a_ptr": dtype},
                **{"M": _DIM, "H": _HIDDEN, "ACT": activation, "GATED": gated, "GATHER": True, "BIAS": True},
            }
            yield _case(f"up act={activation}", up_kernel, arguments, config, dtype, target, quick=gated)
        for config in candidates("dhidden", dtype, capability):
            w2 = _box(dtype, 1, config.bk, config.bn) if bulk else dtype
            arguments = {
                **_tables(),
                **{"dy_ptr": dtype, "source_ptr": torch.int64, "w2": w2, "weight_ptr": torch.float32},
                **{"h_ptr": dtype, "dh_ptr": dtype, "a_ptr": dtype, "ds_ptr": torch.float32},
                **{"rows": 65536, "M": _DIM, "H": _HIDDEN, "ACT": activation, "GATED": gated, "GATHER": True},
                "WEIGHTED": True,
            }
            yield _case(f"dhidden act={activation}", dhidden_kernel, arguments, config, dtype, target, quick=gated)
    for operation, transposed in (("down", True), ("dinput", False)):
        for config in candidates(operation, dtype, capability):
            box = (1, config.bn, config.bk) if transposed else (1, config.bk, config.bn)
            a, b = (_box(dtype, config.bm, config.bk), _box(dtype, *box)) if bulk else (dtype, dtype)
            arguments = {
                **_tables(),
                **{"a": a, "b": b},
                **{"bias_ptr": dtype, "out_ptr": dtype, "K": _HIDDEN, "N": _DIM, "bias_start": 0, "bias_columns": _DIM},
                **{"TRANSPOSED": transposed, "BIAS": transposed},
            }
            yield _case(operation, product_kernel, arguments, config, dtype, target, quick=transposed)
    for gather_left in (False, True):
        for config in candidates("dweight", dtype, capability):
            solid = _box(dtype, config.bk, config.bn if gather_left else config.bm) if bulk else dtype
            arguments = {
                **{"left_ptr": dtype, "right_ptr": dtype, "solid": solid, "source_ptr": torch.int64, "out_ptr": dtype},
                **{"starts_ptr": torch.int32, "P": 2 * _HIDDEN, "Q": _DIM},
                **{"GATHER_LEFT": gather_left, "GATHER_RIGHT": not gather_left},
            }
            name = f"dweight gather={'left' if gather_left else 'right'}"
            yield _case(name, dweight_kernel, arguments, config, dtype, target, quick=gather_left)


def _box(dtype: torch.dtype, *sizes: int) -> str:
    return f"tensordesc<{_TYPES[dtype]}[{', '.join(str(size) for size in sizes)}]>"


def _tables() -> dict[str, Any]:
    return {"tiles_ptr": torch.int32, "ends_ptr": torch.int32, "n_row_tiles": 640}


def _case(
    name: str, kernel: Any, arguments: dict[str, Any], config: Config, dtype: torch.dtype, target: int, quick: bool
) -> AotCase:
    sizes = {"BK": config.bk, "GROUP": config.group}
    sizes |= {"BP": config.bm, "BQ": config.bn} if "left_ptr" in arguments else {"BM": config.bm, "BN": config.bn}
    if "left_ptr" not in arguments:
        sizes["EVEN_K"] = True
    shape = f"{config.bm}x{config.bn}x{config.bk} w{config.warps} s{config.stages}"
    return AotCase(
        f"{name} {_TYPES[dtype]} {shape} sm_{target}",
        kernel,
        {**arguments, **sizes, "DESCRIPTORS": target >= 90, "PRECISION": "ieee", "INTERPRET": False},
        {"num_warps": config.warps, "num_stages": config.stages},
        targets=(target,),
        expect={} if dtype == torch.float32 else {target: _EXPECT[target]},
        quick=quick and dtype == torch.bfloat16 and config is candidates(name.split()[0], dtype, divmod(target, 10))[0],
    )
