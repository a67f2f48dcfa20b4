"""Rows to other ranks' windows, started by kernels: puts with a signal for every tile, waits, and credits.

A window (`Place`) is a ring of slots of a symmetric heap; in each slot every rank has room for C rows, of which it
signals TILE at a time. Kernels here write to it and wait; those that compute on what has come wait for their own rows
(`fusedmoe/kernels/grouped`). Nothing here waits for the host.

Contract: the caller owns the windows, counts the exchanges and gives credit once it has read (`comm/window.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.remote import at_peer, signal, wait

# Rows of a program that puts what lies here already.
_RETURN_TILE = 64
# Of programs that move rows.
_WARPS = 8
_UNSPECIAL = ["me", "slot", "epoch", "credit", "limit_ns"]


class Bounds(NamedTuple):
    """What ends the waits of kernels; see `fusedmoe.kernels.remote.wait`."""

    stop: Tensor
    record: Tensor
    limit_ns: int


class Place(NamedTuple):
    """A window as kernels see it.

    Attributes:
        rows: [slots, W, C, M], this rank's copy: what the W ranks put here; or [slots, 1, C, M], the same rows for all.
        row_table: [W] all ranks' copies.
        signals: [slots, W, T] int64 of each rank, T = C / tile where tiles have signals.   signal_table: of these.
        tile: rows for which there is one signal.
        credits: [W] int64, of each peer the last exchange of this rank's that it has read.   credit_table: of these.
        me: this rank's place.
    """

    rows: Tensor
    row_table: Tensor
    signals: Tensor
    signal_table: Tensor
    tile: int
    credits: Tensor
    credit_table: Tensor
    me: int

    @property
    def slots(self) -> int:
        return self.rows.shape[0]

    @property
    def peers(self) -> int:
        return self.credits.numel()

    def slot(self, epoch: int) -> int:
        return (epoch - 1) % self.slots


class Put(NamedTuple):
    """Rows that go to other ranks' memory.

    Attributes:
        like: of the rows' dtype.
        address_N: int64, where each row goes.   peer_N: int32, to whom.   weight_N: factors, or None for 1.
        wanted_W: int32, rows of each peer.   signal_W: int64, the addresses of what to set to `epoch` when they are
            all there.
    """

    like: Tensor
    address_N: Tensor
    peer_N: Tensor
    weight_N: Tensor | None
    wanted_W: Tensor
    signal_W: Tensor
    epoch: int


@triton.jit(do_not_specialize=_UNSPECIAL)
def put_rows_kernel(
    x_ptr,
    source_ptr,
    used_ptr,
    rows_ptr,
    row_table_ptr,
    signals_ptr,
    signal_table_ptr,
    credits_ptr,
    stop_ptr,
    record_ptr,
    me,
    slot,
    epoch,
    credit,
    limit_ns,
    W,
    C,
    T,
    M,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # First tiles first, and each rank begins with another peer.
    tile = tl.program_id(0) // W
    peer = (me + tl.program_id(0)) % W
    used = tl.load(used_ptr + peer)
    # The first tile is signalled without rows, too: its reader then knows of an exchange in which nothing came.
    if tile > 0 and tile * TILE >= used:
        return
    one = tl.arange(0, 1)
    wait(credits_ptr, peer + one, one == 0, credit, stop_ptr, record_ptr, limit_ns, INTERPRET)

    place = tile * TILE + tl.arange(0, TILE)
    inside = place < used
    source = tl.load(source_ptr + peer.to(tl.int64) * C + place, mask=inside, other=0).to(tl.int64)
    there = at_peer(rows_ptr, row_table_ptr, peer)
    target = (slot.to(tl.int64) * W + me) * C + place
    column = tl.arange(0, BLOCK)
    for first in range(0, M, BLOCK):
        mask = inside[:, None] & (first + column < M)[None, :]
        x = tl.load(x_ptr + source[:, None] * M + first + column[None, :], mask=mask)
        tl.store(there + target[:, None] * M + first + column[None, :], x, mask=mask)
    signal(at_peer(signals_ptr, signal_table_ptr, peer) + (slot * W + me) * T + tile, epoch)


@triton.jit(do_not_specialize=_UNSPECIAL)
def await_letters_kernel(
    letters_ptr,
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
    INTERPRET: tl.constexpr,
):
    """Waits for all of one peer's letter, whose first tile tells how long it is."""
    peer = tl.program_id(0)
    base = (slot * W + peer) * T
    one = tl.arange(0, 1)
    wait(signals_ptr, base + one, one == 0, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    e = tl.arange(0, EP)
    letter = letters_ptr + (slot.to(tl.int64) * W + peer) * C * 2
    used = E + tl.sum(tl.load(letter + 2 * e, mask=e < E, other=0, volatile=True), 0)
    tile = tl.arange(0, TILES)
    wait(signals_ptr, base + tile, tile * TILE < used, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)


@triton.jit(do_not_specialize=[*_UNSPECIAL, "count"])
def await_kernel(
    signals_ptr,
    index_ptr,
    stop_ptr,
    record_ptr,
    epoch,
    limit_ns,
    count,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, mask=i < count, other=0)
    wait(signals_ptr, index, i < count, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)


@triton.jit(do_not_specialize=_UNSPECIAL)
def credit_kernel(credits_ptr, credit_table_ptr, me, epoch):
    signal(at_peer(credits_ptr, credit_table_ptr, tl.program_id(0)) + me, epoch)


@triton.jit
def signal_peers(peer, inside, parts, counter_ptr, wanted_ptr, signal_ptr, epoch, W):
    """Counts a tile's rows for each peer, and signals those who have all of theirs now: all `parts` of `wanted` rows.

    `signal_ptr`: [W] addresses of what to signal. A reader's acquire of the last one's release covers all tiles: each
    counted itself in with a release that the last one acquired.
    """
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


@triton.jit(do_not_specialize=["epoch"])
def return_rows_kernel(
    x_ptr,
    rows_ptr,
    address_ptr,
    peer_ptr,
    counter_ptr,
    wanted_ptr,
    signal_ptr,
    epoch,
    W,
    M,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        signal_those_without(wanted_ptr, signal_ptr, epoch, W)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < tl.load(rows_ptr)
    target = tl.load(address_ptr + row, mask=inside, other=0).to(x_ptr.dtype)
    column = tl.arange(0, BLOCK)
    for first in range(0, M, BLOCK):
        mask = inside[:, None] & (first + column < M)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * M + first + column[None, :], mask=mask)
        tl.store(target[:, None] + first + column[None, :], x, mask=mask)
    peer = tl.load(peer_ptr + row, mask=inside, other=0)
    signal_peers(peer, inside, 1, counter_ptr, wanted_ptr, signal_ptr, epoch, W)


@triton.jit
def put_values_kernel(x_ptr, address_ptr, rows_ptr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < tl.load(rows_ptr)
    target = tl.load(address_ptr + n, mask=inside, other=0).to(x_ptr.dtype)
    tl.store(target, tl.load(x_ptr + n, mask=inside), mask=inside)


def put_rows(x: Tensor, source_WC: Tensor, used_W: Tensor, place: Place, epoch: int, bounds: Bounds) -> None:
    """Puts x[source_WC[p, i]] to peer p's window, row i, for i < used_W[p], and signals each tile.

    Args:
        x: [n, M] contiguous, of the window's dtype. source_WC: int32. used_W: int32.
        epoch: of the exchange; waits until the peer has read what was in the slot before.
    """
    width, capacity = place.rows.shape[-1], place.rows.shape[2]
    tiles = capacity // place.tile
    put_rows_kernel[(place.peers * tiles,)](
        x,
        source_WC,
        used_W,
        place.rows,
        place.row_table,
        place.signals,
        place.signal_table,
        place.credits,
        bounds.stop,
        bounds.record,
        place.me,
        place.slot(epoch),
        epoch,
        epoch - place.slots,
        bounds.limit_ns,
        place.peers,
        capacity,
        tiles,
        width,
        TILE=place.tile,
        **_columns(width, place.tile),
        INTERPRET=INTERPRET,
        num_warps=_WARPS,
    )


def await_letters(letters: Place, experts: int, epoch: int, bounds: Bounds) -> None:
    """Waits for every rank's letter: rows of two int32, of which the first `experts` begin with the number of rows that
    follow for each of them."""
    capacity = letters.rows.shape[2]
    tiles = capacity // letters.tile
    await_letters_kernel[(letters.peers,)](
        letters.rows,
        letters.signals,
        bounds.stop,
        bounds.record,
        letters.slot(epoch),
        epoch,
        bounds.limit_ns,
        letters.peers,
        capacity,
        tiles,
        experts,
        TILE=letters.tile,
        TILES=triton.next_power_of_2(tiles),
        EP=triton.next_power_of_2(experts),
        INTERPRET=INTERPRET,
    )


def await_signals(signals: Tensor, index: Tensor, epoch: int, bounds: Bounds) -> None:
    """Waits until the signals with these (int32) indices have come to `epoch`."""
    block = min(1024, max(16, triton.next_power_of_2(index.numel())))
    if index.numel():
        await_kernel[(triton.cdiv(index.numel(), block),)](
            signals,
            index,
            bounds.stop,
            bounds.record,
            epoch,
            bounds.limit_ns,
            index.numel(),
            BLOCK=block,
            INTERPRET=INTERPRET,
        )


def give_credit(place: Place, epoch: int) -> None:
    """Tells all peers that their rows of this exchange have been read."""
    credit_kernel[(place.peers,)](place.credits, place.credit_table, place.me, epoch)


def put_values(x_R: Tensor, address_R: Tensor, rows: Tensor) -> None:
    """Stores x_R[i] at address_R[i] for i < rows[0]."""
    if x_R.numel():
        block = 256 if not INTERPRET else triton.next_power_of_2(x_R.numel())
        put_values_kernel[(triton.cdiv(x_R.numel(), block),)](x_R, address_R, rows, BLOCK=block)


def return_rows(x_RM: Tensor, rows: Tensor, put: Put) -> None:
    """Puts x_RM[i], for i < rows[0], where `put` says; the weights of `put` are not applied."""
    count, width = x_RM.shape
    peers = put.wanted_W.numel()
    return_rows_kernel[(max(1, triton.cdiv(count, _RETURN_TILE)),)](
        x_RM.contiguous(),
        rows,
        put.address_N,
        put.peer_N,
        torch.zeros_like(put.wanted_W),
        put.wanted_W,
        put.signal_W,
        put.epoch,
        peers,
        width,
        TILE=_RETURN_TILE,
        **_columns(width, _RETURN_TILE),
        num_warps=_WARPS,
    )


def _columns(width: int, tile: int) -> dict[str, int]:
    """A program's block of columns: addresses of more elements would not fit its registers."""
    most = max(16, 4096 // tile) if not INTERPRET else 4096
    return {"BLOCK": min(most, max(2, triton.next_power_of_2(width)))}


def aot_cases() -> list[AotCase]:
    i32, i64 = torch.int32, torch.int64
    stop = {"stop_ptr": i64, "record_ptr": i64, "limit_ns": "i64"}
    numbers = {name: "i32" for name in ("me", "slot", "epoch")}
    ends = {"counter_ptr": i32, "wanted_ptr": i32, "signal_ptr": i64, "epoch": "i32"}
    cases, warps = [], {"num_warps": _WARPS}
    for dtype, tile, width in (
        *((torch.bfloat16, 128, width) for width in (512, 4096, 7168)),
        *((torch.bfloat16, tile, 4096) for tile in (16, 64)),
        (torch.float16, 128, 4096),
        (torch.float32, 128, 4096),
        (torch.float32, 128, 100),
        (torch.int32, 1024, 2),
    ):
        name = f"{str(dtype)[6:]} {tile}x{width}"
        tables = {"rows_ptr": dtype, "row_table_ptr": i64, "signals_ptr": i64, "signal_table_ptr": i64}
        more = {"source_ptr": i32, "used_ptr": i32, "credits_ptr": i64, "credit": "i32", "W": 8, "C": 4096, "T": 32}
        sizes = {"M": width, "TILE": tile, **_columns(width, tile), "INTERPRET": False}
        put = {"x_ptr": dtype, **tables, **more, **numbers, **stop, **sizes}
        quick = name == "bfloat16 128x4096"
        cases.append(AotCase(f"put rows {name}", put_rows_kernel, put, warps, quick=quick))
        if dtype != torch.int32 and tile == 128:
            back = {"x_ptr": dtype, "rows_ptr": i32, "address_ptr": i64, "peer_ptr": i32, **ends, "W": 8, "M": width}
            back |= {"TILE": _RETURN_TILE, **_columns(width, _RETURN_TILE)}
            cases.append(AotCase(f"return rows {str(dtype)[6:]} {width}", return_rows_kernel, back, warps))
    letters = {"letters_ptr": i32, "signals_ptr": i64, **stop, "slot": "i32", "epoch": "i32", "W": 8, "C": 65536}
    shape = {"T": 64, "E": 32, "TILE": 1024, "TILES": 64, "EP": 32, "INTERPRET": False}
    cases.append(AotCase("await letters", await_letters_kernel, {**letters, **shape}))
    for block in (16, 256, 1024):
        some = {"signals_ptr": i64, "index_ptr": i32, **stop, "epoch": "i32", "count": "i32"}
        cases.append(AotCase(f"await {block}", await_kernel, {**some, "BLOCK": block, "INTERPRET": False}))
    credit = {"credits_ptr": i64, "credit_table_ptr": i64, "me": "i32", "epoch": "i32"}
    values = {"x_ptr": torch.float32, "address_ptr": i64, "rows_ptr": i32, "BLOCK": 256}
    return [*cases, AotCase("credit", credit_kernel, credit), AotCase("put values", put_values_kernel, values)]
