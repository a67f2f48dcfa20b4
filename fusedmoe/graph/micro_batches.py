"""Selection of the instruction ranges of a pass that run in micro-batches, and of their tensors' axes (Lancet §5).

Dynamic programming over predicted seconds selects the ranges. OR-Tools CP-SAT selects the axes of a range: every
instruction is split in one way, or runs whole before or after all split instructions. A chunk of an input is cut from a
tensor computed earlier, or computed by an instruction that is split along the same axis. All all-to-alls are split, and
as many seconds of computation as possible.
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
from fusedmoe.graph.axes import (
    Axis,
    OperatorSplit,
    Rows,
    all_to_all_axes,
    num_token_copies,
    split_operator,
    splits_from_input,
)
from fusedmoe.graph.instructions import (
    Instructions,
    is_all_to_all,
    is_collective,
    is_mutating,
    is_random,
    is_wait,
    name_of,
)
from fusedmoe.graph.operator_costs import OperatorCosts, all_to_all_s
from fusedmoe.graph.rewriting import InstructionRange, RangeSplit, pipeline_s
from fusedmoe.schedule.policies.lancet_plans import best_ranges, solve_integer_program

# `limit` of `lancet_plans.solve_integer_program`, and resolution of the objective.
_LIMIT = 2.0
_TICKS, _SCATTERED = 10_000, 256


@dataclass
class RangeReport:
    """Report on a range that runs in chunks.

    Attributes:
        first, last: names of the first and last instruction.
        split, count, all_to_alls: numbers of instructions that run in chunks, of all, and of all-to-alls.
        seconds, whole_s: predicted seconds of the range in chunks, and without splitting.
    """

    first: str
    last: str
    chunks: int
    split: int
    count: int
    all_to_alls: int
    seconds: float
    whole_s: float


#: By `split_key` and chunk count: the split (None if impossible), and the instructions for which it was computed.
SplitCache = dict[tuple[str, int], tuple[RangeSplit | None, Sequence[fx.Node]]]


@dataclass(frozen=True)
class PlanSettings:
    """Arguments of `GraphBackend` that affect planning."""

    chunks: int
    groups: int
    own_places: bool = False
    timeout_s: float = 1200.0


def select_ranges(
    instructions: Instructions,
    node_s: Callable[[fx.Node], float],
    hidden_s: Mapping[int, float],
    costs: OperatorCosts,
    settings: PlanSettings,
    show: Callable[[int, int], object],
    split_cache: SplitCache,
) -> list[tuple[InstructionRange, RangeReport]]:
    """Select the ranges of a pass that are worth splitting, by dynamic programming.

    Args:
        hidden_s: position of a collective's start -> seconds of computation that overlap with it without splitting.
        show: called with the number of costs computed so far, and their total number.
        split_cache: splits for the same graph and `node_s`; extended here.
    """
    groups, layers = group_instructions(instructions, node_s, settings.groups)
    # Lancet's ι: the number of groups between two MoE layers.
    longest = -(-len(groups) // layers)
    degrees = [2**power for power in range(1, settings.chunks.bit_length())]
    options: dict[tuple[int, int, int], tuple[InstructionRange, RangeReport]] = {}
    costed: dict[Any, tuple[Any, float]] = {}
    descriptions: dict[fx.Node, str] = {}
    finder = SplitFinder()
    whole_s = []
    for start, stop in groups:
        exposed_s = sum(
            max(0.0, all_to_all_s(costs, instructions.nodes[index]) - hidden_s.get(index, 0.0))
            for index in range(start, stop)
            if is_all_to_all(instructions.nodes[index])
        )
        whole_s.append(exposed_s + sum(map(node_s, instructions.nodes[start:stop])))
    range_s: dict[tuple[str, int], float] = {}
    num_requests, total = 0, sum(1 + len(degrees) * min(stop, longest) for stop in range(1, len(groups) + 1))

    def seconds(first: int, last: int, chunks: int) -> float:
        nonlocal num_requests
        num_requests += 1
        show(num_requests, total)
        if chunks == 1:
            return whole_s[first]
        start, stop = groups[first][0], groups[last - 1][1]
        nodes = instructions.nodes[start:stop]
        if not any(map(is_all_to_all, nodes)):  # nothing to hide: chunks would only be slower
            return float("inf")
        key = (split_key(nodes, descriptions), chunks)
        if key not in split_cache:
            order = order_constraints(instructions, start, stop)
            split_cache[key] = infer_split(nodes, chunks, node_s, order, settings.own_places, finder), nodes
        split, example = split_cache[key]
        if split is None:
            return float("inf")
        if key not in range_s:
            range_s[key] = pipeline_s(example, split, chunks, node_s, costs, costed)
        positions = {node: position for position, node in enumerate(example)}
        axes = tuple(
            (positions[node], tuple(op_split.axis), op_split.token_outer) for node, op_split in split.split.items()
        )
        early = tuple(positions[node] for node in split.before)
        options[first, last, chunks] = InstructionRange(start, stop, chunks, axes, early), RangeReport(
            nodes[0].name, nodes[-1].name, chunks, len(axes), len(nodes), sum(map(is_all_to_all, nodes)), range_s[key],
            sum(whole_s[first:last]),
        )  # fmt: skip
        return range_s[key]

    ranges, _ = best_ranges(len(groups), seconds, degrees, longest)
    return [options[best] for best in ranges if best.parts > 1]


def group_instructions(
    instructions: Instructions, node_s: Callable[[fx.Node], float], count: int
) -> tuple[list[tuple[int, int]], int]:
    """Cut the instructions into consecutive groups of about equal time, about `count` for each MoE layer.

    Returns the groups as (first, end), where `end` is exclusive, and the number of layers: pairs of all-to-alls.
    """
    layers = max(1, sum(map(is_all_to_all, instructions.nodes)) // 2)
    share_s = sum(map(node_s, instructions.nodes)) / layers / count
    groups, start, taken_s, until, waits = [], 0, 0.0, -1, False
    for index, node in enumerate(instructions.nodes):
        if is_all_to_all(node) and until < index > start:
            groups.append((start, index))
            start, taken_s, waits = index, 0.0, False
        until = max(until, index)
        # A collective and its wait, and an instruction with several results and their readers, form one group.
        if is_collective(node) or isinstance(node.meta.get("val"), (tuple, list)):
            until = max([until, *(instructions.position[user] for user in node.users if user in instructions.position)])
        taken_s += node_s(node)
        waits |= is_wait(node) and is_all_to_all(node.all_input_nodes[0])
        if index >= until and (taken_s >= share_s > 0 or waits):
            groups.append((start, index + 1))
            start, taken_s, waits = index + 1, 0.0, False
    if start < len(instructions.nodes):
        groups.append((start, len(instructions.nodes)))
    return groups, layers


def order_constraints(instructions: Instructions, start: int, stop: int) -> list[tuple[int, int]]:
    """Return index pairs of instructions that must keep their order.

    These are random draws, instructions that change memory, and collectives other than all-to-alls.
    """
    nodes = instructions.nodes[start:stop]
    odd = [index for index, node in enumerate(nodes) if is_random(node) or is_mutating(node)]
    pairs = list(pairwise(odd))
    for index in odd:
        if is_mutating(nodes[index]):
            pairs += [(first, index) for first in range(index)]
            pairs += [(index, second) for second in range(index + 1, len(nodes))]
    pairs += pairwise(index for index, node in enumerate(nodes) if is_collective(node) and not is_all_to_all(node))
    return pairs


def split_key(nodes: Sequence[fx.Node], descriptions: dict[fx.Node, str]) -> str:
    """Return a key that is equal for ranges that are split alike. `descriptions` is a cache of the nodes' values."""
    positions = {node: position for position, node in enumerate(nodes)}

    def describe(value: Any) -> Any:
        return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value

    def name(node: fx.Node) -> str:
        if node not in descriptions:
            descriptions[node] = str(map_aggregate(node.meta.get("val"), describe))
        return descriptions[node]

    lines = []
    for node in nodes:
        number = {one: f"<{index}>" for index, one in enumerate(node.all_input_nodes)}
        rest = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        needs = [f"%{positions[one]}" if one in positions else name(one) for one in node.all_input_nodes]
        outside = any(user not in positions for user in node.users)
        lines.append(f"{node.target} {rest} {needs} {name(node)} {outside}")
    return "\n".join(lines)


class SplitKey(NamedTuple):
    axis: Axis | Rows
    token_outer: int


OperatorSplits = dict[fx.Node, dict[SplitKey, OperatorSplit]]


class SplitFinder:
    """Caches the splits of a graph's instructions, which overlapping ranges share."""

    def __init__(self) -> None:
        self.split_operator, self.splits_from_input = cache(split_operator), cache(splits_from_input)


def find_splits(nodes: Sequence[fx.Node], chunks: int, by_rows: bool, finder: SplitFinder) -> OperatorSplits:
    """Return all splits of instructions that are connected to a split all-to-all; with `by_rows`, also into rows."""
    inside = set(nodes)
    splits: OperatorSplits = {}
    # A GEMM that produces rows may read the tokens once per choice.
    tokens = [node.args[1] for node in nodes if name_of(node) in ("mm", "bmm")]
    copies = {1, *(num_token_copies(node) for node in tokens if isinstance(node, fx.Node))}
    token_outers = tuple(sorted(copies)) if by_rows else ()
    ends: list[tuple[fx.Node, OperatorSplit]] = []

    def add_split(node: fx.Node, op_split: OperatorSplit | None) -> None:
        if op_split is None or node not in inside:
            return
        key, known = SplitKey(op_split.axis, op_split.token_outer), splits.setdefault(node, {})
        # Rows cannot be cut off a tensor: their producer must be in the range.
        producers = (source for source, input_axis in op_split.inputs.items() if isinstance(input_axis, Rows))
        if key not in known and all(source in inside for source in producers):
            known[key] = op_split
            ends.append((node, op_split))

    for node in nodes:
        if is_all_to_all(node):
            for axis in all_to_all_axes(node, chunks, by_rows):
                add_split(node, finder.split_operator(node, axis, 0, chunks=chunks))
    while ends:
        node, op_split = ends.pop()
        for source, input_axis in op_split.inputs.items():
            if input_axis is not None:
                for token_outer in (0, *token_outers):
                    add_split(source, finder.split_operator(source, input_axis, token_outer, chunks=chunks))
        for user in node.users:
            if user.target is operator.getitem:
                add_split(user, finder.split_operator(user, op_split.axis, 0, chunks=chunks))
            elif user in inside:
                for found in finder.splits_from_input(user, node, op_split.axis, chunks, token_outers):
                    add_split(user, found)
    return splits


def infer_split(
    nodes: Sequence[fx.Node],
    chunks: int,
    seconds: Callable[[fx.Node], float],
    ordered: Sequence[tuple[int, int]] = (),
    by_rows: bool = False,
    finder: SplitFinder | None = None,
) -> RangeSplit | None:
    """Return the split of a range into chunks; None if an all-to-all in it cannot be split.

    Args:
        ordered: index pairs in `nodes` that must stay in order without a data dependency.
        by_rows: chunks may also be rows of a tensor.
        finder: cache shared with other ranges of the graph.
    Raises:
        ConfigError: OR-Tools is not installed.
    """
    splits = find_splits(nodes, chunks, by_rows, finder or SplitFinder())
    if not all(node in splits for node in nodes if is_all_to_all(node)):
        return None
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "splitting captured graphs needs OR-Tools: pip install 'fusedmoe[plan]', or give the backend chunks=1"
        ) from None
    # One boolean per instruction and split; `early` and `late` for instructions that run whole before or after.
    model = cp_model.CpModel()
    inside = set(nodes)
    early = {node: model.new_bool_var("") for node in nodes}
    late = {node: model.new_bool_var("") for node in nodes}
    chosen = {(node, key): model.new_bool_var("") for node in nodes for key in splits.get(node, ())}

    def split_options(node: fx.Node, axis: Axis | Rows | None = None) -> list[cp_model.IntVar]:
        return [chosen[node, key] for key in splits.get(node, ()) if axis is None or key.axis == axis]

    def constrain_order(node: fx.Node, source: fx.Node) -> None:
        model.add_implication(early[node], early[source])
        model.add_implication(late[source], late[node])

    def require_option(node: fx.Node, key: SplitKey, *some: cp_model.IntVar) -> None:
        model.add_bool_or([chosen[node, key].negated(), *some])

    for node in nodes:
        model.add_exactly_one(early[node], late[node], *split_options(node))
        if is_all_to_all(node):  # an unsplit all-to-all cannot be hidden by this range
            model.add_bool_or(split_options(node))
        for source in node.all_input_nodes:
            if source not in inside:
                continue
            constrain_order(node, source)
            for key, op_split in splits.get(node, {}).items():
                input_axis = op_split.inputs[source]
                allowed = [] if input_axis is None else split_options(source, input_axis)
                # Chunks can be cut only off single tensors, along axes.
                whole = [] if node.target is operator.getitem or isinstance(input_axis, Rows) else [early[source]]
                require_option(node, key, *allowed, *whole)
            # Several results are joined one by one, and rows in flight cannot be joined.
            if node.target is operator.getitem or is_wait(node):
                for key in splits.get(source, ()):
                    require_option(source, key, *split_options(node, key.axis))
    # Rows sent out must be returned: each producer of rows has a consumer.
    for node, key in chosen:
        if isinstance(key.axis, Rows) and node.users:
            of_users = ((user, *each) for user in node.users for each in splits.get(user, {}).items())
            consumers = [chosen[user, other] for user, other, split in of_users if split.inputs[node] == key.axis]
            require_option(node, key, *consumers)
    for first, second in ordered:
        constrain_order(nodes[second], nodes[first])
    costs = {node: seconds(node) for node in nodes}
    tick_s = max(costs.values(), default=0.0) / _TICKS or 1.0
    # Among equal splits prefer consecutive chunks: other chunks cost copies, and rows cost most.
    worth = {node: _SCATTERED * (1 + round(costs[node] / tick_s)) for node in nodes}
    model.maximize(sum((worth[node] - _copy_penalty(key.axis)) * source for (node, key), source in chosen.items()))
    solver = solve_integer_program(model, _LIMIT)
    if solver is None:
        return None
    picked = {
        node: op_split
        for node in nodes
        for key, op_split in splits.get(node, {}).items()
        if solver.value(chosen[node, key])
    }
    # Other unsplit instructions run early, to overlap with rows in flight.
    before: dict[fx.Node, list[fx.Node]] = {node: list(node.all_input_nodes) for node in nodes}
    for first, second in ordered:
        before[nodes[second]].append(nodes[first])
    after: set[fx.Node] = set()
    for node in nodes:
        waits = is_collective(node) or is_wait(node) or not after.union(picked).isdisjoint(before[node])
        if node not in picked and solver.value(late[node]) and waits:
            after.add(node)
    return RangeSplit(
        tuple(node for node in nodes if node not in picked and node not in after),
        picked,
        tuple(node for node in nodes if node in after),
    )


def _copy_penalty(axis: Axis | Rows) -> int:
    most = _SCATTERED // 2
    return most if isinstance(axis, Rows) else min(axis.outer, most - 1)
