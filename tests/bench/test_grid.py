from __future__ import annotations

import numpy as np
import pytest

from bench.simulate.grid import ABLATION, COLUMNS, PUBLISHED, run_grid, workloads
from fusedmoe.schedule.machines import TESTBEDS


def check(results) -> None:
    for result in results:
        means = result.speedups()
        order = ("tutel_improved", "fsmoe_no_iio", "fsmoe", "bound")
        assert means[order[0]] > 1 and all(means[a] <= means[b] for a, b in zip(order, order[1:], strict=False))
        assert means["tutel_improved"] < means["fsmoe_no_iio"] < means["fsmoe"]
        for column in (*COLUMNS, *ABLATION):
            seconds, there = result.seconds, ~np.isnan(result.seconds[column] + result.seconds["bound"])
            assert there.any() and (seconds["bound"] <= seconds[column] * (1 + 1e-12))[there].all()
            both = there & ~np.isnan(seconds["joint"])
            if column != "bound":
                assert (seconds["joint"] <= seconds[column] * (1 + 1e-12))[both].all()
        if result.contention < 1:
            for column in ("tutel_improved", "fsmoe_no_iio", "fsmoe"):
                assert means[column] == pytest.approx(PUBLISHED[result.testbed][column], abs=0.03)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grid_speedups_are_ordered_and_progress_is_reported():
    told = []
    results = run_grid(sample=6, progress=lambda done, total: told.append((done, total)))
    total = told[-1][0]
    assert len(told) == 2 * 486 < total and {whole for _, whole in told} == {total}
    steps = np.diff([0, *(done for done, _ in told)])
    assert sorted(set(steps)) == [1, (total - 2 * 480) / 12]  # sampled cases share the remaining total
    assert [(result.testbed, result.contention) for result in results] == [("A", 1), ("A", 0.65), ("B", 1), ("B", 0.75)]
    assert all((~np.isnan(result.seconds["joint"])).sum() == 6 for result in results)
    check(results)
    for result in results:
        assert all(len(column) == 486 for column in result.seconds.values())
        if result.testbed == "B":
            assert 0.95 * 918 <= result.differing_degrees <= 1.05 * 918
        if result.contention == 1:
            assert result.speedup("flowmoe") >= 1.40 and result.speedup("joint") >= 1.50


@pytest.mark.parametrize("testbed", TESTBEDS)
def test_grid_has_configurations_of_paper_table_4(testbed):
    cases = list(workloads(TESTBEDS[testbed]))
    assert len(cases) == len(set(cases)) == 486
    assert {case.seq_len for case in cases} == set({"A": (512, 1024, 2048), "B": (256, 512, 1024)}[testbed])
    assert {case.hidden // case.model_dim for case in cases} == {2, 3, 4}
    assert {(case.ep, case.esp) for case in cases} == {{"A": (6, 8), "B": (8, 4)}[testbed]}
