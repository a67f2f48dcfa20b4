"""The size of gradient buckets, S_p, by Bayesian optimisation of step time (FlowMoE §4.3).

What steps with a size took is a point of a Gaussian process over sizes, and the size with the largest expected
improvement is tried next.
"""

from __future__ import annotations

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
class BucketSearch:
    """Proposes S_p, the bytes of a gradient bucket, time after time.

        while (size := search.next()) is not None:
            search.tried.append((size, seconds(size)))

    Args:
        largest_bytes: of a layer's gradient, in bytes: the range is (0, largest_bytes].
        samples: sizes that are tried, the first at random.
        seed: of the first size. The same on every rank, as must be the seconds: then all ranks have the same sizes.
    Attributes:
        tried: (bytes, seconds) so far, in no matter which order.
    Raises:
        ConfigError: numbers that are not positive, or no scikit-learn (`fusedmoe[plan]`).
    """

    largest_bytes: int
    samples: int = 8
    seed: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if min(self.largest_bytes, self.samples) < 1:
            raise ConfigError(
                f"tuning S_p needs largest_bytes = {self.largest_bytes} and samples = {self.samples} of at least 1"
            )
        if find_spec("sklearn") is None:  # told now, and not when the second size is to be chosen
            raise ConfigError("tuning S_p needs scikit-learn: pip install 'fusedmoe[plan]'")
        self._chance = np.random.default_rng(self.seed)

    def next(self) -> int | None:
        """The size to try now; None: as many as there should be were tried."""
        if len(self.tried) >= self.samples:
            return None
        if not self.tried:
            return max(1, round(self.largest_bytes * float(self._chance.uniform())))
        return self._most_promising()

    def _most_promising(self) -> int:
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
        """Where a size is between nothing and the largest, by the number of buckets that it makes."""
        return np.log(bytes_ / self.largest_bytes)[:, None]
