"""Collectives on rows: ragged, bounded in time, with sums in rank order.

Every function takes the group first, works on any dtype that the backend can carry, accepts ranks with no rows, and is
a no-op for a group of one. A wait never lasts longer than the job's time-out: it ends with a `RankError` that names the
rank at fault as far as it can be known. Once a verdict stands nothing is sent.

On CPUs an envelope goes first: a message of one size that says what the rank calls, and carries its sizes, or all of
the data where they are small (`begin`). Gloo takes any bytes that arrive for those it waits for: where they are more it
ends the process, where they are less the rest is uninitialised memory. Only envelopes travel by all-gather, so ranks
that call different operations find that out in the same collective, each with the names of both:

    rank 0: | all-reduce, 4 bytes inside |            rank 1: | dispatch of layer 2 |      both raise RankError
    rank 0: | exchange of counts, inside | rows |     rank 1: the same                     rows travel

Rows whose sizes all ranks have exchanged before (`agreed`) need none.
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

from fusedmoe.comm.failure.blame import different, late, lost, other_operation
from fusedmoe.comm.failure.board import RENEWED_S, Note
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.threads import LOOK_S

T = TypeVar("T")

# PyTorch 2.13 renamed it and warns at the old name.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def wait(work: dist.Work | None, group: Group, operation: str) -> None:
    """Waits for `work`, looking at the failure board between short waits.

    Raises:
        RankError: a rank posted a failure, a connection broke, or the job's time-out passed.
    """
    if work is None:
        return
    if group.on_gpu:
        # NCCL's wait only orders streams; given a time-out it would block the host and abort the communicator when that
        # passes. Its own watchdog bounds the operation, by the process group's time-out.
        work.wait()
        return
    board, deadline = group.board, time.monotonic() + group.job.timeout_s
    noted, earlier = False, None
    # A rank whose machine is short of time may take seconds to renew its note. A long wait has them.
    renewal_s = max(RENEWED_S, min(10 * RENEWED_S, group.job.timeout_s / 10))
    while True:
        try:
            work.wait(timedelta(seconds=LOOK_S))
            break
        except RuntimeError:
            if work.is_completed():
                # It may have ended well between the time-out and this look.
                try:
                    work.wait()
                    break
                except RuntimeError as error:
                    raise lost(board, group.ranks, operation, f"the {group}", str(error)) from error
        if (verdict := board.read()) is not None:
            raise group.ended(operation, verdict)
        board.waits(f"{operation} over the {group}", group.ranks)
        noted, now = True, time.monotonic()
        # Two looks at the notes of the others, a renewal apart, tell a stopped rank from one that waits.
        if earlier is None and now > deadline - renewal_s:
            earlier, deadline = board.waiting(group.ranks), max(deadline, now + renewal_s)
        elif earlier is not None and now > deadline:
            raise late(board, group.ranks, operation, f"the {group}", group.job.timeout_s, earlier)
    if noted:
        board.waits("")


# An envelope is a head (lengths of words and data, how often the rank has called that), words that say what is called,
# and data: so many bytes.
_HEAD = struct.Struct("<HII")
_ENVELOPE, _WORDS = 1024, 214
_DATA = _HEAD.size + _WORDS
#: Bytes of data that an envelope carries.
ROOM = _ENVELOPE - _DATA


def begin(group: Group, operation: str, details: str = "", data: bytes = b"") -> list[bytes]:
    """Compares what the ranks of a group call, before they do it; returns the data of each, in rank order.

    In a group of one rank, or on GPUs, it compares nothing and returns [].

    Args:
        details: what else must be equal, in words: dtype and width of rows, say.
        data: what a rank tells the others, at most `ROOM` bytes.
    Raises:
        RankError: ranks call different operations; a verdict stands; or as `wait`.
    """
    handle = group.handle
    if handle is None:
        return []
    board = group.board
    # What other ranks have sent since is of operations that the verdict has ended, and no part of new ones.
    if board.standing is not None:
        raise group.ended(operation, board.standing)
    if group.on_gpu:
        return []
    words = f"{operation}\n{details}".encode()
    # Cut, but different words must stay different.
    if len(words) > _WORDS:
        words = words[: _WORDS - 12] + f"... {zlib.crc32(words):08x}".encode()
    # How often a rank has called an operation tells who has left the order, where ranks call different ones.
    board.calls[operation] += 1
    envelope = bytearray(_ENVELOPE)
    _HEAD.pack_into(envelope, 0, len(words), len(data), board.calls[operation])
    envelope[_HEAD.size : _HEAD.size + len(words)] = words
    envelope[_DATA : _DATA + len(data)] = data
    own = torch.frombuffer(envelope, dtype=torch.uint8)
    envelopes = torch.empty(group.size * _ENVELOPE, dtype=torch.uint8, device="cpu")
    wait(_all_gather_tensor(envelopes, own, group=handle, async_op=True), group, operation)
    received = envelopes.numpy().tobytes()
    words_of_ranks, often_of_ranks, data_of_ranks = [], [], []
    for start in range(0, len(received), _ENVELOPE):
        length, size, often = _HEAD.unpack_from(received, start)
        words_of_ranks.append(received[start + _HEAD.size : start + _HEAD.size + length])
        often_of_ranks.append(often)
        data_of_ranks.append(received[start + _DATA : start + _DATA + size])
    if words_of_ranks.count(words) < group.size:
        calls = [said.decode(errors="replace") for said in words_of_ranks]
        notes = map(Note, calls, often_of_ranks, often_of_ranks)
        raise different(board, operation, f"the {group}", dict(zip(group.ranks, notes, strict=True)))
    return data_of_ranks


def all_to_all_rows(
    group: Group,
    rows: Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    operation: str = "all-to-all",
    agreed: bool = False,
) -> Tensor:
    """Sends `send[i]` rows to the i-th rank of the group and returns the rows received, in rank order.

    Args:
        rows: [sum(send), ...], ordered by destination.   recv: numbers of rows received from each rank.
        agreed: the ranks have compared what they call, and their sizes.
    Returns:
        [sum(recv), ...], same dtype and trailing shape.
    Raises:
        RankError: numbers of rows that do not fit; ranks call different operations; a verdict stands; or as `wait`.
    """
    handle = group.handle
    if handle is None:
        return rows
    if group.board.standing is not None:
        raise group.ended(operation, group.board.standing)
    if not len(send) == len(recv) == group.size or sum(send) != len(rows):
        group.refuse(operation, f"{len(rows)} rows, of which {list(send)} are to be sent and {list(recv)} received")
    # A detached copy or view: Gloo lets go of tensors on a thread of its own, which must not free an autograd graph.
    rows = rows.detach().contiguous()
    if not agreed:
        sizes = struct.pack(f"<{len(send)}q", *send) if 8 * len(send) <= ROOM else b""
        sizes_of_ranks = begin(group, operation, _described(rows), sizes)
        for rank, its_sizes, size in zip(group.ranks, sizes_of_ranks, recv, strict=False):
            if its_sizes and struct.unpack_from("<q", its_sizes, 8 * group.index)[0] != size:
                raise other_operation(group.board, operation, f"the {group}", rank)
    out = rows.new_empty((sum(recv), *rows.shape[1:]))
    # Backends that know no 8-bit floats still carry their bytes.
    wire, wire_out = (rows, out) if rows.element_size() > 1 else (rows.view(torch.uint8), out.view(torch.uint8))
    if group.downward is not None:
        for work in _start_duplex(group, wire_out, wire, send, recv):
            wait(work, group, operation)
        return out
    work = dist.all_to_all_single(wire_out, wire, list(recv), list(send), group=handle, async_op=True)
    wait(work, group, operation)
    return out


def _described(rows: Tensor) -> str:
    return f"of {str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])}"


def all_gather_rows(
    group: Group, rows: Tensor, counts: Sequence[int], operation: str = "all-gather", agreed: bool = False
) -> Tensor:
    """Returns the rows of all ranks, [sum(counts), ...], in rank order; `counts[i]` rows come from the i-th rank.

    `agreed`: as for `all_to_all_rows`.
    """
    handle = group.handle
    if handle is None:
        return rows
    if group.board.standing is not None:
        raise group.ended(operation, group.board.standing)
    if len(counts) != group.size or counts[group.index] != len(rows):
        group.refuse(operation, f"{len(rows)} rows of this rank, but {list(counts)} are to be gathered")
    rows = rows.detach().contiguous()
    if not (group.on_gpu or agreed):
        small = max(counts) * rows.shape[1:].numel() * rows.element_size() <= ROOM
        gathered = begin(group, operation, f"{_described(rows)} by {list(counts)}", _bytes(rows) if small else b"")
        if small:
            return _tensor(b"".join(gathered), rows.dtype).view(sum(counts), *rows.shape[1:])
    if not group.on_gpu or len(set(counts)) > 1:
        # Backends gather as many rows from each rank, or pad them. So every rank sends its own rows to every other.
        copies = rows.repeat(group.size, *([1] * (rows.dim() - 1)))
        return all_to_all_rows(group, copies, [rows.shape[0]] * group.size, counts, operation, agreed=True)
    out = rows.new_empty((sum(counts), *rows.shape[1:]))
    wait(_all_gather_tensor(out, rows, group=handle, async_op=True), group, operation)
    return out


def reduce_scatter_rows(
    group: Group, rows: Tensor, counts: Sequence[int], operation: str = "reduce-scatter", agreed: bool = False
) -> Tensor:
    """Sums over ranks and returns this rank's part: `counts[index]` of the [sum(counts), ...] rows.

    The sum runs in rank order, in at least float32, whatever the backend: the same inputs give the same bits.
    `agreed`: as for `all_to_all_rows`.
    """
    if group.handle is None:
        return rows
    own = counts[group.index]
    parts = all_to_all_rows(group, rows, counts, [own] * group.size, operation, agreed)
    return _sum(parts.view(group.size, own, *rows.shape[1:]))


def _sum(parts: Tensor) -> Tensor:
    """Sums along the first axis, in its order, in at least float32."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", operation: str = "all-reduce") -> Tensor:
    """Reduces `tensor` over the group in place ("sum", "max" or "min") and returns it."""
    if op not in _REDUCTIONS:
        raise ConfigError(f"{operation}: {op!r} is not one of {', '.join(_REDUCTIONS)}")
    handle = group.handle
    if handle is None:
        return tensor
    small = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= ROOM
    details = f"of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}, {op}"
    gathered = begin(group, operation, details, _bytes(tensor.detach()) if small else b"")
    if gathered and small:
        parts = torch.stack([_tensor(part, tensor.dtype) for part in gathered])
        result = _sum(parts) if op == "sum" else parts.amax(0) if op == "max" else parts.amin(0)
        with torch.no_grad():
            tensor.copy_(result.view(tensor.shape))
        return tensor
    # Backends reduce memory as it lies, which may be in another order on another rank, or have gaps.
    flat = tensor.detach().contiguous()
    wait(dist.all_reduce(flat, _REDUCTIONS[op], group=handle, async_op=True), group, operation)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat)
    return tensor


def slowest_s(group: Group, seconds: Sequence[float], operation: str) -> list[float]:
    """Returns of each number of seconds that of the slowest rank: all ranks go on with the same."""
    own_s = torch.tensor(seconds, dtype=torch.float64, device=device_of(group))
    slowest: list[float] = all_reduce(group, own_s, "max", operation).tolist()
    return slowest


def all_gather_object(group: Group, value: Any, operation: str = "all-gather of objects") -> list[Any]:
    """Returns every rank's picklable `value`, in rank order."""
    if group.handle is None:
        return [value]
    device, data = device_of(group), pickle.dumps(value)
    size = struct.pack("<q", len(data))
    if group.on_gpu:
        own_18 = torch.frombuffer(bytearray(size), dtype=torch.uint8)[None].to(device)
        gathered = [_bytes(row.cpu()) for row in all_gather_rows(group, own_18, [1] * group.size, operation)]
    else:
        gathered = begin(group, operation, data=size + data[: ROOM - len(size)])
    sizes = [struct.unpack_from("<q", start)[0] for start in gathered]
    if not group.on_gpu and max(sizes) <= ROOM - len(size):
        return [pickle.loads(start[len(size) :]) for start in gathered]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = all_gather_rows(group, rows, sizes, operation, agreed=True).cpu().split(sizes)
    return [pickle.loads(_bytes(part)) for part in parts]


def _bytes(tensor: Tensor) -> bytes:
    # A copy: an array of NumPy over a tensor's memory forbids for ever to resize that, and FSDP2 frees a parameter that
    # it has gathered by resizing it to nothing.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def device_of(group: Group) -> torch.device:
    """Returns the device on which tensors must lie to travel over this group."""
    return torch.device("cuda", torch.cuda.current_device()) if group.on_gpu else torch.device("cpu")


def on_all_ranks(world: Group, operation: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns all results, in rank order: no rank goes on before all have succeeded.

    Raises:
        ConfigError: every rank's action raised one; each rank raises its own.
        RankError: the action failed on some rank; the message, which names it, is the same everywhere.
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


def _start_duplex(group: Group, out: Tensor, rows: Tensor, send: Sequence[int], recv: Sequence[int]) -> list[dist.Work]:
    """Starts an all-to-all whose rows to higher ranks go over `handle`, and those to lower ranks over `downward`."""
    # A Gloo connection carries one direction at a time. With a process group for each direction every connection has
    # only one to carry: between two ranks at 200 Mbit/s 2.1 times the link's ideal time falls to 1.07 times. Rows are
    # ordered by destination and `out` by source, so the rows of one direction are one slice of each.
    me, size = group.index, group.size
    assert group.handle is not None and group.downward is not None
    # Before and after this rank's own rows.
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
