"""A range of a pass in chunks: values are cut along an axis, computed chunk by chunk, and joined again.

The chunks of a range run stage by stage: what can be computed without another all-to-all, of one chunk after the other;
each chunk's all-to-all starts as soon as its stage has been computed, and runs beside the following chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, chunk_shape, shape_of
from fusedmoe.graph.chunk_rows import check_places, operation_of, whole_of
from fusedmoe.graph.instructions import Instructions, is_all_to_all, is_random, is_start, is_view, is_wait, mutates
from fusedmoe.graph.range_split import InstructionRange, RangeSplit

_aten = torch.ops.aten
#: Calls an operator: on tensors, or by adding a node to a graph.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_SHAPED = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::squeeze", "aten::unsqueeze"})


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
    back = sorted(range(len(shape)), key=order.__getitem__)
    if outer == 1:
        if not moved:
            return call(_aten.cat.default, (list(values), dim), {})
        turned = [call(_aten.permute.default, (chunk, order), {}) for chunk in values]
        whole = call(_aten.cat.default, (turned, order.index(dim)), {})
        return call(_aten.permute.default, (whole, back), {})
    inner = shape[dim] // (outer * chunks)
    apart = [*shape[:dim], outer, 1, inner, *shape[dim + 1 :]]
    wide = [call(_aten.reshape.default, (chunk, apart), {}) for chunk in values]
    whole = call(_aten.reshape.default, (call(_aten.cat.default, (wide, dim + 1), {}), shape), {})
    if not moved:
        return whole
    turned_whole = call(_aten.permute.default, (whole, order), {})
    laid = call(_aten.clone.default, (turned_whole,), {"memory_format": torch.contiguous_format})
    return call(_aten.permute.default, (laid, back), {})


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
        before: the chunk of the result that comes before; None for the first one.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: value(one, way.inputs[one]))
    target = node.target
    shape, axis = shape_of(node), way.axis
    assert shape is not None and isinstance(axis, Axis)
    if target is operator.getitem:
        return call(target, args, kwargs)
    name = target._schema.name  # type: ignore[union-attr]
    if name in _SHAPED:
        return call(_aten.reshape.default, (args[0], chunk_shape(shape, axis, chunks)), {})
    if name == "aten::expand":
        return call(target, (args[0], chunk_shape(shape, axis, chunks)), kwargs)
    if is_all_to_all(node):
        rows: Any = args[0].meta["val"] if isinstance(args[0], fx.Node) else args[0]
        if not rows.is_contiguous():
            # Collectives send memory as it lies.
            args = (call(_aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}), *args[1:])
    found = call(target, args, kwargs)
    if not way.carries or before is None:
        return found
    # A running sum goes on from the last sum of the chunk before.
    last = shape[axis.dim] // chunks - 1
    so_far = call(_aten.slice.Tensor, (before, axis.dim, last, last + 1), {})
    return call(_aten.add.Tensor, (found, so_far), {})


def rebuilt(node: fx.Node, split: Mapping[fx.Node, OperatorSplit]) -> fx.Node | None:
    """Returns the split instruction of whose result that of `node` is a view; None: it is joined from its chunks."""
    sources = [one for one in node.all_input_nodes if one in split]
    if len(sources) != 1 or not is_view(node):
        return None
    return None if node.target is operator.getitem and not is_view(sources[0]) else sources[0]


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


def rows_node(
    graph: fx.Graph, node: fx.Node, way: OperatorSplit, chunks: int, value: Callable[[fx.Node, Axis | Rows | None], Any]
) -> fx.Node:
    """One chunk of an instruction that rows go into or come out of; `value` as for `run_chunk`."""
    given = tuple(value(one, way.inputs[one]) for one in node.all_input_nodes)
    made = graph.call_function(operation_of(node, way), given)
    made.meta["val"] = chunk_like(node, way.axis, chunks)
    return made


def chunk_like(node: fx.Node, axis: Axis | Rows, chunks: int) -> Any:
    """Returns the fake value of a chunk; for rows, whose number nobody knows yet, that of the whole."""
    like = node.meta["val"]
    if isinstance(axis, Rows):
        return like
    shape = chunk_shape(like.shape, axis, chunks)
    return fake_call(like.fake_mode)(_aten.new_empty.default, (like, shape), {})


def join_rows(graph: fx.Graph, node: fx.Node, rows: Rows, chunks: Sequence[fx.Node]) -> fx.Node:
    """The whole of a split instruction whose chunks are rows."""
    made = graph.call_function(whole_of(node, rows), tuple(chunks))
    made.meta["val"] = node.meta["val"]
    return made


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
    ends = [one for node in split.split for one in node.all_input_nodes]
    # What stays in order stays before, and so does all that may read what is changed then.
    last = max((place for place, node in enumerate(split.before) if mutates(node)), default=-1)
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

    def move(some: Sequence[fx.Node]) -> None:
        for node in some:
            anchor.prepend(node)

    chunks_of: dict[fx.Node, list[fx.Node]] = {node: [] for node in split.split}
    cuts: dict[tuple[fx.Node, Axis, int], fx.Node] = {}

    def value(chunk: int, source: fx.Node, axis: Axis | Rows | None) -> fx.Node:
        if source in chunks_of:
            return chunks_of[source][chunk]
        if axis is None:
            return source
        assert isinstance(axis, Axis), "rows are cut off nothing"
        if (source, axis, chunk) not in cuts:
            cuts[source, axis, chunk] = cut(call, source, shape_of(source) or (), axis, chunk, chunks)
        return cuts[source, axis, chunk]

    move(needed)
    with graph.inserting_before(anchor):
        for stage in range(max(stages.values()) + 1):
            for chunk in range(chunks):
                for node, way in split.split.items():
                    if stages[node] != stage:
                        continue
                    if way.by_rows:
                        chunks_of[node].append(rows_node(graph, node, way, chunks, partial(value, chunk)))
                    else:
                        before = chunks_of[node][-1] if chunk else None
                        chunks_of[node].append(run_chunk(call, node, way, chunks, partial(value, chunk), before))
                    if way.crosses and isinstance(way.axis, Rows) and chunk == chunks - 1:
                        graph.call_function(check_places(node), tuple(chunks_of[node]))
            if stage == 0:  # behind the first stage, while its rows are on the wire
                move(loose)
        wholes: dict[fx.Node, fx.Node] = {}
        for node in joined_nodes(nodes, split):
            _whole(graph, call, node, split, chunks_of, wholes)
    move(split.after)
    for node, whole in wholes.items():
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in chunks_of)
    # Users first.
    for node in reversed(split.split):
        graph.erase_node(node)


def _whole(
    graph: fx.Graph,
    call: Call,
    node: fx.Node,
    split: RangeSplit,
    chunks_of: dict[fx.Node, list[fx.Node]],
    wholes: dict[fx.Node, fx.Node],
) -> fx.Node:
    """Returns a split instruction's whole result: of its chunks, or as a view. `wholes`: those known, to be filled."""
    if node not in wholes:
        source = rebuilt(node, split.split)
        if source is not None:
            under = _whole(graph, call, source, split, chunks_of, wholes)
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: under if one is source else one)
            wholes[node] = call(node.target, args, kwargs)
        else:
            axis = split.split[node].axis
            if isinstance(axis, Rows):
                wholes[node] = join_rows(graph, node, axis, chunks_of[node])
            else:
                wholes[node] = join(call, chunks_of[node], node.meta["val"], axis)
    return wholes[node]
