"""The two nodes, and what runs on them: the step under every policy on ranks of this machine, without slow links."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cluster import __main__ as command
from bench.cluster import network
from bench.cluster.job import make_trainer
from bench.cluster.layer import make_layer, run
from bench.cluster.network import ADDRESSES, TwoNodes, missing
from bench.cluster.parts import computation
from bench.cluster.report import show, targets
from bench.cluster.setting import COMPUTED, EMULATED, Setting
from bench.cluster.step import Step
from bench.cluster.sweep import cross, degrees_of, plan_of
from fusedmoe.comm.topology import Topology
from fusedmoe.schedule.cost import LINES, CostModel, Line
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.workload import StackCosts, Workload
from tests.cluster import Cluster

TINY = replace(COMPUTED, layers=2, S=512, M=16, H=32)
TINY_EMULATED = replace(EMULATED, layers=2, S=64, M=8, H=16, emulated_flops=1e9, gradient_bytes=4096)
# By which experts and links take about as long, and starting costs little.
COSTS = CostModel({name: Line(1e-5, 1e-11 if name == "gemm" else 1e-9) for name in LINES}, 0.8)

needs_namespaces = pytest.mark.skipif(missing() is not None, reason=f"two nodes: {missing()}")


def stack(setting: Setting) -> StackCosts:
    of = Workload(1, setting.S * setting.esp, setting.M, setting.H, setting.E, k=1, ep=2, esp=setting.esp)
    layer = replace(of.layer_costs(COSTS), gradient_bytes=computation(setting).gradient_bytes)
    return StackCosts((layer,) * setting.layers, COSTS.line("all-reduce/dp"), COSTS.contention)


def topology_of(setting: Setting) -> Topology:
    of_node = setting.ranks_per_node
    return Topology.from_sizes(ep=2, esp=setting.esp, mp=setting.esp, ranks_per_node=of_node, timeout_s=30, duplex=True)


def every_policy(rank: int, world: int, setting: Setting) -> int:
    torch.manual_seed(rank)
    step, costs = Step(setting, topology_of(setting), computation(setting)), stack(setting)
    right = step.run(POLICIES["sequential"].plan(costs, 8))
    plans = [how.plan(costs, 8) for how in POLICIES.values()] + [plan_of(costs, 3, 8), plan_of(costs, 8, 1)]
    for plan in plans:
        for name, found in step.run(plan).items():
            torch.testing.assert_close(found, right[name], rtol=1e-4, atol=1e-5)
    assert float(right["dx"].abs().min()) >= 0 and float(right["z"].abs().max()) > 0
    return len(plans)


@pytest.mark.parametrize("setting", [TINY, TINY_EMULATED], ids=lambda setting: setting.name)
def test_a_step_does_the_same_under_every_policy(cluster: Cluster, setting: Setting) -> None:
    assert set(cluster.run(setting.ranks, every_policy, setting)) == {len(POLICIES) + 2}


def layer_and_job(rank: int, world: int, setting: Setting) -> list[Any]:
    topology = topology_of(setting)
    x_SM, dy_SM = torch.randn(setting.S // 2, setting.M).requires_grad_(), torch.randn(setting.S // 2, setting.M)
    gradients = []
    for policy in ("off", "pipemoe", "fsmoe"):
        torch.manual_seed(1 + rank)  # of the gate's choices
        layer = make_layer(setting, topology, policy, COSTS)
        torch.manual_seed(1 + rank)
        run(layer, x_SM, dy_SM)
        assert x_SM.grad is not None
        gradients.append(x_SM.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-4, atol=1e-5)
    if setting.emulated_flops is not None:
        return []
    losses = []
    for policy in ("off", "fsmoe"):
        trainer, plan = make_trainer(setting, topology, policy, COSTS)
        assert (plan is None) == (policy == "off") and (plan is None or max(degrees_of(plan)) > 1)
        losses.append([trainer.step(n).loss for n in range(2)])
    return losses


def test_layer_and_main_job_in_a_setting(cluster: Cluster) -> None:
    for losses in cluster.run(2, layer_and_job, TINY):
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_layer_whose_experts_wait(cluster: Cluster) -> None:
    cluster.run(4, layer_and_job, TINY_EMULATED)


def test_the_sweep_is_around_the_choice() -> None:
    assert cross((5, 2)) == sorted({(r, 2) for r in (1, 2, 3, 4, 5, 6, 8)} | {(5, r) for r in (1, 2, 3, 4, 6, 8)})
    costs = stack(COMPUTED)
    assert degrees_of(plan_of(costs, 3, 5)) == (3, 5)


@needs_namespaces
def test_two_nodes_are_joined_and_leave_nothing() -> None:
    nodes = TwoNodes(200, 1600, 32)
    nodes.make()
    try:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
        assert all(name in listed for name in nodes.names)
        bound = "import socket; s = socket.create_server(('10.77.0.2', 7000)); print('ready', flush=True); "
        bound += "c, _ = s.accept(); c.settimeout(20); print(len(c.recv(5)))"
        call = f"import socket; socket.create_connection(('{ADDRESSES[1]}', 7000), 20).sendall(b'hello')"
        with subprocess.Popen(
            nodes.command(1, sys.executable, "-c", bound), stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == "ready\n"
                subprocess.run(nodes.command(0, sys.executable, "-c", call), check=True, timeout=30)
                assert server.stdout.readline() == "5\n"
            finally:
                server.kill()
    finally:
        nodes.remove()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert not any(name in listed for name in nodes.names)


def test_without_root_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["bench.cluster", "--json", str(tmp_path / "out.json")])
    assert command.main() == 0
    assert "skipped: it needs root" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


@needs_namespaces
def test_a_rank_that_fails_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    setting = replace(TINY, name="unknown to the ranks")
    with pytest.raises(RuntimeError, match="rank [01] ended with 1"):
        command.run(setting, 1, tmp_path, 60)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert f"fusedmoe-{command.os.getpid()}-" not in listed


def test_report_says_what_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    def row(median_s: float, error: float) -> dict[str, Any]:
        return {
            **{"median_s": median_s, "min_s": median_s, "max_s": median_s, "predicted_s": median_s, "error": error},
            **{"degrees": (1, 1), "speed_up": 1.0 / median_s, "resource": "inter", "resource_s": 0.3},
        }

    found = {
        "setting": {"ranks": 4, "layers": 4, "computation": "waits"},
        "bound_s": 0.4,
        "steps": {"sequential": row(1.0, -0.02), "pipemoe": row(0.7, 0.11), "fsmoe": row(0.5, 0.05)},
        "sweep": {"best": (2, 2), "chosen": (2, 3), "regret": 0.06},
        "layer": {"off": row(1.0, 0.0)},
        "job": None,
    }
    assert [met for _, _, met in targets("emulated", found)] == [True, True, False, False]
    assert [met for _, _, met in targets("computed", found)] == [True, False, False]
    from rich.console import Console

    show(json.loads(json.dumps({"emulated": found})), Console(width=150))
    out = capsys.readouterr().out
    assert "met     FSMoE at least 1.1 times" in out and "MISSED  steps predicted" in out and "+25%" in out
