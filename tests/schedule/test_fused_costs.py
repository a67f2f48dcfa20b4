"""What fused operations take: the formula against tiles that go through their stages one by one, and by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel, FusedCosts
from fusedmoe.schedule.fused import Chunks, TiledChunks
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.task import FUSED, PIPELINE, Task, road_with
from fusedmoe.schedule.testbeds import TESTBEDS
from fusedmoe.schedule.workload import Workload

BOTH = FusedCosts(4, {"intra": 1e-3, "inter": 2e-3})
MODEL = replace(TESTBEDS["B"].costs, fused=BOTH)
WORK = Workload(2, 8, 4, 10, experts=3, k=2, capacity_factor=1.5, expert="swiglu", ep=3, esp=2)  # 48 rows


def tile_by_tile(stages: list[float], tiles: int) -> float:
    """Seconds of equal tiles that go through stages of so many seconds for all, each stage one tile at a time."""
    free = [0.0] * len(stages)
    at = 0.0
    for _ in range(tiles):
        at = 0.0
        for number, whole_s in enumerate(stages):
            free[number] = at = max(at, free[number]) + whole_s / tiles
    return at


def test_a_step_takes_what_its_tiles_take_one_by_one():
    rng = random.Random()
    for _ in range(200):
        tiles, degree = rng.randint(1, 30), rng.randint(1, 6)
        stages = {name: rng.choice([0.0, rng.random(), 10 ** rng.uniform(-3, 1)]) for name in ("inter", "intra")}
        stages["compute"] = rng.random()
        stages.pop(rng.choice(["inter", "intra", "neither"]), None)
        part = TiledChunks(0.0, 0.0, (stages,), 1 / (tiles * degree))
        of_chunk = [whole_s / degree for whole_s in stages.values()]
        assert part.seconds(degree) == pytest.approx(tile_by_tile(of_chunk, tiles), rel=1e-9)


def test_a_chunk_smaller_than_a_tile_hides_nothing():
    part = TiledChunks(0.5, 0.25, ({"inter": 4.0, "compute": 6.0}, {"compute": 2.0}), 0.2)
    assert part.seconds(1) == 0.75 + 6 + 0.2 * 4 + 2
    assert part.seconds(5) == part.seconds(10) * 2 - 0.75 == 0.75 + (4 + 6 + 2) / 5


def layer_costs(workload=WORK, model=MODEL, parts=(*PIPELINE, *FUSED)):
    return workload.step_costs(model, [0], parts).layers[0]


def test_each_kind_by_hand():
    """Three products; 4 of 48 rows are a tile. Backward, the product of the gradients of results is the last one's."""
    names = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "gemm")
    a2a, ag, rs, gemm = (MODEL.lines[name] for name in names)
    volume, tile = WORK.volumes(), 4 / 48
    d, g, s = a2a.beta_s * volume["dispatch"], ag.beta_s * volume["all-gather"], rs.beta_s * volume["reduce-scatter"]
    one = gemm.beta_s * volume["expert"] / 3  # product
    layer = layer_costs()
    found = {phase: {kind: part.seconds(1) for kind, part in of.items()} for phase, of in layer.fused.items()}

    def tiled(*stages: float) -> float:
        return max(stages) + tile * (sum(stages) - max(stages))

    start = 3 * gemm.alpha_s
    assert found["forward"] == pytest.approx(
        {
            "expert-reduce-scatter": start + 1e-3 + 2 * one + tiled(one, s),
            "expert-reduce-scatter-combine": start + 3e-3 + 2 * one + tiled(one, s, d),
            "all-gather-expert": start + 1e-3 + tiled(g, 2 * one) + one,
            "all-gather-expert-reduce-scatter": start + 2e-3 + tiled(g, 2 * one) + tiled(one, s),
            "all-gather-expert-reduce-scatter-combine": start + 4e-3 + tiled(g, 2 * one) + tiled(one, s, d),
            "dispatch-all-gather-expert": start + 3e-3 + tiled(d, g, 2 * one) + one,
            "dispatch-all-gather-expert-reduce-scatter": start + 4e-3 + tiled(d, g, 2 * one) + tiled(one, s),
            "dispatch-all-gather-expert-reduce-scatter-combine": (
                start + 6e-3 + tiled(d, g, 2 * one) + tiled(one, s, d)
            ),
        }
    )
    # Backward: three products more, of weights, that nothing travels beside.
    assert found["backward"]["all-gather-expert"] == pytest.approx(2 * start + 1e-3 + tiled(g, one) + 5 * one)
    assert found["backward"]["expert-reduce-scatter-combine"] == pytest.approx(
        2 * start + 3e-3 + 4 * one + tiled(2 * one, s, d)
    )
    # In chunks a tile is more of it.
    in_three = layer.fused["forward"]["all-gather-expert"].seconds(3)
    assert in_three == pytest.approx(start + 1e-3 + (max(g, 2 * one) + 3 * tile * min(g, 2 * one) + one) / 3)


def test_without_shards_or_peers():
    assert layer_costs(replace(WORK, esp=1), parts=(*PIPELINE[::2], *FUSED)).fused["forward"].keys() == {
        *("dispatch-expert", "expert-combine", "dispatch-expert-combine")
    }
    within = {"all-gather-expert", "expert-reduce-scatter", "all-gather-expert-reduce-scatter"}
    assert layer_costs(replace(WORK, ep=1)).fused["backward"].keys() == within
    assert layer_costs(replace(WORK, ep=1, esp=1)).fused["forward"] == {}
    # Parts that have no peers are tasks all the same where the layer has them (hooks): nothing may go around them.
    assert layer_costs(replace(WORK, esp=1)).fused["forward"] == {}


def test_links_without_signals_have_no_fused_operations():
    inside = layer_costs(model=replace(MODEL, fused=FusedCosts(128, {"intra": 0.0})))
    assert set(inside.fused["forward"]) == {
        *("all-gather-expert", "expert-reduce-scatter", "all-gather-expert-reduce-scatter")
    }
    assert layer_costs(model=replace(MODEL, fused=FusedCosts(128, {}))).fused["forward"] == {}
    assert layer_costs(model=TESTBEDS["B"].costs).fused == {}


def test_only_what_a_layer_can_run_is_in_its_costs():
    """A layer names the fused operations that it has work for among its parts; others are not for its plans."""
    assert layer_costs(parts=PIPELINE).fused["forward"] == {}
    one = layer_costs(parts=(*PIPELINE, "all-gather-expert", "dispatch-expert"))
    assert one.fused["forward"].keys() == one.fused["backward"].keys() == {"all-gather-expert"}
    assert one.chunks == layer_costs(parts=PIPELINE).chunks
    assert [tuple(road) for road in one.roads("forward")] == [PIPELINE, road_with("all-gather-expert", PIPELINE)]
    with pytest.raises(ConfigError, match="nothing is known of a fused expert-combine"):
        one.road("forward", "expert-combine")


def test_overlaps_say_what_hides():
    steps = ({"inter": 4.0, "compute": 6.0}, {"inter": 9.0, "intra": 1.0, "compute": 2.0})
    part = TiledChunks(0.5, 0.25, steps, 0.01, Chunks(1.0, 8.0))
    found = part.overlap(2)
    assert found.links["inter"] == ((4 + 9) / 2, (6 - 4) / 2) and found.links["intra"] == (1 / 2, (9 - 1) / 2)
    assert found.compute_s == 0.5 + (1 + 8 / 2) + (6 + 2) / 2
    for link, (work_s, slack_s) in found.links.items():
        assert work_s + slack_s <= part.seconds(2)
        # Rows that are late by no more than the slack change nothing; then each second counts.
        slower = [{r: s * (1 + 1e-3 * (r == link)) for r, s in step.items()} for step in part.steps]
        grown = replace(part, steps=tuple(slower)).seconds(2) - part.seconds(2)
        assert 0 < grown <= 1e-3 * work_s * (1 + 1e-9)


def test_seconds_of_a_plan():
    layer = layer_costs()
    costs = StackCosts((layer,) * 2)
    plan = Plan.parse(
        "compute: f0.AGE0 f0.AGE1 f1.DAGERSC0 b1.E0 b0.ERS0\nintra: f0.AGE0 f0.AGE1 f0.RS0 f0.RS1 f1.DAGERSC0 b1.AG0 "
        "b1.RS0 b0.AG0 b0.ERS0\ninter: f0.D0 f0.D1 f0.C0 f0.C1 f1.DAGERSC0 b1.D0 b1.C0 b0.D0 b0.C0"
    )
    seconds, overlaps = costs.seconds(plan), costs.overlaps(plan)
    gathered = layer.fused["forward"]["all-gather-expert"]
    assert seconds[Task("all-gather-expert", 1)] == gathered.seconds(2)
    assert overlaps.keys() == set(plan.fused) and overlaps[Task("all-gather-expert", 1)] == gathered.overlap(2)
    whole = "dispatch-all-gather-expert-reduce-scatter-combine"
    assert seconds[Task(whole, 0, 1)] == layer.fused["forward"][whole].seconds(1)
    assert makespan(plan, costs) > 0
    with pytest.raises(ConfigError, match=r"nothing is known of f0\.DE0"):
        costs.seconds(Plan.parse("compute: DE0\ninter: DE0"))


def test_weight_gradients_apart_are_not_in_it():
    costs = WORK.step_costs(MODEL, [0], (*PIPELINE, *FUSED), whole=True)
    texts = ("compute: b0.ERS0 b0.WG0\nintra: b0.AG0 b0.ERS0", "compute: b0.ERS0\nintra: b0.AG0 b0.ERS0")
    apart, together = (Plan.parse(text) for text in texts)
    task, weights = Task("expert-reduce-scatter", 0, 0, "backward"), Task("weight-gradient", 0, 0, "backward")
    seconds = costs.seconds(apart)
    assert seconds[task] + seconds[weights] == pytest.approx(costs.seconds(together)[task])
    assert seconds[weights] == pytest.approx(costs.layers[0].chunks["backward"]["expert"].seconds(1) / 2)
    assert costs.overlaps(apart)[task].links == costs.overlaps(together)[task].links


def test_a_model_survives_json():
    assert CostModel.from_json(MODEL.to_json()) == MODEL
    assert json.loads(MODEL.to_json())["fused"] == asdict(BOTH)
    assert "fused" not in json.loads(TESTBEDS["B"].costs.to_json())  # as files have been until now
    assert CostModel.from_json(TESTBEDS["B"].costs.to_json()).fused is None


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        ({"tile_rows": 0, "signal_s": {}}, "tile_rows must be an integer from 1, not 0"),
        ({"tile_rows": 1.5, "signal_s": {}}, "tile_rows must be an integer"),
        ({"tile_rows": 1, "signal_s": {"compute": 1e-6}}, "'compute' is no link"),
        ({"tile_rows": 1, "signal_s": {"intra": -1e-6}}, "a signal on intra cannot take -1e-06 s"),
        ({"tile_rows": 1, "signal_s": {"intra": "soon"}}, "a signal on intra cannot take 'soon' s"),
        ({"tile_rows": 1}, "missing or not known"),
        ({"tile_rows": 1, "signal_s": 1e-6}, "missing or not known"),
        ([], "missing or not known"),
        (None, "missing or not known"),
    ],
)
def test_json_that_is_no_model_is_refused(fused, message):
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(json.dumps(json.loads(MODEL.to_json()) | {"fused": fused}))
