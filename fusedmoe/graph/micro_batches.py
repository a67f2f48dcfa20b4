"""The choice of ranges of a pass that run in chunks, by predicted seconds, and of their tensors' axes (Lancet §5).

The axes of a range are a constraint problem for OR-Tools CP-SAT. Every instruction is split in one way, or runs as a
whole, before all that is split or after it. One tensor has one axis, or its chunks are rows. What is split takes chunks
of what ran before, or chunks along the same axis of what is split; what it needs whole has run before. All all-to-alls
are split; besides these as much computation as possible, by its seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, copies_of, first_axes, outputs_from, way_of
from fusedmoe.graph.instructions import Instructions, is_all_to_all, is_random, is_start, is_wait, mutates, name_of
from fusedmoe.graph.operator_costs import OperatorCosts, start_s
from fusedmoe.graph.rewriting import InstructionRange, RangeSplit, pipeline_s
from fusedmoe.schedule.policies.lancet_plans import best_ranges, solved

# Of the solver's work (`fusedmoe.schedule.policies.lancet_plans`).
_LIMIT = 2.0
_TICKS, _SCATTERED = 10_000, 256


@dataclass
class Pipelined:
    """A range that runs in chunks, as a report shows it.

    Attributes:
        first, last: the names of its first and its last instruction.
        chunks: how many.
        split: how many of its instructions run in chunks, of `count`; the others run as a whole.
        all_to_alls: how many of them it has.
        seconds: predicted for all of it; `whole_s`: the same where nothing is split.
    """

    first: str
    last: str
    chunks: int
    split: int
    count: int
    all_to_alls: int
    seconds: float
    whole_s: float


#: How ranges are split, None where they cannot be, and the instructions of the first such range; by what they are
#: (`split_key`) and chunks.
KnownSplits = dict[tuple[str, int], tuple[RangeSplit | None, Sequence[fx.Node]]]


@dataclass(frozen=True)
class PlanSettings:
    """Settings of plans; see `GraphBackend`."""

    chunks: int
    groups: int
    own_places: bool = False
    timeout_s: float = 1200.0


def chosen_ranges(
    instructions: Instructions,
    node_s: Callable[[fx.Node], float],
    hidden_s: Mapping[int, float],
    costs: OperatorCosts,
    settings: PlanSettings,
    show: Callable[[int, int], object],
    known: KnownSplits,
) -> list[tuple[InstructionRange, Pipelined]]:
    """Returns the ranges of a pass that are worth splitting, by the dynamic programme.

    Args:
        hidden_s: of the collective that starts at a place, the seconds that run beside it when nothing is split.
        known: how ranges have been split before, in the same graph and with the same `node_s`; from now on also these.
    """
    groups, layers = grouped(instructions, node_s, settings.groups)
    # Lancet's ι: as many groups as lie between two MoE layers.
    longest = -(-len(groups) // layers)
    degrees = [2**power for power in range(1, settings.chunks.bit_length())]
    options: dict[tuple[int, int, int], tuple[InstructionRange, Pipelined]] = {}
    costed: dict[Any, tuple[Any, float]] = {}
    said: dict[fx.Node, str] = {}
    ways = KnownWays()  # ranges overlap: an instruction is looked at once
    whole_s = []
    for start, stop in groups:
        exposed_s = sum(
            max(0.0, start_s(costs, instructions.nodes[index]) - hidden_s.get(index, 0.0))
            for index in range(start, stop)
            if is_all_to_all(instructions.nodes[index])
        )
        whole_s.append(exposed_s + sum(map(node_s, instructions.nodes[start:stop])))
    taken: dict[tuple[str, int], float] = {}
    asked, total = 0, sum(1 + len(degrees) * min(stop, longest) for stop in range(1, len(groups) + 1))

    def seconds(first: int, last: int, chunks: int) -> float:
        nonlocal asked
        asked += 1
        show(asked, total)
        if chunks == 1:
            return whole_s[first]
        start, stop = groups[first][0], groups[last - 1][1]
        nodes = instructions.nodes[start:stop]
        if not any(map(is_all_to_all, nodes)):  # nothing to hide: its chunks would only be slower
            return float("inf")
        key = (split_key(nodes, said), chunks)
        if key not in known:
            # Layers are alike: how one is split, all are.
            order = in_order(instructions, start, stop)
            known[key] = infer(nodes, chunks, node_s, order, settings.own_places, ways), nodes
        split, example = known[key]
        if split is None:
            return float("inf")
        if key not in taken:
            taken[key] = pipeline_s(example, split, chunks, node_s, costs, costed)
        places = {node: place for place, node in enumerate(example)}
        axes = tuple((places[node], tuple(way.axis), way.crosses) for node, way in split.split.items())
        early = tuple(places[node] for node in split.before)
        options[first, last, chunks] = InstructionRange(start, stop, chunks, axes, early), Pipelined(
            nodes[0].name, nodes[-1].name, chunks, len(axes), len(nodes), sum(map(is_all_to_all, nodes)), taken[key],
            sum(whole_s[first:last]),
        )  # fmt: skip
        return taken[key]

    ranges, _ = best_ranges(len(groups), seconds, degrees, longest)
    return [options[best] for best in ranges if best.parts > 1]


def grouped(
    instructions: Instructions, node_s: Callable[[fx.Node], float], count: int
) -> tuple[list[tuple[int, int]], int]:
    """Returns consecutive instructions in groups, about `count` of equal time for a MoE layer, and how many layers."""
    # Two all-to-alls count as a layer, there and back.
    layers = max(1, sum(map(is_all_to_all, instructions.nodes)) // 2)
    share_s = sum(map(node_s, instructions.nodes)) / layers / count
    groups, start, taken_s, until, waits = [], 0, 0.0, -1, False
    for index, node in enumerate(instructions.nodes):
        # An all-to-all begins a group, and its wait ends one, so that a range can begin and end at either.
        if is_all_to_all(node) and until < index > start:
            groups.append((start, index))
            start, taken_s, waits = index, 0.0, False
        until = max(until, index)
        # A collective stays in one group with its wait, and what has several results with those who take them apart:
        # chunks are cut off tensors only.
        if is_start(node) or isinstance(node.meta.get("val"), (tuple, list)):
            until = max([until, *(instructions.place[user] for user in node.users if user in instructions.place)])
        taken_s += node_s(node)
        waits |= is_wait(node) and is_all_to_all(node.all_input_nodes[0])
        if index >= until and (taken_s >= share_s > 0 or waits):
            groups.append((start, index + 1))
            start, taken_s, waits = index + 1, 0.0, False
    if start < len(instructions.nodes):
        groups.append((start, len(instructions.nodes)))
    return groups, layers


def in_order(instructions: Instructions, start: int, stop: int) -> list[tuple[int, int]]:
    """Returns pairs of a range's instructions that stay in order, as they draw random numbers or change memory."""
    nodes = instructions.nodes[start:stop]
    odd = [index for index, node in enumerate(nodes) if is_random(node) or mutates(node)]
    pairs = list(pairwise(odd))
    for index in odd:
        if mutates(nodes[index]):
            pairs += [(first, index) for first in range(index)]
            pairs += [(index, second) for second in range(index + 1, len(nodes))]
    # Collectives that are not split, too: all ranks send in one order.
    pairs += pairwise(index for index, node in enumerate(nodes) if is_start(node) and not is_all_to_all(node))
    return pairs


def split_key(nodes: Sequence[fx.Node], said: dict[fx.Node, str]) -> str:
    """Returns a text that is the same for ranges that are split alike: of the same operators, shapes and users.

    `said`: what is known of the result of each node, filled as needed.
    """
    places = {node: place for place, node in enumerate(nodes)}

    def describe(value: Any) -> Any:
        return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value

    def name(node: fx.Node) -> str:
        if node not in said:
            said[node] = str(map_aggregate(node.meta.get("val"), describe))
        return said[node]

    lines = []
    for node in nodes:
        number = {one: f"<{index}>" for index, one in enumerate(node.all_input_nodes)}
        rest = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        needs = [f"%{places[one]}" if one in places else name(one) for one in node.all_input_nodes]
        outside = any(user not in places for user in node.users)
        lines.append(f"{node.target} {rest} {needs} {name(node)} {outside}")
    return "\n".join(lines)


class SplitKey(NamedTuple):
    """One of the ways of an instruction: see `OperatorSplit`."""

    axis: Axis | Rows
    crosses: int


Ways = dict[fx.Node, dict[SplitKey, OperatorSplit]]


class KnownWays:
    """Ways to split the instructions of a graph, each found once: ranges overlap."""

    def __init__(self) -> None:
        self.way_of, self.outputs_from = cache(way_of), cache(outputs_from)


def ways_in(nodes: Sequence[fx.Node], chunks: int, rows: bool, known: KnownWays) -> Ways:
    """Returns all ways to split each instruction that lead to or from a split all-to-all. `rows`: also by rows."""
    inside = set(nodes)
    ways: Ways = {}
    # In a product that makes rows tokens may stand once for each choice.
    tokens = [node.args[1] for node in nodes if name_of(node) in ("mm", "bmm")]
    crossings = tuple(sorted({1, *(copies_of(node) for node in tokens if isinstance(node, fx.Node))})) if rows else ()
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
                note(node, known.way_of(node, axis, 0, chunks=chunks))
    # From the all-to-alls outwards: a way that leads to none of them is of no use.
    while ends:
        node, way = ends.pop()
        for source, wanted in way.inputs.items():
            if wanted is not None:
                for crosses in (0, *crossings):
                    note(source, known.way_of(source, wanted, crosses, chunks=chunks))
        for user in node.users:
            if user.target is operator.getitem:
                note(user, known.way_of(user, way.axis, 0, chunks=chunks))
            elif user in inside:
                for found in known.outputs_from(user, node, way.axis, chunks, crossings):
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

    def needs(node: fx.Node, key: SplitKey, *some: cp_model.IntVar) -> None:
        model.add_bool_or([chosen[node, key].negated(), *some])

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
                needs(node, key, *allowed, *whole)
            # Several results are put together one by one, and rows on the wire not at all.
            if node.target is operator.getitem or is_wait(node):
                for key in ways.get(source, ()):
                    needs(source, key, *along(node, key.axis))
    # Rows that set out come back: whoever gives them has somebody who takes them.
    for node, key in chosen:
        if isinstance(key.axis, Rows) and node.users:
            of_users = [(user, other, way) for user in node.users for other, way in ways.get(user, {}).items()]
            needs(node, key, *(chosen[user, other] for user, other, way in of_users if way.inputs[node] == key.axis))
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
        waits = is_start(node) or is_wait(node) or any(source in taken or source in behind for source in before[node])
        if node not in taken and solver.value(late[node]) and waits:
            behind.add(node)
    return RangeSplit(
        tuple(node for node in nodes if node not in taken and node not in behind),
        taken,
        tuple(node for node in nodes if node in behind),
    )


def _copies(axis: Axis | Rows) -> int:
    most = _SCATTERED // 2
    return most if isinstance(axis, Rows) else min(axis.outer, most - 1)
