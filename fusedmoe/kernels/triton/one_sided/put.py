"""Rows to other ranks' receive buffers, started by kernels: puts with a signal for every tile, results, and credits.

A receive buffer is a ring of slots of a symmetric heap; in each slot every rank has room for C rows, of which it
signals TILE at a time. Kernels here write to it, those of `remote.py` wait; those that compute on what has come wait
for their own rows, and put what they make (`triton/grouped`). Nothing here waits for the host.

With `NVSHMEM`, rows and signals for far peers go through the network (`network.py`); without, no peer is far.

Contract: the caller (`comm/one_sided/receive_buffers.py`) owns the buffers, chooses slots and gives credit once it has
read, which counts the slot's exchanges: a launch has the same arguments each time, as a CUDA graph wants them.
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
    far_pointers,
    linked,
)
from fusedmoe.kernels.triton.jit import MOST_REGISTERS, jit
from fusedmoe.kernels.triton.one_sided.network import put_runs, put_signal_nbi, signal_far, signal_pe
from fusedmoe.kernels.triton.one_sided.remote import at_peer, signal, wait

_FAULT = tl.constexpr(FAULT)
# Of programs that move rows.
_WARPS = 8
_UNSPECIAL = ["me", "slot", "limit_ns"]


@triton.jit
def _put_tile(
    program, x_ptr, source_ptr, used_ptr, rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr, credits_ptr,
    epoch_ptr, staging_ptr, slot, C, T, M, pe_ptr, spare_ptr, stop_ptr, record_ptr, me, limit_ns, W,
    TILE: tl.constexpr, BLOCK: tl.constexpr, NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    # First tiles first, and each rank begins with another peer.
    tile = program // W
    peer = (me + program) % W
    used = tl.load(used_ptr + peer)
    # The first tile is signalled without rows, too: its reader then knows of an exchange in which nothing came.
    if (tile == 0) | (tile * TILE < used):
        # The slot's last rows must have been read: the peer has given credit for them.
        epoch = tl.load(epoch_ptr)
        zero_1 = tl.arange(0, 1)
        credit = slot * W + peer + zero_1
        wait(credits_ptr, credit, zero_1 == 0, epoch - 1, stop_ptr, record_ptr, limit_ns, INTERPRET)

        place = tile * TILE + tl.arange(0, TILE)
        inside = place < used
        source = tl.load(source_ptr + peer.to(tl.int64) * C + place, mask=inside, other=0).to(tl.int64)
        peer_rows_ptr = at_peer(rows_ptr, row_table_ptr, peer)
        owner = me
        if NVSHMEM:
            far = tl.load(row_table_ptr + peer) == 0
            if far:
                peer_rows_ptr, owner = staging_ptr, peer
        target = (slot.to(tl.int64) * W + owner) * C + place
        column = tl.arange(0, BLOCK)
        for first in range(0, M, BLOCK):
            mask = inside[:, None] & (first + column < M)[None, :]
            x = tl.load(x_ptr + source[:, None] * M + first + column[None, :], mask=mask)
            tl.store(peer_rows_ptr + target[:, None] * M + first + column[None, :], x, mask=mask)
        mark = (slot * W + me) * T + tile
        if NVSHMEM:
            if far:
                size = M * (staging_ptr.dtype.element_ty.primitive_bitwidth // 8)
                here = staging_ptr + ((slot.to(tl.int64) * W + peer) * C + tile * TILE) * M
                away = rows_ptr + ((slot.to(tl.int64) * W + me) * C + tile * TILE) * M
                count, pe = tl.minimum(used - tile * TILE, TILE).to(tl.int64), tl.load(pe_ptr + peer)
                if count > 0:
                    put_signal_nbi(away, here, count * size, signals_ptr + mark, epoch, pe)
                else:
                    signal_pe(signals_ptr + mark, epoch, pe, spare_ptr)
            else:
                signal(at_peer(signals_ptr, signal_table_ptr, peer) + mark, epoch)
        else:
            signal(at_peer(signals_ptr, signal_table_ptr, peer) + mark, epoch)


@jit(do_not_specialize=[*_UNSPECIAL, "second_slot"])
def put_rows_kernel(
    # Rows, which of them go to each peer, and how many; their receive buffer (`ReceiveBuffer`), memory on the way to
    # far peers, the slot, and sizes.
    x_ptr, source_ptr, used_ptr,
    rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr, credits_ptr, epoch_ptr, staging_ptr, slot, C, T, M,
    # The same of rows that follow, which go to another buffer; None where none do.
    second_x_ptr, second_source_ptr, second_used_ptr,
    second_rows_ptr, second_row_table_ptr, second_signals_ptr, second_signal_table_ptr, second_credits_ptr,
    second_epoch_ptr, second_staging_ptr, second_slot, second_C, second_T, second_M,
    # The network: numbers of peers to NVSHMEM, a signal that nobody reads.
    pe_ptr, spare_ptr,
    stop_ptr, record_ptr, me, limit_ns, W,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SECOND_TILE: tl.constexpr, SECOND_BLOCK: tl.constexpr,
    NVSHMEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # Programs of what follows come after all others.
    first = W * T
    if program < first:
        _put_tile(
            program, x_ptr, source_ptr, used_ptr, rows_ptr, row_table_ptr, signals_ptr, signal_table_ptr, credits_ptr,
            epoch_ptr, staging_ptr, slot, C, T, M, pe_ptr, spare_ptr, stop_ptr, record_ptr, me, limit_ns, W,
            TILE, BLOCK, NVSHMEM, INTERPRET,
        )  # fmt: skip
    if second_x_ptr is not None:
        if program >= first:
            _put_tile(
                program - first, second_x_ptr, second_source_ptr, second_used_ptr,
                second_rows_ptr, second_row_table_ptr, second_signals_ptr, second_signal_table_ptr, second_credits_ptr,
                second_epoch_ptr, second_staging_ptr, second_slot, second_C, second_T, second_M,
                pe_ptr, spare_ptr, stop_ptr, record_ptr, me, limit_ns, W,
                SECOND_TILE, SECOND_BLOCK, NVSHMEM, INTERPRET,
            )  # fmt: skip


@triton.jit
def _set(ptr, table_ptr, peer, place, number, pe_ptr, spare_ptr, NVSHMEM: tl.constexpr):
    """Sets number `place` of some int64 at a peer."""
    if NVSHMEM:
        if tl.load(table_ptr + peer) == 0:
            signal_pe(ptr + place, number, tl.load(pe_ptr + peer), spare_ptr)
        else:
            signal(at_peer(ptr, table_ptr, peer) + place, number)
    else:
        signal(at_peer(ptr, table_ptr, peer) + place, number)


@triton.jit
def _credit(credits_ptr, credit_table_ptr, epoch_ptr, slot, peer, W, pe_ptr, spare_ptr, me, NVSHMEM: tl.constexpr):
    epoch, place = tl.load(epoch_ptr + peer), slot * W + me
    _set(credits_ptr, credit_table_ptr, peer, place, epoch, pe_ptr, spare_ptr, NVSHMEM)
    # Launches that follow on the stream read the next number, each of the copies: no other program looks at this one.
    tl.debug_barrier()
    tl.store(epoch_ptr + peer, epoch + 1)


@triton.jit
def credit_peer(
    credits_ptr, credit_table_ptr, epoch_ptr, slot,
    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
    told_ptr, stop_ptr, record_ptr,
    peer, W, pe_ptr, spare_ptr, me, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Gives a peer credit in up to three buffers, and looks at what it has told of; see `credit_kernel`."""
    if told_ptr is not None:
        # Peers have told before they put results, and these have come.
        told = tl.atomic_add(told_ptr + peer, 0, sem="acquire", scope="sys")
        if told != 0:
            reason = tl.full((), _FAULT, tl.int64)
            if tl.atomic_cas(record_ptr, tl.full((), 0, tl.int64), reason, sem="acq_rel", scope="sys") == 0:
                tl.store(record_ptr + 1, reason * 0 + peer)
                tl.store(record_ptr + 2, told)
            tl.store(stop_ptr, reason)
    _credit(credits_ptr, credit_table_ptr, epoch_ptr, slot, peer, W, pe_ptr, spare_ptr, me, NVSHMEM)
    if second_credits_ptr is not None:
        _credit(
            second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
            peer, W, pe_ptr, spare_ptr, me, NVSHMEM,
        )  # fmt: skip
    if third_credits_ptr is not None:
        _credit(
            third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot, peer, W, pe_ptr, spare_ptr, me, NVSHMEM
        )


@jit(do_not_specialize=[*_UNSPECIAL, "second_slot", "third_slot"])
def credit_kernel(
    # Of up to three buffers; None where there are fewer.
    credits_ptr, credit_table_ptr, epoch_ptr, slot,
    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
    # What ranks have found wrong (`Faults`); None where nobody looks.
    told_ptr, stop_ptr, record_ptr,
    pe_ptr, spare_ptr, me, NVSHMEM: tl.constexpr,
):  # fmt: skip
    credit_peer(
        credits_ptr, credit_table_ptr, epoch_ptr, slot,
        second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
        third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
        told_ptr, stop_ptr, record_ptr, tl.program_id(0), tl.num_programs(0), pe_ptr, spare_ptr, me, NVSHMEM,
    )  # fmt: skip


@triton.jit
def signal_peers(peer, inside, parts, counter_ptr, wanted_ptr, signal_ptr, epoch, W):
    """Counts a tile's rows for each peer, and signals those who have all of theirs now: all `parts` of `wanted` rows.

    `signal_ptr`: [W] addresses of what to signal; far peers are signalled later (`signal_far`), here a spare place is.
    A reader's acquire of the last one's release covers all tiles: each counted itself in with a release that the last
    one acquired.
    """
    # All of the program's stores come before its count.
    tl.debug_barrier()
    for p in range(W):
        mine = tl.sum((inside & (peer == p)).to(tl.int32), 0)
        if mine > 0:
            before = tl.atomic_add(counter_ptr + p, mine, sem="acq_rel", scope="gpu")
            if before + mine == tl.load(wanted_ptr + p) * parts:
                signal(tl.load(signal_ptr + p).to(tl.pointer_type(tl.int64)), epoch)


@triton.jit
def signal_those_without(wanted_ptr, signal_ptr, epoch, W):
    """A peer that none of these rows belong to learns that nothing comes."""
    for p in range(W):
        if tl.load(wanted_ptr + p) == 0:
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
    """Rows that are sent to all peers: x[source_WC[p, i]] to peer p's buffer, row i, for i < used_W[p].

    Attributes:
        x: [n, M] contiguous, of the buffer's dtype.   source_WC: int32.   used_W: int32.
        slot: of the exchange.
    """

    x: Tensor
    source_WC: Tensor
    used_W: Tensor
    buffer: ReceiveBuffer
    slot: int


def put_rows(bounds: Bounds, first: SentRows, second: SentRows | None = None) -> None:
    """Puts rows, and others that follow into another buffer, and signals each tile. Waits until the peer has read what
    was in a slot before."""
    buffer, programs, nothing = first.buffer, _tiles(first), (*(None,) * 10, 0, 0, 0, 0)
    shape, second_shape = columns(buffer.rows.shape[-1], buffer.tile), (0, 0)
    long = buffer.network is not None or second is not None or ragged(buffer.rows.shape[-1], buffer.tile)
    if second is not None:
        programs += _tiles(second)
        second_shape = second.buffer.tile, columns(second.buffer.rows.shape[-1], second.buffer.tile)["BLOCK"]
    put_rows_kernel[(buffer.peers * programs,)](
        *_arguments(first), *(nothing if second is None else _arguments(second)),
        *far_pointers(buffer.network), bounds.stop, bounds.record, buffer.me, bounds.limit_ns, buffer.peers,
        TILE=buffer.tile, **shape, SECOND_TILE=second_shape[0], SECOND_BLOCK=second_shape[1],
        **linked(buffer.network), INTERPRET=INTERPRET, **launch_options(long),
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
    """Tells all peers that their rows in this slot have been read, and in a slot of up to two other buffers. The slot's
    next exchange may begin in launches that follow. With `faults` it also looks at what peers have
    told of (`tell_faults`): all waits end then, and the record says why."""
    credit_kernel[(buffer.peers,)](
        *credit_arguments([(buffer, slot), *others], faults),
        *far_pointers(buffer.network),
        buffer.me,
        **linked(buffer.network),
        **credit_options(buffer.network is not None),
    )


def credit_arguments(read: Sequence[tuple[ReceiveBuffer, int]], faults: Faults | None) -> tuple[Any, ...]:
    """Returns what kernels that give credit take: of up to three buffers, and what peers have told of."""
    given = [(one.credits, one.credit_table, one.epochs[at], at) for one, at in read]
    none = [(None, None, None, 0)] * (3 - len(given))
    words = (None,) * 3 if faults is None else (faults.told, faults.bounds.stop, faults.bounds.record)
    return (*(argument for each in (*given, *none) for argument in each), *words)


@jit(do_not_specialize=["me"])
def tell_faults_kernel(fault_ptr, told_ptr, told_table_ptr, pe_ptr, spare_ptr, me, NVSHMEM: tl.constexpr):
    fault = tl.load(fault_ptr)
    if fault != 0:
        _set(told_ptr, told_table_ptr, tl.program_id(0), me, fault, pe_ptr, spare_ptr, NVSHMEM)


def tell_faults(faults: Faults, me: int, network: Network | None) -> None:
    """Tells all ranks what this one has found wrong, if anything; the results of its pass must come after it."""
    tell_faults_kernel[(faults.told.numel(),)](
        faults.own, faults.told, faults.table, *far_pointers(network), me,
        **linked(network), **credit_options(network is not None),
    )  # fmt: skip


def put_values(x_R: Tensor, addresses: Addresses, rows: Tensor) -> None:
    """Puts x_R[i] to its address for i < rows[0]. Far peers have them before signals that come later (`finish`)."""
    if x_R.numel():
        block = 256 if not INTERPRET else triton.next_power_of_2(x_R.numel())
        peer_N, store_N, target_N, network = addresses
        put_values_kernel[(triton.cdiv(x_R.numel(), block),)](
            x_R, store_N, rows, target_N, peer_N, far_pointers(network)[0], BLOCK=block, **linked(network)
        )


def finish(put: Put) -> None:
    """Behind the launches that put: far peers learn that they have all of it."""
    if put.addresses.network is not None:
        signal_far(put.mark, put.epoch, put.addresses.network)


def ragged(width: int, tile: int) -> bool:
    """Return whether rows end inside a block of columns, which takes more code."""
    return width % columns(width, tile)["BLOCK"] != 0


def launch_options(long: bool) -> dict[str, int]:
    """Options of launches that move rows. In long code, NVSHMEM's, for rows of two kinds or for ragged ones, the
    assembler would spill to fit one more program.
    """
    return {"num_warps": _WARPS, "maxnreg": MOST_REGISTERS} if long else {"num_warps": _WARPS}


def credit_options(nvshmem: bool) -> dict[str, int]:
    """Options of launches that give credit or tell of faults: every thread calls NVSHMEM, so one warp is enough."""
    return {"num_warps": 1} if nvshmem else {}


def columns(width: int, tile: int) -> dict[str, int]:
    """A program's block of columns: addresses of more elements would not fit its registers."""
    most = max(16, 4096 // tile) if not INTERPRET else 4096
    return {"BLOCK": min(most, max(2, triton.next_power_of_2(width)))}
