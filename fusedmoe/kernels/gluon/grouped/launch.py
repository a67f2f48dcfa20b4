"""Launches of the Gluon kernels: same operands and results as the Triton forms.

The grid has at most one program per multiprocessor. The number of tiles in use is known only on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.gluon.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.gluon.grouped.dweight import dweight_kernel
from fusedmoe.kernels.gluon.grouped.pipeline import rows_of_group
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import HopperConfig
from fusedmoe.kernels.triton.grouped.device import ACT_CODES

# Shared-memory layout of boxes: tensor cores read rows of 128 bytes without bank conflicts.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Registers per consumer and producer thread; three warp groups share 3 · 168. Accumulators take 128.
_WIDE, _NARROW = (232, 40), (208, 88)
# Weight gradients: producers also look up row indices in each step.
MATRIX_REGISTERS = {"CONSUMER_REGISTERS": 224, "PRODUCER_REGISTERS": 56}
# Shared memory per program in bytes, excluding barriers.
_SHARED = 232448 - 1024


def launch_product(
    call: GroupedCall,
    config: HopperConfig,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None,
    bias_start: int,
) -> Tensor:
    columns, depth = (b.shape[1], b.shape[2]) if transposed else (b.shape[2], b.shape[1])
    out = a.new_empty((a.shape[0], columns))
    table, n_col_tiles = call.tiles(config.bm), triton.cdiv(columns, config.bn)
    product_kernel[_grid(config, out, len(table.table) * n_col_tiles)](
        _tensor_descriptor(a, [config.bm, config.bk]),
        _tensor_descriptor(b.view(-1, b.shape[2]), [config.bn, config.bk] if transposed else [config.bk, config.bn]),
        bias, out, _tensor_descriptor(out, result_box_shape(config)),
        table.table, table.used, call.ends_E, depth, columns, n_col_tiles,
        bias_start, 0 if bias is None else bias.shape[1],
        TRANSPOSED=transposed, BIAS=bias is not None, SLOTS=num_result_boxes(config), PINGPONG=config.pingpong,
        **_constants(config),
    )  # fmt: skip
    return out


def launch_up(
    call: GroupedCall,
    config: HopperConfig,
    x_SM: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    h: Tensor,
    a: Tensor,
    activation: Activation,
) -> None:
    dim, hidden, columns = x_SM.shape[1], a.shape[1], config.bn // activation.num_projections
    box, results = result_box_shape(config), activation.num_projections + 1
    table, n_col_tiles = call.tiles(config.bm), triton.cdiv(hidden, columns)
    up_kernel[_grid(config, a, len(table.table) * n_col_tiles)](
        x_SM, call.layout.source_N, _tensor_descriptor(w1.view(-1, dim), [columns, config.bk]), b1, h, a,
        _tensor_descriptor(h[:, :hidden], box), _tensor_descriptor(h[:, -hidden:], box), _tensor_descriptor(a, box),
        table.table, table.used, call.ends_E, dim, hidden, n_col_tiles,
        ACT=ACT_CODES[activation.name], GATED=activation.gated, BIAS=b1 is not None, EVEN=dim % config.bk == 0,
        SLOTS=num_result_boxes(config, activation.num_projections, results), LAG=config.stages - 2,
        COPIES_ARRIVE=config.copies_arrive, **_constants(config),
    )  # fmt: skip


def launch_dhidden(
    call: GroupedCall,
    config: HopperConfig,
    dy_SM: Tensor,
    h: Tensor,
    weight_N: Tensor | None,
    w2: Tensor,
    dh: Tensor | None,
    a: Tensor | None,
    ds: Tensor | None,
    activation: Activation,
) -> None:
    _, dim, hidden = w2.shape
    table, n_col_tiles = call.tiles(config.bm), triton.cdiv(hidden, config.bn)
    dhidden_kernel[_grid(config, h, len(table.table) * n_col_tiles)](
        dy_SM, call.layout.source_N, _tensor_descriptor(w2.view(-1, hidden), [config.bk, config.bn]), weight_N,
        _tensor_descriptor(h, [config.bm, config.bk]),
        dh, a, ds,
        table.table, table.used, call.ends_E, dim, hidden, call.layout.rows, n_col_tiles,
        ACT=ACT_CODES[activation.name], GATED=activation.gated, WEIGHTED=weight_N is not None,
        EVEN=dim % config.bk == 0, LAG=config.stages - 2, **_constants(config),
    )  # fmt: skip


def launch_dweight(
    call: GroupedCall,
    config: HopperConfig,
    left: Tensor,
    right: Tensor,
    gather_left: bool,
    total: Tensor | None,
    out: Tensor,
) -> None:
    """Write the weight gradient to `out`, which may be `total`."""
    p, q, experts = left.shape[1], right.shape[1], call.layout.experts
    gathered, in_order = (left, right) if gather_left else (right, left)
    n_row_tiles, n_col_tiles = triton.cdiv(p, config.bm), triton.cdiv(q, config.bn)
    boxes = None if total is not None else _tensor_descriptor(out.view(-1, q), result_box_shape(config))
    dweight_kernel[_grid(config, out, experts * n_row_tiles * n_col_tiles)](
        gathered, call.layout.source_N,
        in_order, _tensor_descriptor(in_order, [config.bk, config.bn if gather_left else config.bm]), total, out, boxes,
        call.starts_E1, p, q, experts, n_row_tiles, n_col_tiles,
        GATHER_LEFT=gather_left, EVEN=(p % config.bm if gather_left else q % config.bn) == 0,
        SLOTS=num_result_boxes(config, sources=1), LAG=config.stages - 2, **(_constants(config) | MATRIX_REGISTERS),
    )  # fmt: skip


def _grid(config: HopperConfig, out: Tensor, most: int) -> tuple[int]:
    programs = config.programs or torch.cuda.get_device_properties(out.device).multi_processor_count
    return (min(programs, most),)


def _tensor_descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    if tensor.shape[0] == 0:
        tensor = tensor.new_empty((1, *tensor.shape[1:]))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, LAYOUT)


def registers(config: HopperConfig) -> dict[str, int]:
    accumulators = rows_of_group(config.bm, config.pingpong) * config.bn // 128
    consumer, producer = _WIDE if accumulators > 64 else _NARROW
    return {"CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer}


def result_box_shape(config: HopperConfig) -> list[int]:
    return [rows_of_group(config.bm, config.pingpong), 64]


def num_result_boxes(config: HopperConfig, num_projections: int = 1, results: int = 1, sources: int = 0) -> int:
    """Return the number of result boxes of a warp group. A box is a piece of a tile that one bulk copy stores.

    One for each piece of the group's part of a tile, or the largest divisor of that number that fits in
    shared memory.

    Args:
        num_projections: 2 if half of the tile's columns belong to each of two up projections; else 1.
        results: number of matrices to store, each with 1/num_projections of the tile's columns.
        sources: number of row indices kept in shared memory for each of the bk rows of a pipeline step.

    Raises:
        ValueError: shared memory is too small for one box.
    """
    rows, columns = result_box_shape(config)
    left = _SHARED - config.stages * (2 * (config.bm + config.bn) + 8 * sources) * config.bk
    boxes = config.bn // num_projections // columns * results
    for number in range(boxes, 0, -1):
        if boxes % number == 0 and 2 * number * rows * columns * 2 <= left:
            return number
    raise ValueError(f"{config}: no shared memory left for result boxes")


def _constants(config: HopperConfig) -> dict[str, Any]:
    return {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "STAGES": config.stages,
        **registers(config),
        **config.options,
    }
