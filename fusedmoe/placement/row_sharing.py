"""Row counts per rank and expert, rebalanced incrementally over owners and replicas (used by `balance`).

Axes: V, the ranks that compute rows; W, the ranks whose tokens they are; E, all experts. A rank holds an expert if it
owns it or has a replica of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from copy import copy
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fusedmoe.placement.placement import NodeLayout, Placement


def nearest_rows(placement: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout) -> NDArray[np.int64]:
    """Return [E, V], the rows of each expert on each rank if every row is computed by the nearest rank that holds it.

    Nearest is the row's own rank, if it holds the expert. Otherwise rows are split evenly over the holders on the row's
    node, or over all holders if the node has none.
    """
    holds_EW = placement.holds_EW
    if not any(placement.replicas):
        return holds_EW * tokens_WE.sum(axis=0)[:, None]
    computed_EW = np.where(holds_EW, tokens_WE.T, 0)
    left_EN = node_layout.by_node(tokens_WE.T - computed_EW).sum(axis=2)
    holds_ENR = node_layout.by_node(holds_EW)
    copies_EN = holds_ENR.sum(axis=2)
    each_EN, rest_EN = np.divmod(left_EN, np.maximum(copies_EN, 1))
    more_ENR = holds_ENR.cumsum(axis=2) <= rest_EN[:, :, None]
    computed_EW += (holds_ENR * (each_EN[:, :, None] + more_ENR)).reshape(computed_EW.shape)
    each_E, rest_E = np.divmod(np.where(copies_EN > 0, 0, left_EN).sum(axis=1), copies_EN.sum(axis=1))
    return computed_EW + holds_EW * (each_E[:, None] + (holds_EW.cumsum(axis=1) <= rest_E[:, None]))


class RowSharing:
    """State of the search: how the rows of each expert are shared among the ranks that hold it.

    Args:
        before: the placement at the start.
        m: maximum number of replicas per rank.
    Attributes:
        holds_VE: bool, whether a rank holds an expert.
        computed_VE: rows of an expert that a rank computes.
        work_V: rows that a rank computes, summed over experts.
        free_slots_V: number of replicas that can be added to a rank.
        can_move_VV: bool [V, V], whether the first rank computes rows of an expert that the second holds.
    """

    def __init__(self, tokens_WE: NDArray[np.int64], before: Placement, node_layout: NodeLayout, m: int) -> None:
        self.before, self.holds_VE = before, before.holds_EW.T.copy()
        self.computed_VE = nearest_rows(before, tokens_WE, node_layout).T.copy()
        self.work_V = self.computed_VE.sum(axis=1)
        self.free_slots_V = np.maximum(m - before.extra_W(), 0)
        self._node_V = node_layout.node_W
        self._is_same_node_VV = self._node_V[:, None] == self._node_V
        held_EV = self.holds_VE.T.astype(np.float32)
        self.can_move_VV = (self.computed_VE > 0).astype(np.float32) @ held_EV > 0

    def copy(self, max_replicas: int | None = None) -> RowSharing:
        """Return an independent copy. `max_replicas`: another maximum number of replicas per rank."""
        made = copy(self)
        for name in ("computed_VE", "holds_VE", "work_V", "free_slots_V", "can_move_VV"):
            setattr(made, name, getattr(self, name).copy())
        if max_replicas is not None:
            made.free_slots_V = np.maximum(max_replicas - self.before.extra_W(), 0)
        return made

    @property
    def max_new_rank_replicas(self) -> int:
        """The largest number of replicas on a rank with a new replica; 0 without new replicas."""
        new_V = self.holds_VE.sum(axis=1) - self.before.holds_EW.sum(axis=0)
        return int((self.before.extra_W() + new_V)[new_V > 0].max(initial=0))

    @property
    def busiest_node_mean_rows(self) -> int:
        return int(np.bincount(self._node_V, self.work_V).max()) // int(np.count_nonzero(self._node_V == 0))

    def placement(self) -> Placement:
        if (self.holds_VE == self.before.holds_EW.T).all():
            return self.before
        return Placement.holding(self.before.owners, self.holds_VE.T)

    def reach_limit(self, row_limit: int) -> bool:
        """Move rows between holders, first inside nodes, until no rank exceeds `row_limit`; True on success."""
        self.lower_busiest_rank(row_limit, self._is_same_node_VV)
        return self.lower_busiest_rank(row_limit) <= row_limit

    def reach_lowest_limit(self, row_limit: int) -> None:
        """Move rows between holders until no rank exceeds `row_limit`, or the lowest maximum that is possible."""
        while (least := self.lower_busiest_rank(row_limit)) > row_limit:
            row_limit = least

    def replicate(self, row_limit: int, *, inside: bool = False) -> None:
        """Add replicas until no rank exceeds `row_limit` rows, or the lowest maximum that is possible.

        `inside`: add replicas only on nodes that hold the expert, which avoids inter-node transfers.
        """
        self.add_replicas(row_limit, inside=inside)
        while (least := self.lower_busiest_rank(row_limit)) > row_limit:
            if inside or not self._add_relay_replica(row_limit):
                row_limit = least

    def lower_busiest_rank(self, row_limit: int, among_VV: NDArray[np.bool_] | None = None) -> int:
        """Move rows between holders by augmenting paths until no rank computes more than `row_limit`.

        A path moves rows from an overloaded rank through other ranks to a rank below the limit. `among_VV`: bool, pairs
        of ranks between which rows may move; None: all pairs.

        Returns `row_limit` on success; otherwise a lower bound, above it, of the busiest rank's rows.
        """
        work_V = self.work_V
        if work_V.max() <= row_limit:
            return row_limit
        can_move_VV = self.can_move_VV if among_VV is None else self.can_move_VV & among_VV
        # For few ranks, `count_nonzero` and boolean products are several times faster than `any`.
        while np.count_nonzero(over_V := work_V > row_limit):
            # Breadth-first search from the overloaded ranks to the nearest rank with room.
            layers, seen_V, room_V = [over_V], over_V.copy(), work_V < row_limit
            while np.count_nonzero(layers[-1]) and not np.count_nonzero(layers[-1] & room_V):
                layers.append(layers[-1] @ can_move_VV & ~seen_V)
                seen_V |= layers[-1]
            if not np.count_nonzero(layers[-1]):
                # No other rank holds these experts, so a visited rank computes at least the mean.
                return -(-int(work_V[seen_V].sum()) // int(seen_V.sum()))
            chain = [int(np.where(layers[-1], row_limit - work_V, -1).argmax())]
            for before_V in layers[-2::-1]:
                ranks = (before_V & can_move_VV[:, chain[0]]).nonzero()[0]
                movable = self.computed_VE[ranks] @ self.holds_VE[chain[0]]
                chain.insert(0, int(ranks[movable.argmax()]))
            self._move(chain, row_limit)
            for rank in chain:
                self.can_move_VV[rank] = self.holds_VE[:, self.computed_VE[rank] > 0].any(axis=1)
                if among_VV is not None:
                    can_move_VV[rank] = self.can_move_VV[rank] & among_VV[rank]
        return row_limit

    def _move(self, chain: list[int], row_limit: int) -> None:
        hops = [(giver, taker, self.computed_VE[giver] * self.holds_VE[taker]) for giver, taker in pairwise(chain)]
        first, last = chain[0], chain[-1]
        surplus, room = self.work_V[first] - row_limit, row_limit - self.work_V[last]
        rows = min(surplus, room, *(movable_E.sum() for _, _, movable_E in hops))
        for giver, taker, movable_E in hops:
            # Largest first: few experts change.
            order = (-movable_E).argsort(kind="stable")
            sorted_E = movable_E[order]
            before_E = sorted_E.cumsum() - sorted_E
            part_E = np.zeros_like(movable_E)
            part_E[order] = np.minimum(np.maximum(rows - before_E, 0), sorted_E)
            self.computed_VE[giver] -= part_E
            self.computed_VE[taker] += part_E
        self.work_V[first] -= rows
        self.work_V[last] += rows

    def _add_replica(self, expert: int, rank: int) -> None:
        self.free_slots_V[rank] -= not self.holds_VE[rank, expert]
        self.holds_VE[rank, expert] = True
        self.can_move_VV[self.computed_VE[:, expert] > 0, rank] = True

    def add_replicas(self, row_limit: int, *, inside: bool = False) -> None:
        """Move surplus rows of ranks above `row_limit` to new replicas. `inside`: as for `replicate`."""
        work_V, group_V = self.work_V, (self._node_V if inside else np.zeros_like(self._node_V)).tolist()
        room_of: dict[int, list[tuple[int, int]]] = {group: [] for group in group_V}
        for rank in np.flatnonzero((work_V < row_limit) & (self.free_slots_V > 0)).tolist():
            insort(room_of[group_V[rank]], (row_limit - int(work_V[rank]), rank))
        # Per overloaded rank: (rows, expert), ascending.
        rows_of = {}
        for rank in np.flatnonzero(work_V > row_limit).tolist():
            experts_R = np.flatnonzero(self.computed_VE[rank])
            rows_of[rank] = sorted(zip(self.computed_VE[rank, experts_R].tolist(), experts_R.tolist(), strict=True))
        pieces = [(-min(int(work_V[rank]) - row_limit, of[-1][0]), rank) for rank, of in rows_of.items()]
        heapq.heapify(pieces)  # the largest first
        while pieces:
            negative, source = heapq.heappop(pieces)
            room = room_of[group_V[source]]
            if not room:
                continue
            # Best fit, see step 2 of `balance`.
            space, target = room.pop(min(bisect_left(room, (-negative, -1)), len(room) - 1))
            moved = min(-negative, space)
            # The smallest expert with enough rows: larger ones may fill another rank alone.
            rows, expert = rows_of[source].pop(bisect_left(rows_of[source], (moved, -1)))
            insort(rows_of[source], (rows - moved, expert))
            self.computed_VE[source, expert] -= moved
            self.computed_VE[target, expert] += moved
            work_V[source] -= moved
            work_V[target] += moved
            self._add_replica(expert, target)
            self.can_move_VV[target] |= self.holds_VE[:, expert]
            if work_V[source] > row_limit:
                heapq.heappush(pieces, (-min(int(work_V[source]) - row_limit, rows_of[source][-1][0]), source))
            if space > moved and self.free_slots_V[target] > 0:
                insort(room, (space - moved, target))

    def _add_relay_replica(self, row_limit: int) -> bool:
        """Add a replica of an overloaded rank's expert to a rank that can take its rows, directly or by passing on.

        A rank at the limit passes other rows on to ranks below the limit. Returns False if no rank can take rows.
        """
        can_pass_on_V = self.work_V < row_limit
        while (more_V := self.can_move_VV[:, can_pass_on_V].any(axis=1) & ~can_pass_on_V).any():
            can_pass_on_V |= more_V
        # Rows that a rank can accept: its room, plus rows of experts that another such rank holds.
        shared_E = self.holds_VE[can_pass_on_V].sum(axis=0) > 1
        acceptable_V = self.computed_VE @ shared_E + np.maximum(row_limit - self.work_V, 0)
        acceptable_V *= can_pass_on_V & (self.free_slots_V > 0)
        target = int(acceptable_V.argmax())
        if acceptable_V[target] == 0:
            return False
        pieces_VE = np.minimum(self.computed_VE, np.maximum(self.work_V - row_limit, 0)[:, None])
        self._add_replica(int(pieces_VE.max(axis=0).argmax()), target)
        return True
