"""Costs of a plan's tasks, and the boundaries of gradient buckets."""

from __future__ import annotations

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ALIGNMENT, BucketCutter
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts, gradient_ranges
from fusedmoe.schedule.task import Task


def make_step_costs(gradient_bytes: list[int]) -> StepCosts:
    chunks = {"expert": StageTime(1.0, 8.0)}
    layers = [
        LayerCosts({"forward": chunks, "backward": chunks}, {"forward": {}, "backward": {}}, n) for n in gradient_bytes
    ]
    return StepCosts(tuple(layers), Line(0.5, 0.001))


def test_plan_seconds_and_gradient_ranges():
    plan = Plan.parse("compute: f0.E0 f0.E1 f1.E0 b1.E0 b0.E0\ninter: b1.AR0(100) b0.AR0(250) b0.AR1")
    seconds = make_step_costs([500, 200]).seconds(plan)
    assert seconds[Task("expert", 1, 0)] == 1 + 8 / 2 and seconds[Task("expert", 0, 1)] == 9
    # The gradients are layer 1's 200 bytes, then layer 0's 500: the last bucket has the rest of 700.
    buckets = [seconds[task] for task in plan.inter]
    assert buckets == pytest.approx([0.5 + 0.1, 0.5 + 0.25, 0.5 + 0.35])
    assert [*gradient_ranges(plan, [500, 200]).values()] == [range(0, 100), range(100, 350), range(350, 700)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inter: b1.AR0(201)", "b1.AR0 carries bytes 0 to 201, but layer 1's gradient ends at 200"),
        ("inter: b0.AR0(10) b1.AR0 b1.AR1", "b1.AR1 carries bytes 200 to 200"),
        ("inter: b2.AR0", "b2.AR0 is in a layer that does not exist"),
        ("compute: f0.A", "no time for f0.A"),
        ("compute: .Opt", "no time for .Opt"),
        ("compute: f7.E0", "no time for f7.E0"),
        ("compute: f0.WG0", "no time for f0.WG0"),
    ],
)
def test_plan_of_other_layers_is_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        make_step_costs([500, 200]).seconds(Plan.parse(text))


def test_bucket_cutter_follows_backward_order():
    cutter = BucketCutter([1000, 2000, 3000])
    assert cutter.available_bytes(3) == 0 and cutter.available_bytes(2) == 3000 and cutter.available_bytes(0) == 6000
    assert cutter.cut(1e9, 3) == [] == cutter.cut(100, 2)
    assert cutter.cut(600, 2) == [Task("gradient-all-reduce", 0, 2, "backward", 2 * ALIGNMENT)]
    # The rest of layer 2's gradient, and whole blocks of layer 1's: the bucket is ready with layer 1.
    assert cutter.cut(4000, 1) == [Task("gradient-all-reduce", 0, 1, "backward", 3840)]
    assert cutter.cut(1e9, 1) == [Task("gradient-all-reduce", 1, 1, "backward", 5000 - 512 - 3840)]
    assert cutter.cut(1e9, 1) == []
    assert cutter.cut(900, 0) == [Task("gradient-all-reduce", 0, 0, "backward", 1000)]  # not worth a further start
    assert cutter.start == 6000
