"""Wire formats as operators: rows packed for the way between ranks (`fusedmoe.kernels.wire` has the formats' bytes).

Hooks call them where autograd does not look: each pair counts as the identity there. Outside hooks the bfloat16 pair is
differentiable, as casts are; fp8 rows are bytes, through which no gradient goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels import wire
from fusedmoe.kernels.derivatives import operator, register_fake, register_gradient


@operator("pack_bf16")
def pack_bf16(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M] bfloat16."""
    packed = wire.pack_bf16(rows_NM)
    # An operator returns new memory, also where there is nothing to convert.
    return packed.clone() if packed is rows_NM else packed


@register_fake(pack_bf16)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty(rows_NM.shape, dtype=torch.bfloat16)


@operator("unpack_bf16")
def unpack_bf16(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M] bfloat16 -> [n, M] of `dtype`."""
    rows = packed_NM.to(dtype)
    return rows.clone() if rows is packed_NM else rows


@register_fake(unpack_bf16)
def _(packed_NM: Tensor, dtype: torch.dtype) -> Tensor:
    return packed_NM.new_empty(packed_NM.shape, dtype=dtype)


@operator("pack_fp8")
def pack_fp8(rows_NM: Tensor) -> Tensor:
    """[n, M] floating point -> [n, M + 4] uint8."""
    return wire.pack_fp8(rows_NM)


@register_fake(pack_fp8)
def _(rows_NM: Tensor) -> Tensor:
    return rows_NM.new_empty((rows_NM.shape[0], rows_NM.shape[1] + wire.SCALE_BYTES), dtype=torch.uint8)


@operator("unpack_fp8")
def unpack_fp8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, M + 4] uint8 -> [n, M] of `dtype`."""
    return wire.unpack_fp8(packed, dtype)


@register_fake(unpack_fp8)
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] - wire.SCALE_BYTES), dtype=dtype)


# The backward of either bfloat16 operator is the other, so that both have derivatives of any order.
def _keep_dtype(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


register_gradient(pack_bf16, lambda ctx, grad: (unpack_bf16(grad, ctx.dtype),), _keep_dtype)
register_gradient(unpack_bf16, lambda ctx, grad: (pack_bf16(grad), None), _keep_dtype)
