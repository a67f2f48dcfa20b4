"""The failure board: ranks learn of each other's failures from the job's store, and from who is still alive.

A rank that fails writes one verdict to the board (the first writer wins). A rank that waits reads the board between
short waits, so that it ends with an error that names the rank at fault instead of waiting for a peer that will never
come. It also notes there what it waits for, so that a rank whose patience ends can tell who is missing. The board sends
no rows: it works when the data path does not.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from fusedmoe.comm.failure.store_line import PATIENCE_S, line_to
from fusedmoe.errors import RankError
from fusedmoe.threads import LOOK_S, Helper

T = TypeVar("T")

ORDER = "Every rank of a group must call the same operations in the same order"
PROCESS_ENDED = "its process ended (an error, killed, or out of memory); see its log"
#: The part of an operation's name that says that a backward pass calls it.
BACKWARD = "in the backward pass"
_CURE = "The process was stopped, has ended or cannot be reached: let it go on, or start the job again; see its log"


class Verdict(NamedTuple):
    """The reason why the job stopped: the rank at fault, what it was doing and what it said."""

    rank: int
    operation: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed in {self.operation}: {self.message}"


class Note(NamedTuple):
    """A rank's note of what it waits for, and how often it has called that; who goes on waiting renews the mark."""

    operation: str
    mark: int
    often: int = 0


def stopped(earlier: Mapping[int, Note], now: Mapping[int, Note]) -> list[int]:
    """Returns the ranks that have not renewed a note: their process, or its host, has stopped while it waited."""
    return [rank for rank, note in now.items() if note.operation and earlier.get(rank) == note]


def order_of_blame(waiting: Mapping[int, Note]) -> list[int]:
    """Sorts ranks that wait for different operations by who has probably left the order of all."""
    operations = {rank: note.operation.split(" over the ")[0] for rank, note in waiting.items()}
    many = Counter(operations.values())
    # First those whose operation the fewest wait for. Where two operations have as many ranks, who has missed a
    # backward pass, since its peers are in it; then who calls what it has seldom called before (it saves, or closes).
    return sorted(
        waiting, key=lambda rank: (many[operations[rank]], BACKWARD in operations[rank], waiting[rank].often, -rank)
    )


# The rank whose process hosts the store, where no launcher does.
_HOST = 0
_EXIT_S = 10.0
# How long a store may be silent before its host is blamed for what a rank has waited for in vain.
_SILENT_S = 3.0
# How long a rank may wait without renewing its note: a few looks.
RENEWED_S = 1.0
# Host and process of each rank, by the store of a job. They are asked for when the ranks meet, on any board: the store
# may be gone when they are needed.
_PROCESSES: WeakKeyDictionary[dist.Store, dict[int, tuple[str, int]]] = WeakKeyDictionary()


class Board:
    """The failure board of a job, kept in the store that `torch.distributed` was initialised with."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._line = line_to(store)
        self._store = store
        self._prefix = ""
        self.rank = rank
        #: The verdict, as far as this rank knows; it stays.
        self.standing: Verdict | None = None
        # This rank has refused, and not all ranks of the job have raised it.
        self._unheard = False
        #: How long a rank may take to be gone, or to say why, once its connections broke: it closes them first.
        self.exit_s = _EXIT_S
        self._processes = _PROCESSES.setdefault(store, {})
        self._looker: Helper | None = None
        #: How often this rank has called each operation.
        self.calls: Counter[str] = Counter()

    def meet(
        self,
        ranks: Sequence[int],
        facts: T,
        timeout_s: float,
        *,
        operation: str = "making the topology",
        cure: str = "give Topology a larger timeout_s",
    ) -> list[T]:
        """Waits until all `ranks` have come as often as this one; returns each rank's facts, as JSON has them.

        `operation`, `cure`: the words of the `RankError` where a rank failed, or does not come in time.
        """
        place = hashlib.sha1(repr(tuple(ranks)).encode()).hexdigest()
        own = json.dumps([socket.gethostname(), os.getpid(), facts])

        def come(store: dist.Store) -> dict[int, str]:
            # Meetings of other ranks have their own numbers.
            number = store.add(f"meetings/{place}/{self.rank}", 1)
            keys = {rank: f"meeting/{place}/{number}/{rank}" for rank in ranks}
            store.set(keys[self.rank], own)
            # Who came to the next one has read it.
            store.delete_key(f"meeting/{place}/{number - 2}/{self.rank}")
            return keys

        # A meeting is short where all are on time: looks begin close together and grow apart.
        self.calls[operation] += 1
        deadline, pause = time.monotonic() + timeout_s, 0.005
        keys = self._ask(come, timeout_s) or {}
        everyone, noted = partial(_values, keys=list(keys.values())), False
        while (entries := self._ask(everyone) if keys else None) is None:
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            said: Verdict | str | None = self.read()
            # Asking for processes costs system calls: only once the wait is long.
            if said is None and pause == LOOK_S and (dead := self.gone(tuple(ranks))):
                said = self.post(dead[0], operation, PROCESS_ENDED)
            if said is None and (self._line.broke or time.monotonic() > deadline):
                missing = [rank for rank, key in keys.items() if self._get(key) is None]
                # The last of them may have come since the look above.
                if keys and not missing:
                    continue
                said = self._not_met(operation, missing, timeout_s, cure)
            if said is not None:
                raise RankError(f"rank {self.rank}: {operation} ended because {said}")
            if pause == LOOK_S:
                self.waits(operation, ranks)
                noted = True
        if noted:
            self.waits("")
        brought = [json.loads(entry) for entry in entries]
        self._processes |= {rank: (host, pid) for rank, (host, pid, _) in zip(ranks, brought, strict=True)}
        return [facts for _, _, facts in brought]

    def _not_met(self, operation: str, missing: list[int], timeout_s: float, cure: str) -> Verdict | str:
        """Posts why ranks have not come to a meeting: they are late, or a rank has left the order of all."""
        waiting, text = self.waiting(missing), f"did not come within {timeout_s:.0f} s; see its log, or {cure}"
        if late := [rank for rank, note in waiting.items() if not note.operation]:
            return self.blame(late[0], operation, text)
        waiting = {rank: note for rank, note in waiting.items() if note.operation != operation}
        if not waiting:
            return self.blame((missing or [self.rank])[0], operation, text)
        waiting[self.rank] = Note(operation, 0, self.calls[operation])
        places = "; ".join(f"rank {rank} waits for {note.operation}" for rank, note in sorted(waiting.items()))
        text = f"not all ranks came within {timeout_s:.0f} s: {places}. {ORDER}; or {cure}"
        return self.blame(order_of_blame(waiting)[0], operation, text)

    def forget_addresses(self) -> None:
        """Takes this rank's address for the default group from torchrun's store, once all ranks are connected."""
        # PyTorch leaves it there: ranks of the next attempt would wait for a connection to a process that has ended.
        if _agent():
            self._ask(lambda _: self._store.delete_key(f"cpu//0/{self.rank}"))

    def post(self, rank: int, operation: str, message: str) -> Verdict:
        """Writes a verdict unless one stands already; returns the one that stands."""
        own = Verdict(rank, operation, message)
        words = json.dumps(own._asdict())
        return self._learn(lambda store: store.compare_set("verdict", "", words)) or own

    def blame(self, rank: int, operation: str, message: str) -> str:
        """Posts that another rank did not come; returns the verdict, or who hosts the store where that is silent."""
        said = self.post(rank, operation, message)
        # A store whose host is short of time answers late; one whose host has stopped never does.
        deadline = time.monotonic() + _SILENT_S
        while self.standing is None and not self._line.broke and time.monotonic() < deadline:
            time.sleep(0.02)
            said = self.post(rank, operation, message)
        host = f"{'torchrun on the host of ' if _agent() else ''}rank {_HOST}"
        trouble = self._line.trouble
        return f"{host} failed in hosting the job's store: {trouble}. {_CURE}" if trouble else str(said)

    def refuse(self, operation: str, message: str, heard_by: int) -> None:
        """Notes why this rank takes no part in an operation of `heard_by` ranks, which learn of it from that."""
        own = json.dumps(Verdict(self.rank, operation, message)._asdict())
        key = f"refusal/{self.rank}"
        # The refusal is over once they have raised it. Where they are not all ranks of the job, the rest finds it when
        # it has waited in vain (`explain`), until this rank has gone on.
        self._unheard = heard_by < dist.get_world_size()

        def note(store: dist.Store) -> None:
            store.set(key, own)
            if self._unheard:
                store.set("unheard", own)
            # `set` has no answer; after this one the note is in the store.
            store.get(key)

        self._ask(note)

    def go_on(self) -> None:
        """Ends this rank's refusal: it takes part again."""
        if self._unheard:
            self._unheard = False
            self._ask(lambda store: store.set("unheard", ""))

    def refusal(self, rank: int) -> Verdict:
        """Returns the last refusal that a rank noted."""
        noted = self._get(f"refusal/{rank}")
        return Verdict(**json.loads(noted)) if noted else Verdict(rank, "something", "see its log")

    def read(self, wait_s: float = 0.0) -> Verdict | None:
        """Returns the standing verdict, or None; looks again until `wait_s` seconds have passed."""
        deadline = time.monotonic() + wait_s
        while True:
            standing = self.standing or self._learn(lambda store: (_values(store, ["verdict"]) or [b""])[0])
            if standing or self._line.trouble or time.monotonic() >= deadline:
                return self.standing
            time.sleep(0.02)

    def _learn(self, verdict: Callable[[dist.Store], bytes]) -> Verdict | None:
        """Returns the standing verdict, and notes that this rank has heard of it."""

        def hear(store: dist.Store) -> bytes:
            if words := verdict(store):
                store.set(f"heard/{self.rank}", "")
            return words

        if words := self._ask(hear):
            self.standing = Verdict(**json.loads(words))
        return self.standing

    def linger(self, deadline: float) -> None:
        """Waits, where the store may end with this process, until all ranks have heard of the verdict or have ended."""
        # A rank that finds no store, and had not looked at the board before, takes the store's host for the culprit.
        if self.rank != _HOST or _agent():
            return
        silent = tuple(range(dist.get_world_size()) if dist.is_initialized() else self._processes)
        while self.standing and not self._line.trouble and time.monotonic() < deadline:
            unheard = [rank for rank in silent if self._get(f"heard/{rank}") is None]
            silent = tuple(set(unheard) - set(self.gone(tuple(unheard))))
            if not silent:
                return
            time.sleep(0.01)

    def explain(self) -> Verdict | None:
        """Returns the standing verdict, for a rank that cannot go on; a refusal not heard by all becomes it then."""
        noted = None if self.read() else self._get("unheard")
        return self.post(**json.loads(noted)) if noted else self.standing

    @property
    def cut_off(self) -> bool:
        """True once the connection to the store broke: no rank's verdict can be read any more."""
        return bool(self._line.broke)

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        """Returns those of `ranks` whose process on this host has ended (other hosts cannot be asked)."""
        own_host = socket.gethostname()
        known = [(rank, *self._processes[rank]) for rank in ranks if rank in self._processes]
        return [rank for rank, host, pid in known if host == own_host and not _runs(pid)]

    def at_fault(self) -> int | None:
        """Returns the process that the standing verdict names, if it runs on this host; None otherwise."""
        host, pid = self._processes.get(self.standing.rank, ("", 0)) if self.standing is not None else ("", 0)
        return pid if host == socket.gethostname() and _runs(pid) else None

    def waits(self, call: str, ranks: Sequence[int] = ()) -> None:
        """Notes what this rank waits for, with which ranks; "" for nothing more."""
        often = self.calls[call.split(" over the ")[0]]
        # The time tells the note from the one before: at each look a rank that waits is seen to live.
        note = json.dumps([call, list(ranks), time.monotonic_ns(), often])
        self._ask(lambda store: store.set(f"waits/{self.rank}", note))

    @contextmanager
    def noted(self, call: str, ranks: Sequence[int]) -> Iterator[None]:
        """Wraps a wait of PyTorch's own, which looks at no board: a thread looks, and renews the note."""
        over = threading.Event()
        self._looker = self._looker or Helper("fusedmoe-board")
        looking = self._looker.begin(partial(self._renew, call, ranks, over))
        try:
            yield
        finally:
            over.set()
            noted = self._looker.result(looking)
        # After an error the note stays: this rank tells of the error next, and is not late.
        if noted:
            self.waits("")

    def _renew(self, call: str, ranks: Sequence[int], over: threading.Event) -> bool:
        noted = False
        while not over.wait(LOOK_S):
            noted = True
            self.waits(call, ranks)
            self.read()
        return noted

    def waiting(self, ranks: Iterable[int]) -> dict[int, Note]:
        """Returns the notes of `ranks` but this one, and of the ranks for which they wait."""
        # Also those for whom the ranks wait: one that waits is seldom at fault, the end of the chain is.
        notes: dict[int, Note] = {}
        queue = list(ranks)
        while queue:
            rank = queue.pop(0)
            if rank not in notes and rank != self.rank:
                noted = self._get(f"waits/{rank}")
                call, peers, mark, often = json.loads(noted) if noted else ("", [], 0, 0)
                notes[rank] = Note(call, mark, often)
                queue += peers
        return notes

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of `ranks`, and of the ranks they wait for, that wait for none: late, or stopped."""
        return [rank for rank, note in self.waiting(ranks).items() if not note.operation]

    def _get(self, key: str) -> bytes | None:
        values = self._ask(partial(_values, keys=[key]))
        return None if values is None else values[0]

    def _ask(self, question: Callable[[dist.Store], T], patience_s: float = PATIENCE_S) -> T | None:
        """Returns what the store answers; None if it does not in time."""

        def in_own_place(line: dist.Store) -> T:
            # All ranks get the first one's prefix; the line's store may serve other jobs, too.
            if not self._prefix:
                name = self._store.compare_set(f"fusedmoe/{attempt()}", "", uuid4().hex)
                self._prefix = name.decode()
            return question(dist.PrefixStore(self._prefix, line))

        return self._line.ask(in_own_place, patience_s)


def _values(store: dist.Store, keys: list[str]) -> list[bytes] | None:
    """Returns what the store has under all of these keys; None, at once, where one of them is missing."""
    # The store's own wait would warn at each time-out.
    if not store.check(keys):
        return None
    return store.multi_get(keys)


def attempt() -> str:
    """Returns the number of restarts where torchrun hosts the store, which keeps what earlier attempts wrote."""
    # A store that rank 0 hosts is new in each attempt, and torchruns count for themselves: that of a node that comes
    # back begins at 0, and its ranks would wait for the others in another place.
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent() else "0"


def _agent() -> bool:
    """Returns whether torchrun hosts the store, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _runs(pid: int) -> bool:
    """Returns True while the process exists and is not a zombie that its parent has yet to collect."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists()


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Characters of an uncaught exception that others are told, and seconds for the destructors of a process that ends so.
_LONGEST, _END_S = 500, 5.0
# Ranks that wait look at the board a few times a second.
_LINGER_S = 2.0


class _TellOthers:
    """A `sys.excepthook` that calls the one before, then posts a verdict to the boards of living topologies."""

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self._failed = False
        self.boards: WeakSet[Board] = WeakSet()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # First, as the store may be slow to answer.
        self._before(kind, error, traceback)
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        self._failed = True
        deadline = time.monotonic() + _LINGER_S
        for board in list(self.boards):
            with suppress(Exception):
                words = f"{type(error).__name__}: {error}"[:_LONGEST]
                board.explain() or board.post(board.rank, "the program", words)
                board.linger(deadline)

    def end(self) -> None:
        """Gives the destructors, which follow, a few seconds; then native code ends the process (no Python may run)."""
        # They destroy process groups, and Gloo then waits for what a rank that will never come owes it: for a minute or
        # half an hour, while a launcher waits for the process.
        if not self._failed:
            return
        try:
            faulthandler.dump_traceback_later(_END_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        except RuntimeError:
            # There was no memory for a thread.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(_END_S))


def tell_others_of_uncaught(board: Board) -> None:
    """Posts to `board`, while it is alive, each exception that nobody catches on the main thread from now on."""
    # Else the other ranks learn of it when the process has ended, which threads of the user's may put off; on other
    # hosts when their time is up.
    if not isinstance(sys.excepthook, _TellOthers):
        sys.excepthook = _TellOthers(sys.excepthook)
        # Before most others, and so it runs after them.
        atexit.register(sys.excepthook.end)
    sys.excepthook.boards.add(board)


def tell_others(error: BaseException) -> None:
    """Posts an exception that was caught, but with which the process ends."""
    if isinstance(sys.excepthook, _TellOthers):
        sys.excepthook.tell(error)
