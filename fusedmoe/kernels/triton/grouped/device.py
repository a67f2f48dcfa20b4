"""Device functions of the grouped kernels: tile order, activations and derivatives, matrix multiply-accumulate."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedmoe.kernels.backend import INTERPRET

_INTERPRET = tl.constexpr(INTERPRET)

# Gated activations apply it to the first half.
ACT_CODES = {"silu": 0, "swiglu": 0, "gelu": 1, "geglu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def swizzle(pid, n_row_tiles, n_col_tiles, GROUP: tl.constexpr):
    """Map a program to its row and column tile, in bands of GROUP row tiles whose operands stay in the L2 cache."""
    # Column tiles vary slowest in a band: concurrent programs share columns and the band's rows.
    band = GROUP * n_col_tiles
    first = (pid // band) * GROUP
    height = tl.minimum(n_row_tiles - first, GROUP)
    return first + (pid % band) % height, (pid % band) // height


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)), on a GPU in four instructions: flushing denormals to zero saves eight."""
    if _INTERPRET or x.dtype != tl.float32:
        return tl.sigmoid(x)
    else:
        exponent = x * -1.4426950408889634
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], tl.float32, True, 1)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, True, 1)


@triton.jit
def act_forward(x, ACT: tl.constexpr):
    if ACT == 0:
        return x * sigmoid(x)
    elif ACT == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 2:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def act_both(x, ACT: tl.constexpr):
    if ACT == 0:
        s = sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == 2:
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def mac(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """Return acc + a·b. The interpreter multiplies raw bf16 bits, so it widens operands first."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    return x.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
