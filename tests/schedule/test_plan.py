"""Plans as values and as text: dependencies, orders, and refused plans with the task and the fix."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.step import extract_phase, fused_pass, pass_by_degree
from fusedmoe.schedule.task import (
    FUSED,
    KINDS,
    LINKS,
    PHASES,
    PIPELINE,
    SYMBOLS,
    Task,
    resources_of,
    standard_dependencies,
)
from tests.schedule.plans import random_costs, random_plan

THREE = """compute: E0 E1 E2
intra: AG0 AG1 AG2 RS0 RS1 RS2
inter: D0 D1 D2 AR0(4096) C0 C1 C2"""


def task_names(tasks) -> list[str]:
    return [task_name(task) for task in tasks]


def test_plan_text_round_trip():
    plan = Plan.parse(THREE)
    assert str(plan) == THREE
    assert len(plan) == 16 and plan.degrees == {("forward", 0): 3}
    assert plan.inter[3] == Task("gradient-all-reduce", 0, 0, "forward", 4096)
    assert plan.on("compute") == tuple(Task("expert", chunk) for chunk in range(3))
    assert plan.resources[Task("all-gather", 1)] == ("intra",)


def test_chunk_depends_on_its_previous_pipeline_stage():
    plan = Plan.parse(THREE)
    for before, after in zip(PIPELINE, PIPELINE[1:], strict=False):
        for chunk in range(3):
            assert plan.dependencies[Task(after, chunk)] == (Task(before, chunk),)
    assert plan.dependencies[Task("dispatch", 1)] == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("inter: D0 D0", ["f0.D0", "inter twice", "remove one"]),
        ("inter: D0 AG0\nintra: AG0", ["f0.AG0", "intra and inter"]),
        ("inter: E0", ["f0.E0", "cannot run on inter", "put it on compute"]),
        ("compute: D0", ["f0.D0", "cannot run on compute", "put it on inter"]),
        ("compute: E0 E1\ninter: D0", ["f0.D1 is missing", "2 chunks"]),
        ("compute: b3.E0 b3.E2", ["b3.E1 is missing", "number b3.E2"]),
        ("inter: D", ["f0.D0 is missing", "number f0.D "]),
        ("compute: E0\ninter: C0 D0", ["circular wait", "f0.C0 needs f0.E0", "D0 is after f0.C0", "move f0.D0"]),
        (
            "compute: E0 E1\nintra: AG0 RS0 RS1 AG1\ninter: D0 D1",
            ["f0.AG1 is after f0.RS1 on intra", "f0.RS1 needs f0.E1", "f0.E1 needs f0.AG1", "move f0.AG1 forward"],
        ),
        ("inter: D0 C0\nafter D0: C0", ["circular wait", "f0.D0 needs f0.C0"]),
        ("inter: AR0(0)", ["size 0", "from 1"]),
        ("inter: D0(12)", ["f0.D0 has a size"]),
        ("inter: D0 X3", ["line 1", "'X3'"]),
        ("inter: D0\n\ninter: C0", ["line 3", "'inter' occurs twice"]),
        ("inter D0", ["line 1", "'inter D0'"]),
        ("network: D0", ["line 1", "'compute: …'"]),
        ("inter: D0\nphase: backward", ["line 2", "must precede the orders"]),
        ("phase: sideways", ["line 1"]),
        ("inter: D0\nafter D0: C7", ["line 2", "C7 is not in the plan"]),
        ("inter: D-1", ["line 1", "'D-1'"]),
    ],
)
def test_parse_error_names_task_and_fix(text, parts):
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("task", "part"),
    [
        (Task("experts", 0), "kind 'experts'"),
        (Task("expert", 0, 0, "sideways"), "phase 'sideways'"),
        (Task("expert", -1), "chunk -1"),
        (Task("expert", True), "chunk True"),
        (Task("expert", 0, 1.0), "layer 1.0"),  # type: ignore[arg-type]
    ],
)
def test_invalid_task_is_rejected(task, part):
    with pytest.raises(ConfigError, match=part):
        Plan(compute=(task,))


def test_dependency_outside_plan_is_rejected():
    with pytest.raises(ConfigError, match=r"after f0\.E0: f1\.E0 is not in the plan"):
        Plan(compute=(Task("expert", 0),), after={Task("expert", 0): (Task("expert", 0, 1),)})


def test_after_overrides_standard_dependencies():
    task, needed = Task("expert", 0), Task("dispatch", 0)
    free = Plan((task,), (), (needed,), after={task: ()})
    assert free.dependencies[task] == () and str(free).endswith("after E0:")
    same = Plan((task,), (), (needed,), after={task: (needed,)})
    assert same.after == {} and same == Plan((task,), (), (needed,))
    assert free != same and free.fingerprint != same.fingerprint
    assert Plan.parse(str(free)) == free


def test_text_round_trip_of_every_kind():
    compute = tuple(Task(kind, 0 if kind in PIPELINE else None) for kind in KINDS if kind not in (*LINKS, *FUSED))
    inter = tuple(Task(kind, 0) for kind in KINDS if kind in LINKS)
    plan = Plan(compute, (), inter, after={task: () for task in compute + inter})
    assert Plan.parse(str(plan)) == plan


def test_text_of_tasks_without_layer_or_phase():
    text = "compute: f0.E0 f.L b12.WG3 b0.E0 .Opt"
    plan = Plan.parse(text)
    assert plan.compute[1:] == (
        Task("loss", None, None, "forward"),
        Task("weight-gradient", 3, 12, "backward"),
        Task("expert", 0, 0, "backward"),
        Task("optimizer", None, None, None),
    )
    assert str(plan) == text
    alone = Plan.parse("compute: .Opt")
    assert str(alone) == "compute: .Opt" and Plan.parse(str(alone)) == alone


def test_single_layer_plan_is_written_without_prefixes():
    plan = Plan.parse("phase: backward\nlayer: 3  # the fourth\n\ncompute: E0\ninter: D0 C0")
    assert {(task.phase, task.layer) for task in plan} == {("backward", 3)}
    assert str(plan) == "phase: backward\nlayer: 3\ncompute: E0\ninter: D0 C0"


def test_dependencies_between_layers_and_passes():
    plan = Plan.parse(
        """
        compute: f0.A f0.G f0.P f0.E0 f0.U f1.A f1.E0 f1.E1 .L b1.E0 b1.A b0.P b0.E0 b0.WG0 b0.U b0.G b0.A .Opt
        inter: f0.D0 f0.C0 f1.D0 f1.D1 f1.C0 f1.C1 b1.D0 b1.C0 b0.D0 b1.AR0 b0.C0 b0.AR0
        """
    )
    needs = {task_name(task): set(task_names(before)) for task, before in plan.dependencies.items()}
    assert needs["f0.A"] == set() and needs["f0.G"] == {"f0.A"} and needs["f0.D0"] == {"f0.P"}
    assert needs["f1.A"] == {"f0.U"} and needs["f1.D1"] == {"f1.A"}
    assert needs[".L"] == {"f1.C0", "f1.C1"} and needs["b1.D0"] == {".L"}
    assert needs["b1.A"] == {"b1.C0"} and needs["b0.P"] == {"b1.A"} and needs["b0.U"] == {"b0.C0"}
    assert needs["b0.WG0"] == {"b0.E0"}
    assert needs["b1.AR0"] == {"b1.A"} and needs["b0.AR0"] == {"b0.G", "b0.A"}
    assert needs[".Opt"] == {word for word in needs if word[0] == "b"}
    assert Plan.parse(str(plan)) == plan


def test_micro_batches_depend_on_same_chunk_of_previous_layer():
    plan = Plan.parse(
        """
        compute: f0.A0 f0.A1 f0.E0 f0.E1 f1.A0 f1.A1 f1.E0 f1.E1 f2.E0 f2.E1
        inter: f0.D0 f0.D1 f0.C0 f0.C1 f1.D0 f1.D1 f1.C0 f1.C1 f2.D0 f2.D1 f2.C0 f2.C1
        """
    )
    needs = {task_name(task): task_names(before) for task, before in plan.dependencies.items()}
    assert needs["f0.D1"] == ["f0.A1"] and needs["f1.A0"] == ["f0.C0"] and needs["f1.A1"] == ["f0.C1", "f1.A0"]
    assert needs["f2.D0"] == ["f1.C0", "f1.C1"]  # no micro-batches: the layer's rows are concatenated first


def test_attention_chunks_depend_on_previous_chunk():
    plan = Plan.parse(
        """
        compute: f0.A0 f0.A1 f0.A2 f0.E0 .L b0.E0 b0.A0 b0.AWG0 b0.A1 b0.A2 b0.AWG2 b0.AWG1
        inter: f0.D0 f0.C0 b0.D0 b0.C0 b0.AR0
        """
    )
    needs = {task_name(task): set(task_names(before)) for task, before in plan.dependencies.items()}
    assert [needs[f"f0.A{n}"] for n in range(3)] == [set(), {"f0.A0"}, {"f0.A1"}]
    assert [needs[f"b0.A{n}"] for n in range(3)] == [{"b0.C0"}, {"b0.C0", "b0.A0"}, {"b0.C0", "b0.A1"}]
    assert needs["b0.AWG1"] == {"b0.A1"}  # weight gradients follow their own chunk only
    with pytest.raises(ConfigError, match=r"f0\.A1 needs f0\.A0"):
        Plan.parse("compute: f0.A1 f0.A0")
    assert Plan.parse("compute: f0.A0 f1.A1").dependencies[Task("attention", 1, 1)] == (Task("attention", 0, 0),)


def test_standard_dependencies_ignore_task_order():
    rng = random.Random(5)
    plan = random_plan(rng, random_costs(rng))
    tasks = list(plan)
    standard = {task: set(before) for task, before in standard_dependencies(tasks).items()}
    rng.shuffle(tasks)
    assert {task: set(before) for task, before in standard_dependencies(tasks).items()} == standard


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_text_and_pickle_round_trip_of_random_plans(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, random_costs(rng))
    for again in (Plan.parse(str(plan)), pickle.loads(pickle.dumps(plan))):
        assert again == plan and hash(again) == hash(plan)
        assert (again.fingerprint, str(again)) == (plan.fingerprint, str(plan))
        assert (again.sequence, again.before) == (plan.sequence, plan.before)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_sequence_is_topological_order(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, random_costs(rng))
    place = {task: index for index, task in enumerate(plan.sequence)}
    assert len(place) == len(plan.sequence) == len(plan) and set(place) == set(plan)
    for task, before in plan.dependencies.items():
        assert all(place[one] < place[task] for one in before)
    for resource in ("compute", "intra", "inter"):
        places = [place[task] for task in plan.on(resource)]
        assert places == sorted(places)
    for task, before in zip(plan.sequence, plan.before, strict=True):
        orders = [plan.on(resource) for resource in plan.resources[task]]
        earlier = {order[order.index(task) - 1] for order in orders if order[0] != task}
        assert {plan.sequence[one] for one in before} == set(plan.dependencies[task]) | earlier


def test_swapped_tasks_change_plan_or_raise():
    rng = random.Random()
    refused = 0
    for _ in range(200):
        plan = random_plan(rng, random_costs(rng))
        order = list(plan.compute)
        one, two = rng.randrange(len(order)), rng.randrange(len(order))
        order[one], order[two] = order[two], order[one]
        try:
            other = Plan(tuple(order), plan.intra, plan.inter, plan.after)
        except ConfigError as error:
            refused += 1
            assert "circular wait" in str(error)
        else:
            assert (other == plan) == (one == two) == (other.fingerprint == plan.fingerprint)
    assert 0 < refused < 200


def test_fingerprint_is_stable_across_processes():
    plan = Plan.parse(THREE)
    assert plan.fingerprint == "47f338775fb8ff15"
    code = "import sys; from fusedmoe.schedule.plan import Plan; print(Plan.parse(sys.stdin.read()).fingerprint)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], input=THREE, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == plan.fingerprint


def test_empty_plan():
    plan = Plan()
    assert len(plan) == 0 and str(plan) == "" and Plan.parse("") == plan and plan.sequence == ()


WHOLE = """compute: DEC0 DEC1
inter: DEC0 DEC1"""


def dependency_names(plan: Plan) -> dict[str, set[str]]:
    return {task_name(task): {task_name(one) for one in before} for task, before in plan.dependencies.items()}


def test_fused_kinds_combine_their_parts():
    assert set(FUSED) == {"dispatch-expert-combine", "all-gather-expert-reduce-scatter"}
    for kind, parts in FUSED.items():
        assert kind == "-".join(parts) and SYMBOLS[kind] == "".join(SYMBOLS[part] for part in parts)
        assert resources_of(kind) == ("compute", LINKS[parts[0]]) and LINKS[parts[0]] == LINKS[parts[-1]]


def test_fused_plan_text_round_trip():
    plan = Plan.parse(WHOLE)
    assert str(plan) == WHOLE and len(plan) == len(list(plan)) == 2 and plan.degrees == {("forward", 0): 2}
    assert plan.resources[Task("dispatch-expert-combine", 1)] == ("compute", "inter") and plan.inter == plan.compute


@pytest.mark.parametrize("kind", FUSED)
def test_fused_pass_contains_only_its_kind(kind):
    for phase in PHASES:
        plan = fused_pass(kind, 3, phase)
        assert {task.kind for task in plan} == {kind} and plan.degrees == {(phase, 0): 3}
        for again in (Plan.parse(str(plan)), pickle.loads(pickle.dumps(plan))):
            assert again == plan and (again.fingerprint, again.sequence) == (plan.fingerprint, plan.sequence)
    # Plans by collectives contain its parts, though a layer could run the fused operation.
    assert pass_by_degree(three_queues, (*PIPELINE, kind), 2, "forward") == pass_by_degree(
        three_queues, PIPELINE, 2, "forward"
    )


def test_dependencies_of_fused_tasks():
    plan = Plan.parse(
        """
        compute: f0.A f0.DEC0 f0.DEC1 f0.U f1.A f1.E0 .L b1.AGERS0 b1.A b0.DEC0 b0.A
        intra: b1.AGERS0
        inter: f0.DEC0 f0.DEC1 f1.D0 f1.C0 b0.DEC0 b1.AR0
        """
    )
    found = dependency_names(plan)
    assert found["f0.DEC1"] == {"f0.A"} and found["f0.U"] == {"f0.DEC0", "f0.DEC1"}
    assert found["f1.A"] == {"f0.U"} and found["b1.AGERS0"] == {".L"} and found["b1.A"] == {"b1.AGERS0"}
    assert found["b0.DEC0"] == {"b1.A"} and found["b0.A"] == {"b0.DEC0"} and found["b1.AR0"] == {"b1.A"}
    assert Plan.parse(str(plan)) == plan and Plan.parse(str(extract_phase(plan, "backward"))) == extract_phase(
        plan, "backward"
    )


def test_dependencies_of_fused_tasks_in_micro_batches():
    found = dependency_names(Plan.parse("compute: f0.A0 f0.A1 f0.DEC0 f0.DEC1 f1.A0 f1.A1\ninter: f0.DEC0 f0.DEC1"))
    assert found["f0.DEC1"] == {"f0.A1"} and found["f1.A1"] == {"f0.DEC1", "f1.A0"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("inter: DEC0", ["f0.DEC0 (dispatch-expert-combine) is on inter, but it computes and sends", "compute"]),
        ("compute: DEC0", ["f0.DEC0", "is on compute, but it computes and sends; put it on compute and inter"]),
        ("compute: AGERS0\ninter: AGERS0", ["f0.AGERS0", "on compute and inter, but", "put it on compute and intra"]),
        ("compute: DEC0\nintra: DEC0\ninter: DEC0", ["f0.DEC0", "on compute and intra and inter", "compute and inter"]),
        ("compute: DEC0\ninter: DEC0 DEC0", ["f0.DEC0 is on inter twice", "remove one"]),
        ("compute: DEC0 DEC0\ninter: DEC0", ["f0.DEC0 is on compute twice"]),
        (
            "compute: DEC0 DEC1\ninter: DEC1 DEC0",
            ["circular wait", "is after f0.DEC1 on inter", "is after f0.DEC0 on compute", "move f0.DEC"],
        ),
        ("compute: DEC0 DEC2\ninter: DEC0 DEC2", ["f0.DEC1 is missing", "number f0.DEC2"]),
        (
            "compute: DEC0 E0\ninter: DEC0",
            ["f0.E0 (expert) duplicates a part of f0.DEC0 (dispatch-expert-combine)", "remove one of them"],
        ),
        ("compute: AGERS0\nintra: AGERS0\ninter: D0 C0", ["duplicates a part of f0.AGERS0"]),
        ("compute: DEC0 AGERS0\nintra: AGERS0\ninter: DEC0", ["f0.AGERS0", "f0.DEC0", "duplicates a part of"]),
        ("compute: DEC0(12)\ninter: DEC0(12)", ["f0.DEC0 has a size"]),
        ("compute: DE0\ninter: DE0", ["line 1", "'DE0' is not a task", "symbols: G P CX D AG E RS C DEC AGERS"]),
    ],
)
def test_fused_plan_parse_error_names_task_and_fix(text, parts):
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text)
    for part in parts:
        assert part in str(caught.value)
