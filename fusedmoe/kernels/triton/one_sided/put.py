"""Kernels that put rows to other ranks' receive buffers, a signal per tile, and credits (permissions to overwrite).

A receive buffer is a ring of slots in a symmetric heap. Each slot has C rows per source rank, signalled TILE at a time.
No host synchronization.

The caller (`comm/one_sided/receive_buffers.py`) owns the buffers, selects slots, and gives credit after reading. The
credit kernel increments the slot's exchange number, so launches have constant arguments, as CUDA graphs require.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.one_sided import (
    FAULT,
    Addresses,
    Bounds,
    Faults,
    Network,
    Put,
    ReceiveBuffer,
    network_pointers,
    nvshmem_options,
)
from fusedmoe.kernels.triton.jit import MAX_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import put_runs, put_signal_nbi, signal_far, signal_pe
from fusedmoe.kernels.triton.one_sided.remote import peer_pointer, signal, wait

_FAULT = tl.constexpr(FAULT)
_WARPS = 8
_DYNAMIC_ARGUMENTS = ["me", "slot", "limit_ns"]


@triton.jit
def _put_tile(
    program, x_ptr, source_row_ptr, used_ptr, rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr, credits_ptr,
    epoch_ptr, staging_ptr, slot, C, T, M, pe_ptr, dummy_ptr, stop_ptr, record_ptr, me, limit_ns, W,
    TILE: tl.constexpr, BLOCK: tl.constexpr, NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # Each rank starts with a different peer.
    tile = program // W
    peer = (me + program) % W
    used = tl.load(used_ptr + peer)
    # Signalled even without rows, so the reader observes an empty exchange.
    if (tile == 0) | (tile * TILE < used):
        # The peer must have given credit for the slot's previous rows.
        epoch = tl.load(epoch_ptr)
        zero_1 = tl.arange(0, 1)
        credit = slot * W + peer + zero_1
        wait(credits_ptr, credit, zero_1 == 0, epoch - 1, stop_ptr, record_ptr, limit_ns, INTERPRET)

        index = tile * TILE + tl.arange(0, TILE)
        inside = index < used
        source_row = tl.load(source_row_ptr + peer.to(tl.int64) * C + index, mask=inside, other=0).to(tl.int64)
        peer_rows_ptr = peer_pointer(rows_ptr, row_table_ptr, peer)
        owner = me
        if NVSHMEM:
            far = tl.load(row_table_ptr + peer) == 0
            if far:
                peer_rows_ptr, owner = staging_ptr, peer
        target = (slot.to(tl.int64) * W + owner) * C + index
        column = tl.arange(0, BLOCK)
        for first in range(0, M, BLOCK):
            mask = inside[:, None] & (first + column < M)[None, :]
            x = tl.load(x_ptr + source_row[:, None] * M + first + column[None, :], mask=mask)
            tl.store(peer_rows_ptr + target[:, None] * M + first + column[None, :], x, mask=mask)
        signal_index = (slot * W + me) * T + tile
        if NVSHMEM:
            if far:
                size = M * (staging_ptr.dtype.element_ty.primitive_bitwidth // 8)
                staged_ptr = staging_ptr + ((slot.to(tl.int64) * W + peer) * C + tile * TILE) * M
                remote_ptr = rows_ptr + ((slot.to(tl.int64) * W + me) * C + tile * TILE) * M
                count, pe = tl.minimum(used - tile * TILE, TILE).to(tl.int64), tl.load(pe_ptr + peer)
                if count > 0:
                    put_signal_nbi(remote_ptr, staged_ptr, count * size, signals_ptr + signal_index, epoch, pe)
                else:
                    signal_pe(signals_ptr + signal_index, epoch, pe, dummy_ptr)
            else:
                signal(peer_pointer(signals_ptr, signal_table_ptr, peer) + signal_index, epoch)
        else:
            signal(peer_pointer(signals_ptr, signal_table_ptr, peer) + signal_index, epoch)


@jit(do_not_specialize=[*_DYNAMIC_ARGUMENTS, "second_slot"])
def put_rows_kernel(
    x_ptr, source_row_ptr, used_ptr,
    rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr, credits_ptr, epoch_ptr, staging_ptr, slot, C, T, M,
    second_x_ptr, second_source_row_ptr, second_used_ptr,
    second_rows_ptr, second_row_table_ptr, second_signals_ptr, second_signal_table_ptr, second_credits_ptr,
    second_epoch_ptr, second_staging_ptr, second_slot, second_C, second_T, second_M,
    pe_ptr, dummy_ptr,
    stop_ptr, record_ptr, me, limit_ns, W,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SECOND_TILE: tl.constexpr, SECOND_BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = W * T
    if program < first:
        _put_tile(
            program, x_ptr, source_row_ptr, used_ptr, rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr,
            credits_ptr, epoch_ptr, staging_ptr, slot, C, T, M, pe_ptr, dummy_ptr, stop_ptr, record_ptr, me, limit_ns,
            W, TILE, BLOCK, NVSHMEM, INTERPRET,
        )  # fmt: skip
    if second_x_ptr is not None:
        if program >= first:
            _put_tile(
                program - first, second_x_ptr, second_source_row_ptr, second_used_ptr,
                second_rows_ptr, second_row_table_ptr, second_signals_ptr, second_signal_table_ptr, second_credits_ptr,
                second_epoch_ptr, second_staging_ptr, second_slot, second_C, second_T, second_M,
                pe_ptr, dummy_ptr, stop_ptr, record_ptr, me, limit_ns, W,
                SECOND_TILE, SECOND_BLOCK, NVSHMEM, INTERPRET,
            )  # fmt: skip


@triton.jit
def _store_at_peer(ptr, table_ptr, peer, index, number, pe_ptr, dummy_ptr, NVSHMEM: tl.constexpr):
    if NVSHMEM:
        if tl.load(table_ptr + peer) == 0:
            signal_pe(ptr + index, number, tl.load(pe_ptr + peer), dummy_ptr)
        else:
            signal(peer_pointer(ptr, table_ptr, peer) + index, number)
    else:
        signal(peer_pointer(ptr, table_ptr, peer) + index, number)


@triton.jit
def _credit(credits_ptr, credit_table_ptr, epoch_ptr, slot, peer, W, pe_ptr, dummy_ptr, me, NVSHMEM: tl.constexpr):
    epoch, index = tl.load(epoch_ptr + peer), slot * W + me
    _store_at_peer(credits_ptr, credit_table_ptr, peer, index, epoch, pe_ptr, dummy_ptr, NVSHMEM)
    # Later launches on the stream read the incremented number from each copy; only this program accesses this one.
    tl.debug_barrier()
    tl.store(epoch_ptr + peer, epoch + 1)


@triton.jit
def credit_peer(
    credits_ptr, credit_table_ptr, epoch_ptr, slot,
    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
    received_ptr, stop_ptr, record_ptr,
    peer, W, pe_ptr, dummy_ptr, me, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Give rank `peer` credit: this rank has read its slot of one to three receive buffers, which it may write again.

    If `received_ptr` is given and the peer has reported a fault, first record the fault and set the stop flag, which
    ends all waits. The other arguments are those of `give_credit`, as tensors.
    """
    if received_ptr is not None:
        # Peers send faults before results, and the results have arrived.
        fault = tl.atomic_add(received_ptr + peer, 0, sem="acquire", scope="sys")
        if fault != 0:
            reason = tl.full((), _FAULT, tl.int64)
            if tl.atomic_cas(record_ptr, tl.full((), 0, tl.int64), reason, sem="acq_rel", scope="sys") == 0:
                tl.store(record_ptr + 1, reason * 0 + peer)
                tl.store(record_ptr + 2, fault)
            tl.store(stop_ptr, reason)
    _credit(credits_ptr, credit_table_ptr, epoch_ptr, slot, peer, W, pe_ptr, dummy_ptr, me, NVSHMEM)
    if second_credits_ptr is not None:
        _credit(
            second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
            peer, W, pe_ptr, dummy_ptr, me, NVSHMEM,
        )  # fmt: skip
    if third_credits_ptr is not None:
        _credit(
            third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot, peer, W, pe_ptr, dummy_ptr, me, NVSHMEM
        )


@jit(do_not_specialize=[*_DYNAMIC_ARGUMENTS, "second_slot", "third_slot"])
def credit_kernel(
    credits_ptr, credit_table_ptr, epoch_ptr, slot,
    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
    # Fault words (`Faults`); None to skip the check.
    received_ptr, stop_ptr, record_ptr,
    pe_ptr, dummy_ptr, me, NVSHMEM: tl.constexpr,
):  # fmt: skip
    credit_peer(
        credits_ptr, credit_table_ptr, epoch_ptr, slot,
        second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
        third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
        received_ptr, stop_ptr, record_ptr, tl.program_id(0), tl.num_programs(0), pe_ptr, dummy_ptr, me, NVSHMEM,
    )  # fmt: skip


@triton.jit
def signal_peers(peer, inside, parts, counter_ptr, num_rows_ptr, signal_ptr, epoch, W):
    """Add a tile's rows to each peer's count, and signal peers whose count has reached `parts` times their rows.

    `signal_ptr`: [W] signal addresses; for remote peers of unused local signals, because `signal_far` signals them
    later. A reader that acquires the last program's release sees all tiles: each program counted its tile with a
    release that the last program acquired.
    """
    # All stores of the program precede its count.
    tl.debug_barrier()
    for p in range(W):
        own = tl.sum((inside & (peer == p)).to(tl.int32), 0)
        if own > 0:
            before = tl.atomic_add(counter_ptr + p, own, sem="acq_rel", scope="gpu")
            if before + own == tl.load(num_rows_ptr + p) * parts:
                signal(tl.load(signal_ptr + p).to(tl.pointer_type(tl.int64)), epoch)


@triton.jit
def signal_idle_peers(num_rows_ptr, signal_ptr, epoch, W):
    for p in range(W):
        if tl.load(num_rows_ptr + p) == 0:
            signal(tl.load(signal_ptr + p).to(tl.pointer_type(tl.int64)), epoch)


@jit
def put_values_kernel(
    x_ptr, address_ptr, rows_ptr, target_ptr, peer_ptr, pe_ptr, BLOCK: tl.constexpr, NVSHMEM: tl.constexpr
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < tl.load(rows_ptr)
    target = tl.load(address_ptr + n, mask=inside, other=0).to(x_ptr.dtype)
    tl.store(target, tl.load(x_ptr + n, mask=inside), mask=inside)
    if NVSHMEM:
        first, size = tl.program_id(0) * BLOCK, x_ptr.dtype.element_ty.primitive_bitwidth // 8
        put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, first, tl.load(rows_ptr) - first, size, BLOCK)


class SentRows(NamedTuple):
    """Rows to send to all peers: x[source_WC[p, i]] to row i of peer p's buffer, for i < used_W[p].

    Attributes:
        x: [n, M] contiguous, in the buffer's dtype.
        source_WC, used_W: int32 row indices, and number of rows for each peer.
        slot: buffer slot of the exchange.
    """

    x: Tensor
    source_WC: Tensor
    used_W: Tensor
    buffer: ReceiveBuffer
    slot: int


def put_rows(bounds: Bounds, first: SentRows, second: SentRows | None = None) -> None:
    """Put one or two sets of rows, each into its buffer, and signal each tile; first waits for the peer's credit."""
    buffer, programs, nothing = first.buffer, _tiles(first), (*(None,) * 10, 0, 0, 0, 0)
    shape, second_shape = columns(buffer.rows.shape[-1], buffer.tile), (0, 0)
    has_long_code = buffer.network is not None or second is not None or has_long_rows_code(buffer.rows, buffer.tile)
    if second is not None:
        programs += _tiles(second)
        second_shape = second.buffer.tile, columns(second.buffer.rows.shape[-1], second.buffer.tile)["BLOCK"]
    put_rows_kernel[(buffer.num_peers * programs,)](
        *_arguments(first), *(nothing if second is None else _arguments(second)),
        *network_pointers(buffer.network), bounds.stop, bounds.record, buffer.me, bounds.limit_ns, buffer.num_peers,
        TILE=buffer.tile, **shape, SECOND_TILE=second_shape[0], SECOND_BLOCK=second_shape[1],
        **nvshmem_options(buffer.network), INTERPRET=INTERPRET, **launch_options(has_long_code),
    )  # fmt: skip


def _tiles(sent: SentRows) -> int:
    return sent.buffer.rows.shape[2] // sent.buffer.tile


def _arguments(sent: SentRows) -> tuple[Any, ...]:
    x, source_WC, used_W, buffer, slot = sent
    own = (buffer.rows, buffer.row_table, buffer.signals, buffer.signal_table, buffer.credits, buffer.epochs[slot])
    _, _, capacity, width = buffer.rows.shape
    return (x, source_WC, used_W, *own, buffer.staging, slot, capacity, _tiles(sent), width)


def give_credit(
    buffer: ReceiveBuffer, slot: int, *others: tuple[ReceiveBuffer, int], faults: Faults | None = None
) -> None:
    """Notify all peers that their rows in up to three slots have been read; later launches may start the next exchange.

    With `faults`, also checks the fault words received from peers: a fault ends all waits and is recorded.
    """
    credit_kernel[(buffer.num_peers,)](
        *credit_arguments([(buffer, slot), *others], faults),
        *network_pointers(buffer.network),
        buffer.me,
        **nvshmem_options(buffer.network),
        **credit_options(buffer.network is not None),
    )


def credit_arguments(read: Sequence[tuple[ReceiveBuffer, int]], faults: Faults | None) -> tuple[Any, ...]:
    given = [(one.credits, one.credit_table, one.epochs[at], at) for one, at in read]
    none = [(None, None, None, 0)] * (3 - len(given))
    words = (None,) * 3 if faults is None else (faults.received_W, faults.bounds.stop, faults.bounds.record)
    return (*(argument for each in (*given, *none) for argument in each), *words)


@jit(do_not_specialize=["me"])
def send_faults_kernel(fault_ptr, received_ptr, received_table_ptr, pe_ptr, dummy_ptr, me, NVSHMEM: tl.constexpr):
    fault = tl.load(fault_ptr)
    if fault != 0:
        _store_at_peer(received_ptr, received_table_ptr, tl.program_id(0), me, fault, pe_ptr, dummy_ptr, NVSHMEM)


def send_faults(faults: Faults, me: int, network: Network | None) -> None:
    """Send this rank's fault word, if set, to all ranks; must precede the results of its pass."""
    send_faults_kernel[(faults.received_W.numel(),)](
        faults.own, faults.received_W, faults.table, *network_pointers(network), me,
        **nvshmem_options(network), **credit_options(network is not None),
    )  # fmt: skip


def put_values(x_R: Tensor, addresses: Addresses, rows: Tensor) -> None:
    """Put x_R[i] to its address for i < rows[0]. At remote peers they precede later signals (`finish_put`)."""
    if x_R.numel():
        block = 256 if not INTERPRET else triton.next_power_of_2(x_R.numel())
        peer_N, store_N, target_N, network = addresses
        put_values_kernel[(triton.cdiv(x_R.numel(), block),)](
            x_R, store_N, rows, target_N, peer_N, network_pointers(network)[0], BLOCK=block, **nvshmem_options(network)
        )


def finish_put(put: Put) -> None:
    """Signal remote peers that all their rows have been put. Call after the launches that put rows."""
    if put.addresses.network is not None:
        signal_far(put.peer_signal, put.epoch, put.addresses.network)


def has_long_rows_code(rows: Tensor, tile: int) -> bool:
    """Whether rows [..., M] end in a partial block, or have elements of 4 bytes, which take twice as many registers."""
    width = rows.shape[-1]
    return width % columns(width, tile)["BLOCK"] != 0 or rows.element_size() > 2


def launch_options(has_long_code: bool) -> dict[str, int]:
    """Return options of launches that move rows.

    With more code (NVSHMEM, two sets of rows, `has_long_rows_code`) the assembler would spill registers to raise
    occupancy.
    """
    return {"num_warps": _WARPS, "maxnreg": MAX_REGISTERS} if has_long_code else {"num_warps": _WARPS}


def credit_options(nvshmem: bool) -> dict[str, int]:
    """Return launch options. With NVSHMEM one warp, because every thread makes the NVSHMEM call."""
    return {"num_warps": 1} if nvshmem else {}


def columns(width: int, tile: int) -> dict[str, int]:
    most = max(16, 4096 // tile) if not INTERPRET else 4096
    return {"BLOCK": min(most, max(2, triton.next_power_of_2(width)))}
