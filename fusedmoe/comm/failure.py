"""How ranks learn of each other's failures: a board in the job's store, and who is still alive.

A rank that fails writes one verdict to the board (the first writer wins). A rank that waits reads the board between
short waits, so that it ends with an error that names the rank at fault instead of waiting for a peer that will never
come. It also notes there what it waits for, so that a rank whose patience ends can tell who is missing. Nothing here
sends data: the board works when the data path does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fusedmoe.comm.store_line import PATIENCE_S, line_to
from fusedmoe.errors import RankError
from fusedmoe.threads import Helper

T = TypeVar("T")

ORDER = "Every rank of a group must call the same operations in the same order"
_CURE = "The process was stopped, has ended or cannot be reached: let it go on, or start the job again; see its log"
# Between two looks at the board. Short enough that a failure is known at once, long enough to cost nothing.
LOOK_S = 0.25


@dataclass(frozen=True)
class Verdict:
    """What stopped the job: the rank at fault, what it was doing and what it said."""

    rank: int
    operation: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed in {self.operation}: {self.message}"


class Note(NamedTuple):
    """What a rank waits for; two looks at a rank that goes on waiting find two marks. `often`: it had called that."""

    what: str
    mark: int
    often: int = 0


# In the name of an operation.
BACKWARD = "in the backward pass"
# The rank whose process hosts the store, where no launcher does.
_HOST = 0
_EXIT_S = 10.0
# How long a rank may wait without renewing its note: a few looks.
RENEWED_S = 1.0


def stopped(earlier: dict[int, Note], now: dict[int, Note]) -> list[int]:
    """Who has not renewed a note: that process, or its host, has stopped while it was waiting."""
    return [rank for rank, note in now.items() if note.what and earlier.get(rank) == note]


def order_of_blame(waiting: Mapping[int, Note]) -> list[int]:
    """Ranks that wait for different operations, by who has probably left the order of all.

    First those whose operation the fewest wait for. Where these are as many as the others: who has missed a backward
    pass, since others are in it; then who calls what it has seldom called before (it saves, or closes its topology).
    """
    operations = {rank: note.what.split(" over the ")[0] for rank, note in waiting.items()}
    many = Counter(operations.values())
    return sorted(
        waiting, key=lambda rank: (many[operations[rank]], BACKWARD in operations[rank], waiting[rank].often, -rank)
    )


# By the store of a job: host and process of each rank.
_PROCESSES: WeakKeyDictionary[dist.Store, dict[int, tuple[str, int]]] = WeakKeyDictionary()


class Board:
    """The failure board of a job, kept in the store that `torch.distributed` was initialised with."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._line = line_to(store)
        self._store = store  # its host may be this process
        self._prefix = ""
        self._rank = rank
        self.standing: Verdict | None = None  # as far as this rank knows; it stays
        self._unheard = False
        #: How long a rank may take to be gone, or to say why, once its connections broke: it closes them before.
        self.exit_s = _EXIT_S
        # Asked for when the ranks meet, on any board: the store may be gone when it is needed.
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
        """Waits until all `ranks` are here, as often as each comes; returns what each of them brought, as JSON has it.

        `operation`, `cure`: what is said of it where some do not come.

        Raises:
            RankError: some rank failed, or did not come in time.
        """
        place = hashlib.sha1(repr(tuple(ranks)).encode()).hexdigest()
        own = json.dumps([socket.gethostname(), os.getpid(), facts])

        def come(store: dist.Store) -> dict[int, str]:
            number = store.add(f"meetings/{place}/{self._rank}", 1)  # some may have been with others more often
            keys = {rank: f"meeting/{place}/{number}/{rank}" for rank in ranks}
            store.set(keys[self._rank], own)
            store.delete_key(f"meeting/{place}/{number - 2}/{self._rank}")  # who came to the next one has read it
            return keys

        self.calls[operation] += 1
        deadline, pause = time.monotonic() + timeout_s, 0.005
        keys = self._ask(come, timeout_s) or {}
        everyone, noted = partial(_values, keys=list(keys.values())), False
        while (there := self._ask(everyone) if keys else None) is None:
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            said: Verdict | str | None = self.read()
            if said is None and pause == LOOK_S and (dead := self.gone(tuple(ranks))):
                said = self.post(
                    dead[0], operation, "its process ended (an error, killed, or out of memory); see its log"
                )
            if said is None and (self._line.broke or time.monotonic() > deadline):
                missing = [rank for rank, key in keys.items() if not self._ask(partial(_values, keys=[key]))]
                said = self._not_met(operation, missing, timeout_s, cure)
            if said is not None:
                raise RankError(f"rank {self._rank}: {operation} ended because {said}")
            if pause == LOOK_S:
                self.waits(operation, ranks)
                noted = True
        if noted:
            self.waits("")
        brought = [json.loads(entry) for entry in there]
        self._processes |= {rank: (host, pid) for rank, (host, pid, _) in zip(ranks, brought, strict=True)}
        return [facts for _, _, facts in brought]

    def _not_met(self, operation: str, missing: list[int], timeout_s: float, cure: str) -> Verdict | str:
        """Why `missing` ranks have not come to a meeting: they are late, or somebody has left the order of all."""
        waiting, text = self.waiting(missing), f"did not come within {timeout_s:.0f} s; see its log, or {cure}"
        if late := [rank for rank, note in waiting.items() if not note.what]:
            return self.blame(late[0], operation, text)
        waiting = {rank: note for rank, note in waiting.items() if note.what != operation}
        if not waiting:
            return self.blame((missing or [self._rank])[0], operation, text)
        waiting[self._rank] = Note(operation, 0, self.calls[operation])
        places = "; ".join(f"rank {rank} waits for {note.what}" for rank, note in sorted(waiting.items()))
        text = f"not all ranks came within {timeout_s:.0f} s: {places}. {ORDER}; or {cure}"
        return self.blame(order_of_blame(waiting)[0], operation, text)

    def forget_addresses(self) -> None:
        """Takes this rank's address for the default group from torchrun's store, once all ranks are connected.

        PyTorch leaves it there: ranks of the next attempt would wait for a connection to a process that has ended.
        """
        if _agent():
            self._ask(lambda _: self._store.delete_key(f"cpu//0/{self._rank}"))

    def post(self, rank: int, operation: str, message: str) -> Verdict:
        """Writes a verdict unless one stands already; returns the one that stands."""
        own = Verdict(rank, operation, message)
        words = json.dumps(asdict(own))
        return self._learn(lambda store: store.compare_set("verdict", "", words)) or own

    def blame(self, rank: int, operation: str, message: str) -> str:
        """`post` of another rank, which did not come. It names who hosts the store where that does not answer."""
        said = self.post(rank, operation, message)
        return f"{_host()}: {self._line.trouble}. {_CURE}" if self._line.trouble else str(said)

    def post_own(self, operation: str, message: str) -> Verdict:
        """`post` of this rank's own failure."""
        return self.post(self._rank, operation, message)

    def refuse(self, operation: str, message: str, heard_by: int) -> None:
        """Notes why this rank takes no part in what `heard_by` ranks do together, and hear of from that.

        It is over once they have raised it. Where these are not all of the job's, the rest finds it when it has waited
        in vain (`explain`), until this rank has gone on.
        """
        own = json.dumps(asdict(Verdict(self._rank, operation, message)))
        key = f"refusal/{self._rank}"
        self._unheard = heard_by < dist.get_world_size()

        def note(store: dist.Store) -> None:
            store.set(key, own)
            if self._unheard:
                store.set("unheard", own)
            store.get(key)  # an answer: it is there from now on

        self._ask(note)

    def go_on(self) -> None:
        """This rank takes part again."""
        if self._unheard:
            self._unheard = False
            self._ask(lambda store: store.set("unheard", ""))

    def refusal(self, rank: int) -> Verdict:
        """The last that a rank noted."""
        noted = self._ask(partial(_values, keys=[f"refusal/{rank}"]))
        return Verdict(**json.loads(noted[0])) if noted else Verdict(rank, "something", "see its log")

    def read(self, wait_s: float = 0.0) -> Verdict | None:
        """The standing verdict, or None; looks again until `wait_s` seconds have passed."""
        deadline = time.monotonic() + wait_s
        while True:
            standing = self.standing or self._learn(lambda store: (_values(store, ["verdict"]) or [b""])[0])
            if standing or self._line.trouble or time.monotonic() >= deadline:
                return self.standing
            time.sleep(0.02)

    def _learn(self, verdict: Callable[[dist.Store], bytes]) -> Verdict | None:
        """The standing verdict, of which this rank has heard from now on."""

        def hear(store: dist.Store) -> bytes:
            if found := verdict(store):
                store.set(f"heard/{self._rank}", "")
            return found

        if found := self._ask(hear):
            self.standing = Verdict(**json.loads(found))
        return self.standing

    def linger(self, deadline: float) -> None:
        """Waits, where the store may end with this process, until the others have heard of the verdict or have ended.

        Who finds no store, and had not looked at the board before, takes its host for the rank at fault.
        """
        if self._rank != _HOST or _agent():
            return
        silent = tuple(range(dist.get_world_size()) if dist.is_initialized() else self._processes)
        while self.standing and not self._line.trouble and time.monotonic() < deadline:
            unheard = [rank for rank in silent if self._ask(partial(_values, keys=[f"heard/{rank}"])) is None]
            silent = tuple(rank for rank in unheard if rank not in self.gone(tuple(unheard)))
            if not silent:
                return
            time.sleep(0.01)

    def explain(self) -> Verdict | None:
        """The standing verdict, for who cannot go on. A refusal that some have not heard of becomes it then."""
        noted = None if self.read() else self._ask(partial(_values, keys=["unheard"]))
        return self.post(**json.loads(noted[0])) if noted and noted[0] else self.standing

    @property
    def cut_off(self) -> bool:
        """Whether the connection to the store broke: nobody's verdict will be read any more."""
        return bool(self._line.broke)

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        """Those of `ranks` whose process on this host has ended (other hosts cannot be asked)."""
        here = socket.gethostname()
        known = [(rank, *self._processes[rank]) for rank in ranks if rank in self._processes]
        return [rank for rank, host, pid in known if host == here and not _runs(pid)]

    def at_fault(self) -> int | None:
        """The process that the standing verdict names, if it runs on this host; None otherwise."""
        host, pid = self._processes.get(self.standing.rank, ("", 0)) if self.standing is not None else ("", 0)
        return pid if host == socket.gethostname() and _runs(pid) else None

    def waits(self, what: str, ranks: Sequence[int] = ()) -> None:
        """Notes what this rank waits for, with which ranks; at each look again, so that all see it live; "" at last."""
        often = self.calls[what.split(" over the ")[0]]
        note = json.dumps([what, list(ranks), time.monotonic_ns(), often])  # the time makes each another one
        self._ask(lambda store: store.set(f"waits/{self._rank}", note))

    @contextmanager
    def noted(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """A context around a wait of PyTorch's own, which looks at no board: a thread looks and renews the note.

        After an error the note stays: this rank tells of it next, and is not late.
        """
        over = threading.Event()
        self._looker = self._looker or Helper("fusedmoe-board")
        looking = self._looker.begin(partial(self._renew, what, ranks, over))
        try:
            yield
        finally:
            over.set()
            noted = self._looker.result(looking)
        if noted:
            self.waits("")

    def _renew(self, what: str, ranks: Sequence[int], over: threading.Event) -> bool:
        noted = False
        while not over.wait(LOOK_S):
            noted = True
            self.waits(what, ranks)
            self.read()
        return noted

    def waiting(self, ranks: Iterable[int]) -> dict[int, Note]:
        """What `ranks`, this one aside, wait for, and what those wait for that they wait for; "" for none."""
        found: dict[int, Note] = {}
        queue = list(ranks)
        while queue:
            rank = queue.pop(0)
            if rank not in found and rank != self._rank:
                noted = self._ask(partial(_values, keys=[f"waits/{rank}"]))
                what, others, mark, often = json.loads(noted[0]) if noted else ("", [], 0, 0)
                found[rank] = Note(what, mark, often)
                queue += others
        return found

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks`, and of those for whom these wait, that wait for nobody: they are late, or were stopped."""
        return [rank for rank, note in self.waiting(ranks).items() if not note.what]

    def _ask(self, question: Callable[[dist.Store], T], patience_s: float = PATIENCE_S) -> T | None:
        """What the store answers; None if it does not in time."""

        def in_own_place(line: dist.Store) -> T:
            if not self._prefix:  # all ranks get that of the first; what the line leads to may serve other jobs, too
                name = self._store.compare_set(f"fusedmoe/{attempt()}", "", uuid4().hex)
                self._prefix = name.decode()
            return question(dist.PrefixStore(self._prefix, line))

        return self._line.ask(in_own_place, patience_s)


def _values(store: dist.Store, keys: list[str]) -> list[bytes] | None:
    """What the store has under all of these keys; None, at once, where one of them is missing."""
    if not store.check(keys):  # its own wait would warn at each time-out
        return None
    values: list[bytes] = store.multi_get(keys)
    return values


def _host() -> str:
    """Who hosts the job's store, and that this failed."""
    return f"{'torchrun on the host of ' if _agent() else ''}rank {_HOST} failed in hosting the job's store"


def attempt() -> str:
    """The number of restarts by torchrun, whose store has kept what the ranks of earlier attempts have written."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent() -> bool:
    """Whether torchrun hosts the store, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _runs(pid: int) -> bool:
    """True while the process exists and is not a zombie that its parent has yet to collect."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists()
