"""What the parts of steps took where they ran, as plain numbers: by kind of task, pass and number of chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusedmoe.errors import ConfigError


class Sample(NamedTuple):
    """What was measured.

    `chunks`: in how many the part went; of a gradient-all-reduce its bytes. `apart`: weight gradients were W tasks.
    """

    kind: str
    phase: str | None
    chunks: int = 1
    apart: bool = False


@dataclass(frozen=True)
class Observed:
    """Seconds of each sample, for layers whose experts compute so many rows in a pass (None: as those they are for).

    Raises `ConfigError` for a time that is none.
    """

    seconds: Mapping[Sample, float] = field(default_factory=dict)
    rows: float | None = None

    def __post_init__(self) -> None:
        for sample, seconds in self.seconds.items():
            if not 0 <= seconds <= 1e9 or sample.chunks < 1:
                raise ConfigError(f"observed: {sample.kind} in {sample.chunks} chunks cannot take {seconds!r} s")

    def __or__(self, other: Observed) -> Observed:
        """Both; where both know a sample, the other's."""
        return Observed({**self.seconds, **other.seconds}, other.rows or self.rows)

    def get(self, kind: str, phase: str | None, apart: bool = False) -> dict[int, float]:
        """Seconds by the number of chunks."""
        wanted = (kind, phase, apart)
        return {of.chunks: s for of, s in self.seconds.items() if (of.kind, of.phase, of.apart) == wanted}

    def as_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {"rows": self.rows, "samples": [[*sample, seconds] for sample, seconds in self.seconds.items()]}

    @classmethod
    def from_dict(cls, data: Any) -> Observed:
        """What `as_dict` gave. Raises `ConfigError` for anything else."""
        try:
            rows = None if data["rows"] is None else float(data["rows"])
            found = {}
            for kind, phase, chunks, apart, seconds in data["samples"]:
                kind = "other" if kind == "gate" else str(kind)  # as older files call it
                found[Sample(kind, phase, int(chunks), bool(apart))] = float(seconds)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"observed: a field is missing or no number: {error}") from error
        return cls(found, rows)
