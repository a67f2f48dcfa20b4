"""Primitives of device-initiated communication, for kernels: put rows into a peer's memory, signal, wait with a bound.

One source for every symmetric heap (`fusedmoe/comm/one_sided/heap.py`): a kernel gets its own copy of an allocation and
the table of all ranks' addresses, and stores where the table says. The protocol, checked exhaustively in
tests/comm/test_protocol.py:

* Memory has slots, each with exchanges of its own, one after the other and numbered from 1: `epoch`. All ranks use
  slots in the same order, whichever that is. The number is counted on the device, by the kernel that gives credit.
* A signal is the number of the slot's exchange whose rows are there. It only grows and is never reset by a reader.
* A producer waits for the reader's credit before it writes to a slot again: the credit of a peer is the slot's last
  exchange that it has read. A reader gives credit for every exchange, also one in which nothing came.
* A rank begins a slot's next exchange behind its own credit for the one before, on the same stream: the number that
  its launches read would be an old one before.
* The signal is a release, the wait an acquire, both for the whole system: rows first, then their signal.
* Through the network (`network.py`) rows are read where they are staged until they have come, so what
  was there before must have been read by the peer. A fence is between rows and their signal. Credits need none: a
  slot's next one is given only when the peer has had the last one, without which it would not have begun.
  A reader asks NVSHMEM between the wait and the rows.
* A wait ends when `stop` is set or, on a GPU, when its time is up; it then leaves a record, and whoever launched the
  kernel raises (`Watch` in `fusedmoe/comm/one_sided/heap.py`). What such a kernel has computed is never used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.one_sided import Bounds, Network, ReceiveBuffer, linked
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import arrived


@triton.jit
def at_peer(own_ptr, table_ptr, peer):
    """The peer's copy of an allocation, as a pointer like the one to this rank's."""
    return tl.load(table_ptr + peer).to(own_ptr.dtype)


@triton.jit
def signal(ptr, epoch):
    """Says that everything the program has written is there. `ptr`: int64, in anybody's memory."""
    # All threads' writes come before the one thread's release.
    tl.debug_barrier()
    tl.atomic_xchg(ptr, epoch, sem="release", scope="sys")


@triton.jit
def now_ns():
    """The GPU's clock, the same in all threads, each of which reads another: for loops that must end in all at once."""
    thread = tl.arange(0, tl.extra.cuda.num_threads())
    times = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [thread], tl.int64, is_pure=False, pack=1)
    return tl.max(times, 0)


@triton.jit
def stopped(stop_ptr, INTERPRET: tl.constexpr):
    """The host's word, the same in all threads: or some would leave a loop and others wait for them."""
    if INTERPRET:
        return tl.load(stop_ptr, volatile=True)
    # Not by an atomic: those of a GPU and of its host need not know of each other.
    thread = tl.arange(0, tl.extra.cuda.num_threads())
    return tl.max(tl.load(stop_ptr + thread * 0, volatile=True), 0)


@triton.jit
def look(ptr, index, wanted):
    """The signals with these indices, as an acquire; those that are not wanted count as come."""
    seen = tl.atomic_add(ptr + index, 0, mask=wanted, sem="acquire", scope="sys")
    return tl.where(wanted, seen, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def wait(ptr, index, wanted, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET: tl.constexpr, LOOKS: tl.constexpr = 64):
    """Waits until all wanted signals have come to `epoch`.

    Args:
        ptr: int64 signals in this rank's memory. index, wanted: vectors.
        stop_ptr: the host's word; not 0 ends the wait.
        record_ptr: takes the record of the first wait of a heap that has ended early.
        LOOKS: at the signals between two looks at `stop`, which is the host's memory, and at the clock.
        limit_ns: how long it may last by the GPU's clock; the interpreter has none, there the host sets `stop`.
    """
    seen = look(ptr, index, wanted)
    late = tl.sum((seen < epoch).to(tl.int32), 0)
    began = tl.full((), 0, tl.int64)
    if not INTERPRET:
        began = now_ns()
    looks = 0
    while late > 0:
        reason = tl.full((), 0, tl.int64)
        looks += 1
        if looks % LOOKS == 0 or INTERPRET:
            reason = stopped(stop_ptr, INTERPRET)
            if not INTERPRET:
                if now_ns() - began > limit_ns:
                    reason = tl.full((), 1, tl.int64)
        if reason != 0:
            first = tl.min(tl.where(seen < epoch, index, 0x7FFFFFFF), 0)
            found = tl.min(tl.where((seen < epoch) & (index == first), seen, 0x7FFFFFFFFFFFFFFF), 0)
            # Of several waits that end, the first leaves its record.
            if tl.atomic_cas(record_ptr, tl.full((), 0, tl.int64), reason, sem="acq_rel", scope="sys") == 0:
                tl.store(record_ptr + 1, first.to(tl.int64))
                tl.store(record_ptr + 2, tl.full((), 0, tl.int64) + epoch)
                tl.store(record_ptr + 3, found)
                tl.store(record_ptr + 4, ptr.to(tl.int64))
            tl.store(stop_ptr, reason)  # nothing waits after it
            late = 0
        else:
            seen = look(ptr, index, wanted)
            late = tl.sum((seen < epoch).to(tl.int32), 0)


# Launches that wait for what other ranks put here; nobody on the host waits. Products wait for their own rows
# (`triton/grouped`). With NVSHMEM, what a far peer has put is read after NVSHMEM was told (`arrived`).


@jit(do_not_specialize=["slot", "credit_slot", "limit_ns"])
def wait_metadata_kernel(
    metadata_ptr, signals_ptr, epoch_ptr, slot,
    # Credits that are waited for, too; None where none are.
    credits_ptr, credit_epoch_ptr, credit_slot,
    stop_ptr, record_ptr, limit_ns, W, C, T, E,
    TILE: tl.constexpr, TILES: tl.constexpr, EP: tl.constexpr, NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Waits for all routing metadata of one peer, whose first tile tells how much there is, and for its credit."""
    peer = tl.program_id(0)
    base, epoch = (slot * W + peer) * T, tl.load(epoch_ptr)
    zero_1 = tl.arange(0, 1)
    wait(signals_ptr, base + zero_1, zero_1 == 0, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)
    e = tl.arange(0, EP)
    first = metadata_ptr + (slot.to(tl.int64) * W + peer) * C * 2
    used = E + tl.sum(tl.load(first + 2 * e, mask=e < E, other=0, volatile=True), 0)
    tile, epoch = tl.arange(0, TILES), tl.load(epoch_ptr)  # again: kept over calls of NVSHMEM it would be spilled
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
    """Waits for every rank's routing metadata: rows of two int32, of which the first `experts` begin with the number of
    rows that follow for each of them.

    `results`: a buffer and a slot of it in which an exchange begins; waited for is that peers have read the one before.
    """
    capacity = metadata.rows.shape[2]
    tiles = capacity // metadata.tile
    credit = (None, None, 0) if results is None else (results[0].credits, results[0].epochs[results[1]], results[1])
    wait_metadata_kernel[(metadata.peers,)](
        metadata.rows, metadata.signals, metadata.epochs[slot], slot, *credit,
        bounds.stop, bounds.record, bounds.limit_ns, metadata.peers, capacity, tiles, experts,
        TILE=metadata.tile, TILES=triton.next_power_of_2(tiles), EP=triton.next_power_of_2(experts),
        **linked(metadata.network), INTERPRET=INTERPRET, maxnreg=MOST_REGISTERS,
    )  # fmt: skip


def wait_signals(
    signals: Tensor, index: Tensor, epoch: Tensor, bounds: Bounds, network: Network | None = None, behind: int = 0
) -> None:
    """Waits until the signals with these (int32) indices have come to a number, so many `behind` the first of `epoch`.

    `network`: where one leads to far peers, and what they have put is read afterwards.
    """
    block = min(1024, max(16, triton.next_power_of_2(index.numel())))
    if index.numel():
        wait_signals_kernel[(triton.cdiv(index.numel(), block),)](
            signals, index, epoch, bounds.stop, bounds.record, behind, bounds.limit_ns, index.numel(),
            BLOCK=block, **linked(network), INTERPRET=INTERPRET,
        )  # fmt: skip
