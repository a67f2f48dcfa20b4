"""The Gluon kernels, in every configuration that may be timed of every call that has a Gluon form.

For uncommon calls only the first configuration is compiled; the rest are compiled on request by name.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.empty_warps import GROUPS, warps_kernel
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.gluon.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.gluon.grouped.dweight import dweight_kernel
from fusedmoe.kernels.gluon.grouped.launch import (
    LAYOUT,
    MATRIX_REGISTERS,
    num_result_boxes,
    registers,
    result_box_shape,
)
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.triton.grouped.configs import HopperConfig, Variant, gluon_candidates
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from tests.kernels.cases import AotCase
from tests.kernels.cases.grouped import EVEN, can_widen, is_common, totals, variants

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
_TABLES = {"tiles_ptr": torch.int32, "used_ptr": torch.int32, "ends_ptr": torch.int32, "n_col_tiles": "i32"}


def aot_cases() -> list[AotCase]:
    warps = AotCase("warp groups", warps_kernel, {"out_ptr": torch.int32, "GROUPS": GROUPS}, targets=(90,))
    return [
        warps,
        *(
            _case(variant, candidate.config, place == 0, widens)
            for variant in variants(True)
            for place, candidate in enumerate(gluon_candidates(variant, (9, 0)))
            for widens in (False, True)[: 1 + can_widen(variant)]
            if isinstance(candidate.config, HopperConfig)
        ),
    ]


def _case(variant: Variant, config: HopperConfig, first: bool, widens: bool) -> AotCase:
    kernel, arguments = _KERNELS[variant.operation](variant, config)
    if variant.operation in ("dw1", "dw2"):
        arguments |= totals(variant, widens)
    arguments = {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "STAGES": config.stages,
        **registers(config),
        **arguments,
    }
    common = is_common(variant)
    return AotCase(
        f"{variant} {config}" + " widened" * widens,
        kernel,
        arguments,
        config.options,
        targets=(90,),
        # Products by warp groups, bulk copies, and threads' copies of gathered rows.
        expect={90: ("HGMMA", "UTMALDG", *(["LDGSTS"] if variant.gather else []))},
        quick=first and common and variant.dtype == "bfloat16" and not widens,
        rare=not (first or common),
    )


def _box(variant: Variant, rows: int, columns: int) -> str:
    return f"tensordesc<{_DTYPES[variant.dtype]}[{rows}, {columns}],{LAYOUT!r}>"


def _product(variant: Variant, config: HopperConfig) -> tuple[Any, dict[str, Any]]:
    dtype, transposed = getattr(torch, variant.dtype), variant.operation == "down"
    depth, columns = EVEN
    sides = (config.bn, config.bk) if transposed else (config.bk, config.bn)
    return product_kernel, {
        "a_desc": _box(variant, config.bm, config.bk),
        "b_desc": _box(variant, *sides),
        "bias_ptr": dtype if variant.extra else None,
        "out_ptr": dtype,
        "out_desc": _box(variant, *result_box_shape(config)),
        **_TABLES,
        "K": depth,
        "N": columns,
        "bias_start": "i32",
        "bias_columns": "i32",
        "TRANSPOSED": transposed,
        "BIAS": variant.extra,
        "SLOTS": num_result_boxes(config),
        "PINGPONG": config.pingpong,
    }


def _up(variant: Variant, config: HopperConfig) -> tuple[Any, dict[str, Any]]:
    dtype, act = getattr(torch, variant.dtype), ACTIVATIONS[variant.activation]
    depth, columns = EVEN
    results = _box(variant, *result_box_shape(config))
    return up_kernel, {
        "x_ptr": dtype,
        "source_ptr": torch.int64,
        "w_desc": _box(variant, config.bn // act.num_projections, config.bk),
        "b1_ptr": dtype if variant.extra else None,
        "h_ptr": dtype,
        "a_ptr": dtype,
        "g_desc": results,
        "u_desc": results,
        "a_desc": results,
        **_TABLES,
        "D": depth,
        "H": columns,
        "ACT": ACT_CODES[variant.activation],
        "GATED": act.gated,
        "BIAS": variant.extra,
        "EVEN": True,
        "SLOTS": num_result_boxes(config, act.num_projections, act.num_projections + 1),
        "LAG": config.stages - 2,
        "COPIES_ARRIVE": config.copies_arrive,
    }


def _dhidden(variant: Variant, config: HopperConfig) -> tuple[Any, dict[str, Any]]:
    dtype, act = getattr(torch, variant.dtype), ACTIVATIONS[variant.activation]
    weight = torch.float32 if variant.extra else None
    depth, columns = EVEN
    return dhidden_kernel, {
        "dy_ptr": dtype,
        "source_ptr": torch.int64,
        "w_desc": _box(variant, config.bk, config.bn),
        "weight_ptr": weight,
        "h_desc": _box(variant, config.bm, config.bk),
        "dh_ptr": dtype,
        "a_ptr": dtype,
        "ds_ptr": weight,
        **_TABLES,
        "D": depth,
        "H": columns,
        "n_rows": "i32",
        "ACT": ACT_CODES[variant.activation],
        "GATED": act.gated,
        "WEIGHTED": variant.extra,
        "EVEN": True,
        "LAG": config.stages - 2,
    }


def _dweight(variant: Variant, config: HopperConfig) -> tuple[Any, dict[str, Any]]:
    dtype, left = getattr(torch, variant.dtype), variant.operation == "dw2"
    height, width = EVEN
    return dweight_kernel, {
        "gathered_ptr": dtype,
        "source_ptr": torch.int64,
        "sorted_ptr": dtype,
        "sorted_desc": _box(variant, config.bk, config.bn if left else config.bm),
        "out_desc": None if variant.extra else _box(variant, *result_box_shape(config)),
        "starts_ptr": torch.int32,
        "P": height,
        "Q": width,
        "experts": "i32",
        "n_row_tiles": "i32",
        "n_col_tiles": "i32",
        **MATRIX_REGISTERS,
        "GATHER_LEFT": left,
        "EVEN": (height % config.bm if left else width % config.bn) == 0,
        "SLOTS": num_result_boxes(config, sources=1),
        "LAG": config.stages - 2,
    }


_KERNELS = {"up": _up, "down": _product, "dinput": _product, "dhidden": _dhidden, "dw1": _dweight, "dw2": _dweight}
