"""Load traces: how many tokens each rank had for each expert, iteration by iteration; and what to expect next.

Traces are recorded, or made by a seed. The prediction is Hecate's (section 4.2): an expert will be asked for as often
as it lately was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json

_FORMAT = "fusedmoe-loads"
_VERSION = 1
#: How a file of loads ends.
LOADS_END = "\n]}\n"

# Of an expert's distance from its mean that goes in an iteration: what it forgets in about 50.
_PULL = 0.02
#: Iterations that a prediction looks back (w in the paper).
WINDOW = 5


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """`tokens_ILWE`: [I, L, W, E] integers, the tokens that rank W had for expert E. `source` says where they are from;
    `first` is the number of the first iteration, which counts from 1.

    Raises `ConfigError` for anything but counts with all four axes, and a `first` below 1.
    """

    tokens_ILWE: NDArray[np.int64]
    source: str = ""
    first: int = 1

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens_ILWE)
        if tokens.ndim != 4 or 0 in tokens.shape or tokens.dtype.kind not in "iu" or not _are_counts(tokens):
            raise ConfigError(
                f"load trace: {tokens.dtype} numbers of shape {tokens.shape} are not counts by iteration, layer, rank "
                "and expert"
            )
        if type(self.first) is not int or self.first < 1:
            raise ConfigError(f"load trace: the first iteration is a number from 1, not {self.first!r}")
        object.__setattr__(self, "tokens_ILWE", tokens.astype(np.int64))

    @property
    def load_ILE(self) -> NDArray[np.int64]:
        """[I, L, E]: the tokens of all ranks."""
        found: NDArray[np.int64] = self.tokens_ILWE.sum(axis=2)
        return found

    @property
    def layers(self) -> int:
        return self.tokens_ILWE.shape[1]

    @property
    def ranks(self) -> int:
        return self.tokens_ILWE.shape[2]

    @property
    def experts(self) -> int:
        return self.tokens_ILWE.shape[3]

    def __len__(self) -> int:
        """The number of iterations."""
        return len(self.tokens_ILWE)

    def to_json(self) -> str:
        """JSON with a line for each iteration; `from_json` gives the same trace back."""
        head = json.dumps({"format": _FORMAT, "version": _VERSION, "source": self.source, "first": self.first})
        return f'{head[:-1]}, "tokens": [\n{self._lines()}{LOADS_END}'

    def append_to(self, path: Path) -> None:
        """Adds these iterations to a file of `to_json`, of the same layers, ranks and experts, without reading it.

        Raises:
            ConfigError: the file does not end as one of `to_json` does.
        """
        end = LOADS_END.encode()
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(end)))
            if file.read() != end:
                raise ConfigError(f"load trace: {path} was not written by to_json, or was cut; begin a new one")
            file.seek(size - len(end))
            file.write(f",\n{self._lines()}{LOADS_END}".encode())

    def _lines(self) -> str:
        return ",\n".join(json.dumps(one, separators=(",", ":")) for one in self.tokens_ILWE.tolist())

    @classmethod
    def from_json(cls, text: str) -> LoadTrace:
        """The trace written by `to_json`. Raises `ConfigError` for anything else."""
        data = parse_json(text, "load trace")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f'load trace: the JSON is not one (no "format": "{_FORMAT}", "version": {_VERSION})')
        try:
            return cls(np.array(data["tokens"]), str(data["source"]), data.get("first", 1))
        except (KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"load trace: a field is missing, or lists differ in length: {error}") from error


def _are_counts(tokens: NDArray[np.generic]) -> bool:
    """None below zero, and so few that their sum has room."""
    return bool(tokens.min() >= 0 and tokens.sum(dtype=np.float64) < 2**62)


def make_loads(
    iterations: int,
    layers: int,
    ranks: int,
    experts: int,
    *,
    tokens: int = 4096,
    skew: float = 1.35,
    spread: float = 0.25,
    drift: float = 0.05,
    jitter: float = 0.1,
    difference: float = 0.1,
    seed: int = 0,
) -> LoadTrace:
    """A trace of skewed loads that drift.

    In each layer the k-th most popular expert is asked for in proportion to k^-s, as in Zipf's law. The logarithm of
    each expert's popularity wanders (an Ornstein-Uhlenbeck process of which the law is the mean at the start, and whose
    mean itself wanders), so that experts rise, fall and change places; it jitters from one iteration to the next, and
    it differs between ranks, whose samples do. Tokens are then drawn one by one.

    Args:
        tokens: that each rank routes in an iteration, each choice of an expert counted.
        skew: s, in the mean of the layers; `spread` its standard deviation between them. 0: all experts alike.
        drift: standard deviation of a step of the logarithm from one iteration to the next.
        jitter: of what comes and goes in one iteration.   difference: of each rank's own part, for good.
        seed: the same numbers give the same trace.
    Raises:
        ConfigError: a size below 1, or a negative deviation.
    """
    for name, number in (
        *(("iterations", iterations), ("layers", layers), ("ranks", ranks), ("experts", experts), ("tokens", tokens)),
    ):
        if number < 1:
            raise ConfigError(f"loads: {name} = {number} must be at least 1")
    for name, deviation in (("spread", spread), ("drift", drift), ("jitter", jitter), ("difference", difference)):
        if not deviation >= 0:
            raise ConfigError(f"loads: {name} = {deviation} must be 0 or more")
    rng = np.random.default_rng(seed)
    skew_L = np.maximum(skew + spread * rng.standard_normal(layers), 0.0) if skew else np.zeros(layers)
    place_LE = np.argsort(rng.random((layers, experts)), axis=1) + 1
    home_LE = -skew_L[:, None] * np.log(place_LE)
    popularity_LE = home_LE.copy()
    own_LWE = difference * rng.standard_normal((layers, ranks, experts))
    counts = []
    for _ in range(iterations):
        now_LE = popularity_LE + jitter * rng.standard_normal((layers, experts))
        share_LWE = np.exp(now_LE[:, None] + own_LWE)
        counts.append(rng.multinomial(tokens, share_LWE / share_LWE.sum(axis=2, keepdims=True)))
        home_LE += 0.5 * drift * rng.standard_normal((layers, experts))
        popularity_LE += _PULL * (home_LE - popularity_LE) + drift * rng.standard_normal((layers, experts))
    source = f"seed {seed}: skew {skew:g} ± {spread:g}, drift {drift:g}, jitter {jitter:g}, difference {difference:g}"
    return LoadTrace(np.array(counts), source)


def predict(earlier: Sequence[ArrayLike] | NDArray[np.generic], window: int = WINDOW) -> NDArray[np.float64]:
    """The mean of the last `window` loads, or of all where there are fewer.

    Args:
        earlier: loads of earlier iterations, the oldest first, all of one shape: [E], or [L, E] for several layers.
    Returns:
        Of the same shape.
    Raises:
        ConfigError: there is none, or they differ in shape.
    """
    if window < 1 or len(earlier) == 0:
        raise ConfigError(f"a mean of the last {window} of {len(earlier)} loads is none; one at least is needed")
    last = [np.asarray(load, dtype=np.float64) for load in earlier[-window:]]
    if len({load.shape for load in last}) > 1:
        raise ConfigError(f"loads of different shapes: {sorted({load.shape for load in last})}")
    return np.mean(last, axis=0)
