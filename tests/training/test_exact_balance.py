"""Exact balance in training: which rank computes how many rows, in training steps and in evaluation."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from fusedmoe.comm.sparse import SparseCollectives
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.layers.placed_dispatcher import Moving
from fusedmoe.layers.schedule import Schedule
from fusedmoe.placement import LayerLoads, Placement
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.training import ShardedExperts
from tests.cluster import Cluster
from tests.training.placed import AUTO, EXACT, EXPERTS, Model, experts_of, optimizer_of, tokens, train_step

#: Experts travel in no time, so all copies are made that help.
FREE: dict[str, Any] = EXACT | {"costs": replace(EXACT["costs"], expert_bytes=0, token_bytes=0)}


def sent_rows(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Rows that this rank sends to each rank in each forward of the first layer: two steps, three evaluations, and a
    step in two parts; and what evaluation gives."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=2, timeout_s=20.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options)
    placed, found = model.layers[0].placed, []
    split = placed.split

    def recorded(layout: Layout, training: bool) -> Layout:
        by_place = split(layout, training)
        found.append(by_place.counts_E.reshape(world, -1).sum(dim=1).tolist())
        return by_place

    placed.split = recorded
    for step in range(2):
        train_step(model, optimizer, topology, step)
    model.eval()
    with torch.no_grad():
        ys = [model(tokens(rank, step)) for step in (3, 4, 5)]
    model.train()
    train_step(model, optimizer, topology, 6, parts=2)
    assert isinstance(placed, DynamicExperts) and placed.now.extra_W().max() <= options["memory"]
    sharded.close()
    return found, ys


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_busiest_rank_has_the_mean(cluster: Cluster, world: int):
    options = FREE | {"policy": "ep", "memory": EXPERTS}
    exact = cluster.run(world, sent_rows, options)
    plain = cluster.run(world, sent_rows, {"policy": "ep", "memory": 0})
    for (_, ours), (_, theirs) in zip(exact, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    work_FV, before_FV = (np.sum([rows for rows, _ in of], axis=0) for of in (exact, plain))
    mean_F = work_FV.sum(axis=1) / world
    assert (before_FV.sum(axis=1) == work_FV.sum(axis=1)).all()
    # Copies are added in the first forward of each step; evaluation has no copies, and the step's second part those of
    # the first.
    first = [0, 1, 5]
    assert (work_FV[first].max(axis=1) == np.ceil(mean_F[first])).all()
    assert (before_FV[first].max(axis=1) > 1.1 * mean_F[first]).all(), "the router is skewed"
    np.testing.assert_array_equal(work_FV[2:5], before_FV[2:5])
    assert work_FV[6].max() < before_FV[6].max()


#: Copies take longer than rows on their way, and still pay.
SLOW_COPIES: dict[str, Any] = AUTO | {
    "costs": replace(AUTO["costs"], expert_bytes=10**6, inter_bytes_s=1e6, intra_bytes_s=1e6),
    "policy": "ep",
    "memory": 3,
}


class Late:
    """Enters when a sparse all-gather begins in its thread: what it brings is long on its way.

    `begun`: it is not there before that, which experts set; None: nothing is waited for.
    """

    def __init__(self, begun: Event | None) -> None:
        self._begun = begun

    def __enter__(self) -> None:
        time.sleep(0.02)
        assert self._begun is None or self._begun.wait(60.0), "the first chunk's experts have waited for late copies"

    def __exit__(self, *_: object) -> None:
        pass


def late_copies(placed: DynamicExperts) -> int:
    return len(placed.late.rows_W[placed.group.index]) if placed.late else 0


def learned_from_late_copies(
    rank: int, world: int, placement: str, parts: int, shape: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, list[torch.Tensor], list[int], list[int], list[str]]:
    """What experts have learned in four steps, where a copy's row is not a number until the copy is there; what
    evaluation gives; how many late copies this rank had in each layer and step; the first chunk that needed any; and
    the tasks on links, as recorded."""
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
    gather, late, firsts = SparseCollectives.gather, list[int](), list[int]()
    first_late, forward = Moving._first_late, GroupedExperts.forward
    begun, waits = Event(), list[bool]()

    def poisoned(self: Any, transfers: Any, rows: Any, tables: Any, during: Any = None) -> Any:
        for expert, _, target, _ in transfers:
            if target == topology.ep.index:
                for table in tables:
                    table[rows[expert]] = float("nan")
        with during or nullcontext():  # what is recorded ends at once
            pass
        return gather(self, transfers, rows, tables, Late(begun if waits and waits.pop() else None))

    def known(self: Any, exchange: Any, degree: int) -> int:
        firsts.append(first_late(self, exchange, degree))
        begun.clear()
        waits[:] = [firsts[-1] > 0]
        return firsts[-1]

    def begins(self: Any, *given: Any) -> Any:
        begun.set()
        return forward(self, *given)

    recorder = Recorder(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseCollectives, "gather", poisoned)
        patch.setattr(Moving, "_first_late", known)
        patch.setattr(GroupedExperts, "forward", begins)
        if sharded is not None:  # before the step, in which placements change
            layers = [layer.placed for layer in model.layers]
            optimizer.register_step_pre_hook(lambda *_: late.extend(map(late_copies, layers)))
        for step in range(4):
            for layer in model.layers:
                layer.recorder = recorder if step == 3 else None
            train_step(model, optimizer, topology, step, parts)
        model.eval()
        with torch.no_grad():
            y_SM = model(tokens(rank, 9))
    assert not hooked or len(calls) == len(model.layers) * (4 * parts + 1), "one call of the experts in a forward"
    if sharded is not None:
        sharded.close()
    spans = [span for span in recorder.timeline().on("inter") if span.phase == "forward" and span.chunk is not None]
    return experts_of(model), [y_SM], late, firsts, [f"{span.kind} {span.chunk}" for span in spans]


#: Half of the predicted copies are of use; late ones come beside these, or in the place of others.
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
def test_experts_that_are_here_begin_first(
    cluster: Cluster, world: int, parts: int, shape: dict[str, Any], options: dict[str, Any]
):
    placed = cluster.run(world, learned_from_late_copies, "fssdp", parts, shape, options)
    plain = cluster.run(
        world, learned_from_late_copies, "ep", parts, {"hooked": shape.get("hooked"), "esp": shape.get("esp", 1)}, {}
    )
    for (ours, y_SM, *_), (theirs, wanted_SM, *_) in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(y_SM, wanted_SM, rtol=1e-10, atol=1e-12)
    late_LW = np.array([late for _, _, late, _, _ in placed]).T
    assert late_LW.any()
    if world > 2:
        assert (late_LW.any(axis=1) & ~late_LW.all(axis=1)).any(), "late copies on some ranks"
    if "schedule" not in shape or "hooked" in shape:
        return
    # All ranks have the same tasks, late copies behind the dispatches; which chunks need them is each rank's own.
    links = [links for *_, links in placed]
    assert links == links[:1] * world
    late_tasks = [at for at, task in enumerate(links[0]) if task == "sparse-all-gather 1"]
    forward, _ = shape["schedule"].degrees
    for at in late_tasks:
        assert links[0][at - forward : at] == [f"dispatch {chunk}" for chunk in range(forward)]
        assert links[0][at + 1 :][:1] == ["combine 0"]
    first_LW = np.array([firsts for *_, firsts, _ in placed]).T
    assert late_tasks and (first_LW < forward).any() and (first_LW == forward).any()
    if forward > 1 and "dispatch" not in shape:
        assert ((first_LW > 0) & (first_LW < forward)).any(), "the first chunks need none, and later ones do"


def least_asked_for(now: LayerLoads) -> Placement:
    """The worst prediction: each rank has a copy of the expert of others that has had the fewest tokens."""
    holds_EW = now.placement.sharding.holds_EW.copy()
    for rank in range(now.nodes.ranks):
        others = np.flatnonzero(~holds_EW[:, rank])
        holds_EW[others[now.history_IE.sum(axis=0)[others].argsort(kind="stable")[:1]], rank] = True
    return Placement.holding(now.placement.owners, holds_EW)


def learned(
    rank: int, world: int, placement: str, parts: int, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], int, int]:
    """What experts have learned in eight steps, and how many copies came and gave up their places after the gate."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=2, timeout_s=20.0)
    model = Model(topology, placement)
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options) if placement == "fssdp" else None
    came = gone = 0
    for step in range(8):
        if sharded is not None:
            before = [layer.placed.placement.holds_EW for layer in model.layers]
            after = []
            hook = optimizer.register_step_pre_hook(
                lambda *_, after=after: after.extend(layer.placed.now.holds_EW for layer in model.layers)
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
def test_copies_in_the_place_of_useless_ones(cluster: Cluster, world: int, parts: int, options: dict[str, Any]):
    wrong = AUTO | {"policy": least_asked_for, "memory": 1, "reshard": False} | options
    placed = cluster.run(world, learned, "fssdp", parts, wrong)
    plain = cluster.run(world, learned, "ep", parts, {})
    for (ours, came, gone), (theirs, _, _) in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert came >= gone > 0


def test_auto_looks_only_where_it_pays(cluster: Cluster):
    """Rows that cost nothing are left where they are: as without copies."""
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
def test_what_is_refused(options: dict[str, Any]):
    model = Model(Topology(), "fssdp")
    with pytest.raises(ConfigError, match="choose one of predicted, exact, auto, and"):
        ShardedExperts(model, optimizer_of(model), Topology(), **options)
