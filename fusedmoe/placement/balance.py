"""Exact balance: once the gates have chosen, which experts are copied where, and whose rows go to which copy.

A prediction does not know what the gates choose. After them every rank knows all counts, [W, E], and all ranks come to
the same answer by themselves, in three steps:

1. Rows go to copies near their rank. Rows that a rank then has above the mean move along chains of ranks that hold the
   same experts (augmenting paths), as long as that helps. This is exact: no other way to share rows over these copies
   gives a busiest rank with fewer.
2. What is left goes to new copies: the largest piece of any rank's surplus to the rank that it just fills, or else to
   the one with most room. So each copy fills a rank, or takes all of a surplus or of an expert's rows.
3. Where ranks have room for too few copies, full ones that can pass rows on get some (bridges); then step 1 again.

Where it pays, nodes whose rows for an expert would all cross the network get copies before (`replica_search.nearer`).

With room for as many copies as it takes, the busiest rank computes the mean, rounded up. With room for m ≥ 1 copies on
a rank, no copies before, and no rank that owns more than q experts, none computes more than 1 + q/m times that: a rank
that could not be filled has taken m pieces, each as large as any that is left over or larger.

Worked example: ranks 0 and 1 own an expert each, the counts are [[5, 1], [5, 1]] and the mean is 6. Rank 0 would
compute 10, so 4 rows of expert 0 go to a copy on rank 1: 4 of rank 1's own 5, which then stay where they are.
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
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.replica_search import nearer
from fusedmoe.placement.row_sharing import RowSharing, nearest_rows
from fusedmoe.placement.traffic import (
    EXCHANGES,
    PlacementCosts,
    PlacementLoad,
    Transfer,
    counted,
    exchange_s,
    gather,
    layer_s,
    transfers_s,
)

#: How far above the mean the busiest rank may be, as `cheapest_balance` tries it. Few: all ranks wait for the answer.
#: More rows stay near where the levels are higher. Every balance passes the levels above its own on its way down.
LEVELS = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0)
# Of the mean: copies that compute fewer rows may give their places to others.
_USELESS = 1 / 4
# Copies that come after the gate, and a look for them, must save this share of the layer's time.
_WORTH = 0.02
# Levels for which replicas are also searched inside nodes and with less room: at least 2, and 2048 over the entries of
# [W, E] counts, so that planning for many ranks takes little longer.
_TRIES, _SMALL = 2, 2048


@dataclass(frozen=True, eq=False)
class Balance:
    """Copies of experts, and whose rows they compute.

    Attributes:
        placement: the copies that there were, and new ones, some of them in the places of others (`auto_balance`).
        tokens_WE: [W, E] int64, rows of each rank for each expert.
        computed_EV: [E, V] int64, rows of each expert that each rank computes (V = W).
    """

    placement: Placement
    tokens_WE: NDArray[np.int64]
    computed_EV: NDArray[np.int64]
    nodes: Nodes

    @property
    def busiest(self) -> int:
        """Rows that the busiest rank computes."""
        return int(self.computed_EV.sum(axis=0).max())

    def sent_from(self, rank: int) -> NDArray[np.int64]:
        """Returns [E, V] int64: the rows of each expert that a rank sends to each rank, its own included.

        As many as can be stay on their rank, and of the others as many as can be on its node. Which of a rank's rows
        for an expert go to which copy, so that a token has its experts on few ranks, is left to the rank.
        """
        ways, first = self._ways, self.nodes.of(rank) * self.nodes.per_node
        far_sent_EW, far_received_EW = ways.sent_EW - ways.near_sent_EW, ways.received_EW - ways.near_received_EW
        sent_EV = _row_of(rank, far_sent_EW, far_received_EW)
        inside = slice(first, first + self.nodes.per_node)
        sent_EV[:, inside] += _row_of(rank - first, ways.near_sent_EW[:, inside], ways.near_received_EW[:, inside])
        sent_EV[:, rank] += ways.kept_EW[:, rank]
        return sent_EV

    @cached_property
    def load(self) -> PlacementLoad:
        """The rows of ranks and links in one all-to-all."""
        sent_W, received_W, near_sent_W, near_received_W = (counts_EW.sum(axis=0) for counts_EW in self._ways[1:])
        far_sent_W, far_received_W = sent_W - near_sent_W, received_W - near_received_W
        inter, intra = (
            int(max(one_W.max(), other_W.max()))
            for one_W, other_W in ((far_sent_W, far_received_W), (near_sent_W, near_received_W))
        )
        return PlacementLoad(self.computed_EV.sum(axis=0), far_received_W, inter, intra)

    def mean_load(self) -> PlacementLoad:
        """Counts what ranks and links would have if all of them had the mean."""
        ranks = self.nodes.ranks
        near, far = int(self._ways.near_received_EW.sum()), int(self.load.ingress_W.sum())
        work_W, ingress_W = (np.full(ranks, -(-rows // ranks)) for rows in (int(self.computed_EV.sum()), far))
        return PlacementLoad(work_W, ingress_W, int(ingress_W[0]), -(-near // ranks))

    @cached_property
    def _ways(self) -> _Ways:
        wanted_EW, nodes = self.tokens_WE.T, self.nodes
        kept_EW = np.minimum(wanted_EW, self.computed_EV)
        sent_ENR, received_ENR = (
            (counts_EW - kept_EW).reshape(-1, nodes.count, nodes.per_node)
            for counts_EW in (wanted_EW, self.computed_EV)
        )
        inside_EN = np.minimum(sent_ENR.sum(axis=2), received_ENR.sum(axis=2))
        # Few nodes of an expert both send and receive its rows.
        both = inside_EN.nonzero()
        near_sent_ENR, near_received_ENR = np.zeros_like(sent_ENR), np.zeros_like(sent_ENR)
        # Of a node's rows for an expert each rank has an even share on each kind of link: no link is the busiest for
        # its place in the node.
        near_sent_ENR[both] = _share(sent_ENR[both], inside_EN[both])
        near_received_ENR[both] = _share(received_ENR[both], inside_EN[both])
        four = (sent_ENR, received_ENR, near_sent_ENR, near_received_ENR)
        return _Ways(kept_EW, *(counts_ENR.reshape(kept_EW.shape) for counts_ENR in four))


class _Ways(NamedTuple):
    """Rows of each expert, [E, W], that a rank keeps, sends and receives, and of these inside its node."""

    kept_EW: NDArray[np.int64]
    sent_EW: NDArray[np.int64]
    received_EW: NDArray[np.int64]
    near_sent_EW: NDArray[np.int64]
    near_received_EW: NDArray[np.int64]


def balance(placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, level: float = 1.0) -> Balance:
    """Shares rows over copies, and adds the copies that it takes for ranks to have `level` times the mean at most.

    Args:
        placement: owners, and the copies of now; these stay, whether they compute anything or not.
        tokens_WE: [W, E] integers, the rows of each rank for each expert: the same numbers on every rank.
        m: memory, the number of copies that a rank may hold, those of `placement` among them.
        level: 1 or more. Where it is more, fewer copies are made.
    Raises:
        ConfigError: sizes that do not fit together, rows that are no counts or are 2³¹ or more in all, m below 0, a
            level below 1.
    """
    tokens_WE = _checked(placement, tokens_WE, nodes, m)
    if not 1 <= level < np.inf:
        raise ConfigError(f"balance: level = {level} must be 1 or more, and finite")
    sharing = RowSharing(tokens_WE, placement, nodes, m)
    for above in sorted((one for one in LEVELS if one > level), reverse=True):
        most = _most(above, tokens_WE)
        sharing.spread(most)
        sharing.settle(most)
    most = _most(level, tokens_WE)
    if not sharing.spread(most):
        sharing.replicate(most)
    return _balance_of(sharing, tokens_WE, nodes)


def cheapest_balance(
    placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, costs: PlacementCosts, hidden_s: float = 0.0
) -> Balance:
    """Return the balance with which the layer takes the least time (`layer_s` and `exposed_s`).

    The search compares balances of several levels: without new replicas, with new replicas anywhere, inside nodes
    alone, with room for fewer replicas, and on the ranks of nodes that lack an expert. So the result is never dearer
    than `balance` with any of `LEVELS`, with m = 0 or with this m. New replicas may replace underused ones, as in
    `auto_balance`, which has the same arguments.
    """
    walk = _Walk(placement, _checked(placement, tokens_WE, nodes, m), nodes, m)
    as_it_is_s, as_it_is = _cheapest(placement, costs, walk.balances, hidden_s)
    return _with_copies(placement, walk, m, costs, hidden_s, as_it_is_s) or as_it_is


def auto_balance(
    placement: Placement,
    tokens_WE: ArrayLike,
    nodes: Nodes,
    m: int,
    costs: PlacementCosts,
    look_s: float = 0.0,
    hidden_s: float = 0.0,
) -> Balance:
    """Returns the cheapest balance where it saves more than it takes; else rows go to the nearest copies of now.

    It is looked for where ranks and links that all had the mean would save more than `look_s`, and 2% of the layer's
    time. New copies must save that share as well, and what their ways take that nothing hides (`exposed_s`). They may
    take the places of copies that compute next to nothing, if no other copy was made of those.

    Worked example: rank 0 owns expert 0, rank 1 expert 1, with room for one copy each. Expert 1 was predicted, so rank
    0 has a copy of it; but all rows are for expert 0. Rank 1 takes a copy of 0, if half of the rows take longer than
    the copy's way there and its gradients' way back, as far as these are not hidden.

    Args:
        placement: owners, and the copies that were made by one gather (`traffic.gather`) from them.
        look_s: seconds that looking for the cheapest takes, the same on every rank.
        hidden_s: seconds for which the link of copies' gradients has work beside it in the backward pass, between this
            layer's rows and those of the layer before.
        tokens_WE, nodes, m: as for `balance`. m = 0: no copies come, and none goes.
    """
    tokens_WE = _checked(placement, tokens_WE, nodes, m)
    nearest = Balance(placement, tokens_WE, nearest_rows(placement, tokens_WE, nodes), nodes)
    now_s = layer_s(nearest.load, costs)
    if now_s - layer_s(nearest.mean_load(), costs) <= max(look_s, _WORTH * now_s):
        return nearest
    walk = _Walk(placement, tokens_WE, nodes, m)
    as_it_is_s, as_it_is = _cheapest(placement, costs, walk.balances, hidden_s)
    return _with_copies(placement, walk, m, costs, hidden_s, as_it_is_s - _WORTH * now_s) or as_it_is


def exposed_s(before: Placement, balanced: Balance, costs: PlacementCosts, hidden_s: float = 0.0) -> float:
    """Returns the seconds of new copies' ways that nothing hides, of a layer whose copies were those of `before`.

    Copies that take no longer than the layer's rows travel beside them, and count in full. Longer ones are late: they
    follow the rows, and experts that are here compute meanwhile. Gradients have what those before leave of `hidden_s`.

    Worked example: a copy travels for 5 s, the rows for 2, and the rank that gets it computes for 1 s in the forward
    pass without it. Then 4 s count. Its gradients take 5 s as well, of which none count if `hidden_s` is 8, and those
    of the copies before take 3.
    """
    after, nodes = balanced.placement, balanced.nodes
    if after.is_within(before):
        return 0.0
    new_EV = after.holds_EW & ~before.holds_EW
    there_s = transfers_s(gather(before.both(after), after, nodes), nodes, costs, costs.expert_bytes)
    late = there_s > exchange_s(balanced.load, costs) / EXCHANGES
    # Forward is a third of what a row takes.
    here_W = np.where(new_EV, 0, balanced.computed_EV).sum(axis=0)[new_EV.any(axis=0)] * costs.token_s / 3
    if hidden_s:
        hidden_s -= transfers_s(gather(before.sharding, before, nodes), nodes, costs, costs.expert_bytes)
    return there_s - late * min(there_s, float(here_W.min())) + there_s - min(there_s, max(0.0, hidden_s))


def outlasts_rows(costs: PlacementCosts, transfers: Sequence[Transfer], found: Balance) -> bool:
    """Tells whether copies are longer on their way than the rows of one all-to-all."""
    rows_s = exchange_s(found.load, costs) / EXCHANGES
    return transfers_s(transfers, found.nodes, costs, costs.expert_bytes) > rows_s


def _cheapest(
    before: Placement, costs: PlacementCosts, balances: Sequence[Balance], hidden_s: float
) -> tuple[float, Balance]:
    """Returns the first with which the layer takes the least time, after its seconds: of a layer whose copies were
    those of `before` when its gate had chosen."""
    best_s, best = math.inf, balances[0]
    for found in balances:
        # All ranks wait for the answer: what takes longer to count is counted where the rest does not settle it.
        if found.busiest * costs.token_s < best_s:
            found_s = layer_s(found.load, costs)
            if found_s < best_s:
                found_s += exposed_s(before, found, costs, hidden_s)
            if found_s < best_s:
                best_s, best = found_s, found
    return best_s, best


class _Walk:
    """Balances over the replicas of one placement, from the highest level to the lowest.

    Attributes:
        balances: rows on the nearest replicas, then a balance without new replicas for each level that changes it.
        stuck: the shares of rows where a level needs new replicas, by the rows that its busiest rank may compute.
    """

    def __init__(self, start: Placement, tokens_WE: NDArray[np.int64], nodes: Nodes, m: int) -> None:
        self.start, self.tokens_WE, self.nodes = start, tokens_WE, nodes
        sharing = RowSharing(tokens_WE, start, nodes, m)
        self.balances, self.stuck = [_balance_of(sharing, tokens_WE, nodes)], dict[int, RowSharing]()
        for level in reversed(LEVELS):
            most = _most(level, tokens_WE)
            if sharing.work_V.max() > most:
                if not sharing.spread(most):
                    if sharing.free_V.any():
                        self.stuck[most] = sharing.copied()
                    sharing.settle(most)
                self.balances.append(_balance_of(sharing, tokens_WE, nodes))

    @cached_property
    def _crossing_NE(self) -> NDArray[np.int64]:
        """Each node's rows for experts that it lacks, in ascending order."""
        by_node = (self.start.experts, self.nodes.count, self.nodes.per_node)
        from_EN, copies_EN = (of.reshape(by_node).sum(axis=2) for of in (self.tokens_WE.T, self.start.holds_EW))
        return np.sort(np.where(copies_EN > 0, 0, from_EN).T, axis=1)

    def least_crossing(self, room: int) -> float:
        """Return the rows that the busiest rank sends to other nodes at least, with `room` replicas on each rank."""
        room_N = np.maximum(room - self.start.extra_W(), 0).reshape(self.nodes.count, -1).sum(axis=1)
        left_N = (rows_E[: max(0, len(rows_E) - n)].sum() for rows_E, n in zip(self._crossing_NE, room_N, strict=True))
        return float(max(left_N)) / self.nodes.per_node


def _with_copies(
    before: Placement, walk: _Walk, m: int, costs: PlacementCosts, hidden_s: float, below_s: float
) -> Balance | None:
    """Return the cheapest balance with other replicas that takes less than `below_s`, or None.

    `walk`: over the replicas of `before`. The search compares `balance(before, tokens_WE, nodes, m, level)` of all
    `LEVELS`, except where a lower bound excludes it.
    """
    tokens_WE, nodes, best = walk.tokens_WE, walk.nodes, None
    copies_s = costs.expert_bytes / max(costs.inter_bytes_s, costs.intra_bytes_s)

    def offer(start: Placement, offered: Balance) -> float:
        nonlocal below_s, best
        if start != before:
            offered = replace(offered, placement=_filled(offered.placement, before, m))
        offered_s = layer_s(offered.load, costs) + exposed_s(before, offered, costs, hidden_s)
        if offered_s < below_s:
            below_s, best = offered_s, offered
        return offered_s

    def may_win(each: _Walk, most: int, room: int) -> bool:
        """Return whether a balance with a new replica and a rank with `most` rows may be the cheapest."""
        work_s = most * costs.token_s
        rows_s = EXCHANGES * each.least_crossing(room) * costs.token_bytes / costs.inter_bytes_s
        return work_s + rows_s + max(0.0, copies_s - work_s / 3) + max(0.0, copies_s - hidden_s) < below_s

    def replicated(each: _Walk, most: int, room: int, *, inside: bool = False) -> tuple[float, int]:
        """Offer the balance with new replicas; return its seconds, and the replicas of the fullest rank."""
        sharing = each.stuck[most].copied(room)
        sharing.replicate(most, inside=inside)
        return offer(each.start, _balance_of(sharing, tokens_WE, nodes)), sharing.fullest

    tries = max(_TRIES, _SMALL // tokens_WE.size)
    useful = _useful(walk.balances[-1])
    near = nearer(useful, tokens_WE, nodes, m, costs)
    starts = [near] if near != useful else []
    if useful != before and (tries > _TRIES or walk.balances[-1].busiest > _most(1.0, tokens_WE)):
        starts.append(useful)
    walks = [walk, *(_Walk(start, tokens_WE, nodes, m) for start in starts)]
    for each in walks[1:]:
        for balanced in each.balances:
            offer(each.start, balanced)
    runs: list[tuple[float, int, _Walk, int, int]] = []
    for each in walks:
        # From the lowest level, whose busiest rank computes the fewest rows.
        for most in reversed(each.stuck):
            if may_win(each, most, m):
                run_s, room = replicated(each, most, m)
                runs.append((run_s, len(runs), each, most, room))
    for _, _, each, most, room in sorted(runs)[:tries]:
        # Replicas inside nodes change neither a node's rows nor the rows that cross.
        if may_win(each, max(most, each.stuck[most].busiest_node), 0):
            replicated(each, most, m, inside=True)
        # Room for fewer replicas than the fullest rank has got leads to other replicas.
        while (room := room - 1) > 0:
            if may_win(each, most, room):
                _, room = replicated(each, most, room)
    return best


def _useful(exact: Balance) -> Placement:
    """Returns the placement without copies that compute few rows, and that no other copy was made of."""
    placement = exact.placement
    transfers = gather(placement.sharding, placement, exact.nodes)
    passed_on = {(one.expert, one.source) for one in transfers}
    few_EV = exact.computed_EV * exact.nodes.ranks < _USELESS * exact.tokens_WE.sum()
    holds_EW = placement.holds_EW.copy()
    for one in transfers:
        if few_EV[one.expert, one.target] and (one.expert, one.target) not in passed_on:
            holds_EW[one.expert, one.target] = False
    return Placement.holding(placement.owners, holds_EW)


def _filled(placement: Placement, before: Placement, m: int) -> Placement:
    """Returns the placement with the copies of `before` for which ranks have room."""
    holds_EW, room_W = placement.holds_EW.copy(), np.maximum(m, before.extra_W()) - placement.extra_W()
    for expert, rank in np.argwhere(before.holds_EW & ~holds_EW).tolist():
        if room_W[rank] > 0:
            holds_EW[expert, rank] = True
            room_W[rank] -= 1
    return Placement.holding(placement.owners, holds_EW)


def _checked(placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int) -> NDArray[np.int64]:
    tokens_WE = counted("balance", tokens_WE, placement, nodes)
    if tokens_WE.sum(dtype=np.float64) >= 2**31:
        raise ConfigError("balance: tokens must be less than 2³¹ in all")
    if m < 0:
        raise ConfigError(f"balance: m = {m} must be 0 or more")
    return tokens_WE.astype(np.int64)


def _most(level: float, tokens_WE: NDArray[np.int64]) -> int:
    """Returns the rows of the busiest rank at a level."""
    rows, ranks = int(tokens_WE.sum()), len(tokens_WE)
    return max(-(-rows // ranks), int(level * rows / ranks))


def _balance_of(sharing: RowSharing, tokens_WE: NDArray[np.int64], nodes: Nodes) -> Balance:
    return Balance(sharing.placement(), tokens_WE, sharing.computed_VE.T.copy(), nodes)


def _share(counts_XR: NDArray[np.int64], part_X: NDArray[np.int64]) -> NDArray[np.int64]:
    """Splits a part of each node's rows over its ranks in proportion to their counts, in integers."""
    before_XR = counts_XR.cumsum(axis=1)
    before_XR = before_XR * part_X[:, None] // before_XR[:, -1:]
    before_XR[:, 1:] -= before_XR[:, :-1].copy()
    return before_XR


def _row_of(rank: int, sent_EW: NDArray[np.int64], received_EV: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [E, V], the rows from one rank to each where senders and receivers are matched in order, by expert."""
    start_E = sent_EW[:, :rank].sum(axis=1)
    ends_EV = np.minimum(np.maximum(received_EV.cumsum(axis=1) - start_E[:, None], 0), sent_EW[:, rank, None])
    ends_EV[:, 1:] -= ends_EV[:, :-1].copy()
    return ends_EV
