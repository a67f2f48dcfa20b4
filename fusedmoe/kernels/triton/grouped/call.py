"""The common part of the grouped products' launches: the rows of a call, how a configuration is chosen, and arguments.

Launchers make no host synchronisation and no autograd; shapes are bounds, rows past the true count are never read as
results. Each says what it is about to run and gets the configuration to run it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Put, Wait, far_pointers, linked
from fusedmoe.kernels.tiles import Tiles
from fusedmoe.kernels.triton.grouped.configs import Config, Key, Variant, bucket, is_even
from fusedmoe.kernels.triton.tiles import make_tiles

Result = TypeVar("Result")


class Choose(Protocol):
    """Chooses the configuration of a launch; `launch(config)` is the launch, which may be repeated."""

    def __call__(self, key: Key, launch: Callable[[Config], object]) -> Config: ...


class GroupedCall:
    """Shared by the launches of one call: the layout's tables on the device, and row tiles by their height.

    Args:
        like: a tensor of the call's dtype and device.
        bulk: whether to use bulk copies, which exist from sm_90 on; the interpreter knows them too.
        shared: communication holds some multiprocessors meanwhile.
        tiles: row tiles by their height; those that are not there are made here.
    Attributes:
        choose: chooses the configuration of each launch.
    """

    def __init__(
        self,
        layout: Layout,
        like: Tensor,
        choose: Choose,
        bulk: bool,
        shared: bool = False,
        tiles: Mapping[int, Tiles] | None = None,
    ) -> None:
        self.layout = layout
        self.starts_E1 = layout.offsets_E1
        self.ends_E = layout.offsets_E1[1:]
        self.dtype = like.dtype
        # As PyTorch's own products: tf32 only where the user allows it.
        tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        self.precision = "tf32" if tf32 else "ieee"
        self.choose = choose
        self._bulk, self._shared = bulk, shared
        self._tiles = dict(tiles or {})

    def tiles(self, block_rows: int) -> Tiles:
        """Returns tiles of so many rows. No host synchronisation."""
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
        return launch(self.config(variant, depth, columns, launch))

    def config(self, variant: Variant, depth: int, columns: int, launch: Callable[[Config], object]) -> Config:
        """The configuration for a launch. `launch` may be repeated: where the launch adds to what is there, it writes
        elsewhere."""
        experts = self.layout.experts
        key = Key(variant, depth, columns, experts, bucket(self.layout.rows, experts), self._shared)
        return self.choose(key, launch)


def solid(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that is contiguous and starts where bulk and vector copies can."""
    # A slice may begin anywhere, and a kernel is compiled for operands that are 16-byte aligned.
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def described(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor for bulk copies. There is none of no rows: it is of one then, which nobody reads."""
    if tensor.shape[0] == 0:
        tensor = tensor.new_empty((1, *tensor.shape[1:]))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)


def waiting(wait: Wait | None) -> dict[str, Any]:
    """Arguments of a kernel whose rows may still be on their way."""
    if wait is None:
        nothing = dict.fromkeys(("signals_ptr", "epoch_ptr", "stop_ptr", "record_ptr", "limit_ns"))
        return {**nothing, "AWAITED": 0, **linked(None)}
    bounds = {"stop_ptr": wait.bounds.stop, "record_ptr": wait.bounds.record, "limit_ns": wait.bounds.limit_ns}
    awaited = {"signals_ptr": wait.signals, "epoch_ptr": wait.epoch, **bounds, "AWAITED": wait.tile}
    return {**awaited, **linked(wait.network)}


_PUT = ("address_ptr", "weight_ptr", "peer_ptr", "counter_ptr", "wanted_ptr", "signal_ptr", "epoch_ptr", "W")
_FAR = ("done_ptr", "target_ptr", "pe_ptr")


def putting(put: Put | None, row_tiles: int) -> dict[str, Any]:
    """Arguments of a kernel that puts its results elsewhere."""
    if put is None:
        return {**dict.fromkeys((*_PUT, *_FAR)), "PUT": False, "WEIGHTED": False, **linked(None)}
    # Rows of each peer that are done are counted: whoever completes them signals the peer.
    counter_W, peers = put.counter_W, put.wanted_W.numel()
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


def constants(variant: Variant, config: Config) -> dict[str, Any]:
    """Constexprs and options of all of them."""
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
