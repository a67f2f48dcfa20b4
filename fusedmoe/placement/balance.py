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

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.replica_search import nearer
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
#: More rows stay near where the levels are higher.
LEVELS = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0)
# Of the mean: copies that compute fewer rows may give their places to others.
_USELESS = 1 / 4
# Copies that come after the gate, and a look for them, must save this share of the layer's time.
_WORTH = 0.02


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
        sent_EV = _row_of(rank, ways.far_sent_EW, ways.far_received_EW)
        inside = slice(first, first + self.nodes.per_node)
        sent_EV[:, inside] += _row_of(rank - first, ways.near_sent_EW[:, inside], ways.near_received_EW[:, inside])
        sent_EV[:, rank] += ways.kept_EW[:, rank]
        return sent_EV

    @cached_property
    def load(self) -> PlacementLoad:
        """The rows of ranks and links in one all-to-all."""
        ways = self._ways
        near, far = (
            [int(ways_EW.sum(axis=0).max()) for ways_EW in both]
            for both in ((ways.near_sent_EW, ways.near_received_EW), (ways.far_sent_EW, ways.far_received_EW))
        )
        return PlacementLoad(self.computed_EV.sum(axis=0), ways.far_received_EW.sum(axis=0), max(far), max(near))

    def mean_load(self) -> PlacementLoad:
        """Counts what ranks and links would have if all of them had the mean."""
        ways, ranks = self._ways, self.nodes.ranks
        work_W, ingress_W = (
            np.full(ranks, -(-int(of.sum()) // ranks)) for of in (self.computed_EV, ways.far_received_EW)
        )
        return PlacementLoad(work_W, ingress_W, int(ingress_W[0]), -(-int(ways.near_received_EW.sum()) // ranks))

    @cached_property
    def _ways(self) -> _Ways:
        wanted_EW, nodes = self.tokens_WE.T, self.nodes
        kept_EW = np.minimum(wanted_EW, self.computed_EV)
        sent_ENR, received_ENR = (
            (counts_EW - kept_EW).reshape(-1, nodes.count, nodes.per_node)
            for counts_EW in (wanted_EW, self.computed_EV)
        )
        inside_EN = np.minimum(sent_ENR.sum(axis=2), received_ENR.sum(axis=2))
        # Of a node's rows for an expert each rank has an even share on each kind of link: no link is the busiest for
        # its place in the node.
        near_sent_EW, near_received_EW = (
            _share(counts, inside_EN).reshape(kept_EW.shape) for counts in (sent_ENR, received_ENR)
        )
        far_sent_EW, far_received_EW = wanted_EW - kept_EW - near_sent_EW, self.computed_EV - kept_EW - near_received_EW
        return _Ways(kept_EW, near_sent_EW, near_received_EW, far_sent_EW, far_received_EW)


@dataclass(frozen=True, eq=False)
class _Ways:
    """Rows of each expert, [E, W], that a rank keeps, and sends and receives inside its node and beyond it."""

    kept_EW: NDArray[np.int64]
    near_sent_EW: NDArray[np.int64]
    near_received_EW: NDArray[np.int64]
    far_sent_EW: NDArray[np.int64]
    far_received_EW: NDArray[np.int64]


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
    return _balances(placement, tokens_WE, nodes, m, (level,))[0]


def cheapest_balance(
    placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, costs: PlacementCosts, hidden_s: float = 0.0
) -> Balance:
    """Returns the balance with which the layer takes the least time: several levels are tried, without new copies and
    with them.

    New copies' ways count where nothing hides them (`exposed_s`); these may take the places of copies that compute next
    to nothing, as in `auto_balance`, whose arguments these are.
    """
    tried = _balances(placement, tokens_WE, nodes, 0, (*LEVELS, nodes.ranks))
    tried += _with_copies(placement, _useful(tried[-1]), tried[-1], m, costs)
    return _cheapest(placement, costs, tried, hidden_s)[1]


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
    nearest = _balances(placement, tokens_WE, nodes, 0, (nodes.ranks,))[0]
    now_s = layer_s(nearest.load, costs)
    if now_s - layer_s(nearest.mean_load(), costs) <= max(look_s, _WORTH * now_s):
        return nearest
    tried = _balances(placement, tokens_WE, nodes, 0, (*LEVELS, nodes.ranks))
    as_it_is_s, as_it_is = _cheapest(placement, costs, tried, hidden_s)
    exact = tried[-1]
    copied = _with_copies(placement, _useful(exact), exact, m, costs) if m else []
    if copied:
        cheapest_s, cheapest = _cheapest(placement, costs, copied, hidden_s)
        if cheapest_s < as_it_is_s - _WORTH * now_s:
            return cheapest
    return as_it_is


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
    more = gather(before.both(after), after, nodes)
    there_s, late = transfers_s(more, nodes, costs, costs.expert_bytes), outlasts_rows(costs, more, balanced)
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


def _with_copies(
    before: Placement, placement: Placement, exact: Balance, m: int, costs: PlacementCosts
) -> list[Balance]:
    """Returns balances with new copies beside those of `placement`, by level: with copies for ranks that compute more
    than the mean alone, and with copies that keep rows on their node before those. Places of `before` that they leave
    free keep their copies. `exact`: the balance over the copies of `before`."""
    rows, tokens_WE, nodes = int(exact.tokens_WE.sum()), exact.tokens_WE, exact.nodes
    if not (placement.extra_W() < m).any():
        return []
    starts = [placement] if exact.busiest * nodes.ranks >= rows + nodes.ranks else []
    near = nearer(placement, tokens_WE, nodes, m, costs)
    starts += [near] if near != placement else []
    balances = []
    for start in starts:
        sharing = _Sharing(_nearest(start, tokens_WE, nodes), start, m)
        uneven = int(sharing.work_V.max()) * nodes.ranks / rows
        # Each from the beginning: the small copies that a lower level adds to a higher one's take the room of others.
        for level in (*(level for level in LEVELS if level < uneven), nodes.ranks):
            balances += _levelled(sharing.copied(), tokens_WE, nodes, (level,))
    if placement == before:
        return balances
    return [replace(one, placement=_filled(one.placement, before, m)) for one in balances]


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


def _balances(
    placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, levels: Sequence[float]
) -> list[Balance]:
    """Returns a balance for each level, from the highest to the lowest; each goes on where the one before ended. Levels
    that change nothing are left out."""
    tokens_WE = counted("balance", tokens_WE, placement, nodes)
    if tokens_WE.sum(dtype=np.float64) >= 2**31:
        raise ConfigError("balance: tokens must be less than 2³¹ in all")
    if m < 0 or not 1 <= min(levels) <= max(levels) < np.inf:
        raise ConfigError(f"balance: m = {m} must be 0 or more, and levels {levels} 1 or more, and finite")
    tokens_WE = tokens_WE.astype(np.int64)
    return _levelled(_Sharing(_nearest(placement, tokens_WE, nodes), placement, m), tokens_WE, nodes, levels)


def _levelled(sharing: _Sharing, tokens_WE: NDArray[np.int64], nodes: Nodes, levels: Sequence[float]) -> list[Balance]:
    rows, inside = int(tokens_WE.sum()), np.arange(nodes.ranks) // nodes.per_node
    balances: list[Balance] = []
    for level in sorted(levels, reverse=True):
        most = max(-(-rows // nodes.ranks), int(level * rows / nodes.ranks))
        if balances and sharing.work_V.max() <= most:
            continue
        # Inside nodes first: what moves there crosses no slow link.
        sharing.even_out(most, inside[:, None] == inside)
        if sharing.even_out(most) > most:
            sharing.copy(most)
            while (least := sharing.even_out(most)) > most:
                if not sharing.bridge(most):
                    most = least
        balances.append(Balance(sharing.placement(), tokens_WE, sharing.computed_VE.T.copy(), nodes))
    return balances


def _nearest(placement: Placement, tokens_WE: NDArray[np.int64], nodes: Nodes) -> NDArray[np.int64]:
    """Returns [E, V]: rows on their own rank, else evenly over the copies on their node, else over all."""
    holds_EW = placement.holds_EW
    computed_EW = np.where(holds_EW, tokens_WE.T, 0)
    left_EN = (tokens_WE.T - computed_EW).reshape(-1, nodes.count, nodes.per_node).sum(axis=2)
    holds_ENR = holds_EW.reshape(-1, nodes.count, nodes.per_node)
    copies_EN = holds_ENR.sum(axis=2)
    each_EN, rest_EN = np.divmod(left_EN, np.maximum(copies_EN, 1))
    more_ENR = holds_ENR.cumsum(axis=2) <= rest_EN[:, :, None]
    computed_EW += (holds_ENR * (each_EN[:, :, None] + more_ENR)).reshape(computed_EW.shape)
    each_E, rest_E = np.divmod(np.where(copies_EN > 0, 0, left_EN).sum(axis=1), copies_EN.sum(axis=1))
    return computed_EW + holds_EW * (each_E[:, None] + (holds_EW.cumsum(axis=1) <= rest_E[:, None]))


class _Sharing:
    """Rows of experts that ranks compute, [V, E], and which ranks hold which experts, changed step by step."""

    def __init__(self, computed_EV: NDArray[np.int64], before: Placement, m: int) -> None:
        self.before, self.computed_VE, self.holds_VE = before, computed_EV.T.copy(), before.holds_EW.T.copy()
        self.work_V = self.computed_VE.sum(axis=1)
        self.free_V = np.maximum(m - before.extra_W(), 0)
        # [V, V]: a rank can give rows to another, which holds an expert of which it has some.
        held_EV = self.holds_VE.T.astype(np.float32)
        self.gives_VV = (self.computed_VE > 0).astype(np.float32) @ held_EV > 0

    def copied(self) -> _Sharing:
        """Returns one that is changed by itself."""
        made = copy(self)
        for name in ("computed_VE", "holds_VE", "work_V", "free_V", "gives_VV"):
            setattr(made, name, getattr(self, name).copy())
        return made

    def placement(self) -> Placement:
        """Returns who holds what now."""
        if (self.holds_VE == self.before.holds_EW.T).all():
            return self.before
        return Placement.holding(self.before.owners, self.holds_VE.T)

    def even_out(self, most: int, among_VV: NDArray[np.bool_] | None = None) -> int:
        """Moves rows between copies, of which it adds none, until no rank computes more than `most`.

        `among_VV`: from which rank to which they may move. Returns `most`; or, where that cannot be, what the busiest
        rank has at least however rows are shared.
        """
        work_V = self.work_V
        if work_V.max() <= most:
            return most
        gives_VV = self.gives_VV if among_VV is None else self.gives_VV & among_VV
        # `count_nonzero` and the product of booleans: of few ranks `any` takes several times as long.
        while np.count_nonzero(over_V := work_V > most):
            # Ranks in the order of their distance from those that have too much, until one has room.
            layers, seen_V, room_V = [over_V], over_V.copy(), work_V < most
            while np.count_nonzero(layers[-1]) and not np.count_nonzero(layers[-1] & room_V):
                layers.append(layers[-1] @ gives_VV & ~seen_V)
                seen_V |= layers[-1]
            if not np.count_nonzero(layers[-1]):
                # What the ranks seen have is of experts that nobody else holds: their mean is what one has at least.
                return -(-int(work_V[seen_V].sum()) // int(seen_V.sum()))
            chain = [int(np.where(layers[-1], most - work_V, -1).argmax())]
            for before_V in layers[-2::-1]:
                ranks = (before_V & gives_VV[:, chain[0]]).nonzero()[0]
                movable = self.computed_VE[ranks] @ self.holds_VE[chain[0]]
                chain.insert(0, int(ranks[movable.argmax()]))
            self._move(chain, most)
            for rank in chain:
                self.gives_VV[rank] = self.holds_VE[:, self.computed_VE[rank] > 0].any(axis=1)
                if among_VV is not None:
                    gives_VV[rank] = self.gives_VV[rank] & among_VV[rank]
        return most

    def _move(self, chain: list[int], most: int) -> None:
        """Moves as many rows as can be along a chain of ranks, each of which gives the next one others than it gets."""
        hops = [(giver, taker, self.computed_VE[giver] * self.holds_VE[taker]) for giver, taker in pairwise(chain)]
        first, last = chain[0], chain[-1]
        rows = min(self.work_V[first] - most, most - self.work_V[last], *(movable_E.sum() for _, _, movable_E in hops))
        for giver, taker, movable_E in hops:
            # The largest first: so few experts change.
            order = (-movable_E).argsort(kind="stable")
            sorted_E = movable_E[order]
            before_E = sorted_E.cumsum() - sorted_E
            part_E = np.zeros_like(movable_E)
            part_E[order] = np.minimum(np.maximum(rows - before_E, 0), sorted_E)
            self.computed_VE[giver] -= part_E
            self.computed_VE[taker] += part_E
        self.work_V[first] -= rows
        self.work_V[last] += rows

    def _add(self, expert: int, rank: int) -> None:
        """Adds a copy, if the rank has none."""
        self.free_V[rank] -= not self.holds_VE[rank, expert]
        self.holds_VE[rank, expert] = True
        self.gives_VV[self.computed_VE[:, expert] > 0, rank] = True

    def copy(self, most: int) -> None:
        """Moves what ranks have above `most` to new copies, as far as ranks have room for rows and copies."""
        work_V = self.work_V
        open_V = (work_V < most) & (self.free_V > 0)
        room = sorted((most - int(work_V[rank]), rank) for rank in np.flatnonzero(open_V).tolist())
        # By rank: the experts that it computes, by their rows.
        rows_of = {}
        for rank in np.flatnonzero(work_V > most).tolist():
            experts_R = np.flatnonzero(self.computed_VE[rank])
            rows_of[rank] = sorted(zip(self.computed_VE[rank, experts_R].tolist(), experts_R.tolist(), strict=True))
        pieces = [(-min(int(work_V[rank]) - most, of[-1][0]), rank) for rank, of in rows_of.items()]
        heapq.heapify(pieces)  # the largest first
        while pieces and room:
            negative, source = heapq.heappop(pieces)
            # The rank that the piece just fills, or leaves least room on; else the one that takes most of it.
            space, target = room.pop(min(bisect_left(room, (-negative, -1)), len(room) - 1))
            moved = min(-negative, space)
            # The expert with the fewest rows that are enough: larger ones may fill another rank alone.
            rows, expert = rows_of[source].pop(bisect_left(rows_of[source], (moved, -1)))
            insort(rows_of[source], (rows - moved, expert))
            self.computed_VE[source, expert] -= moved
            self.computed_VE[target, expert] += moved
            work_V[source] -= moved
            work_V[target] += moved
            self._add(expert, target)
            self.gives_VV[target] |= self.holds_VE[:, expert]
            if work_V[source] > most:
                heapq.heappush(pieces, (-min(int(work_V[source]) - most, rows_of[source][-1][0]), source))
            if space > moved and self.free_V[target] > 0:
                insort(room, (space - moved, target))

    def bridge(self, most: int) -> bool:
        """Adds a copy on a full rank that can pass rows on to one with room; returns False where no rank can."""
        passes_V = self.work_V < most
        while (more_V := self.gives_VV[:, passes_V].any(axis=1) & ~passes_V).any():
            passes_V |= more_V
        # What a rank can pass on: rows of experts that another one of these holds as well, and what it has room for.
        shared_E = self.holds_VE[passes_V].sum(axis=0) > 1
        takes_V = self.computed_VE @ shared_E + np.maximum(most - self.work_V, 0)
        takes_V *= passes_V & (self.free_V > 0)
        target = int(takes_V.argmax())
        if takes_V[target] == 0:
            return False
        pieces_VE = np.minimum(self.computed_VE, np.maximum(self.work_V - most, 0)[:, None])
        self._add(int(pieces_VE.max(axis=0).argmax()), target)
        return True


def _share(counts_ENR: NDArray[np.int64], part_EN: NDArray[np.int64]) -> NDArray[np.int64]:
    """Splits a part of each node's rows over its ranks in proportion to their counts, in integers."""
    before_ENR = counts_ENR.cumsum(axis=2)
    all_EN = np.maximum(before_ENR[:, :, -1], 1)
    before_ENR = before_ENR * part_EN[:, :, None] // all_EN[:, :, None]
    before_ENR[:, :, 1:] -= before_ENR[:, :, :-1].copy()
    return before_ENR


def _row_of(rank: int, sent_EW: NDArray[np.int64], received_EV: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [E, V], the rows from one rank to each where senders and receivers are matched in order, by expert."""
    start_E = sent_EW[:, :rank].sum(axis=1)
    ends_EV = np.minimum(np.maximum(received_EV.cumsum(axis=1) - start_E[:, None], 0), sent_EW[:, rank, None])
    ends_EV[:, 1:] -= ends_EV[:, :-1].copy()
    return ends_EV
