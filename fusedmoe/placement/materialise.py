"""Sparse materialisation (Hecate, Algorithm 1): which experts are copied to which ranks for one iteration."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.placement import Nodes, Placement


def overlap_degree(idle_s: float, expert_bytes: float, bytes_per_s: float) -> int:
    """How many experts a rank can receive unnoticed: t = floor(idle time · bandwidth / bytes of an expert).

    Args:
        idle_s: for how long the link has nothing else to do: what a plan leaves of it free (as the
            schedule's sparse collectives have it), or else, by the paper's formula (section 4.2), the seconds that the
            attention before the layer takes forward. Backward that takes twice as long, which hides a gather and a
            reduce-scatter.
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
    load_E = _checked(placement, load_E, nodes, t, m)
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


def _checked(placement: Placement, load_E: ArrayLike, nodes: Nodes, t: int, m: int) -> NDArray[np.float64]:
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
