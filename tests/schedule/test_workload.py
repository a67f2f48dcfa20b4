"""Bytes and FLOPs of a layer, and their time, also by fused operations."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import LINES, CostModel, FusedCosts, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import Degrees, pass_tasks
from fusedmoe.schedule.task import FUSED
from fusedmoe.schedule.workload import Workload, one_sided_s, tile_pipeline_s
from tests.schedule.test_cost import MODEL as LINES_BY_HAND


def test_volumes_of_worked_example():
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


def test_layer_costs_of_worked_example():
    work = Workload(2, 8, 4, 10, experts=3, k=2, capacity_factor=1.5, ep=3, esp=2)
    costs = work.layer_costs(LINES_BY_HAND)
    a2a, ag, rs, _, gemm, copy = (LINES_BY_HAND.lines[name] for name in LINES)
    assert costs.rechunk_s == pytest.approx(copy.seconds(4 * 48 * (4 + 10 / 2)))  # rows, and half of each hidden row
    assert costs.micro is not None and costs.micro.w_task_overhead_s == 0
    micro = work.layer_costs(replace(LINES_BY_HAND, tiled=True)).micro
    assert micro is not None
    assert micro.w_task_overhead_s == pytest.approx(
        copy.seconds(4 * 48 * 2 * 10 / 2)
    )  # activations and their gradients
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


@pytest.mark.parametrize(
    "trained, products", [(("w1", "w2"), 3), (("w1",), 2), (("w2",), 1), ((), 0)], ids=lambda value: str(value)
)
def test_frozen_weights_reduce_backward_time(trained, products):
    whole = replace(OVER_EXPERTS, k=1, capacity_factor=3.0)
    work, tiled = replace(whole, trained=trained), replace(LINES_BY_HAND, tiled=True)
    gemm, copy = LINES_BY_HAND.line("gemm"), LINES_BY_HAND.line("copy")
    costs = work.layer_costs(tiled)
    # Three of six backward products are of weight gradients: two for W1's halves, and one for W2.
    one_s = gemm.beta_s * work.volumes()["expert"] / 3 / 4 + gemm.alpha_s
    assert costs.chunks["forward"]["expert"].seconds(4) == pytest.approx(3 * one_s)
    assert costs.chunks["backward"]["expert"].seconds(4) == pytest.approx((3 + products) * one_s)
    assert costs.micro is not None and ("expert" in costs.micro.weights) == bool(trained)
    if trained:
        assert costs.micro.weights["expert"].seconds(4) == pytest.approx(products * one_s)
    # Saved are pre-activations, and rows for W1; between the halves activations for W2, and dH for W1.
    assert costs.rechunk_s == pytest.approx(copy.seconds(4 * 48 * (20 + 4 * ("w1" in trained))))
    assert costs.micro.w_task_overhead_s == pytest.approx(copy.seconds(4 * 48 * 10 * products))
    assert (work.shapes == whole.shapes) == (products == 3)


def test_frozen_experts_have_no_weight_gradient_tasks():
    frozen = replace(OVER_EXPERTS, trained=())
    for work in (OVER_EXPERTS, frozen):
        costs = work.step_costs(MODEL, [0, 0], work.volumes(), whole=True)
        tasks = list(pass_tasks(costs, 1, "backward", Degrees(2, 2), weights=True))
        kinds = {task.kind for task in tasks}
        assert "attention-weight-gradient" in kinds and ("weight-gradient" in kinds) == (work is OVER_EXPERTS)
        plan = POLICIES["lancet"].plan(costs)
        of_all = OVER_EXPERTS.step_costs(MODEL, [0, 0], work.volumes(), whole=True)
        assert ("weight-gradient" in {task.kind for task in plan}) == (work is OVER_EXPERTS)
        assert work is OVER_EXPERTS or makespan(plan, costs) < makespan(POLICIES["lancet"].plan(of_all), of_all)
        assert sum(costs.durations(tasks).values()) > 0
        # The bound and the search have costs without these.
        assert makespan(POLICIES["joint"].plan(costs), costs) > 0


@pytest.mark.parametrize(
    "change", [{"batch": 0}, {"k": -1}, {"capacity_factor": 0.0}, {"expert": "mlp"}, {"trained": ("w3",)}]
)
def test_invalid_workload_is_rejected(change):
    with pytest.raises(ConfigError, match="workload"):
        Workload(**{"batch": 1, "seq_len": 8, "model_dim": 4, "hidden": 8, "experts": 2} | change)


def test_published_coefficients_reproduce_published_times():
    """Table 2, Mixtral-7B on testbed A (ms): both model-parallel and expert-sharding collectives count there."""
    work = Workload(4, 1024, 4096, 14336, experts=6, ep=6, esp=8, expert="swiglu")
    costs = work.layer_costs(TESTBEDS["A"].costs)
    assert (
        costs.micro is not None and costs.rechunk_s == costs.micro.w_task_overhead_s == 0
    )  # no published figures for copies
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


BOTH = FusedCosts(4, {"intra": 1e-3, "inter": 2e-3})
MODEL = replace(TESTBEDS["B"].costs, fused=BOTH)
OVER_EXPERTS = Workload(2, 8, 4, 10, experts=3, k=2, capacity_factor=1.5, expert="swiglu", ep=3)  # 48 rows
OVER_SHARDS = replace(OVER_EXPERTS, ep=1, esp=2)
OVER = "dispatch-expert-combine"


def tile_by_tile(stages: list[float], tiles: int) -> float:
    """Seconds of equal tiles in a pipeline whose stages have the given total seconds and process one tile at a time."""
    free = [0.0] * len(stages)
    at = 0.0
    for _ in range(tiles):
        at = 0.0
        for number, whole_s in enumerate(stages):
            free[number] = at = max(at, free[number]) + whole_s / tiles
    return at


def test_overlapped_time_equals_tile_pipeline():
    rng = random.Random()
    for _ in range(200):
        tiles = rng.randint(1, 30)
        stages = [rng.choice([0.0, rng.random(), 10 ** rng.uniform(-3, 1)]) for _ in range(rng.randint(1, 3))]
        assert tile_pipeline_s(stages, 1 / tiles) == pytest.approx(tile_by_tile(stages, tiles), rel=1e-9)


@pytest.mark.parametrize(
    ("workload", "kind", "link", "lines"),
    [
        (OVER_EXPERTS, "dispatch-expert-combine", "inter", ("all-to-all/ep", "all-to-all/ep")),
        (OVER_SHARDS, "all-gather-expert-reduce-scatter", "intra", ("all-gather/esp", "reduce-scatter/esp")),
    ],
)
def test_fused_time_of_worked_example(workload, kind, link, lines):
    """Three products; 4 of 48 rows are a tile. Backward, the results' gradients enter one product, of the last weight;
    three products of weight gradients overlap no communication.
    """
    volume, tile, gemm = workload.volumes(), 4 / 48, MODEL.lines["gemm"]
    there, _, back = FUSED[kind]
    d, c = (MODEL.lines[line].beta_s * volume[part] for line, part in zip(lines, (there, back), strict=True))
    one = gemm.beta_s * volume["expert"] / 3  # product
    signals, start = 2 * BOTH.signal_s[link], 3 * gemm.alpha_s

    def tiled(*stages: float) -> float:
        return max(stages) + tile * (sum(stages) - max(stages))

    found = one_sided_s(kind, workload, MODEL)
    assert found is not None
    assert found["forward"] == pytest.approx(start + signals + tiled(d, 2 * one) + tiled(one, c))
    assert found["backward"] == pytest.approx(2 * start + signals + tiled(d, one) + tiled(2 * one, c) + 3 * one)


def test_batch_smaller_than_tile_has_no_overlap():
    models = (replace(MODEL, fused=FusedCosts(rows, {"inter": 0.0})) for rows in (48, 99))
    small, smaller = (one_sided_s(OVER, OVER_EXPERTS, model) for model in models)
    assert small == smaller
    parts = OVER_EXPERTS.layer_costs(MODEL).chunks["forward"]
    alone = sum(parts[kind].whole_s for kind in parts) + parts["expert"].alpha_s
    assert small is not None and small["forward"] == pytest.approx(alone)


def test_one_sided_time_is_none_without_signal_costs():
    assert one_sided_s(OVER, OVER_EXPERTS, replace(MODEL, fused=FusedCosts(128, {"intra": 0.0}))) is None
    assert one_sided_s(OVER, OVER_EXPERTS, TESTBEDS["B"].costs) is None


def test_fused_time_uses_collective_bandwidth_only():
    """A link's time per byte is equal; only the start differs."""
    slow = replace(MODEL, lines=MODEL.lines | {"all-to-all/ep": Line(9.0, MODEL.lines["all-to-all/ep"].beta_s)})
    assert one_sided_s(OVER, OVER_EXPERTS, slow) == one_sided_s(OVER, OVER_EXPERTS, MODEL)


def test_step_plan_with_fused_task_is_rejected():
    """No part of a step runs it."""
    costs = OVER_EXPERTS.step_costs(MODEL, [0], ("dispatch", "expert", "combine", OVER))
    with pytest.raises(ConfigError, match=r"no time for f0\.DEC0"):
        costs.seconds(Plan.parse("compute: DEC0\ninter: DEC0"))


def test_fused_costs_json_round_trip():
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    assert json.loads(MODEL.to_json())["fused"] == asdict(BOTH)
    assert "fused" not in json.loads(TESTBEDS["B"].costs.to_json())  # as in existing files
    assert CostModel.from_json(TESTBEDS["B"].costs.to_json()).fused is None


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        ({"tile_rows": 0, "signal_s": {}}, "tile_rows must be an integer >= 1, not 0"),
        ({"tile_rows": 1.5, "signal_s": {}}, "tile_rows must be an integer"),
        ({"tile_rows": 1, "signal_s": {"compute": 1e-6}}, "unknown link 'compute'"),
        ({"tile_rows": 1, "signal_s": {"intra": -1e-6}}, "invalid time -1e-06 s of a signal on intra"),
        ({"tile_rows": 1, "signal_s": {"intra": "soon"}}, "invalid time 'soon' s of a signal on intra"),
        ({"tile_rows": 1}, "missing or unknown field"),
        ({"tile_rows": 1, "signal_s": 1e-6}, "missing or unknown field"),
        ([], "missing or unknown field"),
        (None, "missing or unknown field"),
    ],
)
def test_from_json_rejects_invalid_fused_costs(fused, message):
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(json.dumps(json.loads(MODEL.to_json()) | {"fused": fused}))
