"""The two-node benchmark: steps under every policy, on local ranks without slow links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cluster import __main__ as command
from bench.cluster import balance, job, model, network, placed, predicted, profile, report, stacks
from bench.cluster.blocks import UNTUNED_BYTES, plans_by_policy
from bench.cluster.layer import both_passes, make_layer, run
from bench.cluster.network import ADDRESSES, TwoNodes, missing
from bench.cluster.rank import Parts, leave_waits_alone, reword_noise, setting_of
from bench.cluster.report import MEASURED
from bench.cluster.setting import BLOCKS, BLOCKS_COMPUTED, COMPUTED, EMULATED, PLACED, Setting
from bench.cluster.stacks import plan_of, same_results
from bench.cluster.step import Computed, Step, computation
from bench.cluster.turns import beside, first_of, setting_json
from bench.console import stdout_console
from bench.provenance import age, conditions, difference, git, provenance
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime import cache
from fusedmoe.runtime.profiler import Profile
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload
from tests.cluster import Cluster
from tests.marks import slowly

TINY = replace(COMPUTED, layers=2, S=512, M=16, H=32, gradient_bytes=2048)
TINY_EMULATED = replace(EMULATED, layers=2, S=64, M=8, H=16, emulated_flops=1e9, gradient_bytes=4096)
# Seven samples: chunks are never equal, and one of eight chunks is empty.
TINY_BLOCKS = replace(BLOCKS_COMPUTED, layers=3, S=448, M=16, H=32)
TINY_BLOCKS_EMULATED = replace(BLOCKS, layers=3, S=64, M=8, H=16, emulated_flops=1e9, gradient_bytes=4096)
# Balanced costs: experts and links take about equally long, and launch overhead is small.
COSTS = CostModel(
    {name: Line(1e-5, 1e-11 if name == "gemm" else 1e-9) for name in LINES}, Contention.between_links(0.8)
)

lacking = missing()
needs_namespaces = pytest.mark.skipif(lacking is not None, reason=f"two nodes: {lacking}")


def stack(setting: Setting) -> StepCosts:
    of = Workload(1, setting.S * setting.esp, setting.M, setting.H, setting.E, k=1, ep=2, esp=setting.esp)
    layer = replace(of.layer_costs(COSTS), gradient_bytes=computation(setting).gradient_bytes)
    if not setting.blocks:
        layer = replace(layer, micro=None)
    return StepCosts((layer,) * setting.layers, COSTS.line("all-reduce/dp"), COSTS.contention)


def topology_of(setting: Setting) -> Topology:
    of_node = setting.ranks_per_node
    ep, esp = setting.ep, setting.esp
    return Topology.from_sizes(ep=ep, esp=esp, mp=esp, ranks_per_node=of_node, timeout_s=30, duplex=True)


def run_every_layer_policy(rank: int, world: int, setting: Setting) -> int:
    torch.manual_seed(rank)
    step, costs = Step(setting, topology_of(setting), computation(setting)), stack(setting)
    right = {name: tensor.clone() for name, tensor in step.run(POLICIES["sequential"].plan(costs, 8)).items()}
    plans = [POLICIES[name].plan(costs.by_layer(), 8) for name in layer_policies()]
    plans += [plan_of(costs, 3, 8), plan_of(costs, 8, 1)]
    for plan in plans:
        for name, found in step.run(plan).items():
            torch.testing.assert_close(found, right[name], rtol=1e-4, atol=1e-5)
    assert float(right["dx"].abs().min()) >= 0 and float(right["z"].abs().max()) > 0
    return len(plans)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [TINY, TINY_EMULATED], ids=lambda setting: setting.name)
def test_step_results_equal_under_every_layer_policy(cluster: Cluster, setting: Setting) -> None:
    assert set(cluster.run(setting.ranks, run_every_layer_policy, setting)) == {len(layer_policies()) + 2}


def run_every_step_policy(rank: int, world: int, setting: Setting) -> int:
    torch.manual_seed(rank)
    step, costs = Step(setting, topology_of(setting), computation(setting)), stack(setting)
    plans = plans_by_policy(costs, 8)
    # Chunk counts that do not divide each other, and buckets that end inside an element.
    for how in ((3, 2, 1001, True), (8, 1, 777), (2, 5, None, True), (1, 3, 4096)):
        plans[str(how)] = micro_schedule(costs, StepSplit(*how)).plan()
    assert same_results(step, plans) < 1e-4
    assert all(float(tensor.abs().max()) > 0 for tensor in step.run(plans["joint"]).values())
    return len(plans)


@pytest.mark.parametrize(
    "setting",
    [TINY_BLOCKS, pytest.param(TINY_BLOCKS_EMULATED, marks=pytest.mark.slow)],
    ids=lambda setting: setting.name,
)
@pytest.mark.slow
def test_block_results_equal_under_every_step_policy(cluster: Cluster, setting: Setting) -> None:
    assert set(cluster.run(setting.ranks, run_every_step_policy, setting)) == {11 + 4}


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_differing_policy_results_raise(wrong: float) -> None:
    plans = {policy: POLICIES[policy].plan(stack(TINY), 8) for policy in ("sequential", "fsmoe", "tutel")}

    class Results:
        def run(self, plan: Plan) -> dict[str, torch.Tensor]:
            return {"z": torch.tensor([1.0, wrong if plan == plans["fsmoe"] else 1.0])}

    with pytest.raises(AssertionError, match="results of fsmoe differ"):
        same_results(Results(), plans)  # type: ignore[arg-type]


def compare_step_with_autograd(rank: int, world: int) -> None:
    """Compare with autograd over unsplit layers; one rank of two also holds all rows of the other."""
    setting = TINY_BLOCKS
    torch.manual_seed(0)  # seeds the weights: the dense part is equal on all ranks; experts are made distinct below
    of = Computed(setting)
    step = Step(setting, topology_of(setting), of)
    plan = micro_schedule(stack(setting), StepSplit(2, 3, 1000, True)).plan()
    found = step.run(plan)
    S, M, E = setting.S, setting.M, setting.E
    x_WSM, dz_WSM = torch.stack([_rows_of(source, S, M) for source in range(world)], 1).double()
    x_WSM.requires_grad_()
    dense = [[w.double().requires_grad_() for w in layer] for layer in of._projections]
    # Both ranks drew the same weights, so expert e of rank 0 equals expert e of rank 1.
    experts = [[[w.double().requires_grad_() for w in layer] for layer in each] for each in (of._w1, of._w2)]
    y_WSM = x_WSM
    for layer in range(setting.layers):
        x = y_WSM.reshape(-1, setting.sequence, M)
        q, k, v = (x @ w for w in dense[layer][:3])
        mixed = torch.softmax(q @ k.transpose(1, 2) / M**0.5, -1) @ v
        y_WSM = y_WSM + (mixed @ dense[layer][3]).view(y_WSM.shape)
        rows = y_WSM.view(world, -1, E, M)  # by (capacity, expert)
        out = [(rows[:, :, e] @ experts[0][layer][e % 2].t()).relu() @ experts[1][layer][e % 2].t() for e in range(E)]
        z_WSM = y_WSM + torch.stack(out, 2).view(y_WSM.shape)
        y_WSM = z_WSM
    y_WSM.backward(dz_WSM)

    def close(found: torch.Tensor, right: torch.Tensor) -> None:
        assert float((found - right).abs().max()) < 1e-4 * float(right.abs().max())

    close(found["z"], y_WSM[rank])
    close(found["dx"], x_WSM.grad[rank])
    ours = found["gradient"].view(setting.layers, 4, M, M).flip(0)
    close(ours, torch.stack([torch.stack([w.grad for w in layer]) for layer in dense]))
    # Each rank has two of the four experts; the reference's weights stand for both ranks.
    for name, which in (("dw1", experts[0]), ("dw2", experts[1])):
        total = all_reduce(step._topology.world, found[name].clone())
        close(total, torch.stack([torch.stack([w.grad for w in layer]) for layer in which]))


def _rows_of(rank: int, S: int, M: int) -> torch.Tensor:
    return torch.randn(2, S, M, generator=torch.Generator().manual_seed(rank))


@pytest.mark.slow
def test_micro_batched_blocks_equal_autograd(cluster: Cluster) -> None:
    cluster.run(2, compare_step_with_autograd)


def test_block_plans_have_exactly_named_features() -> None:
    """FlowMoE by parts and Lancet by passes: each plan has exactly the features in its name."""
    costs = stack(BLOCKS)
    plans = plans_by_policy(costs, 8)
    kinds = {name: {task.kind for task in plan} for name, plan in plans.items()}
    micro = {name for name, plan in plans.items() if any(t.kind == "attention" and t.chunk for t in plan)}
    buckets = {name: sum(task.kind == "gradient-all-reduce" for task in plan) for name, plan in plans.items()}
    assert micro >= {"experts, attention", "flowmoe"} and not micro & {"experts", "experts, all-reduce", "fsmoe"}
    assert buckets["experts"] == buckets["experts, attention"] == 4
    assert buckets["experts, all-reduce"] == 4 * -(-BLOCKS.gradient_bytes // UNTUNED_BYTES)
    assert "weight-gradient" in kinds["lancet, weights"] & kinds["lancet"]
    assert "weight-gradient" not in kinds["lancet, ranges"]
    assert set(plans["lancet, weights"].degrees.values()) == {1}
    assert max(plans["lancet, ranges"].degrees.values()) > 1
    seconds = {name: makespan(plan, costs) for name, plan in plans.items()}
    assert min(seconds, key=lambda name: seconds[name]) in ("joint", "flowmoe") and seconds["joint"] == min(
        seconds.values()
    )


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for profiles, shared by settings of equal ranks."""
    return str(tmp_path_factory.mktemp("profiles"))


def measure_parts(rank: int, world: int, setting: Setting, names: list[str], folder: str, profiles: str) -> None:
    """Run `bench.cluster.rank` with shorter measurements and no pictures."""
    with pytest.MonkeyPatch.context() as quicker:
        quicker.setenv(cache.CACHE, profiles)
        quicker.setattr(cache, "profile", partial(cache.profile, budget_s=1.0))
        for module in (profile, model):
            quicker.setattr(module, "STEPS_BUDGET_S", 0.5)
        quicker.setattr(placed, "_ATTENTION_S", 1e-3)
        quicker.setattr(placed, "_STEPS", 3)
        quicker.setattr(placed, "_ROUTED_STEPS", 2)
        quicker.setattr(stacks, "draw", lambda timelines, path, title: path.touch())
        parts = Parts(setting, topology_of(setting), 1, Path(folder))
        for name in names:
            found = {"setting": setting_json(setting), **getattr(parts, name)()}
            if rank == 0:
                Path(folder, f"{name}.json").write_text(json.dumps(found))


def store_and_show(
    setting: Setting, folder: Path, names: list[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Store and show the results of one setting."""
    for name in names:
        own = {"run": provenance(MEASURED) | {"rounds": 1}, **json.loads((folder / f"{name}.json").read_text())}
        command._store(folder / "results", setting, name, own)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["bench.cluster", "--show", "--results", str(folder / "results")])
        assert command.main() == 0
    out = capsys.readouterr().out
    assert "medians of 1 rounds" in out and "commit" in out
    found: dict[str, Any] = command._stored(folder / "results", [(setting, names)])[setting.name]
    return found


@pytest.mark.skipif(find_spec("sklearn") is None, reason="tuning S_p needs scikit-learn")
@pytest.mark.slow
def test_block_stack_steps_are_measured_and_printed(
    cluster: Cluster, tmp_path: Path, profiles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, names = replace(TINY_BLOCKS_EMULATED, layers=2, gradient_bytes=2**16), ["steps", "buckets"]
    cluster.run(4, measure_parts, setting, names, str(tmp_path), profiles)
    found = store_and_show(setting, tmp_path, names, capsys)
    rows, buckets = found["steps"]["rows"], found["buckets"]
    assert len(list(tmp_path.glob("*.png"))) == sum("same_as" not in row for row in rows.values())
    assert len(rows) == 11 and rows["sequential"]["exposed_s"] > 0
    for row in rows.values():
        assert 0 <= row["exposed_s"] <= row["max_s"] and 0 <= row["predicted_exposed_s"] <= row["predicted_s"]
        Plan.parse(row["plan"])
    assert len(buckets["tried"]) == 8 and buckets["chosen"] in [row["bytes"] for row in buckets["rows"]]
    assert buckets["regret"] >= 0 and len(buckets["rows"]) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True], ids=["layers", "blocks"])
def test_emulated_model_is_measured_and_printed(
    cluster: Cluster, tmp_path: Path, profiles: str, capsys: pytest.CaptureFixture[str], blocks: bool
) -> None:
    like = BLOCKS if blocks else EMULATED
    setting = replace(like, layers=2, S=96, M=8, H=16, emulated_flops=1e9, gradient_bytes=4096)
    names = ["model"] if blocks else ["layer", "model"]
    cluster.run(4, measure_parts, setting, names, str(tmp_path), profiles)
    found = store_and_show(setting, tmp_path, names, capsys)
    for name in names:
        rows = found[name]["rows"]
        assert rows.keys() >= {"off", "sequential", "tutel", "joint", "auto", *(["flowmoe"] if blocks else [])}
        assert rows["auto"]["over_sequential"] > 0 and rows["auto"]["over_off"] > 0
        assert "predicted_s" not in rows["off"] and rows["joint"]["predicted_s"] > 0
    auto = found["model"]["auto"]
    assert auto["steps_tried"] > 0 and auto["share_of_500_steps"] >= 0 and auto["tried"]


@pytest.mark.slow
def test_placements_and_routers_are_measured_and_printed(
    cluster: Cluster, tmp_path: Path, profiles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, names = replace(PLACED, layers=2, S=64, M=8, H=4, E=8), ["placement", "routers"]
    cluster.run(4, measure_parts, setting, names, str(tmp_path), profiles, timeout_s=200)
    found = store_and_show(setting, tmp_path, names, capsys)
    rows = found["placement"]["rows"]
    assert rows.keys() == set(placed._RUNS)
    assert all(row["peak_bytes"] >= row["memory_bytes"] > 0 for row in rows.values())
    peak, ep = {name: row["peak_bytes"] for name, row in rows.items()}, rows["ep"]
    assert peak["ep"] == ep["memory_bytes"] and peak["smartmoe"] >= peak["ep"]
    # Replicas, and their gradients in the backward pass.
    assert (
        peak["hecate"] > rows["hecate"]["memory_bytes"]
        and peak["hecate"] > peak["hecate, re-materialising"] > peak["ep"]
    )
    assert len(rows["smartmoe"]["rounds_s"]) == 3
    routers = found["routers"]["routers"]
    assert [*routers] == [*placed._ROUTERS]
    for of in routers.values():
        assert of["rows"]["hecate"]["over_hecate"] == 1 and len(of["rows"]["auto"]["rounds_s"]) == 2
    straggler = {router: of["rows"]["ep"]["straggler"] for router, of in routers.items()}
    assert 1 <= straggler["even"] < straggler["changes every step"]


@pytest.mark.slow
def test_placement_overhead_is_measured_and_printed(
    cluster: Cluster, tmp_path: Path, profiles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(2, measure_parts, TINY, ["price"], str(tmp_path), profiles)
    rows = store_and_show(TINY, tmp_path, ["price"], capsys)["price"]["rows"]
    assert [*rows] == ["ep, off", "fssdp, off", "ep, fsmoe", "fssdp, fsmoe"]
    for name, row in rows.items():
        assert len(row["rounds_s"]) == 4 and row["price"] > -1
        assert row["price"] == 0 if name.startswith("ep") else row["copies"] >= 0


def run_layer_and_job(rank: int, world: int, setting: Setting) -> list[Any]:
    topology = topology_of(setting)
    x_SM, dy_SM = torch.randn(setting.S // 2, setting.M).requires_grad_(), torch.randn(setting.S // 2, setting.M)
    gradients = []
    for schedule in (None, Schedule("pipemoe", costs=COSTS), Schedule("fsmoe", costs=COSTS)):
        torch.manual_seed(1 + rank)  # seeds the gate's choices
        layer = make_layer(setting, topology, schedule)
        torch.manual_seed(1 + rank)
        run(layer, x_SM, dy_SM)
        assert x_SM.grad is not None
        gradients.append(x_SM.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-4, atol=1e-5)
    if setting.emulated_flops is not None:
        return []
    losses = []
    with pytest.MonkeyPatch.context() as quicker:
        quicker.setattr(job.Trainer, "with_measured_times", lambda trainer, costs: costs)
        for policy in ("off", "fsmoe"):
            trainer = job.make_trainer(setting, topology, policy, COSTS)
            assert (trainer.planned is None) == (policy == "off")
            losses.append([trainer.step(n).loss for n in range(2)])
    return losses


@pytest.mark.slow
def test_benchmark_layer_and_training_job_have_equal_loss(cluster: Cluster) -> None:
    for losses in cluster.run(2, run_layer_and_job, TINY):
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_layer_with_emulated_experts_runs(cluster: Cluster) -> None:
    cluster.run(4, run_layer_and_job, TINY_EMULATED)


def profile_json(setting: Setting, costs: StepCosts) -> dict[str, Any]:
    """A profile in the format of the results."""
    (layer, *_), micro = costs.layers, costs.layers[0].micro
    return {
        "lines": {name: vars(Line(1e-3, 1e-8)) for name in LINES},
        "contention": 0.9,
        "chunks": {phase: {kind: vars(part) for kind, part in of.items()} for phase, of in layer.chunks.items()},
        "dense_s": layer.dense_s,
        "gradient_bytes": setting.gradient_bytes,
        "micro": None if micro is None else asdict(micro),
    }


@pytest.mark.parametrize("setting", [EMULATED, *slowly(BLOCKS)], ids=lambda setting: setting.name)
def test_two_node_prediction_uses_line_rates(setting: Setting) -> None:
    """Line rates give the collectives' cost lines; computation stays as measured."""
    costs, mbit = stack(setting), 1e6 / 8
    plan = plans_by_policy(costs, 8)["joint"] if setting.blocks else POLICIES["fsmoe"].plan(costs, 8)
    row = {"plan": str(plan), "median_s": 2.0, "predicted_s": 1.0, "error": -0.5}
    found = {"setting": setting_json(setting), "profile": profile_json(setting, costs), "rows": {"fsmoe": row}}
    model = predicted.costs_of(found)
    share = 100 * mbit * 1448 / 1514 / 2  # two ranks of a node share the send rate
    assert model.line("all-to-all/ep") == Line(0.0, 1 / 2 / share)
    assert model.line("all-reduce/dp").beta_s == pytest.approx(2 / 2 / share)
    # Each of two ranks sends half of the gathered bytes, all over one bus.
    assert model.line("all-gather/esp").beta_s == pytest.approx(1 / (400 * mbit), rel=0.002)
    own = predicted.step_costs_of(found, model)
    sent_s = model.line("all-to-all/ep").seconds(setting.row_bytes)
    assert own.layers[0].chunks["forward"]["dispatch"].seconds(1) == pytest.approx(sent_s)
    gathered_s = model.line("all-gather/esp").seconds(2 * setting.row_bytes)
    assert own.layers[0].chunks["backward"]["all-gather"].seconds(1) == pytest.approx(gathered_s)
    assert own.layers[0].chunks["forward"]["expert"] == costs.layers[0].chunks["forward"]["expert"]
    assert own.layers[0].micro == costs.layers[0].micro
    assert own.contention == Contention.between_links(0.9) and len(own.layers) == setting.layers
    lines, steps = predicted.tables(setting.name, found)
    assert (lines.row_count, steps.row_count) == (4, 1)


def bytes_sent_and_compute_s(rank: int, world: int, setting: Setting) -> tuple[int, int, float]:
    """Bytes sent to the other rank: counted from a step's messages, and as reported; and the compute time."""
    of = Computed(setting)
    exchange = Step(setting, topology_of(setting), of)._exchange
    rows = int(exchange.sizes.send_PE[1 - rank].sum())
    moved = setting.layers * (4 * rows * setting.M * 4 + of.gradient_bytes)
    return moved, balance.step_bytes(setting, of.gradient_bytes), balance.compute_s(setting, of)


@pytest.mark.slow
def test_link_rate_balances_bytes_and_compute_time(cluster: Cluster) -> None:
    here, there = cluster.run(2, bytes_sent_and_compute_s, TINY)
    assert here == there and here[0] == here[1] and 0 < here[2] < 10
    sent = balance.step_bytes(replace(COMPUTED, layers=2), 4 * 4 * COMPUTED.M**2)
    assert balance.rate_mbit(sent, 8e-6 * sent / 32) == 32
    # Measured on a machine: at 32 Mbit/s communication took 3.32 s.
    assert balance.rate_mbit(sent, 2.487) == pytest.approx(32 * 3.32 / 2.487, rel=0.05)
    assert balance.rate_mbit(sent, 1e-3) == balance.MOST and balance.rate_mbit(sent, 1e3) == balance.LEAST
    assert balance.step_bytes(EMULATED, 0) == 2 * 3 * 4 * 1024 * 256 * 4 // 2  # two ranks of a node send


def test_balanced_rate_is_applied_to_link_and_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"inter_mbit": 41, "computation_s": 2.5}
    made: list[int] = []
    ran: list[str] = []

    class Nodes(TwoNodes):
        def make(self) -> None:
            made.append(self._rates[0])

        def remove(self) -> None:
            pass

    def run_ranks(commands: list[list[str]], *_: object) -> None:
        ran.extend({command[command.index("-m") + 1] for command in commands})
        if not made:
            (tmp_path / balance.FILE).write_text(json.dumps(found))

    monkeypatch.setattr(command, "TwoNodes", Nodes)
    monkeypatch.setattr(command, "run_ranks", run_ranks)
    command.run(COMPUTED, ["job"], 1, tmp_path, lambda *_: None)
    assert made == [41] and ran == ["bench.cluster.balance", "bench.cluster.rank"]
    written = setting_json(setting_of("computed", tmp_path))
    assert {name: written[name] for name in found} == found
    command.run(EMULATED, ["layer"], 1, tmp_path, lambda *_: None)
    assert made == [41, EMULATED.inter_mbit] and ran[2:] == ["bench.cluster.rank"]
    assert setting_of("emulated", tmp_path) == EMULATED


@needs_namespaces
def test_namespaces_connect_and_are_removed() -> None:
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


def test_noise_warning_does_not_name_a_command_that_cannot_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    reword_noise()
    for text in ("costs.json: measured times of gemm, copy are noisy, so … profile --again", "another"):
        warnings.showwarning(UserWarning(text), UserWarning, "", 1)
    assert shown == ["another"]
    assert capsys.readouterr().out == "  measured times of gemm, copy are noisy: predictions and plans may be poor\n"


def test_ranks_are_killed_when_saving_results_fails(tmp_path: Path) -> None:
    number = tmp_path / "number"

    def look() -> None:
        if number.exists() and number.read_text().endswith("\n"):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        command.run_ranks([["sh", "-c", f"echo $$ > {number}; exec sleep 20"]], [{}], 20, look)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_run_without_root_is_skipped_with_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["bench.cluster", "--results", str(tmp_path / "out")])
    assert command.main() == 0
    assert "skipped: it needs root" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_finished_parts_are_saved_when_setting_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Parts are written one by one; a failing setting does not stop the next, and settings without time are skipped."""
    asked: list[tuple[str, list[str]]] = []

    def run(
        setting: Setting, parts: list[str], rounds: int, folder: Path, keep: command.Keep, seconds: int, _: Any
    ) -> None:
        asked.append((setting.name, parts))
        assert seconds >= 1800
        if setting is BLOCKS:
            raise RuntimeError("rank 1 ended with 1")
        keep(parts[0], {"number": len(asked)}, 12.0)
        assert (tmp_path / "pictures").exists() == (setting is EMULATED)  # after the first picture
        if setting is COMPUTED:
            (folder / "fsmoe.png").touch()
        if setting is EMULATED:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "missing", lambda: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    flags = ["--minutes", "15", "--results", str(tmp_path), "--pictures", str(tmp_path / "pictures")]
    wanted = ["blocks:model", "computed:job,steps", "placement", "emulated:layer,model", "layer"]
    monkeypatch.setattr(sys, "argv", ["bench.cluster", "--settings", *wanted, *flags])
    assert command.main() == 130
    assert asked == [("blocks", ["model"]), ("computed", ["job", "steps"]), ("emulated", ["layer", "model"])]
    out = capsys.readouterr().out
    assert out.startswith("load 2.5: other processes are running, so times will be larger\n")
    assert "no time for placement" in out and "blocks: rank 1 ended" in out
    assert "computed:job and emulated:layer written" in out
    assert [picture.name for picture in (tmp_path / "pictures").iterdir()] == ["computed-fsmoe.png"]
    stored = json.loads((tmp_path / "cluster.json").read_text())["settings"]
    assert stored.keys() == {"computed", "emulated"} and stored["computed"].keys() == {"job"}
    assert stored["computed"]["job"]["number"] == 2
    run_of = stored["emulated"]["layer"]["run"]
    assert (
        run_of["rounds"] == 5 and run_of["seconds"] == 12 and run_of["commit"] == git("rev-parse", "--short=12", "HEAD")
    )
    # The time of a part is its expected time on the next run.
    options = command.argparse.Namespace(results=tmp_path, rounds=10)
    assert command._fitting(EMULATED, ["layer"], options, 60.0) == (["layer"], command._START_S + 24.0)
    assert command._fitting(EMULATED, ["layer"], options, 50.0) == ([], 0.0)


def test_missed_goals_are_the_librarys_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "_show_part", lambda *_: None)
    monkeypatch.setattr(report, "age", lambda *_: None)
    report.show({"emulated": {"sweep": {"run": {}, "regret": 0.2}, "placement": {"run": {}}}}, stdout_console())
    out = capsys.readouterr().out
    assert "the library's own goals:\nMISSED  chosen degrees within 5% of the best: +20.0%\n" in out
    assert out.count("goals") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a repository to another user")
def test_root_records_commit_of_another_users_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    for arguments in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, timeout=20)
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr("bench.provenance.ROOT", tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", str(provenance(["bench"])["commit"]))


def test_rows_older_than_measured_code_are_marked_old() -> None:
    now = provenance(["bench/provenance.py"]) | {"rounds": 5, "changed_files": 0}
    first = git("log", "--format=%h", "--diff-filter=A", "--", "bench/provenance.py")
    before = git("rev-parse", f"{first}^") if first else None
    if before is None:
        pytest.skip("git does not know when this file came")
    assert age(now | {"commit": git("rev-parse", "HEAD")}, ["LICENSE"]) is None
    assert "OLD: 1 files" in str(age(now | {"commit": before}, ["bench/provenance.py"]))
    assert "OLD?" in str(age(now | {"commit": None}, ["LICENSE"]))
    assert "OLD?" in str(age(now | {"commit": "0" * 40}, ["LICENSE"]))
    assert "2 of its files" in str(age(now | {"changed_files": 2}, ["LICENSE"]))
    assert "medians of 5 rounds" in conditions(now, ["LICENSE"])
    assert difference([now, now | {"load": 9.0}]) is None
    assert "rows of commits" in str(difference([now, now | {"commit": before}]))
    assert "machines" in str(difference([now, now | {"machine": {"cores": 64}}]))


def test_equal_plans_are_measured_once() -> None:
    first = first_of({"sequential": 1, "tutel": 2, "auto": 2})
    assert first == {"sequential": "sequential", "tutel": "tutel", "auto": "tutel"}
    rows = beside({"sequential": {"median_s": 2.0}, "tutel": {"median_s": 1.0}}, first)
    assert rows["auto"] == {"median_s": 1.0, "same_as": "tutel", "over_sequential": 2.0}
    assert "same_as" not in rows["tutel"] and rows["sequential"]["over_sequential"] == 1.0


@pytest.mark.slow
@needs_namespaces
def test_failed_rank_is_named_and_namespaces_are_removed(tmp_path: Path) -> None:
    setting = replace(TINY, name="unknown to the ranks", inter_mbit=100)
    with pytest.raises(RuntimeError, match="rank [01] ended with 1"):
        command.run(setting, ["layer"], 1, tmp_path, lambda *_: None, 60)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert f"fusedmoe-{os.getpid()}-" not in listed


def test_prediction_includes_dense_work_and_rechunk() -> None:
    """A prediction includes the work around the pipeline, and the copy if the passes have different chunks."""
    kinds = ("dispatch", "expert", "combine")
    bare = Workload(1, 512, 16, 32, 4, k=1, ep=2).step_costs(COSTS, [0], kinds)
    around = {"forward": {"other": 0.25, "count-exchange": 0.5}, "backward": {"other": 0.125}}
    costs = replace(bare, layers=(replace(bare.layers[0], dense_s=around, rechunk_s=2.0),))
    for degrees in ((2, 2), (2, 4)):
        plans = Schedule("fsmoe", degrees).plans(kinds, None)
        passes_s = sum(makespan(one, bare) for one in (plans.forward, plans.backward))
        rechunked_s = makespan(both_passes(plans, costs), costs) - passes_s - 0.875
        assert rechunked_s == pytest.approx(2.0 if degrees == (2, 4) else 0.0, rel=0.02, abs=1e-9)


def test_contention_of_emulated_waits_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path))
    disturbed = Contention(0.5, 0.6, 0.7, 0.8, 0.9, 0.4)
    lines = {name: Line(1e-4, 1e-9) for name in ("gemm", "copy")}
    measured = Profile(CostModel(lines, disturbed, tiled=True), {name: ((1.0, 1.0),) for name in lines}, 1.0)
    monkeypatch.setattr(cache, "profile", lambda *_, **__: measured)
    leave_waits_alone(Topology())
    found, _ = cache.cached_profile(Topology(), torch.device("cpu"))
    assert found.costs.contention == Contention(intra_beside_inter=0.8, inter_beside_intra=0.4)
    assert found == replace(measured, costs=replace(measured.costs, contention=found.costs.contention))
