"""Reduce results returned from other ranks: token sums and per-pair scalars, and give credit, in one launch.

Finished programs increment a counter and the last one gives credit; none waits for another. The increment releases the
program's reads and acquires all earlier ones, so a peer that sees the credit writes after all reads.

Results must have arrived: waiting programs would occupy multiprocessors. Over the network, credit is a separate launch,
because NVSHMEM calls would take registers that the sums need.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Faults, ReceiveBuffer
from fusedmoe.kernels.triton.gather_sum import accumulation_dtype, columns, sum_of_token
from fusedmoe.kernels.triton.jit import jit
from fusedmoe.kernels.triton.one_sided.put import credit_arguments, credit_peer, give_credit

# Maximum number of programs per block of columns; each increments the counter once.
PROGRAMS = 1024


@jit(do_not_specialize=["S", "slot", "second_slot", "third_slot", "me"])
def receive_kernel(
    rows_ptr, row_ptr, y_ptr, S, M,
    value_ptr, own_value_ptr,
    # Number of finished programs, 0 before and after; None if no credit is given. The rest as in `credit_kernel`.
    done_ptr,
    credits_ptr, credit_table_ptr, epoch_ptr, slot,
    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
    received_ptr, stop_ptr, record_ptr, me, W,
    K: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(0).to(tl.int64)
    while s < S:
        sum_of_token(rows_ptr, row_ptr, None, y_ptr, s, column, M, M, K, False, TOTAL, BLOCK)
        if value_ptr is not None:
            if tl.program_id(1) == 0:
                for k in tl.static_range(K):
                    row = tl.load(row_ptr + s * K + k)
                    tl.store(own_value_ptr + s * K + k, tl.load(value_ptr + row, mask=row >= 0, other=0))
        s += tl.num_programs(0)
    if done_ptr is not None:
        # All threads have read before the program counts itself.
        tl.debug_barrier()
        before = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
        if before + 1 == tl.num_programs(0) * tl.num_programs(1):
            # No other program reads it in this launch.
            tl.store(done_ptr, 0)
            for peer in range(W):
                credit_peer(
                    credits_ptr, credit_table_ptr, epoch_ptr, slot,
                    second_credits_ptr, second_table_ptr, second_epoch_ptr, second_slot,
                    third_credits_ptr, third_table_ptr, third_epoch_ptr, third_slot,
                    received_ptr, stop_ptr, record_ptr, peer, W, None, None, me, False,
                )  # fmt: skip


def receive(
    rows_RM: Tensor,
    layout: Layout,
    value_R: Tensor | None,
    done: Tensor,
    read: Sequence[tuple[ReceiveBuffer, int]],
    faults: Faults | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum each token's results, which must have arrived, and give credit for the slots read.

    Args:
        rows_RM: one slot of the results.
        value_R: float32, a scalar per row.
        done: [1] int32, 0; reusable across launches.
        read: up to three buffers and slots that will not be read again, including the results.
    Returns:
        sums [S, M], and the scalars [S, K], 0 for dropped pairs.
    """
    row_SK, dim = layout.row_SK.contiguous(), rows_RM.shape[1]
    tokens, k = row_SK.shape
    y_SM = rows_RM.new_empty((tokens, dim))
    value_SK = None if value_R is None else value_R.new_empty((tokens, k))
    buffer = read[0][0]
    apart = buffer.network is not None or not y_SM.numel()
    if y_SM.numel():
        block, warps = columns(dim)
        receive_kernel[(min(tokens, PROGRAMS), triton.cdiv(dim, block))](
            rows_RM, row_SK, y_SM, tokens, dim, value_R, value_SK, None if apart else done,
            *credit_arguments([] if apart else read, None if apart else faults), buffer.me, buffer.num_peers,
            K=k, TOTAL=accumulation_dtype(rows_RM.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if apart:
        give_credit(*read[0], *read[1:], faults=faults)
    return y_SM, value_SK
