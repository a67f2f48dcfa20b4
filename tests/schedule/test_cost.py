"""Cost models: lines through measured points, and machines as JSON."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import LINES, NO_CONTENTION, Contention, CostModel, Line, fit
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.task import RESOURCES

MODEL = CostModel(
    {name: Line(1e-4 * (i + 1), 1e-9 * (i + 1), 0.999) for i, name in enumerate(LINES)},
    Contention(inter_beside_intra=0.7),
    "here",
)

RANGED = replace(MODEL, ranges={"gemm": (1e6, 2e9)})


def test_fit_recovers_exact_line():
    rng = random.Random()
    alpha, beta = 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-12, -8)
    line = fit([(n * 2**20, alpha + beta * n * 2**20) for n in range(1, 25)])
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6) and line.beta_s == pytest.approx(beta, rel=1e-9)
    assert line.r2 == pytest.approx(1.0, abs=1e-9)


def test_fit_equals_least_squares():
    rng = np.random.default_rng()
    n = rng.uniform(1e5, 1e8, 30)
    seconds = 1e-4 + 2e-9 * n + rng.normal(0, 2e-2, 30)
    matrix = np.stack([np.ones(30), n], 1)
    (alpha, beta), residual, *_ = np.linalg.lstsq(matrix, seconds)
    line = fit(zip(n, seconds, strict=True))
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-9) and line.beta_s == pytest.approx(beta, rel=1e-6)
    assert line.r2 == pytest.approx(1 - residual[0] / ((seconds - seconds.mean()) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("points", [[], [(1, 1)], [(1, 1), (1, 2)], [(1, 1), (2, float("nan"))], [(1, 1), (np.inf, 2)]])
def test_fit_rejects_degenerate_points(points):
    with pytest.raises(ConfigError, match="measure more sizes"):
        fit(points)


def test_equal_times_fit_constant_line():
    assert fit([(1, 2.0), (2, 2.0), (3, 2.0)]) == Line(2.0, 0.0, 1.0)


def test_amount_is_zero_below_startup_time():
    line = Line(0.5, 0.25)
    assert line.amount(line.seconds(12.0)) == pytest.approx(12.0)
    assert line.amount(0.5) == line.amount(0.1) == line.amount(-1.0) == 0.0
    assert Line(0.5, 0.0).amount(0.4) == 0.0 and Line(0.5, 0.0).amount(0.6) == math.inf  # size is free


def test_cost_model_json_round_trip():
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    assert CostModel.from_json(replace(MODEL, tiled=True).to_json()) == replace(MODEL, tiled=True) != MODEL
    assert CostModel.from_json(RANGED.to_json()) == RANGED != MODEL
    for testbed in TESTBEDS.values():
        assert CostModel.from_json(testbed.costs.to_json()) == testbed.costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "the JSON lacks"),
        ("{}", "the JSON lacks"),
        (MODEL.to_json().replace('"version": 2', '"version": 1'), "fusedmoe profile --json"),
        (MODEL.to_json().replace("gemm", "gem"), "'gem' is not one of"),
        (MODEL.to_json().replace("alpha_s", "alpha"), "missing or unknown field"),
        (MODEL.to_json().replace("0.7", "0"), "contention"),
        (MODEL.to_json().replace('"machine"', '"engine"'), "missing or unknown field"),
        (RANGED.to_json().replace('"least"', '"first"'), "missing or unknown field"),
        (RANGED.to_json().replace("2000000000.0", '"much"'), "invalid ranges"),
    ],
)
def test_from_json_rejects_invalid_cost_model(text, message):
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(text)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan, "0.5"])
def test_contention_rejects_invalid_fraction(bad):
    with pytest.raises(
        ConfigError, match=r"contention: intra_beside_inter must be a fraction of the speed in \(0, 1\]"
    ):
        Contention.between_links(bad)
    with pytest.raises(ConfigError, match=r"Contention\.between_links"):
        CostModel({}, bad)


def test_least_time_under_contention_equals_linear_program():
    """Compare with a linear program over the time that each set of resources runs together."""
    rng = random.Random()
    for _ in range(50):
        contention = Contention(*(rng.choice([1.0, rng.uniform(0.1, 1.0)]) for _ in range(6)))
        work = [rng.choice([0.0, rng.random()]) for _ in RESOURCES]
        sets = [of for count in (1, 2, 3) for of in combinations(RESOURCES, count)]
        speeds = [
            [-math.prod(contention.speed_fraction(r, one) for one in of) if r in of else 0.0 for of in sets]
            for r in RESOURCES
        ]
        # Each resource can do at least its work; doing more is allowed.
        solved = linprog(np.ones(len(sets)), speeds, [-one for one in work])
        assert contention.lower_bound_s(*work) == pytest.approx(solved.fun, rel=1e-9, abs=1e-12)
    assert NO_CONTENTION.lower_bound_s(1.0, 3.0, 2.0) == 3.0
    assert Contention.between_links(0.4).lower_bound_s(0.0, 3.0, 2.0) == pytest.approx(5.0)  # sequential is shorter


def test_missing_line_error_names_line():
    with pytest.raises(ConfigError, match="'gemm' was not measured; run fusedmoe profile"):
        CostModel({}).line("gemm")
