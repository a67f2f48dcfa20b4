"""Optimal replicas by integer and linear programming, for the time of a layer and for its busiest rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from fusedmoe.placement.balance import cheapest_balance
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import (
    EXCHANGES,
    PlacementCosts,
    exposed_s,
    gather_transfers,
    layer_s,
    split_tokens,
    transfers_s,
)
from fusedmoe.schedule.policies.lancet_plans import solve_integer_program


def best_placement(
    sharding: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, t: int, m: int, costs: PlacementCosts
) -> Placement:
    """Return the placement with the least `layer_s`, with at most `t` experts sent, at most `m` to a rank."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    counts = [
        [[] for _ in range(node_layout.num_ranks)] for _ in range(5)
    ]  # work; bytes sent and received on both kinds of links
    inside = (
        np.arange(node_layout.num_ranks)[:, None] // node_layout.per_node
        == np.arange(node_layout.num_ranks) // node_layout.per_node
    )
    extra: list[list] = [[] for _ in range(node_layout.num_ranks)]
    travels, patterns = [], {}
    for expert, owner in enumerate(sharding.owners):
        others = [rank for rank in range(node_layout.num_ranks) if rank != owner]
        sets = list(chain.from_iterable(combinations(others, size) for size in range(node_layout.num_ranks)))
        chosen = [model.new_bool_var("") for _ in sets]
        model.add_exactly_one(chosen)
        travels += chosen[1:]  # the first is the empty one
        for ranks, variable in zip(sets, chosen, strict=True):
            patterns[expert, ranks] = variable
            alone = Placement(node_layout.num_ranks, (owner,), (ranks,))
            flow = split_tokens(tokens_WE[:, [expert]], alone, node_layout)[:, 0]
            inter, intra = np.where(inside, 0, flow), np.where(inside, flow, 0)
            np.fill_diagonal(intra, 0)
            of = (flow.sum(0), inter.sum(0), inter.sum(1), intra.sum(0), intra.sum(1))
            for count, tokens_W in zip(counts, of, strict=True):
                for rank, tokens in enumerate(tokens_W.tolist()):
                    count[rank].append(tokens * variable)
            for rank in ranks:
                extra[rank].append(variable)
    most = int(tokens_WE.sum())
    busiest, exchange = model.new_int_var(0, most, ""), model.new_int_var(0, 10**12, "")
    # In thousandths of a token's compute time.
    link = [1000 * EXCHANGES * costs.token_bytes / speed / costs.token_s for speed in _speeds(costs)]
    for rank in range(node_layout.num_ranks):
        model.add(sum(counts[0][rank]) <= busiest)
        for count, each in zip(counts[1:], link, strict=True):
            model.add(round(each) * sum(count[rank]) <= exchange)
        model.add(sum(extra[rank]) <= m)
    model.add(sum(travels) <= t)
    model.minimize(1000 * busiest + exchange)
    solver = solve_integer_program(model, limit=20.0)
    assert solver is not None and solver.best_objective_bound >= solver.objective_value - 0.5, "not proven to be best"
    found = {expert: ranks for (expert, ranks), variable in patterns.items() if solver.boolean_value(variable)}
    return Placement(node_layout.num_ranks, sharding.owners, tuple(found[expert] for expert in range(sharding.experts)))


def _speeds(costs: PlacementCosts) -> tuple[float, ...]:
    return costs.inter_bytes_s, costs.inter_bytes_s, costs.intra_bytes_s, costs.intra_bytes_s


def least_busiest(sharding: Placement, load_E: NDArray[np.int64], m: int) -> int:
    """Return the minimum number of rows of the busiest rank with at most `m` replicas per rank."""
    return _shared(sharding, load_E, m, None)


def fewest_copies(sharding: Placement, load_E: NDArray[np.int64], m: int, most: int) -> int:
    """Return the minimum number of replicas with which no rank computes more than `most` rows."""
    return _shared(sharding, load_E, m, most)


def _shared(sharding: Placement, load_E: NDArray[np.int64], m: int, most: int | None) -> int:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    ranks, copies = range(sharding.num_ranks), []
    computed = [[model.new_int_var(0, load, "") for _ in ranks] for load in load_E.tolist()]
    for of, load, owner in zip(computed, load_E.tolist(), sharding.owners, strict=True):
        model.add(sum(of) == load)
        held = [model.new_bool_var("") if rank != owner else 0 for rank in ranks]
        copies.append(held)
        for rank in set(ranks) - {owner}:
            model.add(of[rank] <= load * held[rank])
    busiest = model.new_int_var(0, int(load_E.sum()) if most is None else most, "")
    for rank in ranks:
        model.add(sum(held[rank] for held in copies) <= m)
        model.add(sum(of[rank] for of in computed) <= busiest)
    model.minimize(busiest if most is None else sum(map(sum, copies)))
    solver = solve_integer_program(model, limit=20.0)
    assert solver is not None and solver.best_objective_bound >= solver.objective_value - 0.5, "not proven to be best"
    return round(solver.objective_value)


def least_layer_s(
    sharding: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, m: int, costs: PlacementCosts
) -> float:
    """Return the minimum time of a layer and its exposed replicas (`layer_s`, `exposed_s`), with `m` replicas per rank.

    Over all placements and all, even fractional, distributions of rows over replicas, by linear programming.
    """
    placements = [
        (transfers_s(gather_transfers(sharding, one, node_layout), node_layout, costs, costs.expert_bytes), one)
        for one in _with_room(sharding, m)
    ]
    mean_s, least_s = float(tokens_WE.sum()) / node_layout.num_ranks * costs.token_s, np.inf
    for there_s, placement in sorted(placements, key=lambda one: one[0]):
        # Sending gradients is not hidden here; longer transfers of replicas cannot be optimal.
        if there_s and mean_s + there_s >= least_s:
            break
        least_s = min(least_s, _shared_s(placement, tokens_WE, node_layout, costs, there_s))
    return least_s


def _with_room(sharding: Placement, m: int) -> Iterator[Placement]:
    others = [[e for e, owner in enumerate(sharding.owners) if owner != rank] for rank in range(sharding.num_ranks)]
    sets = ([of for size in range(m + 1) for of in combinations(one, size)] for one in others)
    for of_ranks in product(*sets):
        holds_EW = sharding.holds_EW.copy()
        for rank, experts in enumerate(of_ranks):
            holds_EW[list(experts), rank] = True
        yield Placement.holding(sharding.owners, holds_EW)


def _shared_s(
    placement: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, costs: PlacementCosts, there_s: float
) -> float:
    """Return `least_layer_s` of one placement, whose replicas take `there_s` to send."""
    ranks, experts = tokens_WE.shape
    ways = [way for way in np.ndindex(ranks, experts, ranks) if placement.holds_EW[way[1], way[2]]]
    # Variables: rows by path; seconds of the busiest rank, and of one all-to-all.
    busiest, exchange = len(ways), len(ways) + 1
    compute_WX, links_LX = np.zeros((ranks, exchange + 1)), np.zeros((4 * ranks, exchange + 1))
    sum_NX = np.zeros((ranks * experts, exchange + 1))
    compute_WX[:, busiest], links_LX[:, exchange] = -1, -1
    for place, (rank, expert, at) in enumerate(ways):
        sum_NX[rank * experts + expert, place] = 1
        compute_WX[at, place] = costs.token_s
        if rank != at:
            inside = node_layout.of(rank) == node_layout.of(at)
            each_s = costs.token_bytes / (costs.intra_bytes_s if inside else costs.inter_bytes_s)
            for of, end in enumerate((rank, at)):
                links_LX[(2 * inside + of) * ranks + end, place] = each_s
    price_X = np.zeros(exchange + 1)
    price_X[[busiest, exchange]] = 1, EXCHANGES
    rows_NX, bound_N = np.vstack([compute_WX, links_LX]), np.zeros(5 * ranks)
    found = linprog(price_X, rows_NX, bound_N, sum_NX, tokens_WE.reshape(-1), method="highs")
    return float(found.fun) + 2 * there_s if found.status == 0 else np.inf


def price_gap(seed: int) -> float:
    """Return the relative excess of `cheapest_balance` over `least_layer_s` for a synthetic layer.

    Four ranks on two nodes with memory for one replica each; costs of links and replicas range from far below to far
    above those of the experts.
    """
    rng, node_layout, experts = np.random.default_rng(seed), NodeLayout(4, 2), 4
    skewed_E = np.exp(rng.uniform(0.3, 2.0) * rng.standard_normal(experts))
    asked_WE = skewed_E * np.exp(0.3 * rng.standard_normal((4, experts)))
    tokens_WE = np.stack([rng.multinomial(2000, asked_E / asked_E.sum()) for asked_E in asked_WE])
    inter_bytes_s, expert_bytes = 1e9 * 10 ** rng.uniform(-0.7, 0.7), int(10 ** rng.uniform(3.5, 6.0))
    costs = PlacementCosts(1e-6, 1000, expert_bytes, 0, inter_bytes_s, 1e10)
    even = Placement.even(4, experts)
    found = cheapest_balance(even, tokens_WE, node_layout, 1, costs)
    found_s = layer_s(found.load, costs) + exposed_s(even, found.placement, node_layout, costs)
    return found_s / least_layer_s(even, tokens_WE, node_layout, 1, costs) - 1
