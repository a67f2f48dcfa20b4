"""Elements beyond an offset of 2³¹: every offset that a Gluon kernel counts in elements needs 64 bits.

The tensors are sparse files, in which only the pages in use exist; a launch is one tile, far from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmoe.kernels.gluon.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.gluon.grouped.dweight import dweight_kernel
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.grouped import define_dhidden
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from tests.gluon_interpreter import interpret
from tests.kernels.gluon.grouped_cases import SMALL, SMALL_MATRIX

Far = Callable[..., Tensor]
DEPTH, COLUMNS, COUNT = 24, 40, 5
# First of several rows whose elements are all beyond 2³¹ in a tensor of any of these widths.
FIRST = 2**31 // DEPTH + 1
ROWS = FIRST + COUNT
BF16 = torch.bfloat16
BOX = (SMALL.bm // 2, SMALL.swizzle // 2)
RELU = ACT_CODES["relu"]


@pytest.fixture
def sparse_zeros(tmp_path: Path) -> Far:
    """Allocate zero tensors."""

    def make(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
        size, file = torch.Size(sizes).numel(), tmp_path / str(len([*tmp_path.iterdir()]))
        return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(sizes)

    return make


def random(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    """Small whole numbers: their products and sums are exact."""
    return torch.randint(-2, 3, sizes).to(dtype)


def tables() -> tuple[Tensor, ...]:
    """One tile, far from the first row."""
    return tuple(torch.tensor(of, dtype=torch.int32) for of in ([[0, FIRST]], [1], [ROWS]))


def tensor_descriptor(tensor: Tensor, *box: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [*box], SMALL.layout)


def run(kernel: Any, *arguments: Any, **constants: Any) -> None:
    interpret(kernel, 1, *arguments, **constants, **SMALL.constants(3), seed=0)


def test_product_beyond_int32_offsets(sparse_zeros: Far) -> None:
    a, b, out = sparse_zeros(ROWS, DEPTH), random(1, COLUMNS, DEPTH), sparse_zeros(ROWS, COLUMNS)
    a[FIRST:] = random(COUNT, DEPTH)
    given = tensor_descriptor(a, SMALL.bm, SMALL.bk), tensor_descriptor(b[0], SMALL.bn, SMALL.bk), None, out
    boxes = tensor_descriptor(out, *BOX)
    flags = {"TRANSPOSED": True, "BIAS": False, "SLOTS": 1, "PINGPONG": False}
    run(product_kernel, *given, boxes, *tables(), DEPTH, COLUMNS, 2, 0, 0, **flags)
    assert torch.equal(out[FIRST:].double(), (a[FIRST:].double() @ b[0].double().T).bfloat16().double())


def test_up_projection_beyond_int32_offsets(sparse_zeros: Far) -> None:
    x, source, w = sparse_zeros(ROWS, DEPTH), sparse_zeros(ROWS, dtype=torch.int64), random(COLUMNS, DEPTH)
    x[FIRST:], source[FIRST:] = random(COUNT, DEPTH), torch.arange(FIRST, ROWS).flip(0)
    h, a = sparse_zeros(ROWS, COLUMNS), sparse_zeros(ROWS, COLUMNS)
    flags = {"ACT": RELU, "GATED": False, "BIAS": False, "EVEN": False, "SLOTS": 1, "LAG": 1, "COPIES_ARRIVE": False}
    given = x, source, tensor_descriptor(w, SMALL.bn, SMALL.bk), None, h, a
    boxes = tensor_descriptor(h, *BOX), tensor_descriptor(h, *BOX), tensor_descriptor(a, *BOX)
    run(up_kernel, *given, *boxes, *tables(), DEPTH, COLUMNS, 2, **flags)
    right = (x[FIRST:].flip(0).double() @ w.double().T).bfloat16()
    assert torch.equal(h[FIRST:], right) and torch.equal(a[FIRST:], right.relu())


def test_dhidden_beyond_int32_offsets(sparse_zeros: Far) -> None:
    # The router weights' gradient of the second column tile is far from that of the first tile.
    dy, source, w, n_rows = (
        sparse_zeros(ROWS, DEPTH),
        sparse_zeros(ROWS, dtype=torch.int64),
        random(DEPTH, COLUMNS),
        2**31 - 8,
    )
    dy[FIRST:], source[FIRST:] = random(COUNT, DEPTH), torch.arange(FIRST, ROWS).flip(0)
    h, s, ds = (
        sparse_zeros(ROWS, COLUMNS),
        sparse_zeros(ROWS, dtype=torch.float32),
        sparse_zeros(2, n_rows, dtype=torch.float32),
    )
    h[FIRST:], s[FIRST:] = random(COUNT, COLUMNS), random(COUNT, dtype=torch.float32)
    dh, a = sparse_zeros(ROWS, COLUMNS), sparse_zeros(ROWS, COLUMNS)
    flags = {"ACT": RELU, "GATED": False, "WEIGHTED": True, "EVEN": False, "LAG": 1}
    given = dy, source, tensor_descriptor(w, SMALL.bk, SMALL.bn), s, tensor_descriptor(h, SMALL.bm, SMALL.bk), dh, a, ds
    run(dhidden_kernel, *given, *tables(), DEPTH, COLUMNS, n_rows, 2, **flags)
    place = torch.arange(COUNT)
    doubles = s[FIRST:].double(), h[FIRST:].double(), w[None].double()
    right = define_dhidden(dy[FIRST:].flip(0).double(), place, torch.zeros_like(place), *doubles, "relu")
    assert torch.equal(dh[FIRST:], right[0].bfloat16()) and torch.equal(a[FIRST:], right[1].bfloat16())
    assert torch.equal(ds[:, FIRST:ROWS].sum(0).double(), right[2])


@pytest.mark.parametrize("gather_left", [False, True], ids=["dw1", "dw2"])
def test_dweight_beyond_int32_offsets(gather_left: bool, sparse_zeros: Far) -> None:
    height, width, tile = SMALL_MATRIX.bm, SMALL_MATRIX.bn, SMALL_MATRIX
    first = 2**31 // height + 1
    experts, rows = 2**31 // (height * width) + 2, first + COUNT
    left, right, source = sparse_zeros(rows, height), sparse_zeros(rows, width), sparse_zeros(rows, dtype=torch.int64)
    left[first:], right[first:], source[first:] = random(COUNT, height), random(COUNT, width), torch.arange(first, rows)
    starts, out = sparse_zeros(experts + 1, dtype=torch.int32), sparse_zeros(experts, height, width)
    starts[-2:] = torch.tensor([first, rows])
    looked_up, in_order = (left, right) if gather_left else (right, left)
    interpret(
        dweight_kernel,
        1,
        looked_up,
        source,
        in_order,
        tensor_descriptor(in_order, tile.bk, in_order.shape[1]),
        None,
        out,
        tensor_descriptor(out.view(-1, width), tile.bm // 2, tile.swizzle // 2),
        starts,
        height,
        width,
        experts,
        1,
        1,
        GATHER_LEFT=gather_left,
        EVEN=True,
        SLOTS=1,
        LAG=1,
        **tile.constants(3),
        seed=0,
        # Only the last expert's tile.
        changed={gl.program_id: lambda program: lambda axis: experts - 1},
    )
    assert torch.equal(out[-1], (left[first:].double().T @ right[first:].double()).bfloat16())
