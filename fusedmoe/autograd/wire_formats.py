"""Wire formats as operators: rows packed for the way between ranks (`fusedmoe.kernels.wire` has the formats' bytes).

Hooks call them where autograd does not look: each pair counts as the identity there. Outside hooks the bfloat16 pair is
differentiable, as casts are; fp8 rows are bytes, through which no gradient goes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedmoe.kernels import operators
from fusedmoe.kernels.derivatives import register_gradient
from fusedmoe.kernels.operators import pack_bf16, pack_fp8, unpack_bf16, unpack_fp8

__all__ = ["pack_bf16", "pack_fp8", "unpack_bf16", "unpack_fp8"]


def _note_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


register_gradient(operators.pack_bf16, lambda ctx, grad: operators.unpack_bf16(grad, ctx.dtype), _note_dtype)
register_gradient(operators.unpack_bf16, lambda ctx, grad: (operators.pack_bf16(grad), None), _note_dtype)
