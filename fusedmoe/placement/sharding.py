"""Heterogeneous sharding (Hecate, Algorithm 2): which rank owns which experts, over all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement

#: Iterations between two shardings.
EVERY = 100


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
    load_LE = _checked(shardings, load_LE, nodes)
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


def _checked(shardings: Sequence[Placement], load_LE: ArrayLike, nodes: Nodes) -> NDArray[np.float64]:
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
