"""The plans and the dispatcher that a layer gets, by its arguments.

Loads what only schedules, kernels that send by themselves or experts that move need, for layers that ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusedmoe.autograd.hooks import Hooks
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Dispatcher, Local
from fusedmoe.layers.layer_plans import LayerParts, LayerPlans

if TYPE_CHECKING:
    from fusedmoe.layers.dynamic_experts import DynamicExperts
    from fusedmoe.layers.schedule import Schedule


def make_plans(schedule: str | Schedule | None, parts: LayerParts, moves: bool, hooked: bool) -> LayerPlans:
    """Makes what finds a layer's plans.

    Args:
        schedule: "off" or None: the layer follows plans that it is assigned, or none.
        moves: its experts do.   hooked: it has hooks.
    """
    if schedule is None or schedule == "off":
        return LayerPlans(parts, moves)
    from fusedmoe.layers.schedule import Schedule
    from fusedmoe.layers.scheduled_plans import ScheduledPlans

    named = Schedule.named(schedule) if isinstance(schedule, str) else schedule
    assert named is not None
    return ScheduledPlans(parts, named, moves, hooked)


def make_dispatcher(
    dispatch: str | Dispatcher, plans: LayerPlans, hooks: Sequence[Hooks], placed: DynamicExperts | None
) -> Dispatcher:
    """Chooses how tokens travel.

    Args:
        dispatch: the algorithm of all-to-alls, or a dispatcher of the user's.
        placed: the experts, where they move.
    """
    if isinstance(dispatch, Dispatcher):
        return dispatch
    topology, all_to_all = plans.parts.topology, make_all_to_all(dispatch, plans.parts.topology)
    if topology.ep.size * topology.esp.size == 1 and not hooks:
        return Local()
    if placed is not None:
        from fusedmoe.layers.placed_dispatcher import Moving

        return Moving(placed, topology, all_to_all, plans.find, hooks)
    if plans.puts:
        from fusedmoe.engine.one_sided_dispatcher import OneSided

        return OneSided(plans.transport, topology, all_to_all, plans.find)
    return Collectives(topology, all_to_all, plans.find, hooks)
