"""Sparse collectives: transfers of whole experts between ranks, overlapped with computation (Hecate, section 3.1)."""

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
from fusedmoe.placement.traffic import Transfer
from fusedmoe.threads import WorkerThread

if TYPE_CHECKING:
    # Not at run time: it needs Triton.
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll


class ReplicaGrads(NamedTuple):
    """Gradients of an expert that this rank owns, from a replica: one tensor per parameter."""

    expert: int
    parts: tuple[Tensor, ...]


class _TransferCall(NamedTuple):
    """Arguments of a `gather` (`num_owned` is None: received rows overwrite table rows) or `reduce`."""

    operation: str
    transfers: Sequence[Transfer]
    row_of_expert: Mapping[int, int]
    tables: Sequence[Tensor]
    num_owned: int | None
    recording: AbstractContextManager[None] | None


class SparseWork:
    """Handle on transfers in flight, like `torch.distributed.Work`. `sent_bytes`: sent by this rank."""

    def __init__(
        self, sent_bytes: int = 0, wait: Callable[[], list[ReplicaGrads]] = list, event: torch.cuda.Event | None = None
    ) -> None:
        self.sent_bytes, self._wait, self._event = sent_bytes, wait, event

    def wait(self) -> list[ReplicaGrads]:
        """Wait for the transfers (on CUDA the current stream waits). Return gradients that this rank has to add."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._wait()


class SparseCollectives:
    """Sparse collectives over the ranks of a group, executed in call order, which must be the same on all ranks.

    They run on their own stream on CUDA, and in a thread on a CPU.

    Args:
        group: with a process group that nothing else uses (`Topology.duplicate_group`).
        one_sided: sends experts by one-sided puts instead. On a CPU a call then blocks until the transfers are done.
    """

    def __init__(self, group: Group, one_sided: OneSidedAllToAll | None = None) -> None:
        self._group, self._one_sided = group, one_sided
        self._thread: WorkerThread | None = None
        self._last_future: Future[list[ReplicaGrads]] | None = None
        self._stream: torch.cuda.Stream | None = None

    def gather(
        self,
        transfers: Sequence[Transfer],
        row_of_expert: Mapping[int, int],
        tables: Sequence[Tensor],
        recording: AbstractContextManager[None] | None = None,
    ) -> SparseWork:
        """SparseAllGather: send parameters to the ranks that will hold replicas. All ranks pass the same transfers.

        Args:
            row_of_expert: the table row of each expert that this rank holds or receives.
            tables: [rows, ...] per parameter, contiguous, with equal trailing shapes and dtypes on every rank. Received
                experts are written to them until the work is done.
            recording: a context around the transfers, which measures them.
        """
        return self._start(_TransferCall("sparse all-gather", transfers, row_of_expert, tables, None, recording))

    def reduce(
        self,
        transfers: Sequence[Transfer],
        row_of_expert: Mapping[int, int],
        tables: Sequence[Tensor],
        num_owned: int,
        recording: AbstractContextManager[None] | None = None,
    ) -> SparseWork:
        """SparseReduceScatter: send gradients to the owners; ranks on the route add their own gradients.

        Sums are in transfer order: bitwise deterministic. Gradients for an expert that this rank owns (row below
        `num_owned`) are not added in place, because the rank's own gradient may be replaced meanwhile:
        `SparseWork.wait` returns them, in summation order. Rows of replicas are overwritten. Other arguments: as for
        `gather`.
        """
        call = _TransferCall("sparse reduce-scatter", transfers, row_of_expert, tables, num_owned, recording)
        return self._start(call)

    def wait_for_all(self) -> None:
        """Wait for all calls (on CUDA the current stream waits). Does not raise their errors."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._thread is not None and self._last_future is not None:
            self._thread.wait_for(self._last_future)

    def close(self) -> None:
        if self._thread is not None and self._last_future is not None:
            self._thread.wait_for(self._last_future)
            self._thread.end()
        self._thread = self._last_future = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCollectives:
        # Process groups cannot be copied.
        return self

    def _start(self, call: _TransferCall) -> SparseWork:
        if self._group.size == 1 or not call.transfers:
            return SparseWork()
        # Raises for a closed topology.
        _ = self._group.handle
        call = call._replace(row_of_expert=dict(call.row_of_expert), tables=[table.detach() for table in call.tables])
        num_sent = sum(transfer.source == self._group.index for transfer in call.transfers)
        sent, run = num_sent * sum(map(_row_bytes, call.tables)), partial(self._run, call)
        if self._group.uses_nccl:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                arrived = run()
                # The allocator must not reuse the tables before the stream is done.
                for table in call.tables:
                    table.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
            return SparseWork(sent, lambda: arrived, event)
        if self._one_sided is not None:
            # Triton's interpreter is not thread-safe.
            arrived = run()
            return SparseWork(sent, lambda: arrived)
        self._thread = self._thread or WorkerThread("fusedmoe sparse")
        self._last_future = self._thread.submit(run)
        return SparseWork(sent, partial(self._thread.result, self._last_future))

    @torch.no_grad()
    def _run(self, call: _TransferCall) -> list[ReplicaGrads]:
        arrived: list[ReplicaGrads] = []
        try:
            with call.recording or nullcontext():
                # The next step may forward experts that have just arrived.
                for step in range(max(transfer.step for transfer in call.transfers) + 1):
                    of_step = [transfer for transfer in call.transfers if transfer.step == step]
                    for expert, parts in self._exchange(call._replace(transfers=of_step)):
                        row, added = call.row_of_expert[expert], call.num_owned is not None
                        if call.num_owned is not None and row < call.num_owned:
                            arrived.append(ReplicaGrads(expert, parts))
                            continue
                        for table, part in zip(call.tables, parts, strict=True):
                            table[row] = _add_in_float32(table[row], part) if added else part
        except RankError:
            raise
        except BaseException as error:
            # Other ranks must not mistake the thread's next message for the missing experts.
            self._group.board.post(self._group.job.rank, call.operation, f"{type(error).__name__}: {error}")
            raise
        return arrived

    def _exchange(self, call: _TransferCall) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Exchange the experts of one step. Return the received experts."""
        me, size, tables = self._group.index, self._group.size, call.tables
        sizes = [_row_bytes(table) for table in tables]
        sent = sorted((target, expert) for expert, source, target, _ in call.transfers if source == me)
        received = sorted((source, expert) for expert, source, target, _ in call.transfers if target == me)
        send_bytes = [sum(sizes) * sum(target == rank for target, _ in sent) for rank in range(size)]
        recv_bytes = [sum(sizes) * sum(source == rank for source, _ in received) for rank in range(size)]
        sent_rows = [call.row_of_expert[expert] for _, expert in sent]
        parts = [table[row].reshape(-1).view(torch.uint8) for row in sent_rows for table in tables]
        bytes_ = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tables[0].device)
        if self._one_sided is None:
            bytes_ = all_to_all_rows(self._group, bytes_, send_bytes, recv_bytes, call.operation)
        else:
            most = sum(sizes) * max(Counter((source, target) for _, source, target, _ in call.transfers).values())
            bytes_ = self._one_sided.exchange(bytes_, send_bytes, recv_bytes, most, call.operation)
        pieces = iter(bytes_.split(sizes * len(received)))
        return [(expert, tuple(_view_as_row(next(pieces), table) for table in tables)) for _, expert in received]


def _row_bytes(table: Tensor) -> int:
    return table.shape[1:].numel() * table.element_size()


def _view_as_row(part: Tensor, table: Tensor) -> Tensor:
    # After a table of another dtype, bytes may be unaligned.
    if part.storage_offset() % table.element_size():
        part = part.clone()
    return part.view(table.dtype).view(table.shape[1:])


def _add_in_float32(first: Tensor, second: Tensor) -> Tensor:
    dtype = torch.promote_types(first.dtype, torch.float32)
    return (first.to(dtype) + second.to(dtype)).to(first.dtype)
