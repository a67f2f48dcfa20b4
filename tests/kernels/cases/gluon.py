"""The Gluon kernels, in the tiles that they are made for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from tests.kernels.cases import AotCase

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Registers that a thread has at launch, two thirds of the threads take more of and the others fewer.
_OPTIONS = {"num_warps": 4, "maxnreg": 168}


class _Tile(NamedTuple):
    bm: int
    bn: int
    bk: int
    stages: int

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk} s{self.stages}"

    def constants(self) -> dict[str, int]:
        sizes = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP": 8, "STAGES": self.stages}
        return {**sizes, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}


_TILES = (_Tile(128, 256, 64, 4), _Tile(128, 128, 64, 6))
_TABLES = {"tiles_ptr": torch.int32, "used_ptr": torch.int32, "ends_ptr": torch.int32, "n_col_tiles": 7}


def _box(dtype: torch.dtype, rows: int, columns: int) -> str:
    return f"tensordesc<{_DTYPES[dtype]}[{rows},{columns}],{_LAYOUT!r}>"


def _case(name: str, kernel: Any, arguments: dict[str, Any], quick: bool) -> AotCase:
    # Weights by bulk copies, products by groups of warps.
    expect = {90: ("HGMMA", "UTMALDG")}
    return AotCase(f"gluon {name}", kernel, arguments, _OPTIONS, targets=(90,), expect=expect, quick=quick)


def _product(dtype: torch.dtype, tile: _Tile, transposed: bool, bias: bool) -> AotCase:
    arguments = {
        "a_desc": _box(dtype, tile.bm, tile.bk),
        "b_desc": _box(dtype, tile.bn, tile.bk) if transposed else _box(dtype, tile.bk, tile.bn),
        "bias_ptr": dtype if bias else None,
        "out_ptr": dtype,
        **_TABLES,
        "K": 1024,
        "N": 4096,
        "bias_start": 0,
        "bias_columns": 4096,
        "TRANSPOSED": transposed,
        "BIAS": bias,
        **tile.constants(),
    }
    name = f"product {_DTYPES[dtype]} {'down' if transposed else 'dinput'}{' bias' if bias else ''} {tile}"
    return _case(name, product_kernel, arguments, quick=transposed and bias and dtype == torch.bfloat16)


def _up(dtype: torch.dtype, tile: _Tile, activation: str, bias: bool, dim: int) -> AotCase:
    act = ACTIVATIONS[activation]
    arguments = {
        "x_ptr": dtype,
        "source_ptr": torch.int64,
        "w_desc": _box(dtype, tile.bn // act.halves, tile.bk),
        "b1_ptr": dtype if bias else None,
        "h_ptr": dtype,
        "a_ptr": dtype,
        **_TABLES,
        "D": dim,
        "H": 1024,
        "ACT": ACT_CODES[activation],
        "GATED": act.gated,
        "BIAS": bias,
        "EVEN": dim % tile.bk == 0,
        "LAG": tile.stages - 2,
        **tile.constants(),
    }
    name = f"up {_DTYPES[dtype]} {activation}{' bias' if bias else ''} {tile} D={dim}"
    return _case(name, up_kernel, arguments, quick=activation == "swiglu" and bias and dtype == torch.bfloat16)


def _cases() -> Iterator[AotCase]:
    for dtype, tile, transposed, bias in product(_DTYPES, _TILES, (True, False), (True, False)):
        yield _product(dtype, tile, transposed, bias)
    for dtype, activation, bias in product(_DTYPES, ACTIVATIONS, (True, False)):
        yield _up(dtype, _TILES[0], activation, bias, 4096)
    for activation in ("swiglu", "gelu"):
        yield _up(torch.bfloat16, _TILES[1], activation, True, 4096)
        # The end of the depth is masked.
        yield _up(torch.bfloat16, _TILES[0], activation, True, 4104)


def aot_cases() -> list[AotCase]:
    return [*_cases()]
