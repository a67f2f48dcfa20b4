"""A load trace under a policy: each rank's work, what enters the nodes, and what is added to make it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.placement.loads import LoadTrace
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.policies import Policy, Situation
from fusedmoe.placement.predict import WINDOW
from fusedmoe.placement.price import Costs, compute_s, exchange_s, load


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a policy makes of a trace, from its sixth iteration on: the earlier ones are the first prediction's.

    Attributes:
        last: [L], the placements of the last iteration.
        work_ILW: tokens that each rank computes.
        ingress_IL: bytes that the rank with the most receives from other nodes in one all-to-all.
        exchange_IL, compute_IL: seconds of the all-to-alls, and of the busiest rank's experts, of an iteration.
        waits_I: seconds in which everything waits for parameters on their way.
        sent_I: bytes of parameters, gradients of replicas and state that are sent, hidden or not.
        replicas_I: the most replicas that a rank holds, of all layers together.
        owned_I: the most experts that a rank owns, of all layers together.
    """

    last: tuple[Placement, ...]
    work_ILW: NDArray[np.int64]
    ingress_IL: NDArray[np.int64]
    exchange_IL: NDArray[np.float64]
    compute_IL: NDArray[np.float64]
    waits_I: NDArray[np.float64]
    sent_I: NDArray[np.int64]
    replicas_I: NDArray[np.int64]
    owned_I: NDArray[np.int64]

    @property
    def straggler_IL(self) -> NDArray[np.float64]:
        """The busiest rank's work over the mean of all; 1 where there is none."""
        mean_IL = self.work_ILW.mean(axis=2)
        return np.where(mean_IL > 0, self.work_ILW.max(axis=2) / np.maximum(mean_IL, 1e-300), 1.0)

    @property
    def straggler(self) -> float:
        """Its mean."""
        return float(self.straggler_IL.mean())

    @property
    def ingress_bytes(self) -> float:
        """Mean bytes that the busiest rank receives from other nodes, in the all-to-all of one layer."""
        return float(self.ingress_IL.mean())

    @property
    def layers_s(self) -> float:
        """Mean seconds of all layers' all-to-alls and experts in an iteration."""
        return float((self.exchange_IL + self.compute_IL).sum(axis=1).mean())

    @property
    def waits_s(self) -> float:
        """Mean seconds of an iteration in which everything waits for parameters."""
        return float(self.waits_I.mean())

    @property
    def iteration_s(self) -> float:
        """Both: what the experts' layers take of an iteration."""
        return self.layers_s + self.waits_s

    def speedup_L(self, of: Outcome) -> NDArray[np.float64]:
        """[L]: how many times faster the layers are than `of`'s, without what waits (Hecate, Fig. 11)."""
        ours_L, theirs_L = ((one.exchange_IL + one.compute_IL).sum(axis=0) for one in (self, of))
        return theirs_L / ours_L


def simulate(
    trace: LoadTrace,
    policy: Policy,
    nodes: Nodes,
    costs: Costs,
    *,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Follows the trace. It starts from even shardings.

    Args:
        show: called after each iteration with how many are done, and of how many.
    Raises:
        ConfigError: the trace is of other ranks, or too short for a prediction.
    """
    if trace.ranks != nodes.ranks:
        raise ConfigError(f"simulation: a trace of {trace.ranks} ranks, but {nodes.ranks} ranks in nodes")
    if len(trace) <= WINDOW:
        raise ConfigError(
            f"simulation: {len(trace)} iterations; the first {WINDOW} are for the prediction, give more than that"
        )
    load_ILE = trace.load_ILE
    placements = (Placement.even(trace.ranks, trace.experts),) * trace.layers
    rows = []
    for iteration in range(WINDOW, len(trace)):
        tokens_LWE = trace.tokens_ILWE[iteration]
        decision = policy(Situation(iteration, placements, load_ILE[:iteration], tokens_LWE, nodes, costs))
        placements = decision.placements
        found = [load(tokens_WE, one, nodes) for tokens_WE, one in zip(tokens_LWE, placements, strict=True)]
        rows.append(
            (
                [one.work_W for one in found],
                [costs.token_bytes * one.ingress_W.max() for one in found],
                [exchange_s(one, costs) for one in found],
                [compute_s(one, costs) for one in found],
                decision.waits_s,
                decision.sent_bytes,
                np.sum([one.extra_W() for one in placements], axis=0).max(),
                np.sum([np.bincount(one.owners, minlength=one.ranks) for one in placements], axis=0).max(),
            )
        )
        show(iteration + 1 - WINDOW, len(trace) - WINDOW)
    return Outcome(placements, *(np.array(column) for column in zip(*rows, strict=True)))
