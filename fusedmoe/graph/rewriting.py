"""A range of a pass in chunks: the graph with them, and its predicted seconds.

Values are cut along an axis, computed chunk by chunk, and joined again. The chunks run stage by stage: what can be
computed without another all-to-all, of one chunk after the other; each chunk's all-to-all starts as soon as its stage
has been computed, and runs beside the following chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, chunk_shape, shape_of, start_of, way_of
from fusedmoe.graph.chunk_rows import check_places, operation_of, whole_of
from fusedmoe.graph.instructions import (
    Instructions,
    bytes_of,
    is_all_to_all,
    is_random,
    is_start,
    is_view,
    is_wait,
    mutates,
    name_of,
)
from fusedmoe.graph.operator_costs import OperatorCosts
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import Task

_aten = torch.ops.aten
#: Calls an operator: on tensors, or by adding a node to a graph.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_SHAPED = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::squeeze", "aten::unsqueeze"})


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
    axes: tuple[tuple[int, Sequence[Any], int], ...]
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


def cut(call: Call, whole: Any, shape: Sequence[int], axis: Axis, chunk: int, chunks: int) -> Any:
    """Returns chunk number `chunk` of a tensor of that shape; a view where the chunks are consecutive."""
    dim, outer = axis
    if outer == 1:
        size = shape[dim] // chunks
        return call(_aten.slice.Tensor, (whole, dim, chunk * size, (chunk + 1) * size), {})
    inner = shape[dim] // (outer * chunks)
    # A joined dimension is taken apart, the chunk selected, and the dimension joined again.
    apart = call(_aten.reshape.default, (whole, [*shape[:dim], outer, chunks, inner, *shape[dim + 1 :]]), {})
    mine = call(_aten.select.int, (apart, dim + 1, chunk), {})
    return call(_aten.reshape.default, (mine, chunk_shape(shape, axis, chunks)), {})


def join(call: Call, values: Sequence[Any], like: torch.Tensor, axis: Axis) -> Any:
    """Returns the tensor of these chunks, with the shape and the strides of `like`."""
    dim, outer = axis
    shape, chunks = [int(size) for size in like.shape], len(values)
    # Strides are part of the captured graph: views behind it were captured for them.
    order = _layout(like)
    moved = order != list(range(len(shape)))
    if outer == 1:
        turned = [call(_aten.permute.default, (chunk, order), {}) for chunk in values] if moved else list(values)
        whole = call(_aten.cat.default, (turned, order.index(dim)), {})
    else:
        inner = shape[dim] // (outer * chunks)
        apart = [*shape[:dim], outer, 1, inner, *shape[dim + 1 :]]
        wide = [call(_aten.reshape.default, (chunk, apart), {}) for chunk in values]
        whole = call(_aten.reshape.default, (call(_aten.cat.default, (wide, dim + 1), {}), shape), {})
        if moved:
            whole = call(_aten.permute.default, (whole, order), {})
            whole = call(_aten.clone.default, (whole,), {"memory_format": torch.contiguous_format})
    back = sorted(range(len(shape)), key=order.__getitem__)
    return call(_aten.permute.default, (whole, back), {}) if moved else whole


def run_chunk(
    call: Call,
    node: fx.Node,
    way: OperatorSplit,
    chunks: int,
    value: Callable[[fx.Node, Axis | Rows | None], Any],
    before: Any = None,
) -> Any:
    """Returns one chunk of an instruction that is split along axes.

    Args:
        value: of an input the chunk along an axis, or the whole.
        before: the chunk before, of `carried_from`; None for the first one.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: value(one, way.inputs[one]))
    target = node.target
    shape, axis = shape_of(node), way.axis
    assert shape is not None and isinstance(axis, Axis)
    if target is operator.getitem:
        return call(target, args, kwargs)
    name = f"{target.namespace}::{name_of(node)}"  # type: ignore[union-attr]
    if name in _SHAPED:
        return call(_aten.reshape.default, (args[0], chunk_shape(shape, axis, chunks)), {})
    if name == "aten::expand":
        return call(target, (args[0], chunk_shape(shape, axis, chunks)), kwargs)
    if name in ("aten::slice", "aten::split") and (sized := _own_part(node, way, args, shape[axis.dim] // chunks)):
        args = sized
    if is_all_to_all(node):
        rows: Any = args[0].meta["val"] if isinstance(args[0], fx.Node) else args[0]
        if not rows.is_contiguous():
            # Collectives send memory as it lies.
            args = (call(_aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}), *args[1:])
    chunk = call(target, args, kwargs)
    if not way.carries or before is None:
        return chunk
    last = shape[axis.dim] // chunks - 1
    so_far = call(_aten.slice.Tensor, (before, axis.dim, last, last + 1), {})
    if name == "aten::constant_pad_nd":  # the first row is the last one of the chunk before, in place of zeros
        rest = call(_aten.slice.Tensor, (chunk, axis.dim, 1, last + 1), {})
        return call(_aten.cat.default, ([so_far, rest], axis.dim), {})
    # A running sum goes on from the last sum of the chunk before.
    return call(_aten.add.Tensor, (chunk, so_far), {})


def carried_from(node: fx.Node) -> fx.Node:
    """Returns of what a chunk needs the chunk before: of the result of a running sum, else of what is moved."""
    return node if node.target is _aten.cumsum.default else node.all_input_nodes[0]


def _own_part(node: fx.Node, way: OperatorSplit, args: tuple[Any, ...], size: int) -> tuple[Any, ...] | None:
    """Returns the arguments of a slice or a split along the axis of its chunks; None where it goes along another.

    `size`: of a part of a chunk.
    """
    (given,) = way.inputs.values()
    if given == way.axis:
        return None
    if name_of(node) == "split":
        return (args[0], size, *args[2:])
    assert isinstance(way.axis, Axis)
    start = start_of(node) * size // (shape_of(node) or ())[way.axis.dim]
    return (args[0], way.axis.dim, start, start + size)


def rebuilt(node: fx.Node, split: Mapping[fx.Node, OperatorSplit]) -> fx.Node | None:
    """Returns the split instruction of whose result that of `node` is a view; None: it is joined from its chunks."""
    sources = [one for one in node.all_input_nodes if one in split]
    if len(sources) != 1 or not is_view(node):
        return None
    return None if node.target is operator.getitem and not is_view(sources[0]) else sources[0]


def plain_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator on tensors."""
    return target(*args, **kwargs)


def fake_call(mode: Any) -> Call:
    """Calls operators on fake tensors."""

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode, torch.no_grad():
            return target(*args, **kwargs)

    return call


def node_call(graph: fx.Graph) -> Call:
    """Adds nodes where the graph inserts, each with its fake value."""

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        mode = next(one.meta["val"] for one in node.all_input_nodes)
        mode = mode[0].fake_mode if isinstance(mode, (tuple, list)) else mode.fake_mode
        node.meta["val"] = fake_call(mode)(target, fake_args, fake_kwargs)
        return node

    return call


def chunk_like(node: fx.Node, axis: Axis | Rows, chunks: int) -> Any:
    """Returns the fake value of a chunk; for rows, whose number nobody knows yet, that of the whole."""
    like = node.meta["val"]
    if isinstance(axis, Rows):
        return like
    shape = chunk_shape(like.shape, axis, chunks)
    return fake_call(like.fake_mode)(_aten.new_empty.default, (like, shape), {})


def _layout(like: torch.Tensor) -> list[int]:
    """Returns the dimensions in their order in memory; as they are where the tensor has gaps or overlaps."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if like.shape[dim] != 1 and strides[dim] != step:
            return list(range(like.dim()))
        step *= like.shape[dim]
    return order


def stages_of(split: RangeSplit) -> dict[fx.Node, int]:
    """Returns how many all-to-alls each split instruction has behind it."""
    stages: dict[fx.Node, int] = {}
    for node in split.split:
        behind = max((stages[one] for one in node.all_input_nodes if one in stages), default=0)
        stages[node] = behind + (is_wait(node) and is_all_to_all(node.all_input_nodes[0]))
    return stages


def runs_before(split: RangeSplit) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns two lists of what runs before: what the split instructions need, and what may as well run beside them."""
    early = set(split.before)
    # Loose instructions run behind the first stage, so that they hide the first chunks' rows.
    needed: set[fx.Node] = set()
    # What stays in order stays before, and so does all that may read what is changed then.
    last = max((place for place, node in enumerate(split.before) if mutates(node)), default=-1)
    ends = [one for node in split.split for one in node.all_input_nodes]
    ends += split.before[: last + 1]
    ends += [node for node in split.before if is_random(node) or is_start(node) or is_wait(node)]
    while ends:
        node = ends.pop()
        if node in early and node not in needed:
            needed.add(node)
            ends += node.all_input_nodes
    return [node for node in split.before if node in needed], [node for node in split.before if node not in needed]


def joined_nodes(nodes: Sequence[fx.Node], split: RangeSplit) -> list[fx.Node]:
    """Returns the split instructions whose whole results are needed."""
    return [node for node in nodes if node in split.split and any(user not in split.split for user in node.users)]


def rewrite(graph: fx.Graph, instructions: Instructions, chosen: InstructionRange) -> None:
    """Puts a range in chunks into the graph."""
    nodes, split, chunks = instructions.nodes[chosen.start : chosen.stop], chosen.split(instructions), chosen.chunks
    anchor = nodes[-1].next
    needed, loose = runs_before(split)
    stages = stages_of(split)
    call = node_call(graph)
    chunks_of: dict[fx.Node, list[fx.Node]] = {node: [] for node in split.split}
    cuts: dict[tuple[fx.Node, Axis, int], fx.Node] = {}
    wholes: dict[fx.Node, fx.Node] = {}

    def move(some: Sequence[fx.Node]) -> None:
        for node in some:
            anchor.prepend(node)

    def made(operation: Callable[..., Any], given: Sequence[fx.Node], like: Any) -> fx.Node:
        node = graph.call_function(operation, tuple(given))
        node.meta["val"] = like
        return node

    def value(chunk: int, source: fx.Node, axis: Axis | Rows | None) -> fx.Node:
        if source in chunks_of:
            return chunks_of[source][chunk]
        if axis is None:
            return source
        assert isinstance(axis, Axis), "rows are cut off nothing"
        if (source, axis, chunk) not in cuts:
            cuts[source, axis, chunk] = cut(call, source, shape_of(source) or (), axis, chunk, chunks)
        return cuts[source, axis, chunk]

    def add_chunk(node: fx.Node, way: OperatorSplit, chunk: int) -> None:
        if way.by_rows:
            given = [value(chunk, source, way.inputs[source]) for source in node.all_input_nodes]
            new = made(operation_of(node, way), given, chunk_like(node, way.axis, chunks))
        else:
            before = value(chunk - 1, carried_from(node), way.axis) if chunk and way.carries else None
            new = run_chunk(call, node, way, chunks, partial(value, chunk), before)
        chunks_of[node].append(new)
        # Before the first trip, where rows of all choices have come together.
        if is_all_to_all(node) and way.by_rows and chunk == chunks - 1 and way.axis.trips == 1:  # type: ignore[union-attr]
            graph.call_function(check_places(node), tuple(chunks_of[node.all_input_nodes[0]]))

    def whole(node: fx.Node) -> fx.Node:
        """Returns a split instruction's whole result: of its chunks, or as a view."""
        if node in wholes:
            return wholes[node]
        source, axis = rebuilt(node, split.split), split.split[node].axis
        if source is not None:
            under = whole(source)
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda used: under if used is source else used
            )
            wholes[node] = call(node.target, args, kwargs)
        elif isinstance(axis, Rows):
            wholes[node] = made(whole_of(node, axis), chunks_of[node], node.meta["val"])
        else:
            wholes[node] = join(call, chunks_of[node], node.meta["val"], axis)
        return wholes[node]

    move(needed)
    with graph.inserting_before(anchor):
        for stage in range(max(stages.values()) + 1):
            for chunk in range(chunks):
                for node, way in split.split.items():
                    if stages[node] == stage:
                        add_chunk(node, way, chunk)
            if stage == 0:  # behind the first stage, while its rows are on the wire
                move(loose)
        for node in joined_nodes(nodes, split):
            whole(node)
    move(split.after)
    for node, joined in wholes.items():
        node.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in chunks_of)
    # Users first.
    for node in reversed(split.split):
        graph.erase_node(node)


def pipeline_s(
    nodes: Sequence[fx.Node],
    split: RangeSplit,
    chunks: int,
    node_s: Callable[[fx.Node], float],
    costs: OperatorCosts,
    known: dict[Any, tuple[Any, float]],
) -> float:
    """Returns the seconds of a range in chunks, by the simulator: Lancet's P(i, n, k).

    `known`: of chunks of instructions in other ranges the fake value, and the seconds with those of cutting inputs;
    from now on also of those of this one.
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

    def costed(node: fx.Node, way: OperatorSplit) -> tuple[Any, float]:
        nonlocal taken_s
        if way.by_rows:  # as many in each chunk, as far as one can tell
            return chunk_like(node, way.axis, chunks), node_s(node) / chunks
        taken_s = 0.0
        chunk = run_chunk(call, node, way, chunks, value)
        if way.carries:
            call(_aten.add.Tensor, (chunk, chunk), {})
        return chunk, taken_s

    def costed_whole(node: fx.Node, axis: Axis | Rows) -> tuple[Any, float]:
        nonlocal taken_s
        taken_s = 0.0
        if isinstance(axis, Rows):
            call(_aten.clone.default, (node.meta["val"],), {})
        else:
            join(call, [values[node]] * chunks, node.meta["val"], axis)
        return None, taken_s

    for node, way in split.split.items():
        key = (node, way.axis, way.crosses, chunks, tuple(source in values for source in node.all_input_nodes))
        if key not in known:
            known[key] = costed(node, way)
        values[node], seconds_s = known[key]
        compute[stages[node]] += seconds_s
        if is_all_to_all(node):
            comm[stages[node]] = comm.get(stages[node], 0.0) + costs.collective_s(bytes_of(node) / chunks)
    around_s = sum(map(node_s, split.after))
    for node in joined_nodes(nodes, split):
        if rebuilt(node, split.split) is None:
            axis = split.split[node].axis
            if (node, axis, chunks) not in known:
                known[node, axis, chunks] = costed_whole(node, axis)
            around_s += known[node, axis, chunks][1]
    needed, loose = runs_before(split)
    around_s += sum(map(node_s, needed))
    plan, seconds = stage_plan(compute, comm, sum(map(node_s, loose)), chunks)
    return around_s + makespan(plan, Durations(seconds))


def _is_view_of(result: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a result lies in the memory of an argument."""
    if not isinstance(result, torch.Tensor):
        return False
    memory = result.untyped_storage()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage() is memory for arg in args)


def stage_plan(
    compute: dict[int, float], comm: dict[int, float], loose_s: float, chunks: int
) -> tuple[Plan, dict[Task, float]]:
    """Returns a range as a plan: each chunk of stage s computes for `compute[s]` seconds and sends for `comm[s]`."""
    order: dict[str, list[Task]] = {"compute": [], "inter": []}
    after: dict[Task, tuple[Task, ...]] = {}
    seconds: dict[Task, float] = {}
    before: list[tuple[Task, ...]] = [()] * chunks
    for stage in range(max([*compute, *comm], default=0) + 1):
        for chunk in range(chunks):
            for kind, where, given in (("expert", "compute", compute), ("dispatch", "inter", comm)):
                if stage in given:
                    # A layer of the plan for each stage, so that no rule of layers applies.
                    task = Task(kind, chunk, 2 * stage + (kind == "dispatch"))
                    order[where].append(task)
                    after[task], seconds[task], before[chunk] = before[chunk], given[stage], (task,)
        if stage == 0:
            task = Task("gate", None, 2 * len(compute) + 2)
            order["compute"].append(task)
            after[task], seconds[task] = (), loose_s
    return Plan.from_orders(order, after), seconds
