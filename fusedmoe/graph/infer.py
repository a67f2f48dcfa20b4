"""Which axis each tensor of a range is split along (Lancet §5.2), as a constraint problem for OR-Tools CP-SAT.

Every instruction of a range is split in one way, or runs as a whole, before all that is split or after it. One tensor
has one axis. What is split takes parts of what ran before, or parts along the same axis of what is split; what it needs
whole has run before. All all-to-alls are split; besides these as much computation as possible, by its seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import Axis, Way, first_axes, outputs_from, way_of
from fusedmoe.graph.instructions import is_all_to_all, is_wait
from fusedmoe.schedule.weight_placement import solved

# Of the solver's work (`fusedmoe.schedule.weight_placement`).
_LIMIT = 2.0
_TICKS, _SCATTERED = 10_000, 256


class Split(NamedTuple):
    """How a range is split: what runs before, what in parts, what after; the way of each that is in parts."""

    before: tuple[fx.Node, ...]
    split: dict[fx.Node, Way]
    after: tuple[fx.Node, ...]


def ways_in(nodes: Sequence[fx.Node], parts: int) -> dict[fx.Node, dict[Axis, Way]]:
    """All ways to split each instruction that lead to or from a split all-to-all of the range, by their axes."""
    inside = set(nodes)
    ways: dict[fx.Node, dict[Axis, Way]] = {}
    ends: list[tuple[fx.Node, Way]] = []

    def note(node: fx.Node, way: Way | None) -> None:
        if way is not None and node in inside and way.axis not in ways.setdefault(node, {}):
            ways[node][way.axis] = way
            ends.append((node, way))

    for node in nodes:
        if is_all_to_all(node):
            for axis in first_axes(node, parts):
                note(node, way_of(node, axis, parts))
    while ends:
        node, way = ends.pop()
        for one, wanted in way.inputs.items():
            if wanted is not None:
                note(one, way_of(one, wanted, parts))
        for user in node.users:
            if user.target is operator.getitem:
                note(user, way_of(user, way.axis, parts))
            else:
                for found in outputs_from(user, node, way.axis, parts):
                    note(user, found)
    return ways


def infer(
    nodes: Sequence[fx.Node], parts: int, seconds: Callable[[fx.Node], float], ordered: Sequence[tuple[int, int]] = ()
) -> Split | None:
    """How to split a range into so many parts; None where some all-to-all of it cannot be split.

    Args:
        ordered: pairs of places in `nodes` that must stay in order though no data goes from one to the other.
    Raises:
        ConfigError: OR-Tools is not installed.
    """
    ways = ways_in(nodes, parts)
    if not all(node in ways for node in nodes if is_all_to_all(node)):
        return None
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "splitting captured graphs needs OR-Tools: pip install 'fusedmoe[plan]', or give the backend parts=1"
        ) from None
    model = cp_model.CpModel()
    inside = set(nodes)
    early = {node: model.new_bool_var("") for node in nodes}
    late = {node: model.new_bool_var("") for node in nodes}
    chosen = {(node, axis): model.new_bool_var("") for node in nodes for axis in ways.get(node, ())}
    never = model.new_constant(0)

    def split(node: fx.Node) -> list[cp_model.IntVar]:
        return [chosen[node, axis] for axis in ways.get(node, ())]

    def follows(node: fx.Node, one: fx.Node) -> None:
        model.add_implication(early[node], early[one])
        model.add_implication(late[one], late[node])

    for node in nodes:
        model.add_exactly_one(early[node], late[node], *split(node))
        if is_all_to_all(node):
            model.add_bool_or(split(node))
        for one in node.all_input_nodes:
            if one not in inside:
                continue
            follows(node, one)
            for axis, way in ways.get(node, {}).items():
                wanted = way.inputs[one]
                allowed = [] if wanted is None or (one, wanted) not in chosen else [chosen[one, wanted]]
                # Parts are cut off tensors only, not off several at a time.
                whole = [] if node.target is operator.getitem else [early[one]]
                model.add_bool_or([chosen[node, axis].negated(), *allowed, *whole])
            # Several results are put together one by one, and rows on the wire not at all.
            if node.target is operator.getitem or is_wait(node):
                for axis in ways.get(one, ()):
                    model.add_implication(chosen[one, axis], chosen.get((node, axis), never))
    for first, second in ordered:
        follows(nodes[second], nodes[first])
    costs = {node: seconds(node) for node in nodes}
    tick_s = max(costs.values(), default=0.0) / _TICKS or 1.0
    # Of ways that split the same, the one whose parts are consecutive: others cost copies.
    worth = {node: _SCATTERED * (1 + round(costs[node] / tick_s)) for node in nodes}
    model.maximize(sum((worth[node] - min(axis.outer, _SCATTERED // 2)) * one for (node, axis), one in chosen.items()))
    solver = solved(model, _LIMIT)
    if solver is None:
        return None
    taken = {
        node: way for node in nodes for axis, way in ways.get(node, {}).items() if solver.value(chosen[node, axis])
    }
    return Split(
        tuple(node for node in nodes if solver.value(early[node])),
        taken,
        tuple(node for node in nodes if solver.value(late[node])),
    )
