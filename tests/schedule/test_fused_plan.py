"""Fused operations in plans: where they stand, what they wait for, and what is said of plans that cannot be."""

from __future__ import annotations

import pickle

import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import fused_pass, half, pass_by_degree
from fusedmoe.schedule.task import FUSED, LINKS, PIPELINE, Task, resources_of
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import PHASES, SYMBOLS

WHOLE = """compute: DEC0 DEC1
inter: DEC0 DEC1"""


def needs(plan: Plan) -> dict[str, set[str]]:
    return {name(task): {name(one) for one in before} for task, before in plan.dependencies.items()}


def test_each_does_all_of_a_layer_that_is_split_over_one_axis():
    assert set(FUSED) == {"dispatch-expert-combine", "all-gather-expert-reduce-scatter"}
    for kind, parts in FUSED.items():
        assert kind == "-".join(parts) and SYMBOLS[kind] == "".join(SYMBOLS[part] for part in parts)
        assert resources_of(kind) == ("compute", LINKS[parts[0]]) and LINKS[parts[0]] == LINKS[parts[-1]]


def test_a_plan_reads_as_its_text_and_writes_it_again():
    plan = Plan.parse(WHOLE)
    assert str(plan) == WHOLE and len(plan) == len(list(plan)) == 2 and plan.degrees == {("forward", 0): 2}
    assert plan.resources[Task("dispatch-expert-combine", 1)] == ("compute", "inter") and plan.inter == plan.compute


@pytest.mark.parametrize("kind", FUSED)
def test_a_pass_by_one(kind):
    for phase in PHASES:
        plan = fused_pass(kind, 3, phase)
        assert {task.kind for task in plan} == {kind} and plan.degrees == {(phase, 0): 3}
        for again in (Plan.parse(str(plan)), pickle.loads(pickle.dumps(plan))):
            assert again == plan and (again.fingerprint, again.sequence) == (plan.fingerprint, plan.sequence)
    # Plans by collectives have its parts, though a layer could run it.
    assert pass_by_degree("fsmoe", (*PIPELINE, kind), 2, "forward") == pass_by_degree("fsmoe", PIPELINE, 2, "forward")


def test_what_waits_for_what():
    plan = Plan.parse(
        """
        compute: f0.A f0.DEC0 f0.DEC1 f0.U f1.A f1.E0 .L b1.AGERS0 b1.A b0.DEC0 b0.A
        intra: b1.AGERS0
        inter: f0.DEC0 f0.DEC1 f1.D0 f1.C0 b0.DEC0 b1.AR0
        """
    )
    found = needs(plan)
    assert found["f0.DEC1"] == {"f0.A"} and found["f0.U"] == {"f0.DEC0", "f0.DEC1"}
    assert found["f1.A"] == {"f0.U"} and found["b1.AGERS0"] == {".L"} and found["b1.A"] == {"b1.AGERS0"}
    assert found["b0.DEC0"] == {"b1.A"} and found["b0.A"] == {"b0.DEC0"} and found["b1.AR0"] == {"b1.A"}
    assert Plan.parse(str(plan)) == plan and Plan.parse(str(half(plan, "backward"))) == half(plan, "backward")


def test_micro_batches_go_through_it():
    found = needs(Plan.parse("compute: f0.A0 f0.A1 f0.DEC0 f0.DEC1 f1.A0 f1.A1\ninter: f0.DEC0 f0.DEC1"))
    assert found["f0.DEC1"] == {"f0.A1"} and found["f1.A1"] == {"f0.DEC1", "f1.A0"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("inter: DEC0", ["f0.DEC0 (dispatch-expert-combine) is on inter, but computes and sends at once", "compute"]),
        ("compute: DEC0", ["f0.DEC0", "is on compute, but computes and sends at once; put it on compute and inter"]),
        ("compute: AGERS0\ninter: AGERS0", ["f0.AGERS0", "on compute and inter, but", "put it on compute and intra"]),
        ("compute: DEC0\nintra: DEC0\ninter: DEC0", ["f0.DEC0", "on compute and intra and inter", "compute and inter"]),
        ("compute: DEC0\ninter: DEC0 DEC0", ["f0.DEC0 is on inter twice", "take one"]),
        ("compute: DEC0 DEC0\ninter: DEC0", ["f0.DEC0 is on compute twice"]),
        (
            "compute: DEC0 DEC1\ninter: DEC1 DEC0",
            ["would never end", "stands behind f0.DEC1 on inter", "stands behind f0.DEC0 on compute", "move f0.DEC"],
        ),
        ("compute: DEC0 DEC2\ninter: DEC0 DEC2", ["f0.DEC1 is missing", "number f0.DEC2"]),
        (
            "compute: DEC0 E0\ninter: DEC0",
            ["f0.E0 (expert) is beside f0.DEC0 (dispatch-expert-combine), which does all", "take one of them away"],
        ),
        ("compute: AGERS0\nintra: AGERS0\ninter: D0 C0", ["is beside f0.AGERS0"]),
        ("compute: DEC0 AGERS0\nintra: AGERS0\ninter: DEC0", ["f0.AGERS0", "f0.DEC0", "is beside"]),
        ("compute: DEC0(12)\ninter: DEC0(12)", ["f0.DEC0 has a size"]),
        ("compute: DE0\ninter: DE0", ["line 1", "'DE0' is not a task", "symbols: G O D AG E RS C DEC AGERS"]),
    ],
)
def test_a_bad_plan_is_refused_with_the_task_and_the_cure(text, parts):
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text)
    for part in parts:
        assert part in str(caught.value)
