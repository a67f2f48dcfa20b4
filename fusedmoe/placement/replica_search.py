"""Local search after Algorithm 1: add, remove and move replicas while this makes a layer faster.

Algorithm 1 places experts one by one, and with few slots its fractions are coarse. The search considers all experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import EXCHANGES, PlacementCosts

# Weight of the imbalance over all ranks in the objective, to choose among equally fast placements.
_IMBALANCE_WEIGHT = 0.1
# Maximum steps from one start. 32 experts on 16 ranks take fewer than 10.
_MAX_STEPS = 60
# With up to this many slots, the search also starts without the replicas of Algorithm 1.
_MAX_SLOTS_FOR_TWO_STARTS = 16
# Minimum relative gain of a step.
_MIN_GAIN = 1e-3
# Minimum fraction of the layer's time to save.
_MIN_SAVING = 0.02


def improve(
    placement: Placement,
    start: Placement,
    load_E: ArrayLike,
    node_layout: NodeLayout,
    t: int,
    m: int,
    costs: PlacementCosts,
) -> Placement:
    """Return `start`, or a placement within the same limits that makes the layer faster at the expected load.

    Each step removes, adds, moves or swaps replicas, choosing the change that reduces the layer's time (`layer_s`)
    most. The time assumes equal numbers of tokens on all ranks, split evenly over holders, and free transfers inside
    nodes. Deterministic.

    Args:
        placement: owners and replicas, which are kept.
        start: the result of Algorithm 1 for `placement`.
        load_E, node_layout, t, m: as for `materialise`.
    """
    search = _ReplicaSearch(placement, np.asarray(load_E, dtype=np.float64), node_layout, t, m, costs)
    if search.compute_s == search.exchange_s == 0:
        return start  # the costs are unknown
    # With few slots Algorithm 1 may be a bad start.
    starts = (start, placement) if search.free_slots_W.sum() <= _MAX_SLOTS_FOR_TWO_STARTS else (start,)
    ends = [search.repeat_best_steps(begin.holds_EW) for begin in starts]
    return Placement.holding(placement.owners, min((start.holds_EW, *ends), key=search.layer_s))


def accept_if_faster(
    placement: Placement, candidate: Placement, load_E: ArrayLike, node_layout: NodeLayout, costs: PlacementCosts
) -> Placement:
    """Return `candidate` if it makes the layer over 2% faster than `placement`, or if costs are unknown (0)."""
    search = _ReplicaSearch(placement, np.asarray(load_E, dtype=np.float64), node_layout, 0, 0, costs)
    # Even hidden transfers are not free.
    saves = search.layer_s(candidate.holds_EW) < (1 - _MIN_SAVING) * search.layer_s(placement.holds_EW)
    return candidate if saves or search.compute_s == search.exchange_s == 0 else placement


class _ReplicaSearch:
    """Local search for `improve`: repeats the best step while it reduces the objective.

    A step makes one or two changes. A change is (expert, from, to): `from` loses the expert's replica and `to` gets
    one; W in place of a rank means none.

    Placements are compared by their token counts in one all-to-all, a vector [C] = [W + W + N]: the tokens that each of
    W ranks computes, those that it receives from other nodes, and those that each rank of each of N nodes sends to
    other nodes. Further axes: A, candidate steps; V, the W ranks and "no rank".
    """

    def __init__(
        self,
        placement: Placement,
        load_E: NDArray[np.float64],
        node_layout: NodeLayout,
        t: int,
        m: int,
        costs: PlacementCosts,
    ) -> None:
        self.required_EW, self.node_layout, self.t = placement.holds_EW, node_layout, t
        self.free_slots_W = np.maximum(m - placement.extra_W(), 0)
        self.rank_load_E = load_E / node_layout.num_ranks
        self.compute_s, self.exchange_s = costs.token_s, EXCHANGES * costs.token_bytes / costs.inter_bytes_s
        self.imbalance_weight = _IMBALANCE_WEIGHT / max(float(load_E.sum()), 1e-300)

    def layer_s(self, holds_EW: NDArray[np.bool_]) -> float:
        total_C = self.token_counts(holds_EW, self.rank_load_E).sum(axis=0)
        ranks = self.node_layout.num_ranks
        return float(self.compute_s * total_C[:ranks].max() + self.exchange_s * total_C[ranks:].max())

    def repeat_best_steps(self, holds_EW: NDArray[np.bool_]) -> NDArray[np.bool_]:
        holds_EW = holds_EW.copy()
        ranks = self.node_layout.num_ranks
        one_rank_VW = np.eye(ranks + 1, ranks, dtype=np.bool_)  # last row: no rank
        counts_EC = self.token_counts(holds_EW, self.rank_load_E)
        change_EVVC = np.zeros((len(holds_EW), ranks + 1, ranks + 1, counts_EC.shape[1]))
        stale = np.flatnonzero(self.rank_load_E > 0)
        best = float(self.objective(counts_EC.sum(axis=0)))
        for _ in range(_MAX_STEPS):
            counts_EC[stale] = self.token_counts(holds_EW[stale], self.rank_load_E[stale])
            goes_AV = np.pad(holds_EW[stale] & ~self.required_EW[stale], ((0, 0), (0, 1)), constant_values=True)
            index, source = np.nonzero(goes_AV)
            expert = stale[index]
            sets_AVW = (holds_EW[expert] & ~one_rank_VW[source])[:, None] | one_rank_VW
            counts_AVC = self.token_counts(sets_AVW, self.rank_load_E[expert, None])
            change_EVVC[expert, source] = counts_AVC - counts_EC[expert, None]
            total_C = counts_EC.sum(axis=0)
            objective, changes = min(self.best_step_per_kind(holds_EW, total_C, change_EVVC), key=lambda step: step[0])
            if objective >= best * (1 - _MIN_GAIN):
                break
            best = objective
            for changed, gone, new in changes:
                holds_EW[changed] = (holds_EW[changed] & ~one_rank_VW[gone]) | one_rank_VW[new]
            stale = np.array([changed for changed, _, _ in changes])
        return holds_EW

    def best_step_per_kind(
        self, holds_EW: NDArray[np.bool_], total_C: NDArray[np.float64], change_EVVC: NDArray[np.float64]
    ) -> Iterator[tuple[float, list[tuple[int, int, int]]]]:
        """Yield the best step of each kind (one replica, a replacement, a swap): its objective and its changes."""
        ranks, no_rank = self.node_layout.num_ranks, self.node_layout.num_ranks
        extra_EW, lacks_EW = holds_EW & ~self.required_EW, ~holds_EW & (self.rank_load_E > 0)[:, None]
        copies_E = extra_EW.sum(axis=1)
        can_add_E = (copies_E > 0) | ((copies_E > 0).sum() < self.t)
        free_W = extra_EW.sum(axis=0) < self.free_slots_W
        # A step must relieve the busiest rank or the busiest link.
        busiest = [int(total_C[:ranks].argmax()), ranks + int(total_C[ranks:].argmax())]
        relief_2EVV = [change_EVVC[..., column] for column in busiest]

        # Remove, add, or move a replica.
        goes_EV, comes_EV = (
            np.pad(may_EW, ((0, 0), (0, 1)), constant_values=True) for may_EW in (extra_EW, lacks_EW & free_W)
        )
        ok_EVV = goes_EV[:, :, None] & comes_EV[:, None]
        ok_EVV[:, no_rank] &= can_add_E[:, None]
        expert, source, target = np.nonzero(ok_EVV & _relieves_busiest(relief_2EVV))
        yield self.best_candidate(total_C, change_EVVC[expert, source, target], [(expert, source, target)])

        # Remove one expert's replica and add another's.
        gone, at = np.nonzero(extra_EW)
        new, to = np.nonzero(lacks_EW)
        ok_AB = (gone[:, None] != new) & ((at[:, None] == to) | free_W[to])
        ok_AB &= can_add_E[new] | (copies_E[gone] == 1)[:, None]
        relief_2AB = [relief[gone, at, no_rank][:, None] + relief[new, no_rank, to] for relief in relief_2EVV]
        a, b = np.nonzero(ok_AB & _relieves_busiest(relief_2AB))
        nowhere_A, nowhere_B = np.full_like(a, no_rank), np.full_like(b, no_rank)
        changes_AC = change_EVVC[gone[a], at[a], no_rank] + change_EVVC[new[b], no_rank, to[b]]
        yield self.best_candidate(total_C, changes_AC, [(gone[a], at[a], nowhere_A), (new[b], nowhere_B, to[b])])

        # Swap two replicas.
        ok_AA = lacks_EW[gone[:, None], at]
        relief_2AA = [half + half.T for half in (relief[gone[:, None], at[:, None], at] for relief in relief_2EVV)]
        a, b = np.nonzero(np.triu(ok_AA & ok_AA.T) & _relieves_busiest(relief_2AA))
        changes_AC = change_EVVC[gone[a], at[a], at[b]] + change_EVVC[gone[b], at[b], at[a]]
        yield self.best_candidate(total_C, changes_AC, [(gone[a], at[a], at[b]), (gone[b], at[b], at[a])])

    def best_candidate(
        self, total_C: NDArray[np.float64], changes_AC: NDArray[np.float64], steps: list[tuple[NDArray[np.int64], ...]]
    ) -> tuple[float, list[tuple[int, int, int]]]:
        """Return the lowest objective that a candidate step reaches, and the changes of that step.

        Args:
            total_C: token counts of the current placement.
            changes_AC: each candidate's changes of these counts.
            steps: one or two changes of all candidates: arrays [A] of experts, source ranks and target ranks.
        """
        if not len(changes_AC):
            return np.inf, []
        objective_A = self.objective(total_C + changes_AC)
        best = int(objective_A.argmin())
        return float(objective_A[best]), [(int(e[best]), int(a[best]), int(b[best])) for e, a, b in steps]

    def token_counts(self, holds_XW: NDArray[np.bool_], each_X: ArrayLike) -> NDArray[np.float64]:
        """Return each expert's token counts [..., C], as defined for the class, in one all-to-all.

        Args:
            holds_XW: [..., W], the ranks that hold the expert.
            each_X: [...], tokens that each rank has for the expert.
        """
        node_layout = self.node_layout
        each_X = np.asarray(each_X, dtype=np.float64)
        copies_XN = node_layout.by_node(holds_XW).sum(axis=-1)
        lacks_XN = copies_XN == 0
        received_X = each_X * node_layout.per_node * lacks_XN.sum(axis=-1) / copies_XN.sum(axis=-1)
        inside_XN = each_X[..., None] * node_layout.per_node / np.maximum(copies_XN, 1)
        received_XW = holds_XW * received_X[..., None]
        work_XW = holds_XW * np.repeat(inside_XN, node_layout.per_node, axis=-1) + received_XW
        return np.concatenate([work_XW, received_XW, lacks_XN * each_X[..., None]], axis=-1)

    def objective(self, counts_XC: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the layer's seconds plus a penalty on uneven counts, [...], for token counts [..., C]."""
        work_XW, inter_XC = counts_XC[..., : self.node_layout.num_ranks], counts_XC[..., self.node_layout.num_ranks :]
        total: NDArray[np.float64] = sum(
            seconds * (tokens.max(axis=-1) + self.imbalance_weight * np.einsum("...c,...c->...", tokens, tokens))
            for seconds, tokens in ((self.compute_s, work_XW), (self.exchange_s, inter_XC))
        )
        return total


def _relieves_busiest(changes: list[NDArray[np.float64]]) -> NDArray[np.bool_]:
    compute, exchange = changes
    return (compute < 0) | (exchange < 0)


def add_node_local(
    placement: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, m: int, costs: PlacementCosts
) -> Placement:
    """Add replicas of experts to nodes that do not hold them, most rows first, while ranks have room.

    A replica is added if its rows take longer to send between nodes (in four all-to-alls) than its parameters and
    gradients.
    """
    by_node = node_layout.by_node
    holds_EW, free_slots_W = placement.holds_EW.copy(), np.maximum(m - placement.extra_W(), 0)
    room_N = by_node(free_slots_W).sum(axis=1).tolist()
    from_EN, copies_EN = by_node(tokens_WE.T).sum(axis=2), by_node(holds_EW).sum(axis=2)
    # Rows of the node only: other nodes will hold their popular experts.
    work_W = (by_node(holds_EW) * (from_EN / np.maximum(copies_EN, 1))[:, :, None]).sum(axis=0).reshape(-1)
    crossing_X = np.where(copies_EN == 0, from_EN, 0).reshape(-1)
    least = 2 * costs.expert_bytes / max(1, EXCHANGES * costs.token_bytes)
    order_x = np.argsort(-crossing_X, kind="stable")
    for index in order_x[crossing_X[order_x] > least].tolist():
        expert, node = divmod(index, node_layout.num_nodes)
        inside = slice(node * node_layout.per_node, (node + 1) * node_layout.per_node)
        if room_N[node]:
            rank = inside.start + int(np.where(free_slots_W[inside] > 0, work_W[inside], np.inf).argmin())
            holds_EW[expert, rank] = True
            free_slots_W[rank] -= 1
            room_N[node] -= 1
            work_W[rank] += crossing_X[index]
    return Placement.holding(placement.owners, holds_EW) if (holds_EW != placement.holds_EW).any() else placement
