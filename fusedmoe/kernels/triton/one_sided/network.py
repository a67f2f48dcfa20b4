"""Rows and signals to far peers, whose memory this GPU cannot address, through NVSHMEM and its device functions.

What a network card sends it reads itself, later, out of symmetric memory. So a kernel stores such rows there first,
with the code that stores rows of near peers (`Addresses.store_N`), and then has them put. Every put is a request to
NVSHMEM's proxy, so one takes as many rows as follow one another at both ends. Tokens go tile by tile, with their signal
(`put_signal_nbi`). Results go to a row each; but those of an expert for a peer follow one another, and a program sees a
tile of them (`put_runs`).

Rows are read out of staging until the peer has them. It has when it gives credit for them, and nothing else is stored
there before.

What is read must be symmetric memory, too, or registered with NVSHMEM: a network card reads it. Functions wait for the
proxy, a thread of NVSHMEM on the host, where it is behind, and for that there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language import core

from fusedmoe.kernels.one_sided import Mark, Network
from fusedmoe.kernels.triton.jit import jit

_I32, _I64 = core.dtype("int32"), core.dtype("int64")

# NVSHMEM_SIGNAL_SET of nvshmemx_signal_op_t, and NVSHMEM_CMP_GE of nvshmemx_cmp_type_t.
_SET = tl.constexpr(9)
_AT_LEAST = tl.constexpr(5)


# NVSHMEM's functions, made Triton's. An address is one of this rank's symmetric memory; the PE, NVSHMEM's word for a
# rank, says on whose copy it is meant. All threads of a program call a function together: those that NVSHMEM has for a
# block share the work, the others do it in every thread. Arguments are pointers or numbers, no blocks. Most return
# nothing; only Triton wants a type of them. A launch takes `extern_libs=nvshmem_bitcode()`, and what is loaded must be
# made known to NVSHMEM before it runs (`tell_of_modules`).


@core.extern
def _put_nbi_block(dest, source, size, pe, _semantic=None):
    symbol = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_nbi_block", _I32)}
    return core.extern_elementwise("", "", [dest, source, size, pe], symbol, is_pure=False, _semantic=_semantic)


@core.extern
def _put_signal_nbi_block(dest, source, size, signal, value, operation, pe, _semantic=None):
    arguments = [dest, source, size, signal, value, operation, pe]
    symbol = {(_I64, _I64, _I64, _I64, _I64, _I32, _I32): ("nvshmemx_putmem_signal_nbi_block", _I32)}
    return core.extern_elementwise("", "", arguments, symbol, is_pure=False, _semantic=_semantic)


@core.extern
def _signal_op(signal, value, operation, pe, _semantic=None):
    symbol = {(_I64, _I64, _I32, _I32): ("nvshmemx_signal_op", _I32)}
    return core.extern_elementwise("", "", [signal, value, operation, pe], symbol, is_pure=False, _semantic=_semantic)


@core.extern
def _test(signal, comparison, value, _semantic=None):
    symbol = {(_I64, _I32, _I64): ("nvshmem_uint64_test", _I32)}
    return core.extern_elementwise("", "", [signal, comparison, value], symbol, is_pure=False, _semantic=_semantic)


@core.extern
def my_pe(_semantic=None):
    """This rank's PE."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_my_pe", _I32)}, is_pure=True, _semantic=_semantic)


@core.extern
def fence(_semantic=None):
    """Orders puts: those of this rank to a PE so far, in any program, arrive before later ones. In every thread.

    NVSHMEM's rule for threads: what was issued before the fence was called. So a program whose puts are meant must have
    gone before, or told of them by an atomic that this one has read; it need not have waited for them.
    """
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _I32)}, is_pure=False, _semantic=_semantic)


@triton.jit
def put_nbi(dest_ptr, source_ptr, size, pe):
    """Copies `size` bytes to a PE. The source may be used again once they have come there."""
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    _put_nbi_block(dest, source, tl.cast(size, tl.int64), tl.cast(pe, tl.int32))


@triton.jit
def put_signal_nbi(dest_ptr, source_ptr, size, signal_ptr, value, pe):
    """Copies `size` bytes, more than 0, to a PE, and sets its int64 signal once they have come there.

    The source may be used again then. The signal orders these bytes alone, not those of other puts.
    """
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    place, number = tl.cast(signal_ptr, tl.int64), tl.cast(value, tl.int64)
    _put_signal_nbi_block(dest, source, tl.cast(size, tl.int64), place, number, _SET, tl.cast(pe, tl.int32))


@triton.jit
def signal_pe(signal_ptr, value, pe, spare_ptr):
    """Sets a PE's int64 signal, once. It orders nothing that was put before; `fence` does.

    NVSHMEM has this for a thread only, and an `if` in Triton holds for a program: the threads but the first set a spare
    int64 of this rank instead, which is an ordinary store.
    """
    first = tl.arange(0, tl.extra.cuda.num_threads()) == 0
    place = tl.where(first, tl.cast(signal_ptr, tl.int64), tl.cast(spare_ptr, tl.int64))
    _signal_op(place, tl.cast(value, tl.int64), _SET, tl.where(first, tl.cast(pe, tl.int32), my_pe()))


@triton.jit
def arrived(signal_ptr, value):
    """1 where this rank's signal is at least `value`, else 0; after a 1, what came before the signal can be read.

    On GPUs that need it NVSHMEM flushes what the network has written, so who has seen the signal by other means still
    asks here before it reads. Every thread looks by itself: use it where the signal is known to stand.
    """
    return _test(tl.cast(signal_ptr, tl.int64), _AT_LEAST, tl.cast(value, tl.int64))


@triton.jit
def put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, first, count, size, ROWS: tl.constexpr):
    """Puts those of some rows that go to far peers, once the whole program has stored them.

    Args:
        address_ptr, target_ptr, peer_ptr: as in `Addresses` and `Far`.
        first, count: the rows.   size: bytes of one.
    """
    # A run is rows that follow one another at both ends: a put is a request to a thread on the host, so the fewer the
    # better.
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


# The signal of results says that all rows of a chunk are there, which many programs have put. It comes from a launch of
# its own, behind theirs: a fence of NVSHMEM orders whatever this GPU's threads have issued before it is called, and
# launches of a stream follow one another. So programs that put need no fence of their own. Where a network cannot keep
# an order, a fence waits until all has arrived, and in every thread that calls it: so one warp a peer does.
@jit(do_not_specialize=["place"])
def signal_far_kernel(signals_ptr, place, table_ptr, pe_ptr, spare_ptr, epoch_ptr):
    peer = tl.program_id(0)
    if tl.load(table_ptr + peer) == 0:
        fence()
        signal_pe(signals_ptr + place, tl.load(epoch_ptr), tl.load(pe_ptr + peer), spare_ptr)


def signal_far(mark: Mark, epoch: Tensor, network: Network) -> None:
    """Sets this rank's signal at far peers, behind everything that earlier launches of the stream have put."""
    signal_far_kernel[(mark.table.numel(),)](
        mark.signals, mark.place, mark.table, network.pe_W, network.spare, epoch, num_warps=1, **network.options
    )


@dataclass(frozen=True)
class _Loaded:
    """Triton's hook after it has loaded a kernel. Two with the same function are equal, so it is called once."""

    register: Callable[[int], None]

    def __call__(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        self.register(module)


def tell_of_modules(register: Callable[[int], None]) -> None:
    """Calls `register`, from now on, with each CUDA module (a CUmodule) that Triton loads, before its kernels run."""
    knobs.runtime.kernel_load_end_hook.add(_Loaded(register))
