"""Planning of placements: owners and replicas of the next step; after the gate, on-demand replicas and row sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from fusedmoe.comm.collectives import all_gather_object, max_over_ranks_s
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError, callable_name
from fusedmoe.placement.balance import Balance, cheapest_balance
from fusedmoe.placement.hecate import LayerLoads, LayerPolicy, hecate, is_due, is_uneven, predict_load, reshard
from fusedmoe.placement.placed_experts import PlacedExperts
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.runtime.cache import measured_costs

HECATE_POLICIES = ("hecate", "algorithm1")

#: Adds replicas after a layer's gate: (placement, tokens_WE, node_layout, m, costs) -> placement, as `calibrate`.
Correction = Callable[[Placement, NDArray[np.int64], NodeLayout, int, PlacementCosts], Placement]

#: Placeholder if no decision depends on costs.
UNKNOWN_COSTS = PlacementCosts(0.0, 0, 0, 0, 1.0, 1.0)


def call_policy(policy: LayerPolicy, loads: LayerLoads) -> Placement:
    """Call a user's policy. Raises `ConfigError` with its name if it returns no `Placement`."""
    placement: object = policy(loads)
    if not isinstance(placement, Placement):
        kind = type(placement).__name__
        raise ConfigError(
            f"placement policy {callable_name(policy)}: it returned a {kind}, no Placement; Placement.holding makes one"
        )
    return placement


class PlacementPlanner:
    """Chooses placements by a policy, identically on all ranks.

    Attributes:
        memory: m, maximum number of replicas on a rank in each layer.
        overlap: t, maximum number of experts sent for a layer.
        may_reshard: owners may change.
        planning_s: seconds that a search for a balance takes on the slowest rank; None: always search.
    """

    def __init__(
        self,
        policy: str | LayerPolicy,
        memory: int,
        overlap: int,
        may_reshard: bool,
        correction: Correction | None,
        node_layout: NodeLayout,
    ) -> None:
        self.policy, self.memory, self.overlap, self.may_reshard = policy, memory, overlap, may_reshard
        self.correction, self.node_layout = correction, node_layout
        self.costs = UNKNOWN_COSTS
        self.planning_s: float | None = None

    def choose_placements(
        self, iteration: int, placements: Sequence[Placement], history_ILE: NDArray[np.int64], topology: Topology
    ) -> list[Placement]:
        """Return each layer's placement in the next step. Collective."""
        world, before = topology.world, tuple(placements)
        if self.policy in HECATE_POLICIES and self.may_reshard and is_due(iteration):
            shardings, load_LE = tuple(placement.sharding for placement in before), predict_load(history_ILE)
            if self.planning_s is None or is_uneven(shardings, load_LE):
                before = reshard(shardings, load_LE, self.node_layout, self.overlap)
        # Layers are independent: distribute them over ranks.
        chosen_here = []
        for layer in range(world.index, len(before), world.size):
            loads = LayerLoads(iteration, before[layer], history_ILE[:, layer], self.node_layout, self.costs)
            placement = self._choose_placement(loads, layer)
            chosen_here.append((placement.owners, placement.replicas))
        owners = [placement.owners for placement in before]
        of_ranks = all_gather_object(world, (owners, chosen_here), "placements")
        if any(theirs != owners for theirs, _ in of_ranks):
            raise RankError(
                f"rank {topology.rank}: the ranks give experts to different owners. These follow from the loads: "
                "run the same versions of this library and of NumPy on every rank"
            )
        chosen = [of_ranks[layer % world.size][1][layer // world.size] for layer in range(len(before))]
        return [Placement(self.node_layout.num_ranks, *owners_and_replicas) for owners_and_replicas in chosen]

    def _choose_placement(self, loads: LayerLoads, layer: int) -> Placement:
        before = loads.placement
        if self.policy == "ep":
            return before
        if not callable(self.policy):
            return hecate(loads, t=self.overlap, m=self.memory, searches=self.policy == "hecate")
        placement = call_policy(self.policy, loads)
        same = (placement.num_ranks, placement.experts) == (before.num_ranks, before.experts)
        if not same or not (self.may_reshard or placement.owners == before.owners):
            raise ConfigError(
                f"ShardedExperts: the policy has placed layer {layer} as {_format_placement(placement)} after "
                f"{_format_placement(before)}. Keep the ranks and experts of the layer, and "
                "with reshard=False their owners."
            )
        return placement

    def calibrate(self, placement: Placement, tokens_WE: NDArray[np.int64]) -> Placement:
        assert self.correction is not None
        calibrated = self.correction(placement, tokens_WE, self.node_layout, self.memory, self.costs)
        if not placement.is_within(calibrated):
            raise ConfigError(
                f"ShardedExperts: calibrates made a placement that lacks something of the one before: "
                f"{_format_placement(placement)} is not within {_format_placement(calibrated)}"
            )
        return calibrated

    def share_rows(self, placement: Placement, tokens_WE: NDArray[np.int64], may_add: bool) -> Balance:
        """Assign a batch's rows to owners and replicas, with new replicas if `may_add`."""
        m = self.memory if may_add else 0
        # Backward takes twice as long as forward, which hides t experts.
        hidden_s = 2 * self.overlap * self.costs.expert_bytes / self.costs.inter_bytes_s
        return cheapest_balance(placement, tokens_WE, self.node_layout, m, self.costs, hidden_s, self.planning_s)

    def measure_planning(self, placed: PlacedExperts, topology: Topology) -> None:
        """Measure `planning_s`. Collective over all ranks."""
        sharding = placed.table.sharding
        skewed_WE = np.tile(4096 // np.arange(1, sharding.experts + 1), (sharding.num_ranks, 1))  # by Zipf's law
        seconds = []
        for _ in range(3):  # the first also imports and allocates
            start = perf_counter()
            balance = cheapest_balance(sharding, skewed_WE, self.node_layout, self.memory, self.costs, planning_s=0.0)
            # As in `split_rows`.
            cheapest_balance(balance.placement, skewed_WE, self.node_layout, 0, self.costs, planning_s=0.0)
            seconds.append(perf_counter() - start)
        self.planning_s = max_over_ranks_s(topology.world, [min(seconds)], "time to balance in")[0]


def measured_placement_costs(placed: PlacedExperts, model_dim: int, topology: Topology) -> PlacementCosts:
    """Measure the costs of a layer's tokens and experts. Collective over all ranks."""
    parameters, expert_bytes = placed.table.parameters, placed.table.expert_bytes
    first = parameters[0]
    fitted = measured_costs(topology, first.device, first.dtype).lines
    inter = fitted["all-to-all/ep"]
    # A multiplication and an addition per parameter in forward, twice that in backward.
    flop = 3 * 2 * sum(parameter.shape[1:].numel() for parameter in parameters)
    return PlacementCosts(
        token_s=flop * fitted["gemm"].beta_s,
        token_bytes=model_dim * first.element_size(),
        expert_bytes=expert_bytes,
        state_bytes=2 * expert_bytes,  # Adam's two moments; the optimizer has not stepped yet
        inter_bytes_s=inter.per_s,
        intra_bytes_s=fitted.get("all-gather/esp", inter).per_s,
    )


def _format_placement(placement: Placement) -> str:
    return str(placement).replace("\n", "; ")
