"""Rows and signals to remote peers, whose memory this GPU cannot address, by NVSHMEM's device functions.

The network card reads rows asynchronously from symmetric memory, where kernels store them first (staging,
`Addresses.store_N`). Every put is a request to NVSHMEM's proxy thread and covers all rows contiguous at both ends:
tokens are put tile by tile with their signal, results in runs of an expert's rows for one peer within a tile. Staging
must not be overwritten until the peer has given credit, after it has read the rows.

Device functions wait, without a timeout, if the proxy thread on the host falls behind.
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

from fusedmoe.kernels.one_sided import Network, PeerSignal
from fusedmoe.kernels.triton.jit import jit

_I32, _I64 = core.dtype("int32"), core.dtype("int64")

# NVSHMEM_SIGNAL_SET of nvshmemx_signal_op_t, and NVSHMEM_CMP_GE of nvshmemx_cmp_type_t.
_SET = tl.constexpr(9)
_AT_LEAST = tl.constexpr(5)


# NVSHMEM's functions as Triton externs. An address is in this rank's symmetric memory; the PE (NVSHMEM's term for a
# rank) selects the copy. All threads of a program call a function together: block variants share the work, others run
# in every thread. Arguments are scalars or pointers, not blocks. Most return nothing, but Triton requires a type.
# Launch with `extern_libs=nvshmem_bitcode()`; NVSHMEM must know loaded modules first (`register_loaded_modules`).


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
    return core.extern_elementwise("", "", [], {(): ("nvshmem_my_pe", _I32)}, is_pure=True, _semantic=_semantic)


@core.extern
def fence(_semantic=None):
    """Order puts: earlier puts of this rank to a PE arrive before later ones. Executed in every thread.

    Covers puts of other programs of this rank only if these have finished, or have signalled with an atomic that this
    program has read.
    """
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _I32)}, is_pure=False, _semantic=_semantic)


@triton.jit
def put_nbi(dest_ptr, source_ptr, size, pe):
    """Put `size` bytes to a PE from symmetric or registered memory, which may be reused once they have arrived."""
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    _put_nbi_block(dest, source, tl.cast(size, tl.int64), tl.cast(pe, tl.int32))


@triton.jit
def put_signal_nbi(dest_ptr, source_ptr, size, signal_ptr, value, pe):
    """Put `size` > 0 bytes to a PE, and set its int64 signal once they have arrived; only then reuse the source.

    The signal orders only these bytes, not other puts.
    """
    dest, source = tl.cast(dest_ptr, tl.int64), tl.cast(source_ptr, tl.int64)
    address, number = tl.cast(signal_ptr, tl.int64), tl.cast(value, tl.int64)
    _put_signal_nbi_block(dest, source, tl.cast(size, tl.int64), address, number, _SET, tl.cast(pe, tl.int32))


@triton.jit
def signal_pe(signal_ptr, value, pe, dummy_ptr):
    """Set a PE's int64 signal once. It does not order earlier puts; use `fence`.

    NVSHMEM offers this per thread only, and Triton cannot branch per thread: all threads but the first set a dummy.
    """
    first = tl.arange(0, tl.extra.cuda.num_threads()) == 0
    address = tl.where(first, tl.cast(signal_ptr, tl.int64), tl.cast(dummy_ptr, tl.int64))
    _signal_op(address, tl.cast(value, tl.int64), _SET, tl.where(first, tl.cast(pe, tl.int32), my_pe()))


@triton.jit
def arrived(signal_ptr, value):
    """Return 1 if this rank's signal is at least `value`, else 0; after a 1, data put before the signal can be read.

    On GPUs that need it, NVSHMEM flushes network writes here, so call it before reading even if the signal is known to
    be set.
    """
    return _test(tl.cast(signal_ptr, tl.int64), _AT_LEAST, tl.cast(value, tl.int64))


@triton.jit
def put_runs(address_ptr, target_ptr, peer_ptr, pe_ptr, first, count, size, ROWS: tl.constexpr):
    """Put a range of rows to remote peers, after the whole program has stored them; rows of near peers are skipped.

    `address_ptr`, `target_ptr` and `peer_ptr` are as in `Addresses`; `size` is bytes per row.
    """
    # A run is a range of rows contiguous at both ends.
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
        source_address, target_address = tl.load(address_ptr + first + one), tl.load(target_ptr + first + one)
        put_nbi(target_address, source_address, (end - one).to(tl.int64) * size, pe)
        one = tl.min(tl.where(begins & (i > one), i, ROWS), 0)


# The signal of results covers all rows of a chunk, put by many programs. A later launch sets it: launches on a stream
# are ordered, and an NVSHMEM fence orders everything this GPU issued before. On networks without ordering, a fence
# waits for completion in every thread, so use one warp per peer.
@jit(do_not_specialize=["signal_index"])
def signal_far_kernel(signals_ptr, signal_index, table_ptr, pe_ptr, dummy_ptr, epoch_ptr):
    peer = tl.program_id(0)
    if tl.load(table_ptr + peer) == 0:
        fence()
        signal_pe(signals_ptr + signal_index, tl.load(epoch_ptr), tl.load(pe_ptr + peer), dummy_ptr)


def signal_far(peers: PeerSignal, epoch: Tensor, network: Network) -> None:
    """Set this rank's signal at remote peers, after all puts of earlier launches on the stream."""
    signal_far_kernel[(peers.table.numel(),)](
        peers.signals, peers.signal_index, peers.table, network.pe_W, network.dummy_signal, epoch,
        num_warps=1, extern_libs=dict(network.libraries),
    )  # fmt: skip


@dataclass(frozen=True)
class _Loaded:
    """Triton hook called after a kernel is loaded. Equal for equal functions, so each is registered once."""

    register: Callable[[int], None]

    def __call__(self, module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        self.register(module)


def register_loaded_modules(register: Callable[[int], None]) -> None:
    """Call `register` with each CUmodule that Triton loads from now on, before its kernels run."""
    knobs.runtime.kernel_load_end_hook.add(_Loaded(register))
