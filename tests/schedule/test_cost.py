"""Cost models: lines through measured points, and what machines are as JSON."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import ALONE, LINES, Contention, CostModel, Line, fit
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.task import RESOURCES

MODEL = CostModel(
    {name: Line(1e-4 * (i + 1), 1e-9 * (i + 1), 0.999) for i, name in enumerate(LINES)},
    Contention(inter_beside_intra=0.7),
    "here",
)


def test_a_line_is_found_again():
    rng = random.Random()
    alpha, beta = 10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-12, -8)
    line = fit([(n * 2**20, alpha + beta * n * 2**20) for n in range(1, 25)])
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6) and line.beta_s == pytest.approx(beta, rel=1e-9)
    assert line.r2 == pytest.approx(1.0, abs=1e-9)


def test_the_fit_is_ordinary_least_squares():
    rng = np.random.default_rng()
    n = rng.uniform(1e5, 1e8, 30)
    seconds = 1e-4 + 2e-9 * n + rng.normal(0, 2e-2, 30)
    matrix = np.stack([np.ones(30), n], 1)
    (alpha, beta), residual, *_ = np.linalg.lstsq(matrix, seconds)
    line = fit(zip(n, seconds, strict=True))
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-9) and line.beta_s == pytest.approx(beta, rel=1e-6)
    assert line.r2 == pytest.approx(1 - residual[0] / ((seconds - seconds.mean()) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("points", [[], [(1, 1)], [(1, 1), (1, 2)], [(1, 1), (2, float("nan"))], [(1, 1), (np.inf, 2)]])
def test_points_that_make_no_line_are_refused(points):
    with pytest.raises(ConfigError, match="measure more sizes"):
        fit(points)


def test_equal_times_fit_a_level_line():
    assert fit([(1, 2.0), (2, 2.0), (3, 2.0)]) == Line(2.0, 0.0, 1.0)


def test_the_inverse_is_zero_below_the_start():
    line = Line(0.5, 0.25)
    assert line.amount(line.seconds(12.0)) == pytest.approx(12.0)
    assert line.amount(0.5) == line.amount(0.1) == line.amount(-1.0) == 0.0
    assert Line(0.5, 0.0).amount(0.4) == 0.0 and Line(0.5, 0.0).amount(0.6) == math.inf  # size is free


def test_a_model_survives_json():
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    assert CostModel.from_json(replace(MODEL, tiled=True).to_json()) == replace(MODEL, tiled=True) != MODEL
    for testbed in TESTBEDS.values():
        assert CostModel.from_json(testbed.costs.to_json()) == testbed.costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "is not one"),
        ("{}", "is not one"),
        (MODEL.to_json().replace('"version": 2', '"version": 1'), "fusedmoe profile --json"),
        (MODEL.to_json().replace("gemm", "gem"), "'gem' is not one of"),
        (MODEL.to_json().replace("alpha_s", "alpha"), "missing or not known"),
        (MODEL.to_json().replace("0.7", "0"), "contention"),
        (MODEL.to_json().replace('"machine"', '"engine"'), "missing or not known"),
    ],
)
def test_json_that_is_no_model_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(text)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan, "0.5"])
def test_a_contention_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="contention: intra_beside_inter is a share"):
        Contention.between_links(bad)
    with pytest.raises(ConfigError, match=r"Contention\.between_links"):
        CostModel({}, bad)


def test_the_least_time_of_work_is_that_of_the_best_mix():
    """By a linear programme that says how long each set of resources works together."""
    rng = random.Random()
    for _ in range(50):
        contention = Contention(*(rng.choice([1.0, rng.uniform(0.1, 1.0)]) for _ in range(6)))
        work = [rng.choice([0.0, rng.random()]) for _ in RESOURCES]
        sets = [of for count in (1, 2, 3) for of in combinations(RESOURCES, count)]
        speeds = [
            [-math.prod(contention.share(r, one) for one in of) if r in of else 0.0 for of in sets] for r in RESOURCES
        ]
        # Each resource can do at least its work; what is done beyond it is no harm.
        solved = linprog(np.ones(len(sets)), speeds, [-one for one in work])
        assert contention.least_s(*work) == pytest.approx(solved.fun, rel=1e-9, abs=1e-12)
    assert ALONE.least_s(1.0, 3.0, 2.0) == 3.0
    assert Contention.between_links(0.4).least_s(0.0, 3.0, 2.0) == pytest.approx(5.0)  # they had better take turns


def test_a_line_that_was_not_measured_is_named():
    with pytest.raises(ConfigError, match="'gemm'; measure it"):
        CostModel({}).line("gemm")
