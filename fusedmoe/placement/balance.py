"""Row balancing: assign rows to owners and replicas, and add on-demand replicas, for a batch's actual routing.

After the gates every rank has all counts, [W, E], and computes the same assignment in three steps:

1. Assign rows to the nearest owner or replica. Then move rows above the mean along chains of ranks that hold the same
   experts (augmenting paths). No other assignment of rows to these replicas has a smaller maximum over ranks.
2. Move the surplus of overloaded ranks to new replicas, one expert's rows (a piece) at a time, largest piece first: to
   the rank with the least room that fits the piece, or else to the rank with the most room.
3. If there is room for too few replicas, add replicas to full ranks that can pass rows on (bridges), and repeat step 1.

With unlimited room for replicas, the busiest rank computes the mean, rounded up. With room for m ≥ 1 replicas per rank,
no earlier replicas, and at most q owned experts per rank, no rank computes more than 1 + q/m times the mean: a rank
that was not filled has taken m pieces, each at least as large as any remaining piece.

Worked example: ranks 0 and 1 own an expert each, the counts are [[5, 1], [5, 1]] and the mean is 6. Rank 0 would
compute 10 rows, so rank 1 gets a replica of expert 0 and computes 4 of its own 5 rows for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.replica_search import add_node_local
from fusedmoe.placement.row_sharing import RowSharing, nearest_rows
from fusedmoe.placement.traffic import (
    EXCHANGES,
    PlacementCosts,
    PlacementLoad,
    exposed_s,
    gather_transfers,
    layer_s,
)

#: Levels (maximum over mean of the rows per rank) that `cheapest_balance` tries. Higher levels move fewer rows.
LEVELS = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0)
# Replicas that compute fewer rows than this fraction of a rank's mean may be replaced.
_UNDERUSED_FRACTION = 1 / 4
# On-demand replicas, and planning, must save this fraction of the layer's time.
_MIN_SAVING = 0.02
# Number of retried levels: max(2, 2048 / (W·E)), which bounds planning time.
_MIN_RETRIES, _RETRY_BUDGET = 2, 2048


@dataclass(frozen=True, eq=False)
class Balance:
    """A placement, and the number of rows that each rank computes per expert.

    Attributes:
        placement: owners, earlier replicas (`cheapest_balance` may replace some) and new replicas.
        tokens_WE: int64, rows for each expert, by the rank whose tokens they are.
        computed_EV: int64, rows of each expert, by the rank that computes them.
    """

    placement: Placement
    tokens_WE: NDArray[np.int64]
    computed_EV: NDArray[np.int64]
    node_layout: NodeLayout

    @property
    def max_rank_rows(self) -> int:
        return int(self.computed_EV.sum(axis=0).max())

    def sent_from(self, rank: int) -> NDArray[np.int64]:
        """Return [E, V] int64, the rows of each expert that a rank sends to each rank, itself included.

        Rows stay on the rank if possible, otherwise on its node.
        """
        links, first = self._link_rows, self.node_layout.of(rank) * self.node_layout.per_node
        sent_EV = _rows_sent_by(rank, links.far_sent_EW, links.far_received_EW)
        inside = slice(first, first + self.node_layout.per_node)
        sent_EV[:, inside] += _rows_sent_by(
            rank - first, links.near_sent_EW[:, inside], links.near_received_EW[:, inside]
        )
        sent_EV[:, rank] += links.kept_EW[:, rank]
        return sent_EV

    @cached_property
    def load(self) -> PlacementLoad:
        links_W = [counts_EW.sum(axis=0) for counts_EW in self._link_rows]
        _, near_sent, near_received, far_sent, far_received = (int(counts_W.max()) for counts_W in links_W)
        inter, intra = max(far_sent, far_received), max(near_sent, near_received)
        return PlacementLoad(self.computed_EV.sum(axis=0), links_W[-1], inter, intra)

    def mean_load(self) -> PlacementLoad:
        """Return the load with the same total rows, spread evenly over all ranks and links."""
        ranks = self.node_layout.num_ranks
        near, far = int(self._link_rows.near_received_EW.sum()), int(self.load.inter_node_received_W.sum())
        work_W, received_W = (np.full(ranks, -(-rows // ranks)) for rows in (int(self.computed_EV.sum()), far))
        return PlacementLoad(work_W, received_W, int(received_W[0]), -(-near // ranks))

    @cached_property
    def _link_rows(self) -> _LinkRows:
        wanted_EW, node_layout = self.tokens_WE.T, self.node_layout
        kept_EW = np.minimum(wanted_EW, self.computed_EV)
        sent_ENR, received_ENR = (
            node_layout.by_node(counts_EW - kept_EW) for counts_EW in (wanted_EW, self.computed_EV)
        )
        inside_EN = np.minimum(sent_ENR.sum(axis=2), received_ENR.sum(axis=2))
        both = inside_EN.nonzero()
        near_sent_ENR, near_received_ENR = np.zeros_like(sent_ENR), np.zeros_like(sent_ENR)
        # In proportion over a node's ranks, to balance their links.
        near_sent_ENR[both] = _split_in_proportion(sent_ENR[both], inside_EN[both])
        near_received_ENR[both] = _split_in_proportion(received_ENR[both], inside_EN[both])
        four = (near_sent_ENR, near_received_ENR, sent_ENR - near_sent_ENR, received_ENR - near_received_ENR)
        return _LinkRows(kept_EW, *(counts_ENR.reshape(kept_EW.shape) for counts_ENR in four))


class _LinkRows(NamedTuple):
    """Rows of each expert, [E, W], that each rank keeps, and sends and receives within its node and between nodes."""

    kept_EW: NDArray[np.int64]
    near_sent_EW: NDArray[np.int64]
    near_received_EW: NDArray[np.int64]
    far_sent_EW: NDArray[np.int64]
    far_received_EW: NDArray[np.int64]


def balance(placement: Placement, tokens_WE: ArrayLike, node_layout: NodeLayout, m: int, level: float = 1.0) -> Balance:
    """Assign rows to replicas, and add replicas until no rank computes more than `level` times the mean.

    Args:
        placement: owners and replicas, which are kept.
        tokens_WE: [W, E] integers, the rows of each rank for each expert, equal on all ranks.
        m: maximum number of replicas per rank, including replicas in `placement`.
        level: at least 1; higher levels add fewer replicas.
    Raises:
        ConfigError: sizes do not match; tokens_WE is not counts, or sums to 2³¹ or more; m < 0; level < 1.
    """
    tokens_WE = _validate_counts(placement, tokens_WE, node_layout, m)
    if not 1 <= level < np.inf:
        raise ConfigError(f"balance: level = {level} must be 1 or more, and finite")
    sharing = RowSharing(tokens_WE, placement, node_layout, m)
    for above in sorted((one for one in LEVELS if one > level), reverse=True):
        row_limit = _row_limit(above, tokens_WE)
        sharing.reach_limit(row_limit)
        sharing.reach_lowest_limit(row_limit)
    row_limit = _row_limit(level, tokens_WE)
    if not sharing.reach_limit(row_limit):
        sharing.replicate(row_limit)
    return _balance_of(sharing, tokens_WE, node_layout)


def quick_balance(placement: Placement, tokens_WE: ArrayLike, node_layout: NodeLayout, m: int) -> Balance:
    """Add replicas that take the surplus rows of overloaded ranks, in under 1 ms for 64 ranks and 256 experts.

    Step 2 of `balance` only, with its bound for m ≥ 1: all other rows stay on the nearest owner or replica.
    """
    tokens_WE = _validate_counts(placement, tokens_WE, node_layout, m)
    sharing = RowSharing(tokens_WE, placement, node_layout, m)
    sharing.add_replicas(_row_limit(1.0, tokens_WE))
    return _balance_of(sharing, tokens_WE, node_layout)


def cheapest_balance(
    placement: Placement,
    tokens_WE: ArrayLike,
    node_layout: NodeLayout,
    m: int,
    costs: PlacementCosts,
    hidden_s: float = 0.0,
    planning_s: float | None = None,
) -> Balance:
    """Return the balance that minimizes the layer's time (`layer_s` + `exposed_s`).

    The result never costs more than `balance` with any of `LEVELS`, with m = 0 or this m. New replicas may replace
    underused replicas, except those that forwarded their expert to another rank.

    Args:
        placement: owners, and replicas sent by one gather (`traffic.gather_transfers`).
        tokens_WE, node_layout, m: as for `balance`. m = 0: replicas do not change.
        hidden_s: seconds of backward computation, between the rows of this layer and of the previous layer, that hide
            the transfers of replica gradients.
        planning_s: seconds that the search takes, equal on all ranks. Rows stay on the nearest replicas unless a
            perfect balance of ranks and links would save more than `planning_s` and 2% of the layer's time, and new
            replicas must save 2% beyond the exposed time of their transfers. None: the search and replicas are free.
    """
    tokens_WE = _validate_counts(placement, tokens_WE, node_layout, m)
    min_saving_s = 0.0
    if planning_s is not None:
        nearest = Balance(placement, tokens_WE, nearest_rows(placement, tokens_WE, node_layout), node_layout)
        now_s = layer_s(nearest.load, costs)
        min_saving_s = _MIN_SAVING * now_s
        if now_s - layer_s(nearest.mean_load(), costs) <= max(planning_s, min_saving_s):
            return nearest
    level_balances = _LevelBalances(placement, tokens_WE, node_layout, m)
    unchanged_s, unchanged = _cheapest(placement, costs, level_balances.balances, hidden_s)
    below_s = unchanged_s - min_saving_s
    return _search_replicas(placement, level_balances, m, costs, hidden_s, below_s) or unchanged


def _cheapest(
    before: Placement, costs: PlacementCosts, balances: Sequence[Balance], hidden_s: float
) -> tuple[float, Balance]:
    best_s, best = math.inf, balances[0]
    for found in balances:
        # Cheap lower bounds first.
        if found.max_rank_rows * costs.token_s < best_s:
            found_s = layer_s(found.load, costs)
            if found_s < best_s:
                found_s += exposed_s(before, found.placement, found.node_layout, costs, hidden_s)
            if found_s < best_s:
                best_s, best = found_s, found
    return best_s, best


class _LevelBalances:
    """Balances with the replicas of one placement, computed for each of `LEVELS` from the highest to the lowest.

    Attributes:
        balances: the first assigns each row to its nearest replica; one more for each level that moves rows.
        unreached_levels: row assignments of levels that need new replicas, by maximum rows per rank.
    """

    def __init__(self, start: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, m: int) -> None:
        self.start, self.tokens_WE, self.node_layout = start, tokens_WE, node_layout
        sharing = RowSharing(tokens_WE, start, node_layout, m)
        self.balances, self.unreached_levels = [_balance_of(sharing, tokens_WE, node_layout)], dict[int, RowSharing]()
        for level in reversed(LEVELS):
            row_limit = _row_limit(level, tokens_WE)
            if sharing.work_V.max() > row_limit:
                if not sharing.reach_limit(row_limit):
                    if sharing.free_slots_V.any():
                        self.unreached_levels[row_limit] = sharing.copy()
                    sharing.reach_lowest_limit(row_limit)
                self.balances.append(_balance_of(sharing, tokens_WE, node_layout))

    @cached_property
    def _crossing_NE(self) -> NDArray[np.int64]:
        """[N, E], rows that each node sends to other nodes for each expert, ascending."""
        by_node = self.node_layout.by_node
        from_EN, copies_EN = by_node(self.tokens_WE.T).sum(axis=2), by_node(self.start.holds_EW).sum(axis=2)
        return np.sort(np.where(copies_EN > 0, 0, from_EN).T, axis=1)

    def min_inter_node_rows(self, room: int) -> float:
        """Return a lower bound on the busiest rank's inter-node rows with `room` replicas per rank."""
        room_N = self.node_layout.by_node(np.maximum(room - self.start.extra_W(), 0)).sum(axis=1)
        left_N = (rows_E[: max(0, len(rows_E) - n)].sum() for rows_E, n in zip(self._crossing_NE, room_N, strict=True))
        return float(max(left_N)) / self.node_layout.per_node


def _search_replicas(
    before: Placement, level_balances: _LevelBalances, m: int, costs: PlacementCosts, hidden_s: float, below_s: float
) -> Balance | None:
    """Return the fastest balance with new or replaced replicas, if its layer takes less than `below_s`; else None.

    The search starts from the replicas of `before`, also without the underused ones, and with node-local ones added.
    For each start, it adds replicas at each of `LEVELS` that a lower bound of the time does not exclude.
    """
    tokens_WE, node_layout, best = level_balances.tokens_WE, level_balances.node_layout, None
    transfer_s = costs.expert_bytes / max(costs.inter_bytes_s, costs.intra_bytes_s)

    def consider(start: Placement, offered: Balance) -> float:
        nonlocal below_s, best
        if start != before:
            offered = replace(offered, placement=_fill_with_earlier(offered.placement, before, m))
        offered_s = layer_s(offered.load, costs) + exposed_s(before, offered.placement, node_layout, costs, hidden_s)
        if offered_s < below_s:
            below_s, best = offered_s, offered
        return offered_s

    def can_be_faster(each: _LevelBalances, row_limit: int, room: int) -> bool:
        # Lower bound with one new replica.
        work_s = row_limit * costs.token_s
        rows_s = EXCHANGES * each.min_inter_node_rows(room) * costs.token_bytes / costs.inter_bytes_s
        return work_s + rows_s + transfer_s + max(0.0, transfer_s - hidden_s) < below_s

    def replicate(each: _LevelBalances, row_limit: int, room: int, *, inside: bool = False) -> tuple[float, int]:
        """Consider up to `room` new replicas per rank. Return the seconds and the maximum replicas of a rank."""
        sharing = each.unreached_levels[row_limit].copy(room)
        sharing.replicate(row_limit, inside=inside)
        return consider(each.start, _balance_of(sharing, tokens_WE, node_layout)), sharing.max_new_rank_replicas

    tries = max(_MIN_RETRIES, _RETRY_BUDGET // tokens_WE.size)
    used = _drop_underused(level_balances.balances[-1])
    near = add_node_local(used, tokens_WE, node_layout, m, costs)
    starts = [near] if near != used else []
    is_uneven = level_balances.balances[-1].max_rank_rows > _row_limit(1.0, tokens_WE)
    if used != before and (tries > _MIN_RETRIES or is_uneven):
        starts.append(used)
    all_balances = [level_balances, *(_LevelBalances(start, tokens_WE, node_layout, m) for start in starts)]
    for each in all_balances[1:]:
        for balanced in each.balances:
            consider(each.start, balanced)
    runs: list[tuple[float, int, _LevelBalances, int, int]] = []
    for each in all_balances:
        # Lowest level first: its busiest rank computes the fewest rows.
        for row_limit in reversed(each.unreached_levels):
            if can_be_faster(each, row_limit, m):
                run_s, room = replicate(each, row_limit, m)
                runs.append((run_s, len(runs), each, row_limit, room))
    for _, _, each, row_limit, room in sorted(runs)[:tries]:
        # Node-local replicas change neither a node's total rows nor its inter-node rows.
        if can_be_faster(each, max(row_limit, each.unreached_levels[row_limit].busiest_node_mean_rows), 0):
            replicate(each, row_limit, m, inside=True)
        # Less room than the fullest rank used leads to other replicas.
        while (room := room - 1) > 0:
            if can_be_faster(each, row_limit, room):
                _, room = replicate(each, row_limit, room)
    return best


def _drop_underused(balanced: Balance) -> Placement:
    # Replicas that forwarded their expert must stay.
    placement = balanced.placement
    transfers = gather_transfers(placement.sharding, placement, balanced.node_layout)
    passed_on = {(one.expert, one.source) for one in transfers}
    few_EV = balanced.computed_EV * balanced.node_layout.num_ranks < _UNDERUSED_FRACTION * balanced.tokens_WE.sum()
    holds_EW = placement.holds_EW.copy()
    for one in transfers:
        if few_EV[one.expert, one.target] and (one.expert, one.target) not in passed_on:
            holds_EW[one.expert, one.target] = False
    return Placement.holding(placement.owners, holds_EW)


def _fill_with_earlier(placement: Placement, before: Placement, m: int) -> Placement:
    holds_EW, room_W = placement.holds_EW.copy(), np.maximum(m, before.extra_W()) - placement.extra_W()
    for expert, rank in np.argwhere(before.holds_EW & ~holds_EW).tolist():
        if room_W[rank] > 0:
            holds_EW[expert, rank] = True
            room_W[rank] -= 1
    return Placement.holding(placement.owners, holds_EW)


def _validate_counts(placement: Placement, tokens_WE: ArrayLike, node_layout: NodeLayout, m: int) -> NDArray[np.int64]:
    tokens_WE = np.asarray(tokens_WE)
    if tokens_WE.shape != (node_layout.num_ranks, placement.experts) or placement.num_ranks != node_layout.num_ranks:
        raise ConfigError(
            f"balance: tokens of shape {tokens_WE.shape}, but {placement.experts} experts on {placement.num_ranks} "
            f"ranks, and {node_layout.num_ranks} ranks in nodes"
        )
    if tokens_WE.dtype.kind not in "iu" or (tokens_WE < 0).any():
        raise ConfigError("balance: tokens are counted in integers of 0 or more")
    if tokens_WE.sum(dtype=np.float64) >= 2**31:
        raise ConfigError("balance: tokens must be less than 2³¹ in all")
    if m < 0:
        raise ConfigError(f"balance: m = {m} must be 0 or more")
    return tokens_WE.astype(np.int64)


def _row_limit(level: float, tokens_WE: NDArray[np.int64]) -> int:
    rows, ranks = int(tokens_WE.sum()), len(tokens_WE)
    return max(-(-rows // ranks), int(level * rows / ranks))


def _balance_of(sharing: RowSharing, tokens_WE: NDArray[np.int64], node_layout: NodeLayout) -> Balance:
    return Balance(sharing.placement(), tokens_WE, sharing.computed_VE.T.copy(), node_layout)


def _split_in_proportion(counts_XR: NDArray[np.int64], part_X: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split `part_X` rows over ranks in proportion to `counts_XR`, in integers."""
    before_XR = counts_XR.cumsum(axis=1)
    before_XR = before_XR * part_X[:, None] // before_XR[:, -1:]
    before_XR[:, 1:] -= before_XR[:, :-1].copy()
    return before_XR


def _rows_sent_by(rank: int, sent_EW: NDArray[np.int64], received_EV: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [E, V], the rows that `rank` sends to each rank. Senders and receivers match in rank order."""
    start_E = sent_EW[:, :rank].sum(axis=1)
    ends_EV = np.minimum(np.maximum(received_EV.cumsum(axis=1) - start_E[:, None], 0), sent_EW[:, rank, None])
    ends_EV[:, 1:] -= ends_EV[:, :-1].copy()
    return ends_EV
