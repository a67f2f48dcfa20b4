"""A model that changes plans while it trains has the same results as without plans; seconds are synthetic."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.runtime.cache import CACHE, choice_text
from fusedmoe.schedule.candidates import OFF_FAMILY, PlanCandidate, family_candidates, neighbour_candidates, predicted_s
from fusedmoe.schedule.cost import Contention, CostModel, Line, MeasuredPart, Observed
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import WINDOW_STEPS, Phase, PlanChooser
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.workload import PER_LAYER_SUFFIX, Workload
from fusedmoe.training import plan_step, sync_gradients, tune_step
from fusedmoe.training.plan_tuning import StepSource
from fusedmoe.training.step_plan import PlannedStep, model_costs
from tests.cluster import Cluster
from tests.layers.test_pipeline import L, M, make_blocks
from tests.layers.test_pipeline_plans import COSTS, workload
from tests.marks import slowly


class Model(nn.Module):
    """Two blocks; with `whole` in micro-batches."""

    def __init__(self, topology: Topology, whole: bool) -> None:
        super().__init__()
        blocks = make_blocks("topk", 2, None, topology)
        self.learned = [parameter for block in blocks for part in block for parameter in part.parameters()]
        self.blocks = fusedmoe.pipeline(blocks) if whole else nn.ModuleList(nn.ModuleList(block) for block in blocks)

    def forward(self, x_BLM: Tensor) -> Tensor:
        if isinstance(self.blocks, PipelinedBlocks):
            return self.blocks(x_BLM)
        for block in self.blocks:
            dense, layer = block
            x_BLM, u_BLM = dense(x_BLM)
            x_BLM = x_BLM + layer(u_BLM)
        return x_BLM


def step(model: Model, optimizer: torch.optim.Optimizer, topology: Topology, number: int, buckets: Any) -> Tensor:
    torch.manual_seed(100 * number + topology.rank)
    x_BLM, weight_BLM = torch.randn(2, 4, L, M, dtype=torch.double)
    loss = (model(x_BLM) * weight_BLM).sum() / 10
    if buckets is not None:
        buckets.open()
    loss.backward()
    sync_gradients(model, topology, buckets=buckets)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def step_of(tuning: PlanChooser) -> PlannedStep:
    assert isinstance(tuning.source, StepSource)
    return tuning.source.step


def train_alongside_plain(
    tuning: PlanChooser, model: Model, plain: Model, topology: Topology, seconds: dict[str, float]
) -> list[str]:
    """Train until a plan is chosen and some steps more, alongside a model without plans; return the plans followed."""
    ours, theirs = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model, plain))
    followed: list[str] = []
    after = 2
    while after:
        after -= tuning.is_settled
        now = tuning.current_candidate
        followed.append(now.name)
        assert len(followed) < 200
        loss = step(model, ours, topology, len(followed), step_of(tuning).buckets)
        torch.testing.assert_close(loss, step(plain, theirs, topology, len(followed), None), rtol=1e-10, atol=1e-10)
        # One rank takes longer, another one in each step: the maximum counts.
        longest = (topology.rank + len(followed)) % topology.size == 0
        tuning.note(now.predicted_s * seconds.get(now.family, 1.0) * (1.0 if longest else 0.5))
    for one, other in zip(model.learned, plain.learned, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return followed


def tune_on_rank(rank: int, world: int, cache: str, policy: str, whole: bool) -> tuple[list[str], list[str], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, cache)
        return tune_and_compare(Topology.from_sizes(ep=world, timeout_s=30), Path(cache), policy, whole)


def tune_and_compare(topology: Topology, cache: Path, policy: str, whole: bool) -> tuple[list[str], list[str], str]:
    plain = Model(topology, False)
    lines: list[str] = []

    def make(model: Model, **more: Any) -> PlanChooser:
        step = PlannedStep(model, topology, COSTS, workload(topology, 2), limit=4)
        return tune_step(step, policy, tell=lines.append, **more)

    model = Model(topology, whole)
    tuning = make(model)
    # The predicted best plan is not the best.
    slower = {tuning.current_candidate.family: 1.4} if policy == "auto" else {}
    first = train_alongside_plain(tuning, model, copy.deepcopy(plain), topology, slower)
    best = min((row for row in tuning.table() if row.measured_s), key=lambda row: row.measured_s or 0.0)
    assert tuning.current_candidate.name == best.name or policy == "flowmoe"
    if policy == "auto":
        assert slower.keys().isdisjoint({tuning.current_candidate.family}) and len(set(first)) > 3, first
        plan, _ = plan_step(Model(topology, whole), topology, "auto", COSTS, workload(topology, 2), limit=4)
        assert plan == tuning.plan
    # The next job begins with it, and tries the second and off as well; a resumed job tries nothing.
    again = Model(topology, whole)
    checked = make(again)
    assert checked.plan == tuning.plan
    second = train_alongside_plain(checked, again, copy.deepcopy(plain), topology, slower)
    if policy == "auto":
        assert second[-1] == first[-1] and len(set(second)) in (2, 3) and "off" in second
    else:
        assert len({one.candidate.plan.degrees["forward", 0] for one in tuning.trials.entries}) > 1
        assert len(tuning.trials.entries) > 8
    assert len(second) < len(first) and set(second) <= set(first)
    if topology.rank == 0:
        assert len(lines) == 2
        (cache / "own.json").write_text(_cached_choice_text(tuning))
    on = Model(topology, whole)
    resumed = train_alongside_plain(make(on, resumed=cache / "own.json"), on, copy.deepcopy(plain), topology, slower)
    assert set(resumed) == {first[-1]} and len(resumed) < 10
    return first, second, tuning.describe_choice()


def _cached_choice_text(tuning: PlanChooser) -> str:
    """As `write_cache_file` writes it."""
    import hashlib

    held = json.loads(choice_text(tuning))
    digest = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    return json.dumps(held | {"sha256": digest})


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "whole"), [("auto", False), ("auto", True), ("flowmoe", True)])
def test_tuning_preserves_results_and_ranks_choose_equal_plan(
    cluster: Cluster, tmp_path: Path, policy: str, whole: bool
) -> None:
    if policy == "flowmoe":
        pytest.importorskip("sklearn")
    one, other = cluster.run(2, tune_on_rank, str(tmp_path), policy, whole)
    assert one == other
    others = r"; .+ s \([+-]\d+%[,)].*" if policy == "auto" else ".*"
    line = rf"schedule: (off|\w+, [\d–]+\+[\d–]+ chunks.*): \S+ s per step{others}; \d+ steps tried, \S+ s spent"
    assert re.fullmatch(line, one[2]), one[2]


def tuning_on_one_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str = "auto",
    costs: CostModel = COSTS,
    samples: int | None = None,
    **more: Any,
) -> PlanChooser:
    """A world of one, where everything is planned as if rows were sent."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    topology = Topology()
    step = PlannedStep(Model(topology, True), topology, costs, workload(topology, 2), limit=4, samples=samples)
    return tune_step(step, policy, **more)


def run_until_settled(tuning: PlanChooser, factor: float = 1.0) -> None:
    while not tuning.is_settled:
        tuning.note(factor * tuning.current_candidate.predicted_s)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "other layers"])
def test_corrupt_cached_choice_warns_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    lines: list[str] = []
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lines.append)
    run_until_settled(tuning)
    assert len(lines) == 1 and "off" in lines[0]
    assert "off" in [plan["family"] for plan in json.loads(choice_text(tuning))["plans"]]
    (path,) = tmp_path.glob("choice-*.json")
    text = path.read_text()
    if damage == "other layers":
        strange = json.loads(_cached_choice_text(tuning))
        plan = Plan.parse("inter: f9.D0 f9.C0\ncompute: f9.E0")
        strange["plans"][0] |= {"plan": str(plan).splitlines(), "fingerprint": plan.fingerprint}
        text = json.dumps(strange)
    path.write_text(
        {"cut": text[: len(text) // 2], "flipped": text.replace("seconds", "secands"), "other": "{}"}.get(damage, text)
    )
    with pytest.warns(UserWarning, match="ignored"):
        again = tuning_on_one_rank(tmp_path, monkeypatch, tell=lines.append)
    run_until_settled(again)
    assert again.plan == tuning.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_until_settled(tuning_on_one_rank(tmp_path, monkeypatch, tell=lines.append))
    assert len(lines) == 3


def test_drift_is_reported_and_cached_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lines.append)
    run_until_settled(tuning)
    before = tuning.current_candidate
    for _ in range(WINDOW_STEPS):
        tuning.note(1.2 * before.predicted_s)
    assert not tuning.is_settled
    run_until_settled(tuning, 1.2)
    assert len(lines) == 2 and tuning.current_candidate == before
    (path,) = tmp_path.glob("choice-*.json")
    assert json.loads(path.read_text())["seconds"] == pytest.approx(1.2 * before.predicted_s)


def test_choice_from_noise_is_reported_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lines.append, drift=None)
    expected, number = tuning.current_candidate, 0
    while not tuning.is_settled:
        number += 1
        tuning.note(tuning.current_candidate.predicted_s * 10 ** (0.6 * math.sin(5 * number)))
    assert len(lines) == 1 and f"too noisy to choose; running {expected.family} by prediction" in lines[0]
    assert not list(tmp_path.glob("choice-*.json"))


# A machine with long start-up costs for sending: chunks gain nothing.
STARTS = replace(
    COSTS, lines={name: line if name == "gemm" else Line(1e-3, line.beta_s) for name, line in COSTS.lines.items()}
)


def run_until_drift_detected(tuning: PlanChooser, factor: float) -> None:
    """Run slower steps until the drift is detected."""
    before_s = tuning.current_candidate.predicted_s
    for _ in range(WINDOW_STEPS):
        tuning.note(factor * before_s)


@pytest.mark.parametrize("why", ["costs were given", "steps are short"])
def test_given_costs_and_short_steps_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def measure(seconds: float) -> CostModel:
        pytest.fail("measured")

    monkeypatch.setattr(PlannedStep, "measured_costs", measure)
    more = {} if why == "costs were given" else {"measure": measure}
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lambda line: None, **more)
    costs, factor = (
        step_of(tuning).costs,
        (1.0 if why == "costs were given" else 0.01) / tuning.current_candidate.predicted_s,
    )
    run_until_settled(tuning, factor)
    run_until_drift_detected(tuning, 2 * factor)
    assert not tuning.is_settled
    run_until_settled(tuning, 2 * factor)
    assert step_of(tuning).costs is costs


def measure_after_drift(
    rank: int, world: int, cache: str, given: bool
) -> tuple[list[str], list[float | None], list[bool]]:
    """Step times follow plans under changing costs of about a second: names of plans, and the measured costs.

    `given`: by a function that a job passes; else the model's first layer.
    """
    asked: list[float | None] = []

    def measure(again_s: float | None) -> CostModel:
        asked.append(again_s)
        return STARTS if again_s is None else COSTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, cache)
        patch.setattr(MoELayer, "measured_costs", lambda self, tokens, again_s=None: measure(again_s))
        topology = Topology.from_sizes(ep=world, timeout_s=30)
        shape, model = workload(topology, 2), Model(topology, False)
        costs, more = (STARTS, {"measure": measure}) if given else (None, {})
        step = PlannedStep(model, topology, costs, shape, limit=4)
        tuning = tune_step(step, "auto", tell=lambda line: None, **more)
        names, best = [], []
        for true in (STARTS, COSTS):
            of_step = model_costs(None, topology, true, shape, step.buckets)
            least_s = family_candidates(of_step, 4, None, lambda done, total: None)[0].predicted_s
            for number in range(300):
                if tuning.is_settled and number > WINDOW_STEPS:
                    break
                # The other rank is faster: all follow the slowest.
                slower = 1.0 if true is STARTS else 1.5
                tuning.note(slower * predicted_s(tuning.plan, of_step) / least_s / (1 + rank))
            names.append(tuning.current_candidate.name)
            best.append(
                predicted_s(tuning.plan, of_step) <= least_s * (1 + 1e-9)
                and step.costs_of(tuning.current_candidate.uses_micro_batches) == of_step
            )
        return names, asked, best


@pytest.mark.parametrize("given", [True, False])
def test_drift_measures_costs_and_chooses_new_plans(cluster: Cluster, tmp_path: Path, given: bool) -> None:
    one, other = cluster.run(2, measure_after_drift, str(tmp_path), given)
    assert one == other
    names, asked, best = one
    assert all(best) and "1+1 chunks" in names[0] and "1+1 chunks" not in names[1]
    first, again = ([], asked) if given else (asked[:1], asked[1:])
    assert first == [None] * (not given) and len(again) == 1 and again[0] is not None and 1 <= again[0] <= 30


def test_costs_measured_by_budget_exhausting_step_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measure(budget_s: float) -> CostModel | None:
        asked.append(budget_s)
        return STARTS if len(asked) % 2 == 0 else None

    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lambda line: None, measure=measure)
    run_until_settled(tuning, 1.0 / tuning.current_candidate.predicted_s)
    usual_s = tuning.best.median_s
    for _ in range(WINDOW_STEPS):
        tuning.note(1.2 * usual_s)
    assert len(asked) == 1 and tuning.phase is Phase.MEASURE
    tuning.note(9 * usual_s)  # 2% of 500 steps are 10 of them
    assert len(asked) == 2 and asked[1] < 1.0 < asked[0] and tuning.phase is Phase.TRY
    step = step_of(tuning)
    assert step.costs == model_costs(step.blocks, step.topology, STARTS, step.workload, step.buckets)


def test_unmeasured_costs_are_awaited_for_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lambda line: None, measure=asked.append)
    run_until_settled(tuning, 1.0 / tuning.current_candidate.predicted_s)
    costs, usual_s = step_of(tuning).costs, tuning.best.median_s
    for _ in range(WINDOW_STEPS):
        tuning.note(1.2 * usual_s)
    for number in range(2):
        assert len(asked) == 1 + number and tuning.phase is Phase.MEASURE
        tuning.note(1.2 * usual_s)
    assert len(asked) == 3 and tuning.phase is Phase.TRY and step_of(tuning).costs is costs
    run_until_settled(tuning, 1.2 / tuning.current_candidate.predicted_s)


def tune_flowmoe_with_drift(rank: int, world: int, cache: str) -> list[tuple[int, int, set[tuple[int, int | None]]]]:
    """Before and after a drift: R and S_p, and all tried values; the fastest ones are synthetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, cache)
        topology = Topology.from_sizes(ep=world, timeout_s=30)
        step = PlannedStep(Model(topology, True), topology, COSTS, workload(topology, 2), limit=4, samples=4)
        tuning = tune_step(step, "flowmoe", tell=lambda line: None)
        found = []
        for best_degree, best_bytes, rest_s in ((1, 4000, 1.0), (4, 300, 2.0)):
            tried: set[tuple[int, int | None]] = set()
            while True:
                split = StepSplit.from_plan(tuning.plan)
                assert isinstance(split.forward, int) and split.forward == split.backward and split.bucket_bytes
                if tuning.is_settled and len(tried) > 1:
                    break
                tried.add((split.forward, split.bucket_bytes))
                away = 0.03 * abs(split.forward - best_degree) + 0.01 * abs(math.log2(split.bucket_bytes / best_bytes))
                tuning.note(rest_s + away)
            found.append((split.forward, split.bucket_bytes, tried))
        return found


def test_flowmoe_tunes_micro_batches_after_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, where no gradient is sent, all numbers are equally good by prediction."""
    free = CostModel({name: Line(0.0, line.beta_s) for name, line in COSTS.lines.items()})
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, "flowmoe", free, samples=4, tell=lambda line: None)
    for best, rest_s in ((4, 1.0), (1, 2.0)):
        tried = set()
        for number in range(300):
            if tuning.is_settled and number > WINDOW_STEPS:
                break
            tried.add(degree := tuning.plan.degrees["forward", 0])
            tuning.note(rest_s + 0.03 * abs(degree - best))
        assert set(tuning.plan.degrees.values()) == {best} and tried == {1, 2, 4}


@pytest.mark.slow
def test_flowmoe_tunes_micro_batches_and_buckets_after_drift(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    one, other = cluster.run(2, tune_flowmoe_with_drift, str(tmp_path))
    assert one == other
    for (degree, size, tried), (best_degree, best_bytes) in zip(one, ((1, 4000), (4, 300)), strict=True):
        sizes = [of for r, of in tried if r == best_degree]
        assert degree == best_degree and len({r for r, _ in tried}) == 3 and 3 < len(sizes) <= 8
        assert size == min(sizes, key=lambda of: abs(math.log2(of / best_bytes)))


def test_skipped_steps_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = tuning_on_one_rank(tmp_path, monkeypatch, tell=lambda line: None)
    slow = 0
    while not tuning.is_settled:
        tuning.skip()
        tuning.note(1e6)
        tuning.note(tuning.current_candidate.predicted_s)
        slow += 1
    assert all((row.measured_s or 0.0) < 1e3 for row in tuning.table()) and tuning.trials.spent_s < 1.0 < slow


def test_tuning_adds_nothing_to_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    topology = Topology()
    model = Model(topology, True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    step = PlannedStep(model, topology, COSTS, workload(topology, 2), limit=4)
    tuning = tune_step(step, "auto", tell=lambda line: None)
    run_until_settled(tuning)
    assert model.state_dict().keys() == state.keys()
    copy.deepcopy(model)  # as averaging does


def test_tune_step_rejects_invalid_policy_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    step = PlannedStep(Model(Topology(), True), Topology(), COSTS, workload(Topology(), 2), limit=2)
    with pytest.raises(ConfigError, match="auto and flowmoe"):
        tune_step(step, "fsmoe")
    tuning = tune_step(step)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be positive and finite"):
            tuning.note(wrong)


LINES = ("gemm", "all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")


def random_costs(whole: bool) -> StepCosts:
    def line() -> Line:
        return Line(float(10 ** torch.empty(()).uniform_(-6, -4)), float(10 ** torch.empty(()).uniform_(-10, -8)))

    model = CostModel({name: line() for name in LINES} | {"gemm": Line(1e-6, 1e-12)}, Contention.between_links(0.8))
    shape = Workload(4, 64, 128, 256, 8, k=2, ep=2, esp=int(torch.randint(1, 3, ())), itemsize=4)
    parts = (
        ("dispatch", "expert", "combine")
        if shape.esp == 1
        else ("dispatch", "all-gather", "expert", "reduce-scatter", "combine")
    )
    return shape.step_costs(model, [10**6, 2 * 10**6, 10**6], parts, whole=whole)


@pytest.mark.parametrize(("whole", "steps"), [(False, 2), (True, 1), *slowly((True, 10))])
def test_candidates_are_distinct_and_include_no_plan(whole: bool, steps: int) -> None:
    for _ in range(steps):
        costs = random_costs(whole)
        found = family_candidates(costs, 8, 4, lambda done, total: None)
        assert [one.predicted_s for one in found] == sorted(one.predicted_s for one in found)
        best = makespan(POLICIES["joint"].plan(costs, 8), costs)
        assert found[0].predicted_s <= best * 1.05  # joint has the parts of its ablation, too
        assert [one.plan for one in found if one.family == OFF_FAMILY] == [Plan()]
        assert any(one.uses_micro_batches for one in found) == whole
        for one in found:
            beside = neighbour_candidates(one, costs, 8, 4)
            plans = [one.plan, *(other.plan for other in beside)]
            assert len({plan.fingerprint for plan in plans}) == len(plans)
            for other in beside:
                assert other.predicted_s == makespan(other.plan, costs) and other.family == one.family
                assert max(other.plan.degrees.values()) <= 8
                sent = sum(task.size or 0 for task in other.plan.inter)
                assert sent == sum(costs.gradient_bytes), other.name


def check_prediction_per_form(rank: int, world: int) -> None:
    """Chunks that cost little if they end with their layer, and much if micro-batches run through it."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    shape = workload(topology, 2)
    slow, fast = (
        Observed({MeasuredPart("expert", phase, chunks): s for phase in PHASES for chunks, s in ((1, 0.1), (4, s_4))})
        for s_4 in (0.4, 0.1)
    )
    costs = replace(COSTS, observed={shape.shapes: slow, shape.shapes + PER_LAYER_SUFFIX: fast})
    step = PlannedStep(Model(topology, whole=True), topology, costs, shape, limit=4, samples=4)
    found = step.candidates()
    assert {one.uses_micro_batches for one in found} == {True, False}
    for one in found:
        if one.family != OFF_FAMILY:
            assert one.predicted_s == makespan(one.plan, step.costs_of(one.uses_micro_batches)), one.name
    assert step.costs_of(False).layers[0].micro is None and step.costs_of(True).layers[0].micro is not None
    of = {one.family: one for one in found}
    assert of["flowmoe"].predicted_s > min(
        one.predicted_s for one in found if not one.uses_micro_batches and one.family != OFF_FAMILY
    )


def test_each_plan_form_uses_its_own_observations(cluster: Cluster) -> None:
    cluster.run(2, check_prediction_per_form)


def test_candidate_names_include_chunks() -> None:
    plan = Plan.parse("compute: f0.E0 b0.E0 b0.E1\ninter: f0.D0 f0.C0 b0.D0 b0.D1 b0.C0 b0.C1")
    assert PlanCandidate("fsmoe", plan, False, 1.0).name == "fsmoe, 1+2 chunks"
    assert PlanCandidate(OFF_FAMILY, Plan(), False, 1.0).name == "off"
