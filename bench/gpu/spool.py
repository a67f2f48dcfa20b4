"""Incremental results of a run as JSON lines, which survive a hang or crash of a process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]
#: The library's own layer; all other variants can be left out.
NAME = "fusedmoe"


class Spool:
    """Records in order, with event and time, including those already in the file.

    Events: "environment", "ceilings", "row", "skipped", "done" and "failed" (a suite with a shape), "begin" and "end"
    of work, "lost" (a variant has cost the process its GPU), "wrong" (a variant of ours has wrong results), "sign" (of
    life). A suite's work on a shape is named by the suite.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.records: list[Record] = []
        if path is not None and path.exists():
            *lines, _ = path.read_text().split("\n")  # the last is empty or incomplete
            self.records = [json.loads(line) for line in lines]

    def add(self, event: str, **record: Any) -> None:
        record = {"event": event, "time": time.time(), **record}
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of(self, event: str) -> list[Record]:
        return [record for record in self.records if record["event"] == event]

    @contextmanager
    def work(self, suite: str, shape: str, name: str) -> Iterator[None]:
        """Record the current work, in case the process never reports again."""
        self.add("begin", suite=suite, shape=shape, name=name)
        try:
            yield
        finally:
            self.add("end", suite=suite, shape=shape, name=name)

    def unfinished(self) -> list[Record]:
        """Return work that began and did not end, oldest first."""
        ended = [_work(record) for record in self.of("end")]
        begun = self.of("begin")
        return [record for record in begun if _work(record) not in ended]

    def left_out(self) -> set[str]:
        """Return the variants that have hung or have cost a process its GPU."""
        return {work["name"] for work in [*self.unfinished(), *self.of("lost")] if work["name"] != work["suite"]}

    def stops(self, suite: str, shape: str) -> int:
        """Return how often a process ended at this shape for a reason that the next one cannot leave out."""
        here = [work["name"] for work in self.unfinished() if (work["suite"], work["shape"]) == (suite, shape)]
        lost = [work["name"] for work in self.of("lost") if (work["suite"], work["shape"]) == (suite, shape)]
        avoided = {*here, *lost} - {suite, NAME}
        return max(0, here.count(suite) - len(avoided))

    def is_done(self, suite: str, shape: str) -> bool:
        return self._has("done", suite, shape)

    def is_open(self, suite: str, shape: str) -> bool:
        """Return whether a shape is neither done nor failed; one at which a process ended is retried once."""
        closed = any(self._has(event, suite, shape) for event in ("done", "failed"))
        return not closed and self.stops(suite, shape) < 2

    def is_fresh(self, suite: str, shape: str) -> bool:
        """Return whether a shape is open and no process has ended at it."""
        return self.is_open(suite, shape) and not self.stops(suite, shape)

    def _has(self, event: str, suite: str, shape: str) -> bool:
        return any((record["suite"], record["shape"]) == (suite, shape) for record in self.of(event))


def _work(record: Record) -> tuple[str | None, str | None, str]:
    return record.get("suite"), record.get("shape"), record["name"]
