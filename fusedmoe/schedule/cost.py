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

#: Lines of a cost model: collectives and the groups that they run in, matrix products, copies of rows in another order.
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
        """Returns the bytes or FLOP of this time; 0 where it is too short to start (F14)."""
        left_s = seconds - self.alpha_s
        if left_s < 0:
            return 0.0
        return left_s / self.beta_s if self.beta_s else math.inf


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """Returns the line of least squares through points (n, seconds), with its r².

    Raises `ConfigError` for points of fewer than two different n, or that are not finite.
    """
    n, seconds = np.array(sorted(points), dtype=np.float64).reshape(-1, 2).T
    if len(set(n)) < 2 or not np.isfinite([n, seconds]).all():
        raise ConfigError("cost fit: needs finite points of at least two different sizes; measure more sizes")
    from_mean, above_mean = n - n.mean(), seconds - seconds.mean()
    beta = float(from_mean @ above_mean / (from_mean @ from_mean))
    return _line(float(seconds.mean() - beta * n.mean()), beta, n, seconds)


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Returns the line of least squares; where that starts or grows below zero, the best that does neither."""
    line = fit(points)
    if line.alpha_s >= 0 and line.beta_s >= LEAST_BETA:
        return line
    # Noise in the longest times did that, so now relative errors count. Imported here: hardly any fit needs it, and it
    # is slow to import.
    from scipy.optimize import nnls

    n, seconds = np.array(points).T
    (alpha, beta), _ = nnls(np.stack([1 / seconds, n / n.max() / seconds], 1), np.ones(len(n)))
    return _line(float(alpha), max(LEAST_BETA, float(beta / n.max())), n, seconds)


def _line(alpha: float, beta: float, n: Any, seconds: Any) -> Line:
    left, above_mean = seconds - (alpha + beta * n), seconds - seconds.mean()
    return Line(alpha, beta, 1.0 - float(left @ left) / float(above_mean @ above_mean) if above_mean.any() else 1.0)


@dataclass(frozen=True)
class FusedCosts:
    """Costs of fused operations beside what the lines say of bytes and FLOP (`workload.one_sided_s`).

    `tile_rows`: rows that one signal stands for, which follows from the kernels. `signal_s`: by link ("intra",
    "inter"), seconds from the end of a tile's rows on the link to when the kernel that waits for them goes on. A link
    without a signal has no fused operations.

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
    """A part of a layer or step that was measured."""

    kind: str
    phase: str | None
    chunks: int = 1  # that the part went in; of a gradient-all-reduce its bytes
    apart: bool = False  # weight gradients were W tasks


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
        return {sample.chunks: s for sample, s in self.seconds.items() if sample == (kind, phase, sample.chunks, apart)}

    def as_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON."""
        return {"rows": self.rows, "samples": [[*sample, seconds] for sample, seconds in self.seconds.items()]}

    @classmethod
    def from_dict(cls, data: Any) -> Observed:
        """Reads what `as_dict` gave. Raises `ConfigError` for anything else."""
        try:
            rows = None if data["rows"] is None else float(data["rows"])
            seconds = {}
            for kind, phase, chunks, apart, took_s in data["samples"]:
                kind = TaskKind.OTHER if kind == TaskKind.GATE else str(kind)  # as older files call it
                seconds[Sample(kind, phase, int(chunks), bool(apart))] = float(took_s)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"observed: a field is missing or no number: {error}") from error
        return cls(seconds, rows)


@dataclass(frozen=True)
class CostModel:
    """The lines of one machine, by the names in `LINES`, and the contention between its two kinds of links.

    Attributes:
        contention: when a collective inside the node and one between nodes run at the same time, each goes on at this
            share of its own speed.
        machine: says what was measured, for whoever reads it.
        fused: None for a machine without fused operations, or where nothing is known of them: then no layer chooses
            them by cost.
        tiled: experts' gradients are computed tile by tile, in the cache, as on a CPU. Activations that wait for W
            tasks are then written and read for these alone; else both ways of computing them do it.
        task_s: seconds that the executor takes for a task, whatever it does.
        observed: what the parts of layers took where they ran, by `Workload.shapes`; it goes before the lines.

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
        """Returns the line of that name. Raises `ConfigError` where the model has none."""
        if name not in self.lines:
            raise ConfigError(f"cost model: nothing is known of {name!r}; measure it")
        return self.lines[name]

    def to_json(self) -> str:
        """Returns indented JSON; `from_json` makes an equal model of it."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "machine": self.machine}
        data |= {"contention": self.contention, "lines": {name: vars(line) for name, line in self.lines.items()}}
        if self.fused is not None:
            data["fused"] = asdict(self.fused)
        if self.tiled:
            data["tiled"] = True
        data["task_s"] = self.task_s
        if self.observed:
            data["observed"] = {shapes: seen.as_dict() for shapes, seen in self.observed.items()}
        return json.dumps(data, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> CostModel:
        """Reads the model written by `to_json`. Raises `ConfigError` for anything else."""
        data: Any = parse_json(source, "cost model")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f'cost model: the JSON is not one (no "format": "{_FORMAT}", "version": {_VERSION})')
        try:
            lines = {name: Line(**line) for name, line in data["lines"].items()}
            for name, line in lines.items():
                if not (_is_time(line.alpha_s) and _is_time(line.beta_s)):
                    raise ConfigError(f"cost model: {name!r} cannot take {line.alpha_s!r} and {line.beta_s!r} s")
                if line.r2 is not None and not _is_time(abs(line.r2)):
                    raise ConfigError(f"cost model: r2 = {line.r2!r} of {name!r} cannot be")
            if not isinstance(data["machine"], str):
                raise ConfigError(f"cost model: a machine is told in words, not {data['machine']!r}")
            if not _is_time(task_s := data.get("task_s", 0.0)):
                raise ConfigError(f"cost model: a task cannot take {task_s!r} s")
            fused = FusedCosts(**data["fused"]) if "fused" in data else None
            seen = {shapes: Observed.from_dict(parts) for shapes, parts in data.get("observed", {}).items()}
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
