"""Waits for what other ranks put here, by kernels: nobody on the host waits. Products wait for their own rows
(`triton/grouped`); here are routing metadata, and whole sets of signals.

With `NVSHMEM`, what a far peer has put is read after NVSHMEM was told (`arrived`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.one_sided import Bounds, Network, ReceiveBuffer, linked
from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.triton.one_sided.network import arrived
from fusedmoe.kernels.triton.one_sided.remote import wait


@jit(do_not_specialize=["slot", "epoch", "limit_ns"])
def wait_metadata_kernel(
    metadata_ptr,
    signals_ptr,
    stop_ptr,
    record_ptr,
    slot,
    epoch,
    limit_ns,
    W,
    C,
    T,
    E,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EP: tl.constexpr,
    NVSHMEM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Waits for all routing metadata of one peer, whose first tile tells how much there is."""
    peer = tl.program_id(0)
    base = (slot * W + peer) * T
    one = tl.arange(0, 1)
    wait(signals_ptr, base + one, one == 0, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)
    e = tl.arange(0, EP)
    first = metadata_ptr + (slot.to(tl.int64) * W + peer) * C * 2
    used = E + tl.sum(tl.load(first + 2 * e, mask=e < E, other=0, volatile=True), 0)
    tile = tl.arange(0, TILES)
    wait(signals_ptr, base + tile, tile * TILE < used, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)


@jit(do_not_specialize=["epoch", "limit_ns", "count"])
def wait_signals_kernel(
    signals_ptr,
    index_ptr,
    stop_ptr,
    record_ptr,
    epoch,
    limit_ns,
    count,
    BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, mask=i < count, other=0)
    wait(signals_ptr, index, i < count, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + tl.load(index_ptr + tl.program_id(0) * BLOCK), epoch)


def wait_metadata(metadata: ReceiveBuffer, experts: int, epoch: int, bounds: Bounds) -> None:
    """Waits for every rank's routing metadata: rows of two int32, of which the first `experts` begin with the number of
    rows that follow for each of them."""
    capacity = metadata.rows.shape[2]
    tiles = capacity // metadata.tile
    wait_metadata_kernel[(metadata.peers,)](
        metadata.rows,
        metadata.signals,
        bounds.stop,
        bounds.record,
        metadata.slot(epoch),
        epoch,
        bounds.limit_ns,
        metadata.peers,
        capacity,
        tiles,
        experts,
        TILE=metadata.tile,
        TILES=triton.next_power_of_2(tiles),
        EP=triton.next_power_of_2(experts),
        **linked(metadata.network),
        INTERPRET=INTERPRET,
    )


def wait_signals(signals: Tensor, index: Tensor, epoch: int, bounds: Bounds, network: Network | None = None) -> None:
    """Waits until the signals with these (int32) indices have come to `epoch`.

    `network`: where one leads to far peers, and what they have put is read afterwards.
    """
    block = min(1024, max(16, triton.next_power_of_2(index.numel())))
    if index.numel():
        wait_signals_kernel[(triton.cdiv(index.numel(), block),)](
            signals,
            index,
            bounds.stop,
            bounds.record,
            epoch,
            bounds.limit_ns,
            index.numel(),
            BLOCK=block,
            **linked(network),
            INTERPRET=INTERPRET,
        )
