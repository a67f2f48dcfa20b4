"""Launches the grouped kernels: the experts' operation on CUDA tensors, forward and backward.

Contract: no host synchronisation, no autograd; shapes are bounds, rows past the true count are never read as results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.grouped.configs import Config, candidates
from fusedmoe.kernels.grouped.device import ACT_CODES
from fusedmoe.kernels.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.grouped.dweight import dweight_kernel
from fusedmoe.kernels.grouped.product import product_kernel
from fusedmoe.kernels.grouped.tiles import make_tiles
from fusedmoe.kernels.grouped.up import up_kernel
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.weights import Gradients, Weights


class Plan:
    """What the launches of one call share: the layout's tables on the device, row tiles by height, configurations."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self.layout = layout
        self.starts_E1 = layout.offsets_E1
        self.ends_E = layout.offsets_E1[1:]
        self.capability = None if INTERPRET else torch.cuda.get_device_capability(like.device)
        # Bulk copies exist from sm_90 on; the interpreter knows them too.
        self.bulk = self.capability is None or self.capability >= (9, 0)
        self.precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 and like.is_cuda else "ieee"
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, block_rows: int) -> Tensor:
        if block_rows not in self._tiles:
            self._tiles[block_rows] = make_tiles(self.starts_E1, self.layout.rows, block_rows)
        return self._tiles[block_rows]

    def config(self, operation: str, dtype: torch.dtype) -> Config:
        return candidates(operation, dtype, self.capability)[0]

    def describe(self, tensor: Tensor, box: list[int]) -> TensorDescriptor | None:
        """A descriptor for bulk copies, where the hardware has them and the addresses are aligned for them."""
        row_bytes = tensor.shape[-1] * tensor.element_size()
        if not self.bulk or row_bytes % 16 or tensor.data_ptr() % 16 or tensor.numel() == 0:
            return None
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)

    def common(self, config: Config, depth: int) -> dict[str, Any]:
        return {
            "EVEN_K": depth % config.bk == 0,
            "PRECISION": self.precision,
            "INTERPRET": INTERPRET,
            "BM": config.bm,
            "BN": config.bn,
            "BK": config.bk,
            "GROUP": config.group,
            "num_warps": config.warps,
            "num_stages": config.stages,
        }


def up(plan: Plan, x_SM: Tensor, weights: Weights, activation: Activation) -> tuple[Tensor, Tensor]:
    """Pre-activation h [N, (2·)H] and a [N, H]."""
    layout, hidden, dim = plan.layout, weights.w2.shape[2], x_SM.shape[1]
    config = plan.config("up", x_SM.dtype)
    columns = config.bn // activation.halves
    h = x_SM.new_empty((layout.rows, activation.halves * hidden))
    a = x_SM.new_empty((layout.rows, hidden))
    w1 = weights.w1.contiguous()
    box = [activation.halves, columns, config.bk] if activation.gated else [1, config.bn, config.bk]
    described = plan.describe(w1.view(-1, hidden, dim), box)
    tiles = plan.tiles(config.bm)
    up_kernel[(len(tiles) * triton.cdiv(hidden, columns),)](
        x_SM,
        layout.source_N,
        w1 if described is None else described,
        weights.b1,
        h,
        a,
        tiles,
        plan.ends_E,
        len(tiles),
        dim,
        hidden,
        ACT=ACT_CODES[activation.name],
        GATED=activation.gated,
        GATHER=layout.source_N is not None,
        BIAS=weights.b1 is not None,
        DESCRIPTORS=described is not None,
        **plan.common(config, dim),
    )
    return h, a


def product(
    plan: Plan,
    operation: str,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None = None,
    bias_start: int = 0,
) -> Tensor:
    """a[n]·B_e for every row n; b [E, N, K] if transposed, else [E, K, N]."""
    b = b.contiguous()
    depth, columns = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    config = plan.config(operation, a.dtype)
    out = a.new_empty((a.shape[0], columns))
    box = [1, config.bn, config.bk] if transposed else [1, config.bk, config.bn]
    a_described, b_described = plan.describe(a, [config.bm, config.bk]), plan.describe(b, box)
    bulk = a_described is not None and b_described is not None
    tiles = plan.tiles(config.bm)
    product_kernel[(len(tiles) * triton.cdiv(columns, config.bn),)](
        a_described if bulk else a,
        b_described if bulk else b,
        bias,
        out,
        tiles,
        plan.ends_E,
        len(tiles),
        depth,
        columns,
        bias_start,
        0 if bias is None else bias.shape[1],
        TRANSPOSED=transposed,
        BIAS=bias is not None,
        DESCRIPTORS=bulk,
        **plan.common(config, depth),
    )
    return out


def dhidden(
    plan: Plan, dy_SM: Tensor, h: Tensor, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dH scaled by the router weight, A scaled by it, and the router weight's gradient."""
    layout, hidden, dim = plan.layout, weights.w2.shape[2], weights.w2.shape[1]
    config = plan.config("dhidden", dy_SM.dtype)
    dh, a = torch.empty_like(h), h.new_empty((layout.rows, hidden))
    column_tiles = triton.cdiv(hidden, config.bn)
    ds = None if weight_N is None else torch.empty((column_tiles, layout.rows), device=h.device, dtype=torch.float32)
    w2 = weights.w2.contiguous()
    described = plan.describe(w2, [1, config.bk, config.bn])
    tiles = plan.tiles(config.bm)
    dhidden_kernel[(len(tiles) * column_tiles,)](
        dy_SM,
        layout.source_N,
        w2 if described is None else described,
        weight_N,
        h,
        dh,
        a,
        ds,
        tiles,
        plan.ends_E,
        len(tiles),
        layout.rows,
        dim,
        hidden,
        ACT=ACT_CODES[activation.name],
        GATED=activation.gated,
        GATHER=layout.source_N is not None,
        WEIGHTED=weight_N is not None,
        DESCRIPTORS=described is not None,
        **plan.common(config, dim),
    )
    return dh, a, None if ds is None else ds.sum(0)


def dweight(plan: Plan, left: Tensor, right: Tensor, gather: str | None) -> Tensor:
    """Σ over each expert's rows of left[n]ᵀ·right[n], [E, P, Q]; `gather`: which side's rows are looked up."""
    layout = plan.layout
    if layout.source_N is None:
        gather = None
    experts, p, q = layout.counts_E.numel(), left.shape[1], right.shape[1]
    config = plan.config("dweight", left.dtype)
    out = left.new_empty((experts, p, q))
    solid, width = (right, config.bn) if gather == "left" else (left, config.bm)
    described = plan.describe(solid, [config.bk, width])
    common = plan.common(config, 0)
    tile = {"BP": common.pop("BM"), "BQ": common.pop("BN")}
    common.pop("EVEN_K")
    dweight_kernel[(triton.cdiv(p, config.bm) * triton.cdiv(q, config.bn), experts)](
        left,
        right,
        solid if described is None else described,
        layout.source_N,
        out,
        plan.starts_E1,
        p,
        q,
        GATHER_LEFT=gather == "left",
        GATHER_RIGHT=gather == "right",
        DESCRIPTORS=described is not None,
        **tile,
        **common,
    )
    return out


def experts_forward(
    x_SM: Tensor, layout: Layout, weight_N: Tensor | None, weights: Weights, activation: Activation
) -> tuple[Tensor, Tensor]:
    """y_SM and h, as `fusedmoe.kernels.experts.experts_forward`."""
    x_SM = x_SM.contiguous()
    plan = Plan(layout, x_SM)
    h, a = up(plan, x_SM, weights, activation)
    out_NM = product(plan, "down", a, weights.w2, True, weights.b2, weights.b2_start)
    hidden = weights.w2.shape[2]
    shape = (layout.rows, 2, hidden) if activation.gated else (layout.rows, hidden)
    return gather_sum(out_NM, layout, weight_N), h.view(shape)


def experts_backward(
    dy_SM: Tensor,
    x_SM: Tensor,
    h_NH: Tensor,
    layout: Layout,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
) -> Gradients:
    """Gradients, as `fusedmoe.kernels.experts.experts_backward`."""
    x_SM, dy_SM = x_SM.contiguous(), dy_SM.contiguous()
    plan = Plan(layout, x_SM)
    h = h_NH.view(layout.rows, activation.halves * weights.w2.shape[2])
    dh, a, ds_N = dhidden(plan, dy_SM, h, weight_N, weights, activation)
    up_ENM = weights.w1.view(weights.w1.shape[0], -1, weights.w1.shape[-1])
    dx_SM = gather_sum(product(plan, "dinput", dh, up_ENM, False), layout)
    dw1 = dweight(plan, dh, x_SM, "right").view_as(weights.w1)
    dw2 = dweight(plan, dy_SM, a, "left")
    one_N1 = None
    if weights.b1 is not None or weights.b2 is not None:
        one_N1 = dh.new_ones((layout.rows, 1))
    db1 = None if weights.b1 is None or one_N1 is None else dweight(plan, one_N1, dh, None).view_as(weights.b1)
    db2 = None
    if weights.b2 is not None and one_N1 is not None:
        factor_N1 = one_N1 if weight_N is None else weight_N.to(dh.dtype)[:, None]
        db2 = dweight(plan, factor_N1, dy_SM, "right")[:, 0, weights.b2_columns()].contiguous()
        if ds_N is not None:
            ds_N = ds_N + bias_dot(plan, dy_SM, weights)
    return Gradients(dx_SM, ds_N, dw1, dw2, db1, db2)


def bias_dot(plan: Plan, dy_SM: Tensor, weights: Weights) -> Tensor:
    """⟨dy[source], b2_e⟩ of every row: what the output bias adds to the router weight's gradient."""
    assert weights.b2 is not None
    dot_SE = dy_SM[:, weights.b2_columns()].float() @ weights.b2.float().t()
    row_N = torch.arange(plan.layout.rows, device=dy_SM.device)
    expert_N = torch.searchsorted(plan.ends_E, row_N, right=True).clamp(max=dot_SE.shape[1] - 1)
    source_N = row_N if plan.layout.source_N is None else plan.layout.source_N
    return dot_SE[source_N, expert_N]
