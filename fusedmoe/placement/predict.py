"""Prediction of loads (Hecate, section 4.2): an expert will be asked for as often as it lately was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError

#: Iterations that a prediction looks back (w in the paper).
WINDOW = 5


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
