"""Placement policies: pure functions from load information to the next iteration's placement and its cost.

Hecate and its baselines (its section 2.3): plain expert parallelism, FasterMoE's shadowing, SmartMoE's swaps and
FlexMoE's replication. All use the same dispatcher, costs and replica memory m, and none reserves more memory than it
uses. Docstrings state which parts of a paper are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.balance import Balance, balance, cheapest_balance
from fusedmoe.placement.hecate import (
    WINDOW,
    LayerLoads,
    LayerPolicy,
    calibrate,
    is_due,
    is_uneven,
    materialise,
    predict_load,
    reshard,
)
from fusedmoe.placement.hecate import hecate as hecate_of_layer
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.planner import call_policy
from fusedmoe.placement.traffic import (
    PlacementCosts,
    PlacementLoad,
    Transfer,
    exposed_s,
    layer_s,
    placement_load,
    transfers_s,
)


def costs_of_layer(
    model_dim: int, hidden: int, *, flop_s: float, inter_bytes_s: float, intra_bytes_s: float, wire_bytes: int = 2
) -> PlacementCosts:
    """Return the costs of two-matrix experts trained by Adam in mixed precision (state: 6 times the parameters).

    Args:
        flop_s: FLOP per second of a rank.   wire_bytes: bytes per element of tokens and parameters.
    """
    parameters = 2 * model_dim * hidden
    return PlacementCosts(
        token_s=3 * 2 * parameters / flop_s,  # backward takes twice as long as forward
        token_bytes=wire_bytes * model_dim,
        expert_bytes=wire_bytes * parameters,
        state_bytes=6 * wire_bytes * parameters,
        inter_bytes_s=inter_bytes_s,
        intra_bytes_s=intra_bytes_s,
    )


#: Hecate's cluster A (section 5.1) and GPT-MoE-S (Table 1, feed-forward twice the model): nodes of 4 V100s that share a
#: network of 100 Gb/s, NVLink, and a third of the peak half-precision rate.
CLUSTER_A = costs_of_layer(768, 1536, flop_s=40e12, inter_bytes_s=12.5e9 / 4, intra_bytes_s=100e9)


@dataclass(frozen=True)
class Situation:
    """Information available to a policy before the experts of an iteration run.

    Attributes:
        iteration: from 0.
        before: [L], placements of the previous iteration; initially even shardings.
        history_ILE: loads of all earlier iterations, at least one.
        tokens_LWE: current routing. Only for policies that act after the gate.
    """

    iteration: int
    before: tuple[Placement, ...]
    history_ILE: NDArray[np.int64]
    tokens_LWE: NDArray[np.int64]
    node_layout: NodeLayout
    costs: PlacementCosts

    def layers(self, placements: Sequence[Placement]) -> list[LayerLoads]:
        """Return each layer's load information, as passed to the library's policies, with these placements."""
        return [
            LayerLoads(self.iteration, placement, self.history_ILE[:, number], self.node_layout, self.costs)
            for number, placement in enumerate(placements)
        ]


class Decision(NamedTuple):
    """Attributes:
    placements: [L], of this iteration.
    waits_s: exposed time for sending parameters (and state).
    sent_bytes: over all ranks, for parameters, gradients of replicas and state, hidden or not.
    replica_state: replicas have their own optimizer state.
    loads: [L], of ranks and links, if the policy assigns tokens to replicas; None: by `placement_load`.
    """

    placements: tuple[Placement, ...]
    waits_s: float
    sent_bytes: int
    replica_state: bool = False
    loads: tuple[PlacementLoad, ...] | None = None


Policy = Callable[[Situation], Decision]


def expert_parallelism(now: Situation) -> Decision:
    """Keep experts where they are."""
    return Decision(now.before, 0.0, 0)


def by_layer(function: LayerPolicy, *, t: int) -> Policy:
    """Return your own policy of `ShardedExperts(policy=function)`, and count its transfers.

    Owner changes are exposed. Gather and reduce-scatter of t replicated experts per layer are hidden, as for `hecate`;
    those of further experts are exposed.
    """

    def policy(now: Situation) -> Decision:
        placements = tuple(call_policy(function, layer) for layer in now.layers(now.before))
        waits_s, sent = _moved(now.before, placements, now)
        for placement in placements:
            holds_EW = placement.holds_EW.copy()
            exposed = np.flatnonzero(holds_EW.sum(axis=1) > 1)[t:]
            holds_EW[exposed] = placement.sharding.holds_EW[exposed]
            hidden = Placement.holding(placement.owners, holds_EW)
            waits_s += exposed_s(hidden, placement, now.node_layout, now.costs)
        return Decision(placements, waits_s, sent + _synchronised(placements, now))

    return policy


def hecate(
    now: Situation, *, t: int, m: int, sharded: bool = True, calibrated: bool = False, searches: bool = True
) -> Decision:
    """FSSDP: `hecate` in every iteration, and Algorithm 2 (`sharded`), which is exposed, every 100.

    Calibration is optional. t is the number of experts whose gather and reduce-scatter are hidden, so these cost no
    time; calibration does.
    """
    shardings = tuple(placement.sharding for placement in now.before)
    waits_s, sent = 0.0, 0
    if sharded and is_due(now.iteration):
        resharded = reshard(shardings, predict_load(now.history_ILE), now.node_layout, t)
        waits_s, sent = _moved(shardings, resharded, now)
        shardings = resharded
    placements = []
    for layer, tokens_WE in zip(now.layers(shardings), now.tokens_LWE, strict=True):
        placement = hecate_of_layer(layer, t=t, m=m, searches=searches)
        if calibrated:
            more = calibrate(placement, tokens_WE, now.node_layout, m, now.costs)
            waits_s += exposed_s(placement, more, now.node_layout, now.costs)
            placement = more
        placements.append(placement)
    return Decision(tuple(placements), waits_s, sent + _synchronised(placements, now))


def exact(now: Situation, *, t: int, m: int, level: float | None = None) -> Decision:
    """Hecate, and exact balance after the gate, as `ShardedExperts(balance="exact")`.

    `level`: as for `balance`, regardless of cost; None: the cheapest. Added replicas are exposed.
    """

    def after_gate(placement: Placement, tokens_WE: NDArray[np.int64]) -> Balance:
        if level is None:
            return cheapest_balance(placement, tokens_WE, now.node_layout, m, now.costs)
        return balance(placement, tokens_WE, now.node_layout, m, level)

    return _balanced(now, hecate(now, t=t, m=m), after_gate)


def auto(now: Situation, *, t: int, m: int) -> Decision:
    """Hecate, and exact balance where it pays, as `ShardedExperts(balance="auto")` with free planning."""
    shardings = [placement.sharding for placement in now.before]
    predicted = hecate(now, t=t, m=m, sharded=is_uneven(shardings, predict_load(now.history_ILE)))
    return _balanced(
        now,
        predicted,
        lambda before, tokens_WE: cheapest_balance(before, tokens_WE, now.node_layout, m, now.costs, planning_s=0.0),
    )


def _balanced(
    now: Situation, predicted: Decision, after_gate: Callable[[Placement, NDArray[np.int64]], Balance]
) -> Decision:
    """Return the predicted replicas as corrected after the gate.

    Corrections are exposed; replaced predicted replicas have been sent in vain.
    """
    waits_s, given_up, found = predicted.waits_s, 0, []
    for placement, tokens_WE in zip(predicted.placements, now.tokens_LWE, strict=True):
        found.append(after_gate(placement, tokens_WE))
        kept = placement.both(found[-1].placement)
        waits_s += exposed_s(kept, found[-1].placement, now.node_layout, now.costs)
        given_up += int((placement.extra_W() - kept.extra_W()).sum())
    placements = tuple(one.placement for one in found)
    sent = predicted.sent_bytes - _synchronised(predicted.placements, now) + _synchronised(placements, now)
    sent += given_up * now.costs.expert_bytes
    return Decision(placements, waits_s, sent, loads=tuple(one.load for one in found))


def shadowing(now: Situation, *, m: int) -> Decision:
    """FasterMoE (He et al. 2022): after the gate, replicate the most popular experts on all ranks for this iteration.

    Experts are added as long as the layer is expected to become faster, including broadcast and gradient reduction. The
    expectation uses this library's cost model, which is better than the paper's assumption that the largest expert
    determines its rank's load. Replication waits for the gate, and the experts wait for it; the paper's smart schedule,
    which hides part of it behind other experts, is omitted.
    """
    placements, waits_s = [], 0.0
    for before, tokens_WE in zip(now.before, now.tokens_LWE, strict=True):
        placement = shadow(before.sharding, tokens_WE, now.node_layout, m, now.costs)
        placements.append(placement)
        waits_s += exposed_s(before.sharding, placement, now.node_layout, now.costs)
    return Decision(tuple(placements), waits_s, _synchronised(placements, now))


def shadow(
    sharding: Placement, tokens_WE: NDArray[np.int64], node_layout: NodeLayout, m: int, costs: PlacementCosts
) -> Placement:
    """Return shadowing's placement of one layer after its gate."""
    load_E = tokens_WE.sum(axis=0)
    best, best_s = sharding, layer_s(placement_load(tokens_WE, sharding, node_layout), costs)
    for shadows in range(1, min(m, sharding.experts) + 1):
        candidate = materialise(sharding, load_E, node_layout, shadows, shadows)
        seconds = exposed_s(sharding, candidate, node_layout, costs) + layer_s(
            placement_load(tokens_WE, candidate, node_layout), costs
        )
        if seconds >= best_s:
            break
        best, best_s = candidate, seconds
    return best


def swaps(now: Situation, *, every: int = 25) -> Decision:
    """SmartMoE on all layers: `swap`, and the cost of moving."""
    placements = tuple(swap(layer, every=every) for layer in now.layers(now.before))
    moving = [_moved([before], [after], now) for before, after in zip(now.before, placements, strict=True)]
    return Decision(placements, sum(seconds for seconds, _ in moving), sum(sent for _, sent in moving))


def swap(now: LayerLoads, *, every: int = 25) -> Placement:
    """SmartMoE (Zhai et al. 2023): periodically exchange experts with their state to balance the ranks' work.

    While it lowers the maximum, the busiest rank of a layer exchanges an expert with another rank, choosing the pair
    that lowers the maximum of both most. Done if the time saved until the next period exceeds the cost of moving. Only
    the paper's online stage is implemented; its offline stage chooses the degrees of parallelism.
    """
    if now.step % every and now.step != WINDOW:
        return now.placement
    load_E = predict_load(now.history_IE)
    after, tokens_WE = _swapped(now.placement, load_E), _spread(load_E, now.node_layout)
    saved_s = every * (_layer_s(tokens_WE, now.placement, now) - _layer_s(tokens_WE, after, now))
    return after if saved_s > _moved([now.placement], [after], now)[0] else now.placement


def replication(now: Situation, *, m: int, every: int = 10) -> Decision:
    """FlexMoE on all layers: `replicate`, and the cost of sending experts.

    Gradients of replicas are reduced behind the backward pass and cost no time, as Hecate's.
    """
    decided = [_replicated(layer, m, every) for layer in now.layers(now.before)]
    placements = tuple(placement for placement, _ in decided)
    waits_s = sum(
        transfers_s(copies, now.node_layout, now.costs, now.costs.move_bytes) for _, copies in decided if copies
    )
    sent = sum(len(copies) for _, copies in decided) * now.costs.move_bytes
    return Decision(placements, waits_s, sent + _synchronised(placements, now), replica_state=True)


def replicate(now: LayerLoads, *, m: int, every: int = 10) -> Placement:
    """FlexMoE (Nie et al. 2023): persistent replicas with optimizer state, adjusted periodically.

    The expert with the highest load per replica gets another one, on the least loaded rank with free memory; if there
    is none, the expert with the lowest load per replica loses one first. From such a series, the prefix that saves most
    time until the next period is applied, including the cost of sending; a single step often saves nothing. Omitted:
    moving a replica between ranks (equivalent to removal and creation), and sending in small parts concurrently with
    training.
    """
    return _replicated(now, m, every)[0]


def _replicated(now: LayerLoads, m: int, every: int) -> tuple[Placement, list[Transfer]]:
    before = now.placement
    if now.step % every and now.step != WINDOW:
        return before, []
    load_E = predict_load(now.history_IE)
    tokens_WE = _spread(load_E, now.node_layout)
    placement, copies = before, list[Transfer]()
    best, best_s, best_copies = before, every * _layer_s(tokens_WE, before, now), 0
    while len(copies) - best_copies < now.node_layout.num_ranks:  # stop after one step per rank without gain
        grown = _grown(placement, load_E, tokens_WE, m, now.node_layout)
        if grown is None:
            break
        placement, copy = grown
        copies.append(copy)
        wait_s = transfers_s(copies, now.node_layout, now.costs, now.costs.move_bytes)
        seconds = every * _layer_s(tokens_WE, placement, now) + wait_s
        if seconds < best_s:
            best, best_s, best_copies = placement, seconds, len(copies)
    return best, copies[:best_copies]


def _grown(
    placement: Placement, load_E: NDArray[np.float64], tokens_WE: NDArray[np.int64], m: int, node_layout: NodeLayout
) -> tuple[Placement, Transfer] | None:
    """Add a replica of the expert with the highest load per replica; None if there is no free slot."""
    holds_EW = placement.holds_EW.copy()
    share_E = load_E / holds_EW.sum(axis=1)
    expert = int(share_E.argmax())
    work_W = placement_load(tokens_WE, placement, node_layout).work_W
    room_W = (placement.extra_W() < m) & ~holds_EW[expert]
    if not room_W.any():
        # Load per remaining replica; must be below the expert's current load per replica.
        left_E = np.array(
            [load_E[e] / len(of) if of and e != expert else np.inf for e, of in enumerate(placement.replicas)]
        )
        for loser in np.argsort(left_E, kind="stable").tolist():
            if left_E[loser] >= share_E[expert]:
                return None
            places = [rank for rank in placement.replicas[loser] if not holds_EW[expert, rank]]
            if places:
                rank = min(places, key=lambda rank: (work_W[rank], rank))
                holds_EW[loser, rank] = False
                room_W[rank] = True
                break
        else:
            return None
    target = int(np.where(room_W, work_W, np.iinfo(np.int64).max).argmin())
    holds_EW[expert, target] = True
    return Placement.holding(placement.owners, holds_EW), Transfer(expert, placement.owners[expert], target, 0)


def _swapped(placement: Placement, load_E: NDArray[np.float64]) -> Placement:
    owner_E = np.array(placement.owners)
    work_W = np.bincount(owner_E, weights=load_E, minlength=placement.num_ranks)
    while True:
        busiest = int(work_W.argmax())
        ours, others = np.flatnonzero(owner_E == busiest), np.flatnonzero(owner_E != busiest)
        if not len(ours) or not len(others):
            break
        less_AB = load_E[ours][:, None] - load_E[others]  # reduction of the busiest rank's load
        worse_AB = np.maximum(work_W[busiest] - less_AB, work_W[owner_E[others]] + less_AB)
        a, b = np.unravel_index(int(worse_AB.argmin()), worse_AB.shape)
        if worse_AB[a, b] >= work_W[busiest] * (1 - 1e-9):
            break
        mine, theirs = ours[a], others[b]
        owner_E[mine], owner_E[theirs] = owner_E[theirs], owner_E[mine]
        work_W = np.bincount(owner_E, weights=load_E, minlength=placement.num_ranks)
    return Placement(placement.num_ranks, tuple(owner_E.tolist()))


def _layer_s(tokens_WE: NDArray[np.int64], placement: Placement, now: LayerLoads) -> float:
    return layer_s(placement_load(tokens_WE, placement, now.node_layout), now.costs)


def _spread(load_E: NDArray[np.float64], node_layout: NodeLayout) -> NDArray[np.int64]:
    """Return an expected load [W, E], equal on every rank."""
    return np.tile(np.rint(load_E / node_layout.num_ranks).astype(np.int64), (node_layout.num_ranks, 1))


def _moved(before: Sequence[Placement], after: Sequence[Placement], now: Situation | LayerLoads) -> tuple[float, int]:
    found = [Transfer(one.expert, one.source, one.target, 0) for one in moves(before, after)]
    return transfers_s(found, now.node_layout, now.costs, now.costs.move_bytes), len(found) * now.costs.move_bytes


def _synchronised(placements: Iterable[Placement], now: Situation) -> int:
    """Return the bytes of sending parameters to replicas and their gradients back, or of an all-reduce (Eq. 2)."""
    volumes = (predicted_volume(one.sharding, one, now.node_layout, now.costs.expert_bytes) for one in placements)
    return 2 * sum(volume.total for volume in volumes)


class Move(NamedTuple):
    """An expert of a layer with a new owner, which receives its parameters and optimizer state."""

    layer: int
    expert: int
    source: int
    target: int


def moves(before: Sequence[Placement], after: Sequence[Placement]) -> tuple[Move, ...]:
    """Return the experts that change owners between two shardings of all layers, by layer and expert.

    Raises:
        ConfigError: the shardings have different layers or experts.
    """
    if [one.experts for one in before] != [one.experts for one in after]:
        raise ConfigError("moves: the two shardings have different layers or experts")
    return tuple(
        Move(layer, expert, source, target)
        for layer, (old, new) in enumerate(zip(before, after, strict=True))
        for expert, (source, target) in enumerate(zip(old.owners, new.owners, strict=True))
        if source != target
    )


class Volume(NamedTuple):
    """Bytes of one sparse collective: over all ranks, between nodes, and the maximum per rank."""

    total: int
    inter: int
    limit: int


def predicted_volume(before: Placement, after: Placement, node_layout: NodeLayout, expert_bytes: int) -> Volume:
    """Return the volume of a gather, and of its reduce-scatter (H2, with a correction of the paper's Eq. 2).

    An expert on d ranks is sent d − 1 times, and between nodes once per additional node. Per group member this is (d −
    1)/d of its bytes for each of the two collectives, together those of a ring all-reduce, tending to 2λS. `limit` is
    λS: no rank sends or receives more on one kind of link.
    """
    new_E = after.holds_EW.sum(axis=1) - before.holds_EW.sum(axis=1)
    nodes_E = _nodes_of(after, node_layout) - _nodes_of(before, node_layout)
    total, inter, travelling = int(new_E.sum()), int(nodes_E.sum()), int((new_E > 0).sum())
    return Volume(total * expert_bytes, inter * expert_bytes, travelling * expert_bytes)


def _nodes_of(placement: Placement, node_layout: NodeLayout) -> NDArray[np.int64]:
    found: NDArray[np.int64] = (
        placement.holds_EW.reshape(-1, node_layout.num_nodes, node_layout.per_node).any(axis=2).sum(axis=1)
    )
    return found
