from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import LINES, CostModel, Line, fit
from fusedmoe.schedule.grid import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ALIGNMENT, Stream
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts, gradient_ranges
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.workload import Workload

MODEL = CostModel({name: Line(1e-4 * (i + 1), 1e-9 * (i + 1), 0.999) for i, name in enumerate(LINES)}, 0.7, "here")


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
        (MODEL.to_json().replace('"version": 1', '"version": 2'), "is not one"),
        (MODEL.to_json().replace("gemm", "gem"), "'gem' is not one of"),
        (MODEL.to_json().replace("alpha_s", "alpha"), "missing or not known"),
        (MODEL.to_json().replace("0.7", "0"), "contention"),
        (MODEL.to_json().replace('"machine"', '"engine"'), "missing or not known"),
    ],
)
def test_json_that_is_no_model_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(text)


def test_a_line_that_was_not_measured_is_named():
    with pytest.raises(ConfigError, match="'gemm'; measure it"):
        CostModel({}).line("gemm")


def test_volumes_by_hand():
    # 2 samples of 8 tokens, M = 4, top-2 with factor 1.5: 2·1.5·16 = 48 rows of 4·4 bytes, split over 2 shards.
    work = Workload(2, 8, 4, 10, experts=3, k=2, capacity_factor=1.5, ep=3, esp=2)
    rows = 48
    assert work.volumes() == {
        "dispatch": rows * 16 / 2,
        "all-gather": rows * 16,
        "expert": 2 * 2 * rows * 4 * 10 / 2,
        "reduce-scatter": rows * 16,
        "combine": rows * 16 / 2,
    }
    assert replace(work, expert="swiglu").volumes()["expert"] == 3 * 2 * rows * 4 * 10 / 2
    assert replace(work, capacity_factor=None).volumes() == replace(work, capacity_factor=1.0).volumes()
    assert set(replace(work, ep=1).volumes()) == {"all-gather", "expert", "reduce-scatter"}
    assert set(replace(work, esp=1).volumes()) == {"dispatch", "expert", "combine"}
    # Four 4 x 4 projections over two ranks, and a 4 x 3 gate, in fp32.
    assert work.gradient_bytes() == 4 * (4 * 16 // 2 + 12)


def test_layer_costs_by_hand():
    work = Workload(2, 8, 4, 10, experts=3, k=2, capacity_factor=1.5, ep=3, esp=2)
    costs = work.layer_costs(MODEL)
    a2a, ag, rs, _, gemm, copy = (MODEL.lines[name] for name in LINES)
    assert costs.regroup_s == pytest.approx(copy.seconds(4 * 48 * (4 + 10 / 2)))  # rows, and half of each hidden row
    assert costs.micro is not None and costs.micro.apart_s == 0
    micro = work.layer_costs(replace(MODEL, tiled=True)).micro
    assert micro is not None
    assert micro.apart_s == pytest.approx(copy.seconds(4 * 48 * 2 * 10 / 2))  # activations and their gradients
    volume = work.volumes()
    for phase, twice in (("forward", 1), ("backward", 2)):
        chunks = costs.chunks[phase]
        for kind, line in {"dispatch": a2a, "combine": a2a, "all-gather": ag, "reduce-scatter": rs}.items():
            assert chunks[kind].seconds(4) == pytest.approx(line.alpha_s + line.beta_s * volume[kind] / 4)
        expert = twice * (2 * gemm.alpha_s + gemm.beta_s * volume["expert"] / 4)
        assert chunks["expert"].seconds(4) == pytest.approx(expert)
        attention = twice * (6 * gemm.alpha_s + gemm.beta_s * 2 * (4 * 16 * 16 + 2 * 16 * 8 * 4) / 2)
        shared = ag.seconds(16 * 4 * 4) + rs.seconds(16 * 4 * 4)
        assert costs.dense_total_s(phase) == pytest.approx(attention + shared)


@pytest.mark.parametrize("change", [{"batch": 0}, {"k": -1}, {"capacity_factor": 0.0}, {"expert": "mlp"}])
def test_a_workload_that_cannot_be_is_refused(change):
    with pytest.raises(ConfigError, match="workload"):
        Workload(**{"batch": 1, "seq_len": 8, "model_dim": 4, "hidden": 8, "experts": 2} | change)


def test_published_coefficients_give_the_published_times():
    """Table 2, Mixtral-7B on testbed A (ms): both model-parallel and expert-sharding collectives count there."""
    work = Workload(4, 1024, 4096, 14336, experts=6, ep=6, esp=8, expert="swiglu")
    costs = work.layer_costs(TESTBEDS["A"].costs)
    assert costs.micro is not None and costs.regroup_s == costs.micro.apart_s == 0  # nothing is published of copies
    chunks = costs.chunks["forward"]
    rows = work.tokens * work.model_dim * 4
    line = TESTBEDS["A"].costs.line
    assert 2e3 * chunks["dispatch"].seconds(1) == pytest.approx(19.5, rel=0.05)
    shared = line("all-gather/esp").seconds(rows)
    assert 1e3 * (chunks["all-gather"].seconds(1) + shared) == pytest.approx(12.3, rel=0.05)
    shared = line("reduce-scatter/esp").seconds(rows)
    assert 1e3 * (chunks["reduce-scatter"].seconds(1) + shared) == pytest.approx(13.7, rel=0.1)
    assert 1e3 * chunks["expert"].seconds(1) == pytest.approx(15.6, rel=0.2)
    # Mixtral shares keys and values between heads: 2.5·M² parameters instead of 4·M².
    assert 1e3 * line("all-reduce/dp").seconds(4 * 2.5 * 4096**2 / 8) == pytest.approx(26.45, rel=0.01)


def stack(gradient_bytes: list[int]) -> StepCosts:
    chunks = {"expert": StageTime(1.0, 8.0)}
    layers = [
        LayerCosts({"forward": chunks, "backward": chunks}, {"forward": {}, "backward": {}}, n) for n in gradient_bytes
    ]
    return StepCosts(tuple(layers), Line(0.5, 0.001))


def test_seconds_of_a_plan():
    plan = Plan.parse("compute: f0.E0 f0.E1 f1.E0 b1.E0 b0.E0\ninter: b1.AR0(100) b0.AR0(250) b0.AR1")
    seconds = stack([500, 200]).seconds(plan)
    assert seconds[Task("expert", 1, 0)] == 1 + 8 / 2 and seconds[Task("expert", 0, 1)] == 9
    # The stream is layer 1's 200 bytes, then layer 0's 500: the last piece has what is left of 700.
    pieces = [seconds[task] for task in plan.inter]
    assert pieces == pytest.approx([0.5 + 0.1, 0.5 + 0.25, 0.5 + 0.35])
    assert [*gradient_ranges(plan, [500, 200]).values()] == [range(0, 100), range(100, 350), range(350, 700)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inter: b1.AR0(201)", "b1.AR0 carries bytes 0 to 201, but layer 1's gradient ends at 200"),
        ("inter: b0.AR0(10) b1.AR0 b1.AR1", "b1.AR1 carries bytes 200 to 200"),
        ("inter: b2.AR0", "b2.AR0 is of a layer that is not there"),
        ("compute: f0.A", "nothing is known of f0.A"),
        ("compute: .Opt", "nothing is known of .Opt"),
        ("compute: f7.E0", "nothing is known of f7.E0"),
        ("compute: f0.WG0", "nothing is known of f0.WG0"),
    ],
)
def test_a_plan_for_other_layers_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        stack([500, 200]).seconds(Plan.parse(text))


def test_pieces_are_cut_in_the_order_of_back_propagation():
    stream = Stream([1000, 2000, 3000])
    assert stream.available(3) == 0 and stream.available(2) == 3000 and stream.available(0) == 6000
    assert stream.cut(1e9, 3) == [] == stream.cut(100, 2)
    assert stream.cut(600, 2) == [Task("gradient-all-reduce", 0, 2, "backward", 2 * ALIGNMENT)]
    # The rest of layer 2's, and of layer 1's as much as fills whole blocks: the piece is ready with layer 1.
    assert stream.cut(4000, 1) == [Task("gradient-all-reduce", 0, 1, "backward", 3840)]
    assert stream.cut(1e9, 1) == [Task("gradient-all-reduce", 1, 1, "backward", 5000 - 512 - 3840)]
    assert stream.cut(1e9, 1) == []
    assert stream.cut(900, 0) == [Task("gradient-all-reduce", 0, 0, "backward", 1000)]  # not worth a further start
    assert stream.start == 6000
