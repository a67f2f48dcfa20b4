from __future__ import annotations

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.placement.predict import WINDOW, predict


def test_the_mean_of_the_last():
    rng = np.random.default_rng()
    load_ILE = rng.integers(0, 1000, (9, 3, 4))
    for many in range(1, 10):
        expected = sum(load_ILE[i] for i in range(max(0, many - 5), many)) / min(5, many)
        np.testing.assert_allclose(predict(load_ILE[:many]), expected, rtol=1e-15)
        np.testing.assert_allclose(predict(list(load_ILE[:many])), expected, rtol=1e-15)
    assert WINDOW == 5
    np.testing.assert_array_equal(predict(load_ILE, window=1), load_ILE[-1])


def test_large_counts_are_exact():
    assert predict([[2**52 + 1], [2**52 + 3]]).tolist() == [2**52 + 2]


def test_nothing_to_predict_from():
    for earlier, window in (([], 5), ([[1.0]], 0)):
        with pytest.raises(ConfigError, match="one at least is needed"):
            predict(earlier, window)
    with pytest.raises(ConfigError, match="different shapes"):
        predict([[1, 2], [1, 2, 3]])
