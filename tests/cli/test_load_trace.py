"""Load traces: recording, reading, and predicting the next loads."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from bench.placement.made_loads import make_loads
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.errors import ConfigError
from fusedmoe.placement.hecate import WINDOW, predict_load


def test_same_seed_gives_same_trace():
    first, again, other = (make_loads(4, 2, 4, 6, tokens=50, seed=seed) for seed in (3, 3, 4))
    assert first.tokens_ILWE.shape == (4, 2, 4, 6) and (len(first), first.layers, first.ranks, first.experts) == (
        4,
        2,
        4,
        6,
    )
    assert np.array_equal(first.tokens_ILWE, again.tokens_ILWE) and first.source == again.source
    assert not np.array_equal(first.tokens_ILWE, other.tokens_ILWE)
    assert (first.tokens_ILWE.sum(axis=3) == 50).all(), "every rank routes as many"
    assert np.array_equal(first.load_ILE, first.tokens_ILWE.sum(axis=2))


def test_popularity_follows_zipf():
    trace = make_loads(1, 4, 4, 16, tokens=10**6, skew=1.2, spread=0, drift=0, jitter=0, difference=0)
    law = np.arange(1, 17) ** -1.2
    for load_E in trace.load_ILE[0]:
        np.testing.assert_allclose(np.sort(load_E)[::-1] / load_E.sum(), law / law.sum(), rtol=0.02)
    assert len({tuple(np.argsort(load_E)) for load_E in trace.load_ILE[0]}) > 1, "layers prefer others"
    flat = make_loads(1, 1, 4, 16, tokens=10**6, skew=0, spread=0, drift=0, jitter=0, difference=0).load_ILE[0, 0]
    np.testing.assert_allclose(flat / flat.sum(), 1 / 16, rtol=0.02)


def test_load_distance_grows_with_drift_over_time():
    """Similarity falls with distance in time; without drift or jitter, loads are constant."""

    def distance(trace: LoadTrace, ago: int) -> float:
        share = trace.load_ILE / trace.load_ILE.sum(axis=2, keepdims=True)
        return float(np.abs(share[ago:] - share[:-ago]).sum(axis=2).mean())

    trace = make_loads(120, 4, 4, 16, tokens=10**5, jitter=0)
    assert distance(trace, 1) < 0.5 * distance(trace, 20) < distance(trace, 100)
    still = make_loads(120, 4, 4, 16, tokens=10**5, jitter=0, drift=0)
    assert distance(still, 100) < 1.2 * distance(still, 1) < 0.05
    top = np.argsort(-make_loads(400, 8, 4, 16).load_ILE, axis=2)[:, :, :4]
    assert (np.sort(top[0]) != np.sort(top[-1])).any(axis=1).mean() > 0.5, "others come to the top"


def test_trace_json_round_trip():
    trace = LoadTrace(np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4) * 2**40, "a run")
    again = LoadTrace.from_json(trace.to_json())
    assert np.array_equal(again.tokens_ILWE, trace.tokens_ILWE) and again.source == "a run"
    assert len(trace.to_json().splitlines()) == 4, "a line for each iteration"


def test_append_extends_trace_file_and_rejects_damage(tmp_path):
    path, trace = tmp_path / "loads.json", make_loads(7, 2, 3, 4, tokens=50)
    parts = [LoadTrace(trace.tokens_ILWE[at], "a run") for at in (slice(0, 2), slice(2, 3), slice(3, 7))]
    path.write_text(parts[0].to_json())
    for part in parts[1:]:
        part.append_to(path)
    assert path.read_text() == LoadTrace(trace.tokens_ILWE, "a run").to_json()
    path.write_text(path.read_text()[:-1])
    for text in (path.read_text()[:-1], "", "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="start a new file"):
            parts[0].append_to(path)
        assert path.read_text() == text


def test_digest_detects_changed_digit(tmp_path):
    path, trace = tmp_path / "loads.json", make_loads(3, 2, 3, 4, tokens=50)
    path.write_text(trace.to_json())
    trace.append_to(path)
    text = path.read_text()
    assert LoadTrace.from_json(text).tokens_ILWE.shape == (6, 2, 3, 4)
    digits = [at for at, letter in enumerate(text) if letter.isdigit() and at > text.index("tokens")]
    for at in digits[:: len(digits) // 20]:
        with pytest.raises(ConfigError, match="damaged"):
            LoadTrace.from_json(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def test_trace_file_without_digest_is_accepted():
    trace = make_loads(3, 2, 3, 4, tokens=50)
    text = re.sub(r', "digest": "\w+"', "", trace.to_json())
    assert np.array_equal(LoadTrace.from_json(text).tokens_ILWE, trace.tokens_ILWE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: "{", "not JSON"),
        (lambda data: [data], "the JSON lacks"),
        (lambda data: data | {"version": 9}, "the JSON lacks"),
        (lambda data: data | {"tokens": [[[[1, 2], [3]]]]}, "lists of different lengths"),
        (lambda data: data | {"tokens": [[[1]]]}, "expected non-negative integer counts"),
        (lambda data: data | {"tokens": [[[[1.5]]]]}, "expected non-negative integer counts"),
        (lambda data: data | {"tokens": [[[[-1]]]]}, "expected non-negative integer counts"),
        (lambda data: data | {"tokens": []}, "expected non-negative integer counts"),
        (lambda data: {name: data[name] for name in ("format", "version", "source")}, "missing"),
    ],
)
def test_malformed_trace_raises_config_error(change, says):
    data = json.loads(make_loads(1, 1, 2, 2, tokens=5).to_json())
    del data["digest"]
    data = change(data)
    with pytest.raises(ConfigError, match=says):
        LoadTrace.from_json(data if isinstance(data, str) else json.dumps(data))


@pytest.mark.parametrize(
    "change", [{"iterations": 0}, {"experts": 0}, {"tokens": 0}, {"drift": -1.0}, {"jitter": float("nan")}]
)
def test_make_loads_error_names_invalid_argument(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        make_loads(**{"iterations": 1, "layers": 1, "ranks": 1, "experts": 1, **change})


def test_predict_is_mean_of_last_five_loads():
    rng = np.random.default_rng()
    load_ILE = rng.integers(0, 1000, (9, 3, 4))
    for many in range(1, 10):
        expected = sum(load_ILE[i] for i in range(max(0, many - 5), many)) / min(5, many)
        np.testing.assert_allclose(predict_load(load_ILE[:many]), expected, rtol=1e-15)
    assert WINDOW == 5


def test_predict_is_exact_for_large_counts():
    assert predict_load(np.array([[2**52 + 1], [2**52 + 3]])).tolist() == [2**52 + 2]
