"""The failure board: ranks report failures and detect dead peers through the job's store.

A failed rank writes a verdict, a record of the rank at fault and its error; a job has one verdict, the first. A waiting
rank polls the board and raises the verdict. It also records the operation it waits for, from which a rank that times
out determines the missing ranks. The board works when the data path does not.

A refusal rejects one operation: all its ranks raise the reason, and the job can continue.
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

from fusedmoe.comm.failure.store_client import REQUEST_TIMEOUT_S, shared_client
from fusedmoe.errors import TIMEOUT_CURE, RankError
from fusedmoe.threads import POLL_S, WorkerThread

T = TypeVar("T")

ORDER_RULE = "Every rank of a group must call the same operations in the same order"
PROCESS_ENDED = "its process ended (an error, killed, or out of memory); see its log"
BACKWARD_SUFFIX = "in the backward pass"
_STOPPED_PROCESS_ADVICE = (
    "The process was stopped, has ended or cannot be reached: continue it or restart the job; see its log"
)


class Verdict(NamedTuple):
    """Why the job stopped: the rank at fault, its operation, and its error text."""

    rank: int
    operation: str
    message: str
    # The rank did not join the operation.
    is_absent: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {'did not join' if self.is_absent else 'failed in'} {self.operation}: {self.message}"


class WaitNote(NamedTuple):
    """A waiting rank's operation, a heartbeat that changes while it waits, and its number of calls."""

    operation: str
    heartbeat: int
    num_calls: int = 0


def stopped_ranks(earlier: Mapping[int, WaitNote], now: Mapping[int, WaitNote]) -> list[int]:
    """Return the ranks whose note has not changed: their process or host was stopped during the wait."""
    return [rank for rank, note in now.items() if note.operation and earlier.get(rank) == note]


def sort_by_suspicion(note_by_rank: Mapping[int, WaitNote]) -> list[int]:
    operations = {rank: note.operation.split(" over the ")[0] for rank, note in note_by_rank.items()}
    count = Counter(operations.values())
    # The operation with the fewest ranks first; on a tie, a rank outside a backward pass, since its peers run one; then
    # the rank that has called its operation least often (saving, closing).
    return sorted(
        note_by_rank,
        key=lambda rank: (
            count[operations[rank]],
            BACKWARD_SUFFIX in operations[rank],
            note_by_rank[rank].num_calls,
            -rank,
        ),
    )


# Rank that hosts the store without a launcher.
_STORE_HOST_RANK = 0
_PROCESS_EXIT_S = 10.0
# The store's host is blamed after this time without an answer.
_MAX_STORE_SILENCE_S = 3.0
# Longest time between two renewals of a waiting rank's note, a few polls.
NOTE_RENEWAL_S = 1.0
# Host and process id of each rank, by store. Gathered early: the store may be gone when needed.
_HOST_AND_PID_BY_STORE: WeakKeyDictionary[dist.Store, dict[int, tuple[str, int]]] = WeakKeyDictionary()


class Board:
    """The failure board of a job, kept in the store of `torch.distributed`'s default group."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._client = shared_client(store)
        self._store = store
        self._store_prefix = ""
        self.rank = rank
        self.standing_verdict: Verdict | None = None
        # Whether some ranks of the job may not have raised this rank's refusal.
        self._has_unread_refusal = False
        #: Seconds that a rank may take to end or post a verdict after its connections broke.
        self.exit_s = _PROCESS_EXIT_S
        self._host_and_pid_by_rank = _HOST_AND_PID_BY_STORE.setdefault(store, {})
        self._note_renewal_thread: WorkerThread | None = None
        self.num_calls_by_operation: Counter[str] = Counter()

    def all_gather_json(
        self,
        ranks: Sequence[int],
        facts: T,
        timeout_s: float,
        *,
        operation: str = "making the topology",
        cure: str = TIMEOUT_CURE,
    ) -> list[T]:
        """Gather the JSON-serialisable `facts` of all `ranks` through the store, in rank order. Collective.

        `operation`, `cure`: texts of the `RankError` for a rank that failed or is late.
        """
        ranks_hash = hashlib.sha1(repr(tuple(ranks)).encode()).hexdigest()
        own = json.dumps([socket.gethostname(), os.getpid(), facts])

        def register_arrival(store: dist.Store) -> dict[int, str]:
            number = store.add(f"meetings/{ranks_hash}/{self.rank}", 1)
            keys = {rank: f"meeting/{ranks_hash}/{number}/{rank}" for rank in ranks}
            store.set(keys[self.rank], own)
            # A rank that starts another exchange has read the previous one.
            store.delete_key(f"meeting/{ranks_hash}/{number - 2}/{self.rank}")
            return keys

        self.num_calls_by_operation[operation] += 1
        deadline, pause = time.monotonic() + timeout_s, 0.005
        keys = self._call_store(register_arrival, timeout_s) or {}
        read_entries, has_recorded_wait = partial(_read_values_if_set, keys=list(keys.values())), False
        while (entries := self._call_store(read_entries) if keys else None) is None:
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
            verdict: Verdict | str | None = self.read()
            if verdict is None and pause == POLL_S and (dead := self.ended_ranks(tuple(ranks))):
                verdict = self.post(dead[0], operation, PROCESS_ENDED)
            if verdict is None and (self._client.connection_error or time.monotonic() > deadline):
                missing = [rank for rank, key in keys.items() if self._read_value(key) is None]
                if keys and not missing:
                    continue
                verdict = self._blame_missing_ranks(operation, missing, timeout_s, cure)
            if verdict is not None:
                raise RankError(f"rank {self.rank}: {operation} ended because {verdict}")
            if pause == POLL_S:
                self.record_wait(operation, ranks)
                has_recorded_wait = True
        if has_recorded_wait:
            self.record_wait("")
        entries_of_ranks = [json.loads(entry) for entry in entries]
        self._host_and_pid_by_rank |= {
            rank: (host, pid) for rank, (host, pid, _) in zip(ranks, entries_of_ranks, strict=True)
        }
        return [facts for _, _, facts in entries_of_ranks]

    def _blame_missing_ranks(self, operation: str, missing: list[int], timeout_s: float, cure: str) -> Verdict | str:
        note_by_rank, text = self.wait_notes(missing), f"time-out after {timeout_s:.0f} s; see its log, or {cure}"
        if late := [rank for rank, note in note_by_rank.items() if not note.operation]:
            return self.blame(late[0], operation, text, is_absent=True)
        note_by_rank = {rank: note for rank, note in note_by_rank.items() if note.operation != operation}
        if not note_by_rank:
            return self.blame((missing or [self.rank])[0], operation, text, is_absent=bool(missing))
        note_by_rank[self.rank] = WaitNote(operation, 0, self.num_calls_by_operation[operation])
        places = "; ".join(f"rank {rank} waits for {note.operation}" for rank, note in sorted(note_by_rank.items()))
        text = f"not all ranks joined within {timeout_s:.0f} s: {places}. {ORDER_RULE}; or {cure}"
        culprit = sort_by_suspicion(note_by_rank)[0]
        return self.blame(culprit, operation, text, is_absent=culprit != self.rank)

    def forget_addresses(self) -> None:
        """Delete this rank's default-group address from torchrun's store, after all ranks have connected."""
        # Ranks of the next attempt would connect to an ended process.
        if _has_agent_store():
            self._call_store(lambda _: self._store.delete_key(f"cpu//0/{self.rank}"))

    def post(self, rank: int, operation: str, message: str, is_absent: bool = False) -> Verdict:
        own = Verdict(rank, operation, message, is_absent)
        words = json.dumps(own._asdict())
        return self._read_verdict(lambda store: store.compare_set("verdict", "", words)) or own

    def blame(self, rank: int, operation: str, message: str, is_absent: bool = False) -> str:
        """Post that a rank is missing. Return the verdict, or a text that blames an unresponsive store's host."""
        verdict = self.post(rank, operation, message, is_absent)
        # An overloaded host's store answers late.
        deadline = time.monotonic() + _MAX_STORE_SILENCE_S
        while self.standing_verdict is None and not self._client.connection_error and time.monotonic() < deadline:
            time.sleep(0.02)
            verdict = self.post(rank, operation, message, is_absent)
        host = f"{'torchrun on the host of ' if _has_agent_store() else ''}rank {_STORE_HOST_RANK}"
        store_failure = self._client.failure_reason
        return (
            f"{host} failed in hosting the job's store: {store_failure}. {_STOPPED_PROCESS_ADVICE}"
            if store_failure
            else str(verdict)
        )

    def refuse(self, operation: str, message: str, num_readers: int) -> None:
        """Record why this rank refuses an operation of `num_readers` ranks, which all raise this reason."""
        own = json.dumps(Verdict(self.rank, operation, message)._asdict())
        key = f"refusal/{self.rank}"
        # Ranks outside the operation read it when they time out (`final_verdict`).
        self._has_unread_refusal = num_readers < dist.get_world_size()

        def note(store: dist.Store) -> None:
            store.set(key, own)
            if self._has_unread_refusal:
                store.set("unheard", own)
            # An answer shows that the unacknowledged `set` has arrived.
            store.get(key)

        self._call_store(note)

    def clear_refusal(self) -> None:
        if self._has_unread_refusal:
            self._has_unread_refusal = False
            self._call_store(lambda store: store.set("unheard", ""))

    def refusal(self, rank: int) -> Verdict:
        stored = self._read_value(f"refusal/{rank}")
        return Verdict(**json.loads(stored)) if stored else Verdict(rank, "something", "see its log")

    def read(self, wait_s: float = 0.0) -> Verdict | None:
        """Return the job's verdict, or None; polls the store for up to `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            standing = self.standing_verdict or self._read_verdict(
                lambda store: (_read_values_if_set(store, ["verdict"]) or [b""])[0]
            )
            if standing or self._client.failure_reason or time.monotonic() >= deadline:
                return self.standing_verdict
            time.sleep(0.02)

    def _read_verdict(self, verdict: Callable[[dist.Store], bytes]) -> Verdict | None:
        def read_and_acknowledge(store: dist.Store) -> bytes:
            if words := verdict(store):
                store.set(f"heard/{self.rank}", "")
            return words

        if words := self._call_store(read_and_acknowledge):
            self.standing_verdict = Verdict(**json.loads(words))
        return self.standing_verdict

    def wait_until_verdict_is_read(self, deadline: float) -> None:
        """Keep the store available until all ranks have read the verdict or ended, at most until `deadline`.

        Ranks that lose the store earlier would name its host, the only rank that waits, as the failed one.
        """
        if self.rank != _STORE_HOST_RANK or _has_agent_store():
            return
        pending = tuple(range(dist.get_world_size()) if dist.is_initialized() else self._host_and_pid_by_rank)
        while self.standing_verdict and not self._client.failure_reason and time.monotonic() < deadline:
            unread = [rank for rank in pending if self._read_value(f"heard/{rank}") is None]
            pending = tuple(set(unread) - set(self.ended_ranks(tuple(unread))))
            if not pending:
                return
            time.sleep(0.01)

    def final_verdict(self) -> Verdict | None:
        """Return the verdict that a rank raises when it must stop; None if nothing was reported.

        Without a verdict, posts a refusal that some ranks have not read.
        """
        stored = None if self.read() else self._read_value("unheard")
        return self.post(**json.loads(stored)) if stored else self.standing_verdict

    @property
    def is_disconnected(self) -> bool:
        return bool(self._client.connection_error)

    def ended_ranks(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the ranks whose process on this host has ended; other hosts cannot be queried."""
        own_host = socket.gethostname()
        known = [(rank, *self._host_and_pid_by_rank[rank]) for rank in ranks if rank in self._host_and_pid_by_rank]
        return [rank for rank, host, pid in known if host == own_host and not _is_running(pid)]

    def culprit_pid(self) -> int | None:
        if self.standing_verdict is None:
            return None
        host, pid = self._host_and_pid_by_rank.get(self.standing_verdict.rank, ("", 0))
        return pid if host == socket.gethostname() and _is_running(pid) else None

    def record_wait(self, call: str, ranks: Sequence[int] = ()) -> None:
        """Record the operation and ranks that this rank waits for; "" clears the note."""
        num_calls = self.num_calls_by_operation[call.split(" over the ")[0]]
        # The time stamp is the heartbeat.
        note = json.dumps([call, list(ranks), time.monotonic_ns(), num_calls])
        self._call_store(lambda store: store.set(f"waits/{self.rank}", note))

    @contextmanager
    def recorded_wait(self, call: str, ranks: Sequence[int]) -> Iterator[None]:
        """Renew the note of this rank's wait in a thread, while a PyTorch call blocks the caller."""
        wait_ended = threading.Event()
        self._note_renewal_thread = self._note_renewal_thread or WorkerThread("fusedmoe-board")
        renewal = self._note_renewal_thread.submit(partial(self._renew_note, call, ranks, wait_ended))
        try:
            yield
        finally:
            wait_ended.set()
            has_recorded_wait = self._note_renewal_thread.result(renewal)
        # After an error the note stays: this rank must not appear late before it has posted the error.
        if has_recorded_wait:
            self.record_wait("")

    def _renew_note(self, call: str, ranks: Sequence[int], wait_ended: threading.Event) -> bool:
        has_recorded_wait = False
        while not wait_ended.wait(POLL_S):
            has_recorded_wait = True
            self.record_wait(call, ranks)
            self.read()
        return has_recorded_wait

    def wait_notes(self, ranks: Iterable[int]) -> dict[int, WaitNote]:
        """Return the notes of `ranks`, and transitively of the ranks that they wait for, without this rank."""
        notes: dict[int, WaitNote] = {}
        queue = list(ranks)
        while queue:
            rank = queue.pop(0)
            if rank not in notes and rank != self.rank:
                stored = self._read_value(f"waits/{rank}")
                call, peers, heartbeat, num_calls = json.loads(stored) if stored else ("", [], 0, 0)
                notes[rank] = WaitNote(call, heartbeat, num_calls)
                queue += peers
        return notes

    def absent_ranks(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank, note in self.wait_notes(ranks).items() if not note.operation]

    def _read_value(self, key: str) -> bytes | None:
        values = self._call_store(partial(_read_values_if_set, keys=[key]))
        return None if values is None else values[0]

    def _call_store(self, call: Callable[[dist.Store], T], timeout_s: float = REQUEST_TIMEOUT_S) -> T | None:
        """Return `call(store)`; None on timeout or if the connection broke."""

        def with_prefix(client: dist.Store) -> T:
            # Other jobs may use the store. All ranks use the first rank's prefix.
            if not self._store_prefix:
                name = self._store.compare_set(f"fusedmoe/{restart_count()}", "", uuid4().hex)
                self._store_prefix = name.decode()
            return call(dist.PrefixStore(self._store_prefix, client))

        return self._client.request(with_prefix, timeout_s)


def _read_values_if_set(store: dist.Store, keys: list[str]) -> list[bytes] | None:
    # Without waiting: the store's own wait warns on every timeout.
    if not store.check(keys):
        return None
    return store.multi_get(keys)


def restart_count() -> str:
    """Return torchrun's restart count if it hosts the store, which keeps keys of earlier attempts, else "0"."""
    # A store of rank 0 is new in each attempt, and a rejoining node's torchrun has another count than its peers'.
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _has_agent_store() else "0"


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists()


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Maximum length of an exception text; seconds for destructors of a failed process.
_MAX_TEXT_LENGTH, _MAX_DESTRUCTOR_TIME_S = 500, 5.0
_READ_TIMEOUT_S = 2.0


class _UncaughtExceptionHook:
    """A `sys.excepthook` that calls the previous hook, then posts a verdict to all live boards."""

    def __init__(self, before: _ExceptHook) -> None:
        self._previous_hook = before
        self._has_posted = False
        self.boards: WeakSet[Board] = WeakSet()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous_hook(kind, error, traceback)
        self.post(error)

    def post(self, error: BaseException) -> None:
        self._has_posted = True
        deadline = time.monotonic() + _READ_TIMEOUT_S
        for board in list(self.boards):
            with suppress(Exception):
                words = f"{type(error).__name__}: {error}"[:_MAX_TEXT_LENGTH]
                board.final_verdict() or board.post(board.rank, "the program", words)
                board.wait_until_verdict_is_read(deadline)

    def limit_exit_time(self) -> None:
        """After an uncaught exception, end the process in `_MAX_DESTRUCTOR_TIME_S` seconds.

        The timer is native: destructors that block Python do not stop it.
        """
        # Gloo's destructors wait up to half an hour for a missing rank.
        if not self._has_posted:
            return
        try:
            faulthandler.dump_traceback_later(_MAX_DESTRUCTOR_TIME_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        except RuntimeError:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(_MAX_DESTRUCTOR_TIME_S))


def post_uncaught_exceptions(board: Board) -> None:
    """Post uncaught exceptions of the main thread to `board` while it is alive."""
    # Peers would otherwise notice only the ended process or, on other hosts, a timeout.
    if not isinstance(sys.excepthook, _UncaughtExceptionHook):
        sys.excepthook = _UncaughtExceptionHook(sys.excepthook)
        # Registered early, so it runs after most other handlers.
        atexit.register(sys.excepthook.limit_exit_time)
    sys.excepthook.boards.add(board)


def post_fatal_exception(error: BaseException) -> None:
    if isinstance(sys.excepthook, _UncaughtExceptionHook):
        sys.excepthook.post(error)
