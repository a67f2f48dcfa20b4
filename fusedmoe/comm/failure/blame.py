"""Errors of waits that ended in vain: which rank is at fault, as far as a rank can know it.

A peer that raised has posted why (`Board`), and its verdict is the answer. A peer that was killed, that was stopped or
that calls another operation has posted nothing. Then the rank whose patience ends first looks at who is gone, who does
not renew its note, who waits for nobody and who waits for something else, and posts a verdict for all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fusedmoe.comm.failure.board import ORDER, PROCESS_ENDED, Board, Note, order_of_blame, stopped
from fusedmoe.errors import RankError

# A store that a process hosts goes last when the process ends: seconds from then until the process is gone.
_HOST_EXIT_S = 1.0


def lost(
    board: Board,
    ranks: Sequence[int],
    operation: str,
    where: str,
    reason: str,
    exit_s: float | None = None,
    absent: Sequence[int] = (),
) -> RankError:
    """Returns the error for a broken connection, once a peer has said why or is gone, or has had the time to.

    Args:
        where: the group of `ranks`, in words.   reason: the backend's.
        exit_s: seconds that a peer may take to be gone; None: as long as after an error.
        absent: the ranks that had not come when the connection could not be made.
    """
    peers = tuple(rank for rank in ranks if rank != board.rank)
    earlier, cut_off, dead = None, False, board.gone(peers)
    deadline = time.monotonic() + (board.exit_s if exit_s is None else exit_s)
    while (verdict := board.explain()) is None and not dead and time.monotonic() < deadline:
        # This rank is not late: its peers see it live.
        board.waits(f"{operation} over {where}", ranks)
        earlier = earlier or board.waiting(peers)
        time.sleep(0.02)
        dead = board.gone(peers)
        # Once it is cut off from the store, no rank can say why any more.
        if board.cut_off and not cut_off:
            cut_off, deadline = True, min(deadline, time.monotonic() + _HOST_EXIT_S)
    if verdict is not None:
        return _ended(board, operation, where, verdict)
    if dead:
        return _ended(board, operation, where, board.post(dead[0], operation, PROCESS_ENDED))
    # Peers on other hosts, whose processes cannot be asked for: a note that stays as it is tells of a stopped one.
    if silent := stopped(earlier or {}, board.waiting(peers)):
        culprit = silent[0]
        text = f"its connection to rank {board.rank} broke, and it waits no more: it ended, or its host; see its log"
    elif absent:
        culprit = absent[0]
        text = "it did not come: it is late, or it was stopped, or its host; see its log"
    else:
        culprit = board.rank
        text = f"it lost its connection to one of ranks {list(peers)}; see their logs for the first error"
    return _ended(board, operation, where, board.blame(culprit, operation, f"{text} ({reason})"))


def late(
    board: Board, ranks: Sequence[int], operation: str, where: str, timeout_s: float, earlier: Mapping[int, Note]
) -> RankError:
    """Returns the error for a wait that lasted too long; `earlier`: what others waited for when time was nearly up."""
    call, now = f"{operation} over {where}", board.waiting(ranks)
    silent = stopped(earlier, now)
    absent = [rank for rank, note in now.items() if not note.operation]
    waiting = {rank: note for rank, note in now.items() if rank not in silent and note.operation}
    waiting[board.rank] = Note(call, 0, board.calls[operation])
    elsewhere = [rank for rank, note in waiting.items() if note.operation != call]
    places = [f"rank {rank} is not there" for rank in absent]
    places += [f"rank {rank} was stopped while it waited for {now[rank].operation}" for rank in silent]
    # No rank can know whose operation is the right one: all are named.
    if absent or silent or elsewhere:
        places += [f"rank {rank} waits for {note.operation}" for rank, note in waiting.items()]
    text = (
        f"not all ranks came within {timeout_s:.0f} s: {'; '.join(places) or 'no data arrived'}. {ORDER}; "
        "if one is slow, give Topology a larger timeout_s."
    )
    culprit = [*absent, *silent, *order_of_blame(waiting)][0]
    return _ended(board, operation, where, board.explain() or board.blame(culprit, operation, text))


def different(board: Board, operation: str, where: str, calls: Mapping[int, Note]) -> RankError:
    """Returns the error for ranks that call different operations at one place; `calls` has each rank's."""
    each = "; ".join(f"rank {rank} calls {' '.join(note.operation.split())}" for rank, note in calls.items())
    text = f"ranks of {where} call different operations: {each}. {ORDER}"
    culprit = order_of_blame(calls)[0]
    words = calls[culprit].operation.split("\n")[0]
    return _ended(board, operation, where, board.explain() or board.post(culprit, words, text))


def other_operation(board: Board, operation: str, where: str, rank: int) -> RankError:
    """Returns the error for bytes from `rank` that cannot be of this operation: it, or this rank, called another."""
    text = (
        f"what it sent to rank {board.rank} is of another operation; one of the two called that out of order. {ORDER}"
    )
    return _ended(board, operation, where, board.post(rank, operation, text))


def _ended(board: Board, operation: str, where: str, verdict: object) -> RankError:
    return RankError(f"rank {board.rank}: {operation} over {where} ended because {verdict}")
