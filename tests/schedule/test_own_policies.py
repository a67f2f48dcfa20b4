"""User-defined policies: usable by name like built-in ones, and refused with a reason where their plans are wrong."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import fusedmoe
from fusedmoe.cli.main import main
from fusedmoe.errors import ConfigError
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime.cache import plan_path
from fusedmoe.schedule.candidates import PlanCandidate, family_candidates, neighbour_candidates
from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.passes import one_queue, three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import (
    POLICIES,
    PlanSearch,
    layer_policies,
    micro_batch_policies,
    register_policy,
    sequential,
    user_policy,
)
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import Task
from fusedmoe.schedule.workload import Workload

MODEL = CostModel({name: Line(1e-5, 1e-12 if name == "gemm" else 1e-9) for name in LINES})
WORK = Workload(4, 64, 32, 64, 4, k=2, ep=2, esp=2)
KINDS = ("dispatch", "all-gather", "expert", "reduce-scatter", "combine")
COSTS = WORK.step_costs(MODEL, [4096, 8192], KINDS)


def by_rows(workload: Workload, costs: StepCosts) -> Plan:
    """A chunk for each 128 rows, up to 8."""
    there, back = (
        [ChunkedPass(three_queues, min(8, max(1, round(times * workload.rows / 128))))] * len(costs.layers)
        for times in (1, 2)
    )
    return step_plan(costs, there, back)


@pytest.fixture
def mine() -> Iterator[str]:
    register_policy("mine", by_rows)
    yield "mine"
    del POLICIES["mine"]


def test_function_is_accepted_as_layer_policy() -> None:
    for schedule in (Schedule(by_rows, costs=MODEL), pickle.loads(pickle.dumps(Schedule(by_rows, costs=MODEL)))):
        plans = schedule.plans(KINDS, WORK)
        assert plans.forward.degrees == {("forward", 0): 4} and plans.backward.degrees == {("backward", 0): 8}
        assert str(schedule) == "by_rows" and "0x" not in repr(schedule)  # ranks compare it


def test_no_rechunk_requires_equal_degrees_of_both_passes() -> None:
    with pytest.raises(ConfigError, match="policy by_rows has other chunks backward than forward"):
        Schedule(by_rows, costs=MODEL).plans(KINDS, WORK, can_rechunk=False)


def test_registered_policy_is_available_by_name(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = Schedule.named(mine)
    assert named is not None and replace(named, costs=MODEL).plans(KINDS, WORK).forward.degrees == {("forward", 0): 4}
    assert POLICIES[mine].plan(COSTS) == by_rows(WORK, COSTS) == PlanSearch(COSTS).plan(mine)
    # Measured tuning has it among its candidates, without neighbouring plans.
    every = family_candidates(COSTS, 16, None, lambda done, total: None)
    assert by_rows(WORK, COSTS) in [one.plan for one in every]
    assert neighbour_candidates(PlanCandidate(mine, by_rows(WORK, COSTS), False, 1.0), COSTS, 16, None) == []
    flags = ["--model", "Mixtral-7B", "--layers", "2", "--gate", "expert_choice", "--testbed", "B"]
    assert main(["plan", *flags, "--schedule", mine]) == 0
    assert "mine: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "A chunk for each 128 rows" in capsys.readouterr().out


def test_plan_cache_path_depends_on_registered_policies(mine: str) -> None:
    split = WORK.step_costs(MODEL, [4096, 8192], KINDS, whole=True)
    one = plan_path("joint", split)
    register_policy(mine, lambda workload, costs: sequential(costs))
    other = plan_path("joint", split)
    del POLICIES[mine]
    assert len({one, other, plan_path("joint", split)}) == 3
    register_policy(mine, by_rows)


def test_joint_includes_registered_policies(mine: str) -> None:
    cheap = step_plan(COSTS, *([ChunkedPass(three_queues, 1)] * 2,) * 2)
    register_policy(mine, lambda workload, costs: cheap)
    assert makespan(PlanSearch(COSTS).plan("joint"), COSTS) <= makespan(cheap, COSTS)


def test_registered_policy_that_raises_stops_joint(mine: str) -> None:
    register_policy(mine, lambda workload, costs: costs.layers[7])  # type: ignore[arg-type,return-value]
    with pytest.raises(IndexError) as caught:
        POLICIES["joint"].plan(COSTS)
    assert caught.value.__notes__ == [f"in policy {mine}"]


def test_description_of_joint_names_its_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    found = capsys.readouterr().out
    (line,) = (line for line in found.splitlines() if line.startswith("  joint "))
    assert "all policies' plans" in line and "local search" in line and "all degrees" not in found


def plan_without_kind(kind: str) -> Plan:
    orders = {
        on: [task for task in sequential(COSTS).on(on) if task.kind != kind] for on in ("compute", "intra", "inter")
    }
    return Plan.from_orders(orders)


def plan_with_missing_chunk() -> Plan:
    plan = step_plan(COSTS, *([ChunkedPass(one_queue, 2)] * 2,) * 2)
    return Plan(plan.compute, plan.intra, tuple(t for t in plan.inter if t != Task("dispatch", 1, 1, "forward")))


WRONG = {
    "four": (lambda w, c: 4, "it returned a int, no Plan; .*step_plan makes one"),
    "nothing": (lambda w, c: Plan(), r"the plan lacks f0.A \(attention\); add it"),
    "part": (lambda w, c: plan_without_kind("reduce-scatter"), r"the plan lacks f0.RS0 \(reduce-scatter\)"),
    "gradients": (lambda w, c: plan_without_kind("gradient-all-reduce"), "reduces 0 of 12288 bytes of gradients"),
    "chunk": (lambda w, c: plan_with_missing_chunk(), "f1.D1 is missing: the layer has 2 chunks"),
    "layers": (lambda w, c: by_rows(w, replace(c, layers=c.layers * 2)), "carries bytes 0 to 24576, but"),
    "fused": (lambda w, c: Plan.parse("compute: DEC0\ninter: DEC0"), "the plan does not match these layers"),
    "passes": (
        lambda w, c: step_plan(c, [ChunkedPass(one_queue, 1)] * 2, [ChunkedPass(one_queue, 1)]),
        "1 backward passes for 2 layers",
    ),
    "limit": (lambda w, c: step_plan(c, *([ChunkedPass(one_queue, 17)] * 2,) * 2), "17 chunks, more than limit = 16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_plan_error_names_policy(name: str) -> None:
    function, text = WRONG[name]
    policy = user_policy(function, name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"policy {name}.*{text}"):
        policy.plan(COSTS)


def test_other_exceptions_keep_their_type_and_name_the_policy() -> None:
    policy = user_policy(lambda w, c: c.layers[7], "beyond")  # type: ignore[arg-type,return-value]
    with pytest.raises(IndexError) as caught:
        policy.plan(COSTS)
    assert caught.value.__notes__ == ["in policy beyond"]


@pytest.mark.parametrize("function", [lambda costs: None, lambda workload, costs, limit: None])
def test_policies_with_other_arguments_are_rejected(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"policy mine: .* argument.*; it is called with \(workload, costs\)"):
        fusedmoe.register_policy("mine", function)
    assert "mine" not in POLICIES


def test_register_policy_rejects_invalid_names_and_values() -> None:
    for taken in ("auto", "off", "fused", "fsmoe", "flowmoe"):
        with pytest.raises(ConfigError, match=f"{taken!r} is a schedule of the library"):
            fusedmoe.register_policy(taken, by_rows)
    with pytest.raises(ConfigError, match="name 'my own' must be an identifier"):
        fusedmoe.register_policy("my own", by_rows)
    with pytest.raises(ConfigError, match="'mine' is a int; expected a function"):
        fusedmoe.register_policy("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="by_rows chooses the chunks itself; leave out degrees"):
        Schedule(by_rows, degrees=(2, 2))
    with pytest.raises(ConfigError, match="unknown policy 'mine'; choose sequential"):
        Schedule("mine")
    with pytest.raises(ConfigError, match=r"schedule is a function; give a name, or fusedmoe.Schedule\(policy\)"):
        fusedmoe.MoELayer(8, fusedmoe.gates.TopK(4), fusedmoe.experts.SwiGLU(8), schedule=by_rows)  # type: ignore[arg-type]


def test_registered_traits_select_planning_scope() -> None:
    def split(workload: Workload, costs: StepCosts) -> Plan:
        """Two micro-batches."""
        return micro_schedule(costs, StepSplit(2, 2)).plan()

    whole = WORK.step_costs(MODEL, [4096, 8192], KINDS, whole=True)
    try:
        register_policy("split", split, whole=True, gradients="idle slots")
        register_policy("varied", by_rows, varies=True)
        assert "split" not in layer_policies() and "split" in micro_batch_policies()
        with pytest.raises(ConfigError, match="split plans whole models"):
            Schedule("split")
        # Its plans are excluded from the comparison where layers cannot be split.
        assert "split" not in PlanSearch(COSTS).joint_candidates
        assert PlanSearch(whole).joint_candidates["split"] == split(WORK, whole)
        plan = by_rows(WORK, COSTS)
        beside = neighbour_candidates(PlanCandidate("varied", plan, False, makespan(plan, COSTS)), COSTS, 16, None)
        assert beside and all(one.plan.degrees != plan.degrees for one in beside)
    finally:
        POLICIES.pop("split", None)
        POLICIES.pop("varied", None)
