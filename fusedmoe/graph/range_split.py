"""The split of a range of instructions: the axis along which each of its tensors is in chunks (Lancet §5.2).

That is a constraint problem for OR-Tools CP-SAT. Every instruction of a range is split in one way, or runs as a whole,
before all that is split or after it. One tensor has one axis, or its chunks are rows. What is split takes chunks of
what ran before, or chunks along the same axis of what is split; what it needs whole has run before. All all-to-alls are
split; besides these as much computation as possible, by its seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, first_axes, outputs_from, way_of
from fusedmoe.graph.instructions import Instructions, is_all_to_all, is_start, is_wait
from fusedmoe.schedule.policies.lancet_plans import solved

# Of the solver's work (`fusedmoe.schedule.lancet`).
_LIMIT = 2.0
_TICKS, _SCATTERED = 10_000, 256


class RangeSplit(NamedTuple):
    """The split of a range: what runs before, what in chunks and in which way, what after."""

    before: tuple[fx.Node, ...]
    split: dict[fx.Node, OperatorSplit]
    after: tuple[fx.Node, ...]


class InstructionRange(NamedTuple):
    """Instructions `start` to `stop` (without it) in so many chunks.

    `axes`: of the split ones, by their places from `start` on, as (place, the fields of an axis or of rows, crosses).
    `before`: the places of those that run before.
    """

    start: int
    stop: int
    chunks: int
    axes: tuple[tuple[int, Sequence[Any], bool], ...]
    before: tuple[int, ...]

    def split(self, instructions: Instructions) -> RangeSplit:
        """Returns the split of the instructions, as they stand in the graph now."""
        nodes = instructions.nodes[self.start : self.stop]
        ways = {}
        for place, fields, crosses in self.axes:
            first, second = fields
            axis = Axis(first, second) if isinstance(first, int) else Rows(tuple(first), second)
            way = way_of(nodes[place], axis, crosses, chunks=self.chunks)
            assert way is not None, f"{nodes[place].name} was split along {axis} and cannot be"
            ways[nodes[place]] = way
        early = tuple(nodes[place] for place in self.before)
        taken = {*ways, *early}
        return RangeSplit(early, ways, tuple(node for node in nodes if node not in taken))


class SplitKey(NamedTuple):
    """One of the ways of an instruction: see `OperatorSplit`."""

    axis: Axis | Rows
    crosses: bool


Ways = dict[fx.Node, dict[SplitKey, OperatorSplit]]


class KnownWays:
    """Ways to split the instructions of a graph, each found once: ranges overlap."""

    def __init__(self) -> None:
        self.way_of, self.outputs_from = cache(way_of), cache(outputs_from)


def ways_in(nodes: Sequence[fx.Node], chunks: int, rows: bool, known: KnownWays) -> Ways:
    """Returns all ways to split each instruction that lead to or from a split all-to-all. `rows`: also by rows."""
    inside = set(nodes)
    ways: Ways = {}
    ends: list[tuple[fx.Node, OperatorSplit]] = []

    def note(node: fx.Node, way: OperatorSplit | None) -> None:
        if way is None or node not in inside or (key := SplitKey(way.axis, way.crosses)) in ways.setdefault(node, {}):
            return
        # Rows are cut off nothing: what has them is of the range.
        if all(source in inside for source, wanted in way.inputs.items() if isinstance(wanted, Rows)):
            ways[node][key] = way
            ends.append((node, way))

    for node in nodes:
        if is_all_to_all(node):
            for axis in first_axes(node, chunks, rows):
                note(node, known.way_of(node, axis, False, chunks=chunks))
    # From the all-to-alls outwards: a way that leads to none of them is of no use.
    while ends:
        node, way = ends.pop()
        for source, wanted in way.inputs.items():
            if wanted is not None:
                for crosses in (False, True)[: 1 + rows]:
                    note(source, known.way_of(source, wanted, crosses, chunks=chunks))
        for user in node.users:
            if user.target is operator.getitem:
                note(user, known.way_of(user, way.axis, False, chunks=chunks))
            elif user in inside:
                for found in known.outputs_from(user, node, way.axis, chunks, rows):
                    note(user, found)
    return ways


def infer(
    nodes: Sequence[fx.Node],
    chunks: int,
    seconds: Callable[[fx.Node], float],
    ordered: Sequence[tuple[int, int]] = (),
    rows: bool = False,
    known: KnownWays | None = None,
) -> RangeSplit | None:
    """Returns the split of a range into so many chunks; None where some all-to-all of it cannot be split.

    Args:
        ordered: pairs of places in `nodes` that must stay in order though no data goes from one to the other.
        rows: whether chunks may be rows.
        known: ways that other ranges of the graph have been split in, and from now on those of this one.
    Raises:
        ConfigError: OR-Tools is not installed.
    """
    ways = ways_in(nodes, chunks, rows, known or KnownWays())
    if not all(node in ways for node in nodes if is_all_to_all(node)):
        return None
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "splitting captured graphs needs OR-Tools: pip install 'fusedmoe[plan]', or give the backend chunks=1"
        ) from None
    # One boolean for each instruction and way; early and late for those that run as a whole.
    model = cp_model.CpModel()
    inside = set(nodes)
    early = {node: model.new_bool_var("") for node in nodes}
    late = {node: model.new_bool_var("") for node in nodes}
    chosen = {(node, key): model.new_bool_var("") for node in nodes for key in ways.get(node, ())}

    def split(node: fx.Node) -> list[cp_model.IntVar]:
        return [chosen[node, key] for key in ways.get(node, ())]

    def along(node: fx.Node, axis: Axis | Rows) -> list[cp_model.IntVar]:
        return [chosen[node, key] for key in ways.get(node, ()) if key.axis == axis]

    def follows(node: fx.Node, source: fx.Node) -> None:
        model.add_implication(early[node], early[source])
        model.add_implication(late[source], late[node])

    for node in nodes:
        model.add_exactly_one(early[node], late[node], *split(node))
        if is_all_to_all(node):  # a range that leaves one whole hides nothing of it
            model.add_bool_or(split(node))
        for source in node.all_input_nodes:
            if source not in inside:
                continue
            follows(node, source)
            for key, way in ways.get(node, {}).items():
                wanted = way.inputs[source]
                allowed = [] if wanted is None else along(source, wanted)
                # Chunks are cut off tensors only, not off several at a time, and along axes only.
                whole = [] if node.target is operator.getitem or isinstance(wanted, Rows) else [early[source]]
                model.add_bool_or([chosen[node, key].negated(), *allowed, *whole])
            # Several results are put together one by one, and rows on the wire not at all.
            if node.target is operator.getitem or is_wait(node):
                for key in ways.get(source, ()):
                    model.add_bool_or([chosen[source, key].negated(), *along(node, key.axis)])
    # Rows that set out come back: whoever gives them has somebody who takes them.
    for node, key in chosen:
        if isinstance(key.axis, Rows) and node.users:
            takers = [
                chosen[user, other]
                for user in node.users
                for other, way in ways.get(user, {}).items()
                if way.inputs[node] == key.axis
            ]
            model.add_bool_or([chosen[node, key].negated(), *takers])
    for first, second in ordered:
        follows(nodes[second], nodes[first])
    costs = {node: seconds(node) for node in nodes}
    tick_s = max(costs.values(), default=0.0) / _TICKS or 1.0
    # Of ways that split the same, the one whose chunks are consecutive: others cost copies, and rows most.
    worth = {node: _SCATTERED * (1 + round(costs[node] / tick_s)) for node in nodes}
    model.maximize(sum((worth[node] - _copies(key.axis)) * source for (node, key), source in chosen.items()))
    solver = solved(model, _LIMIT)
    if solver is None:
        return None
    taken = {node: way for node in nodes for key, way in ways.get(node, {}).items() if solver.value(chosen[node, key])}
    # What needs no chunk may run beside what does, and so fill the time in which rows are on the wire.
    before: dict[fx.Node, list[fx.Node]] = {node: list(node.all_input_nodes) for node in nodes}
    for first, second in ordered:
        before[nodes[second]].append(nodes[first])
    behind: set[fx.Node] = set()
    for node in nodes:
        needs = any(source in taken or source in behind for source in before[node])
        if node not in taken and solver.value(late[node]) and (needs or is_start(node) or is_wait(node)):
            behind.add(node)
    return RangeSplit(
        tuple(node for node in nodes if node not in taken and node not in behind),
        taken,
        tuple(node for node in nodes if node in behind),
    )


def _copies(axis: Axis | Rows) -> int:
    most = _SCATTERED // 2
    return most if isinstance(axis, Rows) else min(axis.outer, most - 1)
