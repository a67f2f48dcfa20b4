"""Put results that are already in memory to their destination: the baseline of a product that puts its own results.

The library has no such launch: its down projection puts results from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.one_sided import Put, network_pointers, nvshmem_options
from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.triton.one_sided.network import put_runs
from fusedmoe.kernels.triton.one_sided.put import columns, finish_put, launch_options, signal_idle_peers, signal_peers

# Rows per program.
TILE = 64


@jit
def return_rows_kernel(
    x_ptr, rows_ptr,
    # Destination of each row, and completion signals for peers (`Put`).
    address_ptr, peer_ptr, counter_ptr, num_rows_ptr, signal_ptr, target_ptr, pe_ptr,
    epoch_ptr, W, M,
    TILE: tl.constexpr, BLOCK: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    # A rank that receives no row from here would otherwise wait forever.
    if tl.program_id(0) == 0:
        signal_idle_peers(num_rows_ptr, signal_ptr, tl.load(epoch_ptr), W)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < tl.load(rows_ptr)
    target = tl.load(address_ptr + row, mask=inside, other=0).to(x_ptr.dtype)
    column = tl.arange(0, BLOCK)
    for first in range(0, M, BLOCK):
        mask = inside[:, None] & (first + column < M)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * M + first + column[None, :], mask=mask)
        tl.store(target[:, None] + first + column[None, :], x, mask=mask)
    if NVSHMEM:
        size = M * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        first = tl.program_id(0) * TILE
        put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, first, tl.load(rows_ptr) - first, size, TILE)
    peer = tl.load(peer_ptr + row, mask=inside, other=0)
    signal_peers(peer, inside, 1, counter_ptr, num_rows_ptr, signal_ptr, tl.load(epoch_ptr), W)


def return_rows(x_RM: Tensor, rows: Tensor, put: Put) -> None:
    """Put x_RM[i], for i < rows[0], as specified by `put`, without applying its weights."""
    count, width = x_RM.shape
    peer_N, store_N, target_N, network = put.addresses
    return_rows_kernel[(max(1, triton.cdiv(count, TILE)),)](
        x_RM.contiguous(), rows,
        store_N, peer_N, put.counter_W, put.num_rows_W, put.signal_W, target_N, network_pointers(network)[0],
        put.epoch, put.num_rows_W.numel(), width,
        TILE=TILE, **columns(width, TILE), **nvshmem_options(network), **launch_options(network is not None),
    )  # fmt: skip
    finish_put(put)
