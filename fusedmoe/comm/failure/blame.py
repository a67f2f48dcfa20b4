"""Errors for failed waits, which identify the rank at fault if possible.

A peer that was killed or stopped, or that calls another operation, has posted no verdict on the `Board`. The first rank
to time out then checks the processes and wait notes of its peers, and posts a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fusedmoe.comm.failure.board import (
    ORDER_RULE,
    PROCESS_ENDED,
    Board,
    WaitNote,
    sort_by_suspicion,
    stopped_ranks,
)
from fusedmoe.errors import TIMEOUT_CURE, RankError

# The host of the store closes it last, up to this long before its process ends.
_HOST_EXIT_S = 1.0


def connection_lost_error(
    board: Board,
    ranks: Sequence[int],
    operation: str,
    where: str,
    reason: str,
    exit_s: float | None = None,
    absent: Sequence[int] = (),
) -> RankError:
    """Return the error for a broken connection. Waits up to `exit_s` until a peer has posted a verdict or ended.

    Args:
        where: description of the group of `ranks`.
        exit_s: seconds that a peer's process may take to end; None: the board's default.
        absent: ranks that had not joined.
    """
    peers = tuple(rank for rank in ranks if rank != board.rank)
    earlier, cut_off, dead = None, False, board.ended_ranks(peers)
    deadline = time.monotonic() + (board.exit_s if exit_s is None else exit_s)
    while (verdict := board.final_verdict()) is None and not dead and time.monotonic() < deadline:
        # Peers must not take this rank for a stopped one.
        board.record_wait(f"{operation} over {where}", ranks)
        earlier = earlier or board.wait_notes(peers)
        time.sleep(0.02)
        dead = board.ended_ranks(peers)
        # Without the store no rank can report a reason.
        if board.is_disconnected and not cut_off:
            cut_off, deadline = True, min(deadline, time.monotonic() + _HOST_EXIT_S)
    if verdict is not None:
        return _verdict_error(board, operation, where, verdict)
    if dead:
        return _verdict_error(board, operation, where, board.post(dead[0], operation, PROCESS_ENDED))
    # Processes on other hosts cannot be queried, but an unchanged note indicates a stopped one.
    is_absent = False
    if stopped := stopped_ranks(earlier or {}, board.wait_notes(peers)):
        culprit = stopped[0]
        text = f"its connection to rank {board.rank} broke and it stopped waiting: it or its host ended; see its log"
    elif absent:
        culprit, is_absent = absent[0], True
        text = "it is late or stopped, or its host is down; see its log"
    else:
        culprit = board.rank
        text = f"it lost its connection to one of ranks {list(peers)}; see their logs for the first error"
    return _verdict_error(board, operation, where, board.blame(culprit, operation, f"{text} ({reason})", is_absent))


def timeout_error(
    board: Board, ranks: Sequence[int], operation: str, where: str, timeout_s: float, earlier: Mapping[int, WaitNote]
) -> RankError:
    """Return the error for a timeout. `earlier`: the peers' notes shortly before it."""
    call, now = f"{operation} over {where}", board.wait_notes(ranks)
    stopped = stopped_ranks(earlier, now)
    absent = [rank for rank, note in now.items() if not note.operation]
    note_by_rank = {rank: note for rank, note in now.items() if rank not in stopped and note.operation}
    note_by_rank[board.rank] = WaitNote(call, 0, board.num_calls_by_operation[operation])
    elsewhere = [rank for rank, note in note_by_rank.items() if note.operation != call]
    descriptions = [f"rank {rank} is not waiting" for rank in absent]
    descriptions += [f"rank {rank} was stopped while it waited for {now[rank].operation}" for rank in stopped]
    # The intended operation is unknown.
    if absent or stopped or elsewhere:
        descriptions += [f"rank {rank} waits for {note.operation}" for rank, note in note_by_rank.items()]
    text = (
        f"not all ranks joined within {timeout_s:.0f} s: {'; '.join(descriptions) or 'no data received'}. {ORDER_RULE}"
    )
    # If all wait in this group, one has skipped or repeated a call; in another group one may wait for a slow rank.
    skipped = bool(elsewhere) and all(note_by_rank[rank].operation.endswith(f" over {where}") for rank in elsewhere)
    if absent or stopped or not skipped:
        text += f"; if one is slow, {TIMEOUT_CURE}"
    culprit = [*absent, *stopped, *sort_by_suspicion(note_by_rank)][0]
    is_absent = culprit in now and now[culprit].operation != call
    verdict: object = board.final_verdict() or board.blame(culprit, operation, text, is_absent)
    return _verdict_error(board, operation, where, verdict)


def different_calls_error(board: Board, operation: str, where: str, calls: Mapping[int, WaitNote]) -> RankError:
    each = "; ".join(f"rank {rank} calls {' '.join(note.operation.split())}" for rank, note in calls.items())
    text = f"ranks of {where} call different operations: {each}. {ORDER_RULE}"
    culprit = sort_by_suspicion(calls)[0]
    words = calls[culprit].operation.split("\n")[0]
    return _verdict_error(board, operation, where, board.final_verdict() or board.post(culprit, words, text))


def foreign_data_error(board: Board, operation: str, where: str, rank: int) -> RankError:
    """Return the error for data from `rank` that belongs to another operation."""
    text = (
        f"the data it sent to rank {board.rank} belongs to another operation; one of the two ranks called it out of "
        f"order. {ORDER_RULE}"
    )
    return _verdict_error(board, operation, where, board.post(rank, operation, text))


def _verdict_error(board: Board, operation: str, where: str, verdict: object) -> RankError:
    return RankError(f"rank {board.rank}: {operation} over {where} ended because {verdict}")
