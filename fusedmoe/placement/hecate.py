"""Hecate's algorithms: replicas for one iteration, and owners.

Sparse materialisation (Algorithm 1) assigns replica slots to experts by the loads of the last iterations. Calibration
(section 4.2) adds replicas after the gate. Heterogeneous sharding (Algorithm 2) chooses owners over all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.replica_search import accept_if_faster, improve
from fusedmoe.placement.traffic import PlacementCosts, exposed_s, layer_s, placement_load

#: Iterations between two changes of owners.
RESHARDING_STEPS = 100
# Owners stay while the busiest ranks exceed the mean load by at most this fraction.
_MAX_IMBALANCE = 0.05
#: Iterations that a prediction averages (w in the paper).
WINDOW = 5


@dataclass(frozen=True)
class LayerLoads:
    """Input of a `LayerPolicy`: the loads of one layer before a step.

    `step`: counted from 0. `history_IE`: [I, E] int64, I ≥ 1, tokens of all ranks per expert in earlier steps, oldest
    first.
    """

    step: int
    placement: Placement
    history_IE: NDArray[np.int64]
    node_layout: NodeLayout
    costs: PlacementCosts


#: Returns the placement for the next step: a pure function, as all ranks need the same result.
LayerPolicy = Callable[[LayerLoads], Placement]


def hecate(now: LayerLoads, *, t: int, m: int, searches: bool = True) -> Placement:
    """Return the replicas for the predicted load by Algorithm 1, improved by a search. Owners do not change.

    `t`, `m`: as for `materialise`. `searches`: if False, Algorithm 1 as published, with replicas that save no time.
    """
    sharding, load_E = now.placement.sharding, predict_load(now.history_IE)
    placement = materialise(sharding, load_E, now.node_layout, t, m)
    if not searches:
        return placement
    placement = improve(sharding, placement, load_E, now.node_layout, t, m, now.costs)
    return accept_if_faster(sharding, placement, load_E, now.node_layout, now.costs)


def predict_load(history_IX: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the expected next load, the mean of the last (at most) `WINDOW` loads (section 4.2).

    `history_IX`: [I, E] or [I, L, E], I ≥ 1, oldest first.
    """
    mean_X: NDArray[np.float64] = np.mean(history_IX[-WINDOW:], axis=0)
    return mean_X


def is_due(step: int) -> bool:
    """Return whether owners may change in this step: every `RESHARDING_STEPS` steps, and once after `WINDOW` steps."""
    return step % RESHARDING_STEPS == 0 or step == WINDOW


def overlap_degree(idle_s: float, expert_bytes: float, bytes_per_s: float) -> int:
    """Return t, the number of experts that a rank can receive while its link is idle (section 4.2).

    Args:
        idle_s: seconds that a plan leaves the link idle (`schedule.policies.sparse_collectives.hidden_s`), or the
            forward time of the attention before the layer, as in the paper.
        bytes_per_s: bandwidth of a rank's inter-node link (on a single node, of its intra-node link).
    """
    if not (idle_s >= 0 and expert_bytes > 0 and bytes_per_s > 0 and math.isfinite(idle_s * bytes_per_s)):
        raise ConfigError(
            f"overlap degree: {idle_s} s idle at {bytes_per_s} bytes/s and {expert_bytes} bytes an expert; the first "
            "must be 0 or more, the others more than 0"
        )
    return math.floor(idle_s * bytes_per_s / expert_bytes)


def materialise(placement: Placement, load_E: ArrayLike, node_layout: NodeLayout, t: int, m: int) -> Placement:
    """Add replicas to `placement` by load per holder (Algorithm 1).

    If every rank has room for `t` more replicas (t ≤ m), each rank gets the `t` experts with the highest load.
    Otherwise these experts, in descending order, share the free slots: an expert gets (free slots)·(its load)/(load of
    this and the following experts) replicas, rounded, at most one per other rank.

    Args:
        placement: a sharding; or, for calibration, a placement with replicas, which count against `m`.
        load_E: [E], the expected load of each expert, in any unit.
        t: overlap degree, the maximum number of experts sent.
        m: memory, the maximum number of replicas per rank.
    """
    load_E = np.asarray(load_E, dtype=np.float64)
    # Per holder: calibration must not add replicas of the same expert repeatedly.
    share_E = load_E / placement.holds_EW.sum(axis=1)
    t = min(t, placement.experts)
    free_W = np.clip(m - placement.extra_W(), 0, t)  # m ← min(m, t)
    top = np.argsort(-share_E, kind="stable")[:t]
    holds_EW = placement.holds_EW.copy()
    if (free_W == t).all():
        holds_EW[top] = True
        return Placement.holding(placement.owners, holds_EW)
    load_left = float(share_E[top].sum())
    free, slots_left = free_W.tolist(), int(free_W.sum())
    work_W = (share_E @ placement.holds_EW).tolist()
    for expert in top.tolist():
        if load_left <= 0.0:
            break  # the other experts have no load
        holding = np.flatnonzero(holds_EW[expert]).tolist()
        # Rounded half up.
        num_replicas = min(math.floor(slots_left * share_E[expert] / load_left + 0.5), node_layout.num_ranks - 1)
        part = float(load_E[expert]) / (len(holding) + num_replicas)
        for rank in holding:
            work_W[rank] += part - float(share_E[expert])
        load_left -= share_E[expert]
        chosen = _choose_ranks(num_replicas, holding, free, work_W, part, node_layout)
        holds_EW[expert, chosen] = True
        slots_left -= len(chosen)
    return Placement.holding(placement.owners, holds_EW)


def _choose_ranks(
    num_replicas: int, holding: list[int], free: list[int], work: list[float], part: float, node_layout: NodeLayout
) -> list[int]:
    """Return the ranks for up to `num_replicas` replicas. Updates `free` slots and `work` per rank in place."""
    chosen: list[int] = []
    covered = {node_layout.of(rank) for rank in holding}
    free_N, work_N = (
        [
            sum(by_rank[node * node_layout.per_node : (node + 1) * node_layout.per_node])
            for node in range(node_layout.num_nodes)
        ]
        for by_rank in (free, work)
    )
    open_ranks = [rank for rank, slots in enumerate(free) if slots > 0 and rank not in holding]

    # Nodes without a replica first: their tokens for the expert then stay on the node. Then most free slots, as in the
    # paper. The paper leaves ties open: least work, then the lower rank.
    def preference(rank: int) -> tuple[bool, float, float, int, int, float]:
        node = node_layout.of(rank)
        return node in covered, -free_N[node], work_N[node], node, -free[rank], work[rank]

    while open_ranks and len(chosen) < num_replicas:
        rank = min(open_ranks, key=preference)
        open_ranks.remove(rank)
        chosen.append(rank)
        free[rank] -= 1
        free_N[node_layout.of(rank)] -= 1
        work[rank] += part
        work_N[node_layout.of(rank)] += part
        covered.add(node_layout.of(rank))
    return chosen


def calibrate(
    placement: Placement, tokens_WE: ArrayLike, node_layout: NodeLayout, m: int, costs: PlacementCosts
) -> Placement:
    """Return the fastest of `placement` and candidates with more replicas, including their transfers.

    Candidates are results of Algorithm 1 from `placement` with the actual token counts and the remaining memory.
    `tokens_WE`, `m`: as for `balance.balance`.
    """
    load_E = np.asarray(tokens_WE).sum(axis=0)
    best, best_s = placement, layer_s(placement_load(tokens_WE, placement, node_layout), costs)
    # Only powers of two as overlap degrees: tokens wait for this search.
    for t in (1 << power for power in range((placement.experts - 1).bit_length() + 1)):
        candidate = materialise(placement, load_E, node_layout, t, m)
        if candidate == placement:
            continue
        seconds = layer_s(placement_load(tokens_WE, candidate, node_layout), costs) + exposed_s(
            placement, candidate, node_layout, costs
        )
        if seconds < best_s:
            best, best_s = candidate, seconds
    return best


def max_owned_experts(layers: int, experts: int, ranks: int) -> int:
    return -(-layers * experts // ranks)


def reshard(
    shardings: Sequence[Placement], load_LE: ArrayLike, node_layout: NodeLayout, t: int
) -> tuple[Placement, ...]:
    """Choose owners in all layers that balance the load of experts without replicas over ranks (Algorithm 2).

    In each layer, all experts except the `t` with the highest load are placed, largest first: on the node with the
    least load in this layer, and there on the rank with the least load. A rank may own any number of a layer's experts,
    since all layers share its slots (`max_owned_experts`). The paper leaves the owners of the top `t` experts open.
    Here such an expert stays if its owner has a free slot and owns fewer than t / ranks of the layer's top experts.
    Otherwise it moves to the node and rank that own the fewest of them.

    Args:
        shardings: [L], the current owners. All layers have the same number of experts.
        load_LE: [L, E], the expected load of each expert; layers have equal sums.
        t: overlap degree, as for `materialise`.
    Returns:
        `shardings` itself if nothing changes, as in a second call with the same loads.
    """
    load_LE = np.asarray(load_LE, dtype=np.float64)
    layers, experts = load_LE.shape
    free_W = np.full(node_layout.num_ranks, max_owned_experts(layers, experts, node_layout.num_ranks))
    owner_LE = np.full((layers, experts), -1)
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    t = min(t, experts)
    largest_L = load_LE[np.arange(layers), order_LE[:, t]] if t < experts else np.zeros(layers)
    # Hardest first, while every rank has room: the layer with the largest expert load.
    for layer in np.argsort(-largest_L, kind="stable").tolist():
        work_W = np.zeros(node_layout.num_ranks)
        for expert in order_LE[layer, t:].tolist():
            rank = _least_loaded_rank(work_W, free_W, node_layout)
            owner_LE[layer, expert] = rank
            work_W[rank] += load_LE[layer, expert]
            free_W[rank] -= 1
    busiest_LT, room = order_LE[:, :t], max_owned_experts(layers, experts, node_layout.num_ranks)
    before_LE = np.array([sharding.owners for sharding in shardings])
    stays = (before_LE == owner_LE)[owner_LE >= 0].all() and np.bincount(before_LE.ravel()).max() <= room
    found_LE = before_LE if stays else _assign_busiest(before_LE, owner_LE, busiest_LT, free_W, node_layout)
    # Repeat while this reduces crowding: a second call must change nothing.
    while True:
        next_LE = _assign_busiest(found_LE, owner_LE, busiest_LT, free_W, node_layout)
        if _count_crowded(next_LE, busiest_LT, node_layout) >= _count_crowded(found_LE, busiest_LT, node_layout):
            break
        found_LE = next_LE
    chosen = tuple(Placement(node_layout.num_ranks, tuple(owners)) for owners in found_LE.tolist())
    return tuple(shardings) if chosen == tuple(shardings) else chosen


def is_uneven(shardings: Sequence[Placement], load_LE: ArrayLike) -> bool:
    """Return whether the load of each layer's busiest owner, summed over layers, exceeds the mean by over 5%.

    `reshard` can only worsen balanced loads. Replicas do not count.
    """
    work_LW = [load_E @ one.holds_EW for one, load_E in zip(shardings, np.asarray(load_LE, dtype=float), strict=True)]
    return bool(np.max(work_LW, axis=1).sum() > (1 + _MAX_IMBALANCE) * np.mean(work_LW, axis=1).sum())


def _assign_busiest(
    before_LE: NDArray[np.int64],
    others_LE: NDArray[np.int64],
    busiest_LT: NDArray[np.int64],
    free_W: NDArray[np.int64],
    node_layout: NodeLayout,
) -> NDArray[np.int64]:
    """Return the owners of all experts, [L, E], with chosen owners for the t busiest experts of each layer.

    Args:
        before_LE: owners before the resharding.
        others_LE: new owners of all other experts, and -1 for the busiest.
        busiest_LT: the t busiest experts of each layer, the busiest first.
        free_W: free slots of each rank for owned experts.
    """
    owner_LE, free_W, t = others_LE.copy(), free_W.copy(), busiest_LT.shape[1]
    # The t busiest experts get replicas anyway, so owning one is little work.
    to_reassign = []
    for column in range(t):
        for layer, expert in enumerate(busiest_LT[:, column].tolist()):
            rank = int(before_LE[layer, expert])
            # An owner of many of a layer's t busiest experts would send them all, and sum their gradients.
            is_crowded = (owner_LE[layer, busiest_LT[layer, :column]] == rank).sum() * node_layout.num_ranks >= t
            if free_W[rank] > 0 and not is_crowded:
                owner_LE[layer, expert] = rank
                free_W[rank] -= 1
            else:
                to_reassign.append((layer, expert))
    for layer, expert in to_reassign:
        owned_W = np.bincount(owner_LE[layer, busiest_LT[layer]] + 1, minlength=node_layout.num_ranks + 1)[1:]
        rank = _least_loaded_rank(owned_W, free_W, node_layout, prefer_most_free=True)
        owner_LE[layer, expert] = rank
        free_W[rank] -= 1
    return owner_LE


def _count_crowded(owner_LE: NDArray[np.int64], busiest_LT: NDArray[np.int64], node_layout: NodeLayout) -> int:
    """Count the busiest experts that ranks own beyond t / ranks per layer, rounded up."""
    layers, t = busiest_LT.shape
    owned_LW = np.zeros((layers, node_layout.num_ranks), dtype=np.int64)
    np.add.at(owned_LW, (np.arange(layers)[:, None], np.take_along_axis(owner_LE, busiest_LT, axis=1)), 1)
    return int(np.maximum(owned_LW - -(-t // node_layout.num_ranks), 0).sum())


def _least_loaded_rank(
    work_W: NDArray[np.generic], free_W: NDArray[np.int64], node_layout: NodeLayout, prefer_most_free: bool = False
) -> int:
    """Return the rank with the least work on the node with the least work, among ranks with free slots."""
    work_NR, free_NR = node_layout.by_node(work_W), node_layout.by_node(free_W)
    # Ties: fewer free slots first, as in the paper, or more.
    sign = -1 if prefer_most_free else 1
    open_N = np.flatnonzero((free_NR > 0).any(axis=1)).tolist()
    node = min(open_N, key=lambda n: (work_NR[n].sum(), sign * free_NR[n].sum(), n))
    open_R = np.flatnonzero(free_NR[node] > 0).tolist()
    rank = min(open_R, key=lambda r: (work_NR[node, r], sign * free_NR[node, r], r))
    return int(node * node_layout.per_node + rank)
