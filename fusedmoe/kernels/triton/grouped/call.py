"""The common part of the grouped products' launches: the rows of a call, how a configuration is chosen, and arguments.

Row tiles cut the rows of ragged groups for a grid whose size is known without asking the device. A tile is up to BM
rows of one expert. N rows of E experts make at most N // BM + E tiles, however they are spread; the grid has that many,
and those without rows end at once. So nothing waits for the host to learn the counts. A launch makes them, but of rows
that come from other ranks: there the launch that reads what comes does (`one_sided/plan.py`).

Launchers make no host synchronisation and no autograd; shapes are bounds, rows past the true count are never read as
results. Each says what it is about to run and gets the configuration to run it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.grouped import Tiles, tile_bound
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Put, Wait, far_pointers, linked
from fusedmoe.kernels.triton.grouped.configs import Config, Key, Variant, bucket, is_even
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit

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


# Comparisons of a program: each of its tiles looks through the ends of all experts.
_COMPARISONS = 8192


@triton.jit
def find_tiles(start_E, count_E, tile, E, BM: tl.constexpr, EP: tl.constexpr):
    """Expert (-1 where there is none) and first row of row tiles of BM rows; and how many there are. `start_E`: first
    row of each expert."""
    e = tl.arange(0, EP)
    end_E = tl.cumsum((count_E + BM - 1) // BM, 0)
    # Experts whose tiles all come before. They are counted, the empty ones too, so that runs of those are skipped.
    before = (e < E)[None, :] & (end_E[None, :] <= tile[:, None])
    expert = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, end_E[None, :], 0), 1)
    start = tl.sum(tl.where(e[None, :] == expert[:, None], start_E[None, :], 0), 1) + (tile - first) * BM
    used = expert < E
    return tl.where(used, expert, -1), tl.where(used, start, 0), tl.max(end_E, 0)


@jit(do_not_specialize=["n_tiles"])
def tiles_kernel(offsets_ptr, tiles_ptr, used_ptr, n_tiles, E, BM: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    e = tl.arange(0, EP)
    start_E = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count_E = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - start_E
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    expert, start, used = find_tiles(start_E, count_E, tile, E, BM, EP)
    tl.store(tiles_ptr + 2 * tile, expert, mask=tile < n_tiles)
    tl.store(tiles_ptr + 2 * tile + 1, start, mask=tile < n_tiles)
    if tl.program_id(0) == 0:
        tl.store(used_ptr, used)


def make_tiles(offsets_E1: Tensor, rows: int, block_rows: int) -> Tiles:
    """Cuts up to `rows` rows sorted by expert into tiles of so many rows. No host synchronisation."""
    experts = offsets_E1.numel() - 1
    n_tiles = tile_bound(rows, experts, block_rows)
    # The number comes first, and the table where 16 bytes align it: kernels are compiled for that.
    numbers = offsets_E1.new_empty(4 + 2 * n_tiles)
    tiles = Tiles(numbers[4:].view(n_tiles, 2), numbers[:1])
    padded, block = block_sizes(experts)
    tiles_kernel[(triton.cdiv(n_tiles, block),)](
        offsets_E1, *tiles, n_tiles, experts, BM=block_rows, BT=block, EP=padded, num_warps=4, maxnreg=MOST_REGISTERS
    )
    return tiles


def block_sizes(experts: int) -> tuple[int, int]:
    """Experts as a power of two, and tiles of a program."""
    padded = triton.next_power_of_2(experts)
    return padded, min(128, max(1, _COMPARISONS // padded))
