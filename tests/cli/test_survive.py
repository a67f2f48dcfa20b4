"""`fusedmoe train --survive` under torchrun: losing ranks and nodes leaves the losses unchanged."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cluster.agents import PRELOAD, Agents, kept_files, metrics
from fusedmoe.cli.job import Launch, StopRequest, choose_sizes, make_topology
from fusedmoe.cli.main import main
from fusedmoe.cli.restart import sizes_for_ranks
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.train import TrainingJob
from fusedmoe.cli.trainer import Trainer
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from tests.cli.test_train import COSTS
from tests.cluster import Cluster

# No loss is per rank and experts drop no tokens, so the numbers are independent of the layout.
MODEL: dict[str, Any] = dict(
    layers=2, model_dim=16, heads=4, hidden=8, experts=4, gate="deepseek_v3", seq_len=16, batch=2, capacity_factor=None
)
FLAGS = ["--layers", "2", "--model-dim", "16", "--heads", "4", "--hidden", "8", "--experts", "4", "--seq-len", "16"]
FLAGS += ["--gate", "deepseek_v3", "--batch", "2", "--capacity-factor", "none", "--dtype", "fp64"]
FLAGS += ["--eval-batches", "2"]
CLOSE = 1e-6


def settings_of(text: Path, **more: Any) -> Settings:
    made = Settings(model=ModelConfig(**MODEL), dtype="fp64", data=str(text), eval_batches=2, checkpoint_every=0)
    return made.changed({"timeline_step": 10**6, "ranks_per_node": 2, **more})


def train_in_shares(rank: int, world: int, settings: Settings, shares: int | None, steps: int) -> list[float]:
    """Return the losses of some steps, the norms of their gradients, and the held-out loss."""
    launch = Launch(rank, world, rank % 2, 2)
    topology = make_topology(choose_sizes(settings, launch), 60.0)
    job = TrainingJob(settings, launch, choose_sizes(settings, launch), topology, torch.device("cpu"), StopRequest())
    trainer = Trainer(settings, topology, torch.device("cpu"), job._corpus(), StopRequest(), shares)
    if settings.schedule != "off":
        trainer.set_plan(COSTS)
    reports = [trainer.step(step) for step in range(steps)]
    held_out = trainer.held_out_loss()
    assert held_out is not None
    return [held_out, *(report.loss for report in reports), *(report.grad_norm for report in reports)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("off", marks=pytest.mark.slow), "fsmoe"])
def test_fewer_ranks_compute_same_losses_in_shares(cluster: Cluster, text: Path, schedule: str) -> None:
    settings = settings_of(text, schedule=schedule)
    whole = cluster.run(4, train_in_shares, settings, None, 3)[0]  # two replicas
    assert whole == pytest.approx(cluster.run(2, train_in_shares, settings, 2, 3)[0], rel=CLOSE)
    # Three shares on two replicas: the surplus share has weight zero.
    three = settings.changed({"ep": 1, "esp": 1, "mp": 1, "ranks_per_node": 1})
    expected = cluster.run(3, train_in_shares, three.changed({"ep": 1}), None, 2)[0]
    assert expected == pytest.approx(cluster.run(2, train_in_shares, three.changed({"ep": 2}), 3, 2)[0], rel=CLOSE)


def test_parallel_sizes_are_refitted_to_fewer_ranks(text: Path) -> None:
    asked = settings_of(text, ep=2, esp=2, mp=2)
    assert vars(sizes_for_ranks(asked, Launch(0, 4, 0, 2))) == vars(choose_sizes(asked, Launch(0, 4, 0, 2)))
    assert vars(sizes_for_ranks(asked, Launch(0, 2, 0, 2))) == dict(ranks_per_node=2, ep=1, esp=2, mp=2)
    wide = settings_of(text, ep=2, esp=4, mp=4, ranks_per_node=None)
    assert vars(sizes_for_ranks(wide, Launch(0, 2, 0, 2))) == dict(ranks_per_node=2, ep=1, esp=2, mp=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "needs torchrun"),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}, "--max-restarts"),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_survive_without_torchrun_restarts_is_rejected(
    changes: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--survive", "1"]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match="survive"):
        Settings(survive=-1)


def train_without_faults(rank: int, world: int, settings: Settings, run: Path) -> None:
    launch = Launch(rank, world, rank % 2, 2)
    sizes = choose_sizes(settings, launch)
    TrainingJob(settings, launch, sizes, make_topology(sizes, 60.0), torch.device("cpu"), StopRequest()).run(
        run, None, None
    )


def check_metrics(run: Path, right: Path, steps: int) -> None:
    """Require every step once, with the numbers of a fault-free job."""
    found = {(record["step"], "held_out_loss" in record): record for record in metrics(run)}
    expected = {(record["step"], "held_out_loss" in record): record for record in metrics(right)}
    assert len(found) == len(metrics(run)) == steps + 1 and found.keys() == expected.keys()
    for place, record in expected.items():
        for key in ("loss", "grad_norm", "held_out_loss"):
            assert found[place].get(key) == (pytest.approx(record[key], rel=CLOSE) if key in record else None), place


def flags(text: Path, run: Path, steps: int, *more: str) -> list[str]:
    common = ["--data", str(text), "--run-dir", str(run), "--steps", str(steps), "--timeline-step", "1000000"]
    return [*FLAGS, *common, "--checkpoint-every", "0", *more]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_rank_loses_no_step(cluster: Cluster, tmp_path: Path, text: Path) -> None:
    """One node of two ranks, each in a new Python process: the killed rank's state is in its node's memory."""
    run, right, steps = tmp_path / "run", tmp_path / "right", 60
    with Agents(tmp_path, 1, 2, *flags(text, run, steps, "--survive", "1"), forked=False) as agents:
        agents.wait_for_step(run, 10, 250)
        os.kill(random.choice(agents.ranks(agents.running[0])), signal.SIGKILL)
        cluster.run(2, train_without_faults, settings_of(text, steps=steps), right)
        assert agents.wait(300) == [0], agents.said()
        said = agents.outputs[0].read_text()
    assert "2 ranks continue after step " in said and "with the state from memory" in said
    check_metrics(run, right, steps)
    assert kept_files() == []


FAULTS = ["a rank is killed", "a rank is frozen", "a node is lost", "a node's torchrun is lost", "a node comes back"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_two_node_job_continues_after_fault(cluster: Cluster, tmp_path: Path, text: Path, fault: str) -> None:
    """Faults at random moments, with a state saved every one to three steps; `bench.cluster.survive` runs many."""
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    # A returning node must find the other ranks training, however long its Python takes to start.
    run, right, steps, at = tmp_path / "run", tmp_path / "right", 200 if "back" in fault else 40, rng.randint(3, 20)
    cluster.run(4, train_without_faults, settings_of(text, steps=steps), right)
    more = ("--survive", str(rng.randint(1, 3)), "--timeout", "15")
    with Agents(tmp_path, 2, 2, *flags(text, run, steps, *more)) as agents:
        agents.wait_for_step(run, at, 250)
        time.sleep(rng.random() * 0.3)
        agent = rng.choice(agents.running)
        if "a rank" in fault:
            how = signal.SIGKILL if "killed" in fault else signal.SIGSTOP
            os.kill(rng.choice(agents.ranks(agent)), how)
        else:
            node = agents.lose(agent, only_agent="torchrun" in fault)
            if "back" in fault:
                agents.wait_for_step(run, at + 5, 250)
                agents.start(node)
        codes = agents.wait(300)
        assert set(codes) == {0}, f"seed {seed}: {codes}\n{agents.said()}"
        said = agents.said()
    ranks = [int(ranks) for ranks in re.findall(r"^survival: (\d+) ranks? continue after", said, re.MULTILINE)]
    assert ranks and ranks[-1] == (2 if "lost" in fault else 4), f"seed {seed}: {said}"
    assert said.count("with the state from memory") == len(ranks), f"seed {seed}: {said}"
    check_metrics(run, right, steps)
    assert kept_files() == []


@pytest.mark.slow
def test_preload_before_fork_uses_no_cuda_and_no_threads() -> None:
    """A process forked after CUDA was used has no CUDA; one forked from a threaded process may hang."""
    imports = PRELOAD.split(";")[0]
    lines = ["import os, torch", "def used(*_): raise SystemExit('CUDA was asked for')"]
    lines += ["torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = used", "import numpy"]
    lines += ["before = len(os.listdir('/proc/self/task'))", imports, "import torch.distributed.run"]
    lines += ["raise SystemExit(len(os.listdir('/proc/self/task')) - before)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
