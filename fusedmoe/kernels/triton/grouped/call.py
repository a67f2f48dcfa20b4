"""Common part of the grouped GEMM launches: row indices of a call, configuration choice, and kernel arguments.

Launchers perform no host synchronization and no autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.layout import Layout, Tiles
from fusedmoe.kernels.one_sided import Put, Wait, network_pointers, nvshmem_options
from fusedmoe.kernels.triton.grouped.configs import Config, Key, Variant, bucket, is_even
from fusedmoe.kernels.triton.layout import make_tiles, sort_tiles

Result = TypeVar("Result")


class ChooseConfig(Protocol):
    """Chooses the configuration of a launch; `launch(config)` is the launch, which may be repeated."""

    def __call__(self, key: Key, launch: Callable[[Config], object]) -> Config: ...


class GroupedCall:
    """Tensors shared by the grouped GEMM launches of one call: the layout, and lists of row tiles by tile height.

    Args:
        like: tensor of the call's dtype and device.
        bulk: use bulk copies, available from sm_90 on and in the interpreter.
        shared: communication occupies some multiprocessors of the GPU.
        tiles: row tiles by height; missing ones are built on demand.
    """

    def __init__(
        self,
        layout: Layout,
        like: Tensor,
        choose: ChooseConfig,
        bulk: bool,
        shared: bool = False,
        tiles: Mapping[int, Tiles] | None = None,
    ) -> None:
        self.layout = layout
        self.starts_E1 = layout.offsets_E1
        self.ends_E = layout.offsets_E1[1:]
        self.dtype = like.dtype
        # tf32 only if the user allows it, as in PyTorch's matmul.
        tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        self.precision = "tf32" if tf32 else "ieee"
        self.choose = choose
        self._bulk, self._shared = bulk, shared
        self._tiles = dict(tiles or {})

    def tiles(self, block_rows: int, wait: Wait | None = None) -> Tiles:
        """Return the row tiles, sorted by arrival if the rows in flight are."""
        if wait is not None and wait.by_arrival and self.layout.source_N is not None:
            return sort_tiles(self.tiles(block_rows), self.ends_E, self.layout.source_N, block_rows, wait)
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
        """Return the configuration for a launch. Tuning repeats `launch`, so it must not accumulate in place."""
        experts = self.layout.experts
        key = Key(variant, depth, columns, experts, bucket(self.layout.rows, experts), self._shared)
        return self.choose(key, launch)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that is contiguous and aligned for bulk and vector copies."""
    # A slice may start anywhere, but kernels are compiled for 16-byte aligned operands.
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def tensor_descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """Return a descriptor for bulk copies. An empty tensor, which cannot have one, is replaced by one unused row."""
    if tensor.shape[0] == 0:
        tensor = tensor.new_empty((1, *tensor.shape[1:]))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)


def wait_arguments(wait: Wait | None) -> dict[str, Any]:
    if wait is None:
        nothing = dict.fromkeys(("signals_ptr", "epoch_ptr", "stop_ptr", "record_ptr", "limit_ns"))
        return {**nothing, "WAIT_ROWS": 0, **nvshmem_options(None)}
    bounds = {"stop_ptr": wait.bounds.stop, "record_ptr": wait.bounds.record, "limit_ns": wait.bounds.limit_ns}
    awaited = {"signals_ptr": wait.signals, "epoch_ptr": wait.epoch, **bounds, "WAIT_ROWS": wait.tile}
    return {**awaited, **nvshmem_options(wait.network)}


_PUT_NAMES = ("address_ptr", "weight_ptr", "peer_ptr", "counter_ptr", "num_rows_ptr", "signal_ptr", "epoch_ptr", "W")
_FAR_PUT_NAMES = ("done_ptr", "target_ptr", "pe_ptr")


def put_arguments(put: Put | None, row_tiles: int) -> dict[str, Any]:
    if put is None:
        flags = dict.fromkeys(("PUT", "WEIGHTED", "ALIGNED"), False)
        return {**dict.fromkeys((*_PUT_NAMES, *_FAR_PUT_NAMES)), **flags, **nvshmem_options(None)}
    counter_W, peers = put.counter_W, put.num_rows_W.numel()
    peer_N, store_N, target_N, network = put.addresses
    done = None if network is None else counter_W.new_zeros(row_tiles)
    values = (store_N, put.weight_N, peer_N, counter_W, put.num_rows_W, put.signal_W, put.epoch, peers)
    far = zip(_FAR_PUT_NAMES, (done, target_N, network_pointers(network)[0]), strict=True)
    return {
        **dict(zip(_PUT_NAMES, values, strict=True)),
        **dict(far),
        "PUT": True,
        "WEIGHTED": put.weight_N is not None,
        "ALIGNED": put.like.shape[-1] * put.like.itemsize % 16 == 0,
        **nvshmem_options(network),
    }


def constants(variant: Variant, config: Config) -> dict[str, Any]:
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
