"""Waits for what other ranks put here, by kernels: nobody on the host waits. Products wait for their own rows
(`fusedmoe/kernels/grouped`); here are letters, and whole sets of signals.

With `NVSHMEM`, what a far peer has put is read after NVSHMEM was told (`arrived`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.jit import jit
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.nvshmem import arrived
from fusedmoe.kernels.places import Bounds, Network, Place, linked
from fusedmoe.kernels.remote import wait


@jit(do_not_specialize=["slot", "epoch", "limit_ns"])
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
    NVSHMEM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Waits for all of one peer's letter, whose first tile tells how long it is."""
    peer = tl.program_id(0)
    base = (slot * W + peer) * T
    one = tl.arange(0, 1)
    wait(signals_ptr, base + one, one == 0, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)
    e = tl.arange(0, EP)
    letter = letters_ptr + (slot.to(tl.int64) * W + peer) * C * 2
    used = E + tl.sum(tl.load(letter + 2 * e, mask=e < E, other=0, volatile=True), 0)
    tile = tl.arange(0, TILES)
    wait(signals_ptr, base + tile, tile * TILE < used, epoch, stop_ptr, record_ptr, limit_ns, INTERPRET)
    if NVSHMEM:
        arrived(signals_ptr + base, epoch)


@jit(do_not_specialize=["epoch", "limit_ns", "count"])
def await_kernel(
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
        **linked(letters.network),
        INTERPRET=INTERPRET,
    )


def await_signals(signals: Tensor, index: Tensor, epoch: int, bounds: Bounds, network: Network | None = None) -> None:
    """Waits until the signals with these (int32) indices have come to `epoch`.

    `network`: where one leads to far peers, and what they have put is read afterwards.
    """
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
            **linked(network),
            INTERPRET=INTERPRET,
        )


def aot_cases() -> list[AotCase]:
    i32, i64 = torch.int32, torch.int64
    stop = {"stop_ptr": i64, "record_ptr": i64, "limit_ns": "i64"}
    letters = {"letters_ptr": i32, "signals_ptr": i64, **stop, "slot": "i32", "epoch": "i32", "W": 8, "C": 65536}
    shape = {"T": 64, "E": 32, "TILE": 1024, "TILES": 64, "EP": 32, "INTERPRET": False}
    some = {"signals_ptr": i64, "index_ptr": i32, **stop, "epoch": "i32", "count": "i32", "INTERPRET": False}
    kernels: list[tuple[str, Any, dict[str, Any]]] = [("await letters", await_letters_kernel, {**letters, **shape})]
    kernels += [(f"await {block}", await_kernel, {**some, "BLOCK": block}) for block in (16, 256, 1024)]
    return [
        case
        for name, kernel, arguments in kernels
        for case in (
            AotCase(name, kernel, {**arguments, "NVSHMEM": False}),
            AotCase(f"{name} nvshmem", kernel, {**arguments, "NVSHMEM": True}, libraries=nvshmem_bitcode),
        )
    ]
