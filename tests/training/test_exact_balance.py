"""Exact balance in training: each rank's computed rows, in training steps and in evaluation."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.schedule import Schedule
from fusedmoe.placement import LayerLoads, Placement
from fusedmoe.placement.expert_transport import SparseCollectives
from fusedmoe.placement.placed_experts import PlacedExperts
from fusedmoe.training import ShardedExperts
from tests.cluster import Cluster
from tests.training.placed import AUTO, EXACT, EXPERTS, Model, experts_of, optimizer_of, tokens, train_step

#: Sending experts is free, so all useful replicas are made.
FREE: dict[str, Any] = EXACT | {"costs": replace(EXACT["costs"], expert_bytes=0, token_bytes=0)}


def sent_rows(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Rows that this rank sends to each rank in each forward of the first layer (two steps, three evaluations, a step
    in two parts), and the evaluation result.
    """
    topology = Topology.from_sizes(ep=world, ranks_per_node=2, timeout_s=20.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options)
    placed, found = model.layers[0].placed, []
    split_rows = placed.split_rows

    def recorded(layout: Layout, training: bool) -> Layout:
        by_slot = split_rows(layout, training)
        found.append(by_slot.counts_E.reshape(world, -1).sum(dim=1).tolist())
        return by_slot

    placed.split_rows = recorded
    for step in range(2):
        train_step(model, optimizer, topology, step)
    model.eval()
    with torch.no_grad():
        ys = [model(tokens(rank, step)) for step in (3, 4, 5)]
    model.train()
    train_step(model, optimizer, topology, 6, parts=2)
    assert isinstance(placed, PlacedExperts) and placed.table.current.extra_W().max() <= options["memory"]
    sharded.close()
    return found, ys


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exact_balance_equalizes_rows_per_rank(cluster: Cluster, world: int):
    options = FREE | {"policy": "ep", "memory": EXPERTS}
    exact = cluster.run(world, sent_rows, options)
    plain = cluster.run(world, sent_rows, {"policy": "ep", "memory": 0})
    for (_, ours), (_, theirs) in zip(exact, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    work_FV, before_FV = (np.sum([rows for rows, _ in of], axis=0) for of in (exact, plain))
    mean_F = work_FV.sum(axis=1) / world
    assert (before_FV.sum(axis=1) == work_FV.sum(axis=1)).all()
    # Replicas are added in the first forward of each step; evaluation has none, and the step's second part has the same
    # replicas as the first.
    first = [0, 1, 5]
    assert (work_FV[first].max(axis=1) == np.ceil(mean_F[first])).all()
    assert (before_FV[first].max(axis=1) > 1.1 * mean_F[first]).all(), "the router is skewed"
    np.testing.assert_array_equal(work_FV[2:5], before_FV[2:5])
    assert work_FV[6].max() < before_FV[6].max()


#: Replicas take longer than rows to send, and still pay.
SLOW_COPIES: dict[str, Any] = AUTO | {
    "costs": replace(AUTO["costs"], expert_bytes=10**6, inter_bytes_s=1e6, intra_bytes_s=1e6),
    "policy": "ep",
    "memory": 3,
}


class Slow:
    """Enters when a sparse all-gather begins in its thread: its replicas arrive late."""

    def __enter__(self) -> None:
        time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        pass


def train_with_slow_replicas(
    rank: int, world: int, placement: str, parts: int, shape: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, torch.Tensor, int]:
    """Train four steps in which a replica's row is NaN until the replica has arrived.

    Return the trained experts, the result of evaluation, and the number of replicas added after the gate.
    """
    shape = dict(shape)
    esp, hooked = shape.get("esp", 1), shape.pop("hooked", False)
    topology = Topology.from_sizes(
        ep=world // esp, esp=esp, ranks_per_node=shape.get("ranks_per_node", esp), timeout_s=100.0
    )
    model = Model(topology, placement, **shape)
    calls: list[int] = []
    for layer in model.layers if hooked else ():
        layer.experts.register_forward_hook(lambda _, __, y: (calls.append(1), y * 2)[1])
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **SLOW_COPIES | options) if placement == "fssdp" else None
    gather, added = SparseCollectives.gather, list[int]()

    def poisoned(self: Any, transfers: Any, rows: Any, tables: Any, recording: Any = None) -> Any:
        for expert, _, target, _ in transfers:
            if target == topology.ep.index:
                for table in tables:
                    table[rows[expert]] = float("nan")
        return gather(self, transfers, rows, tables, Slow())

    def count(*_: Any) -> None:
        tables = [layer.placed.table for layer in model.layers]
        added.append(sum(int((of.current.holds_EW & ~of.placement.holds_EW).sum()) for of in tables))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseCollectives, "gather", poisoned)
        if sharded is not None:  # before the step, in which placements change
            optimizer.register_step_pre_hook(count)
        for step in range(4):
            train_step(model, optimizer, topology, step, parts)
        model.eval()
        with torch.no_grad():
            y_SM = model(tokens(rank, 9))
    assert not hooked or len(calls) == len(model.layers) * (4 * parts + 1), "one call of the experts in a forward"
    if sharded is not None:
        sharded.close()
    return experts_of(model), y_SM, sum(added)


#: Half of the predicted replicas are useful; new replicas are added to them, or replace the rest.
PREDICTED: dict[str, Any] = {"policy": "hecate", "overlap": 2, "memory": 2}


def chunks(forward: int, backward: int) -> dict[str, Any]:
    return {"schedule": Schedule("fsmoe", degrees=(forward, backward))}


@pytest.mark.parametrize(
    ("world", "parts", "shape", "options"),
    [
        (2, 2, {}, {}),
        (4, 1, chunks(2, 2), {}),
        (2, 1, chunks(2, 2) | {"hooked": True}, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 1, {"recomputes": True}, {}),
                (2, 2, {}, PREDICTED | {"rematerialises": True}),
                (4, 2, {"recomputes": True}, {}),
                (4, 1, {}, {}),
                (4, 2, chunks(2, 3), PREDICTED | {"rematerialises": True}),
                (4, 2, chunks(1, 3), {}),
                (4, 2, chunks(4, 2), PREDICTED),
                (4, 1, chunks(4, 2) | {"recomputes": True}, {}),
                (4, 1, chunks(2, 2), {"balance": "exact"}),
                (4, 1, chunks(2, 2) | {"ranks_per_node": 2, "dispatch": "2dh"}, {}),
                (4, 1, chunks(2, 2) | {"esp": 2}, {}),
                (2, 2, chunks(1, 1) | {"recomputes": True}, {}),
            )
        ),
    ],
    ids=str,
)
def test_experts_wait_for_late_replicas(
    cluster: Cluster, world: int, parts: int, shape: dict[str, Any], options: dict[str, Any]
):
    placed = cluster.run(world, train_with_slow_replicas, "fssdp", parts, shape, options)
    alike = {"hooked": shape.get("hooked"), "esp": shape.get("esp", 1)}
    plain = cluster.run(world, train_with_slow_replicas, "ep", parts, alike, {})
    for (ours, y_SM, added), (theirs, wanted_SM, _) in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(y_SM, wanted_SM, rtol=1e-10, atol=1e-12)
        assert added > 0


def worst_prediction(now: LayerLoads) -> Placement:
    """The worst prediction: each rank has a replica of the remote expert with the fewest tokens."""
    holds_EW = now.placement.sharding.holds_EW.copy()
    for rank in range(now.node_layout.num_ranks):
        others = np.flatnonzero(~holds_EW[:, rank])
        holds_EW[others[now.history_IE.sum(axis=0)[others].argsort(kind="stable")[:1]], rank] = True
    return Placement.holding(now.placement.owners, holds_EW)


def train_and_count_replicas(
    rank: int, world: int, placement: str, parts: int, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], int, int]:
    """Return experts after eight steps, and the numbers of replicas added and replaced after the gate."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=2, timeout_s=20.0)
    model = Model(topology, placement)
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options) if placement == "fssdp" else None
    came = gone = 0
    for step in range(8):
        if sharded is not None:
            before = [layer.placed.table.placement.holds_EW for layer in model.layers]
            after = []
            hook = optimizer.register_step_pre_hook(
                lambda *_, after=after: after.extend(layer.placed.table.current.holds_EW for layer in model.layers)
            )
        train_step(model, optimizer, topology, step, parts)
        if sharded is not None:
            hook.remove()
            came += sum(int((new & ~old).sum()) for old, new in zip(before, after, strict=True))
            gone += sum(int((old & ~new).sum()) for old, new in zip(before, after, strict=True))
    if sharded is not None:
        sharded.close()
    return experts_of(model), came, gone


@pytest.mark.parametrize(
    ("world", "parts", "options"),
    [
        (2, 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, 1, {}), (4, 2, {}), (4, 1, {"rematerialises": True}), (2, 2, {"rematerialises": True}))
        ),
    ],
)
def test_underused_replicas_are_replaced(cluster: Cluster, world: int, parts: int, options: dict[str, Any]):
    wrong = AUTO | {"policy": worst_prediction, "memory": 1, "reshard": False} | options
    placed = cluster.run(world, train_and_count_replicas, "fssdp", parts, wrong)
    plain = cluster.run(world, train_and_count_replicas, "ep", parts, {})
    for (ours, came, gone), (theirs, _, _) in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert came >= gone > 0


def test_auto_balance_skips_free_rows(cluster: Cluster):
    """Free rows are not moved: the result equals a run without replicas."""
    idle = AUTO | {"policy": "ep", "memory": 2, "costs": replace(AUTO["costs"], token_s=1e-12, token_bytes=0)}
    found = cluster.run(2, sent_rows, idle)
    plain = cluster.run(2, sent_rows, {"policy": "ep", "memory": 0})
    assert [rows for rows, _ in found] == [rows for rows, _ in plain]
    busy = cluster.run(2, sent_rows, AUTO | {"policy": "ep", "memory": EXPERTS})
    assert [rows for rows, _ in busy] != [rows for rows, _ in plain]


@pytest.mark.parametrize(
    "options",
    [{"balance": "even"}, EXACT | {"calibrates": True}, AUTO | {"calibrates": True}],
    ids=lambda options: "-".join(options),
)
def test_invalid_balance_options_are_rejected(options: dict[str, Any]):
    model = Model(Topology(), "fssdp")
    with pytest.raises(ConfigError, match="choose one of predicted, exact, auto, and"):
        ShardedExperts(model, optimizer_of(model), Topology(), **options)
