"""Cost models: time of collectives, matrix products and copies as a linear function of size.

The time is α + β·n (FSMoE Eq. 1), with n in bytes for a collective or a copy and in FLOP for a matrix product.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import numpy as np

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import LINKS, RESOURCES, Task, TaskKind

#: Names of the lines: collectives/group, matrix products, and copies that permute rows.
LINES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp", "gemm", "copy")

#: Minimum slope of a fit in seconds per byte or FLOP: no schedule may treat size as free.
MIN_BETA = 1e-15

# Fits with a smaller r² predict hardly better than the mean of their points.
_MIN_GOOD_R2 = 0.9

# Smaller measured fractions are noise.
_MIN_SPEED_FRACTION = 0.05

_FORMAT = "fusedmoe-costs"
_VERSION = 2


@dataclass(frozen=True)
class Contention:
    """Fraction of its speed, in (0, 1], that a task keeps while another resource is busy. Fractions multiply.

    Example: a matrix product of 4 s and an all-to-all of 3 s start together, with `compute_beside_inter=0.5` and
    `inter_beside_compute=0.75`. The all-to-all ends after 4 s; the product then has 2 s of work left and ends after 6
    s.

    Raises `ConfigError` for a fraction below 1e-9 or above 1.
    """

    compute_beside_intra: float = 1.0
    compute_beside_inter: float = 1.0
    intra_beside_compute: float = 1.0
    intra_beside_inter: float = 1.0
    inter_beside_compute: float = 1.0
    inter_beside_intra: float = 1.0

    def __post_init__(self) -> None:
        for what, share in asdict(self).items():
            if not (isinstance(share, (int, float)) and 1e-9 <= share <= 1):
                raise ConfigError(f"contention: {what} must be a fraction of the speed in (0, 1], not {share!r}")

    @classmethod
    def between_links(cls, share: float) -> Contention:
        """Return equal contention between intra-node and inter-node links only."""
        return cls(intra_beside_inter=share, inter_beside_intra=share)

    def speed_fraction(self, resource: str, beside: str) -> float:
        return 1.0 if resource == beside else float(getattr(self, f"{resource}_beside_{beside}"))

    @cached_property
    def speeds(self) -> tuple[tuple[float, ...], ...]:
        """Speed of each resource by set of busy resources: bit n of the index is `RESOURCES[n]`."""
        sets = [[r for n, r in enumerate(RESOURCES) if which >> n & 1] for which in range(1 << len(RESOURCES))]
        return tuple(
            tuple(math.prod(self.speed_fraction(r, one) for one in working) for r in RESOURCES) for working in sets
        )

    def slows_any(self, resources: Collection[str]) -> bool:
        """Return whether any of these resources slows down another."""
        return any(self.speed_fraction(r, one) < 1 for r in resources for one in resources)

    @cached_property
    def lower_bound_weights(self) -> tuple[tuple[float, ...], ...]:
        """Weight vectors over `RESOURCES`: each weighted sum of work is a lower bound of its total time.

        They are the undominated vertices of the polytope in which no set of busy resources does more than 1 weighted
        second of work per second. The largest sum is the minimum time of work that can be spread arbitrarily over time.
        """
        count = len(RESOURCES)
        rates = np.array([[s * (which >> n & 1) for n, s in enumerate(of)] for which, of in enumerate(self.speeds)][1:])
        sides, ends = np.concatenate([rates, -np.eye(count)]), np.repeat([1.0, 0.0], [len(rates), count])
        corners: list[np.ndarray] = []
        for chosen in combinations(range(len(sides)), count):
            matrix = sides[list(chosen)]
            if abs(np.linalg.det(matrix)) > 1e-12:
                found = np.maximum(np.linalg.solve(matrix, ends[list(chosen)]), 0.0)
                if (rates @ found).max() <= 1 + 1e-9:
                    corners.append(found / max(1.0, float((rates @ found).max())))
        kept: list[np.ndarray] = []
        for corner in sorted(corners, key=lambda one: float(-one.sum())):
            if not any((corner <= other + 1e-9).all() for other in kept):
                kept.append(corner)
        return tuple(tuple(map(float, corner)) for corner in kept)

    def lower_bound_s(self, compute: float, intra: float, inter: float) -> float:
        """Return a lower bound of the time of this work; all in seconds."""
        return max(c * compute + i * intra + x * inter for c, i, x in self.lower_bound_weights)


NO_CONTENTION = Contention()


def speed_fractions(alone_s: tuple[float, float], together_s: tuple[float, float]) -> tuple[float, float]:
    """Return the fraction of its speed, in (0, 1], that each of two tasks keeps while both run.

    Args:
        alone_s: seconds of each task alone.
        together_s: seconds of each task if both start at the same time.
    """
    first = int(together_s[1] < together_s[0])
    both_s, after_s = together_s[first], together_s[1 - first] - together_s[first]
    # The task that ends first does all its work while both run; the other finishes alone.
    done_s = {first: alone_s[first], 1 - first: alone_s[1 - first] - after_s}
    shares = [min(1.0, max(_MIN_SPEED_FRACTION, done_s[which] / both_s)) for which in range(2)]
    return shares[0], shares[1]


class Costs(Protocol):
    """Costs of a plan's tasks, as the simulator needs them."""

    @property
    def contention(self) -> Contention:
        """Speeds of concurrently busy resources."""

    def seconds(self, plan: Plan) -> Mapping[Task, float]:
        """Return the duration of each task without contention."""


@dataclass(frozen=True)
class TaskDurations:
    """Costs from a table of task durations, the same for every plan."""

    durations_s: Mapping[Task, float]
    contention: Contention = NO_CONTENTION

    def seconds(self, plan: Plan) -> Mapping[Task, float]:
        return self.durations_s


@dataclass(frozen=True)
class Line:
    """Time alpha_s + beta_s·n in seconds. `r2`: coefficient of determination of the fit."""

    alpha_s: float
    beta_s: float
    r2: float | None = None

    def seconds(self, n: float) -> float:
        return self.alpha_s + self.beta_s * n

    @property
    def per_s(self) -> float:
        """Asymptotic rate in bytes/s or FLOP/s, at most 1 / `MIN_BETA`."""
        return 1 / max(self.beta_s, MIN_BETA)

    def amount(self, seconds: float) -> float:
        """Return the bytes or FLOP processed in `seconds`; 0 for less than the start-up `alpha_s`."""
        left_s = seconds - self.alpha_s
        if left_s < 0:
            return 0.0
        return left_s / self.beta_s if self.beta_s else math.inf


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """Return the least-squares line through points (n, seconds), with its r².

    Raises `ConfigError` for fewer than two distinct n, or points that are not finite.
    """
    n, seconds = np.array(sorted(points), dtype=np.float64).reshape(-1, 2).T
    if len(set(n)) < 2 or not np.isfinite([n, seconds]).all():
        raise ConfigError("cost fit: needs finite points with at least two different sizes; measure more sizes")
    from_mean, above_mean = n - n.mean(), seconds - seconds.mean()
    beta = float(from_mean @ above_mean / (from_mean @ from_mean))
    return _make_line_with_r2(float(seconds.mean() - beta * n.mean()), beta, n, seconds)


def fit_nonnegative_line(points: Sequence[tuple[float, float]], max_alpha_s: float = math.inf) -> Line:
    """Return a line through points (n, seconds) with a non-negative intercept and a slope of at least `MIN_BETA`.

    Minimises squared errors, or squared relative errors if the least-squares line violates the bounds. A larger
    intercept than `max_alpha_s` is reduced to it.
    """
    line = fit(points)
    n, seconds = np.array(points).T
    if line.alpha_s < 0 or line.beta_s < MIN_BETA:
        # Noise in the longest times makes the fit negative. The import is slow and rarely needed.
        from scipy.optimize import nnls

        (alpha, beta), _ = nnls(np.stack([1 / seconds, n / n.max() / seconds], 1), np.ones(len(n)))
        line = _make_line_with_r2(float(alpha), max(MIN_BETA, float(beta / n.max())), n, seconds)
    if line.alpha_s > max_alpha_s:
        line = _make_line_with_r2(max_alpha_s, max(MIN_BETA, float(n @ (seconds - max_alpha_s) / (n @ n))), n, seconds)
    return line


def fit_large_sizes(points: Sequence[tuple[float, float]]) -> Line:
    """Fit the multiples of a unit. The time of the smallest size, a fraction of the unit, bounds the start-up time."""
    unit = points[-1][0] - points[-2][0]
    return fit_nonnegative_line([point for point in points if point[0] > unit / 2], max_alpha_s=points[0][1])


def _make_line_with_r2(alpha: float, beta: float, n: Any, seconds: Any) -> Line:
    left, above_mean = seconds - (alpha + beta * n), seconds - seconds.mean()
    return Line(alpha, beta, 1.0 - float(left @ left) / float(above_mean @ above_mean) if above_mean.any() else 1.0)


@dataclass(frozen=True)
class FusedCosts:
    """Costs of fused operations in addition to the lines (`workload.one_sided_s`).

    Attributes:
        tile_rows: rows per signal.
        signal_s: by link ("intra", "inter"), seconds from the end of a tile's transfer until the waiting kernel
            continues. A link without an entry has no fused operations.

    Raises `ConfigError` for invalid numbers or links.
    """

    tile_rows: int
    signal_s: Mapping[str, float]

    def __post_init__(self) -> None:
        if type(self.tile_rows) is not int or self.tile_rows < 1:
            raise ConfigError(f"fused costs: tile_rows must be an integer >= 1, not {self.tile_rows!r}")
        for link, seconds in self.signal_s.items():
            if link not in LINKS.values():
                raise ConfigError(f"fused costs: unknown link {link!r}; expected intra or inter")
            if not _is_valid_time(seconds):
                raise ConfigError(f"fused costs: invalid time {seconds!r} s of a signal on {link}")


class MeasuredPart(NamedTuple):
    """A measured part of a layer or step."""

    kind: str
    phase: str | None
    chunks: int = 1  # number of chunks; bytes of a gradient-all-reduce
    has_w_tasks: bool = False  # weight gradients ran as W tasks


@dataclass(frozen=True)
class Observed:
    """Measured seconds of parts of a layer or step. Raises `ConfigError` for an invalid time or number of chunks.

    Attributes:
        seconds: by part: kind of task, phase and number of chunks (`Sample`).
        rows: expert rows per pass of the measured layers; None: as many as in the layer whose costs they are used for.
    """

    seconds: Mapping[MeasuredPart, float] = field(default_factory=dict)
    rows: float | None = None

    def __post_init__(self) -> None:
        for sample, seconds in self.seconds.items():
            if not 0 <= seconds <= 1e9 or sample.chunks < 1:
                raise ConfigError(f"observed: invalid time {seconds!r} s of {sample.kind} in {sample.chunks} chunks")

    def __or__(self, other: Observed) -> Observed:
        return Observed({**self.seconds, **other.seconds}, other.rows or self.rows)

    def get(self, kind: str, phase: str | None, has_w_tasks: bool = False) -> dict[int, float]:
        """Return the seconds of a kind of task by number of chunks."""
        return {
            sample.chunks: s
            for sample, s in self.seconds.items()
            if sample == (kind, phase, sample.chunks, has_w_tasks)
        }

    def as_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "samples": [[*sample, seconds] for sample, seconds in self.seconds.items()]}

    @classmethod
    def from_dict(cls, data: Any) -> Observed:
        """Read the result of `as_dict`. Raises `ConfigError` if invalid."""
        try:
            rows = None if data["rows"] is None else float(data["rows"])
            seconds = {}
            for kind, phase, chunks, has_w_tasks, took_s in data["samples"]:
                kind = TaskKind.OTHER if kind == TaskKind.GATE else str(kind)  # name in older files
                seconds[MeasuredPart(kind, phase, int(chunks), bool(has_w_tasks))] = float(took_s)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"observed: missing field or invalid number: {error}") from error
        return cls(seconds, rows)


@dataclass(frozen=True)
class CostModel:
    """Time of operations on one machine. Raises `ConfigError` for unknown `lines` or a contention of the wrong type.

    Attributes:
        lines: time of each operation of `LINES`, by name, without contention.
        machine: description of the measured machine.
        fused: costs of fused operations; None: unsupported or unknown, never selected by cost.
        tiled: the expert backward keeps activations in the cache, as on CPUs. With W tasks it also writes them to
            memory and reads them again.
        task_s: executor overhead per task in seconds.
        observed: measured task times by `Workload.shapes`, with precedence over lines.
        ranges: smallest and largest measured n of each line, in bytes or FLOP; a line without an entry has no limits.
    """

    lines: Mapping[str, Line] = field(default_factory=dict)
    contention: Contention = NO_CONTENTION
    machine: str = ""
    fused: FusedCosts | None = None
    tiled: bool = False
    task_s: float = 0.0
    observed: Mapping[str, Observed] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.lines) - set(LINES))
        if unknown:
            raise ConfigError(f"cost model: {unknown[0]!r} is not one of {', '.join(LINES)}")
        if not isinstance(self.contention, Contention):
            raise ConfigError(
                f"cost model: contention must be a fusedmoe.schedule.Contention, not {self.contention!r}; use "
                "Contention.between_links(share) for a fraction between links"
            )

    def line(self, name: str) -> Line:
        """Return a line. Raises `ConfigError` if it was not measured."""
        if name not in self.lines:
            raise ConfigError(
                f"cost model: {name!r} was not measured; run fusedmoe profile with the same layout of ranks as the job "
                "that follows the plan"
            )
        return self.lines[name]

    @property
    def poor_fits(self) -> str:
        """Names and r² of lines that fit their points poorly; empty if there are none."""
        fits = {name: line.r2 for name, line in self.lines.items()}
        return ", ".join(f"{name} (r² {r2:.2f})" for name, r2 in fits.items() if r2 is not None and r2 < _MIN_GOOD_R2)

    def to_json(self) -> str:
        """Return indented JSON; `from_json` is the inverse."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "machine": self.machine}
        data |= {"contention": asdict(self.contention)}
        data |= {"lines": {name: vars(line) for name, line in self.lines.items()}}
        if self.fused is not None:
            data["fused"] = asdict(self.fused)
        if self.tiled:
            data["tiled"] = True
        data["task_s"] = self.task_s
        if self.observed:
            data["observed"] = {shapes: seen.as_dict() for shapes, seen in self.observed.items()}
        if self.ranges:
            data["ranges"] = {name: {"least": least, "most": most} for name, (least, most) in self.ranges.items()}
        return json.dumps(data, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> CostModel:
        """Parse the result of `to_json`. Raises `ConfigError` if invalid."""
        data: Any = parse_json(source, "cost model")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(
                f'cost model: the JSON lacks "format": "{_FORMAT}", "version": {_VERSION}; create it again with '
                "fusedmoe profile --json"
            )
        try:
            lines = {name: Line(**line) for name, line in data["lines"].items()}
            for name, line in lines.items():
                if not (_is_valid_time(line.alpha_s) and _is_valid_time(line.beta_s)):
                    raise ConfigError(f"cost model: invalid times {line.alpha_s!r} and {line.beta_s!r} s of {name!r}")
                if line.r2 is not None and not _is_valid_time(abs(line.r2)):
                    raise ConfigError(f"cost model: invalid r2 = {line.r2!r} of {name!r}")
            if not isinstance(data["machine"], str):
                raise ConfigError(f"cost model: machine must be a string, not {data['machine']!r}")
            if not _is_valid_time(task_s := data.get("task_s", 0.0)):
                raise ConfigError(f"cost model: invalid task_s = {task_s!r}")
            fused = FusedCosts(**data["fused"]) if "fused" in data else None
            seen = {shapes: Observed.from_dict(parts) for shapes, parts in data.get("observed", {}).items()}
            contention = Contention(**data["contention"])
            ranges = {name: (between["least"], between["most"]) for name, between in data.get("ranges", {}).items()}
            if not all(isinstance(n, (int, float)) for between in ranges.values() for n in between):
                raise ConfigError(f"cost model: invalid ranges {data['ranges']!r}")
            return cls(lines, contention, data["machine"], fused, data.get("tiled") is True, task_s, seen, ranges)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"cost model: missing or unknown field: {error}") from error


def _is_valid_time(value: Any) -> bool:
    # At most 1e9 s: sums and products stay finite.
    return isinstance(value, (int, float)) and 0 <= value <= 1e9
