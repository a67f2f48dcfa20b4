"""Hecate's algorithms: which experts are copied where for an iteration, and which rank owns which.

Sparse materialisation (Algorithm 1) gives each expert a share of the slots, by the loads of the last iterations; a
local search (`replica_search`) makes more of it. Calibration (section 4.2) adds more once the gate has chosen.
Heterogeneous sharding (Algorithm 2) chooses owners, over all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.replica_search import improve, worth
from fusedmoe.placement.traffic import PlacementCosts, gather, layer_s, load, transfers_s

#: Iterations between two shardings.
EVERY = 100
# What the busiest ranks compute above the mean that is no reason for other owners.
_EVEN = 0.05
#: Iterations that a prediction looks back (w in the paper).
WINDOW = 5


@dataclass(frozen=True)
class LayerLoads:
    """Loads of one layer before a step, for a function that places its experts (`LayerPolicy`).

    `step`: counted from 0. `history_IE`: [I, E] int64, the tokens of all ranks for each expert in earlier steps, at
    least one, the oldest first.
    """

    step: int
    placement: Placement
    history_IE: NDArray[np.int64]
    nodes: Nodes
    costs: PlacementCosts


#: Places the experts of one layer for the next step: a pure function, so that all ranks come to the same.
LayerPolicy = Callable[[LayerLoads], Placement]


def hecate(now: LayerLoads, *, t: int, m: int, searches: bool = True) -> Placement:
    """Places copies by Algorithm 1 on the predicted load, and by the search behind it; owners stay.

    Args:
        t, m: overlap degree and memory, as for `materialise`.
        searches: False leaves Algorithm 1 alone, as published: without the search, which is this library's, and with
            copies that save nothing.
    """
    sharding, load_E = now.placement.sharding, predict(now.history_IE)
    placement = materialise(sharding, load_E, now.nodes, t, m)
    if not searches:
        return placement
    placement = improve(sharding, placement, load_E, now.nodes, t, m, now.costs)
    return worth(sharding, placement, load_E, now.nodes, now.costs)


def predict(earlier: Sequence[ArrayLike] | NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the mean of the last `WINDOW` loads, or of all if there are fewer: the expected next load (section 4.2).

    `earlier`: the oldest first, all of one shape: [E], or [L, E] for several layers. Raises `ConfigError` where there
    is none, or they differ in shape.
    """
    if len(earlier) == 0:
        raise ConfigError("a prediction needs at least one earlier load, got none")
    last = [np.asarray(load, dtype=np.float64) for load in earlier[-WINDOW:]]
    if len({load.shape for load in last}) > 1:
        raise ConfigError(f"loads of different shapes: {sorted({load.shape for load in last})}")
    return np.mean(last, axis=0)


def is_due(step: int) -> bool:
    """Returns whether owners may change in a step: every 100, and once as many loads are known as are looked at."""
    return step % EVERY == 0 or step == WINDOW


def overlap_degree(idle_s: float, expert_bytes: float, bytes_per_s: float) -> int:
    """Returns t, the experts that a rank can receive in hidden time: floor(idle time · bandwidth / expert bytes).

    Args:
        idle_s: for how long the link has nothing else to do: what a plan leaves of it free (the schedule's
            `sparse_collectives.hidden_s` reads it off a timeline), or else, by the paper's formula (section 4.2), the
            seconds that the attention before the layer takes forward.
        expert_bytes: of one expert's parameters.
        bytes_per_s: of a rank's link between nodes; inside the node where all ranks share one.
    """
    if not (idle_s >= 0 and expert_bytes > 0 and bytes_per_s > 0 and math.isfinite(idle_s * bytes_per_s)):
        raise ConfigError(
            f"overlap degree: {idle_s} s idle at {bytes_per_s} bytes/s and {expert_bytes} bytes an expert; the first "
            "must be 0 or more, the others more than 0"
        )
    return math.floor(idle_s * bytes_per_s / expert_bytes)


def materialise(placement: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int) -> Placement:
    """Adds the replicas to `placement` that the loads ask for (Algorithm 1).

    Where every rank has room for `t` more (t ≤ m), all ranks get the `t` experts with the most load. Otherwise these
    share the slots by load: each, in order, gets the share of the slots left that its load is of the load left.

    Args:
        placement: a sharding; or one with replicas, to which more are added (calibration). These count against `m`,
            and an expert's load is shared by its owner and these.
        load_E: [E], what each expert will be asked for, in any unit.
        t: overlap degree, the number of experts that may travel.
        m: memory, the number of replicas that a rank may hold.
    Raises:
        ConfigError: sizes that do not fit together, loads that are negative or not finite, t or m below 0.
    """
    load_E = np.asarray(load_E, dtype=np.float64)
    if placement.ranks != nodes.ranks or load_E.shape != (placement.experts,):
        raise ConfigError(
            f"materialisation: {placement.experts} experts on {placement.ranks} ranks, but loads of shape "
            f"{load_E.shape} and {nodes.ranks} ranks in nodes"
        )
    _require_loads(load_E, "materialisation")
    if t < 0 or m < 0:
        raise ConfigError(f"materialisation: t = {t} and m = {m} must be 0 or more")
    # The load of a copy, not of an expert: what calibration adds to should not be added to again and again.
    share_E = load_E / placement.holds_EW.sum(axis=1)
    t = min(t, placement.experts)
    free_W = np.clip(m - placement.extra_W(), 0, t)  # m ← min(m, t)
    top = np.argsort(-share_E, kind="stable")[:t]
    holds_EW = placement.holds_EW.copy()
    # Where every rank has room for all t, the paper copies them to all: nothing is left to choose.
    if (free_W == t).all():
        holds_EW[top] = True
        return Placement.holding(placement.owners, holds_EW)
    load_left = float(share_E[top].sum())
    free, slots_left = free_W.tolist(), int(free_W.sum())
    work_W = (share_E @ placement.holds_EW).tolist()
    for expert in top.tolist():
        if load_left <= 0.0:
            break  # nobody asks for the experts that are left
        holding = np.flatnonzero(holds_EW[expert]).tolist()
        # At most on all other ranks; rounded half up.
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
    """Chooses ranks for `wanted` more replicas, as far as slots are free; fills these, and adds `part` to `work`."""
    chosen: list[int] = []
    covered = {nodes.of(rank) for rank in holding}
    free_N, work_N = (
        [sum(by_rank[node * nodes.per_node : (node + 1) * nodes.per_node]) for node in range(nodes.count)]
        for by_rank in (free, work)
    )
    open_ranks = [rank for rank, slots in enumerate(free) if slots > 0 and rank not in holding]

    # A node without a copy comes first: its tokens for the expert then stay inside it. Free slots before work, as in
    # the paper; work, as if the copies of an expert had equal parts of its load, and the lower number, where the paper
    # leaves the choice open.
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


def _require_loads(loads: NDArray[np.float64], what: str) -> None:
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigError(f"{what}: a load is negative or not finite")


def calibrate(placement: Placement, tokens_WE: ArrayLike, nodes: Nodes, m: int, costs: PlacementCosts) -> Placement:
    """Returns `placement`, or one with more replicas that is cheaper with their gather counted.

    Algorithm 1 runs again, from the copies of `placement`, with the tokens that the gates chose, in the memory that is
    left.

    Args:
        placement: what was materialised on the prediction.
        tokens_WE: [W, E] integers, the tokens of each rank for each expert: the same numbers on every rank.
        m: memory, the number of replicas that a rank may hold, those of `placement` among them.
    """
    load_E = np.asarray(tokens_WE).sum(axis=0)
    best, best_s = placement, layer_s(load(tokens_WE, placement, nodes), costs)
    # Overlap degrees by powers of two: every candidate is priced before the tokens may go, so there are few.
    for t in (1 << power for power in range((placement.experts - 1).bit_length() + 1)):
        candidate = materialise(placement, load_E, nodes, t, m)
        if candidate == placement:
            continue
        seconds = layer_s(load(tokens_WE, candidate, nodes), costs) + gathered_s(placement, candidate, nodes, costs)
        if seconds < best_s:
            best, best_s = candidate, seconds
    return best


def gathered_s(before: Placement, after: Placement, nodes: Nodes, costs: PlacementCosts) -> float:
    """Returns the seconds of the sparse all-gather from `before` to `after` and of its reduce-scatter, unhidden."""
    # Nothing hides what calibration adds: as many bytes of gradients as of experts come back.
    return 2 * transfers_s(gather(before, after, nodes), nodes, costs, costs.expert_bytes)


def slots(layers: int, experts: int, ranks: int) -> int:
    """Returns how many experts, of all layers together, a rank has room to own: the same for each rank."""
    return -(-layers * experts // ranks)


def reshard(shardings: Sequence[Placement], load_LE: ArrayLike, nodes: Nodes, t: int) -> tuple[Placement, ...]:
    """Chooses owners in all layers, so that ranks own the experts that nobody copies evenly by load (Algorithm 2).

    In each layer all but the `t` experts with the most load are placed, the largest first: on the node with the least
    load of this layer, then on the rank there with the least. Slots are shared by all layers (`slots`), so that a rank
    may own none of a layer or all. The `t` others, where the paper puts them anywhere, stay with their owners as long
    as there is room, then go to the node, and the rank, that own the fewest of these in their layer.

    Args:
        shardings: [L], what is now. All layers have the same number of experts.
        load_LE: [L, E], what each expert will be asked for. Layers of equal tokens are expected.
        t: overlap degree, as for materialisation.
    Returns:
        The shardings themselves where nothing changes; so for these loads again.
    Raises:
        ConfigError: sizes that do not fit together, or placements with replicas.
    """
    load_LE = np.asarray(load_LE, dtype=np.float64)
    sizes = {(sharding.ranks, sharding.experts) for sharding in shardings}
    if len(sizes) != 1 or load_LE.shape != (len(shardings), shardings[0].experts):
        raise ConfigError(
            f"sharding: loads of shape {load_LE.shape} for {len(shardings)} layers of {sorted(sizes)} ranks and experts"
        )
    if shardings[0].ranks != nodes.ranks:
        raise ConfigError(f"sharding: {shardings[0].ranks} ranks hold experts, {nodes.ranks} stand in nodes")
    _require_loads(load_LE, "sharding")
    if any(any(sharding.replicas) for sharding in shardings):
        raise ConfigError("sharding: a placement has replicas; give shardings")
    layers, experts = load_LE.shape
    # Slots are counted over all layers: a rank may own many experts of one layer and none of another.
    free_W = np.full(nodes.ranks, slots(layers, experts, nodes.ranks))
    owner_LE = np.full((layers, experts), -1)
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    t = min(t, experts)
    largest_L = load_LE[np.arange(layers), order_LE[:, t]] if t < experts else np.zeros(layers)
    # The layer with the largest load of all comes first, while every rank has room: it is the hardest to even out.
    for layer in np.argsort(-largest_L, kind="stable").tolist():
        work_W = np.zeros(nodes.ranks)
        for expert in order_LE[layer, t:].tolist():
            rank = _least(work_W, free_W, nodes)
            owner_LE[layer, expert] = rank
            work_W[rank] += load_LE[layer, expert]
            free_W[rank] -= 1
    busiest_LT, room = order_LE[:, :t], slots(layers, experts, nodes.ranks)
    before_LE = np.array([sharding.owners for sharding in shardings])
    stays = (before_LE == owner_LE)[owner_LE >= 0].all() and np.bincount(before_LE.ravel()).max() <= room
    found_LE = before_LE if stays else _with_busiest(before_LE, owner_LE, busiest_LT, free_W, nodes)
    # Placed once more, from where they are now, some of the busiest come elsewhere: that is done as long as it leaves
    # fewer of them crowded, and no longer. So the next sharding at the same loads has nothing to change.
    while True:
        next_LE = _with_busiest(found_LE, owner_LE, busiest_LT, free_W, nodes)
        if _crowded(next_LE, busiest_LT, nodes) >= _crowded(found_LE, busiest_LT, nodes):
            break
        found_LE = next_LE
    chosen = tuple(Placement(nodes.ranks, tuple(owners)) for owners in found_LE.tolist())
    return tuple(shardings) if chosen == tuple(shardings) else chosen


def uneven(shardings: Sequence[Placement], load_LE: ArrayLike) -> bool:
    """Returns whether the owners' work, without copies, leaves something to gain: the busiest ranks of all layers have
    over 5% more than the mean. Algorithm 2 does not ask; where loads are even it can make owners only worse.

    Arguments are those of `reshard`.
    """
    work_LW = [load_E @ one.holds_EW for one, load_E in zip(shardings, np.asarray(load_LE, dtype=float), strict=True)]
    return bool(np.max(work_LW, axis=1).sum() > (1 + _EVEN) * np.mean(work_LW, axis=1).sum())


def _with_busiest(
    before_LE: NDArray[np.int64],
    others_LE: NDArray[np.int64],
    busiest_LT: NDArray[np.int64],
    free_W: NDArray[np.int64],
    nodes: Nodes,
) -> NDArray[np.int64]:
    """Returns owners, [L, E], of all experts: of the busiest, which `others_LE` leaves at -1, those of before if they
    have room."""
    owner_LE, free_W, t = others_LE.copy(), free_W.copy(), busiest_LT.shape[1]
    # The t experts with the most load will be copied anyway, so owning one is little work: they move only if they must.
    homeless = []
    for place in range(t):
        for layer, expert in enumerate(busiest_LT[:, place].tolist()):
            rank = int(before_LE[layer, expert])
            # A rank that owns its share of a layer's t busiest experts keeps no more of them: it would have to send
            # them all, and to sum their gradients.
            crowded = (owner_LE[layer, busiest_LT[layer, :place]] == rank).sum() * nodes.ranks >= t
            if free_W[rank] > 0 and not crowded:
                owner_LE[layer, expert] = rank
                free_W[rank] -= 1
            else:
                homeless.append((layer, expert))
    for layer, expert in homeless:
        owned_W = np.bincount(owner_LE[layer, busiest_LT[layer]] + 1, minlength=nodes.ranks + 1)[1:]
        rank = _least(owned_W, free_W, nodes, prefer_free=True)
        owner_LE[layer, expert] = rank
        free_W[rank] -= 1
    return owner_LE


def _crowded(owner_LE: NDArray[np.int64], busiest_LT: NDArray[np.int64], nodes: Nodes) -> int:
    """Counts the busiest experts of each layer that a rank owns above its share of them."""
    layers, t = busiest_LT.shape
    owned_LW = np.zeros((layers, nodes.ranks), dtype=np.int64)
    np.add.at(owned_LW, (np.arange(layers)[:, None], np.take_along_axis(owner_LE, busiest_LT, axis=1)), 1)
    return int(np.maximum(owned_LW - -(-t // nodes.ranks), 0).sum())


def _least(work_W: NDArray[np.generic], free_W: NDArray[np.int64], nodes: Nodes, prefer_free: bool = False) -> int:
    """Returns the rank with the least work on the node with the least, among those with free slots."""
    work_NR = work_W.reshape(nodes.count, nodes.per_node)
    free_NR = free_W.reshape(nodes.count, nodes.per_node)
    # Of equal ones that with fewer free slots, as in the paper; those that will be copied go where the most are free.
    sign = -1 if prefer_free else 1
    open_N = np.flatnonzero((free_NR > 0).any(axis=1)).tolist()
    node = min(open_N, key=lambda n: (work_NR[n].sum(), sign * free_NR[n].sum(), n))
    open_R = np.flatnonzero(free_NR[node] > 0).tolist()
    rank = min(open_R, key=lambda r: (work_NR[node, r], sign * free_NR[node, r], r))
    return int(node * nodes.per_node + rank)
