"""Cost models: how long collectives and matrix products take, as straight lines through measured points.

A time is α + β·n (FSMoE Eq. 1): α seconds to start, β seconds for each unit of n. n counts bytes for a collective or
a copy and FLOP for a matrix product, everywhere in this package.
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

#: Lines of a cost model: collectives and the groups that they run in, matrix products, copies of rows in another order.
LINES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp", "gemm", "copy")

#: Seconds for each byte or FLOP of a line that rises with neither: no schedule should believe that size is free.
LEAST_BETA = 1e-15

_FORMAT = "fusedmoe-costs"
_VERSION = 2


@dataclass(frozen=True)
class Contention:
    """The speed that a task keeps while another resource works, too, as a share of its speed alone, (0, 1]; beside both
    others it keeps the product of the two shares.

    Example, a product of 4 s and an all-to-all of 3 s that begin together, by `compute_beside_inter=0.5` and
    `inter_beside_compute=0.75`: after 4 s the all-to-all has ended (0.75 · 4 s = 3 s), and 2 s of the product are left
    (4 s − 0.5 · 4 s), which then ends after 6 s in all.

    Raises `ConfigError` for a share outside (0, 1], and one so small that no sum of times has room for it.
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
                raise ConfigError(
                    f"contention: {what} is a share of the speed, more than 0 and at most 1, not {share!r}"
                )

    @classmethod
    def between_links(cls, share: float) -> Contention:
        """Returns that of links which keep this share beside each other, and leave computation alone."""
        return cls(intra_beside_inter=share, inter_beside_intra=share)

    def share(self, resource: str, beside: str) -> float:
        """Returns the share of its speed that a task on a resource keeps while one on another runs."""
        return 1.0 if resource == beside else float(getattr(self, f"{resource}_beside_{beside}"))

    @cached_property
    def speeds(self) -> tuple[tuple[float, ...], ...]:
        """The speed of each resource by which of them work: resource n of `RESOURCES` is bit n of the index."""
        sets = [[r for n, r in enumerate(RESOURCES) if which >> n & 1] for which in range(1 << len(RESOURCES))]
        return tuple(tuple(math.prod(self.share(r, one) for one in working) for r in RESOURCES) for working in sets)

    def disturbs(self, resources: Collection[str]) -> bool:
        """Returns True if any of these resources disturbs another."""
        return any(self.share(r, one) < 1 for r in resources for one in resources)

    @cached_property
    def weights(self) -> tuple[tuple[float, ...], ...]:
        """Weights of the resources' work, in the order of `RESOURCES`, whose sums bound the time that all of it takes.

        While any set of resources works, the work that is done in a second, each at its speed there, is never worth
        more than a second by such weights. So no order of the work takes less than its worth. These are the corners
        of all weights of which that is true: the largest of their sums is the least time of any work that can be
        spread over time as one likes.
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
        # Without those that another one equals or beats in all.
        kept: list[np.ndarray] = []
        for corner in sorted(corners, key=lambda one: float(-one.sum())):
            if not any((corner <= other + 1e-9).all() for other in kept):
                kept.append(corner)
        return tuple(tuple(map(float, corner)) for corner in kept)

    def least_s(self, compute: float, intra: float, inter: float) -> float:
        """Returns the seconds that so many seconds of work on each resource take at least, in any order."""
        return max(c * compute + i * intra + x * inter for c, i, x in self.weights)


#: Resources that leave each other alone.
ALONE = Contention()


class Costs(Protocol):
    """Everything that a simulation has to know beside the plan."""

    @property
    def contention(self) -> Contention:
        """The speeds that resources keep beside each other."""

    def seconds(self, plan: Plan) -> Mapping[Task, float]:
        """The duration of each task of the plan when it has its resources for itself."""


@dataclass(frozen=True)
class Durations:
    """Costs that are given task by task."""

    given: Mapping[Task, float]
    contention: Contention = ALONE

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
    """The lines of one machine, by the names in `LINES`, each as it is with nothing beside it, and its contention.

    Attributes:
        contention: the speeds of products and of both kinds of links while others of them work, too.
        machine: says what was measured, for whoever reads it.
        fused: None for a machine without fused operations, or where nothing is known of them: then no layer chooses
            them by cost.
        tiled: experts' gradients are computed tile by tile, in the cache, as on a CPU. Activations that wait for W
            tasks are then written and read for these alone; else both ways of computing them do it.
        task_s: seconds that the executor takes for a task, whatever it does.
        observed: what the parts of layers took where they ran, by `Workload.shapes`; it goes before the lines.

    Raises `ConfigError` for an unknown line, and a contention that is a number.
    """

    lines: Mapping[str, Line] = field(default_factory=dict)
    contention: Contention = ALONE
    machine: str = ""
    fused: FusedCosts | None = None
    tiled: bool = False
    task_s: float = 0.0
    observed: Mapping[str, Observed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.lines) - set(LINES))
        if unknown:
            raise ConfigError(f"cost model: {unknown[0]!r} is not one of {', '.join(LINES)}")
        if not isinstance(self.contention, Contention):
            raise ConfigError(
                f"cost model: contention is a fusedmoe.schedule.Contention, not {self.contention!r}; a share of links "
                "beside each other is Contention.between_links(share)"
            )

    def line(self, name: str) -> Line:
        """Returns the line of that name. Raises `ConfigError` where the model has none."""
        if name not in self.lines:
            raise ConfigError(
                f"cost model: nothing is known of {name!r}; measure it, by fusedmoe profile on ranks laid out as those "
                "that follow the plan"
            )
        return self.lines[name]

    def to_json(self) -> str:
        """Returns indented JSON; `from_json` makes an equal model of it."""
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
        return json.dumps(data, allow_nan=False, indent=2)

    @classmethod
    def from_json(cls, source: str) -> CostModel:
        """Reads the model written by `to_json`. Raises `ConfigError` for anything else."""
        data: Any = parse_json(source, "cost model")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(
                f'cost model: the JSON is not one (no "format": "{_FORMAT}", "version": {_VERSION}); write it anew: '
                "fusedmoe profile --json"
            )
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
            contention = Contention(**data["contention"])
            return cls(lines, contention, data["machine"], fused, data.get("tiled") is True, task_s, seen)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"cost model: a field is missing or not known: {error}") from error


def _is_time(value: Any) -> bool:
    """Returns True for a number of seconds that leaves room for sums and products."""
    return isinstance(value, (int, float)) and 0 <= value <= 1e9
