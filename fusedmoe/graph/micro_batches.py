"""The choice of ranges of a pass that run in chunks, by predicted seconds (Lancet §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, shape_of
from fusedmoe.graph.instructions import (
    Instructions,
    bytes_of,
    is_all_to_all,
    is_random,
    is_start,
    is_wait,
    mutates,
)
from fusedmoe.graph.operator_costs import OperatorCosts, start_s
from fusedmoe.graph.range_split import InstructionRange, KnownWays, RangeSplit, infer
from fusedmoe.graph.rewriting import (
    chunk_like,
    cut,
    fake_call,
    join,
    joined_nodes,
    rebuilt,
    run_chunk,
    runs_before,
    stages_of,
)
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.lancet_plans import best_ranges
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import Task

_aten = torch.ops.aten


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


def chosen_ranges(
    instructions: Instructions,
    node_s: Callable[[fx.Node], float],
    hidden_s: Callable[[int], float],
    costs: OperatorCosts,
    most_chunks: int,
    count: int,
    reach: int | None,
    show: Callable[[int, int], object],
    rows: bool = False,
    known: KnownSplits | None = None,
) -> list[tuple[InstructionRange, Pipelined]]:
    """Returns the ranges of a pass that are worth splitting, by the dynamic programme.

    Args:
        hidden_s: of the collective that starts at a place, the seconds that run beside it when nothing is split.
        most_chunks, count, reach: `chunks`, `groups` and `reach` of `fusedmoe.graph.GraphBackend`.
        rows: as for `infer`.
        known: how ranges have been split before, in the same graph and with the same `node_s`; from now on also these.
    """
    known = {} if known is None else known
    groups, layers = grouped(instructions, node_s, count)
    longest = reach or -(-len(groups) // layers)
    degrees = [2**power for power in range(1, most_chunks.bit_length())]
    options: dict[tuple[int, int, int], tuple[InstructionRange, Pipelined]] = {}
    costed: dict[Any, CostedChunk] = {}
    said: dict[fx.Node, str] = {}
    ways = KnownWays()  # ranges overlap: an instruction is looked at once
    whole_s = []
    for start, stop in groups:
        exposed_s = sum(
            max(0.0, start_s(costs, instructions.nodes[index]) - hidden_s(index))
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
            known[key] = infer(nodes, chunks, node_s, in_order(instructions, start, stop), rows, ways), nodes
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
    """Returns consecutive instructions in groups, about `count` of equal time for each MoE layer, and how many layers.

    A collective and its wait are in one group, and so is what has several results with these. Two all-to-alls count as
    a layer.
    """
    collectives = sum(map(is_all_to_all, instructions.nodes))
    layers = max(1, collectives // 2)
    share_s = sum(map(node_s, instructions.nodes)) / layers / count
    # What has several results stays with those who take them apart: chunks are cut off tensors only.
    bound = {}  # from the first to the last instruction of what must stay together
    for index, node in enumerate(instructions.nodes):
        if is_start(node) or isinstance(node.meta.get("val"), (tuple, list)):
            bound[index] = max(
                (instructions.place[user] for user in node.users if user in instructions.place), default=index
            )
    groups, start, taken_s, until = [], 0, 0.0, -1
    for index, node in enumerate(instructions.nodes):
        # An all-to-all begins a group, and its wait ends one, so that a range can begin and end at either.
        if is_all_to_all(node) and index > start and index > until:
            groups.append((start, index))
            start, taken_s = index, 0.0
        until = max(until, bound.get(index, index))
        taken_s += node_s(node)
        ends = any(
            is_wait(one) and is_all_to_all(one.all_input_nodes[0]) for one in instructions.nodes[start : index + 1]
        )
        if index >= until and (taken_s >= share_s > 0 or ends):
            groups.append((start, index + 1))
            start, taken_s = index + 1, 0.0
    if start < len(instructions.nodes):
        groups.append((start, len(instructions.nodes)))
    return groups, layers


def in_order(instructions: Instructions, start: int, stop: int) -> list[tuple[int, int]]:
    """Returns pairs of a range's instructions that stay in order, as they draw random numbers or change memory."""
    odd = [
        index
        for index in range(start, stop)
        if is_random(instructions.nodes[index]) or mutates(instructions.nodes[index])
    ]
    pairs = [(first, second) for first, second in zip(odd, odd[1:], strict=False)]
    for index in odd:
        if mutates(instructions.nodes[index]):
            pairs += [(first, index) for first in range(start, index)] + [
                (index, first) for first in range(index + 1, stop)
            ]
    # Collectives that are not split, too: all ranks send in one order.
    sent = [
        index
        for index in range(start, stop)
        if is_start(instructions.nodes[index]) and not is_all_to_all(instructions.nodes[index])
    ]
    pairs += zip(sent, sent[1:], strict=False)
    return [(first - start, second - start) for first, second in pairs]


def split_key(nodes: Sequence[fx.Node], said: dict[fx.Node, str]) -> str:
    """Returns a text that is the same for ranges that are split alike: of the same operators, shapes and users.

    `said`: what is known of the result of each node, filled as needed.
    """
    places = {node: place for place, node in enumerate(nodes)}

    def name(node: fx.Node) -> str:
        if node not in said:
            said[node] = str(tree_map(_described, node.meta.get("val")))
        return said[node]

    lines = []
    for node in nodes:
        number = {one: f"<{index}>" for index, one in enumerate(node.all_input_nodes)}
        rest = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        needs = [f"%{places[one]}" if one in places else name(one) for one in node.all_input_nodes]
        outside = any(user not in places for user in node.users)
        lines.append(f"{node.target} {rest} {needs} {name(node)} {outside}")
    return "\n".join(lines)


def _described(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


class CostedChunk(NamedTuple):
    """One chunk of a split instruction: its fake value, and its seconds with those of cutting its inputs."""

    value: Any
    seconds: float


def pipeline_s(
    nodes: Sequence[fx.Node],
    split: RangeSplit,
    chunks: int,
    node_s: Callable[[fx.Node], float],
    costs: OperatorCosts,
    known: dict[Any, CostedChunk],
) -> float:
    """Returns the seconds of a range in chunks, by the simulator: Lancet's P(i, n, k).

    `known`: chunks of instructions in other ranges, and from now on those of this one.
    """
    mode = next(source.meta["val"] for source in nodes if isinstance(source.meta.get("val"), torch.Tensor)).fake_mode
    plain = fake_call(mode)
    taken_s = 0.0

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal taken_s
        result = plain(target, args, kwargs)
        # Views cost nothing, and functions of this room are costed with their instruction.
        if getattr(target, "namespace", "") == "aten" and not _is_view_of(result, args):
            taken_s += costs.operator_s(target, args, kwargs)
        return result

    # All chunks take as long, so that the first is measured for all. Values are fake: nothing is computed here.
    stages = stages_of(split)
    compute = dict.fromkeys(range(max(stages.values()) + 1), 0.0)
    comm: dict[int, float] = {}
    values: dict[fx.Node, Any] = {}

    def value(source: fx.Node, axis: Axis | Rows | None) -> Any:
        if source in values:
            return values[source]
        if axis is None:
            return source.meta["val"]
        assert isinstance(axis, Axis), "rows are cut off nothing"
        return cut(call, source.meta["val"], shape_of(source) or (), axis, 0, chunks)

    def costed(node: fx.Node, way: OperatorSplit) -> CostedChunk:
        nonlocal taken_s
        if way.by_rows:  # as many in each chunk, as far as one can tell
            return CostedChunk(chunk_like(node, way.axis, chunks), node_s(node) / chunks)
        taken_s = 0.0
        chunk = run_chunk(call, node, way, chunks, value)
        if way.carries:
            call(_aten.add.Tensor, (chunk, chunk), {})
        return CostedChunk(chunk, taken_s)

    def costed_whole(node: fx.Node, axis: Axis | Rows) -> CostedChunk:
        nonlocal taken_s
        taken_s = 0.0
        if isinstance(axis, Rows):
            call(_aten.clone.default, (node.meta["val"],), {})
        else:
            join(call, [values[node]] * chunks, node.meta["val"], axis)
        return CostedChunk(None, taken_s)

    for node, way in split.split.items():
        key = (node, way.axis, way.crosses, chunks, tuple(source in values for source in node.all_input_nodes))
        if key not in known:
            known[key] = costed(node, way)
        values[node] = known[key].value
        compute[stages[node]] += known[key].seconds
        if is_all_to_all(node):
            comm[stages[node]] = comm.get(stages[node], 0.0) + costs.collective_s(bytes_of(node) / chunks)
    around_s = sum(map(node_s, split.after))
    for node in joined_nodes(nodes, split):
        if rebuilt(node, split.split) is None:
            axis = split.split[node].axis
            if (node, axis, chunks) not in known:
                known[node, axis, chunks] = costed_whole(node, axis)
            around_s += known[node, axis, chunks].seconds
    needed, loose = runs_before(split)
    around_s += sum(map(node_s, needed))
    plan, seconds = stage_plan(compute, comm, sum(map(node_s, loose)), chunks)
    return around_s + makespan(plan, Durations(seconds))


def _is_view_of(result: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a result lies in the memory of an argument."""
    if not isinstance(result, torch.Tensor):
        return False
    own = result.untyped_storage()._cdata
    return any(isinstance(one, torch.Tensor) and one.untyped_storage()._cdata == own for one in args)


def stage_plan(
    compute: dict[int, float], comm: dict[int, float], loose_s: float, chunks: int
) -> tuple[Plan, dict[Task, float]]:
    """Returns a range as a plan: each chunk of stage s computes for `compute[s]` seconds and sends for `comm[s]`."""
    order: dict[str, list[Task]] = {"compute": [], "inter": []}
    after: dict[Task, tuple[Task, ...]] = {}
    seconds: dict[Task, float] = {}
    before: list[Task | None] = [None] * chunks
    for stage in range(max([*compute, *comm], default=0) + 1):
        for chunk in range(chunks):
            for kind, where, given in (("expert", "compute", compute), ("dispatch", "inter", comm)):
                if stage not in given:
                    continue
                # A layer of the plan for each stage, so that no rule of layers applies.
                task = Task(kind, chunk, 2 * stage + (kind == "dispatch"))
                order[where].append(task)
                last = before[chunk]
                after[task] = () if last is None else (last,)
                seconds[task] = given[stage]
                before[chunk] = task
        if stage == 0:
            task = Task("gate", None, 2 * len(compute) + 2)
            order["compute"].append(task)
            after[task], seconds[task] = (), loose_s
    return Plan.from_orders(order, after), seconds
