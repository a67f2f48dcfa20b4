"""The best replicas there are, by integer programmes: for the time of a layer, and for the work of its busiest rank."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np

from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.traffic import EXCHANGES, PlacementCosts, dispatch
from fusedmoe.schedule.policies.lancet_plans import solved


def best_placement(
    sharding: Placement, tokens_WE: np.ndarray, nodes: Nodes, t: int, m: int, costs: PlacementCosts
) -> Placement:
    """The placement whose layer takes the least time (`layer_s`): at most `t` experts travel, at most `m` to a rank."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    counts = [[[] for _ in range(nodes.ranks)] for _ in range(5)]  # work, and what is sent and received on both links
    inside = np.arange(nodes.ranks)[:, None] // nodes.per_node == np.arange(nodes.ranks) // nodes.per_node
    extra: list[list] = [[] for _ in range(nodes.ranks)]
    travels, patterns = [], {}
    for expert, owner in enumerate(sharding.owners):
        others = [rank for rank in range(nodes.ranks) if rank != owner]
        sets = list(chain.from_iterable(combinations(others, size) for size in range(nodes.ranks)))
        chosen = [model.new_bool_var("") for _ in sets]
        model.add_exactly_one(chosen)
        travels += chosen[1:]  # the first is the empty one
        for ranks, variable in zip(sets, chosen, strict=True):
            patterns[expert, ranks] = variable
            alone = Placement(nodes.ranks, (owner,), (ranks,))
            flow = dispatch(tokens_WE[:, [expert]], alone, nodes)[:, 0]
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
    # In thousandths of the time of a token's computation.
    link = [1000 * EXCHANGES * costs.token_bytes / speed / costs.token_s for speed in _speeds(costs)]
    for rank in range(nodes.ranks):
        model.add(sum(counts[0][rank]) <= busiest)
        for count, each in zip(counts[1:], link, strict=True):
            model.add(round(each) * sum(count[rank]) <= exchange)
        model.add(sum(extra[rank]) <= m)
    model.add(sum(travels) <= t)
    model.minimize(1000 * busiest + exchange)
    solver = solved(model, limit=20.0)
    assert solver is not None and solver.best_objective_bound >= solver.objective_value - 0.5, "not proven to be best"
    found = {expert: ranks for (expert, ranks), variable in patterns.items() if solver.boolean_value(variable)}
    return Placement(nodes.ranks, sharding.owners, tuple(found[expert] for expert in range(sharding.experts)))


def _speeds(costs: PlacementCosts) -> tuple[float, ...]:
    return costs.inter_bytes_s, costs.inter_bytes_s, costs.intra_bytes_s, costs.intra_bytes_s


def least_busiest(sharding: Placement, load_E: np.ndarray, m: int) -> int:
    """The fewest rows that the busiest rank can compute with at most `m` copies on each rank."""
    return _shared(sharding, load_E, m, None)


def fewest_copies(sharding: Placement, load_E: np.ndarray, m: int, most: int) -> int:
    """The fewest copies with which no rank computes more than `most` rows."""
    return _shared(sharding, load_E, m, most)


def _shared(sharding: Placement, load_E: np.ndarray, m: int, most: int | None) -> int:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    ranks, copies = range(sharding.ranks), []
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
    solver = solved(model, limit=20.0)
    assert solver is not None and solver.best_objective_bound >= solver.objective_value - 0.5, "not proven to be best"
    return round(solver.objective_value)
