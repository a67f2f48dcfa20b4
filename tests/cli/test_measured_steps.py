"""A trainer measures the steps of its own model; only the costs remain afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.job import StopRequest
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import with_cached_tasks
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.models.config import ModelConfig
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule.cost import CostModel, Line, MeasuredPart
from fusedmoe.schedule.plan_chooser import WINDOW_STEPS
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.workload import PER_LAYER_SUFFIX
from tests.cluster import Cluster
from tests.marks import slowly

SHAPE = ModelConfig(layers=2, model_dim=16, heads=2, hidden=8, experts=4, k=2, batch=4, seq_len=8)
LINES = ("all-to-all/ep", "all-reduce/dp", "gemm", "copy")
COSTS = CostModel({name: Line(1e-4, 1e-9) for name in LINES})


def measured(rank: int, world: int, folder: str, schedule: str, model: ModelConfig) -> tuple[CostModel, list[float]]:
    settings = Settings(model=model, schedule=schedule, ep=2, steps=4)
    topology = Topology.from_sizes(2)
    made = [Trainer(settings, topology, torch.device("cpu"), random_corpus(4096), StopRequest()) for _ in range(2)]
    trainer, plain = made
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        costs = trainer.with_measured_times(COSTS)
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert not trainer.optimizer.state and all(p.grad is None for p in trainer.model.parameters())
        patch.setattr(Trainer, "recorded_step", None)  # cached from now on
        assert trainer.with_measured_times(COSTS) == costs == plain.with_measured_times(COSTS)
        assert with_cached_tasks(COSTS, settings, topology, torch.device("cpu")) == costs
        other = replace(settings, model=replace(model, seq_len=16))
        assert with_cached_tasks(COSTS, other, topology, torch.device("cpu")) == COSTS
    plan, step = trainer.set_plan(costs)
    assert step.loss_s and step.optimizer_s and makespan(plan, step) > step.loss_s + step.optimizer_s
    losses: list[Any] = []
    for one in made:
        if one is plain:
            plain.set_plan(COSTS)
        losses.append([one.step(number).loss for number in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    return costs, losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "whole"), [("fsmoe", False), *slowly(("auto", True))])
def test_measured_steps_are_undone_and_leave_costs(
    cluster: Cluster, tmp_path: Path, schedule: str, whole: bool
) -> None:
    # A gate over whole batches prevents splits.
    model = SHAPE if whole else replace(SHAPE, gate="expert_choice")
    (costs, losses), other = cluster.run(2, measured, str(tmp_path), schedule, model)
    assert (costs, losses) == other
    seen = next(found for name, found in costs.observed.items() if not name.endswith(PER_LAYER_SUFFIX))
    layers = [found for name, found in costs.observed.items() if name.endswith(PER_LAYER_SUFFIX)]
    assert len(layers) == whole  # for "auto", whose plans have both forms
    for found in layers:
        assert found.get("expert", "forward").keys() == {1, 4} and found.get("attention", "forward").keys() == {1}
    phases = [(kind, phase) for kind in ("dispatch", "expert", "combine") for phase in ("forward", "backward")]
    for kind, phase in [*phases, ("attention", "forward"), ("attention", "backward")]:
        assert all(seconds > 0 for seconds in seen.get(kind, phase).values())
        assert seen.get(kind, phase).keys() == ({1, 4} if whole or kind != "attention" else {1}), (kind, phase)
    assert bool(seen.get("weight-gradient", "backward")) == whole
    assert {
        MeasuredPart("loss", None),
        MeasuredPart("optimizer", None),
        MeasuredPart("other", "forward"),
    } <= seen.seconds.keys()
    of_layers = layers[0] if whole else seen
    assert of_layers.get("count-exchange", "forward").keys() == {1}  # not part of the gate's cost
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["steps-"] * (1 + whole)


def measure_during_training(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """Invented durations drift, to trigger measurements of real steps during training; losses are unchanged."""
    settings = Settings(model=SHAPE, schedule="auto", ep=2, steps=6)
    topology = Topology.from_sizes(2)
    made = [Trainer(settings, topology, torch.device("cpu"), random_corpus(4096), StopRequest()) for _ in range(2)]
    trainer, plain = made
    asked: list[float] = []

    def measure(again_s: float) -> CostModel:
        asked.append(again_s)
        return trainer.with_measured_times(COSTS, 1.0, again=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        trainer.set_plan(COSTS, measure=measure, tell=lambda line: None)
        tuning = trainer.tuning
        assert tuning is not None
        losses: list[list[float]] = [[trainer.step(number).loss for number in range(2)], []]
        step = tuning.source.step
        before = step.costs_of(tuning.current_candidate.uses_micro_batches)
        for times in (1.0, 2.0):
            factor = times / tuning.current_candidate.predicted_s
            tuning.skip()
            for number in range(400):
                if tuning.is_settled and number > 2 * WINDOW_STEPS:
                    break
                tuning.note(factor * tuning.current_candidate.predicted_s)
        names = [tuning.current_candidate.name]
        assert before not in (step.costs, step.layer_costs)
        losses[0] += [trainer.step(number).loss for number in range(2, 6)]
        losses[1] = [plain.step(number).loss for number in range(6)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    return len(asked), names


@pytest.mark.slow
def test_drifting_durations_trigger_remeasurement(cluster: Cluster, tmp_path: Path) -> None:
    (asked, names), other = cluster.run(2, measure_during_training, str(tmp_path))
    assert (asked, names) == other and asked >= 1
