"""Sparse collectives: whole experts travel from rank to rank, beside everything else (Hecate, section 3.1).

`fusedmoe.placement.traffic` decides which rank sends which expert to which; here they are carried.
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
    # Not at run time: it needs Triton.
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll

# (expert, source, target, step), in an order that is the same on all ranks.
Transfers = Sequence[tuple[int, int, int, int]]


class Arrived(NamedTuple):
    """Gradients of an expert that this rank owns, from a rank with a replica: one tensor for each table."""

    expert: int
    parts: tuple[Tensor, ...]


class _Call(NamedTuple):
    """One sparse collective, by the arguments of `gather` and `reduce`; `owned` None: rows are written, not added."""

    operation: str
    transfers: Transfers
    rows: Mapping[int, int]
    tables: Sequence[Tensor]
    owned: int | None
    during: AbstractContextManager[None] | None


class SparseWork:
    """A handle on experts that are on their way, like `torch.distributed.Work`; this rank sends `sent_bytes`."""

    def __init__(
        self, sent_bytes: int = 0, done: Callable[[], list[Arrived]] = list, after: torch.cuda.Event | None = None
    ) -> None:
        self.sent_bytes, self._done, self._after = sent_bytes, done, after

    def wait(self) -> list[Arrived]:
        """Waits until all has arrived (on CUDA the current stream waits); returns gradients for this rank to add."""
        if self._after is not None:
            torch.cuda.current_stream().wait_event(self._after)
        return self._done()


class SparseCollectives:
    """Sparse collectives over the ranks of a group, in the order in which they are called, which all ranks share.

    On CUDA a stream carries them, on a CPU a thread makes them.

    Args:
        group: with a process group that nothing else uses (`Topology.beside`).
        one_sided: over the same ranks; experts travel by its puts instead of by collectives. On a CPU the work is then
            done when it begins.
    """

    def __init__(self, group: Group, one_sided: OneSidedAllToAll | None = None) -> None:
        self._group, self._one_sided = group, one_sided
        self._thread: Helper | None = None
        self._last: Future[list[Arrived]] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def at_once(self) -> bool:
        """Tells whether a call ends when all has arrived, so that nothing goes on beside it."""
        return self._one_sided is not None and not self._group.on_gpu

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
        return self._start(_Call("sparse all-gather", transfers, rows, tables, None, during))

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
        return self._start(_Call("sparse reduce-scatter", transfers, rows, tables, owned, during))

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
        # Process groups cannot be copied.
        return self

    def _start(self, call: _Call) -> SparseWork:
        if self._group.size == 1 or not call.transfers:
            return SparseWork()
        # A closed topology says so here, before a helper begins.
        _ = self._group.handle
        call = call._replace(rows=dict(call.rows), tables=[table.detach() for table in call.tables])
        sources = [source for _, source, _, _ in call.transfers]
        sent, run = sources.count(self._group.index) * sum(map(_row_bytes, call.tables)), partial(self._run, call)
        if self._group.on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                arrived = run()
                # Else the allocator may reuse them before the stream is done.
                for table in call.tables:
                    table.record_stream(self._stream)
            after = torch.cuda.Event()
            after.record(self._stream)
            return SparseWork(sent, lambda: arrived, after)
        if self.at_once:
            # Triton's interpreter runs in the caller: it is not thread-safe.
            arrived = run()
            return SparseWork(sent, lambda: arrived)
        self._thread = self._thread or Helper("fusedmoe sparse")
        self._last = self._thread.begin(run)
        return SparseWork(sent, partial(self._thread.result, self._last))

    @torch.no_grad()
    def _run(self, call: _Call) -> list[Arrived]:
        """Carries one sparse collective, step by step."""
        arrived: list[Arrived] = []
        try:
            with call.during or nullcontext():
                # The transfers of one step leave together. The next step may send on experts that have just arrived.
                for step in range(max(transfer[3] for transfer in call.transfers) + 1):
                    of_step = [transfer for transfer in call.transfers if transfer[3] == step]
                    for expert, parts in self._exchange(call._replace(transfers=of_step)):
                        row, added = call.rows[expert], call.owned is not None
                        if call.owned is not None and row < call.owned:
                            arrived.append(Arrived(expert, parts))
                            continue
                        for table, part in zip(call.tables, parts, strict=True):
                            table[row] = _sum(table[row], part) if added else part
        except RankError:
            raise
        except BaseException as error:
            # The other ranks wait for this rank's experts, and must not take what the thread sends next for them.
            self._group.board.post(self._group.job.rank, call.operation, f"{type(error).__name__}: {error}")
            raise
        return arrived

    def _exchange(self, call: _Call) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Sends this rank's experts of one step; returns each received expert with a part for each table."""
        me, size, tables = self._group.index, self._group.size, call.tables
        sizes = [_row_bytes(table) for table in tables]
        sent = sorted((target, expert) for expert, source, target, _ in call.transfers if source == me)
        received = sorted((source, expert) for expert, source, target, _ in call.transfers if target == me)
        send = [sum(sizes) * sum(target == rank for target, _ in sent) for rank in range(size)]
        recv = [sum(sizes) * sum(source == rank for source, _ in received) for rank in range(size)]
        parts = [table[call.rows[expert]].reshape(-1).view(torch.uint8) for _, expert in sent for table in tables]
        bytes_ = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tables[0].device)
        if self._one_sided is None:
            bytes_ = all_to_all_rows(self._group, bytes_, send, recv, call.operation)
        else:
            most = sum(sizes) * max(Counter((source, target) for _, source, target, _ in call.transfers).values())
            bytes_ = self._one_sided.exchange(bytes_, send, recv, most, call.operation)
        pieces = iter(bytes_.split(sizes * len(received)))
        return [(expert, tuple(_typed(next(pieces), table) for table in tables)) for _, expert in received]


def _row_bytes(table: Tensor) -> int:
    return table.shape[1:].numel() * table.element_size()


def _typed(part: Tensor, table: Tensor) -> Tensor:
    # Between tables of several dtypes bytes need not be aligned.
    if part.storage_offset() % table.element_size():
        part = part.clone()
    return part.view(table.dtype).view(table.shape[1:])


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Adds two gradients in at least float32."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    return (first.to(dtype) + second.to(dtype)).to(first.dtype)
