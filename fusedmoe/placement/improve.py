"""Local search behind Algorithm 1: replicas come, go and change ranks as long as that makes a layer faster.

Algorithm 1 gives each expert a share of the slots and looks at one expert after the other; where slots are few, shares
are coarse, and what one expert leaves uneven the next ones may not mend. It is a good place to start from.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.price import EXCHANGES, Costs

#: What the unevenness of all ranks counts beside the busiest one: of equally fast placements it leads to the more even.
_EVENNESS = 0.1
#: Steps from one start; from Algorithm 1, 32 experts on 16 ranks take fewer than 10.
_STEPS = 60
#: So many slots are few: then the search starts from no replicas as well. With more, Algorithm 1 is as good a start.
_FEW_SLOTS = 16
#: A step that gains a smaller share is not taken.
_GAIN = 1e-3


def improve(
    placement: Placement, start: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int, costs: Costs
) -> Placement:
    """`start`, or a placement within the same limits that makes the layer faster at the expected load.

    A step gives a replica up, makes one, does both (on one rank, or where another one has a free slot), or lets two
    replicas change places: whichever lowers the time of the layer most, until none does. Steps are taken from `start`,
    where there are few slots from `placement` as well, and the fastest of all is taken. The time is that of
    `price.layer_s` for ranks that all have as many tokens for an expert, where these divide evenly and travel inside a
    node in no time.

    Args:
        placement: what stays: a sharding, or one with replicas.
        start: what Algorithm 1 makes of it.
        load_E, nodes, t, m: as there.
    Returns:
        A placement that has all of `placement`, and replicas of `t` other experts at most, with which no rank has more
        than `m`, unless it had before. The same numbers give the same one.
    """
    search = _Search(placement, np.asarray(load_E, dtype=np.float64), nodes, t, m, costs)
    if search.compute_s == search.exchange_s == 0:
        return start  # nothing is known of the time
    starts = (start, placement) if search.room_W.sum() <= _FEW_SLOTS else (start,)
    ends = [search.descend(one.holds_EW) for one in starts]
    return Placement.holding(placement.owners, min((start.holds_EW, *ends), key=search.layer_s))


class _Search:
    """Axis C is what counts of a placement, in tokens of one all-to-all: [W] what each rank computes, [W] what it
    receives from other nodes and [N] what each rank of a node sends there.

    A change of one expert is (expert, from, to): the rank that gives it up and the one that gets it, W where none does.
    """

    def __init__(
        self, placement: Placement, load_E: NDArray[np.float64], nodes: Nodes, t: int, m: int, costs: Costs
    ) -> None:
        self.fixed_EW, self.nodes, self.t = placement.holds_EW, nodes, t
        self.room_W = np.maximum(m - placement.extra_W(), 0)
        self.each_E = load_E / nodes.ranks
        self.compute_s, self.exchange_s = costs.token_s, EXCHANGES * costs.token_bytes / costs.inter_bytes_s
        self.even = _EVENNESS / max(float(load_E.sum()), 1e-300)

    def layer_s(self, holds_EW: NDArray[np.bool_]) -> float:
        """Seconds of the layer."""
        total_C = self.counts(holds_EW, self.each_E).sum(axis=0)
        ranks = self.nodes.ranks
        return float(self.compute_s * total_C[:ranks].max() + self.exchange_s * total_C[ranks:].max())

    def descend(self, holds_EW: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Who holds what after the last step."""
        holds_EW = holds_EW.copy()
        ranks = self.nodes.ranks
        only_VW = np.eye(ranks + 1, ranks, dtype=np.bool_)  # the last row is of no rank
        counts_EC = self.counts(holds_EW, self.each_E)
        change_EVVC = np.zeros((len(holds_EW), ranks + 1, ranks + 1, counts_EC.shape[1]))
        stale = np.flatnonzero(self.each_E > 0)
        best = float(self.price(counts_EC.sum(axis=0)))
        for _ in range(_STEPS):
            counts_EC[stale] = self.counts(holds_EW[stale], self.each_E[stale])
            goes_AV = np.pad(holds_EW[stale] & ~self.fixed_EW[stale], ((0, 0), (0, 1)), constant_values=True)
            place, source = np.nonzero(goes_AV)
            expert = stale[place]
            sets_AVW = (holds_EW[expert] & ~only_VW[source])[:, None] | only_VW
            change_EVVC[expert, source] = self.counts(sets_AVW, self.each_E[expert, None]) - counts_EC[expert, None]
            total_C = counts_EC.sum(axis=0)
            price, changes = min(self.steps(holds_EW, total_C, change_EVVC), key=lambda step: step[0])
            if price >= best * (1 - _GAIN):
                break
            best = price
            for one, gone, new in changes:
                holds_EW[one] = (holds_EW[one] & ~only_VW[gone]) | only_VW[new]
            stale = np.array([one for one, _, _ in changes])
        return holds_EW

    def steps(
        self, holds_EW: NDArray[np.bool_], total_C: NDArray[np.float64], change_EVVC: NDArray[np.float64]
    ) -> Iterator[tuple[float, list[tuple[int, int, int]]]]:
        """The best step of each kind: the price after it, and its changes. Only those that relieve a busiest rank."""
        ranks, none = self.nodes.ranks, self.nodes.ranks
        extra_EW, lacks_EW = holds_EW & ~self.fixed_EW, ~holds_EW & (self.each_E > 0)[:, None]
        copies_E = extra_EW.sum(axis=1)
        may_E = (copies_E > 0) | ((copies_E > 0).sum() < self.t)
        free_W = extra_EW.sum(axis=0) < self.room_W
        busiest = [int(total_C[:ranks].argmax()), ranks + int(total_C[ranks:].argmax())]
        relief_2EVV = [change_EVVC[..., column] for column in busiest]

        # A replica goes, comes, or changes its rank.
        goes_EV, comes_EV = (np.pad(of, ((0, 0), (0, 1)), constant_values=True) for of in (extra_EW, lacks_EW & free_W))
        ok_EVV = goes_EV[:, :, None] & comes_EV[:, None]
        ok_EVV[:, none] &= may_E[:, None]
        expert, source, target = np.nonzero(ok_EVV & _relieves(relief_2EVV))
        yield self.best(total_C, change_EVVC[expert, source, target], [(expert, source, target)])

        # One expert's goes, another's comes.
        gone, at = np.nonzero(extra_EW)
        new, to = np.nonzero(lacks_EW)
        ok_AB = (gone[:, None] != new) & ((at[:, None] == to) | free_W[to])
        ok_AB &= may_E[new] | (copies_E[gone] == 1)[:, None]
        relief_2AB = [of[gone, at, none][:, None] + of[new, none, to] for of in relief_2EVV]
        a, b = np.nonzero(ok_AB & _relieves(relief_2AB))
        nowhere_A, nowhere_B = np.full_like(a, none), np.full_like(b, none)
        changes_AC = change_EVVC[gone[a], at[a], none] + change_EVVC[new[b], none, to[b]]
        yield self.best(total_C, changes_AC, [(gone[a], at[a], nowhere_A), (new[b], nowhere_B, to[b])])

        # Two change places.
        ok_AA = lacks_EW[gone[:, None], at]
        relief_2AA = [of + of.T for of in (column[gone[:, None], at[:, None], at] for column in relief_2EVV)]
        a, b = np.nonzero(np.triu(ok_AA & ok_AA.T) & _relieves(relief_2AA))
        changes_AC = change_EVVC[gone[a], at[a], at[b]] + change_EVVC[gone[b], at[b], at[a]]
        yield self.best(total_C, changes_AC, [(gone[a], at[a], at[b]), (gone[b], at[b], at[a])])

    def best(
        self,
        total_C: NDArray[np.float64],
        changes_AC: NDArray[np.float64],
        moves: list[tuple[NDArray[np.int64], ...]],
    ) -> tuple[float, list[tuple[int, int, int]]]:
        """The cheapest of these steps."""
        if not len(changes_AC):
            return np.inf, []
        price_A = self.price(total_C + changes_AC)
        place = int(price_A.argmin())
        return float(price_A[place]), [(int(e[place]), int(a[place]), int(b[place])) for e, a, b in moves]

    def counts(self, holds_XW: NDArray[np.bool_], each_X: ArrayLike) -> NDArray[np.float64]:
        """[..., C] of experts that these ranks, [..., W], hold and each rank has so many tokens for."""
        nodes = self.nodes
        each_X = np.asarray(each_X, dtype=np.float64)
        copies_XN = holds_XW.reshape(*holds_XW.shape[:-1], nodes.count, nodes.per_node).sum(axis=-1)
        lacks_XN = copies_XN == 0
        received_X = each_X * nodes.per_node * lacks_XN.sum(axis=-1) / copies_XN.sum(axis=-1)
        inside_XN = each_X[..., None] * nodes.per_node / np.maximum(copies_XN, 1)
        received_XW = holds_XW * received_X[..., None]
        work_XW = holds_XW * np.repeat(inside_XN, nodes.per_node, axis=-1) + received_XW
        return np.concatenate([work_XW, received_XW, lacks_XN * each_X[..., None]], axis=-1)

    def price(self, counts_XC: NDArray[np.float64]) -> NDArray[np.float64]:
        """What steps lower: the layer's seconds, and some for how uneven all ranks are."""
        work_XW, inter_XC = counts_XC[..., : self.nodes.ranks], counts_XC[..., self.nodes.ranks :]
        total: NDArray[np.float64] = sum(
            seconds * (of.max(axis=-1) + self.even * np.einsum("...c,...c->...", of, of))
            for seconds, of in ((self.compute_s, work_XW), (self.exchange_s, inter_XC))
        )
        return total


def _relieves(changes: list[NDArray[np.float64]]) -> NDArray[np.bool_]:
    compute, exchange = changes
    return (compute < 0) | (exchange < 0)
