"""Plans measured in user-written loops: losses are unchanged, and results are cached. Seconds are synthetic."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import autograd
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts, GroupedExperts
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.measure import MeasurementState
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule import plan_chooser
from fusedmoe.schedule.candidates import OFF_FAMILY
from fusedmoe.schedule.cost import CostModel, Line, Observed
from fusedmoe.schedule.plan_chooser import WINDOW_STEPS, Phase
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import PlannedStep, plan_step, sync_gradients, tune_model, tune_step
from tests.cluster import Cluster
from tests.integrations.plans_run import plans_run
from tests.marks import slowly

E, K, M, H, TOKENS = 4, 2, 8, 6, 24
# Links slow enough to make chunks profitable, and measured as slow.
COSTS = CostModel({"all-to-all/ep": Line(1e-5, 1e-6), "gemm": Line(0.0, 1e-7), "all-reduce/dp": Line(0.0, 0.0)})


class TheirExperts(nn.Module):
    """Another library's layer: its router and its parameters, and the library's dispatch."""

    def __init__(self, topology: Topology, grouped: bool, schedule: str = "off") -> None:
        super().__init__()
        self.router = nn.Linear(M, E, bias=False, dtype=torch.float64)
        local = E // topology.ep.size
        self.up = nn.Parameter(
            (0.2 * torch.randn(E, 2, H, M, dtype=torch.float64)).chunk(topology.ep.size)[topology.rank]
        )
        self.down = nn.Parameter(
            (0.2 * torch.randn(E, M, H, dtype=torch.float64)).chunk(topology.ep.size)[topology.rank]
        )
        assert len(self.up) == local
        self.grouped = grouped
        setattr(self, EXCHANGE, ScheduledExchange(topology, _Way(self), schedule, "theirs"))

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        weights = Weights(self.up, self.down)
        if self.grouped:
            return GroupedExperts(weights, "swiglu")
        return AutogradExperts(lambda *given: autograd.experts(*given, weights, "swiglu"), [self.up, self.down])

    def forward(self, x_SM: Tensor) -> Tensor:
        weight_SK, number_SK = self.router(x_SM).softmax(-1).topk(K)
        exchange: ScheduledExchange = getattr(self, EXCHANGE)
        return x_SM + exchange.through_experts(x_SM, autograd.order(number_SK, E), weight_SK)


class _Way(ExternalExperts):
    def __init__(self, module: TheirExperts) -> None:
        super().__init__(module, E, (M, H), gated=True)

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return autograd.experts(x_SM, layout, weight_N, Weights(self.module.up, self.module.down), "swiglu")


class OurLayer(nn.Module):
    """A residual block around a `MoELayer`, whose own schedule a plan overrides."""

    def __init__(self, topology: Topology, schedule: str) -> None:
        super().__init__()
        gate, experts = fusedmoe.gates.TopK(E, K), fusedmoe.experts.SwiGLU(H)
        self.layer = fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule, dtype=torch.float64)

    def forward(self, x_SM: Tensor) -> Tensor:
        return x_SM + self.layer(x_SM)


def model_of(topology: Topology, grouped: bool | None) -> nn.Sequential:
    """Two layers of another library; None: of this library."""
    torch.manual_seed(3)
    if grouped is None:
        return nn.Sequential(OurLayer(topology, "off"), OurLayer(topology, "auto"))
    return nn.Sequential(*(TheirExperts(topology, grouped) for _ in range(2)))


class Clock:
    """Step times: the longest without a plan, the shortest in chunks of four."""

    def __init__(self) -> None:
        self.now_s, self.ran = 0.0, [(1, 1)]

    def perf_counter(self) -> float:
        there, back = self.ran[-1] if self.ran else (1, 1)
        self.now_s += 1.0 + abs(there - 4) / 10 + abs(back - 4) / 10
        return self.now_s


def tune_in_loop(rank: int, world: int, folder: str, grouped: bool | None) -> tuple[list[str], list[str]]:
    """The chosen plans and the reported lines, of a job and of the next one. Replicas of experts differ in tokens."""
    topology = Topology.from_sizes(ep=2, timeout_s=30)
    told: list[str] = []
    chosen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: COSTS)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        for _ in range(2):
            model, plain = (model_of(topology, grouped) for _ in range(2))
            if grouped is None:
                plain = nn.Sequential(*(OurLayer(topology, "off") for _ in range(2)))
                plain.load_state_dict(model.state_dict())
            clock = Clock()
            patch.setattr(plan_chooser, "time", clock)
            tuning = tune_model(model, limit=4, tell=told.append)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, plain)]
            steps, seen = 0, set()
            while steps < 3 or not tuning.is_settled:
                steps += 1
                assert steps < 200
                torch.manual_seed(10 * steps + rank)
                x_SM, losses = torch.randn(TOKENS * (1 + rank // 2) + rank, M, dtype=torch.float64), []
                for one, optimizer, around in zip((model, plain), optimizers, (tuning, None), strict=True):
                    with plans_run() as ran:
                        if around is not None:
                            around.__enter__()
                        loss = one(x_SM).square().mean()
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if around is not None:
                            clock.ran = list(ran)
                            seen |= set(ran)
                            around.__exit__(None)
                        else:
                            assert not ran
                    losses.append(loss.detach())
                torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=1e-10)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            chosen.append((tuning.current_candidate.name, steps, len(seen)))
            assert grouped is not False or all(there == back for there, back in seen)
    return chosen, told


@pytest.mark.parametrize(("ranks", "grouped"), [(2, True), (2, None), *slowly((2, False), (4, None))])
def test_tuned_loop_keeps_and_caches_fastest_plan(
    cluster: Cluster, tmp_path: Path, ranks: int, grouped: bool | None
) -> None:
    (chosen, told), *others = cluster.run(ranks, tune_in_loop, str(tmp_path), grouped)
    assert all(other == (chosen, []) for other in others) and len(told) == 2
    (first, steps, plans), (again, fewer, _) = chosen
    assert "4" in first and first == again and plans > 2, chosen
    # The next job begins with it, and tries fewer plans.
    assert fewer < steps and all(line.startswith(f"schedule: {first}: ") for line in told), told


def tune_with_buckets(rank: int, world: int, folder: str) -> tuple[str, int | None, int]:
    """The chosen plan, the bytes of its largest gradient bucket, and the bytes of the model's buckets."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: COSTS)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        model, plain = (model_of(topology, None) for _ in range(2))
        step = PlannedStep(model, topology, limit=4)
        assert not step.has_costs
        tuning = tune_step(step, tell=lambda line: None)
        number = 0
        while not tuning.is_settled:
            number += 1
            torch.manual_seed(10 * number + rank)
            x_SM = torch.randn(TOKENS, M, dtype=torch.float64)
            for one, buckets in ((model, step.buckets), (plain, None)):
                loss = one(x_SM).square().mean()
                if buckets is not None:
                    buckets.open()
                loss.backward()
                sync_gradients(one, topology, buckets=buckets)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)
                one.grad = other.grad = None
            tuning.note(tuning.current_candidate.predicted_s if step.has_costs else 1.0)
        copied: Any = copy.deepcopy(model)
        assert all(one.layer.plans.cost_measurement is None for one in copied) and tuning.is_settled
        return tuning.current_candidate.name, tuning.plan.largest_bucket, max(step.buckets.layer_bytes)


def test_step_of_layers_is_measured_in_its_first_forward(cluster: Cluster, tmp_path: Path) -> None:
    found, other = cluster.run(2, tune_with_buckets, str(tmp_path))
    name, largest, layer_bytes = found
    assert found == other and name != OFF_FAMILY and largest is not None and 0 < largest <= 2 * layer_bytes


class Slower(Clock):
    """Steps slowed by a factor; plans differ by little, which leaves most of the budget."""

    times = 1.0

    def perf_counter(self) -> float:
        there, back = self.ran[-1] if self.ran else (1, 1)
        self.now_s += self.times * (1.0 + abs(there - 4) / 100 + abs(back - 4) / 100)
        return self.now_s


def measure_after_drift(rank: int, world: int, folder: str) -> tuple[list[float], bool, list[int]]:
    """The duration of repeated measurements, whether plans use the result, and the steps after which it was due."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    asked: list[float] = []
    faster = CostModel({name: Line(line.alpha_s, line.beta_s / 2) for name, line in COSTS.lines.items()})

    def measured(*given: Any) -> CostModel:
        if given[3] is None:
            return COSTS
        asked.append(given[3])
        return faster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", measured)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        clock = Slower()
        patch.setattr(plan_chooser, "time", clock)
        model = model_of(topology, True)
        tuning = tune_model(model, limit=4, tell=lambda line: None)
        again, ahead = [], 0
        for step in range(200):
            with tuning, plans_run() as ran:
                model(torch.randn(TOKENS, M, dtype=torch.float64)).square().mean().backward()
                clock.ran = list(ran)
            if len(asked) > len(again):
                again.append(step - ahead)
            if tuning.is_settled and clock.times == 1.0:
                clock.times, ahead = 2.0, step
            elif again and tuning.is_settled:
                break
        source: Any = tuning.source
        plain = source.step
        made = plain.costs.layers[0].chunks["forward"]["dispatch"].work_s
        plain.set_costs(faster)
        return asked, made == plain.costs.layers[0].chunks["forward"]["dispatch"].work_s, again


def test_step_after_drift_measures_costs_again(cluster: Cluster, tmp_path: Path) -> None:
    (asked, new, again), other = cluster.run(2, measure_after_drift, str(tmp_path))
    # Half of the remaining budget is for the machine's cost lines, the other half for the layer's parts.
    assert (asked, new, again) == other and new and len(asked) == 1 and 0.5 <= asked[0] <= 15
    assert again == [WINDOW_STEPS + 1]


def drifted_without_forward(
    rank: int, world: int, folder: str
) -> tuple[list[Phase], MeasurementState, bool, list[Any]]:
    """Phases after a drift while no forward measures, and the state of the cost measurement."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *given: asked.append(given[3]) or COSTS)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        clock = Slower()
        patch.setattr(plan_chooser, "time", clock)
        model: Any = model_of(topology, True)
        tuning = tune_model(model, limit=4, tell=lambda line: None)
        while not tuning.is_settled:
            with tuning, plans_run() as ran:
                model(torch.randn(TOKENS, M, dtype=torch.float64)).square().mean().backward()
                clock.ran = list(ran)
        source: Any = tuning.source
        costs, phases = source.step.costs, []
        clock.times = 2.0
        for _ in range(WINDOW_STEPS + 2):
            with tuning:
                pass
            phases.append(tuning.phase)
        measurement = getattr(model[0], EXCHANGE).plans.cost_measurement
        return phases[WINDOW_STEPS - 1 :], measurement.state, source.step.costs is costs, asked


def test_drift_without_forward_keeps_costs(cluster: Cluster, tmp_path: Path) -> None:
    for phases, state, is_same, asked in cluster.run(2, drifted_without_forward, str(tmp_path)):
        assert phases == [Phase.MEASURE, Phase.MEASURE, Phase.TRY]
        # A forward that reaches the layer later must not measure during trials.
        assert state is MeasurementState.TAKEN and is_same and not any(asked)


def test_given_workload_is_used_with_measured_costs() -> None:
    model, workload = model_of(Topology(), True), Workload.of_rows(TOKENS * K, M, H, E, True, 8, 1, 1)
    step = PlannedStep(model, Topology(), None, workload, limit=4)
    assert not step.has_costs and step.workload is workload
    tuning = tune_step(step, measure=lambda seconds: COSTS, tell=lambda line: None)
    assert step.has_costs and tuning.phase is Phase.TRY and step.workload is workload
    without = PlannedStep(model, Topology(), None, None, limit=4)
    with pytest.raises(ConfigError, match="need the workload of a layer"):
        tune_step(without, measure=lambda seconds: COSTS, tell=lambda line: None)


def check_failed_step(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: COSTS)
        told: list[str] = []
        tuning = tune_model(model_of(topology, True), tell=told.append)
        with pytest.raises(ValueError, match="theirs"), tuning:
            raise ValueError("theirs")
        assert tuning.phase is Phase.MEASURE
        # A context without a step, as of a loop that skips a batch: no time is recorded yet.
        for _ in range(2):
            with tuning:
                pass
        assert tuning.phase is Phase.MEASURE and tuning.current_candidate.family == OFF_FAMILY
        assert len(told) == (rank == 0) and all("nothing to measure" in line for line in told)


def test_failed_step_is_not_counted(cluster: Cluster) -> None:
    cluster.run(2, check_failed_step)


def test_model_without_plans_is_unchanged_or_rejected() -> None:
    with pytest.raises(ConfigError, match="the model has no experts .*: no MoELayer, and no layer of fusedmoe.hf"):
        tune_model(nn.Linear(2, 2))
    ours = model_of(Topology(), None)
    alone = tune_model(ours)
    assert alone.phase is Phase.KEEP and alone.current_candidate.family == OFF_FAMILY
    with pytest.raises(ConfigError, match="explicit costs need the workload of a layer"):
        PlannedStep(ours, Topology(), COSTS)
    pipeline = fusedmoe.pipeline([(nn.Identity(), layer.layer) for layer in ours.children()])
    with pytest.raises(
        ConfigError, match=r"pipeline .* need the workload of a layer: .* workload=blocks.workload\(x\)"
    ):
        PlannedStep(pipeline, Topology())
    with pytest.raises(ConfigError, match="plan_step: .* without a workload"):
        plan_step(ours, Topology(), "fsmoe", None, cast(Any, None))
    model = model_of(Topology(), True)
    tuning: Any = tune_model(model)
    x_SM = torch.randn(5, M, dtype=torch.float64)
    before = model(x_SM)
    with tuning:
        assert torch.equal(model(x_SM), before)
    assert tuning.phase is Phase.KEEP and tuning.current_candidate.family == OFF_FAMILY
