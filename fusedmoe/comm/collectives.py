"""Collectives on rows with variable row counts, bounded waits, and sums in rank order.

Every function takes the group first, accepts ranks without rows, and is a no-op for a group of one rank. A wait that
exceeds the job's timeout raises a `RankError`. Nothing is sent after a verdict (`Board`).

On CPUs every operation starts with an all-gather of fixed-size envelopes that name the operation (`compare_calls`) and
carry the sizes, or all data if small. Without them Gloo would accept the bytes of another operation: too many abort the
process, too few leave uninitialised memory. Ranks that call different operations join the same all-gather and receive
both names:

    rank 0: | all-reduce, 4 bytes inside |            rank 1: | dispatch of layer 2 |      both raise RankError
    rank 0: | exchange of counts, inside | rows |     rank 1: the same                     rows are sent
"""

from __future__ import annotations

import pickle
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.comm.failure.blame import connection_lost_error, different_calls_error, foreign_data_error, timeout_error
from fusedmoe.comm.failure.board import NOTE_RENEWAL_S, WaitNote
from fusedmoe.comm.group import Group, device_backend
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.threads import POLL_S

T = TypeVar("T")

# Renamed in PyTorch 2.13, which warns about the old name.
_all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def wait(work: dist.Work | None, group: Group, operation: str) -> None:
    """Wait for `work` and poll the failure board.

    Raises:
        RankError: a rank posted a failure, a connection broke, or the job's timeout passed.
    """
    if work is None:
        return
    if group.uses_nccl:
        # NCCL's wait only orders streams; with a timeout it would block the host. NCCL's watchdog enforces the group's
        # timeout.
        work.wait()
        return
    board, deadline = group.board, time.monotonic() + group.job.timeout_s
    has_recorded_wait, earlier = False, None
    # Overloaded hosts may renew notes seconds late.
    renewal_s = max(NOTE_RENEWAL_S, min(10 * NOTE_RENEWAL_S, group.job.timeout_s / 10))
    while True:
        try:
            work.wait(timedelta(seconds=POLL_S))
            break
        except RuntimeError:
            if work.is_completed():
                # The work may have succeeded between the timeout and this check.
                try:
                    work.wait()
                    break
                except RuntimeError as error:
                    raise connection_lost_error(board, group.ranks, operation, f"the {group}", str(error)) from error
        if (verdict := board.read()) is not None:
            raise group.verdict_error(operation, verdict)
        board.record_wait(f"{operation} over the {group}", group.ranks)
        has_recorded_wait, now = True, time.monotonic()
        # A rank is stopped if its note does not change within one renewal.
        if earlier is None and now > deadline - renewal_s:
            earlier, deadline = board.wait_notes(group.ranks), max(deadline, now + renewal_s)
        elif earlier is not None and now > deadline:
            raise timeout_error(board, group.ranks, operation, f"the {group}", group.job.timeout_s, earlier)
    if has_recorded_wait:
        board.record_wait("")


# An envelope: header (lengths of name and data, number of calls), name, data.
_HEADER_FORMAT = struct.Struct("<HII")
_ENVELOPE_BYTES, _NAME_BYTES = 1024, 214
_DATA_OFFSET = _HEADER_FORMAT.size + _NAME_BYTES
MAX_DATA_BYTES = _ENVELOPE_BYTES - _DATA_OFFSET


def compare_calls(group: Group, operation: str, details: str = "", data: bytes = b"") -> list[bytes]:
    """Compare the operations that the ranks of a group are about to run. Collective.

    Args:
        details: further text that must be equal on all ranks.
        data: at most `MAX_DATA_BYTES` bytes, sent to all ranks.
    Returns:
        Each rank's data; [] on GPUs or for one rank, where nothing is compared.
    Raises:
        RankError: ranks call different operations; the job has a verdict; or as for `wait`.
    """
    handle = group.handle
    if handle is None:
        return []
    board = group.board
    # After a verdict, pending data from other ranks belongs to aborted operations.
    if board.standing_verdict is not None:
        raise group.verdict_error(operation, board.standing_verdict)
    if group.uses_nccl:
        return []
    name = f"{operation}\n{details}".encode()
    # Truncated with a checksum: different names must stay different.
    if len(name) > _NAME_BYTES:
        name = name[: _NAME_BYTES - 12] + f"... {zlib.crc32(name):08x}".encode()
    # On a mismatch, the number of calls identifies the rank that left the common order.
    board.num_calls_by_operation[operation] += 1
    envelope = bytearray(_ENVELOPE_BYTES)
    _HEADER_FORMAT.pack_into(envelope, 0, len(name), len(data), board.num_calls_by_operation[operation])
    envelope[_HEADER_FORMAT.size : _HEADER_FORMAT.size + len(name)] = name
    envelope[_DATA_OFFSET : _DATA_OFFSET + len(data)] = data
    own = torch.frombuffer(envelope, dtype=torch.uint8)
    envelopes = torch.empty(group.size * _ENVELOPE_BYTES, dtype=torch.uint8, device="cpu")
    wait(_all_gather_into_tensor(envelopes, own, group=handle, async_op=True), group, operation)
    received = envelopes.numpy().tobytes()
    names_of_ranks, num_calls_of_ranks, data_of_ranks = [], [], []
    for start in range(0, len(received), _ENVELOPE_BYTES):
        length, size, num_calls = _HEADER_FORMAT.unpack_from(received, start)
        names_of_ranks.append(received[start + _HEADER_FORMAT.size : start + _HEADER_FORMAT.size + length])
        num_calls_of_ranks.append(num_calls)
        data_of_ranks.append(received[start + _DATA_OFFSET : start + _DATA_OFFSET + size])
    if names_of_ranks.count(name) < group.size:
        calls = [name.decode(errors="replace") for name in names_of_ranks]
        notes = map(WaitNote, calls, num_calls_of_ranks, num_calls_of_ranks)
        raise different_calls_error(board, operation, f"the {group}", dict(zip(group.ranks, notes, strict=True)))
    return data_of_ranks


def all_to_all_rows(
    group: Group,
    rows: Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    operation: str = "all-to-all",
    is_compared: bool = False,
) -> Tensor:
    """Send `send[i]` rows to the group's i-th rank; return the received rows in rank order. Collective.

    Args:
        rows: [sum(send), ...], ordered by destination.
        recv: number of rows received from each rank.
        is_compared: True if all ranks have already exchanged calls and sizes. No envelope is then sent.
    Returns:
        [sum(recv), ...].
    Raises:
        RankError: inconsistent row counts, or as for `compare_calls`.
    """
    handle = group.handle
    if handle is None:
        return rows
    if group.board.standing_verdict is not None:
        raise group.verdict_error(operation, group.board.standing_verdict)
    if not len(send) == len(recv) == group.size or sum(send) != len(rows):
        group.refuse(operation, f"{len(rows)} rows, but {list(send)} are to be sent and {list(recv)} received")
    # Detached: Gloo releases tensors on its own thread, which must not free an autograd graph.
    rows = rows.detach().contiguous()
    if not is_compared:
        sizes = struct.pack(f"<{len(send)}q", *send) if 8 * len(send) <= MAX_DATA_BYTES else b""
        sizes_of_ranks = compare_calls(group, operation, _describe_dtype_and_shape(rows), sizes)
        for rank, its_sizes, size in zip(group.ranks, sizes_of_ranks, recv, strict=False):
            if its_sizes and struct.unpack_from("<q", its_sizes, 8 * group.index)[0] != size:
                raise foreign_data_error(group.board, operation, f"the {group}", rank)
    out = rows.new_empty((sum(recv), *rows.shape[1:]))
    # Backends without 8-bit floats still send bytes.
    wire, wire_out = (rows, out) if rows.element_size() > 1 else (rows.view(torch.uint8), out.view(torch.uint8))
    if group.downward is not None:
        for work in _start_duplex_all_to_all(group, wire_out, wire, send, recv):
            wait(work, group, operation)
        return out
    work = dist.all_to_all_single(wire_out, wire, list(recv), list(send), group=handle, async_op=True)
    wait(work, group, operation)
    return out


def _describe_dtype_and_shape(rows: Tensor) -> str:
    return f"of {str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])}"


def all_gather_rows(
    group: Group, rows: Tensor, counts: Sequence[int], operation: str = "all-gather", is_compared: bool = False
) -> Tensor:
    """Return the rows of all ranks, [sum(counts), ...], in rank order. Collective.

    `counts`: rows of each rank.
    """
    handle = group.handle
    if handle is None:
        return rows
    if group.board.standing_verdict is not None:
        raise group.verdict_error(operation, group.board.standing_verdict)
    if len(counts) != group.size or counts[group.index] != len(rows):
        group.refuse(operation, f"this rank has {len(rows)} rows, but {list(counts)} are to be gathered")
    rows = rows.detach().contiguous()
    if not (group.uses_nccl or is_compared):
        fits_envelope = max(counts) * rows.shape[1:].numel() * rows.element_size() <= MAX_DATA_BYTES
        gathered = compare_calls(
            group,
            operation,
            f"{_describe_dtype_and_shape(rows)} by {list(counts)}",
            _tensor_to_bytes(rows) if fits_envelope else b"",
        )
        if fits_envelope:
            return _bytes_to_tensor(b"".join(gathered), rows.dtype).view(sum(counts), *rows.shape[1:])
    if not group.uses_nccl or len(set(counts)) > 1:
        # Backends all-gather equal row counts only, so each rank sends its rows to every rank.
        copies = rows.repeat(group.size, *([1] * (rows.dim() - 1)))
        return all_to_all_rows(group, copies, [rows.shape[0]] * group.size, counts, operation, is_compared=True)
    out = rows.new_empty((sum(counts), *rows.shape[1:]))
    wait(_all_gather_into_tensor(out, rows, group=handle, async_op=True), group, operation)
    return out


def reduce_scatter_rows(
    group: Group, rows: Tensor, counts: Sequence[int], operation: str = "reduce-scatter", is_compared: bool = False
) -> Tensor:
    """Sum over ranks and return this rank's `counts[index]` of the [sum(counts), ...] rows. Collective.

    Sums in rank order and at least float32, so equal inputs give equal bits.
    """
    if group.handle is None:
        return rows
    own = counts[group.index]
    parts = all_to_all_rows(group, rows, counts, [own] * group.size, operation, is_compared)
    return _sum_in_rank_order(parts.view(group.size, own, *rows.shape[1:]))


def _sum_in_rank_order(parts: Tensor) -> Tensor:
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", operation: str = "all-reduce") -> Tensor:
    """Reduce `tensor` over the group in place ("sum", "max" or "min") and return it. Collective."""
    if op not in _REDUCTIONS:
        raise ConfigError(f"{operation}: {op!r} is not one of {', '.join(_REDUCTIONS)}")
    handle = group.handle
    if handle is None:
        return tensor
    fits_envelope = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= MAX_DATA_BYTES
    details = f"of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}, {op}"
    gathered = compare_calls(group, operation, details, _tensor_to_bytes(tensor.detach()) if fits_envelope else b"")
    if gathered and fits_envelope:
        parts = torch.stack([_bytes_to_tensor(part, tensor.dtype) for part in gathered])
        result = _sum_in_rank_order(parts) if op == "sum" else parts.amax(0) if op == "max" else parts.amin(0)
        with torch.no_grad():
            tensor.copy_(result.view(tensor.shape))
        return tensor
    # Backends reduce raw memory, whose gaps and order may differ between ranks.
    flat = tensor.detach().contiguous()
    wait(dist.all_reduce(flat, _REDUCTIONS[op], group=handle, async_op=True), group, operation)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat)
    return tensor


def max_over_ranks_s(group: Group, seconds: Sequence[float], operation: str) -> list[float]:
    """Return the largest of the ranks' values for each entry of `seconds`. Collective."""
    own_s = torch.tensor(seconds, dtype=torch.float64, device=device_of(group))
    slowest: list[float] = all_reduce(group, own_s, "max", operation).tolist()
    return slowest


def all_gather_object(group: Group, value: Any, operation: str = "all-gather of objects") -> list[Any]:
    """Return every rank's picklable `value`, in rank order. Collective."""
    if group.handle is None:
        return [value]
    device, data = device_of(group), pickle.dumps(value)
    size = struct.pack("<q", len(data))
    if group.uses_nccl:
        own_18 = torch.frombuffer(bytearray(size), dtype=torch.uint8)[None].to(device)
        gathered = [_tensor_to_bytes(row.cpu()) for row in all_gather_rows(group, own_18, [1] * group.size, operation)]
    else:
        gathered = compare_calls(group, operation, data=size + data[: MAX_DATA_BYTES - len(size)])
    sizes = [struct.unpack_from("<q", start)[0] for start in gathered]
    if not group.uses_nccl and max(sizes) <= MAX_DATA_BYTES - len(size):
        return [pickle.loads(start[len(size) :]) for start in gathered]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = all_gather_rows(group, rows, sizes, operation, is_compared=True).cpu().split(sizes)
    return [pickle.loads(_tensor_to_bytes(part)) for part in parts]


def _tensor_to_bytes(tensor: Tensor) -> bytes:
    # A copy: a NumPy view would fix the storage size, but FSDP2 frees gathered parameters by resizing them to zero.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _bytes_to_tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def device_of(group: Group, preferred: torch.device | None = None) -> torch.device:
    """Return the device on which collectives over this group need their tensors.

    `preferred`: returned if the group uses NCCL there, as a group of `init_process_group()` does on GPUs.
    """
    if preferred is not None and group.handle is not None and device_backend(group.handle, preferred.type) == "nccl":
        return preferred
    return torch.device("cuda", torch.cuda.current_device()) if group.uses_nccl else torch.device("cpu")


def on_all_ranks(world: Group, operation: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return the results of all ranks, in rank order. Collective.

    Raises:
        ConfigError: every rank's action raised one; each rank raises its own.
        RankError: the action failed on some rank; all ranks raise the same message, which names that rank.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    refused = isinstance(failure, ConfigError)
    message = None if failure is None else (str(failure) if refused else f"{type(failure).__name__}: {failure}")
    outcomes = all_gather_object(world, (message, refused, result), operation)
    of_ranks = zip(world.ranks, outcomes, strict=True)
    failures = [(rank, text, refuses) for rank, (text, refuses, _) in of_ranks if text is not None]
    if not failures:
        return [value for _, _, value in outcomes]
    if len(failures) == len(outcomes) and all(refuses for _, _, refuses in failures):
        assert failure is not None
        raise failure
    ranks = [rank for rank, _, _ in failures]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    raise RankError(f"{operation} failed on {where}: {failures[0][1]}") from failure


def _start_duplex_all_to_all(
    group: Group, out: Tensor, rows: Tensor, send: Sequence[int], recv: Sequence[int]
) -> list[dist.Work]:
    # A Gloo connection sends in one direction at a time. With a process group per direction, an exchange between two
    # ranks at 200 Mbit/s takes 1.07 instead of 2.1 times the link's ideal time.
    me, size = group.index, group.size
    assert group.handle is not None and group.downward is not None
    below, above = sum(send[:me]), sum(send[: me + 1])
    from_below, from_above = sum(recv[:me]), sum(recv[: me + 1])
    head, tail = [0] * (me + 1), [0] * (size - me)
    out_sizes, in_sizes = [*recv[:me], *tail], [*head, *send[me + 1 :]]
    upward = dist.all_to_all_single(
        out[:from_below], rows[above:], out_sizes, in_sizes, group=group.handle, async_op=True
    )
    out_sizes, in_sizes = [*head, *recv[me + 1 :]], [*send[:me], *tail]
    downward = dist.all_to_all_single(
        out[from_above:], rows[:below], out_sizes, in_sizes, group=group.downward, async_op=True
    )
    out[from_below:from_above] = rows[below:above]
    return [upward, downward]
