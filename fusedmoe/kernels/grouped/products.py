"""The launchers of the grouped products.

No host synchronisation, no autograd; shapes are bounds, rows past the true count are never read as results. Every
launcher says what it is about to run and gets the configuration to run it in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.grouped.configs import Config, Key, Variant, bucket, is_even
from fusedmoe.kernels.grouped.device import ACT_CODES
from fusedmoe.kernels.grouped.dhidden import dhidden_kernel
from fusedmoe.kernels.grouped.dweight import dweight_kernel
from fusedmoe.kernels.grouped.product import product_kernel
from fusedmoe.kernels.grouped.specialised import specialised_kernel, with_scratch
from fusedmoe.kernels.grouped.tiles import Tiles, make_tiles
from fusedmoe.kernels.grouped.up import up_kernel
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.places import Bounds, Network, Put, far_pointers, linked
from fusedmoe.kernels.puts import finish
from fusedmoe.kernels.weights import Weights

Result = TypeVar("Result")


class Choose(Protocol):
    """Chooses the configuration of a launch; `launch(config)` is the launch, which may be repeated."""

    def __call__(self, key: Key, launch: Callable[[Config], object]) -> Config: ...


class Wait(NamedTuple):
    """Rows lie in a window and may still be on their way: those that `layout.source_N` names are waited for.

    Attributes:
        signals: [..., T] int64, of the rows of the window in order, one for each `tile` of them.
        epoch: the exchange that they come with.
        network: leads to far peers; None where none is.
    """

    signals: Tensor
    tile: int
    epoch: int
    bounds: Bounds
    network: Network | None = None


class Plan:
    """What the launches of one call share: the layout's tables on the device, and row tiles by their height.

    Args:
        like: a tensor of the call's dtype and device.
        bulk: whether to use bulk copies, which exist from sm_90 on; the interpreter knows them too.
        programs: how many persistent programs a launch has.
    """

    def __init__(self, layout: Layout, like: Tensor, choose: Choose, bulk: bool, programs: int) -> None:
        self.layout = layout
        self.starts_E1 = layout.offsets_E1
        self.ends_E = layout.offsets_E1[1:]
        self.dtype = like.dtype
        tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        self.precision = "tf32" if tf32 else "ieee"
        self.programs = programs
        self._choose = choose
        self._bulk = bulk
        self._tiles: dict[int, Tiles] = {}

    def tiles(self, block_rows: int) -> Tiles:
        if block_rows not in self._tiles:
            self._tiles[block_rows] = make_tiles(self.starts_E1, self.layout.rows, block_rows)
        return self._tiles[block_rows]

    def variant(
        self, operation: str, depth: int, columns: int, activation: str = "", gather: bool = False, extra: bool = False
    ) -> Variant:
        even = is_even(depth, columns, self.dtype)
        name = str(self.dtype).removeprefix("torch.")
        return Variant(operation, name, self.precision, activation, gather, extra, even, even and self._bulk)

    def run(self, variant: Variant, depth: int, columns: int, launch: Callable[[Config], Result]) -> Result:
        experts = self.layout.experts
        key = Key(variant, depth, columns, experts, bucket(self.layout.rows, experts))
        return launch(self._choose(key, launch))


def up(
    plan: Plan, x_SM: Tensor, weights: Weights, activation: Activation, wait: Wait | None = None
) -> tuple[Tensor, Tensor]:
    """Pre-activation h [N, (2·)H] and a [N, H]."""
    layout, hidden, dim = plan.layout, weights.w2.shape[2], x_SM.shape[1]
    x_SM, w1 = solid(x_SM), solid(weights.w1)
    gather = layout.source_N is not None
    variant = plan.variant("up", dim, hidden, activation.name, gather, weights.b1 is not None)

    def launch(config: Config) -> tuple[Tensor, Tensor]:
        h = x_SM.new_empty((layout.rows, activation.halves * hidden))
        a = x_SM.new_empty((layout.rows, hidden))
        columns = config.bn // activation.halves
        box = [activation.halves, columns, config.bk]
        tiles = plan.tiles(config.bm)
        up_kernel[(len(tiles.table) * triton.cdiv(hidden, columns),)](
            x_SM,
            layout.source_N,
            _described(w1.view(-1, hidden, dim), box) if variant.bulk else w1,
            weights.b1,
            h,
            a,
            tiles.table,
            plan.ends_E,
            len(tiles.table),
            dim,
            hidden,
            ACT=ACT_CODES[activation.name],
            GATED=activation.gated,
            **_waiting(wait),
            GATHER=gather,
            BIAS=variant.extra,
            **_constants(variant, config),
        )
        return h, a

    return plan.run(variant, dim, hidden, launch)


def product(
    plan: Plan,
    operation: str,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None = None,
    bias_start: int = 0,
    put: Put | None = None,
) -> Tensor:
    """a[n]·B_e for every row n; b [E, N, K] if transposed, else [E, K, N]. What is put elsewhere is not returned."""
    a, b = solid(a), solid(b)
    depth, columns = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    variant = plan.variant(operation, depth, columns, extra=bias is not None)
    if put is None and a.shape[0] == 0:
        return a.new_empty((0, columns))

    def launch(config: Config) -> Tensor:
        if put is not None and put.addresses.network is not None:
            # Calls of NVSHMEM take a few registers more.
            config = replace(config, all_registers=True)
        if config.specialised and put is None:
            return _specialised_product(plan, variant, config, a, b, transposed, bias, bias_start)
        out = a.new_empty((a.shape[0], columns)) if put is None else put.like
        box = [1, config.bn, config.bk] if transposed else [1, config.bk, config.bn]
        tiles = plan.tiles(config.bm)
        product_kernel[(len(tiles.table) * triton.cdiv(columns, config.bn),)](
            _described(a, [config.bm, config.bk]) if variant.bulk else a,
            _described(b, box) if variant.bulk else b,
            bias,
            out,
            tiles.table,
            plan.ends_E,
            len(tiles.table),
            depth,
            columns,
            bias_start,
            0 if bias is None else bias.shape[1],
            **_putting(put, len(tiles.table)),
            TRANSPOSED=transposed,
            BIAS=variant.extra,
            **_constants(variant, config),
        )
        if put is None:
            return out
        finish(put)
        return out[:0]

    return plan.run(variant, depth, columns, launch)


def _specialised_product(
    plan: Plan,
    variant: Variant,
    config: Config,
    a: Tensor,
    b: Tensor,
    transposed: bool,
    bias: Tensor | None,
    bias_start: int,
) -> Tensor:
    depth, columns = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    out = a.new_empty((a.shape[0], columns))
    tiles = plan.tiles(config.bm)
    programs = min(plan.programs, len(tiles.table) * triton.cdiv(columns, config.bn))
    constants = _constants(variant, config)
    for name in ("EVEN_K", "DESCRIPTORS"):
        assert constants.pop(name), "specialised programs know nothing else"

    def launch() -> None:
        specialised_kernel[(programs,)](
            a,
            b,
            bias,
            out,
            tiles.table,
            tiles.used,
            plan.ends_E,
            a.shape[0],
            len(b),
            depth,
            columns,
            bias_start,
            0 if bias is None else bias.shape[1],
            TRANSPOSED=transposed,
            BIAS=variant.extra,
            **constants,
        )

    with_scratch(a.device, launch)
    return out


def dhidden(
    plan: Plan,
    dy_SM: Tensor,
    h: Tensor,
    weight_N: Tensor | None,
    weights: Weights,
    activation: Activation,
    wait: Wait | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dH [N, (2·)H], s·A [N, H] and the router weights' gradient [N], without the output bias's part."""
    layout, dim, hidden = plan.layout, dy_SM.shape[1], weights.w2.shape[2]
    dy_SM, h, w2 = solid(dy_SM), solid(h), solid(weights.w2)
    gather = layout.source_N is not None
    variant = plan.variant("dhidden", dim, hidden, activation.name, gather, weight_N is not None)

    def launch(config: Config) -> tuple[Tensor, Tensor, Tensor | None]:
        dh, a = torch.empty_like(h), h.new_empty((layout.rows, hidden))
        column_tiles = triton.cdiv(hidden, config.bn)
        ds = None
        if weight_N is not None:
            ds = torch.empty((column_tiles, layout.rows), device=h.device, dtype=torch.float32)
        tiles = plan.tiles(config.bm)
        dhidden_kernel[(len(tiles.table) * column_tiles,)](
            dy_SM,
            layout.source_N,
            _described(w2, [1, config.bk, config.bn]) if variant.bulk else w2,
            weight_N,
            h,
            dh,
            a,
            ds,
            tiles.table,
            plan.ends_E,
            len(tiles.table),
            layout.rows,
            dim,
            hidden,
            ACT=ACT_CODES[activation.name],
            GATED=activation.gated,
            **_waiting(wait),
            GATHER=gather,
            WEIGHTED=variant.extra,
            **_constants(variant, config),
        )
        return dh, a, None if ds is None else ds.sum(0)

    return plan.run(variant, dim, hidden, launch)


def dweight(plan: Plan, operation: str, left: Tensor, right: Tensor, gather: str | None) -> Tensor:
    """Σ over each expert's rows of left[n]ᵀ·right[n], [E, P, Q]; `gather`: which side's rows are looked up."""
    layout = plan.layout
    if layout.source_N is None:
        gather = None
    left, right = solid(left), solid(right)
    p, q = left.shape[1], right.shape[1]
    if layout.rows == 0:
        return left.new_zeros((layout.experts, p, q))
    variant = plan.variant(operation, p, q, gather=gather is not None)

    def launch(config: Config) -> Tensor:
        out = left.new_empty((layout.experts, p, q))
        together, width = (right, config.bn) if gather == "left" else (left, config.bm)
        constants = _constants(variant, config)
        constants |= {"BP": constants.pop("BM"), "BQ": constants.pop("BN")}
        constants.pop("EVEN_K")
        dweight_kernel[(triton.cdiv(p, config.bm) * triton.cdiv(q, config.bn), layout.experts)](
            left,
            right,
            _described(together, [config.bk, width]) if variant.bulk else together,
            layout.source_N,
            out,
            plan.starts_E1,
            p,
            q,
            GATHER_LEFT=gather == "left",
            GATHER_RIGHT=gather == "right",
            **constants,
        )
        return out

    return plan.run(variant, p, q, launch)


def solid(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that is contiguous and starts where bulk and vector copies can."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _described(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor for bulk copies. There is none of no rows: it is of one then, which nobody reads."""
    if tensor.shape[0] == 0:
        tensor = tensor.new_empty((1, *tensor.shape[1:]))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)


def _waiting(wait: Wait | None) -> dict[str, Any]:
    if wait is None:
        nothing = dict.fromkeys(("signals_ptr", "stop_ptr", "record_ptr", "epoch", "limit_ns"))
        return {**nothing, "AWAITED": 0, **linked(None)}
    bounds = {"stop_ptr": wait.bounds.stop, "record_ptr": wait.bounds.record, "limit_ns": wait.bounds.limit_ns}
    awaited = {"signals_ptr": wait.signals, "epoch": wait.epoch, **bounds, "AWAITED": wait.tile}
    return {**awaited, **linked(wait.network)}


_PUT = ("address_ptr", "weight_ptr", "peer_ptr", "counter_ptr", "wanted_ptr", "signal_ptr", "epoch", "W")
_FAR = ("done_ptr", "target_ptr", "pe_ptr")


def _putting(put: Put | None, row_tiles: int) -> dict[str, Any]:
    if put is None:
        return {**dict.fromkeys((*_PUT, *_FAR)), "PUT": False, "WEIGHTED": False, **linked(None)}
    counter_W, peers = torch.zeros_like(put.wanted_W), put.wanted_W.numel()
    peer_N, store_N, target_N, network = put.addresses
    done = None if network is None else counter_W.new_zeros(row_tiles)
    values = (store_N, put.weight_N, peer_N, counter_W, put.wanted_W, put.signal_W, put.epoch, peers)
    far = zip(_FAR, (done, target_N, far_pointers(network)[0]), strict=True)
    return {
        **dict(zip(_PUT, values, strict=True)),
        **dict(far),
        "PUT": True,
        "WEIGHTED": put.weight_N is not None,
        **linked(network),
    }


def _constants(variant: Variant, config: Config) -> dict[str, Any]:
    return {
        "DESCRIPTORS": variant.bulk,
        "EVEN_K": variant.even,
        "PRECISION": variant.precision,
        "INTERPRET": INTERPRET,
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        **config.options,
    }
