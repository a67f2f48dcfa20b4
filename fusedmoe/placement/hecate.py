"""Hecate's algorithms: which experts are copied where for an iteration, and which rank owns which.

Sparse materialisation (Algorithm 1) gives each expert a share of the slots and looks at one expert after the other.
Where slots are few, shares are coarse, and what one expert leaves uneven the next ones may not mend: it is a good place
to start from for a local search, in which replicas come, go and change ranks as long as that makes a layer faster.
Calibration (section 4.2) adds more once the gate has chosen. Heterogeneous sharding (Algorithm 2) chooses owners, over
all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.price import EXCHANGES, PlacementCosts, layer_s, load, transfers_s
from fusedmoe.placement.transfers import gather

#: In the local search, what the unevenness of all ranks counts beside the busiest one: of equally fast placements it
#: leads to the more even.
_EVENNESS = 0.1
#: Its steps from one start; from Algorithm 1, 32 experts on 16 ranks take fewer than 10.
_STEPS = 60
#: So many slots are few: then the search starts from no replicas as well. With more, Algorithm 1 is as good a start.
_FEW_SLOTS = 16
#: A step of it that gains a smaller share is not taken.
_GAIN = 1e-3
#: Copies that save a smaller share of their layer's time are not made.
_WORTH = 0.02
#: Iterations between two shardings.
EVERY = 100


def overlap_degree(idle_s: float, expert_bytes: float, bytes_per_s: float) -> int:
    """How many experts a rank can receive in hidden time: t = floor(idle time · bandwidth / bytes of an expert).

    Args:
        idle_s: for how long the link has nothing else to do: what a plan leaves of it free (the schedule's
            `sparse_collectives.hidden_s` reads it off a timeline), or else, by the paper's formula (section 4.2), the
            seconds that the attention before the layer takes forward. Backward that takes twice as long, which hides a
            gather and a reduce-scatter.
        expert_bytes: of one expert's parameters.
        bytes_per_s: of a rank's link between nodes; of any other where there is but one node.
    """
    if not (idle_s >= 0 and expert_bytes > 0 and bytes_per_s > 0 and math.isfinite(idle_s * bytes_per_s)):
        raise ConfigError(
            f"overlap degree: {idle_s} s idle at {bytes_per_s} bytes/s and {expert_bytes} bytes an expert; the first "
            "must be 0 or more, the others more than 0"
        )
    return math.floor(idle_s * bytes_per_s / expert_bytes)


def materialise(placement: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int) -> Placement:
    """Algorithm 1: `placement` and the replicas that the loads ask for.

    Where every rank has room for `t` more (t ≤ m), all ranks get the `t` experts with the most load. Otherwise these
    share the slots by load: each, in order, gets the share of the slots left that its load is of the load left,
    rounded; and a slot on a node without it rather than on one that holds it, then on the node and the rank with the
    most free slots. Where these are equal, which the paper leaves open, the one with less to do is taken, as if the
    copies of an expert had equal parts of its load; then the lower number.

    Args:
        placement: a sharding; or one with replicas, to which more are added (calibration). These count against `m`,
            and the load of an expert is shared by the copies that there are.
        load_E: [E], what each expert will be asked for, in any unit.
        t: overlap degree, the number of experts that may travel.
        m: memory, the number of replicas that a rank may hold.
    Raises:
        ConfigError: sizes that do not fit together, loads that are negative or not finite, t or m below 0.
    """
    load_E = _checked_loads(placement, load_E, nodes, t, m)
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
            break
        holding = np.flatnonzero(holds_EW[expert]).tolist()
        wanted = min(math.floor(slots_left * share_E[expert] / load_left + 0.5), nodes.ranks - 1)
        part = float(load_E[expert]) / (len(holding) + wanted)
        for rank in holding:
            work_W[rank] += part - float(share_E[expert])
        load_left -= share_E[expert]
        chosen = _choose(wanted, holding, free, work_W, part, nodes)
        holds_EW[expert, chosen] = True
        slots_left -= len(chosen)
    return Placement.holding(placement.owners, holds_EW)


def _choose(
    wanted: int, holding: list[int], free: list[int], work: list[float], part: float, nodes: Nodes
) -> list[int]:
    """The ranks for so many more replicas, or for as many as have both a free slot and no copy.

    Takes their slots (`free`, by rank), and adds `part` to their `work`.
    """
    chosen: list[int] = []
    covered = {nodes.of(rank) for rank in holding}
    free_N, work_N = (
        [sum(of[node * nodes.per_node : (node + 1) * nodes.per_node]) for node in range(nodes.count)]
        for of in (free, work)
    )
    open_ranks = [rank for rank, slots in enumerate(free) if slots > 0 and rank not in holding]

    def preference(rank: int) -> tuple[bool, float, float, int, int, float]:
        node = nodes.of(rank)
        return node in covered, -free_N[node], work_N[node], node, -free[rank], work[rank]

    while open_ranks and len(chosen) < wanted:
        rank = min(open_ranks, key=preference)
        open_ranks.remove(rank)
        chosen.append(rank)
        free[rank] -= 1
        free_N[nodes.of(rank)] -= 1
        work[rank] += part
        work_N[nodes.of(rank)] += part
        covered.add(nodes.of(rank))
    return chosen


def _checked_loads(placement: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int) -> NDArray[np.float64]:
    load_E = np.asarray(load_E, dtype=np.float64)
    if placement.ranks != nodes.ranks or load_E.shape != (placement.experts,):
        raise ConfigError(
            f"materialisation: {placement.experts} experts on {placement.ranks} ranks, but loads of shape "
            f"{load_E.shape} and {nodes.ranks} ranks in nodes"
        )
    if not np.isfinite(load_E).all() or (load_E < 0).any():
        raise ConfigError("materialisation: a load is negative or not finite")
    if t < 0 or m < 0:
        raise ConfigError(f"materialisation: t = {t} and m = {m} must be 0 or more")
    return load_E


def improve(
    placement: Placement, start: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int, costs: PlacementCosts
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
    search = _ReplicaSearch(placement, np.asarray(load_E, dtype=np.float64), nodes, t, m, costs)
    if search.compute_s == search.exchange_s == 0:
        return start  # nothing is known of the time
    starts = (start, placement) if search.room_W.sum() <= _FEW_SLOTS else (start,)
    ends = [search.descend(one.holds_EW) for one in starts]
    return Placement.holding(placement.owners, min((start.holds_EW, *ends), key=search.layer_s))


def worth(placement: Placement, wanted: Placement, load_E: ArrayLike, nodes: Nodes, costs: PlacementCosts) -> Placement:
    """`wanted`, which has all of `placement` and copies besides, where these save a share of the layer's time, `_WORTH`
    at least, at the expected load; else `placement`: what travels takes something though it is hidden.

    The time is that of `improve`. Where nothing is known of it, `wanted`.
    """
    search = _ReplicaSearch(placement, np.asarray(load_E, dtype=np.float64), nodes, 0, 0, costs)
    saves = search.layer_s(wanted.holds_EW) < (1 - _WORTH) * search.layer_s(placement.holds_EW)
    return wanted if saves or search.compute_s == search.exchange_s == 0 else placement


class _ReplicaSearch:
    """The search of `improve`: a placement that is changed step by step.

    What a placement costs is a vector [C] of tokens in one all-to-all: [W] that each rank computes, [W] that it
    receives from other nodes and [N] that each rank of a node sends there, one after the other.

    A change of one expert is (expert, from, to): the rank that gives it up and the one that gets it, W where none does.
    """

    def __init__(
        self, placement: Placement, load_E: NDArray[np.float64], nodes: Nodes, t: int, m: int, costs: PlacementCosts
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


def calibrate(placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, costs: PlacementCosts) -> Placement:
    """`placement`, or one with more replicas that is cheaper with their gather counted.

    Algorithm 1 runs again with the tokens as they are, from the copies that there are, in the memory that is left.
    What it adds nothing hides: the gather before this layer's tokens are sent, and as many bytes of gradients on their
    way back. So several overlap degrees are tried, 1, 2, 4, … experts that travel, and the cheapest is taken.

    Args:
        placement: what was materialised on the prediction.
        tokens_WE: [W, E] integers, the tokens of each rank for each expert: the same numbers on every rank.
        m: memory, the number of replicas that a rank may hold, those of `placement` among them.
    Returns:
        A placement that has all of `placement`; equal to it where nothing pays.
    """
    load_E = np.asarray(tokens_WE).sum(axis=0)
    best, best_s = placement, layer_s(load(tokens_WE, placement, nodes), costs)
    for t in (1 << power for power in range((placement.experts - 1).bit_length() + 1)):
        candidate = materialise(placement, load_E, nodes, t, m)
        if candidate == placement:
            continue
        seconds = layer_s(load(tokens_WE, candidate, nodes), costs) + gathered_s(placement, candidate, nodes, costs)
        if seconds < best_s:
            best, best_s = candidate, seconds
    return best


def gathered_s(before: Placement, after: Placement, nodes: Nodes, costs: PlacementCosts) -> float:
    """Seconds of the sparse all-gather from one to the other and of its reduce-scatter, when nothing hides them."""
    return 2 * transfers_s(gather(before, after, nodes), nodes, costs, costs.expert_bytes)


class Move(NamedTuple):
    """An expert of a layer that gets another owner: its parameters and its optimizer state go there."""

    layer: int
    expert: int
    source: int
    target: int


def slots(layers: int, experts: int, ranks: int) -> int:
    """How many experts, of all layers together, a rank has room to own: the same for each rank."""
    return -(-layers * experts // ranks)


def reshard(shardings: Sequence[Placement], load_LE: ArrayLike, nodes: Nodes, t: int) -> tuple[Placement, ...]:
    """Algorithm 2: a sharding for each layer, in which ranks own the experts that nobody copies evenly by load.

    In each layer all but the `t` experts with the most load are placed, the layer with the largest of their loads
    first, and in it the largest first: on the node with the least load of this layer, then on the rank there with the
    least, and of equal ones on that with fewer free slots. Nodes and ranks that are full are passed over. Slots are
    shared by all layers (`slots`), so that a rank may own none of a layer or all.

    The `t` others, where the paper puts them anywhere, stay with their owners as long as there is room, largest first;
    then they go to the node, and the rank, that own the fewest of these in their layer, of equal ones to that with the
    most free slots.

    Args:
        shardings: [L], what is now. All layers have the same number of experts.
        load_LE: [L, E], what each expert will be asked for. Layers of equal tokens are expected.
        t: overlap degree, as for materialisation.
    Returns:
        The shardings themselves where nothing changes.
    Raises:
        ConfigError: sizes that do not fit together, or placements with replicas.
    """
    load_LE = _checked_loads_of_layers(shardings, load_LE, nodes)
    layers, experts = load_LE.shape
    free_W = np.full(nodes.ranks, slots(layers, experts, nodes.ranks))
    owner_LE = np.full((layers, experts), -1)
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    t = min(t, experts)
    largest_L = load_LE[np.arange(layers), order_LE[:, t]] if t < experts else np.zeros(layers)
    for layer in np.argsort(-largest_L, kind="stable").tolist():
        work_W = np.zeros(nodes.ranks)
        for expert in order_LE[layer, t:].tolist():
            rank = _least(work_W, free_W, nodes)
            owner_LE[layer, expert] = rank
            work_W[rank] += load_LE[layer, expert]
            free_W[rank] -= 1
    homeless = []
    for place in range(t):
        for layer in range(layers):
            expert = int(order_LE[layer, place])
            rank = shardings[layer].owners[expert]
            crowded = (owner_LE[layer, order_LE[layer, :place]] == rank).sum() * nodes.ranks >= t
            if free_W[rank] > 0 and not crowded:
                owner_LE[layer, expert] = rank
                free_W[rank] -= 1
            else:
                homeless.append((layer, expert))
    for layer, expert in homeless:
        owned_W = np.bincount(owner_LE[layer, order_LE[layer, :t]] + 1, minlength=nodes.ranks + 1)[1:]
        rank = _least(owned_W, free_W, nodes, prefer_free=True)
        owner_LE[layer, expert] = rank
        free_W[rank] -= 1
    found = tuple(Placement(nodes.ranks, tuple(owners)) for owners in owner_LE.tolist())
    return tuple(shardings) if found == tuple(shardings) else found


def moves(before: Sequence[Placement], after: Sequence[Placement]) -> tuple[Move, ...]:
    """The experts that change owners from one sharding of all layers to another, by layer and expert.

    Raises:
        ConfigError: the two are not of the same layers and experts.
    """
    if [one.experts for one in before] != [one.experts for one in after]:
        raise ConfigError("moves: the two shardings are not of the same layers and experts")
    return tuple(
        Move(layer, expert, source, target)
        for layer, (old, new) in enumerate(zip(before, after, strict=True))
        for expert, (source, target) in enumerate(zip(old.owners, new.owners, strict=True))
        if source != target
    )


def _least(work_W: NDArray[np.generic], free_W: NDArray[np.int64], nodes: Nodes, prefer_free: bool = False) -> int:
    """The rank with the least work on the node with the least, among those with free slots."""
    work_NR = work_W.reshape(nodes.count, nodes.per_node)
    free_NR = free_W.reshape(nodes.count, nodes.per_node)
    sign = -1 if prefer_free else 1
    open_N = np.flatnonzero((free_NR > 0).any(axis=1)).tolist()
    node = min(open_N, key=lambda n: (work_NR[n].sum(), sign * free_NR[n].sum(), n))
    open_R = np.flatnonzero(free_NR[node] > 0).tolist()
    rank = min(open_R, key=lambda r: (work_NR[node, r], sign * free_NR[node, r], r))
    return int(node * nodes.per_node + rank)


def _checked_loads_of_layers(shardings: Sequence[Placement], load_LE: ArrayLike, nodes: Nodes) -> NDArray[np.float64]:
    load_LE = np.asarray(load_LE, dtype=np.float64)
    sizes = {(one.ranks, one.experts) for one in shardings}
    if len(sizes) != 1 or load_LE.shape != (len(shardings), shardings[0].experts):
        raise ConfigError(
            f"sharding: loads of shape {load_LE.shape} for {len(shardings)} layers of {sorted(sizes)} ranks and experts"
        )
    if shardings[0].ranks != nodes.ranks:
        raise ConfigError(f"sharding: {shardings[0].ranks} ranks hold experts, {nodes.ranks} stand in nodes")
    if not np.isfinite(load_LE).all() or (load_LE < 0).any():
        raise ConfigError("sharding: a load is negative or not finite")
    if any(any(one.replicas) for one in shardings):
        raise ConfigError("sharding: a placement has replicas; give shardings")
    return load_LE
