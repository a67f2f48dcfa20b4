"""Physical experts and row splits for other dispatchers: counted in plain loops, and exact search of small cases."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import fusedmoe
from fusedmoe.errors import ConfigError
from fusedmoe.placement import ExpertMap, Placement, balance_experts
from tests.cluster import Cluster


def draw_case(seed: int, largest: tuple[int, int] = (8, 20)) -> tuple[np.ndarray, Placement, int, int]:
    """Draw counts [W, E], owners, ranks per node and replicas per rank; some ranks and experts have no rows."""
    rng = np.random.default_rng(seed)
    ranks, experts = (int(rng.integers(1, most + 1)) for most in largest)
    popularity = rng.permutation(np.arange(1.0, experts + 1) ** -rng.choice([0.0, 0.7, 1.5, 4.0]))
    counts_WE = rng.poisson(popularity * rng.choice([0.3, 5.0, 200.0]), (ranks, experts))
    counts_WE[rng.random(ranks) < 0.1] = 0
    counts_WE[:, rng.random(experts) < 0.1] = 0
    owners = tuple(rng.integers(0, ranks, experts)) if rng.random() < 0.5 else Placement.even(ranks, experts).owners
    per_node = int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0]))
    return counts_WE, Placement(ranks, owners), per_node, int(rng.integers(0, 4))


def check_map(found: ExpertMap, counts_WE: np.ndarray, placement: Placement, replicas: int) -> None:
    """Count rows in plain loops, from the tokens' choices alone."""
    ranks, experts = counts_WE.shape
    slots, logical_P = found.slots, found.physical_to_logical_P.tolist()
    assert len(logical_P) == ranks * slots
    for rank in range(ranks):
        held = [one for one in logical_P[rank * slots : (rank + 1) * slots] if one >= 0]
        owned = [expert for expert in range(experts) if placement.owners[expert] == rank]
        assert held[: len(owned)] == owned and len(set(held)) == len(held) <= len(owned) + replicas
    for expert, physical in enumerate(found.logical_to_physical_EC.tolist()):
        of = [p for p in physical if p >= 0]
        assert of == [p for p, logical in enumerate(logical_P) if logical == expert]
        assert physical == of + [-1] * (len(physical) - len(of)) and found.copies_E[expert] == len(of)
    load_P, received_WV = np.zeros(ranks * slots, int), np.zeros((ranks, ranks), int)
    for rank, counts_E in enumerate(counts_WE):
        rng = np.random.default_rng(rank)
        expert_N = rng.permutation(np.append(np.repeat(np.arange(experts), counts_E), [-1, -1]))
        physical_N = found.assign(torch.tensor(expert_N), rank)
        for expert, physical in zip(expert_N.tolist(), physical_N.tolist(), strict=True):
            assert physical == -1 if expert < 0 else logical_P[physical] == expert
            if physical >= 0:
                load_P[physical] += 1
                received_WV[rank, physical // slots] += 1
        assert found.row_splits_EC(rank).sum(1).tolist() == counts_E.tolist()
    assert found.load_P.tolist() == load_P.tolist()
    for rank in range(ranks):
        assert found.all_to_all_splits(rank) == (received_WV[rank].tolist(), received_WV[:, rank].tolist())
    busiest = load_P.reshape(ranks, slots).sum(1).max()
    mean = -(-int(counts_WE.sum()) // ranks)
    if replicas:
        most_owned = max(np.bincount(placement.owners, minlength=ranks))
        assert busiest <= (1 + most_owned / replicas) * mean


def least_busiest(counts_E: np.ndarray, placement: Placement, replicas: int) -> int:
    """Try every placement of at most `replicas` per rank; by Hall's theorem, over all sets of ranks."""
    ranks, experts = placement.num_ranks, range(placement.experts)
    per_rank = [
        [set(new) for n in range(replicas + 1) for new in itertools.combinations(experts, n)] for _ in range(ranks)
    ]
    sets = [set(of) for n in range(1, ranks + 1) for of in itertools.combinations(range(ranks), n)]
    best = int(counts_E.sum())
    for new in itertools.product(*per_rank):
        holders = [{placement.owners[e], *(rank for rank in range(ranks) if e in new[rank])} for e in experts]
        worst = max(-(-sum(int(counts_E[e]) for e in experts if holders[e] <= of) // len(of)) for of in sets)
        best = min(best, worst)
    return best


def check_cases(seeds: range) -> None:
    for seed in seeds:
        counts_WE, placement, per_node, replicas = draw_case(seed)
        given: dict[str, Any] = {"replicas": replicas, "ranks_per_node": per_node}
        quick = balance_experts(counts_WE, placement, **given)
        exact = balance_experts(torch.tensor(counts_WE), placement, **given, exact=True)
        for found in (quick, exact):
            check_map(found, counts_WE, placement, replicas)


def check_small_cases(seeds: range) -> None:
    for seed in seeds:
        counts_WE, placement, per_node, replicas = draw_case(seed, (3, 4))
        replicas = min(replicas, 1)
        least = least_busiest(counts_WE.sum(0), placement, replicas)
        most_owned = max(np.bincount(placement.owners, minlength=placement.num_ranks))
        for exact in (False, True):
            found = balance_experts(counts_WE, placement, replicas=replicas, ranks_per_node=per_node, exact=exact)
            assert least <= found.balance.max_rank_rows <= (1 + most_owned / max(replicas, 1)) * least


def test_random_maps_equal_counts_in_loops() -> None:
    check_cases(range(60))


def test_small_maps_are_near_exact_search() -> None:
    check_small_cases(range(60))


@pytest.mark.slow
def test_many_random_maps_equal_counts_in_loops() -> None:
    check_cases(range(60, 1360))


@pytest.mark.slow
def test_many_small_maps_are_near_exact_search() -> None:
    check_small_cases(range(60, 1360))


def test_existing_replicas_stay_and_are_used() -> None:
    placement = Placement(2, (0, 0, 1, 1), ((1,), (), (), ()))
    found = balance_experts([[8, 0, 0, 0], [8, 0, 0, 0]], placement, replicas=1)
    assert found.balance.placement == placement and found.load_P.tolist() == [8, 0, 0, 0, 0, 8]
    assert found.logical_to_physical_EC.tolist() == [[0, 5], [1, -1], [3, -1], [4, -1]]


def test_small_expert_numbers_do_not_overflow() -> None:
    found = balance_experts(np.ones((64, 127), int), replicas=4)
    expert_N = torch.arange(127, dtype=torch.int8)
    physical_N = found.assign(expert_N, 63)
    assert found.physical_to_logical_P[physical_N].equal(expert_N.long())
    for rank in (-1, 64):
        with pytest.raises(ConfigError, match=f"rank {rank} is not one of 0 to 63"):
            found.assign(expert_N, rank)


def test_choices_of_experts_that_are_not_counted_raise() -> None:
    found = balance_experts(np.ones((2, 4), int), replicas=1)
    with pytest.raises(ConfigError, match="expert 4 in expert_SK is not one of 0 to 3"):
        found.assign(torch.tensor([[0, 4], [-1, 3]]), 0)


def test_without_rows() -> None:
    found = balance_experts(np.zeros((3, 2), int), replicas=2)
    assert found.load_P.sum() == 0 and found.assign(torch.empty(0, 2, dtype=torch.int32), 1).shape == (0, 2)


@pytest.mark.parametrize(
    ("counts", "settings", "message"),
    [
        ([1, 2], {"replicas": 1}, r"counts of shape \[2\]; give \[ranks, experts\]"),
        ([[1, 2]], {"replicas": 1.5}, "replicas = 1.5 must be an integer"),
        ([[1, -2]], {"replicas": 1}, "tokens are counted in integers of 0 or more"),
        ([[1, 2]], {"replicas": -1}, "must be 0 or more"),
        ([[1, 2]] * 3, {"replicas": 1, "ranks_per_node": 2}, "3 ranks cannot stand in nodes of 2"),
        ([[1, 2]], {"replicas": 1, "placement": Placement(2, (0, 1))}, "ranks"),
    ],
)
def test_invalid_arguments_raise(counts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance_experts(counts, **settings)


def train_by_plain_all_to_all(rank: int, world: int) -> None:
    """Dispatch by physical experts with `all_to_all_single`: every row is computed by its expert's parameters."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    group, experts, width = topology.ep.handle, 6, 3
    expert_SK = torch.zeros(40 + 5 * rank, 2, dtype=torch.int64)
    expert_SK[:, 1] = torch.arange(len(expert_SK)) % experts
    x_SM = torch.randn(len(expert_SK), width, dtype=torch.float64)
    counts_E = expert_SK.flatten().bincount(minlength=experts)
    counts_WE = [torch.empty_like(counts_E) for _ in range(world)]
    torch.distributed.all_gather(counts_WE, counts_E, group=group)
    found = balance_experts(torch.stack(counts_WE), replicas=2)
    assert found.balance.max_rank_rows == -(-int(sum(counts_WE).sum()) // world)
    physical_N, order_N = found.assign(expert_SK, rank).flatten().sort(stable=True)
    sent_sizes, received_sizes = found.all_to_all_splits(rank)
    rows = torch.empty(sum(received_sizes), width, dtype=torch.float64)
    physical_R = torch.empty(sum(received_sizes), dtype=torch.int64)
    for received, sent in ((rows, x_SM[order_N // 2]), (physical_R, physical_N)):
        torch.distributed.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    assert (physical_R // found.slots == rank).all()
    rows = rows * (1 + found.physical_to_logical_P[physical_R])[:, None]
    back = torch.empty(len(order_N), width, dtype=torch.float64)
    torch.distributed.all_to_all_single(back, rows, sent_sizes, received_sizes, group=group)
    y_NM = torch.empty_like(back)
    y_NM[order_N] = back
    wanted = x_SM[:, None] * (1 + expert_SK)[..., None]
    assert torch.equal(y_NM.view(-1, 2, width), wanted)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_plain_all_to_all_computes_rows_by_their_expert(cluster: Cluster, world: int) -> None:
    cluster.run(world, train_by_plain_all_to_all)
