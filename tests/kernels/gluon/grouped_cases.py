"""Cases of the grouped kernels in the interpreter, with tiles so small that a case takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fusedmoe.kernels.activation import ACTIVATIONS, define_activation
from fusedmoe.kernels.gluon.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.gluon.grouped.dweight import dweight_kernel
from fusedmoe.kernels.gluon.grouped.pipeline import rows_of_group
from fusedmoe.kernels.gluon.grouped.product import product_kernel
from fusedmoe.kernels.gluon.grouped.up import up_kernel
from fusedmoe.kernels.grouped import define_dhidden, define_dweight
from fusedmoe.kernels.layout import define_tiles
from fusedmoe.kernels.triton.grouped.device import ACT_CODES
from tests.gluon_interpreter import interpret
from tests.marks import slowly


class Tile(NamedTuple):
    """`bn`: of the product, both halves of a gated activation; `swizzle`: bytes of the layout in shared memory."""

    bm: int = 8
    bn: int = 32
    bk: int = 16
    swizzle: int = 32

    @property
    def layout(self) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=self.swizzle, element_bitwidth=16, rank=2)

    def constants(self, stages: int) -> dict[str, int]:
        """Constexprs shared by all kernels."""
        sizes = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP": 2, "STAGES": stages}
        return {**sizes, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}


SMALL = Tile()
#: Tile of a matrix, whose height is contiguous in shared memory.
SMALL_MATRIX = Tile(bm=16)
#: As the kernels are compiled for a GPU.
LARGE, LARGE_TURNS = Tile(128, 256, 64, 128), Tile(128, 128, 64, 128)

PADDING = 3
# Rows of each expert: empty experts at both ends and between, one row, full tiles, tiles with a remainder.
ROUTINGS = {
    "one row": (1,),
    "nothing": (0, 0),
    "one expert takes all": (0, 0, 21, 0),
    "empty between": (0, 8, 0, 0, 5, 0),
    "full tiles": (16, 8),
    "all odd": (3, 1, 9, 11),
}
# Cases that run by default, and cases with `-m slow`.
_QUICK = ("all odd", "empty between", "one row", "nothing")
EACH_ROUTING = [*_QUICK, *slowly(*(name for name in ROUTINGS if name not in _QUICK))]
EACH_ACTIVATION = ["geglu", "relu", *slowly(*(name for name in ACTIVATIONS if name not in ("geglu", "relu")))]


@dataclass(frozen=True)
class Rows:
    """Tables of a routing."""

    counts: Sequence[int]
    bm: int

    @property
    def number(self) -> int:
        return sum(self.counts)

    @property
    def expert_N(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tiles, some unused at the end; the number of used tiles; the ends of the experts' rows."""
        tiles = [*define_tiles([*self.counts], self.number, self.bm), [-1, 0], [-1, 0]]
        used = sum(expert >= 0 for expert, _ in tiles)
        ends = torch.tensor(self.counts).cumsum(0)
        return *(torch.tensor(of, dtype=torch.int32) for of in (tiles, [used])), ends.to(torch.int32)


@dataclass(frozen=True)
class Gathered:
    """Rows x, and the index in x of each routed row."""

    x: Tensor
    source: Tensor

    @property
    def double(self) -> Tensor:
        return self.x[self.source].double()


def _gathered(rows: Rows, width: int, dtype: torch.dtype, padding: int = 0) -> Gathered:
    """Draw x with about half the number of routed rows, so some rows are routed several times."""
    tokens = rows.number // 2 + 1
    source = torch.randint(tokens, (rows.number + padding,), generator=torch.Generator().manual_seed(2))
    return Gathered(_random(tokens, width, dtype=dtype, seed=1), source)


def _padded(rows: Rows, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Sorted rows, followed by padding whose values must not matter."""
    values = _random(rows.number + PADDING, width, dtype=dtype, seed=seed)
    values[rows.number :] = torch.nan
    return values


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(found: Tensor, right: Tensor, scale: Tensor) -> None:
    """Compare up to the rounding of results and of float32 sums, whose terms have the total magnitude `scale`."""
    eps = torch.finfo(found.dtype).eps
    assert not found.isnan().any()
    wrong = (found.double() - right).abs() > eps * right.abs() + 2e-6 * scale + 1e-6
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"


def check_product(
    counts: Sequence[int],
    depth: int,
    columns: int,
    transposed: bool,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    tile: Tile = SMALL,
    stages: int = 3,
    pingpong: bool = False,
    slots: int = 1,
    programs: int = 2,
    seed: int = 0,
    **changed: Any,
) -> None:
    """Run the product and compare it with float64. The padding after the rows stays unchanged."""
    rows, experts = Rows(counts, tile.bm), len(counts)
    a = _random(max(rows.number, 1), depth, dtype=dtype, seed=1)
    b = _random(experts, *((columns, depth) if transposed else (depth, columns)), dtype=dtype, seed=2)
    # Only some columns have a bias.
    start, width = (1, columns - 1) if bias else (0, 0)
    bias_EN = _random(experts, width, dtype=dtype, seed=3) if bias else None
    out = torch.full((rows.number + PADDING, columns), torch.nan, dtype=dtype)
    box = [tile.bn, tile.bk] if transposed else [tile.bk, tile.bn]
    interpret(
        product_kernel,
        programs,
        TensorDescriptor.from_tensor(a, [tile.bm, tile.bk], tile.layout),
        TensorDescriptor.from_tensor(b.view(-1, b.shape[2]), box, tile.layout),
        bias_EN,
        out,
        TensorDescriptor.from_tensor(out, [rows_of_group(tile.bm, pingpong), tile.swizzle // 2], tile.layout),
        *rows.tables(),
        depth,
        columns,
        -(-columns // tile.bn),
        start,
        width,
        TRANSPOSED=transposed,
        BIAS=bias,
        SLOTS=slots,
        PINGPONG=pingpong,
        **tile.constants(stages),
        seed=seed,
        **changed,
    )
    assert out[rows.number :].isnan().all()
    b_EKN, of = (b.mT if transposed else b).double(), rows.expert_N
    right = (a[: rows.number].double()[:, None] @ b_EKN[of])[:, 0]
    scale = (a[: rows.number].double().abs()[:, None] @ b_EKN[of].abs())[:, 0]
    if bias_EN is not None:
        right[:, start:] += bias_EN[of].double()
    _close(out[: rows.number], right, scale)


def check_up(
    counts: Sequence[int],
    dim: int,
    hidden: int,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    stages: int = 3,
    lag: int = 1,
    tile: Tile = SMALL,
    slots: int = 1,
    programs: int = 2,
    seed: int = 0,
    copies_arrive: bool = False,
    **changed: Any,
) -> None:
    """Run the up projection and compare both results with float64. The padding after the rows stays unchanged."""
    rows, experts, act = Rows(counts, tile.bm), len(counts), ACTIVATIONS[activation]
    columns = tile.bn // act.num_projections
    given = _gathered(rows, dim, dtype)
    w = _random(experts, act.num_projections * hidden, dim, dtype=dtype, seed=3)
    b = _random(experts, act.num_projections * hidden, dtype=dtype, seed=4) if bias else None
    h = torch.full((rows.number + PADDING, act.num_projections * hidden), torch.nan, dtype=dtype)
    a = torch.full((rows.number + PADDING, hidden), torch.nan, dtype=dtype)
    box = [tile.bm // 2, tile.swizzle // 2]
    sides = (h[:, :hidden], h[:, -hidden:], a)
    interpret(
        up_kernel,
        programs,
        given.x,
        given.source,
        TensorDescriptor.from_tensor(w.view(-1, dim), [columns, tile.bk], tile.layout),
        b,
        h,
        a,
        *(TensorDescriptor.from_tensor(side, box, tile.layout) for side in sides),
        *rows.tables(),
        dim,
        hidden,
        -(-hidden // columns),
        ACT=ACT_CODES[activation],
        GATED=act.gated,
        BIAS=bias,
        EVEN=dim % tile.bk == 0,
        LAG=lag,
        SLOTS=slots,
        COPIES_ARRIVE=copies_arrive,
        **tile.constants(stages),
        seed=seed,
        **changed,
    )
    assert h[rows.number :].isnan().all() and a[rows.number :].isnan().all()
    h, a = h[: rows.number], a[: rows.number]
    of, x_ND = rows.expert_N, given.double
    right = (x_ND[:, None] @ w[of].double().mT)[:, 0]
    scale = (x_ND.abs()[:, None] @ w[of].double().abs().mT)[:, 0]
    if b is not None:
        right += b[of].double()
    _close(h, right, scale)
    shape = (rows.number, act.num_projections, hidden) if act.gated else (rows.number, hidden)
    # No derivative is greater than 1.13, and the other half of a gated activation multiplies errors.
    parts, scales = right.view(shape), scale.view(shape)
    size = 1.2 * (scales * parts.abs().flip(1)).sum(1) if act.gated else 1.2 * scales
    _close(a, define_activation(activation, parts), size)


def check_dhidden(
    counts: Sequence[int],
    dim: int,
    hidden: int,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    weighted: bool = True,
    stages: int = 3,
    lag: int = 1,
    tile: Tile = SMALL,
    programs: int = 2,
    seed: int = 0,
    wanted: str = "dh a ds",
    **changed: Any,
) -> None:
    """Run the gradient of the hidden rows and compare its requested results with float64."""
    rows, experts, act = Rows(counts, tile.bm), len(counts), ACTIVATIONS[activation]
    n_col_tiles = -(-hidden // tile.bn)
    given = _gathered(rows, dim, dtype)
    w = _random(experts, dim, hidden, dtype=dtype, seed=3)
    h = _padded(rows, act.num_projections * hidden, dtype, seed=4)
    s = _random(rows.number, dtype=torch.float32, seed=5) if weighted else None
    dh = torch.full((rows.number, act.num_projections * hidden), torch.nan, dtype=dtype)
    a = torch.full((rows.number, hidden), torch.nan, dtype=dtype)
    ds = torch.full((n_col_tiles, rows.number), torch.nan) if weighted else None
    interpret(
        dhidden_kernel,
        programs,
        given.x,
        given.source,
        TensorDescriptor.from_tensor(w.view(-1, hidden), [tile.bk, tile.bn], tile.layout),
        s,
        TensorDescriptor.from_tensor(h, [tile.bm, tile.bk], tile.layout),
        dh if "dh" in wanted else None,
        a if "a" in wanted else None,
        ds if "ds" in wanted else None,
        *rows.tables(),
        dim,
        hidden,
        rows.number,
        n_col_tiles,
        ACT=ACT_CODES[activation],
        GATED=act.gated,
        WEIGHTED=weighted,
        EVEN=dim % tile.bk == 0,
        LAG=lag,
        **tile.constants(stages),
        seed=seed,
        **changed,
    )
    of, shape = rows.expert_N, (rows.number, act.num_projections, hidden) if act.gated else (rows.number, hidden)
    factor = torch.ones(rows.number).double() if s is None else s.double()
    h_N = h[: rows.number].double().view(shape)
    w = w.double()
    right_dh, right_a, right_ds = define_dhidden(given.x.double(), given.source, of, factor, h_N, w, activation)
    # Each element's terms of dA', all with positive sign; no derivative is greater than 1.13.
    sums = (given.double.abs()[:, None] @ w[of].abs())[:, 0]
    size = 1.2 * (sums * factor.abs()[:, None]).view(rows.number, *[1] * act.gated, hidden)
    if "dh" in wanted:
        _close(dh, right_dh.view(dh.shape), (size * (1 + h_N.flip(1).abs()) if act.gated else size).view(dh.shape))
    if "a" in wanted:
        _close(a, right_a, right_a.abs())
    if ds is not None and "ds" in wanted:
        _close(ds.sum(0), right_ds, (sums * define_activation(activation, h_N).abs()).sum(-1))


def check_dweight(
    counts: Sequence[int],
    height: int,
    width: int,
    gather: str,
    dtype: torch.dtype = torch.bfloat16,
    stages: int = 3,
    lag: int = 1,
    tile: Tile = SMALL_MATRIX,
    programs: int = 2,
    seed: int = 0,
    added: torch.dtype | None = None,
    slots: int = 1,
    **changed: Any,
) -> None:
    """Run the gradient of the experts' matrices and compare it with float64.

    Args:
        gather: "left" or "right".
        added: dtype of the matrices to add to, in place in float32; None: no addition.
    """
    rows, experts, left = Rows(counts, tile.bm), len(counts), gather == "left"
    given = _gathered(rows, height if left else width, dtype, PADDING)
    in_order = _padded(rows, width if left else height, dtype, seed=3)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    total = None if added is None else _random(experts, height, width, dtype=added, seed=4)
    before = torch.zeros(experts, height, width).double() if total is None else total.double()
    if total is not None and added == torch.float32:
        out = total
    else:
        out = torch.full((experts, height, width), torch.nan, dtype=dtype if total is None else torch.float32)
    boxes = None
    if total is None:
        boxes = TensorDescriptor.from_tensor(out.view(-1, width), [tile.bm // 2, tile.swizzle // 2], tile.layout)
    interpret(
        dweight_kernel,
        programs,
        given.x,
        given.source,
        in_order,
        TensorDescriptor.from_tensor(in_order, [tile.bk, tile.bn if left else tile.bm], tile.layout),
        total,
        out,
        boxes,
        starts,
        height,
        width,
        experts,
        -(-height // tile.bm),
        -(-width // tile.bn),
        GATHER_LEFT=left,
        EVEN=(height % tile.bm if left else width % tile.bn) == 0,
        SLOTS=slots,
        LAG=lag,
        **tile.constants(stages),
        seed=seed,
        **changed,
    )
    sides = (given.double[: rows.number], in_order[: rows.number].double())
    left_NP, right_NQ = sides if left else sides[::-1]
    right = define_dweight(left_NP, right_NQ, rows.expert_N, experts) + before
    _close(out, right, define_dweight(left_NP.abs(), right_NQ.abs(), rows.expert_N, experts))
