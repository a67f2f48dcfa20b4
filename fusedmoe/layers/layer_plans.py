"""The plans that a layer works by where it has no schedule of its own: those it was assigned, or none.

A layer with a schedule has `layers/schedule.py` in its place, which is loaded for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import LocalExperts, recomputing
from fusedmoe.engine.run import Assigned, GradientReducer, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate
from fusedmoe.orders import Order
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.task import Task, TaskKind

if TYPE_CHECKING:
    from fusedmoe.engine.one_sided_dispatcher import KernelTransport
    from fusedmoe.schedule.cost import CostModel
    from fusedmoe.schedule.workload import Workload


class PlannedExperts(LocalExperts, Protocol):
    """Experts for whose work plans can be made: `Experts`, and those of other libraries (`ExternalExperts`)."""

    @property
    def grouped(self) -> bool:
        """Tells whether graphs can hold them."""
        ...

    def parameters(self) -> Iterable[Tensor]: ...

    def describe(self) -> str:
        """Returns what tells them from others of their class, for what is kept of measurements."""
        ...

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """Returns the work for a rank that sends `rows` rows."""
        ...


class LayerParts(NamedTuple):
    """The parts of a layer that plans, and what they cost, depend on."""

    topology: Topology
    gate: Gate
    order: Order
    experts: PlannedExperts


class LayerPlans:
    """Finds the plans of one layer.

    Args:
        moves: its experts do.
    Attributes:
        kinds: the kinds of tasks that plans by collectives have.
        assigned: plans to follow, whatever the schedule; they do not go with copies.
        trial: called in each forward; assigned plans then override the schedule even if there are none. None: no trial.
    """

    #: Kernels may send and receive by themselves, in so many chunks at most.
    puts, limit = False, 1
    #: They must, and graphs, in which collectives send, cannot hold them.
    fuses = False

    def __init__(self, parts: LayerParts, moves: bool = False) -> None:
        self.topology, self.parts, self.moves = parts.topology, parts, moves
        topology = parts.topology
        self.kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "itself")
        self.trial: Callable[[Tensor, Exchange, Callable[[], ChunkExperts]], None] | None = None
        self.assigned: Assigned | None = None
        self._followed: Assigned | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no reducer of gradients, and is no layer of the step that was planned.
        return self.__dict__ | {"assigned": None, "_followed": None}

    def __str__(self) -> str:
        return "off"

    @property
    def plans_nothing(self) -> bool:
        """Tells whether one thing goes after the other in any case."""
        return self.assigned is None and self.trial is None

    @property
    def compiles(self) -> bool:
        """Tells whether a graph can hold what the layer does by its plans, as one operator."""
        # Gradients that a plan reduces beside rows must be complete then, which those of a graph are at its end.
        reduces = self.assigned is not None and (self.assigned.gradients is not None or bool(self.assigned.beside))
        return self.parts.experts.grouped and not reduces and not self.fuses

    def assign(self, plans: Plans | None, gradients: GradientReducer | None, beside: Sequence[Task]) -> None:
        """Has the layer follow these plans; see `MoELayer.set_plan`."""
        if plans is None:
            self.assigned = None
            return
        for phase, plan in (("forward", plans.forward), ("backward", plans.backward)):
            own = f"MoELayer.set_plan: the {phase} plan"
            require_runnable(
                plan, (*self.kinds, *([TaskKind.GRADIENT_ALL_REDUCE] if gradients is not None else [])), own
            )
            lacks = [kind for kind in self.kinds if kind not in {task.kind for task in plan}]
            if lacks:
                raise ConfigError(f"{own} has no {lacks[0]}, which every chunk of this layer goes through; add it")
        self.assigned = Assigned(plans, gradients, beside)

    def renew(self, like: Tensor, costs: CostModel) -> None:
        """Plans the next rows like these by costs that were measured again; nothing where plans need no costs."""

    def fused_kind(self, x_SM: Tensor) -> str | None:
        """Returns the fused operation that takes rows like these; None: none can. Collective where one might."""
        return None

    def transport(self, x_SM: Tensor) -> KernelTransport | None:
        """Returns how kernels send and receive by themselves; None where collectives do."""
        return None

    def find(self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None) -> Assigned | None:
        """Returns the plans for as many pairs as the rank has that sends the most. None: nothing goes in chunks."""
        if self.trial is not None and in_chunks is not None:
            self.trial(x_SM, exchange, in_chunks)
        return self.to_follow()

    def to_follow(self) -> Assigned | None:
        """Returns the plans that the layer was assigned."""
        if self.assigned is None and self._followed is None:
            return None
        # Where activations are computed again, those that the forward pass followed: a checkpoint compares what is
        # saved.
        if not recomputing():
            self._followed = self.assigned
        return self._followed
