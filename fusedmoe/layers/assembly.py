"""Assembly of a layer: checks of its parts, and what it gets by them: parameters of experts, plans, a dispatcher.

What only schedules, kernels that send by themselves or experts that move need is loaded for layers that ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fusedmoe.comm.all_to_all import ALGORITHMS, make_all_to_all
from fusedmoe.comm.topology import Topology
from fusedmoe.construction import facts_of_all
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher, Local
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED, Experts, Place, even_place
from fusedmoe.gates import Gate, SoftMoE
from fusedmoe.hooks import Hooks
from fusedmoe.layers.input_checks import no_load
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans
from fusedmoe.orders import Einsum, Order

if TYPE_CHECKING:
    from fusedmoe.layers.dynamic_experts import DynamicExperts
    from fusedmoe.layers.schedule import Schedule


def require_parts(
    gate: object,
    experts: object,
    shared: object,
    order: object,
    topology: object,
    placement: str,
) -> None:
    """Checks what a layer is made of.

    Raises:
        ConfigError: a part of another kind.
    """
    if placement not in ("ep", "fssdp"):
        raise ConfigError(f"placement = {placement!r}; choose ep or fssdp")
    network = "fusedmoe.experts.SwiGLU(hidden=2048), or modules of your own by fusedmoe.experts.Custom"
    _require_kind("gate", gate, Gate, "fusedmoe.gates.TopK(experts=8, k=2)")
    _require_kind("experts", experts, Experts, network)
    # A name or a class in place of a part would be noticed late, without a cure, or never.
    for name, part, kind, example in (
        ("shared", shared, Experts, network),
        ("order", order, Order, "fusedmoe.orders.Sparse()"),
        ("topology", topology, Topology, "fusedmoe.Topology.from_sizes(ep=4)"),
    ):
        if part is not None:
            _require_kind(name, part, kind, example)


def require_library_dispatch(dispatch: str | Dispatcher, asks: str | None) -> None:
    """Refuses what a dispatcher of the user's would ignore.

    Args:
        dispatch: it, or its name in `MoELayer.dispatch`.   asks: for it: `schedule='auto'`, say; None: nothing does.
    Raises:
        ConfigError: something does.
    """
    own = isinstance(dispatch, Dispatcher) or dispatch not in (*ALGORITHMS, "auto")
    if own and asks is not None:
        raise ConfigError(
            f"MoELayer: {asks} has no effect with a dispatcher of your own, {dispatch}, which runs dispatch, experts "
            "and combine by itself; leave one of the two out (dispatch='direct' takes both)"
        )


def _require_kind(name: str, part: object, kind: type, example: str) -> None:
    if not isinstance(part, kind):
        raise ConfigError(f"MoELayer: {name} is {part!r}, no {kind.__name__}; give, say, {example}")


def agree_on_parts(layer: Any, schedule: str, placement: str, dtype: torch.dtype) -> None:
    """Check that all ranks make the same layer, of parts that were constructed alike. Collective.

    Raises:
        RankError: they do not.
    """
    if layer.topology.size == 1:
        return
    facts: dict[str, Any] = {"model_dim": layer.model_dim}
    parts = {"gate": layer.gate, "experts": layer.experts, "shared": layer.shared, "order": layer.order}
    for each in facts_of_all(parts, layer.hooks):
        facts |= each
    facts |= {"dispatch": layer.dispatch, "mp_input": layer.mp_input, "schedule": schedule}
    facts |= {"placement": placement, "dtype": str(dtype)}
    own = "An argument or attribute that may differ by rank goes into the attribute rank_specific of the part's class."
    layer.topology.agree(facts, "MoELayer", own)


def require_shardings(experts: Experts) -> None:
    """Refuses experts that do not say how their parameters are split."""
    # Experts that live on some ranks only must say so, or their gradients would be summed with other experts'.
    unknown = [name for name, _ in experts.named_parameters() if name not in experts.shardings]
    if unknown:
        raise ConfigError(
            f"{type(experts).__name__} does not say how {', '.join(unknown)} is split over ep and esp. Set, say, "
            f"self.shardings[{unknown[0]!r}] = {{'ep': 0}} where it is made, if its first dimension counts the local "
            "experts, or {} if all ranks hold the same."
        )


def require_copies(order: Order, gate: Gate) -> None:
    """Refuses parts that do not go with experts that move."""
    # Rows must be able to go to any copy of an expert, and loads must tell experts apart.
    if isinstance(order, Einsum):
        raise ConfigError("placement='fssdp' sends rows to copies, which an order by products cannot: Sparse()")
    if isinstance(gate, SoftMoE):
        raise no_load(gate)


def make_plans(schedule: str | Schedule | None, parts: LayerParts, moves: bool, hooked: bool) -> LayerPlans:
    """Makes what finds a layer's plans.

    Args:
        schedule: "off" or None: the layer follows plans that it is assigned, or none.
        moves: its experts do.   hooked: it has hooks.
    """
    if schedule is None or schedule == "off":
        return LayerPlans(parts, moves)
    from fusedmoe.layers.schedule import Schedule, ScheduledPlans

    # A name may say more than a policy: "auto" also lets kernels send by themselves.
    named = Schedule.named(schedule) if isinstance(schedule, str) else schedule
    assert named is not None
    return ScheduledPlans(parts, named, moves, hooked)


def set_up_experts(
    parts: LayerParts,
    shared: Experts | None,
    model_dim: int,
    moves: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> DynamicExperts | None:
    """Makes this rank's parameters of a layer's experts, and of the shared one; returns them placed, where they move.

    Raises:
        ConfigError: experts that cannot be split, or do not say how they are; parts that do not go with a placement.
    """
    topology, gate, order, experts = parts
    assert isinstance(experts, Experts)
    if moves:
        from fusedmoe.layers.dynamic_experts import DynamicExperts
        from fusedmoe.layers.expert_tables import first_place

        place = first_place(gate.experts, topology)
    else:
        place = even_place(gate.experts, topology)
    experts.setup(model_dim, place, device=device, dtype=dtype)
    # After the experts: both draw from the default generator, and a seed must give the same layer as ever.
    if shared is not None:
        shared.setup(model_dim, Place(), device=device, dtype=dtype)
        shared.shardings = {}
    if topology.ep.size * topology.esp.size > 1:
        require_shardings(experts)
    experts.own_numbers, experts.num_experts = tuple(place.numbers), gate.experts
    for name, _ in experts.named_parameters():
        experts.shardings.setdefault(name, {"ep": NAMED})  # an expert's all the same, even where nothing is split
    if not moves:
        return None
    require_copies(order, gate)
    return DynamicExperts(experts, gate.experts, topology)


def make_dispatcher(
    dispatch: str | Dispatcher,
    plans: LayerPlans,
    hooks: Sequence[Hooks],
    placed: DynamicExperts | None,
    name: str = "MoELayer",
) -> Dispatcher:
    """Chooses how tokens travel.

    Args:
        dispatch: the algorithm of all-to-alls, "auto", or a dispatcher of the user's.
        placed: the experts, where they move.
        name: of the caller, for messages.
    """
    if isinstance(dispatch, Dispatcher):
        return dispatch
    topology, gate = plans.parts.topology, plans.parts.gate
    all_to_all = make_all_to_all("direct" if dispatch == "auto" else dispatch, topology)
    # Hooks see rows on a wire, so with them even one rank's rows go by collectives.
    if topology.ep.size * topology.esp.size == 1 and not hooks:
        return Local()
    made: Collectives
    if placed is not None:
        from fusedmoe.layers.placed_dispatcher import Moving

        made = Moving(placed, topology, all_to_all, plans.find, hooks)
    elif plans.puts:
        from fusedmoe.engine.one_sided_dispatcher import OneSided

        made = OneSided(plans.transport, topology, all_to_all, plans.find, name=name)
    else:
        made = Collectives(topology, all_to_all, plans.find, hooks, name)
    if dispatch == "auto":
        from fusedmoe.layers.measure import choose_all_to_all, has_choice

        if has_choice(topology):
            made.choose = partial(choose_all_to_all, topology, gate)
    return made
