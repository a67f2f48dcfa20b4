"""`ShardedExperts` trains as expert parallelism does: policies, placements, resumed jobs, memory."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.placement.baselines import replicate, shadow, swap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import Custom, FeedForward
from fusedmoe.gates import SoftMoE, TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import Schedule
from fusedmoe.orders import Einsum
from fusedmoe.placement.hecate import WINDOW
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.runtime import cache
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.training import ShardedExperts, load_checkpoint, save_checkpoint
from tests.cluster import Cluster
from tests.training.placed import (
    AUTO,
    DIM,
    EXACT,
    EXPERTS,
    HECATE,
    Model,
    experts_of,
    optimizer_of,
    run,
    tokens,
    train_step,
)

# Costs of a machine on which replicas pay.
COSTS = PlacementCosts(1e-3, 8, 100, 200, 1e6, 1e7)

STEPS = 10
slow = partial(pytest.param, marks=pytest.mark.slow)


def assert_equal_training(plain: list[dict[str, Any]], placed: list[dict[str, Any]]) -> None:
    """Compare losses and dense parameters of each rank, and every expert's parameters and gradients, to 1e-10."""
    close = {"rtol": 1e-10, "atol": 1e-12}
    for ours, theirs in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours["losses"], theirs["losses"], **close)
        torch.testing.assert_close(ours["dense"], theirs["dense"], **close)
    for kind in ("parameters", "gradients"):
        for layer in range(2):
            wanted, found = ({}, {})
            for of, ranks in ((wanted, plain), (found, placed)):
                for rank in ranks:
                    for name, by_number in rank[kind][layer].items():
                        of.update({(name, number): tensor for number, tensor in by_number.items()})
            assert {number for _, number in wanted} == set(range(EXPERTS))
            torch.testing.assert_close(found, wanted, **close)


def count_replicas(placed: list[dict[str, Any]]) -> int:
    """Replicas of all steps and layers."""
    return sum(text.count("+") for step in placed[0]["placements"] for text in step)


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> dict[int, list[dict[str, Any]]]:
    """Expert parallelism."""
    return {world: cluster.run(world, run, "ep", STEPS, {}) for world in (2, 4)}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, HECATE),
        slow(4, HECATE),
        slow(4, HECATE | {"rematerialises": True, "calibrates": True, "costs": COSTS}),
        slow(2, EXACT | HECATE),
        slow(4, EXACT | HECATE),
        slow(4, EXACT | HECATE | {"rematerialises": True, "schedule": Schedule("fsmoe", degrees=(2, 3))}),
        slow(4, EXACT | {"policy": "ep", "memory": EXPERTS}),
        slow(2, AUTO | HECATE),
        slow(4, AUTO | HECATE | {"memory": 1}),
        slow(4, AUTO | HECATE | {"rematerialises": True, "schedule": Schedule("fsmoe", degrees=(2, 3))}),
        slow(4, AUTO | HECATE | {"degrees": (2, 3)}),
        slow(4, HECATE | {"schedule": Schedule("fsmoe", degrees=(2, 3))}),
        slow(2, HECATE | {"degrees": (1, 1)}),
        slow(4, HECATE | {"degrees": (2, 3)}),
        slow(4, EXACT | HECATE | {"degrees": (2, 3)}),
        slow(4, HECATE | {"ranks_per_node": 1, "overlap": EXPERTS, "memory": EXPERTS}),
        slow(4, {"policy": "ep", "calibrates": shadow, "costs": COSTS}),
        slow(4, {"policy": partial(replicate, m=2), "reshard": False, "costs": COSTS}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_sharded_experts_equal_expert_parallelism(cluster: Cluster, plain: Any, world: int, options: dict[str, Any]):
    """Steps with AdamW and clipping, through changing placements and owners; a rank has no tokens in some steps."""
    placed = cluster.run(world, run, "fssdp", STEPS, options)
    assert_equal_training(plain[world], placed)
    for step in range(STEPS):
        for layer in range(2):
            numbers = [number for rank in placed for number in rank["owners"][step][layer]]
            assert sorted(numbers) == list(range(EXPERTS)), "one owner of every expert"
    if "policy" not in options:
        assert count_replicas(placed) > STEPS
        changed = any(rank["owners"][0] != rank["owners"][-1] for rank in placed)
        assert changed == (options["overlap"] < EXPERTS), "where all are copied to all, nobody has to own others"
    assert all(rank["sent"] > 0 for rank in placed)


@pytest.mark.slow
def test_smartmoe_moves_owners(cluster: Cluster, plain: Any):
    cheap = PlacementCosts(1.0, 8, 100, 200, 1e9, 1e9)
    placed = cluster.run(4, run, "fssdp", STEPS, {"policy": swap, "costs": cheap})
    assert_equal_training(plain[4], placed)
    assert count_replicas(placed) == 0 and any(rank["owners"][0] != rank["owners"][-1] for rank in placed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [HECATE, slow({"policy": "ep", "calibrates": shadow, "costs": COSTS}), slow(EXACT | {"policy": "ep"}), slow(AUTO)],
    ids=["predicted", "calibrated", "exact", "auto"],
)
@pytest.mark.parametrize("sizes", [{"ep": 2, "esp": 2}, slow({"ep": 2})], ids=["esp shards", "expert replicas"])
def test_sharded_experts_with_esp_and_replicated_groups(
    cluster: Cluster, sizes: dict[str, int], options: dict[str, Any]
):
    """Experts split over ESP, and over two groups of ranks with the same experts."""
    plain = cluster.run(4, run, "ep", 5, {"sizes": sizes})
    placed = cluster.run(4, run, "fssdp", 5, options | {"sizes": sizes, "ranks_per_node": 1})
    assert count_replicas(placed) > 4 or options is not HECATE
    assert all(rank["sent"] > 0 for rank in placed)
    for ours, theirs in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours["dense"], theirs["dense"], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        slow({"recomputes": True}),
        slow({"recomputes": True, "rematerialises": True}),
        {"parts": 2, "rematerialises": True},
        slow({"parts": 2, "recomputes": True, "rematerialises": True} | EXACT),
        slow({"parts": 2, "recomputes": True} | AUTO),
        slow({"wraps": True}),
    ],
    ids=lambda options: "-".join(options),
)
def test_sharded_experts_in_other_training_loops(cluster: Cluster, options: dict[str, Any]):
    """Activations computed again, gradients accumulated, DistributedDataParallel."""
    plain = cluster.run(2, run, "ep", 8, {key: options[key] for key in ("parts", "wraps") if key in options})
    assert_equal_training(plain, cluster.run(2, run, "fssdp", 8, HECATE | options))


@pytest.mark.slow
def test_capacity_drops_equal_expert_parallelism(cluster: Cluster):
    options = {"capacity_factor": 0.75}
    assert_equal_training(cluster.run(2, run, "ep", 8, options), cluster.run(2, run, "fssdp", 8, HECATE | options))


def resume_and_save(
    rank: int, world: int, path: str, first: int, last: int, wanted: int | None, options: dict[str, Any] = HECATE
) -> dict[str, Any]:
    """Steps `first` to `last`, with new owners if `wanted` steps were saved before; saves at the end."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0) if world > 1 else Topology()
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options)
    if wanted is not None:
        extra = load_checkpoint(path, model, optimizer, topology)
        sharded.load_state_dict(extra)
        assert sharded.iteration == wanted
    # All worlds train on the tokens of two ranks.
    for step in range(first, last):
        optimizer.zero_grad()
        own = [r for r in range(2) if r % world == rank] if world <= 2 else ([rank] if rank < 2 else [])
        x_SM = torch.cat([tokens(r, step + 1) for r in own]) if own else torch.zeros(0, DIM, dtype=torch.float64)
        (model(x_SM).square().sum() / 50).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for name, parameter in model.named_parameters():
            if ".experts." not in name and world > 1:
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    save_checkpoint(path, model, optimizer, topology, extra=sharded.state_dict())
    found = {"parameters": experts_of(model), "owners": [one.owners for one in sharded.placements]}
    state = [
        {name: {key: value.shape for key, value in optimizer.state[p].items()} for name, p in one.named_parameters()}
        for one in (layer.experts for layer in model.layers)
    ]
    sharded.close()
    copies = sum(str(one).count("+") for one in sharded.placements)
    return found | {"state": state, "copies": copies, "sent": sharded.sent_bytes}


@pytest.mark.slow
def test_checkpoint_resumes_on_other_world_sizes(cluster: Cluster):
    """A checkpoint of 2 ranks resumes on 2, 4 and 1, after owners have partly changed, with equal final parameters."""
    with tempfile.TemporaryDirectory() as folder:
        whole = cluster.run(2, resume_and_save, str(Path(folder) / "whole"), 0, 12, None)
        first = cluster.run(2, resume_and_save, str(Path(folder) / "part"), 0, 8, None)
        assert first[0]["owners"] != [one.owners for one in [Placement.even(2, EXPERTS)] * 2], "they had changed"
        wanted: dict[Any, Any] = {}
        for rank in whole:
            for layer, of in enumerate(rank["parameters"]):
                for name, by_number in of.items():
                    wanted |= {(layer, name, number): pair[0] for number, pair in by_number.items()}
        for world in (2, 4, 1):
            path = Path(folder) / f"on {world}"
            (Path(folder) / "part").rename(path)
            again = cluster.run(world, resume_and_save, str(path), 8, 12, 8)
            found: dict[Any, Any] = {}
            for rank in again:
                for layer, of in enumerate(rank["parameters"]):
                    for name, by_number in of.items():
                        assert not found.keys() & {(layer, name, number) for number in by_number}
                        found |= {(layer, name, number): pair[0] for number, pair in by_number.items()}
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
            cluster.run(2, resume_and_save, str(Path(folder) / "part"), 0, 8, None)


@pytest.mark.parametrize(
    ("options", "worlds"),
    [
        (EXACT | HECATE, (4, 2)),
        slow(AUTO | HECATE, (4, 2)),
        slow(AUTO | HECATE, (2, 4, 1)),
        slow(EXACT | HECATE, (2, 4, 2)),
        slow(EXACT | HECATE | {"rematerialises": True}, (4, 2, 4)),
        slow(AUTO | {"policy": "ep", "memory": EXPERTS}, (4, 2, 4)),
        slow(EXACT | {"policy": "ep", "memory": EXPERTS}, (2, 4)),
    ],
)
def test_balanced_training_resumes_on_other_world_sizes(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], worlds: tuple[int, ...]
) -> None:
    """Gates split rows over replicas before and after a checkpoint: results equal one rank throughout."""
    path, steps = str(tmp_path / "checkpoint"), 6
    plain = cluster.run(1, resume_and_save, str(tmp_path / "plain"), 0, steps * len(worlds), None)
    for turn, world in enumerate(worlds):
        before = steps * turn if turn else None
        ranks = cluster.run(world, resume_and_save, path, steps * turn, steps * (turn + 1), before, options)
        assert world == 1 or all(rank["sent"] > 0 for rank in ranks), "copies have been used"
    wanted, found = ({}, {})
    for of, each in ((wanted, plain), (found, ranks)):
        for layers in (rank["parameters"] for rank in each):
            for layer, names in enumerate(layers):
                for name, experts in names.items():
                    of.update({(layer, name, number): pair[0] for number, pair in experts.items()})
    assert len(wanted) == EXPERTS * 6  # w1 and w2 of both, b1 and b2 of one
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def memory_of(rank: int, world: int, rematerialises: bool, m: int) -> tuple[Any, int, int]:
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(
        model, optimizer, topology, overlap=EXPERTS, memory=m, rematerialises=rematerialises, reshard=False
    )
    most = 0
    if rematerialises:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(sharded.memory().replicas))
    seen: list[int] = []
    for step in range(4):
        train_step(model, optimizer, topology, step)
    most = max(seen, default=0)
    found = sharded.memory()
    one_layer = max(layer.placed.table.expert_bytes for layer in model.layers)
    state_shapes = [
        value.shape == p.shape
        for layer in model.layers
        for p in layer.experts.parameters()
        for value in optimizer.state[p].values()
        if value.dim()
    ]
    assert all(state_shapes) and state_shapes
    sharded.close()
    return found, most, one_layer


@pytest.mark.slow
def test_memory_of_parameters_gradients_and_replicas(cluster: Cluster):
    """Parameters, gradients and AdamW's two moments of a rank's owned experts, as with expert parallelism (4 parts);
    plus m replicas of parameters a layer, which the re-materialising mode holds for one layer at a time.
    """
    for m in (1, 2):
        for found, _, _ in cluster.run(2, memory_of, False, m):
            assert found.gradients == found.parameters and found.optimizer - 2 * found.parameters < 200
            # Two layers, each with m more of 4 owned experts.
            assert 0 < found.replicas <= m * found.parameters / 4
        for found, most, expert_bytes in cluster.run(2, memory_of, True, m):
            assert found.replicas <= most <= m * expert_bytes
            assert most <= 0.12 * (found.total - found.replicas), "the paper's re-materialising mode: 11.6% more"
            assert found.gradients == found.parameters


def errors_of_unsupported_layers(rank: int, world: int) -> list[str]:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    told = []

    def layer(gate: Any = None, experts: Any = None, **options: Any) -> MoELayer:
        gate = gate or TopK(4)
        return MoELayer(4, gate, experts or FeedForward(4), topology=topology, placement="fssdp", **options)

    made = layer()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    plain = MoELayer(4, TopK(4), FeedForward(4), topology=topology)
    for attempt in (
        lambda: layer(experts=Custom(lambda model_dim: torch.nn.Linear(model_dim, model_dim))),
        lambda: layer(order=Einsum()),
        lambda: layer(SoftMoE(4, slots=2)),
        lambda: ShardedExperts(made, optimizer, topology, policy="best"),
        lambda: ShardedExperts(made, optimizer, topology, policy=lambda loads, limit: loads.placement),  # type: ignore[arg-type,misc]
        lambda: ShardedExperts(made, optimizer, topology, memory=-1),
        lambda: ShardedExperts(made, optimizer, topology, overlap=1.5),  # type: ignore[arg-type]
        lambda: ShardedExperts(plain, optimizer, topology),
        lambda: ShardedExperts(torch.nn.ModuleList([made, layer(TopK(6))]), optimizer, topology),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        told.append(str(caught.value))
    return told


def test_unsupported_layers_and_options_are_rejected(cluster: Cluster):
    words = (
        "Custom",
        "product",
        "SoftMoE",
        "best",
        "called with (loads)",
        "memory",
        "overlap",
        "placement='fssdp'",
        "different numbers",
    )
    for told in cluster.run(2, errors_of_unsupported_layers):
        for message, word in zip(told, words, strict=True):
            assert word in message, (word, message)
    with pytest.raises(ConfigError, match="placement"):
        MoELayer(4, TopK(4), FeedForward(4), placement="moving")


def errors_in_micro_batches(rank: int, world: int) -> list[str]:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    told = []
    for options in (
        {"policy": "ep", "rematerialises": True},
        {"overlap": 1, "calibrates": True, "costs": COSTS},
        {"policy": "ep", "calibrates": shadow, "costs": COSTS},
        {"costs": COSTS},
    ):
        model = Model(topology, "fssdp", degrees=(2, 2))
        sharded = ShardedExperts(model, optimizer_of(model), topology, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            model(tokens(rank, 0))
        told.append(str(caught.value))
        sharded.close()
    return told


def test_micro_batches_reject_work_between_layers(cluster: Cluster):
    words = ("rematerialises=False", "without calibrates", "without calibrates", r"give ShardedExperts(overlap=")
    for told in cluster.run(2, errors_in_micro_batches):
        for message, word in zip(told, words, strict=True):
            assert word in message, (word, message)


def error_of_incomplete_correction(rank: int, world: int, other: bool) -> str:
    """Without the existing replicas, or with another replica in their place."""
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)

    def copied(placement: Placement, expert: int) -> Placement:
        others = [[] for _ in placement.owners]
        others[expert] = [1 - placement.owners[expert]]
        return Placement(placement.num_ranks, placement.owners, others)

    def corrected(placement: Placement, *_: object) -> Placement:
        if not any(placement.replicas):
            return placement
        return copied(placement, 1) if other else placement.sharding

    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"reshard": False, "costs": COSTS, "overlap": 1, "calibrates": corrected}
    sharded = ShardedExperts(model, optimizer, topology, policy=lambda now: copied(now.placement, 0), **options)
    train_step(model, optimizer, topology, 0)
    with pytest.raises((ConfigError, RankError)) as caught:  # the second, where another rank was first
        train_step(model, optimizer, topology, 1)
    sharded.close()
    return str(caught.value)


@pytest.mark.parametrize("other", [False, True])
def test_calibration_without_existing_replicas_is_rejected(cluster: Cluster, other: bool):
    for message in cluster.run(2, error_of_incomplete_correction, other):
        assert "calibrates made a placement that lacks" in message


def test_one_rank_moves_no_experts():
    model = Model(Topology(), "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, Topology())
    for step in range(2):
        train_step(model, optimizer, Topology(), step)
    assert sharded.placements == () and sharded.memory().total == 0 and sharded.sent_bytes == 0
    sharded.close()


def train_with_new_costs(rank: int, world: int, balance: str) -> tuple[list[Tensor], list[Tensor]]:
    """Losses with links that could send no expert and are measured again as fast ones; losses of a plain run."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    lines = [{"gemm": Line(0.0, 1e-12), "all-to-all/ep": Line(0.0, 1.0 / per_s)} for per_s in (1e-3, 1e12)]
    profiles = iter([SimpleNamespace(costs=CostModel(of)) for of in lines])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cached_profile", lambda *_, **__: (next(profiles), None))
        models = [Model(topology, placement) for placement in ("fssdp", "ep")]
        optimizers = [optimizer_of(model) for model in models]
        sharded = ShardedExperts(models[0], optimizers[0], topology, balance=balance)
        losses: tuple[list[Tensor], list[Tensor]] = [], []

        def steps(first: int, last: int) -> None:
            for step, (model, optimizer, of) in product(
                range(first, last), zip(models, optimizers, losses, strict=True)
            ):
                of.append(train_step(model, optimizer, topology, step))

        steps(0, WINDOW)
        assert sharded.overlap == 0 and sharded.state_dict()["overlap"] == 0
        slow_bytes_s = sharded._planner.costs.inter_bytes_s
        # As `tune_step` does it once steps have drifted; links are the same for products of any dtype.
        cache.measured_costs(topology, torch.device("cpu"), torch.bfloat16, 1.0)
        assert sharded._planner.costs.inter_bytes_s == slow_bytes_s < 1
        steps(WINDOW, WINDOW + 1)
        assert sharded._planner.costs.inter_bytes_s == pytest.approx(1e12) and sharded.state_dict()["overlap"] is None
        steps(WINDOW + 1, 2 * WINDOW)
        assert sharded.overlap > EXPERTS
        steps(2 * WINDOW, 2 * WINDOW + 2)
        sharded.close()
    return losses


@pytest.mark.parametrize("balance", ["predicted", "auto"])
def test_new_costs_take_effect_in_next_step(cluster: Cluster, balance: str):
    for ours, theirs in cluster.run(2, train_with_new_costs, balance):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def error_of_different_options(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    with pytest.raises(RankError) as caught:
        ShardedExperts(model, optimizer_of(model), topology, overlap=4, memory=1 + rank)
    return str(caught.value)


def test_different_options_across_ranks_are_rejected(cluster: Cluster):
    for message in cluster.run(2, error_of_different_options):
        assert "memory is 1 on ranks [0] and 2 on ranks [1]" in message


def error_of_different_decisions(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **HECATE)
    with pytest.raises(RankError) as caught:
        for step in range(6):
            sharded._planner.overlap = 1 + rank  # as if the ranks' arithmetic differed
            train_step(model, optimizer, topology, step)
    sharded.close()
    return str(caught.value)


def test_different_policy_decisions_across_ranks_raise(cluster: Cluster):
    for message in cluster.run(2, error_of_different_decisions):
        assert "different owners" in message or "ended because" in message
