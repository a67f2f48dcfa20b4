"""The plans of a layer without a schedule: the plans assigned to it, if any.

`layers/schedule.py` has the subclass for layers with a schedule; a `MoELayer` without one does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import ALGORITHMS
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.comm.wire_format import WireFormat, find_wire_format
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import Dispatcher, ForwardDecision, LocalExperts, Routed, SharedExpert
from fusedmoe.engine.graph_dispatch import run_by_operators_in_graph
from fusedmoe.engine.module_hooks import needs_module_call
from fusedmoe.engine.run import AssignedPlans, GradientReducer, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import Gate
from fusedmoe.gates.whole_batch import ExpertChoice
from fusedmoe.kernels.derivatives import count_flops, graph_allows_dynamic_sizes, mark_constant_in_graphs
from fusedmoe.orders import Order
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.task import PHASES, Task, TaskKind

if TYPE_CHECKING:
    from fusedmoe.engine.one_sided_dispatcher import KernelTransport
    from fusedmoe.schedule.cost import CostModel
    from fusedmoe.schedule.workload import Workload


class PredictedExperts(Protocol):
    """Experts whose duration costs predict."""

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """Return the workload of a rank that sends `rows` rows."""
        ...


class PlannedExperts(LocalExperts, PredictedExperts, Protocol):
    """Experts that support plans: `Experts`, and experts of other libraries (`ExternalExperts`)."""

    @property
    def can_compile_chunks(self) -> bool:
        """True if compiled graphs can contain a planned layer with these experts."""
        ...

    def parameters(self) -> Iterable[Tensor]: ...

    def describe(self) -> str:
        """Return a description of these experts, for the key of cached measurements."""
        ...


class LayerParts(NamedTuple):
    """The parts of a layer on which plans and their costs depend."""

    topology: Topology
    gate: Gate
    order: Order
    experts: PlannedExperts


class LayerPlans:
    """Provides the plans of one layer.

    Args:
        is_placed: experts are dynamically placed.
    Attributes:
        assigned: plans that override the schedule.
        shared: the shared expert of the last batch that plans may compute; None: there is none.
        cost_measurement: called in each forward to measure costs; while set, the schedule is not used. None: no trial.
            Copies of the layer have neither assigned plans nor a cost measurement.
    """

    #: One-sided kernels are allowed; maximum number of chunks.
    puts, limit = False, 1
    #: One-sided kernels are required; compiled graphs, which use collectives, cannot hold such a layer.
    requires_puts = False
    #: Format of the rows that collectives send; None: their own dtype.
    wire: WireFormat | None = None
    shared: PredictedExperts | None = None

    def __init__(self, parts: LayerParts, is_placed: bool = False) -> None:
        self.topology, self.parts, self.is_placed = parts.topology, parts, is_placed
        topology = parts.topology
        self.kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "itself")
        self.cost_measurement: Callable[[Tensor, Exchange, Callable[[], ChunkExperts]], None] | None = None
        self.assigned: AssignedPlans | None = None
        self._forward_plans = ForwardDecision[AssignedPlans]()

    def __getstate__(self) -> dict[str, Any]:
        # Both belong to one layer of a step's plan, with its gradient reducer.
        return self.__dict__ | {"assigned": None, "cost_measurement": None}

    def __str__(self) -> str:
        return "off" if self.wire is None else f"off, {self.wire}"

    def set_wire(self, wire: str | None) -> None:
        """Set the format of the rows by its name. A dispatcher that exists already keeps its format."""
        given = find_wire_format(wire)
        self.wire = given and given.for_group_sizes(self.topology.ep.size, self.topology.esp.size)

    def encoded(self, workload: Workload) -> Workload:
        """Return the workload with the bytes of the rows as they are sent."""
        return workload if self.wire is None else workload.encoded(*self.wire.element_bytes(workload.model_dim))

    @property
    def can_plan(self) -> bool:
        """True if a forward may run by a plan."""
        return self.assigned is not None or self.cost_measurement is not None

    @property
    def can_compile(self) -> bool:
        """True if a compiled graph can hold the planned layer as one operator."""
        # A plan may reduce gradients during backward, but a graph completes them at its end.
        assigned = self.assigned
        reduces = assigned is not None and (assigned.gradients is not None or bool(assigned.trailing_all_reduces))
        return self.parts.experts.can_compile_chunks and not reduces and not self.requires_puts

    def assign(self, plans: Plans | None, gradients: GradientReducer | None, beside: Sequence[Task]) -> None:
        """Override the schedule with these plans; None restores it."""
        if plans is None:
            self.assigned = None
            return
        for phase in PHASES:
            plan = plans.of(phase)
            own = f"MoELayer.set_plan: the {phase} plan"
            reduced = [] if gradients is None else [TaskKind.GRADIENT_ALL_REDUCE]
            require_runnable(plan, (*self.kinds, TaskKind.SHARED_EXPERT, *reduced), own)
            missing = [kind for kind in self.kinds if kind not in {task.kind for task in plan}]
            if missing:
                raise ConfigError(f"{own} has no {missing[0]}, which every chunk of this layer goes through; add it")
        if gradients is None and self.shared is not None:
            plans = _with_shared_expert(plans)
        self.assigned = AssignedPlans(plans, gradients, beside)

    def set_shared(self, shared: PredictedExperts) -> None:
        """Plan the next batches with this shared expert."""
        self.shared = shared

    def set_costs(self, like: Tensor, costs: CostModel) -> None:
        """Plan the next batches of rows like `like` with new costs. No effect without a schedule."""

    def fused_kind(self, x_SM: Tensor) -> str | None:
        """Return the fused operation for rows like `x_SM`, or None: collectives. Collective if one may be available."""
        return None

    def transport(self, x_SM: Tensor) -> KernelTransport | None:
        """Return the one-sided kernels for rows like `x_SM`; None: collectives."""
        return None

    def find_plans(
        self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts] | None
    ) -> AssignedPlans | None:
        """Return the plans for this batch. None: run without a plan.

        `in_chunks` returns the experts in chunks; None: they must be called as a module.
        """
        if self.cost_measurement is not None and in_chunks is not None:
            self.cost_measurement(x_SM, exchange, in_chunks)
        return self.assigned_plans()

    def assigned_plans(self) -> AssignedPlans | None:
        if self.assigned is None and self._forward_plans.value is None:
            return None
        return self._forward_plans.decide(lambda: self.assigned)


def _with_shared_expert(plans: Plans) -> Plans:
    from fusedmoe.schedule.shared_expert import with_shared_expert

    return Plans(*(with_shared_expert(plans.of(phase), phase) for phase in PHASES))


class PlannedLayer:
    """A layer whose schedule can be overridden, eager or in a graph of `torch.compile`."""

    plans: LayerPlans
    dispatcher: Dispatcher
    experts: Any
    dispatch = "direct"

    def __new__(cls, *_: Any, **__: Any) -> Self:
        mark_constant_in_graphs(graph_allows_dynamic_sizes)
        count_flops()
        return super().__new__(cls)

    @property
    def is_planned(self) -> bool:
        return self.dispatcher.follows_plans and self.plans.can_plan

    @property
    def can_compile_exchange(self) -> bool:
        """True if a graph of torch.compile can contain this layer's exchange as operators."""
        # With several ranks only as one graph: otherwise every operator would break the graph.
        whole = self.dispatcher.collectives is None or graph_allows_dynamic_sizes()
        return self.dispatcher.compiles and whole and (not self.is_planned or self.plans.can_compile)

    def shared_in_plan(self, module: Any, x_SM: Tensor) -> SharedExpert | None:
        """Return the shared expert and its tokens for a plan; None if the layer computes it after the plan.

        It is computed after the plan if it is a custom module, which may call collectives.
        """
        if not getattr(module, "reads_parameters_once", False):
            return None
        if torch.compiler.is_compiling():
            return SharedExpert(module, x_SM) if self.is_planned else None
        self.plans.shared = module
        return SharedExpert(module, x_SM)

    def run_captured(
        self, routed: Routed, count: Tensor | None, loss: Tensor, masked: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Run dispatch, experts and combine as operators of a graph.

        Args:
            count: scalar count of non-finite values.
            masked: the number of tokens depends on a mask at run time.
        Returns:
            [S, M], and the loss, which depends on the exchange if this rank has no tokens; None: not in a graph, or
            there is no exchange.
        """
        collectives = self.dispatcher.collectives if torch.compiler.is_compiling() else None
        if collectives is None:
            return None
        if not self.is_planned or needs_module_call(self.experts):
            return run_by_operators_in_graph(collectives, routed, self.experts, count, loss, masked)
        from fusedmoe.engine.scheduled_operator import through_experts_in_graph

        y_SM, zero = through_experts_in_graph(collectives, routed, self.experts, count)
        # A rank without tokens takes part in the backward exchange through the gradient of its loss.
        return y_SM, loss if masked or len(y_SM) else loss + zero

    def set_plan(
        self, plans: Plans | None, gradients: GradientReducer | None = None, beside: Sequence[Task] = ()
    ) -> None:
        """Override the layer's schedule with these plans, the same on every rank. None restores the schedule;
        after `tune_model`, the layer runs without plans.

        Args:
            gradients: reduces the gradient buckets of the backward plan and of `beside`.
            beside: tasks that run alongside the layers after the plan.
        Raises:
            ConfigError: plans with tasks that this layer cannot run or without some of its tasks; a custom dispatcher.
        """
        require_library_dispatch(self.dispatch, None if plans is None else "set_plan")
        self.plans.assign(plans, gradients, beside)


def is_captured(layer: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Return whether a compiler captures this forward of a `MoELayer`."""
    if not torch.compiler.is_compiling():
        return False
    # A mask makes the number of tokens data-dependent, which `ExpertChoice` cannot handle in a graph.
    if mask is not None and (not graph_allows_dynamic_sizes() or isinstance(layer.gate, ExpertChoice)):
        return False
    # A graph checks cu_seqlens on this rank only; other ranks would wait for it.
    if cu_seqlens is not None and layer.topology.size > 1:
        return False
    captured: bool = not layer.hooks and layer.topology.mp.size == 1 and layer.can_compile_exchange
    return captured


def require_library_dispatch(dispatch: str | Dispatcher, option: str | None) -> None:
    """Raise `ConfigError` if a custom dispatcher would ignore an argument.

    `option`: the argument, such as "schedule='auto'"; None: no such argument was passed.
    """
    own = isinstance(dispatch, Dispatcher) or dispatch not in (*ALGORITHMS, "auto")
    if own and option is not None:
        raise ConfigError(
            f"MoELayer: {option} has no effect with a dispatcher of your own, {dispatch}, which runs dispatch, experts "
            "and combine by itself; leave one of the two out (dispatch='direct' takes both)"
        )
