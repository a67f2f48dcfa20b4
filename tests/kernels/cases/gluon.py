"""The Gluon kernels, in every configuration that may be tried of every call that has one.

Of calls of the uncommon kind the first configuration is compiled, the others where they are asked for by name.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.gluon.grouped.launch import CONSUMER_REGISTERS, LAYOUT, PRODUCER_REGISTERS
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.triton.grouped.configs import Config, Variant, gluon_candidates
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from tests.kernels.cases import AotCase
from tests.kernels.cases.grouped import EVEN, is_common, variants

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
_TABLES = {"tiles_ptr": torch.int32, "used_ptr": torch.int32, "ends_ptr": torch.int32, "n_col_tiles": "i32"}


def aot_cases() -> list[AotCase]:
    return [
        _case(variant, candidate.config, first=place == 0)
        for variant in variants(True)
        for place, candidate in enumerate(gluon_candidates(variant, (9, 0)))
    ]


def _case(variant: Variant, config: Config, first: bool) -> AotCase:
    # Weights by bulk copies, products by groups of warps; rows that are looked up by copies of threads.
    gathers = variant.operation == "up"
    arguments = (_up if gathers else _product)(variant, config) | {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "STAGES": config.stages,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    common = is_common(variant)
    return AotCase(
        f"{variant} {config}",
        up_kernel if gathers else product_kernel,
        arguments,
        config.options,
        targets=(90,),
        expect={90: ("HGMMA", "UTMALDG", *(["LDGSTS"] if gathers else []))},
        quick=first and common and variant.dtype == "bfloat16",
        rare=not (first or common),
    )


def _box(variant: Variant, rows: int, columns: int) -> str:
    return f"tensordesc<{_DTYPES[variant.dtype]}[{rows}, {columns}],{LAYOUT!r}>"


def _product(variant: Variant, config: Config) -> dict[str, Any]:
    dtype, transposed = getattr(torch, variant.dtype), variant.operation == "down"
    depth, columns = EVEN
    sides = (config.bn, config.bk) if transposed else (config.bk, config.bn)
    return {
        "a_desc": _box(variant, config.bm, config.bk),
        "b_desc": _box(variant, *sides),
        "bias_ptr": dtype if variant.extra else None,
        "out_ptr": dtype,
        **_TABLES,
        "K": depth,
        "N": columns,
        "bias_start": "i32",
        "bias_columns": "i32",
        "TRANSPOSED": transposed,
        "BIAS": variant.extra,
    }


def _up(variant: Variant, config: Config) -> dict[str, Any]:
    dtype, act = getattr(torch, variant.dtype), ACTIVATIONS[variant.activation]
    depth, columns = EVEN
    return {
        "x_ptr": dtype,
        "source_ptr": torch.int64,
        "w_desc": _box(variant, config.bn // act.halves, config.bk),
        "b1_ptr": dtype if variant.extra else None,
        "h_ptr": dtype,
        "a_ptr": dtype,
        **_TABLES,
        "D": depth,
        "H": columns,
        "ACT": ACT_CODES[variant.activation],
        "GATED": act.gated,
        "BIAS": variant.extra,
        "EVEN": True,
        "LAG": config.stages - 2,
    }
