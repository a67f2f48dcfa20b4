"""Rewriting of a range of a pass into chunks, and its predicted seconds.

Values are cut along an axis, computed chunk by chunk, and joined again. A stage is the computation up to the next
all-to-all. Chunks run stage by stage: each chunk's all-to-all starts as soon as its stage is computed, and overlaps
with the following chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from fusedmoe.graph.axes import RESHAPES, Axis, OperatorSplit, Rows, chunk_shape, shape_of, split_operator, start_of
from fusedmoe.graph.chunk_rows import assemble_rows, check_slots, row_operation
from fusedmoe.graph.instructions import (
    Instructions,
    bytes_of,
    is_all_to_all,
    is_collective,
    is_mutating,
    is_random,
    is_view,
    is_wait,
    name_of,
)
from fusedmoe.graph.operator_costs import OperatorCosts
from fusedmoe.schedule.cost import TaskDurations
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.task import Task

_aten = torch.ops.aten
#: Calls an operator on tensors, or adds a node to a graph.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class RangeSplit(NamedTuple):
    """Instructions of a range that run whole before the chunks, in chunks, and whole after them."""

    before: tuple[fx.Node, ...]
    split: dict[fx.Node, OperatorSplit]
    after: tuple[fx.Node, ...]


class InstructionRange(NamedTuple):
    """Instructions [start, stop) to run in chunks.

    Attributes:
        axes: for each split instruction its position, the fields of its `Axis` or `Rows`, and
            `OperatorSplit.token_outer`. Positions count from `start`.
        before: positions of the instructions that run whole before the chunks.
    """

    start: int
    stop: int
    chunks: int
    axes: tuple[tuple[int, Sequence[Any], int], ...]
    before: tuple[int, ...]

    def split(self, instructions: Instructions) -> RangeSplit:
        nodes = instructions.nodes[self.start : self.stop]
        op_splits = {}
        for position, fields, token_outer in self.axes:
            first, second = fields
            axis = Axis(first, second) if isinstance(first, int) else Rows(tuple(first), second)
            op_split = split_operator(nodes[position], axis, token_outer, chunks=self.chunks)
            assert op_split is not None, f"{nodes[position].name} was split along {axis} and cannot be"
            op_splits[nodes[position]] = op_split
        early = tuple(nodes[position] for position in self.before)
        taken = {*op_splits, *early}
        return RangeSplit(early, op_splits, tuple(node for node in nodes if node not in taken))


def slice_chunk(call: Call, whole: Any, shape: Sequence[int], axis: Axis, chunk: int, chunks: int) -> Any:
    """Return chunk number `chunk` of `chunks` along an axis; a view if the axis has consecutive chunks (`outer` is 1).

    Args:
        call: adds an operator to the graph, or executes it.
        whole: the tensor, or the node that computes it.
        shape: shape of `whole`.
    """
    dim, outer = axis
    if outer == 1:
        size = shape[dim] // chunks
        return call(_aten.slice.Tensor, (whole, dim, chunk * size, (chunk + 1) * size), {})
    inner = shape[dim] // (outer * chunks)
    apart = call(_aten.reshape.default, (whole, [*shape[:dim], outer, chunks, inner, *shape[dim + 1 :]]), {})
    mine = call(_aten.select.int, (apart, dim + 1, chunk), {})
    return call(_aten.reshape.default, (mine, chunk_shape(shape, axis, chunks)), {})


def join_chunks(call: Call, values: Sequence[Any], like: torch.Tensor, axis: Axis) -> Any:
    """Assemble chunks into a tensor with the shape and strides of `like`."""
    dim, outer = axis
    shape, chunks = [int(size) for size in like.shape], len(values)
    # Later views rely on the captured strides.
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
    op_split: OperatorSplit,
    chunks: int,
    value: Callable[[fx.Node, Axis | Rows | None], Any],
    before: Any = None,
) -> Any:
    """Run one chunk of an instruction that is split along axes.

    Args:
        value: returns the chunk of an input along an axis, or the whole input for None.
        before: previous chunk of `carry_source(node)`; None for the first chunk.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: value(one, op_split.inputs[one]))
    target = node.target
    shape, axis = shape_of(node), op_split.axis
    assert shape is not None and isinstance(axis, Axis)
    if target is operator.getitem:
        return call(target, args, kwargs)
    name = name_of(node)
    if name in RESHAPES:
        return call(_aten.reshape.default, (args[0], chunk_shape(shape, axis, chunks)), {})
    if name == "expand":
        return call(target, (args[0], chunk_shape(shape, axis, chunks)), kwargs)
    if name in ("slice", "split") and op_split.inputs[node.all_input_nodes[0]] != axis:
        size = shape[axis.dim] // chunks
        if name == "split":
            args = (args[0], size, *args[2:])
        else:
            start = start_of(node) * size // shape[axis.dim]
            args = (args[0], axis.dim, start, start + size)
    if is_all_to_all(node):
        rows: Any = args[0].meta["val"] if isinstance(args[0], fx.Node) else args[0]
        if not rows.is_contiguous():
            args = (call(_aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}), *args[1:])
    chunk = call(target, args, kwargs)
    if not op_split.needs_previous or before is None:
        return chunk
    last = shape[axis.dim] // chunks - 1
    so_far = call(_aten.slice.Tensor, (before, axis.dim, last, last + 1), {})
    if name == "constant_pad_nd":  # the first row is the previous chunk's last one
        rest = call(_aten.slice.Tensor, (chunk, axis.dim, 1, last + 1), {})
        return call(_aten.cat.default, ([so_far, rest], axis.dim), {})
    return call(_aten.add.Tensor, (chunk, so_far), {})


def carry_source(node: fx.Node) -> fx.Node:
    """Return the node whose previous chunk a chunk of `node` reads: itself for a cumsum, its input for a shift."""
    return node if node.target is _aten.cumsum.default else node.all_input_nodes[0]


def view_source(node: fx.Node, split: Mapping[fx.Node, OperatorSplit]) -> fx.Node | None:
    """Return the split instruction of which `node` is a view; None if `node` must be joined from its chunks."""
    sources = [one for one in node.all_input_nodes if one in split]
    if len(sources) != 1 or not is_view(node):
        return None
    return None if node.target is operator.getitem and not is_view(sources[0]) else sources[0]


def plain_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


def fake_call(mode: Any) -> Call:
    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode, torch.no_grad():
            return target(*args, **kwargs)

    return call


def make_node_caller(graph: fx.Graph) -> Call:
    """Return a `Call` that adds nodes with fake values at the insertion point."""

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        mode = next(one.meta["val"] for one in node.all_input_nodes)
        mode = mode[0].fake_mode if isinstance(mode, (tuple, list)) else mode.fake_mode
        node.meta["val"] = fake_call(mode)(target, fake_args, fake_kwargs)
        return node

    return call


def chunk_like(node: fx.Node, axis: Axis | Rows, chunks: int) -> Any:
    """Return the fake value of a chunk; for rows, whose number is unknown, that of the whole tensor."""
    like = node.meta["val"]
    if isinstance(axis, Rows):
        return like
    shape = chunk_shape(like.shape, axis, chunks)
    return fake_call(like.fake_mode)(_aten.new_empty.default, (like, shape), {})


def _layout(like: torch.Tensor) -> list[int]:
    """Return the dimensions in memory order; in index order for a tensor with gaps or overlaps."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if like.shape[dim] != 1 and strides[dim] != step:
            return list(range(like.dim()))
        step *= like.shape[dim]
    return order


def stages_of(split: RangeSplit) -> dict[fx.Node, int]:
    """Return the stage of each split instruction: how many all-to-alls precede it in sequence."""
    stages: dict[fx.Node, int] = {}
    for node in split.split:
        behind = max((stages[one] for one in node.all_input_nodes if one in stages), default=0)
        stages[node] = behind + (is_wait(node) and is_all_to_all(node.all_input_nodes[0]))
    return stages


def partition_early(split: RangeSplit) -> tuple[list[fx.Node], list[fx.Node]]:
    """Divide `split.before` into instructions needed first and loose ones, which overlap with the first all-to-alls."""
    early = set(split.before)
    needed: set[fx.Node] = set()
    # Ordered instructions stay before, and so does everything that may read memory they changed.
    last = max((position for position, node in enumerate(split.before) if is_mutating(node)), default=-1)
    ends = [one for node in split.split for one in node.all_input_nodes]
    ends += split.before[: last + 1]
    ends += [node for node in split.before if is_random(node) or is_collective(node) or is_wait(node)]
    while ends:
        node = ends.pop()
        if node in early and node not in needed:
            needed.add(node)
            ends += node.all_input_nodes
    return [node for node in split.before if node in needed], [node for node in split.before if node not in needed]


def joined_nodes(nodes: Sequence[fx.Node], split: RangeSplit) -> list[fx.Node]:
    return [node for node in nodes if node in split.split and any(user not in split.split for user in node.users)]


def rewrite(graph: fx.Graph, instructions: Instructions, chosen: InstructionRange) -> None:
    nodes, split, chunks = instructions.nodes[chosen.start : chosen.stop], chosen.split(instructions), chosen.chunks
    anchor = nodes[-1].next
    needed, loose = partition_early(split)
    stages = stages_of(split)
    call = make_node_caller(graph)
    chunks_of: dict[fx.Node, list[fx.Node]] = {node: [] for node in split.split}
    cuts: dict[tuple[fx.Node, Axis, int], fx.Node] = {}
    wholes: dict[fx.Node, fx.Node] = {}

    def move_nodes(some: Sequence[fx.Node]) -> None:
        for node in some:
            anchor.prepend(node)

    def add_node(operation: Callable[..., Any], given: Sequence[fx.Node], like: Any) -> fx.Node:
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
            cuts[source, axis, chunk] = slice_chunk(call, source, shape_of(source) or (), axis, chunk, chunks)
        return cuts[source, axis, chunk]

    def add_chunk(node: fx.Node, op_split: OperatorSplit, chunk: int) -> None:
        if op_split.has_rows:
            given = [value(chunk, source, op_split.inputs[source]) for source in node.all_input_nodes]
            new = add_node(row_operation(node, op_split), given, chunk_like(node, op_split.axis, chunks))
        else:
            before = value(chunk - 1, carry_source(node), op_split.axis) if chunk and op_split.needs_previous else None
            new = run_chunk(call, node, op_split, chunks, partial(value, chunk), before)
        chunks_of[node].append(new)
        # Check slots before the first all-to-all: its input has the merged rows of all choices.
        if is_all_to_all(node) and op_split.has_rows and chunk == chunks - 1 and op_split.axis.hops == 1:  # type: ignore[union-attr]
            graph.call_function(check_slots(node), tuple(chunks_of[node.all_input_nodes[0]]))

    def whole(node: fx.Node) -> fx.Node:
        if node in wholes:
            return wholes[node]
        source, axis = view_source(node, split.split), split.split[node].axis
        if source is not None:
            under = whole(source)
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda used: under if used is source else used
            )
            wholes[node] = call(node.target, args, kwargs)
        elif isinstance(axis, Rows):
            wholes[node] = add_node(assemble_rows(node, axis), chunks_of[node], node.meta["val"])
        else:
            wholes[node] = join_chunks(call, chunks_of[node], node.meta["val"], axis)
        return wholes[node]

    move_nodes(needed)
    with graph.inserting_before(anchor):
        for stage in range(max(stages.values()) + 1):
            for chunk in range(chunks):
                for node, op_split in split.split.items():
                    if stages[node] == stage:
                        add_chunk(node, op_split, chunk)
            if stage == 0:  # after the first stage, while its rows are in flight
                move_nodes(loose)
        for node in joined_nodes(nodes, split):
            whole(node)
    move_nodes(split.after)
    for node, joined in wholes.items():
        node.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in chunks_of)
    for node in reversed(split.split):
        graph.erase_node(node)


def pipeline_s(
    nodes: Sequence[fx.Node],
    split: RangeSplit,
    chunks: int,
    node_s: Callable[[fx.Node], float],
    costs: OperatorCosts,
    cache: dict[Any, tuple[Any, float]],
) -> float:
    """Predict the seconds of a range in chunks by simulation: Lancet's P(i, n, k). `cache` is shared by all ranges."""
    mode = next(source.meta["val"] for source in nodes if isinstance(source.meta.get("val"), torch.Tensor)).fake_mode
    plain = fake_call(mode)
    total_s = 0.0

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal total_s
        result = plain(target, args, kwargs)
        # Views cost nothing, and this package's functions are costed with their instruction.
        if getattr(target, "namespace", "") == "aten" and not _is_view_of(result, args):
            total_s += costs.operator_s(target, args, kwargs)
        return result

    # All chunks cost as much as the first one. Values are fake.
    stages = stages_of(split)
    compute_s = dict.fromkeys(range(max(stages.values()) + 1), 0.0)
    comm_s: dict[int, float] = {}
    values: dict[fx.Node, Any] = {}

    def value(source: fx.Node, axis: Axis | Rows | None) -> Any:
        if source in values:
            return values[source]
        if axis is None:
            return source.meta["val"]
        assert isinstance(axis, Axis), "rows are cut off nothing"
        return slice_chunk(call, source.meta["val"], shape_of(source) or (), axis, 0, chunks)

    def chunk_cost(node: fx.Node, op_split: OperatorSplit) -> tuple[Any, float]:
        nonlocal total_s
        if op_split.has_rows:  # assumes equally many rows per chunk
            return chunk_like(node, op_split.axis, chunks), node_s(node) / chunks
        total_s = 0.0
        chunk = run_chunk(call, node, op_split, chunks, value)
        if op_split.needs_previous:
            call(_aten.add.Tensor, (chunk, chunk), {})
        return chunk, total_s

    def join_cost(node: fx.Node, axis: Axis | Rows) -> tuple[Any, float]:
        nonlocal total_s
        total_s = 0.0
        if isinstance(axis, Rows):
            call(_aten.clone.default, (node.meta["val"],), {})
        else:
            join_chunks(call, [values[node]] * chunks, node.meta["val"], axis)
        return None, total_s

    for node, op_split in split.split.items():
        in_chunks = tuple(source in values for source in node.all_input_nodes)
        key = (node, op_split.axis, op_split.token_outer, chunks, in_chunks)
        if key not in cache:
            cache[key] = chunk_cost(node, op_split)
        values[node], seconds_s = cache[key]
        compute_s[stages[node]] += seconds_s
        if is_all_to_all(node):
            comm_s[stages[node]] = comm_s.get(stages[node], 0.0) + costs.collective_s(bytes_of(node) / chunks)
    around_s = sum(map(node_s, split.after))
    for node in joined_nodes(nodes, split):
        if view_source(node, split.split) is None:
            axis = split.split[node].axis
            if (node, axis, chunks) not in cache:
                cache[node, axis, chunks] = join_cost(node, axis)
            around_s += cache[node, axis, chunks][1]
    needed, loose = partition_early(split)
    around_s += sum(map(node_s, needed))
    plan, durations_s = stage_plan(compute_s, comm_s, sum(map(node_s, loose)), chunks)
    return around_s + makespan(plan, TaskDurations(durations_s))


def _is_view_of(result: Any, args: tuple[Any, ...]) -> bool:
    if not isinstance(result, torch.Tensor):
        return False
    memory = result.untyped_storage()
    return any(isinstance(arg, torch.Tensor) and arg.untyped_storage() is memory for arg in args)


def stage_plan(
    compute_s: dict[int, float], comm_s: dict[int, float], loose_s: float, chunks: int
) -> tuple[Plan, dict[Task, float]]:
    """Return the plan of a range and its tasks' seconds, given those per stage and of the loose instructions."""
    order: dict[str, list[Task]] = {"compute": [], "inter": []}
    after: dict[Task, tuple[Task, ...]] = {}
    durations_s: dict[Task, float] = {}
    before: list[tuple[Task, ...]] = [()] * chunks
    for stage in range(max([*compute_s, *comm_s], default=0) + 1):
        for chunk in range(chunks):
            for kind, where, given in (("expert", "compute", compute_s), ("dispatch", "inter", comm_s)):
                if stage in given:
                    # A layer number per stage and kind: the standard dependencies within a layer do not apply.
                    task = Task(kind, chunk, 2 * stage + (kind == "dispatch"))
                    order[where].append(task)
                    after[task], durations_s[task], before[chunk] = before[chunk], given[stage], (task,)
        if stage == 0:
            task = Task("gate", None, 2 * len(compute_s) + 2)
            order["compute"].append(task)
            after[task], durations_s[task] = (), loose_s
    return Plan.from_orders(order, after), durations_s
