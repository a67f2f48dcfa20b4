"""What a run has found so far, as lines of JSON: a process that hangs or dies takes nothing with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Spool:
    """Records in order, each with its event and time; those already in the file are there from the start.

    Events: "environment", "ceilings", "row", "skipped", "done" (a suite with a shape), "begin" and "end" of work.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.records: list[Record] = []
        if path is not None and path.exists():
            *lines, _ = path.read_text().split("\n")  # the last is empty, or still being written
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
        """Says what is being done, in case nothing is ever heard again."""
        self.add("begin", suite=suite, shape=shape, name=name)
        try:
            yield
        finally:
            self.add("end", suite=suite, shape=shape, name=name)

    def unfinished(self) -> list[Record]:
        """The work that has begun and not ended, oldest first."""
        ended = [_work(record) for record in self.of("end")]
        begun = self.of("begin")
        return [record for record in begun if _work(record) not in ended]

    def is_done(self, suite: str, shape: str) -> bool:
        return any((record["suite"], record["shape"]) == (suite, shape) for record in self.of("done"))


def _work(record: Record) -> tuple[str, str, str]:
    return record["suite"], record["shape"], record["name"]
