"""Device-side communication primitives: put to a peer's memory, signal, wait with a timeout.

A kernel gets this rank's copy of an allocation in a symmetric heap (`fusedmoe/comm/one_sided/heap.py`), and the table
of all ranks' addresses. The protocol, checked exhaustively in tests/comm/test_protocol.py:

* Exchanges in a memory slot are sequential and numbered from 1: `epoch`. All ranks use slots in the same order. The
  kernel that gives credit increments the number on the device.
* A signal holds the number of the slot's latest exchange whose rows have arrived. It only grows.
* Credit is the number of the slot's last exchange that a peer has read. A reader gives it for every exchange, including
  empty ones. A producer reuses a slot only after the reader's credit for the slot's previous exchange.
* A rank starts a slot's next exchange after its own credit for the previous one, on the same stream; earlier launches
  would read an old number.
* The signal is a release and the wait an acquire, both system-wide: rows first, then their signal.
* Over the network (`network.py`), staged rows are read until they have arrived, so the peer must have read the previous
  contents. A fence separates rows and signal. Credits need none: a slot's next credit is given only after the peer had
  the previous one, without which it could not have started. A reader calls NVSHMEM between the wait and its reads.
* A wait ends early when `stop` is set or, on a GPU, at its timeout. It leaves a record, and the launching code raises.
  Results of such a kernel are never used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.one_sided import Bounds, Network, ReceiveBuffer, nvshmem_options
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import arrived


@triton.jit
def peer_pointer(own_ptr, table_ptr, peer):
    # Allocations are aligned; a pointer loaded as an integer would be stored through two bytes at a time.
    return tl.multiple_of(tl.load(table_ptr + peer).to(own_ptr.dtype), 16)


@triton.jit
def signal(ptr, epoch):
    """Set `ptr`, an int64 on any rank, to `epoch` after all writes of the program."""
    # All threads' writes precede the release by one thread.
    tl.debug_barrier()
    tl.atomic_xchg(ptr, epoch, sem="release", scope="sys")


@triton.jit
def now_ns():
    """Return the GPU clock in nanoseconds, equal in all threads, which must leave loops together."""
    thread = tl.arange(0, tl.extra.cuda.num_threads())
    times = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [thread], tl.int64, is_pure=False, pack=1)
    return tl.max(times, 0)


@triton.jit
def stop_flag(stop_ptr, INTERPRET: tl.constexpr):
    """Return the host's stop flag, equal in all threads, which must leave loops together."""
    if INTERPRET:
        return tl.load(stop_ptr, volatile=True)
    # No atomic, because GPU and host atomics need not be coherent.
    thread = tl.arange(0, tl.extra.cuda.num_threads())
    return tl.max(tl.load(stop_ptr + thread * 0, volatile=True), 0)


@triton.jit
def poll(ptr, index, mask):
    """Poll signals with acquire semantics; entries outside `mask` return the maximum."""
    seen = tl.atomic_add(ptr + index, 0, mask=mask, sem="acquire", scope="sys")
    return tl.where(mask, seen, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def wait(ptr, index, mask, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET: tl.constexpr, POLLS: tl.constexpr = 64):
    """Wait until all signals in the mask have reached `epoch`.

    Args:
        ptr: int64 signals in this rank's memory.
        stop_ptr: host flag; nonzero ends the wait.
        record_ptr: record of the heap's first wait that ended early.
        limit_ns: timeout by the GPU clock; under the interpreter, which has none, the host sets `stop`.
        POLLS: polls of the signals between two polls of the clock and of `stop`, which is in host memory.
    """
    seen = poll(ptr, index, mask)
    late = tl.sum((seen < epoch).to(tl.int32), 0)
    began = tl.full((), 0, tl.int64)
    if not INTERPRET:
        began = now_ns()
    polls = 0
    while late > 0:
        reason = tl.full((), 0, tl.int64)
        polls += 1
        if polls % POLLS == 0 or INTERPRET:
            reason = stop_flag(stop_ptr, INTERPRET)
            if not INTERPRET:
                if now_ns() - began > limit_ns:
                    reason = tl.full((), 1, tl.int64)
        if reason != 0:
            first = tl.min(tl.where(seen < epoch, index, 0x7FFFFFFF), 0)
            found = tl.min(tl.where((seen < epoch) & (index == first), seen, 0x7FFFFFFFFFFFFFFF), 0)
            # Only the first wait that ends early writes the record.
            if tl.atomic_cas(record_ptr, tl.full((), 0, tl.int64), reason, sem="acq_rel", scope="sys") == 0:
                tl.store(record_ptr + 1, first.to(tl.int64))
                tl.store(record_ptr + 2, tl.full((), 0, tl.int64) + epoch)
                tl.store(record_ptr + 3, found)
                tl.store(record_ptr + 4, ptr.to(tl.int64))
            tl.store(stop_ptr, reason)  # ends all later waits
            late = 0
        else:
            seen = poll(ptr, index, mask)
            late = tl.sum((seen < epoch).to(tl.int32), 0)


# Launches that wait for data put by other ranks, without blocking the host. Data from a remote peer is read only after
# NVSHMEM has been called (`arrived`).


@jit(do_not_specialize=["slot", "credit_slot", "limit_ns"])
def wait_metadata_kernel(
    metadata_ptr, signals_ptr, epoch_ptr, slot,
    # Credits to wait for as well; None without.
    credits_ptr, credit_epoch_ptr, credit_slot,
    stop_ptr, record_ptr, limit_ns, W, C, T, E,
    TILE: tl.constexpr, TILES: tl.constexpr, EP: tl.constexpr, NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Wait for the routing metadata of one peer per program, then for its credit if `credits_ptr` is given.

    Waits for the first tile, which has the counts, and then for all tiles that the counts require.
    """
    peer = tl.program_id(0)
    base, epoch = (slot * W + peer) * T, tl.load(epoch_ptr)
    zero_1 = tl.arange(0, 1)
    wait(signals_ptr, base + zero_1, zero_1 == 0, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)
    e = tl.arange(0, EP)
    first = metadata_ptr + (slot.to(tl.int64) * W + peer) * C * 2
    used = E + tl.sum(tl.load(first + 2 * e, mask=e < E, other=0, volatile=True), 0)
    tile, epoch = tl.arange(0, TILES), tl.load(epoch_ptr)  # reloaded: kept across NVSHMEM calls it would be spilled
    wait(signals_ptr, base + tile, tile * TILE < used, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)
    if credits_ptr is not None:
        before = tl.load(credit_epoch_ptr) - 1
        wait(
            credits_ptr, credit_slot * W + peer + zero_1, zero_1 == 0, before, stop_ptr, record_ptr, limit_ns, INTERPRET
        )


@jit(do_not_specialize=["behind", "limit_ns", "count"])
def wait_signals_kernel(
    signals_ptr, index_ptr, epoch_ptr, stop_ptr, record_ptr, behind, limit_ns, count,
    BLOCK: tl.constexpr, NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(epoch_ptr) - behind
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, mask=i < count, other=0)
    wait(signals_ptr, index, i < count, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + tl.load(index_ptr + tl.program_id(0) * BLOCK), epoch)


def wait_metadata(
    metadata: ReceiveBuffer, experts: int, slot: int, bounds: Bounds, results: tuple[ReceiveBuffer, int] | None = None
) -> None:
    """Wait for every rank's routing metadata: int32 pairs. The first `experts` pairs begin with an expert's row count.

    With `results`, a buffer and a slot in which an exchange starts, also wait until peers have read its previous
    exchange.
    """
    capacity = metadata.rows.shape[2]
    tiles = capacity // metadata.tile
    credit = (None, None, 0) if results is None else (results[0].credits, results[0].epochs[results[1]], results[1])
    wait_metadata_kernel[(metadata.num_peers,)](
        metadata.rows, metadata.signals, metadata.epochs[slot], slot, *credit,
        bounds.stop, bounds.record, bounds.limit_ns, metadata.num_peers, capacity, tiles, experts,
        TILE=metadata.tile, TILES=triton.next_power_of_2(tiles), EP=triton.next_power_of_2(experts),
        **nvshmem_options(metadata.network), INTERPRET=INTERPRET, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def wait_signals(
    signals: Tensor, index: Tensor, epoch: Tensor, bounds: Bounds, network: Network | None = None, behind: int = 0
) -> None:
    """Wait until the signals at these int32 indices reach the exchange `epoch[0] - behind`.

    `network`: given if data of remote peers is read afterwards.
    """
    block = min(1024, max(16, triton.next_power_of_2(index.numel())))
    if index.numel():
        wait_signals_kernel[(triton.cdiv(index.numel(), block),)](
            signals, index, epoch, bounds.stop, bounds.record, behind, bounds.limit_ns, index.numel(),
            BLOCK=block, **nvshmem_options(network), INTERPRET=INTERPRET,
        )  # fmt: skip
