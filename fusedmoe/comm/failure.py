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
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fusedmoe.errors import RankError

T = TypeVar("T")

_PREFIX = "fusedmoe"
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


class Board:
    """The failure board of a job, kept in the store that `torch.distributed` was initialised with."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._rank = rank
        # Asked for when the ranks meet: the store may be gone when it is needed.
        self._processes: dict[int, tuple[str, int]] = {}
        self._lost = False

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
        try:
            brought = [json.loads(entry) for entry in self._meet(ranks, facts, timeout_s, operation, cure)]
        except dist.DistError as error:
            reason = f"the job's store does not answer ({error}); see the log of the rank or agent that hosts it"
            raise RankError(f"rank {self._rank}: {operation}: {reason}") from error
        self._processes |= {rank: (host, pid) for rank, (host, pid, _) in zip(ranks, brought, strict=True)}
        return [own for _, _, own in brought]

    def _meet(self, ranks: Sequence[int], facts: object, timeout_s: float, operation: str, cure: str) -> list[bytes]:
        place = hashlib.sha1(repr(tuple(ranks)).encode()).hexdigest()
        number = self._store.add(f"meetings/{place}/{self._rank}", 1)  # some may have been with others more often
        key_of = {rank: f"meeting/{place}/{number}/{rank}" for rank in ranks}
        keys = list(key_of.values())
        self._store.set(key_of[self._rank], json.dumps([socket.gethostname(), os.getpid(), facts]))
        deadline, pause = time.monotonic() + timeout_s, 0.005
        while not self._store.check(keys):  # its own wait would warn at each time-out
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
            verdict = self.read()
            if verdict is None and time.monotonic() > deadline:
                missing = [rank for rank in ranks if not self._store.check([key_of[rank]])]
                text = f"did not come within {timeout_s:.0f} s; see its log, or {cure}"
                verdict = self.post((missing or [self._rank])[0], operation, text)
            if verdict is not None:
                raise RankError(f"rank {self._rank}: {operation} ended because {verdict}")
        entries: list[bytes] = self._store.multi_get(keys)
        return entries

    def post(self, rank: int, operation: str, message: str) -> Verdict:
        """Writes a verdict unless one stands already; returns the one that stands."""
        own = Verdict(rank, operation, message)
        standing = self._ask(lambda: self._store.compare_set("verdict", "", json.dumps(asdict(own))))
        return own if standing is None else Verdict(**json.loads(standing))

    def post_own(self, operation: str, message: str) -> Verdict:
        """`post` of this rank's own failure."""
        return self.post(self._rank, operation, message)

    def read(self, wait_s: float = 0.0) -> Verdict | None:
        """The standing verdict, or None; looks again until `wait_s` seconds have passed."""
        deadline = time.monotonic() + wait_s
        while True:
            if self._ask(lambda: self._store.check(["verdict"])):
                standing = self._ask(lambda: self._store.get("verdict"))
                return None if standing is None else Verdict(**json.loads(standing))
            if self._lost or time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        """Those of `ranks` whose process on this host has ended (other hosts cannot be asked)."""
        here = socket.gethostname()
        known = [(rank, *self._processes[rank]) for rank in ranks if rank in self._processes]
        return [rank for rank, host, pid in known if host == here and not _runs(pid)]

    def waits(self, what: str, ranks: Sequence[int] = ()) -> None:
        """Notes what this rank waits for, with which ranks; "" when it goes on."""
        self._ask(lambda: self._store.set(f"waits/{self._rank}", json.dumps([what, list(ranks)])))

    def waiting(self, ranks: Iterable[int]) -> dict[int, str]:
        """What `ranks`, this one aside, wait for, and what those wait for that they wait for; "" for none."""
        found: dict[int, str] = {}
        queue = list(ranks)
        while queue:
            rank = queue.pop(0)
            if rank not in found and rank != self._rank:
                note = self._ask(partial(self._get, f"waits/{rank}"))
                found[rank], others = json.loads(note) if note else ("", [])
                queue += others
        return found

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None if it went with the rank that hosted it, which is asked no more: that is noisy."""
        if self._lost:
            return None
        try:
            return question()
        except dist.DistError:
            self._lost = True
            return None


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
