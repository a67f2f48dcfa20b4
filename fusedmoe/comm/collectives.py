"""Collectives on rows: ragged, bounded in time, with sums in rank order.

Every function takes the group first, works on any dtype that the backend can carry, accepts ranks with no rows, and is
a no-op for a group of one. A wait never lasts longer than the job's time-out: it ends with a `RankError` that names the
rank at fault as far as it can be known.

On CPUs an envelope goes first: a message of one size that says what the rank calls, and carries its sizes, or all of
it where that is small (`begin`). Gloo takes whatever arrives for what it waits for: where that is more it ends the
process, where it is less the rest is uninitialised memory. Envelopes alone travel by all-gather, so ranks that call
different operations find that out here, at the same place, each with the names of both:

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

from fusedmoe.comm.failure import LOOK_S, ORDER, RENEWED_S, Note, order_of_blame, stopped
from fusedmoe.comm.group import Group, lost
from fusedmoe.errors import ConfigError, RankError

T = TypeVar("T")

# PyTorch 2.13 renamed it and warns at the old name.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def wait(work: dist.Work | None, group: Group, operation: str) -> None:
    """Waits for `work`, looking at the failure board between short waits.

    Raises:
        RankError: a rank posted a failure, a connection broke, or the job's time-out passed.
    """
    if work is None:
        return
    if device_of(group).type == "cuda":
        # NCCL's wait only orders streams; given a time-out it would block the host and abort the communicator when that
        # passes. Its own watchdog bounds the operation, by the process group's time-out.
        work.wait()
        return
    board, deadline = group.board, time.monotonic() + group.job.timeout_s
    noted, earlier = False, None
    while True:
        try:
            work.wait(timedelta(seconds=LOOK_S))
            break
        except RuntimeError:
            if work.is_completed():
                try:
                    work.wait()  # it may have ended well between the time-out and this look
                    break
                except RuntimeError as error:
                    raise lost(group.job, group.ranks, operation, f"the {group}", str(error)) from error
        verdict = board.read()
        if verdict is not None:
            raise RankError(f"rank {group.job.rank}: {operation} over the {group} ended because {verdict}")
        board.waits(f"{operation} over the {group}", group.ranks)
        noted, now = True, time.monotonic()
        if earlier is None and now > deadline - RENEWED_S:
            earlier, deadline = board.waiting(group.ranks), max(deadline, now + RENEWED_S)
        elif earlier is not None and now > deadline:
            raise _late(group, operation, earlier)
    if noted:
        board.waits("")


def _late(group: Group, operation: str, earlier: dict[int, Note]) -> RankError:
    """The error for a wait that lasted too long, with what the others do instead of answering.

    `earlier`: what they waited for when the time was nearly up.
    """
    me, here, board = group.job.rank, f"{operation} over the {group}", group.board
    now = board.waiting(group.ranks)
    silent = stopped(earlier, now)
    absent = [rank for rank, note in now.items() if not note.what]
    waiting = {rank: note for rank, note in now.items() if rank not in silent and note.what}
    waiting[me] = Note(here, 0, board.calls[operation])
    elsewhere = [rank for rank, note in waiting.items() if note.what != here]
    places = [f"rank {rank} is not there" for rank in absent]
    places += [f"rank {rank} was stopped while it waited for {now[rank].what}" for rank in silent]
    if absent or silent or elsewhere:  # nobody can know whose operation is the right one: all are named
        places += [f"rank {rank} waits for {note.what}" for rank, note in waiting.items()]
    message = (
        f"not all ranks came within {group.job.timeout_s:.0f} s: {'; '.join(places) or 'no data arrived'}. {ORDER}; "
        "if one is slow, give Topology a larger timeout_s."
    )
    culprits = [*absent, *silent, *order_of_blame(waiting)]
    said = board.explain() or board.blame(culprits[0], operation, message)
    return RankError(f"rank {me}: {here} ended because {said}")


_ENVELOPE, _HEAD, _WORDS = 1024, 10, 214
#: Bytes that an envelope carries beside the words that say what is called.
ROOM = _ENVELOPE - _HEAD - _WORDS


def begin(group: Group, operation: str, details: str = "", data: bytes = b"") -> list[bytes]:
    """Compares what the ranks of a group call, before they do it; returns the data of each, in rank order.

    Where the group is of one rank, or on GPUs, nothing is compared and nothing returned.

    Args:
        details: what else must be equal, in words: dtype and width of rows, say.
        data: what a rank tells the others, at most `ROOM` bytes.
    Raises:
        RankError: ranks call different operations; or as `wait`.
    """
    if _alone(group, operation) or device_of(group).type == "cuda":
        return []
    call = f"{operation}\n{details}".encode()
    if len(call) > _WORDS:
        call = call[: _WORDS - 12] + f"... {zlib.crc32(call):08x}".encode()
    envelope = bytearray(_ENVELOPE)
    group.board.calls[operation] += 1
    struct.pack_into("<HII", envelope, 0, len(call), len(data), group.board.calls[operation])
    envelope[_HEAD : _HEAD + len(call)] = call
    envelope[_HEAD + _WORDS : _HEAD + _WORDS + len(data)] = data
    own = torch.frombuffer(envelope, dtype=torch.uint8)
    every = torch.empty(group.size * _ENVELOPE, dtype=torch.uint8)
    wait(_all_gather_tensor(every, own, group=group.handle, async_op=True), group, operation)
    came = every.numpy().tobytes()
    calls, often, found = [], [], []
    for at in range(0, len(came), _ENVELOPE):
        length, size, times = struct.unpack_from("<HII", came, at)
        calls.append(came[at + _HEAD : at + _HEAD + length])
        often.append(times)
        found.append(came[at + _HEAD + _WORDS : at + _HEAD + _WORDS + size])
    if any(of != call for of in calls):
        words = [of.decode(errors="replace") for of in calls]
        raise _different(group, operation, dict(zip(group.ranks, map(Note, words, often, often), strict=True)))
    return found


def _different(group: Group, operation: str, calls: dict[int, Note]) -> RankError:
    """The error for ranks that call different operations."""
    each = "; ".join(f"rank {rank} calls {' '.join(note.what.split())}" for rank, note in calls.items())
    text = f"ranks of the {group} call different operations: {each}. {ORDER}"
    culprit = order_of_blame(calls)[0]
    said = group.board.explain() or group.board.post(culprit, calls[culprit].what.split("\n")[0], text)
    return RankError(f"rank {group.job.rank}: {operation} over the {group} ended because {said}")


def other_operation(group: Group, operation: str, rank: int) -> RankError:
    """The error for what came from `rank` and cannot be of this operation: it called another one there, or so did this
    rank."""
    me = group.job.rank
    text = f"what it sent to rank {me} is of another operation; one of the two called that out of order. {ORDER}"
    said = group.board.post(rank, operation, text)
    return RankError(f"rank {me}: {operation} over the {group} ended because {said}")


def _alone(group: Group, operation: str) -> bool:
    """Whether there is nobody to talk to.

    Raises:
        RankError: a verdict stands. What others have sent since is of what it has ended, and must not be taken for a
            part of what follows.
    """
    if group.handle is None:
        return True
    if (verdict := group.board.standing) is not None:
        raise RankError(f"rank {group.job.rank}: {operation} over the {group} ended because {verdict}")
    return False


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
        rows: [sum(send), ...], ordered by destination. recv: rows that come from each rank.
        agreed: the ranks have compared what they call, and their sizes.
    Returns:
        [sum(recv), ...], same dtype and trailing shape.
    """
    if _alone(group, operation):
        return rows
    rows = rows.detach().contiguous()
    if not agreed:
        sizes = struct.pack(f"<{len(send)}q", *send) if 8 * len(send) <= ROOM else b""
        for rank, its, size in zip(group.ranks, begin(group, operation, _rows(rows), sizes), recv, strict=False):
            if its and struct.unpack_from("<q", its, 8 * group.index)[0] != size:
                raise other_operation(group, operation, rank)
    out = rows.new_empty((sum(recv), *rows.shape[1:]))
    # Backends that know no 8-bit floats still carry their bytes.
    wire, wire_out = (rows, out) if rows.element_size() > 1 else (rows.view(torch.uint8), out.view(torch.uint8))
    if group.downward is not None:
        for work in _start_duplex(group, wire_out, wire, send, recv):
            wait(work, group, operation)
        return out
    work = dist.all_to_all_single(wire_out, wire, list(recv), list(send), group=group.handle, async_op=True)
    wait(work, group, operation)
    return out


def _rows(rows: Tensor) -> str:
    return f"of {str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])}"


def all_gather_rows(
    group: Group, rows: Tensor, counts: Sequence[int], operation: str = "all-gather", agreed: bool = False
) -> Tensor:
    """Returns the rows of all ranks, [sum(counts), ...], in rank order; `counts[i]` rows come from the i-th rank.

    `agreed`: as for `all_to_all_rows`.
    """
    if _alone(group, operation):
        return rows
    rows = rows.detach().contiguous()
    on_gpu = device_of(group).type == "cuda"
    if not (on_gpu or agreed):
        small = max(counts) * rows.shape[1:].numel() * rows.element_size() <= ROOM
        found = begin(group, operation, f"{_rows(rows)} by {list(counts)}", _bytes(rows) if small else b"")
        if small:
            return _tensor(b"".join(found), rows.dtype).view(sum(counts), *rows.shape[1:])
    if not on_gpu or len(set(counts)) > 1:
        # Nothing is padded, and every rank sends its own rows to every other.
        copies = rows.repeat(group.size, *([1] * (rows.dim() - 1)))
        return all_to_all_rows(group, copies, [rows.shape[0]] * group.size, counts, operation, agreed=True)
    out = rows.new_empty((sum(counts), *rows.shape[1:]))
    wait(_all_gather_tensor(out, rows, group=group.handle, async_op=True), group, operation)
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
    """The sum along the first axis, in its order."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def all_reduce(group: Group, tensor: Tensor, op: str = "sum", operation: str = "all-reduce") -> Tensor:
    """Reduces `tensor` over the group in place ("sum", "max" or "min") and returns it."""
    if _alone(group, operation):
        return tensor
    small = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= ROOM
    details = f"of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}, {op}"
    found = begin(group, operation, details, _bytes(tensor.detach()) if small else b"")
    if found and small:
        every = torch.stack([_tensor(its, tensor.dtype) for its in found])
        done = _sum(every) if op == "sum" else every.amax(0) if op == "max" else every.amin(0)
        with torch.no_grad():
            tensor.copy_(done.view(tensor.shape))
        return tensor
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    wait(dist.all_reduce(tensor.detach(), ops[op], group=group.handle, async_op=True), group, operation)
    return tensor


def all_gather_object(group: Group, thing: Any, operation: str = "all-gather of objects") -> list[Any]:
    """Returns every rank's picklable `thing`, in rank order."""
    if group.handle is None:
        return [thing]
    device, data = device_of(group), pickle.dumps(thing)
    size = struct.pack("<q", len(data))
    if device.type == "cuda":
        own_18 = torch.frombuffer(bytearray(size), dtype=torch.uint8)[None].to(device)
        every = [_bytes(of.cpu()) for of in all_gather_rows(group, own_18, [1] * group.size, operation)]
    else:
        every = begin(group, operation, data=size + data[: ROOM - len(size)])
    sizes = [struct.unpack_from("<q", its)[0] for its in every]
    if device.type == "cpu" and max(sizes) <= ROOM - len(size):
        return [pickle.loads(its[len(size) :]) for its in every]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = all_gather_rows(group, rows, sizes, operation, agreed=True).cpu()
    return [pickle.loads(_bytes(part)) for part in gathered.split(sizes)]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def device_of(group: Group) -> torch.device:
    """Where tensors must lie to travel over this group."""
    if group.handle is not None and dist.get_backend(group.handle) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_all_ranks(world: Group, operation: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns all results, in rank order. Collective over all ranks.

    For local work whose failure on one rank must end it on all: nobody goes on before everybody has succeeded.

    Raises:
        ConfigError: every rank's action raised one; each rank raises its own.
        RankError: the action failed on some rank; the message, which names it, is the same everywhere.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # told to the others, and raised below
        failure = error
    refused = isinstance(failure, ConfigError)
    message = None if failure is None else (str(failure) if refused else f"{type(failure).__name__}: {failure}")
    outcomes = all_gather_object(world, (message, refused, result), operation)
    of_ranks = zip(world.ranks, outcomes, strict=True)
    failures = [(rank, text, its_own) for rank, (text, its_own, _) in of_ranks if text is not None]
    if not failures:
        return [value for _, _, value in outcomes]
    if len(failures) == len(outcomes) and all(its_own for _, _, its_own in failures):
        assert failure is not None
        raise failure
    ranks = [rank for rank, _, _ in failures]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    raise RankError(f"{operation} failed on {where}: {failures[0][1]}") from failure


def _start_duplex(group: Group, out: Tensor, rows: Tensor, send: Sequence[int], recv: Sequence[int]) -> list[dist.Work]:
    """Starts what `all_to_all_rows` does: rows to higher ranks go over `handle`, those to lower ones over `downward`.

    A Gloo connection carries one direction at a time: an all-to-all over a link between two hosts takes twice the time
    that the link needs. With one process group for each direction every connection has only one to carry. Measured
    between two ranks at 200 Mbit/s: 2.1 times the ideal time with one group, 1.07 with two. On plain loopback it gains
    nothing.

    `rows` are ordered by destination and `out` by source, so what travels in one direction is one slice of each.
    """
    me = group.index
    assert group.downward is not None
    below, above = slice(0, sum(send[:me])), slice(sum(send[: me + 1]), None)
    from_below, from_above = slice(0, sum(recv[:me])), slice(sum(recv[: me + 1]), None)
    works = [
        dist.all_to_all_single(out[into], rows[of], came, left, group=handle, async_op=True)
        for handle, into, of, came, left in (
            (group.handle, from_below, above, _only(recv, range(me)), _only(send, range(me + 1, group.size))),
            (group.downward.handle, from_above, below, _only(recv, range(me + 1, group.size)), _only(send, range(me))),
        )
    ]
    out[from_below.stop : from_above.start] = rows[below.stop : above.start]
    return works


def _only(counts: Sequence[int], ranks: range) -> list[int]:
    return [count if rank in ranks else 0 for rank, count in enumerate(counts)]
