"""Scheduled dispatch, experts and combine for MoE layers of other libraries, which route tokens themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedmoe.comm.metadata import NonFiniteCount
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import Routed, SharedExpert
from fusedmoe.engine.module_hooks import needs_module_call
from fusedmoe.engine.scheduled_operator import through_experts_in_graph
from fusedmoe.engine.wrappers import watch_utilities
from fusedmoe.gates import Random
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.assembly import make_dispatcher, make_plans
from fusedmoe.layers.external_shared import SharedModule
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.layer_plans import LayerParts, PlannedLayer
from fusedmoe.orders import Dropless

if TYPE_CHECKING:  # imported at run time by exchanges with a schedule only
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.schedule.workload import Workload

#: Attribute of a module that holds its `ScheduledExchange`.
EXCHANGE = "fusedmoe_exchange"


class ExternalExperts:
    """A rank's experts in a module of another library, whose forward and `in_chunks` follow `LocalExperts`.

    Args:
        num_experts: over all ranks.
        widths: (M, H), with the hidden dimension H of an expert over all of its shards.
        gated: experts have two up projections.
    Attributes:
        reads_parameters_once: True if `in_chunks` reads parameters once and chunks read none.
    """

    can_compile_chunks = True  # graphs recompute experts by autograd
    reads_parameters_once = False

    def __init__(self, module: nn.Module, num_experts: int, widths: tuple[int, int], gated: bool) -> None:
        self.module, self.num_experts, self.widths, self.gated = module, num_experts, widths, gated

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        y_SM: Tensor = self.module(x_SM, layout, weight_N)
        return y_SM

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        module: Any = self.module
        of_rows: ChunkExperts = module.in_chunks(x_SM)
        return of_rows

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules()

    def modules(self) -> Iterator[nn.Module]:
        return (module for _, module in self.named_modules())

    def graph_module(self) -> nn.Module | None:
        """Return the module that an operator calls in a compiled graph, with the graph's tensors as its parameters.

        None: the experts cannot be called this way.
        """
        return self.module

    def parameters(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def describe(self) -> str:
        return type(self.module).__qualname__

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        from fusedmoe.schedule.workload import Workload

        return Workload.of_rows(rows, *self.widths, self.num_experts, self.gated, itemsize, ep, esp)


class ScheduledExchange(PlannedLayer):
    """Dispatch, experts and combine of a layer's tokens, by a schedule. Results do not depend on the schedule.

        exchange = ScheduledExchange(topology, experts, "auto", "my library")
        y_SM = exchange.through_experts(x_SM, autograd.order(number_SK, experts.num_experts), weight_SK)

    With "auto" or a policy's name, the first forward in each dtype measures the machine and stores the result
    on disk. A `torch.compile` graph holds the exchange as one operator if it runs by a plan, otherwise as
    several. Under selective activation checkpoints it runs as with "off".

    Attributes:
        number: index among the model's layers, for plans of steps.
    Raises:
        ConfigError: unknown schedule.
        RankError: another rank has a different schedule; raised by construction and `set_schedule`, both
            collective.
    """

    placed = None

    def __init__(self, topology: Topology, experts: ExternalExperts, schedule: str | Schedule, name: str) -> None:
        self.topology, self.experts, self._name = topology, experts, name
        self.checks = InputChecks(topology, name)
        self.number: int | None = None
        if topology.size > 1:
            watch_utilities()
        self.set_schedule(schedule)

    def set_schedule(self, schedule: str | Schedule) -> None:
        """Replace the schedule. Collective."""
        # Routes random tokens in measurements, in place of the other library's router.
        gate = Random(self.experts.num_experts)
        gate.setup(self.experts.widths[0])
        parts = LayerParts(self.topology, gate, Dropless(), self.experts)
        plans = make_plans(schedule, parts, is_placed=False, has_hooks=False)
        if self.topology.size > 1:
            own = self.experts
            facts: dict[str, Any] = {
                "schedule": schedule if isinstance(schedule, str) else repr(schedule),
                "experts": own.describe(),
            }
            facts |= {"number of experts": own.num_experts, "model_dim and hidden": own.widths, "gated": own.gated}
            self.topology.require_equal_facts(facts, self._name)
        self.plans = plans
        self._make_dispatcher()

    def set_wire(self, wire: str | None) -> None:
        """Replace the format of rows between ranks (`Schedule`). Collective."""
        self.topology.require_equal_facts({"wire": wire}, self._name)
        self.plans.set_wire(wire)
        self._make_dispatcher()

    def _make_dispatcher(self) -> None:
        self.dispatcher = make_dispatcher("direct", self.plans, (), None, self._name)
        if (collectives := self.dispatcher.collectives) is not None:
            collectives.graph_module = self.experts.graph_module()

    @property
    def can_plan(self) -> bool:
        return self.plans.can_plan

    def through_experts(self, x_SM: Tensor, layout: Layout, weight_SK: Tensor) -> Tensor:
        """Dispatch tokens, run the experts and combine: [S, M], each token's weighted sum of outputs. Collective.

        If the schedule gives a plan, received tokens and expert activations are saved for backward, as in `MoELayer`.

        Args:
            x_SM: [S, M] in the dtype to send; ranks may have different S.
            layout: layout of the S·K (token, expert) rows sorted by global expert index.
        Raises:
            ConfigError, RankError: any rank has non-finite tokens or weights, fails, or times out.
        """
        if torch.compiler.is_compiling() or not self.can_plan:
            return self.run_in_graph(Routed(x_SM, layout, weight_SK), self.checks.nonfinite_flag(x_SM, weight_SK))
        self.checks.raise_deferred()
        return self.run_by_plan(Routed(x_SM, layout, weight_SK, self.checks.values_refusal(x_SM, weight_SK)))

    def run_in_graph(self, routed: Routed, bad: Tensor | None) -> Tensor:
        """Like `through_experts`, as operators for graphs. `bad`: scalar count of non-finite values."""
        if (collectives := self.dispatcher.collectives) is None:
            return self.dispatcher.through_experts(routed, self.experts)
        if not (self.can_plan and self.plans.can_compile) or needs_module_call(self.experts):
            return collectives.run_by_operators(routed, self.experts, bad)
        return through_experts_in_graph(collectives, routed, self.experts, bad)[0]

    def through_experts_with_shared(
        self, x_SM: Tensor, layout: Layout, weight_SK: Tensor, module: nn.Module, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Like `through_experts` outside of graphs; also return `module(x)`, [S, M], if the plan has computed it.

        In activation checkpoints with `use_reentrant=False`, which cannot keep the module's graph, it has not.
        """
        given = SharedModule(module)
        shared = SharedExpert(given, x.view(-1, x.shape[-1]))
        self.plans.set_shared(given)
        self.checks.raise_deferred()
        refusal = self.checks.values_refusal(x_SM, weight_SK)
        return self.run_by_plan(Routed(x_SM, layout, weight_SK, refusal, shared)), shared.result

    def run_by_plan(self, routed: Routed) -> Tensor:
        """Like `through_experts`, for checked tokens, outside of graphs."""
        if not isinstance(routed.refusal, NonFiniteCount):
            self.checks.refuse_without_exchange(routed.refusal)
        with self.topology.guard(self._name):
            self.plans.parts.gate.k = routed.layout.k
            return self.dispatcher.through_experts(routed, self.experts)


# Per world, because a process may destroy one and create another. The caller's process group is not referenced, so that
# its owner can destroy it.
_topologies: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Topology]] = WeakKeyDictionary()


def shared_topology(
    handle: dist.ProcessGroup | None,
    experts: Tensor | None = None,
    timeout_s: float = 300.0,
    ranks_per_node: int | None = None,
) -> Topology:
    """Return `Topology.from_group`, or one rank without `handle`. Collective on first use.

    All layers over the same ranks share it, and with it measurements and buffers of one-sided kernels.

    Args:
        experts, ranks_per_node: as in `Topology.from_group`.
    """
    if handle is None or dist.get_world_size(handle) == 1:
        return Topology()
    world: Any = dist.group.WORLD
    # Topologies of an ended world hold dead process groups.
    for old in [known for known in _topologies if known is not world]:
        del _topologies[old]
    made = _topologies.setdefault(world, {})
    places = None if experts is None else repr(experts.tolist())
    key = tuple(dist.get_process_group_ranks(handle)), places, timeout_s, ranks_per_node
    if key not in made:
        made[key] = Topology.from_group(handle, experts, ranks_per_node=ranks_per_node, timeout_s=timeout_s)
    return made[key]


def exchanges_in(model: nn.Module) -> list[ScheduledExchange]:
    found = (getattr(module, EXCHANGE, None) for module in model.modules())
    return [exchange for exchange in found if isinstance(exchange, ScheduledExchange)]
