"""Ranks measure a graph's operators together, agree on a plan, and cache it."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from fusedmoe.comm.topology import group_of
from fusedmoe.errors import RankError
from fusedmoe.graph import GraphBackend, operator_costs
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.runtime.cache import CACHE, write_or_warn
from tests.cluster import Cluster
from tests.graph.models import AllToAll, Model, Steady, largest_difference, train

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def measure_and_plan(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """Run jobs on a rank with its own cache and invented durations, where ranks start to measure only together.

    Returns: for each job the operators this rank measured and its reports; the costs cached at the end.
    """
    asked: list[str] = []

    def measure(target: Any, args: Any, kwargs: Any) -> float:
        key = operator_costs.operator_key(target, args, kwargs)
        if not asked:  # a rank that measures alone would wait forever
            dist.barrier()
        asked.append(key)
        return synthetic_duration_s(key, rank)

    jobs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, f"{folder}/{rank}")
        patch.setattr(operator_costs, "measure_operator", measure)
        for forget in (None, 1, 0):  # the rank whose cache is lost
            dist.barrier()
            if rank == forget:
                shutil.rmtree(f"{folder}/{rank}")
            asked.clear()
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Model(1, 1).double()
            backend = GraphBackend(chunks=2, groups=1)
            train(model, torch.compile(model, backend=backend, fullgraph=True), rank, steps=1)
            jobs.append((list(asked), [(one.cached, one.seconds, one.order) for one in backend.reports]))
            (kept,) = Path(folder, "0").glob("operators-*")
            if rank == 1:  # the cache of a non-leading rank is not used
                write_or_warn(Path(folder, "1", kept.name), json.dumps(dict.fromkeys(jobs[0][0], 1e9)), "what is wrong")
    return jobs, operator_costs.load_numbers(kept)


def synthetic_duration_s(key: str, rank: int) -> float:
    """Invented durations in which the slowest rank varies by operator."""
    return 1e-4 * (1 + zlib.crc32(f"{rank} {key}".encode()) % 100)


@pytest.mark.slow
def test_ranks_agree_on_slowest_durations_and_plan(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks agree on the slowest rank's durations and on a plan, also if only some ranks have cached measurements."""
    (first, kept), (second, _) = cluster.run(2, measure_and_plan, str(tmp_path))
    for (asked, reports), (others, other_reports), cached in zip(first, second, (False, True, False), strict=True):
        assert [seconds for _, seconds, _ in reports] == [seconds for _, seconds, _ in other_reports]
        assert [order for _, _, order in reports] == [order for _, _, order in other_reports]
        assert [known for known, _, _ in reports] == [cached] * 2
        assert asked == others and len(set(asked)) == len(asked) and bool(asked) != cached
    slowest = {key: max(synthetic_duration_s(key, 0), synthetic_duration_s(key, 1)) for key in first[2][0]}
    assert kept == slowest
    assert any(seconds != synthetic_duration_s(key, 0) for key, seconds in slowest.items())


@pytest.mark.slow
@pytest.mark.parametrize("own_places", [pytest.param(False, marks=pytest.mark.slow), True])
def test_second_job_loads_cached_costs_and_plans(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_places: bool
) -> None:
    """The default backend measures once: the second job loads costs and plans, and gives the same results."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    orders = []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model(1, 1).double()
        plain = copy.deepcopy(model)
        backend = GraphBackend(chunks=2, groups=1, own_places=own_places)
        ours = train(model, torch.compile(model, backend=backend), 0, steps=1)
        assert largest_difference(ours, train(plain, plain, 0, steps=1)) < 1e-10
        assert [report.cached for report in backend.reports] == [cached, cached]
        assert all(one.seconds > 0 for report in backend.reports for one in report.collectives)
        orders.append([report.order for report in backend.reports])
    assert orders[0] == orders[1]
    assert sorted({path.name.rpartition("-")[0] for path in tmp_path.iterdir()}) == ["all-to-all", "graph", "operators"]
    for path in tmp_path.glob("graph-*"):
        path.write_text("{")  # an invalid plan is replaced
    torch._dynamo.reset()
    backend = GraphBackend(chunks=2, groups=1, own_places=own_places)
    train(model, torch.compile(model, backend=backend), 0, steps=1)
    assert not any(report.cached for report in backend.reports)


def test_all_to_alls_are_measured_without_python_dispatch(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python's dispatcher enabled, about one in a thousand all-to-alls would hang."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    key, send, seen = torch._C.DispatchKey.PythonDispatcher, dist.all_to_all_single, []

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
        return send(*args, **options)

    monkeypatch.setattr(dist, "all_to_all_single", spy)
    torch.compile(AllToAll(), backend=GraphBackend(), fullgraph=True)(torch.randn(4, 2))
    assert seen and not any(seen)


def capture_different_graph(rank: int, world: int) -> str:
    """Rank 1 traces a different path through the model."""
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)

    def call(x_SM: Tensor) -> Tensor:
        y_SM = all_to_all_single(layer(x_SM), None, None, dist.group.WORLD)
        return y_SM.relu() if rank else y_SM

    with pytest.raises(Exception) as caught:
        torch.compile(call, backend=GraphBackend(costs=Steady(), timeout_s=30))(torch.randn(4, 8))
    return str(caught.value)


def broadcast_on_ranks(rank: int, world: int) -> list[str]:
    graph_ranks = GraphRanks([dist.group.WORLD], 20.0)
    return [*graph_ranks.all_gather(f"rank {rank}"), graph_ranks.broadcast_decision(lambda: f"as rank {rank} says")]


def fail_in_decision(rank: int, world: int) -> str:
    with pytest.raises((RankError, ZeroDivisionError)) as caught:
        GraphRanks([dist.group.WORLD], 60.0).broadcast_decision(lambda: str(1 // 0))
    return f"{caught.type.__name__}: {caught.value}"


def plan_alone(rank: int, world: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(RankError) as caught:
        GraphRanks([dist.group.WORLD], 1.0).require_same("a graph")
    return str(caught.value)


def measure_alone(rank: int, world: int) -> str:
    told = dist.PrefixStore("a test", dist.distributed_c10d._get_default_store())
    if rank == 1:
        told.wait(["told"], timedelta(seconds=60))  # its connections stay
        return ""
    group = group_of(dist.group.WORLD, "captured graph's", 1.0)
    with pytest.raises(RankError) as caught:
        operator_costs.measure_all_to_alls(group, torch.device("cpu"), [1024])
    told.set("told", "")
    return str(caught.value)


@pytest.mark.slow
def test_rank_missing_from_measurement_is_named(cluster: Cluster) -> None:
    text, _ = cluster.run(2, measure_alone)
    assert "rank 1 did not join measuring all-to-alls" in text and "within 1 s" in text and "GraphBackend" in text


@pytest.mark.slow
def test_different_graphs_and_planning_failures_name_rank(cluster: Cluster) -> None:
    for text in cluster.run(2, capture_different_graph):
        assert "ranks [1] captured a different graph than rank 0" in text
    assert cluster.run(2, broadcast_on_ranks) == [["rank 0", "rank 1", "as rank 0 says"]] * 2
    first, second = cluster.run(2, fail_in_decision)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith("RankError: rank 1: planning a captured graph ended because rank 0 failed")
    text, _ = cluster.run(2, plan_alone)
    assert "because rank 1 did not join planning" in text and "must compile the same graphs in the same order" in text
