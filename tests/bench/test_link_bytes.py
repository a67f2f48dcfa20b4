"""The number of sent rows, by counting; and link bytes of a layer over ranks in separate network namespaces."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cluster.link_bytes import count, expected_rows, must_travel
from bench.cluster.network import missing


@pytest.mark.parametrize(("ranks", "experts", "k"), [(2, 4, 1), (4, 8, 3), (4, 16, 16), (8, 16, 4)])
def test_sent_rows_equal_count_by_loop(ranks: int, experts: int, k: int) -> None:
    rng = np.random.default_rng()
    expert_WSK = rng.integers(0, experts, (ranks, 5, k))
    places = ranks // 2
    found: dict[str, set[tuple[int, ...]]] = {name: set() for name in ("links", "across", "inside", "nodes")}
    pairs = dict.fromkeys(found, 0)
    for (source, token, _), expert in np.ndenumerate(expert_WSK):
        rank = int(expert) // (experts // ranks)
        relay = rank // places * places + source % places
        for name, goes, row in (
            ("links", rank != source, (source, token, rank)),
            ("across", rank // places != source // places, (source, token, rank)),
            ("nodes", rank // places != source // places, (source, token, rank // places)),
            ("inside", rank != relay, (source, token, rank)),
        ):
            if goes:
                found[name].add(row)
                pairs[name] += 1
    rows = {name: len(of) for name, of in found.items()}
    direct = {name: (rows[name], pairs[name]) for name in ("links", "across")}
    assert must_travel(expert_WSK, experts, 2, "direct") == direct
    both = rows["nodes"] + rows["inside"], pairs["nodes"] + pairs["inside"]
    assert must_travel(expert_WSK, experts, 2, "2dh") == {"links": both, "across": (rows["nodes"], pairs["nodes"])}


def test_expected_sent_rows_match_random_routing() -> None:
    rng = np.random.default_rng(3)
    expert_WSK = np.stack([np.stack([rng.permutation(16)[:4] for _ in range(2000)]) for _ in range(4)])
    rows, _ = must_travel(expert_WSK, 16, 2, "direct")["links"]
    assert rows == pytest.approx(expected_rows(2000, 4, 16, 4), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, [(256, 8, "direct")]), (4, [(1024, 4, "direct"), (1024, 4, "2dh")])], ids=str
)
def test_measured_link_bytes_equal_rows_and_pairs(ranks: int, cases: list[tuple[int, int, str]]) -> None:
    if lacking := missing():
        pytest.skip(lacking)
    for found in count(ranks, cases):
        for where in ("links", "across"):
            of = found[where]
            assert of["plain_without_headers"] == pytest.approx(1, abs=0.01), found  # otherwise bytes were sent twice
            assert 1 < of["over_rows_and_pairs"] < 1.03, found
            assert found["row_bytes"] < 1024 or of["over_rows"] < 1.03, found
