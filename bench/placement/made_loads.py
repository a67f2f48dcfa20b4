"""Synthetic loads from a seed: skewed, drifting, and slightly different on each rank."""

from __future__ import annotations

import numpy as np

from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.errors import ConfigError

# Mean reversion per iteration: a memory of about 50 iterations.
_PULL = 0.02


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
    """Return a trace of skewed, drifting loads.

    In each layer, the k-th most popular expert is chosen in proportion to k^-s (Zipf's law). The logarithm of each
    expert's popularity follows an Ornstein-Uhlenbeck process that starts at this law and whose mean itself wanders, so
    experts become more and less popular; it has jitter between iterations, and an offset per rank. Tokens are then
    sampled individually.

    Args:
        tokens: expert choices per rank and iteration.
        skew: mean of s over the layers; `spread` its standard deviation. 0: uniform.
        drift: standard deviation of the logarithm's step between iterations.
        jitter: of independent noise per iteration.   difference: of each rank's permanent offset.
        seed: determines the trace.
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
