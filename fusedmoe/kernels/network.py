"""Rows and signals to far peers, whose memory this GPU cannot address, through NVSHMEM.

What a network card sends it reads itself, later, out of symmetric memory. So a kernel stores such rows there first,
with the code that stores rows of near peers (`Addresses.store_N`), and then has them put. Every put is a request to
NVSHMEM's proxy, so one takes as many rows as follow one another at both ends. Tokens go tile by tile, with their signal
(`put_signal_nbi`). Results go to a row each; but those of an expert for a peer follow one another, and a program sees a
tile of them (`put_runs`).

The signal of results says that all rows of a chunk are there, which many programs have put. It comes from a launch of
its own, behind theirs (`signal_far`): a fence of NVSHMEM orders whatever this GPU's threads have issued before it is
called, and launches of a stream follow one another. So programs that put need no fence of their own. Where a network
cannot keep an order, a fence waits until all has arrived, and in every thread that calls it: so one warp a peer does.

Rows are read out of staging until the peer has them. It has when it gives credit for them, and nothing else is stored
there before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.jit import jit
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.nvshmem import fence, put_nbi
from fusedmoe.kernels.nvshmem import signal as signal_pe
from fusedmoe.kernels.places import Mark, Network


@triton.jit
def put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, first, count, size, ROWS: tl.constexpr):
    """Puts those of some rows that go to far peers, once the whole program has stored them.

    Args:
        address_ptr, target_ptr, peer_ptr: as in `Addresses` and `Far`.
        first, count: the rows.   size: bytes of one.
    """
    i = tl.arange(0, ROWS)
    row, inside = first + i, i < count
    target = tl.load(target_ptr + row, mask=inside, other=0)
    peer = tl.load(peer_ptr + row, mask=inside, other=-1)
    behind = inside & (i > 0)
    follows = target == tl.load(target_ptr + row - 1, mask=behind, other=0) + size
    follows = follows & (peer == tl.load(peer_ptr + row - 1, mask=behind, other=-1)) & behind
    begins = (target != 0) & (follows == 0)
    one = tl.min(tl.where(begins, i, ROWS), 0)
    while one < ROWS:
        end = tl.min(tl.where((i > one) & (follows == 0), i, ROWS), 0)
        pe = tl.load(pe_ptr + tl.load(peer_ptr + first + one))
        here, there = tl.load(address_ptr + first + one), tl.load(target_ptr + first + one)
        put_nbi(there, here, (end - one).to(tl.int64) * size, pe)
        one = tl.min(tl.where(begins & (i > one), i, ROWS), 0)


@jit(do_not_specialize=["place", "epoch"])
def signal_far_kernel(signals_ptr, place, table_ptr, pe_ptr, spare_ptr, epoch):
    peer = tl.program_id(0)
    if tl.load(table_ptr + peer) == 0:
        fence()
        signal_pe(signals_ptr + place, epoch, tl.load(pe_ptr + peer), spare_ptr)


def signal_far(mark: Mark, epoch: int, network: Network) -> None:
    """Sets this rank's signal at far peers, behind everything that earlier launches of the stream have put."""
    signal_far_kernel[(mark.table.numel(),)](
        mark.signals, mark.place, mark.table, network.pe_W, network.spare, epoch, num_warps=1, **network.options
    )


def aot_cases() -> list[AotCase]:
    long = torch.int64
    arguments = {"signals_ptr": long, "place": "i32", "table_ptr": long, "pe_ptr": torch.int32, "spare_ptr": long}
    case = AotCase(
        "signal far nvshmem",
        signal_far_kernel,
        {**arguments, "epoch": "i32"},
        {"num_warps": 1},
        libraries=nvshmem_bitcode,
    )
    return [case]
