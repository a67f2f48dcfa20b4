"""How ranks learn of each other's failures: a board in the job's store, and who is still alive.

A rank that fails writes one verdict to the board (the first writer wins). A rank that waits reads the board between
short waits, so that it ends with an error that names the rank at fault instead of waiting for a peer that will never
come. Nothing here sends data: the board works when the data path does not.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

_PREFIX = "fusedmoe"


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
        self._store.set(f"alive/{rank}", f"{socket.gethostname()} {os.getpid()}")

    def post(self, rank: int, operation: str, message: str) -> Verdict:
        """Writes a verdict unless one stands already; returns the one that stands."""
        own = Verdict(rank, operation, message)
        try:
            standing = self._store.compare_set("verdict", "", json.dumps(asdict(own)))
            return Verdict(**json.loads(standing))
        except (RuntimeError, ValueError):  # the store went with the rank that hosted it
            return own

    def read(self, wait_s: float = 0.0) -> Verdict | None:
        """The standing verdict, or None; looks again until `wait_s` seconds have passed."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                if self._store.check(["verdict"]):
                    return Verdict(**json.loads(self._store.get("verdict")))
            except (RuntimeError, ValueError):
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def gone(self, ranks: tuple[int, ...]) -> list[int]:
        """Those of `ranks` whose process on this host has ended (other hosts cannot be asked)."""
        host = socket.gethostname()
        dead: list[int] = []
        for rank in ranks:
            try:
                if not self._store.check([f"alive/{rank}"]):
                    continue
                name, pid = self._store.get(f"alive/{rank}").decode().rsplit(" ", 1)
            except (RuntimeError, ValueError):
                return dead
            if name == host and not _runs(int(pid)):
                dead.append(rank)
        return dead


def _runs(pid: int) -> bool:
    """True while the process exists and is not a zombie that its parent has yet to collect."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat.read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists()
