"""Sparse collectives: whole experts go from rank to rank, beside everything else (Hecate, section 3.1).

Who sends what to whom is decided elsewhere (`fusedmoe.placement.transfers`); here it is carried. The transfers of one
step leave together, as one all-to-all of bytes; those of the next step, which may send on what has just come, follow.
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

from fusedmoe.comm.collectives import all_to_all_rows, device_of
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
        sent_bytes: what this rank sends.
    """

    def __init__(
        self,
        sent_bytes: int = 0,
        done: Callable[[], list[Arrived]] = list,
        after: torch.cuda.Event | None = None,
    ) -> None:
        self.sent_bytes, self._done, self._after = sent_bytes, done, after

    def wait(self) -> list[Arrived]:
        """Until all has arrived (on CUDA the current stream waits); what came for this rank to add.

        Raises:
            RankError: another rank failed or did not come.
            MemoryError: there was none for the thread.
        """
        if self._after is not None:
            torch.cuda.current_stream().wait_event(self._after)
        return self._done()


class SparseCollectives:
    """Sparse collectives over the ranks of a group, in the order in which they are called, which all ranks share.

    By collectives: on a CPU a thread of its own does it, on CUDA a stream. By puts on CUDA a stream does, too; Triton's
    interpreter runs where it is called, so that on a CPU the work is done when it begins.

    Args:
        group: with a process group that nothing else uses (`Topology.beside`).
        one_sided: over the same ranks; experts go through it, by puts that kernels start, instead of by collectives.
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
        """SparseAllGather: parameters go to where they shall be. All ranks call it with the same transfers.

        Args:
            rows: where each expert that this rank holds, or gets, lies in the tables.
            tables: [rows, ...], contiguous; trailing shapes and dtypes are the same on every rank. Received experts are
                written to them until the work is done.
            during: is entered for as long as they travel, as a measurement.
        """
        return self._start(transfers, self._job(transfers, rows, tables, None), during)

    def reduce(
        self,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        owned: int,
        during: AbstractContextManager[None] | None = None,
    ) -> SparseWork:
        """SparseReduceScatter: gradients go back to the owners, on the way added to those of the ranks they pass.

        Sums are in the order of the transfers: the same bits, whatever arrives first. What comes for an expert of this
        rank itself, whose row is below `owned`, is not added but returned when the work is done, in the order in
        which it is to be added: by then its own gradient may have gone elsewhere.

        Args:
            rows, tables, during: as for `gather`; rows of replicas are used up.
        """
        return self._start(transfers, self._job(transfers, rows, tables, owned), during)

    def wait(self) -> None:
        """Until all that was begun is done (on CUDA the current stream waits). Who waits for a work has its error."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._thread is not None and self._last is not None:
            self._thread.settle(self._last)

    def close(self) -> None:
        """Ends the thread, once what was begun is done."""
        if self._thread is not None and self._last is not None:
            self._thread.settle(self._last)  # whoever waits for the work has its error
            self._thread.end()
        self._thread = self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCollectives:
        return self  # process groups cannot be copied

    def _job(self, transfers: Transfers, rows: Mapping[int, int], tables: Sequence[Tensor], owned: int | None) -> _Job:
        return _Job(self._group, self._one_sided, transfers, dict(rows), tables, owned)

    def _start(self, transfers: Transfers, job: _Job, during: AbstractContextManager[None] | None) -> SparseWork:
        if self._group.size == 1 or not transfers:
            return SparseWork()
        during = during or nullcontext()
        if device_of(self._group).type == "cuda":
            return self._on_stream(job, during)
        if self._one_sided is not None:
            here = job.run(during)
            return SparseWork(job.sent_bytes, lambda: here)
        self._thread = self._thread or Helper("fusedmoe sparse")
        self._last = self._thread.begin(partial(job.run, during))
        return SparseWork(job.sent_bytes, partial(self._thread.result, self._last))

    def _on_stream(self, job: _Job, during: AbstractContextManager[None]) -> SparseWork:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            arrived = job.run(during)
            for table in job.tables:
                table.record_stream(self._stream)
        after = torch.cuda.Event()
        after.record(self._stream)
        return SparseWork(job.sent_bytes, lambda: arrived, after)


class _Job:
    """One sparse collective, step by step.

    `owned`: rows of the tables below it are not added to; None: nothing is added, but written.
    """

    def __init__(
        self,
        group: Group,
        one_sided: OneSidedAllToAll | None,
        transfers: Transfers,
        rows: Mapping[int, int],
        tables: Sequence[Tensor],
        owned: int | None,
    ) -> None:
        self._group, self._one_sided = group, one_sided
        self._transfers, self._rows, self._owned = transfers, rows, owned
        self.tables = [table.detach() for table in tables]
        self._sizes = [table.shape[1:].numel() * table.element_size() for table in tables]
        self.sent_bytes = sum(source == group.index for _, source, _, _ in transfers) * sum(self._sizes)
        self._operation = "sparse all-gather" if owned is None else "sparse reduce-scatter"

    @torch.no_grad()
    def run(self, during: AbstractContextManager[None]) -> list[Arrived]:
        try:
            with during:
                steps = range(max(one[3] for one in self._transfers) + 1)
                return [one for step in steps for one in self._step([one for one in self._transfers if one[3] == step])]
        except RankError:
            raise
        except BaseException as error:
            # Others wait for this one: what the thread does next must not reach them in its place.
            self._group.board.post_own(self._operation, f"{type(error).__name__}: {error}")
            raise

    def _step(self, transfers: Transfers) -> list[Arrived]:
        me, size = self._group.index, self._group.size
        leaving = sorted((target, expert) for expert, source, target, _ in transfers if source == me)
        coming = sorted((source, expert) for expert, source, target, _ in transfers if target == me)
        bytes_ = sum(self._sizes)
        send, recv = ([bytes_ * sum(one[0] == rank for one in of) for rank in range(size)] for of in (leaving, coming))
        parts = [_bytes_of(table[self._rows[expert]]) for _, expert in leaving for table in self.tables]
        rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self.tables[0].device)
        if self._one_sided is None:
            received = all_to_all_rows(self._group, rows, send, recv, self._operation)
        else:
            most = bytes_ * max(Counter((source, target) for _, source, target, _ in transfers).values())
            received = self._one_sided.exchange(rows, send, recv, most, self._operation)
        pieces = iter(received.split(self._sizes * len(coming)))
        arrived = []
        for _, expert in coming:
            row = self._rows[expert]
            got = tuple(_typed(next(pieces), table) for table in self.tables)
            if self._owned is not None and row < self._owned:
                arrived.append(Arrived(expert, got))
                continue
            for table, part in zip(self.tables, got, strict=True):
                table[row] = part if self._owned is None else _sum(table[row], part)
        return arrived


def _bytes_of(row: Tensor) -> Tensor:
    return row.reshape(-1).view(torch.uint8)


def _typed(part: Tensor, table: Tensor) -> Tensor:
    if part.storage_offset() % table.element_size():
        part = part.clone()  # tables of several dtypes
    return part.view(table.dtype).view(table.shape[1:])


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, taken in at least float32."""
    dtype = torch.promote_types(one.dtype, torch.float32)
    return (one.to(dtype) + other.to(dtype)).to(one.dtype)
