"""Cost models: how long collectives and matrix products take, as straight lines through measured points.

A time is α + β·n (FSMoE Eq. 1): α seconds to start, β seconds for each unit of n. n counts bytes for a collective or
a copy and FLOP for a matrix product, everywhere in this package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import LINKS, Task, TaskKind

#: What a cost model has lines for: a collective and the group that it runs in, matrix products, or copies of rows in
#: another order.
LINES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp", "gemm", "copy")

#: Seconds for each byte or FLOP of a line that rises with neither: no schedule should believe that size is free.
LEAST_BETA = 1e-15

_FORMAT = "fusedmoe-costs"
_VERSION = 1


class Costs(Protocol):
    """Everything that a simulation has to know beside the plan."""

    @property
    def contention(self) -> float:
        """The speed of a link's task while the other link is in use too, as a share of its speed alone; (0, 1]."""

    def seconds(self, plan: Plan) -> Mapping[Task, float]:
        """The duration of each task of the plan when it has its resources for itself."""


@dataclass(frozen=True)
class Durations:
    """Costs that are given task by task."""

    given: Mapping[Task, float]
    contention: float = 1.0

    def seconds(self, plan: Plan) -> Mapping[Task, float]:
        return self.given


@dataclass(frozen=True)
class Line:
    """alpha_s + beta_s·n seconds. `r2` says how well the line fits what was measured (1: perfectly)."""

    alpha_s: float
    beta_s: float
    r2: float | None = None

    def seconds(self, n: float) -> float:
        return self.alpha_s + self.beta_s * n

    @property
    def per_s(self) -> float:
        """Bytes or FLOP of something large in a second; a number too large to matter where size is free."""
        return 1 / max(self.beta_s, LEAST_BETA)

    def amount(self, seconds: float) -> float:
        """Returns the bytes or FLOP of this time; 0 where it is too short to start (F14), infinite where size is
        free."""
        # Nothing is done before the start is over.
        left_s = seconds - self.alpha_s
        if left_s < 0:
            return 0.0
        return left_s / self.beta_s if self.beta_s else math.inf


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line of least squares through points (n, seconds), with its r².

    Raises `ConfigError` for points of fewer than two different n, or that are not finite.
    """
    n, seconds = np.array(sorted(points), dtype=np.float64).reshape(-1, 2).T
    if len(set(n)) < 2 or not np.isfinite([n, seconds]).all():
        raise ConfigError("cost fit: needs finite points of at least two different sizes; measure more sizes")
    from_mean, above_mean = n - n.mean(), seconds - seconds.mean()
    beta = float(from_mean @ above_mean / (from_mean @ from_mean))
    alpha = float(seconds.mean() - beta * n.mean())
    spread = float(above_mean @ above_mean)
    left = seconds - (alpha + beta * n)
    return Line(alpha, beta, 1.0 - float(left @ left) / spread if spread else 1.0)


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Returns the line of least squares.

    Where noise in the longest times makes it start or grow below zero, the one whose relative errors are least, among
    those that do neither.
    """
    line = fit(points)
    if line.alpha_s >= 0 and line.beta_s >= LEAST_BETA:
        return line
    # Imported here: hardly any fit needs it, and it is slow to import.
    from scipy.optimize import nnls

    n, seconds = np.array(points).T
    (alpha, beta), _ = nnls(np.stack([1 / seconds, n / n.max() / seconds], 1), np.ones(len(n)))
    alpha, beta = float(alpha), max(LEAST_BETA, float(beta / n.max()))
    left, spread = seconds - (alpha + beta * n), seconds - seconds.mean()
    return Line(alpha, beta, 1.0 - float(left @ left) / float(spread @ spread) if spread.any() else 1.0)


@dataclass(frozen=True)
class FusedCosts:
    """Costs of fused operations beside what the lines say of bytes and FLOP (`workload.one_sided_s`).

    `tile_rows`: rows that one signal stands for; a kernel computes a tile when so many rows are there, and sends them
    on when they are computed. It follows from the kernels. `signal_s`: by link ("intra", "inter"), seconds from the end
    of a tile's rows on the link to when the kernel that waits for them goes on, as a put of a row and a wait for it
    measure it. A link without a signal has no fused operations.

    Raises `ConfigError` for a link that is not there, and numbers that cannot be.
    """

    tile_rows: int
    signal_s: Mapping[str, float]

    def __post_init__(self) -> None:
        if type(self.tile_rows) is not int or self.tile_rows < 1:
            raise ConfigError(f"fused costs: tile_rows must be an integer from 1, not {self.tile_rows!r}")
        for link, seconds in self.signal_s.items():
            if link not in LINKS.values():
                raise ConfigError(f"fused costs: {link!r} is no link; signals are on intra and inter")
            if not _is_time(seconds):
                raise ConfigError(f"fused costs: a signal on {link} cannot take {seconds!r} s")


class Sample(NamedTuple):
    """A part of a layer or step that was measured.

    `chunks`: the number of chunks that the part went in; of a gradient-all-reduce its bytes. `apart`: weight gradients
    were W tasks.
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
        """Joins both; where both know a sample, the right one's counts."""
        return Observed({**self.seconds, **other.seconds}, other.rows or self.rows)

    def get(self, kind: str, phase: str | None, apart: bool = False) -> dict[int, float]:
        """Returns the seconds of a kind of tasks by the number of chunks."""
        wanted = (kind, phase, apart)
        return {of.chunks: s for of, s in self.seconds.items() if (of.kind, of.phase, of.apart) == wanted}

    def as_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {"rows": self.rows, "samples": [[*sample, seconds] for sample, seconds in self.seconds.items()]}

    @classmethod
    def from_dict(cls, data: Any) -> Observed:
        """Reads what `as_dict` gave. Raises `ConfigError` for anything else."""
        try:
            rows = None if data["rows"] is None else float(data["rows"])
            found = {}
            for kind, phase, chunks, apart, seconds in data["samples"]:
                kind = TaskKind.OTHER if kind == TaskKind.GATE else str(kind)  # as older files call it
                found[Sample(kind, phase, int(chunks), bool(apart))] = float(seconds)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"observed: a field is missing or no number: {error}") from error
        return cls(found, rows)


@dataclass(frozen=True)
class CostModel:
    """The lines of one machine, by the names in `LINES`, and the contention between its two kinds of links.

    `contention`: when a collective inside the node and one between nodes run at the same time, each goes on at this
    share of its own speed. `machine` says what was measured, for whoever reads it. `fused`: None for a machine without
    fused operations, or where nothing is known of them: then no layer chooses them by cost. `tiled`: experts' gradients
    are computed tile by tile, in the cache, as on a CPU. Activations that wait for W tasks are
    then written and read for these alone; where it is not so, both ways of computing them do it. `task_s`: what the
    executor takes for a task, whatever it does. `observed`: what the parts of layers took where they ran, by
    `Workload.shapes`; it goes before the lines.

    Raises `ConfigError` for an unknown line and a contention outside (0, 1].
    """

    lines: Mapping[str, Line] = field(default_factory=dict)
    contention: float = 1.0
    machine: str = ""
    fused: FusedCosts | None = None
    tiled: bool = False
    task_s: float = 0.0
    observed: Mapping[str, Observed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.lines) - set(LINES))
        if unknown:
            raise ConfigError(f"cost model: {unknown[0]!r} is not one of {', '.join(LINES)}")
        check_contention(self.contention)

    def line(self, name: str) -> Line:
        """The line of that name. Raises `ConfigError` where the model has none."""
        try:
            return self.lines[name]
        except KeyError:
            raise ConfigError(f"cost model: nothing is known of {name!r}; measure it") from None

    def to_json(self) -> str:
        """Indented JSON; `from_json` gives an equal model back."""
        lines = {name: vars(line) for name, line in self.lines.items()}
        head = {"format": _FORMAT, "version": _VERSION, "machine": self.machine, "contention": self.contention}
        fused = {} if self.fused is None else {"fused": asdict(self.fused)}
        tiled = {"tiled": True} if self.tiled else {}
        seen = {shapes: found.as_dict() for shapes, found in self.observed.items()}
        more = {**fused, **tiled, "task_s": self.task_s, **({"observed": seen} if seen else {})}
        return json.dumps({**head, "lines": lines, **more}, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> CostModel:
        """The model written by `to_json`. Raises `ConfigError` for anything else."""
        data: Any = parse_json(source, "cost model")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f'cost model: the JSON is not one (no "format": "{_FORMAT}", "version": {_VERSION})')
        try:
            lines = {name: Line(**line) for name, line in data["lines"].items()}
            fused = FusedCosts(**data["fused"]) if "fused" in data else None
            for name, line in lines.items():
                if not (_is_time(line.alpha_s) and _is_time(line.beta_s)):
                    raise ConfigError(f"cost model: {name!r} cannot take {line.alpha_s!r} and {line.beta_s!r} s")
                if line.r2 is not None and not _is_time(abs(line.r2)):
                    raise ConfigError(f"cost model: r2 = {line.r2!r} of {name!r} cannot be")
            if not isinstance(data["machine"], str):
                raise ConfigError(f"cost model: a machine is told in words, not {data['machine']!r}")
            seen = {shapes: Observed.from_dict(of) for shapes, of in data.get("observed", {}).items()}
            if not _is_time(task_s := data.get("task_s", 0.0)):
                raise ConfigError(f"cost model: a task cannot take {task_s!r} s")
            return cls(lines, data["contention"], data["machine"], fused, data.get("tiled") is True, task_s, seen)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"cost model: a field is missing or not known: {error}") from error


def _is_time(value: Any) -> bool:
    """Returns True for a number of seconds that leaves room for sums and products."""
    return isinstance(value, (int, float)) and 0 <= value <= 1e9


def check_contention(value: float) -> None:
    """Raises `ConfigError` unless 0 < value ≤ 1, and not so little that no sum of times has room for it."""
    if not (isinstance(value, (int, float)) and 1e-9 <= value <= 1):
        raise ConfigError(f"contention is a share of the speed, more than 0 and at most 1, not {value!r}")
