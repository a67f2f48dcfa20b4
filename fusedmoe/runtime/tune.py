"""Tuning the size of gradient pieces while a model trains (FlowMoE §4.3): Bayesian optimisation of S_p by step time.

    tuner = PieceTuner(largest_bytes)
    while training:
        step(piece_bytes=tuner.piece_bytes)
        tuner.note(seconds)

A few steps are done with each size that is tried. What they took is a point of a Gaussian process over sizes, and the
size with the largest expected improvement is tried next. Afterwards the best of those tried is kept, until steps take
longer or shorter by more than `drift`: then all begins anew.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np

from fusedmoe.errors import ConfigError

# Sizes that may be tried, evenly in their logarithm, and the least of them as a share of the largest.
_GRID, _LEAST = 256, 2**-6
# In units of the spread of what was measured; as in the paper.
_EXPLORATION = 0.1


@dataclass
class PieceTuner:
    """Finds S_p, the bytes of a gradient piece.

    Args:
        largest_bytes: of a layer's gradient, in bytes: the range is (0, largest_bytes].
        samples: sizes that are tried, the first at random.
        steps: with each of them; their median counts, which one slow step does not move (the paper takes the mean).
        drift: by which share steps must change for all to begin anew; None: never.
        seed: of the first size. The same on every rank, as must be the seconds that are noted: then all ranks always
            have the same size.
    Attributes:
        piece_bytes: to use in the next step.
        tried: (bytes, seconds) so far.
    Raises:
        ConfigError: numbers that are not positive, or no scikit-learn (`fusedmoe[plan]`).
    """

    largest_bytes: int
    samples: int = 8
    steps: int = 10
    drift: float | None = 0.1
    seed: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list, init=False)
    piece_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if min(self.largest_bytes, self.samples, self.steps) < 1 or (self.drift is not None and self.drift <= 0):
            raise ConfigError(
                f"tuning S_p needs largest_bytes = {self.largest_bytes}, samples = {self.samples} and steps = "
                f"{self.steps} of at least 1, and drift = {self.drift} above 0 or None"
            )
        if find_spec("sklearn") is None:  # told now, and not when the second size is to be chosen
            raise ConfigError("tuning S_p needs scikit-learn: pip install 'fusedmoe[plan]'")
        self._chance = np.random.default_rng(self.seed)
        self._seconds: list[float] = []
        self._settled_s: float | None = None
        self.piece_bytes = self._random()

    @property
    def settled(self) -> bool:
        """Whether the size is the best of all samples, and no longer one of them."""
        return self._settled_s is not None

    def note(self, seconds: float) -> None:
        """What a step with `piece_bytes` took."""
        self._seconds.append(seconds)
        if len(self._seconds) < self.steps:
            return
        median_s, self._seconds = statistics.median(self._seconds), []
        if self._settled_s is not None:
            if self.drift is not None and abs(median_s - self._settled_s) > self.drift * self._settled_s:
                self._settled_s, self.tried = None, []
                self.piece_bytes = self._random()
            return
        self.tried.append((self.piece_bytes, median_s))
        if len(self.tried) < self.samples:
            self.piece_bytes = self._next()
        else:
            self.piece_bytes, self._settled_s = min(self.tried, key=lambda one: one[1])

    def _random(self) -> int:
        return max(1, round(self.largest_bytes * float(self._chance.uniform())))

    def _next(self) -> int:
        """The size with the largest expected improvement, of those that were not tried."""
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        bytes_, seconds = (np.array(column, dtype=float) for column in zip(*self.tried, strict=True))
        spread = seconds.std() or 1.0
        values = (seconds - seconds.mean()) / spread
        kernel = Matern(length_scale=0.3, length_scale_bounds=(0.02, 3.0), nu=2.5) + WhiteKernel(1e-3, (1e-6, 1e-1))
        process = GaussianProcessRegressor(kernel, random_state=self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few points do not always say how smooth they are
            process.fit(self._place(bytes_), values)
        sizes = np.unique(np.ceil(self._candidates()).astype(int))
        sizes = sizes[~np.isin(sizes, bytes_)]
        if not len(sizes):
            return int(bytes_[seconds.argmin()])
        mean, std = process.predict(self._place(sizes.astype(float)), return_std=True)
        gain = values.min() - mean - _EXPLORATION
        z = gain / np.maximum(std, 1e-12)
        return int(sizes[(gain * norm.cdf(z) + std * norm.pdf(z)).argmax()])

    def _candidates(self) -> np.ndarray:
        return np.geomspace(max(1.0, self.largest_bytes * _LEAST), self.largest_bytes, _GRID)

    def _place(self, bytes_: np.ndarray) -> np.ndarray:
        """Where a size is between nothing and the largest, by the number of pieces that it makes."""
        return np.log(bytes_ / self.largest_bytes)[:, None]
