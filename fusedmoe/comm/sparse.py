"""Sparse collectives: whole experts travel from rank to rank, beside everything else (Hecate, section 3.1).

`fusedmoe.placement.traffic` decides which rank sends which expert to which; here they are carried. The transfers of
one step leave together, as one all-to-all of bytes. Those of the next step follow, and may send on experts that have
just arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.comm.collectives import all_to_all_rows
from fusedmoe.comm.group import Group
from fusedmoe.errors import RankError
from fusedmoe.threads import Helper

if TYPE_CHECKING:
    from fusedmoe.comm.one_sided.one_sided_all_to_all import OneSidedAllToAll  # which needs Triton

# (expert, source, target, step), in an order that is the same on all ranks.
Transfers = Sequence[tuple[int, int, int, int]]


class Arrived(NamedTuple):
    """Gradients of an expert that this rank owns, from a rank with a replica: one tensor for each table."""

    expert: int
    parts: tuple[Tensor, ...]


class SparseWork:
    """A handle on experts that are on their way, like `torch.distributed.Work`.

    Attributes:
        sent_bytes: how many bytes this rank sends.
    """

    def __init__(
        self,
        sent_bytes: int = 0,
        done: Callable[[], list[Arrived]] = list,
        after: torch.cuda.Event | None = None,
    ) -> None:
        self.sent_bytes, self._done, self._after = sent_bytes, done, after

    def wait(self) -> list[Arrived]:
        """Waits until all has arrived (on CUDA the current stream waits); returns the gradients for this rank to add.

        Raises:
            RankError: another rank failed or did not come.
            MemoryError: there was none for the thread.
        """
        if self._after is not None:
            torch.cuda.current_stream().wait_event(self._after)
        return self._done()


class SparseCollectives:
    """Sparse collectives over the ranks of a group, in the order in which they are called, which all ranks share.

    By collectives: on a CPU a thread of its own makes them, on CUDA a stream carries them. By one-sided puts: on CUDA a
    stream carries them, too; on a CPU Triton's interpreter runs in the caller, so the work is done when it begins.

    Args:
        group: with a process group that nothing else uses (`Topology.beside`).
        one_sided: over the same ranks; experts travel by its puts instead of by collectives.
    """

    def __init__(self, group: Group, one_sided: OneSidedAllToAll | None = None) -> None:
        self._group, self._one_sided = group, one_sided
        self._thread: Helper | None = None
        self._last: Future[list[Arrived]] | None = None
        self._stream: torch.cuda.Stream | None = None

    def gather(
        self,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        during: AbstractContextManager[None] | None = None,
    ) -> SparseWork:
        """SparseAllGather: sends parameters to the ranks that will hold them. All ranks pass the same transfers.

        Args:
            rows: the row in the tables of each expert that this rank holds, or receives.
            tables: [rows, ...], contiguous; trailing shapes and dtypes are the same on every rank. Received experts are
                written to them until the work is done.
            during: is entered for as long as they travel, as a measurement.
        """
        return self._start(transfers, dict(rows), tables, None, during)

    def reduce(
        self,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        owned: int,
        during: AbstractContextManager[None] | None = None,
    ) -> SparseWork:
        """SparseReduceScatter: sends gradients back to the owners, added on the way to those of the ranks they pass.

        Sums are in the order of the transfers: the same bits, whatever arrives first. Gradients for an expert of this
        rank itself, whose row is below `owned`, are not added but returned when the work is done, in the order in which
        they are to be added: by then its own gradient may have been moved.

        Args:
            rows, tables, during: as for `gather`; rows of replicas are used up.
        """
        return self._start(transfers, dict(rows), tables, owned, during)

    def wait(self) -> None:
        """Waits until all that was begun is done (on CUDA the current stream waits); raises none of its errors."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._thread is not None and self._last is not None:
            self._thread.settle(self._last)

    def close(self) -> None:
        """Ends the thread, once what was begun is done."""
        if self._thread is not None and self._last is not None:
            self._thread.settle(self._last)
            self._thread.end()
        self._thread = self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCollectives:
        return self  # process groups cannot be copied

    def _start(
        self,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        owned: int | None,
        during: AbstractContextManager[None] | None,
    ) -> SparseWork:
        if self._group.size == 1 or not transfers:
            return SparseWork()
        _ = self._group.handle  # a closed topology says so here, before a helper begins
        tables = [table.detach() for table in tables]
        sent = sum(source == self._group.index for _, source, _, _ in transfers) * sum(map(_row_bytes, tables))
        run = partial(self._run, transfers, rows, tables, owned, during or nullcontext())
        if self._group.on_gpu:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                arrived = run()
                for table in tables:
                    table.record_stream(self._stream)  # else the allocator may reuse it before the stream is done
            after = torch.cuda.Event()
            after.record(self._stream)
            return SparseWork(sent, lambda: arrived, after)
        if self._one_sided is not None:
            arrived = run()
            return SparseWork(sent, lambda: arrived)
        self._thread = self._thread or Helper("fusedmoe sparse")
        self._last = self._thread.begin(run)
        return SparseWork(sent, partial(self._thread.result, self._last))

    @torch.no_grad()
    def _run(
        self,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        owned: int | None,
        during: AbstractContextManager[None],
    ) -> list[Arrived]:
        """Carries one sparse collective, step by step; `owned` None: received experts are written, not added."""
        operation = "sparse all-gather" if owned is None else "sparse reduce-scatter"
        arrived: list[Arrived] = []
        try:
            with during:
                for step in range(max(transfer[3] for transfer in transfers) + 1):
                    of_step = [transfer for transfer in transfers if transfer[3] == step]
                    for expert, parts in self._exchange(of_step, rows, tables, operation):
                        row = rows[expert]
                        if owned is not None and row < owned:
                            arrived.append(Arrived(expert, parts))
                            continue
                        for table, part in zip(tables, parts, strict=True):
                            table[row] = part if owned is None else _sum(table[row], part)
        except RankError:
            raise
        except BaseException as error:
            # The other ranks wait for this one: what the thread does next must not reach them instead.
            self._group.board.post_own(operation, f"{type(error).__name__}: {error}")
            raise
        return arrived

    def _exchange(
        self, transfers: Transfers, rows: Mapping[int, int], tables: Sequence[Tensor], operation: str
    ) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Sends this rank's experts of one step; returns each received expert with a part for each table."""
        me, size, sizes = self._group.index, self._group.size, [_row_bytes(table) for table in tables]
        sent = sorted((target, expert) for expert, source, target, _ in transfers if source == me)
        received = sorted((source, expert) for expert, source, target, _ in transfers if target == me)
        send = [sum(sizes) * sum(target == rank for target, _ in sent) for rank in range(size)]
        recv = [sum(sizes) * sum(source == rank for source, _ in received) for rank in range(size)]
        parts = [table[rows[expert]].reshape(-1).view(torch.uint8) for _, expert in sent for table in tables]
        bytes_ = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tables[0].device)
        if self._one_sided is None:
            bytes_ = all_to_all_rows(self._group, bytes_, send, recv, operation)
        else:
            most = sum(sizes) * max(Counter((source, target) for _, source, target, _ in transfers).values())
            bytes_ = self._one_sided.exchange(bytes_, send, recv, most, operation)
        pieces = iter(bytes_.split(sizes * len(received)))
        return [(expert, tuple(_typed(next(pieces), table) for table in tables)) for _, expert in received]


def _row_bytes(table: Tensor) -> int:
    return table.shape[1:].numel() * table.element_size()


def _typed(part: Tensor, table: Tensor) -> Tensor:
    if part.storage_offset() % table.element_size():
        part = part.clone()  # between tables of several dtypes bytes need not be aligned
    return part.view(table.dtype).view(table.shape[1:])


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients in at least float32."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    return (first.to(dtype) + second.to(dtype)).to(first.dtype)
