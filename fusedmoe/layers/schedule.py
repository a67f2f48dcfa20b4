"""When a layer sends and when it computes: `MoELayer(…, schedule=…)`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fusedmoe.autograd.pipeline import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.layer import pass_by_degree, pass_of
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.workload import StackCosts, Workload


@dataclass(frozen=True)
class Schedule:
    """How a layer overlaps what it sends with what it computes. Results do not depend on it.

    Attributes:
        policy: a name of `fusedmoe.schedule.policies.POLICIES`.
        degrees: chunks forward and backward; None has the policy choose them by `costs`.
        costs: what collectives and products take on this machine, the same on every rank; None with `degrees`.
        limit: the largest degree that may be chosen.

    Raises:
        ConfigError: an unknown policy, a degree below 1, or neither degrees nor costs.
    """

    policy: str = "fsmoe"
    degrees: tuple[int, int] | None = None
    costs: CostModel | None = None
    limit: int = MAX_DEGREE

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown schedule {self.policy!r}; choose off, {', '.join(POLICIES)}")
        if self.degrees is not None and (len(self.degrees) != 2 or min(self.degrees) < 1):
            raise ConfigError(f"degrees are the chunks forward and backward, each at least 1, not {self.degrees}")
        if self.degrees is None and self.costs is None:
            raise ConfigError(
                f"schedule {self.policy!r} chooses its degrees by what this machine takes: give costs=CostModel(…) or "
                "degrees=(forward, backward)"
            )

    def plans(self, kinds: Collection[str], workload: Workload | None) -> Plans:
        """The plans of a layer with such parts; the same for the same arguments, so on every rank.

        Args:
            kinds: of `fusedmoe.schedule.task.PIPELINE`, what the layer has.
            workload: of the layer on one rank; None where degrees are given.
        """
        if self.degrees is not None:
            forward, backward = self.degrees
            return Plans(
                pass_by_degree(self.policy, kinds, forward, "forward"),
                pass_by_degree(self.policy, kinds, backward, "backward"),
            )
        assert self.costs is not None and workload is not None
        all_reduce = self.costs.lines.get("all-reduce/dp", Line(0.0, 0.0))
        costs = StackCosts((workload.layer_costs(self.costs),), all_reduce, self.costs.contention)
        plan = POLICIES[self.policy].plan(costs, self.limit)
        return Plans(pass_of(plan, 0, "forward"), pass_of(plan, 0, "backward"))

    def __str__(self) -> str:
        return self.policy if self.degrees is None else f"{self.policy} in {self.degrees} chunks"
