"""Tokens of other libraries' layers on their way through experts over ranks, by a schedule as `MoELayer` has it.

The router, the parameters and the losses are the other library's. It gives tokens that are routed already, and experts
that say how wide they are (`ExternalExperts`); plans, costs and caches are those of `layers/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedmoe.comm.metadata import NonFinite
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.module_hooks import must_be_called
from fusedmoe.engine.run import GradientReducer, Plans
from fusedmoe.engine.scheduled_operator import through_experts_in_graph
from fusedmoe.engine.wrappers import watch_utilities
from fusedmoe.gates import Random
from fusedmoe.kernels.derivatives import count_flops
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.assembly import make_dispatcher, make_plans
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.layer_plans import LayerParts
from fusedmoe.orders import Dropless
from fusedmoe.schedule.task import Task

if TYPE_CHECKING:  # what only exchanges with a schedule load
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.schedule.workload import Workload

#: The attribute by which a module has its `ScheduledExchange`.
EXCHANGE = "fusedmoe_exchange"


class ExternalExperts:
    """A rank's experts in a module of another library. The module's forward and `in_chunks` are `LocalExperts`, unless
    a subclass says otherwise.

    Args:
        num_experts: over all ranks.
        widths: M, and an expert's H over all of its shards.   gated: two up projections.
    Attributes:
        reads_once: as of `fusedmoe.experts.Experts`.
    """

    grouped = True  # to graphs, which compute those by autograd again
    reads_once = False

    def __init__(self, module: nn.Module, num_experts: int, widths: tuple[int, int], gated: bool) -> None:
        self.module, self.num_experts, self.widths, self.gated = module, num_experts, widths, gated

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        y_SM: Tensor = self.module(x_SM, layout, weight_N)
        return y_SM

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        chunks: Any = self.module
        of_rows: ChunkExperts = chunks.in_chunks(x_SM)
        return of_rows

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that `__call__` calls, whose hooks run then."""
        return self.module.named_modules()

    def modules(self) -> Iterator[nn.Module]:
        return (module for _, module in self.named_modules())

    def in_graphs(self) -> nn.Module | None:
        """Returns a module that computes the same, of whose parameters operators get what a graph has; None: there is
        more to them than an operator sees."""
        return self.module

    def parameters(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def describe(self) -> str:
        return type(self.module).__qualname__

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        from fusedmoe.schedule.workload import Workload

        return Workload.of_rows(rows, *self.widths, self.num_experts, self.gated, itemsize, ep, esp)


class ScheduledExchange:
    """The way of a layer's tokens to its experts' ranks and back; results do not depend on the schedule.

        exchange = ScheduledExchange(topology, experts, "auto", "my library")
        y_SM = exchange.through_experts(x_SM, autograd.order(number_SK, experts.num_experts), weight_SK)

    With "auto" and names of policies the first forward, in each dtype, measures the machine, and keeps that on disk.
    A graph of `torch.compile` holds it as one operator. Under selective activation checkpoints tokens travel as by
    "off".

    Args:
        schedule: as for `MoELayer`.
        name: of the library that calls, for messages.
    Attributes:
        dispatcher: sends tokens; `Collectives` unless the topology is of one rank.
        plans: that the dispatcher follows.
        number: which of a model's layers it is of, for plans of steps.
        placed: None, as of a layer whose experts stay.
    Raises:
        ConfigError: an unknown schedule.
        RankError: from making one, or `set_schedule`: another one on another rank. Both are collective.
    """

    placed = None

    def __init__(self, topology: Topology, experts: ExternalExperts, schedule: str | Schedule, name: str) -> None:
        self.topology, self.experts, self._name = topology, experts, name
        self.checks = InputChecks(topology, name)
        self.number: int | None = None
        count_flops()
        if topology.size > 1:
            watch_utilities()
        self.set_schedule(schedule)

    def set_schedule(self, schedule: str | Schedule) -> None:
        """Has tokens travel by another schedule from now on. Collective."""
        # A stand-in for the other library's router, which nobody can ask for the choice of random tokens.
        gate = Random(self.experts.num_experts)
        gate.setup(self.experts.widths[0])
        parts = LayerParts(self.topology, gate, Dropless(), self.experts)
        plans = make_plans(schedule, parts, moves=False, hooked=False)
        if self.topology.size > 1:
            own = self.experts
            facts: dict[str, Any] = {
                "schedule": schedule if isinstance(schedule, str) else repr(schedule),
                "experts": own.describe(),
            }
            facts |= {"number of experts": own.num_experts, "model_dim and hidden": own.widths, "gated": own.gated}
            self.topology.agree(facts, self._name)
        self.plans = plans
        self.dispatcher = make_dispatcher("direct", plans, (), None, self._name)
        if (collectives := self.dispatcher.collectives) is not None:
            collectives.local = self.experts.in_graphs()

    @property
    def plans_nothing(self) -> bool:
        """Tells whether one thing goes after the other in any case."""
        return self.plans.plans_nothing

    def through_experts(self, x_SM: Tensor, layout: Layout, weight_SK: Tensor) -> Tensor:
        """Returns [S, M], the sum of each token's results. Collective.

        Saves for backward by a plan: received tokens, and what experts keep of them (as `MoELayer` does).

        Args:
            x_SM: [S, M] in the dtype in which tokens travel, any number of tokens.
            layout: of rows sorted by expert, of all experts.   weight_SK: [S, K] router weights.
        Raises:
            ConfigError, RankError: with one rank, or several: tokens or weights that are NaN or infinite; a rank that
                fails or does not come in time.
        """
        if torch.compiler.is_compiling() or self.plans_nothing:
            return self.in_graph(Routed(x_SM, layout, weight_SK), self.checks.of_given(x_SM, weight_SK))
        self.checks.tell_logits()
        return self.by_plan(Routed(x_SM, layout, weight_SK, self.checks.for_exchange(x_SM, weight_SK)))

    def in_graph(self, routed: Routed, bad: Tensor | None) -> Tensor:
        """Does the same for tokens of which `bad` are not finite, by operators; a graph can hold it."""
        if (collectives := self.dispatcher.collectives) is None:
            return self.dispatcher.through_experts(routed, self.experts)
        if self.plans_nothing or not self.plans.compiles or must_be_called(self.experts):
            return collectives.by_operators(routed, self.experts, bad)
        return through_experts_in_graph(collectives, routed, self.experts, bad)[0]

    def by_plan(self, routed: Routed) -> Tensor:
        """Does the same for tokens that were looked at, by the plan that there is, if any. Not for graphs."""
        if self.topology.ep.size == self.topology.esp.size == 1:
            assert not isinstance(routed.refusal, NonFinite)
            self.checks.refuse(routed.refusal)  # no exchange would tell it
        with self.topology.guard(self._name):
            self.plans.parts.gate.k = routed.layout.k
            return self.dispatcher.through_experts(routed, self.experts)

    def set_plan(
        self, plans: Plans | None, gradients: GradientReducer | None = None, beside: Sequence[Task] = ()
    ) -> None:
        """Has tokens travel by these plans, as `MoELayer.set_plan` does."""
        self.plans.assign(plans, gradients, beside)


# By the world, as a process may end one and make another; then by ranks, places and time-out. No process group of a
# caller's is held: one that its owner destroys is freed. The ranks that share a topology are the same for all of them,
# so that all of them find it here, or none.
_topologies: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Topology]] = WeakKeyDictionary()


def shared_topology(
    handle: dist.ProcessGroup | None, experts: Tensor | None = None, timeout_s: float = 300.0
) -> Topology:
    """Return `Topology.from_group`, one for all layers over the same ranks. Collective on first use.

    Measurements for one layer, and buffers of its one-sided kernels, serve the next.
    """
    if handle is None or dist.get_world_size(handle) == 1:
        return Topology()
    world: Any = dist.group.WORLD
    # Topologies of an ended world hold dead process groups.
    for old in [known for known in _topologies if known is not world]:
        del _topologies[old]
    made = _topologies.setdefault(world, {})
    places = None if experts is None else repr(experts.tolist())
    key = tuple(dist.get_process_group_ranks(handle)), places, timeout_s
    if key not in made:
        made[key] = Topology.from_group(handle, experts, timeout_s=timeout_s)
    return made[key]


def exchanges_of(model: nn.Module) -> list[ScheduledExchange]:
    """Lists the exchanges of a model's modules, in the order of these."""
    found = (getattr(module, EXCHANGE, None) for module in model.modules())
    return [exchange for exchange in found if isinstance(exchange, ScheduledExchange)]
