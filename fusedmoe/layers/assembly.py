"""Construction of a layer: checks of its parts, expert parameters, plans and dispatcher.

Modules for schedules, one-sided kernels and placed experts are imported only if a layer needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.topology import Topology
from fusedmoe.construction import describe_parts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher, Local
from fusedmoe.errors import ConfigError
from fusedmoe.experts.conversion import ExpertSource
from fusedmoe.experts.networks import NAMED, Experts, Place, assign_evenly
from fusedmoe.gates import Gate, SoftMoE
from fusedmoe.hooks import Hooks, hooks_and_wire
from fusedmoe.layers.input_checks import uniform_load_error
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans
from fusedmoe.orders import Einsum, Order

if TYPE_CHECKING:
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.placement.placed_experts import PlacedExperts


def require_parts(
    gate: object, experts: object, shared: object, order: object, topology: object, placement: str
) -> None:
    """Raise `ConfigError` for a part of a layer of the wrong type."""
    if placement not in ("ep", "fssdp"):
        raise ConfigError(f"placement = {placement!r}; choose ep or fssdp")
    network = "fusedmoe.experts.SwiGLU(hidden=2048), or modules of your own by fusedmoe.experts.Custom"
    _require_kind("gate", gate, Gate, "fusedmoe.gates.TopK(experts=8, k=2)")
    _require_kind("experts", experts, Experts, network)
    for name, part, kind, example in (
        ("shared", shared, Experts, network),
        ("order", order, Order, "fusedmoe.orders.Sparse()"),
        ("topology", topology, Topology, "fusedmoe.Topology.from_sizes(ep=4)"),
    ):
        if part is not None:
            _require_kind(name, part, kind, example)


def _require_kind(name: str, part: object, kind: type, example: str) -> None:
    if not isinstance(part, kind):
        raise ConfigError(f"MoELayer: {name} is {part!r}, no {kind.__name__}; give, say, {example}")


def agree_on_parts(layer: Any, schedule: str, placement: str, dtype: torch.dtype) -> None:
    """Raise `RankError` if ranks construct a layer from different parts. Collective."""
    if layer.topology.size == 1:
        return
    facts: dict[str, Any] = {"model_dim": layer.model_dim}
    parts = {"gate": layer.gate, "experts": layer.experts, "shared": layer.shared, "order": layer.order}
    for each in describe_parts(parts, layer.hooks):
        facts |= each
    facts |= {"dispatch": layer.dispatch, "mp_input": layer.mp_input, "schedule": schedule}
    facts |= {"placement": placement, "dtype": str(dtype)}
    own = "An argument or attribute that may differ by rank goes into the attribute rank_specific of the part's class."
    layer.topology.require_equal_facts(facts, "MoELayer", own)


def require_shardings(experts: Experts) -> None:
    """Raise `ConfigError` for experts that do not declare how their parameters are split over ranks."""
    # Gradients of different experts would be summed.
    unknown = [name for name, _ in experts.named_parameters() if name not in experts.shardings]
    if unknown:
        raise ConfigError(
            f"{type(experts).__name__} does not say how {', '.join(unknown)} is split over ep and esp. Set, say, "
            f"self.shardings[{unknown[0]!r}] = {{'ep': 0}} where it is made, if its first dimension counts the local "
            "experts, or {} if all ranks hold the same."
        )


def require_replicable(order: Order, gate: Gate) -> None:
    """Raise `ConfigError` for parts that do not support dynamic expert placement.

    Rows must be routable to any replica of an expert, and loads must differ between experts.
    """
    if isinstance(order, Einsum):
        raise ConfigError("placement='fssdp' sends rows to copies, which an order by products cannot: Sparse()")
    if isinstance(gate, SoftMoE):
        raise uniform_load_error(gate)


def make_plans(schedule: str | Schedule | None, parts: LayerParts, is_placed: bool, has_hooks: bool) -> LayerPlans:
    """Create the plan provider of a layer. With schedule "off" or None, the layer follows assigned plans only."""
    if schedule is None or schedule == "off":
        return LayerPlans(parts, is_placed)
    from fusedmoe.layers.schedule import OFF, Schedule, ScheduledPlans

    # A name may imply more than a policy: "auto" also allows one-sided kernels.
    named = Schedule.named(schedule) if isinstance(schedule, str) else schedule
    assert named is not None
    if isinstance(named, Schedule) and named.policy == OFF:
        plans = LayerPlans(parts, is_placed)
        plans.set_wire(named.wire)
        return plans
    return ScheduledPlans(parts, named, is_placed, has_hooks)


def set_up_experts(
    parts: LayerParts,
    shared: Experts | None,
    model_dim: int,
    is_placed: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> PlacedExperts | None:
    """Create the experts' and the shared expert's parameters on this rank; return placed experts, None if static.

    Raises:
        ConfigError: experts cannot be split, do not declare their split, or have another number of experts than the
            gate; a part does not support dynamic placement.
    """
    topology, gate, order, experts = parts
    assert isinstance(experts, Experts)
    if is_placed:
        from fusedmoe.placement.expert_table import initial_place
        from fusedmoe.placement.placed_experts import PlacedExperts

        place = initial_place(gate.experts, topology)
    else:
        place = assign_evenly(gate.experts, topology)
    if isinstance(source := getattr(experts, "source", None), ExpertSource):
        source.require_experts(gate.experts)
    experts.setup(model_dim, place, device=device, dtype=dtype)
    # After the experts: both use the default generator, and a seed must reproduce the layers of earlier versions.
    if shared is not None:
        shared.setup(model_dim, Place(), device=device, dtype=dtype)
        shared.shardings = {}
    if topology.ep.size * topology.esp.size > 1:
        require_shardings(experts)
    experts.own_numbers, experts.num_experts = tuple(place.numbers), gate.experts
    for name, _ in experts.named_parameters():
        experts.shardings.setdefault(name, {"ep": NAMED})  # marks an expert's parameter even if nothing is split
    if not is_placed:
        return None
    require_replicable(order, gate)
    return PlacedExperts(experts, gate.experts, topology)


def make_dispatcher(
    dispatch: str | Dispatcher,
    plans: LayerPlans,
    hooks: Sequence[Hooks],
    placed: PlacedExperts | None,
    name: str = "MoELayer",
) -> Dispatcher:
    """Create the dispatcher of a layer, or check and return a custom one.

    `placed`: dynamically placed experts; None: static experts.
    """
    if isinstance(dispatch, Dispatcher):
        dispatch.require_methods()
        return dispatch
    topology, gate = plans.parts.topology, plans.parts.gate
    hooks, wire = hooks_and_wire(hooks, plans.wire)
    all_to_all = make_all_to_all("direct" if dispatch == "auto" else dispatch, topology, wire)
    # Hooks get dispatched rows: with hooks, even a single rank uses collectives.
    if topology.ep.size * topology.esp.size == 1 and not hooks:
        return Local()
    made: Collectives
    if placed is not None:
        from fusedmoe.placement.placed_experts import PlacedDispatcher

        made = PlacedDispatcher(placed, topology, all_to_all, plans.find_plans, hooks)
    elif plans.puts:
        from fusedmoe.engine.one_sided_dispatcher import OneSided

        made = OneSided(plans.transport, topology, all_to_all, plans.find_plans, name=name)
    else:
        made = Collectives(topology, all_to_all, plans.find_plans, hooks, name)
    if dispatch == "auto":
        from fusedmoe.layers.measure import choose_all_to_all, has_algorithm_choice

        if has_algorithm_choice(topology):
            made.choose_algorithm = partial(choose_all_to_all, topology, gate, wire=wire)
    return made
