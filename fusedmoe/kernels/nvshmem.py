"""NVSHMEM's device functions in Triton, and two kernels of them: rows put with a signal, and a wait for signals.

An address is one of this rank's symmetric memory; the PE, NVSHMEM's word for a rank, says on whose copy it is meant.
The functions are those of NVSHMEM's bitcode: a launch takes `extern_libs=nvshmem_bitcode()`, and what is loaded must be
made known to NVSHMEM before it runs (`tell_of_modules`). All threads of a program call a function together. Those that
NVSHMEM has for a block share the work; the others do what they do in every thread, which their text says.

Their arguments are pointers or numbers, no blocks. What a function returns is only used where it says that it returns
something: the others return nothing in NVSHMEM, and only Triton wants a type of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language import core

from fusedmoe.kernels.aot import AotCase
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.remote import now_ns

_I32, _I64 = core.dtype("int32"), core.dtype("int64")

# NVSHMEM_SIGNAL_SET of nvshmemx_signal_op_t, and NVSHMEM_CMP_GE of nvshmemx_cmp_type_t.
_SET = tl.constexpr(9)
_AT_LEAST = tl.constexpr(5)

_WARPS = 4


@core.extern
def _put_block(dest, source, size, pe, _semantic=None):
    symbol = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_block", _I32)}
    return core.extern_elementwise("", "", [dest, source, size, pe], symbol, is_pure=False, _semantic=_semantic)


@core.extern
def _put_nbi_block(dest, source, size, pe, _semantic=None):
    symbol = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_nbi_block", _I32)}
    return core.extern_elementwise("", "", [dest, source, size, pe], symbol, is_pure=False, _semantic=_semantic)


@core.extern
def _put_signal_block(dest, source, size, signal, value, operation, pe, _semantic=None):
    arguments = [dest, source, size, signal, value, operation, pe]
    symbol = {(_I64, _I64, _I64, _I64, _I64, _I32, _I32): ("nvshmemx_putmem_signal_block", _I32)}
    return core.extern_elementwise("", "", arguments, symbol, is_pure=False, _semantic=_semantic)


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
def _ptr(address, pe, _semantic=None):
    symbol = {(_I64, _I32): ("nvshmem_ptr", _I64)}
    return core.extern_elementwise("", "", [address, pe], symbol, is_pure=True, _semantic=_semantic)


@core.extern
def my_pe(_semantic=None):
    """This rank's PE."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_my_pe", _I32)}, is_pure=True, _semantic=_semantic)


@core.extern
def fence(_semantic=None):
    """What this rank has put to a PE comes there before what it puts afterwards. In every thread."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _I32)}, is_pure=False, _semantic=_semantic)


@core.extern
def quiet(_semantic=None):
    """Waits until all that this rank has put has come, without a bound. In every thread."""
    return core.extern_elementwise("", "", [], {(): ("nvshmem_quiet", _I32)}, is_pure=False, _semantic=_semantic)


@triton.jit
def put(dest_ptr, source_ptr, size, pe):
    """Copies `size` bytes to a PE; the source may be used again afterwards."""
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    _put_block(dest, source, tl.cast(size, tl.int64), tl.cast(pe, tl.int32))


@triton.jit
def put_nbi(dest_ptr, source_ptr, size, pe):
    """The same, but the source may only be used again after `quiet`."""
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    _put_nbi_block(dest, source, tl.cast(size, tl.int64), tl.cast(pe, tl.int32))


@triton.jit
def put_signal(dest_ptr, source_ptr, size, signal_ptr, value, pe):
    """Copies `size` bytes, more than 0, to a PE, and sets its int64 signal once they have arrived.

    The source may be used again afterwards. The signal orders these bytes alone, not those of other puts.
    """
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    place, number = tl.cast(signal_ptr, tl.int64), tl.cast(value, tl.int64)
    _put_signal_block(dest, source, tl.cast(size, tl.int64), place, number, _SET, tl.cast(pe, tl.int32))


@triton.jit
def put_signal_nbi(dest_ptr, source_ptr, size, signal_ptr, value, pe):
    """The same, but the source may only be used again after `quiet`."""
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    place, number = tl.cast(signal_ptr, tl.int64), tl.cast(value, tl.int64)
    _put_signal_nbi_block(dest, source, tl.cast(size, tl.int64), place, number, _SET, tl.cast(pe, tl.int32))


@triton.jit
def signal(signal_ptr, value, pe, spare_ptr):
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
def peer_address(address_ptr, pe):
    """Where this GPU can address a PE's copy, as int64; 0 where it cannot."""
    return _ptr(tl.cast(address_ptr, tl.int64), tl.cast(pe, tl.int32))


@triton.jit(do_not_specialize=["row_bytes", "rank", "epoch"])
def put_rows_kernel(
    rows_ptr, window_ptr, signal_ptr, first_ptr, place_ptr, pe_ptr, spare_ptr, row_bytes, rank, epoch: tl.int64
):
    peer = tl.program_id(0)
    pe = tl.load(pe_ptr + peer)
    first = tl.load(first_ptr + peer)
    size = (tl.load(first_ptr + peer + 1) - first) * row_bytes
    if size > 0:
        dest_ptr = window_ptr + tl.load(place_ptr + peer) * row_bytes
        put_signal(dest_ptr, rows_ptr + first * row_bytes, size, signal_ptr + rank, epoch, pe)
    else:
        signal(signal_ptr + rank, epoch, pe, spare_ptr)


@triton.jit(do_not_specialize=["epoch", "limit_ns"])
def wait_signals_kernel(signal_ptr, record_ptr, epoch: tl.int64, limit_ns: tl.int64):
    peer = tl.program_id(0)
    end = now_ns() + limit_ns
    # One thread reads for all, so that all see the same.
    seen = tl.atomic_add(signal_ptr + peer, 0, sem="acquire", scope="sys")
    while (seen < epoch) & (now_ns() < end):
        seen = tl.atomic_add(signal_ptr + peer, 0, sem="acquire", scope="sys")
    if seen >= epoch:
        arrived(signal_ptr + peer, epoch)
    else:
        tl.store(record_ptr + 2 * peer, epoch)
        tl.store(record_ptr + 2 * peer + 1, seen)


def put_rows(
    rows: Tensor,
    window: Tensor,
    signals_W: Tensor,
    first_W1: Tensor,
    place_W: Tensor,
    pe_W: Tensor,
    spare: Tensor,
    rank: int,
    epoch: int,
) -> None:
    """Puts rows into the windows of all ranks, each of which then finds `epoch` in its signal for this rank.

    With W = 2 and first = [0, 3, 5], rank 0 is given rows 0 to 2 and rank 1 rows 3 and 4. A rank that is given none is
    signalled as well.

    Args:
        rows: [N, ...], any dtype, contiguous; may be written again once the stream is past this.
        window, signals_W: symmetric memory; int64 signals, one for each sender.
        first_W1: int64, the first row of each rank, and the end.
        place_W: int64, where in a rank's window its rows begin, in rows.
        pe_W: int32, the ranks' PEs. spare: an int64 that nobody reads. rank: this one, among W.
    """
    put_rows_kernel[(pe_W.numel(),)](
        rows.view(torch.uint8),
        window.view(torch.uint8),
        signals_W,
        first_W1,
        place_W,
        pe_W,
        spare,
        rows.stride(0) * rows.element_size(),
        rank,
        epoch,
        num_warps=_WARPS,
        extern_libs=nvshmem_bitcode(),
    )


def wait_signals(signals_W: Tensor, record_W2: Tensor, epoch: int, limit_s: float) -> None:
    """Waits until this rank's signals are at least `epoch`, none for longer than `limit_s`.

    Args:
        record_W2: int64; where a signal did not come in time, what was expected and what was seen. Else left as it is.
    """
    grid = (signals_W.numel(),)
    wait_signals_kernel[grid](
        signals_W, record_W2, epoch, int(limit_s * 1e9), num_warps=1, extern_libs=nvshmem_bitcode()
    )


@dataclass(frozen=True)
class _Loaded:
    """Triton's hook after it has loaded a kernel. Two with the same function are equal, so it is called once."""

    register: Callable[[int], None]

    def __call__(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        self.register(module)


def tell_of_modules(register: Callable[[int], None]) -> None:
    """From now on calls `register` with each CUDA module (a CUmodule) that Triton loads, before a kernel of it runs."""
    knobs.runtime.kernel_load_end_hook.add(_Loaded(register))


def aot_cases() -> list[AotCase]:
    byte, word, long = torch.uint8, torch.int32, torch.int64
    put = {
        "rows_ptr": byte,
        "window_ptr": byte,
        "signal_ptr": long,
        "first_ptr": long,
        "place_ptr": long,
        "pe_ptr": word,
        "spare_ptr": long,
        "row_bytes": "i32",
        "rank": "i32",
        "epoch": "i64",
    }
    wait = {"signal_ptr": long, "record_ptr": long, "epoch": "i64", "limit_ns": "i64"}
    return [
        AotCase("nvshmem put rows", put_rows_kernel, put, {"num_warps": _WARPS}, libraries=nvshmem_bitcode),
        AotCase("nvshmem wait signals", wait_signals_kernel, wait, {"num_warps": 1}, libraries=nvshmem_bitcode),
    ]
