"""Values in parts: cut along an axis, computed part by part, joined again; on tensors, or by nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusedmoe.graph.axes import Axis, OperatorSplit, Rows, part_shape, shape_of
from fusedmoe.graph.instructions import is_all_to_all, is_view
from fusedmoe.graph.part_rows import operation_of, whole_of

_aten = torch.ops.aten
#: Calls an operator: on tensors, or by adding a node to a graph.
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_SHAPED = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::squeeze", "aten::unsqueeze"})


def cut(call: Call, whole: Any, shape: Sequence[int], axis: Axis, part: int, parts: int) -> Any:
    """Part `part` of a tensor of that shape; a view where the parts are consecutive."""
    dim, outer = axis
    if outer == 1:
        size = shape[dim] // parts
        return call(_aten.slice.Tensor, (whole, dim, part * size, (part + 1) * size), {})
    inner = shape[dim] // (outer * parts)
    apart = call(_aten.reshape.default, (whole, [*shape[:dim], outer, parts, inner, *shape[dim + 1 :]]), {})
    mine = call(_aten.select.int, (apart, dim + 1, part), {})
    return call(_aten.reshape.default, (mine, part_shape(shape, axis, parts)), {})


def join(call: Call, pieces: Sequence[Any], like: torch.Tensor, axis: Axis) -> Any:
    """The tensor of these parts, with the shape and the strides of `like`."""
    dim, outer = axis
    shape, parts = [int(size) for size in like.shape], len(pieces)
    order = _layout(like)
    moved = order != list(range(len(shape)))
    back = sorted(range(len(shape)), key=order.__getitem__)
    if outer == 1:
        if not moved:
            return call(_aten.cat.default, (list(pieces), dim), {})
        turned = [call(_aten.permute.default, (piece, order), {}) for piece in pieces]
        whole = call(_aten.cat.default, (turned, order.index(dim)), {})
        return call(_aten.permute.default, (whole, back), {})
    inner = shape[dim] // (outer * parts)
    apart = [*shape[:dim], outer, 1, inner, *shape[dim + 1 :]]
    wide = [call(_aten.reshape.default, (piece, apart), {}) for piece in pieces]
    whole = call(_aten.reshape.default, (call(_aten.cat.default, (wide, dim + 1), {}), shape), {})
    if not moved:
        return whole
    turned_whole = call(_aten.permute.default, (whole, order), {})
    laid = call(_aten.clone.default, (turned_whole,), {"memory_format": torch.contiguous_format})
    return call(_aten.permute.default, (laid, back), {})


def run_part(
    call: Call,
    node: fx.Node,
    way: OperatorSplit,
    parts: int,
    value: Callable[[fx.Node, Axis | Rows | None], Any],
    before: Any = None,
) -> Any:
    """One part of an instruction split along axes.

    Args:
        value: of an input the part along an axis, or the whole.
        before: the part of the result that comes before; None for the first one.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: value(one, way.inputs[one]))
    target = node.target
    shape, axis = shape_of(node), way.axis
    assert shape is not None and isinstance(axis, Axis)
    if target is operator.getitem:
        return call(target, args, kwargs)
    name = target._schema.name  # type: ignore[union-attr]
    if name in _SHAPED:
        return call(_aten.reshape.default, (args[0], part_shape(shape, axis, parts)), {})
    if name == "aten::expand":
        return call(target, (args[0], part_shape(shape, axis, parts)), kwargs)
    if is_all_to_all(node):
        rows: Any = args[0].meta["val"] if isinstance(args[0], fx.Node) else args[0]
        if not rows.is_contiguous():
            args = (call(_aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}), *args[1:])
    found = call(target, args, kwargs)
    if not way.carries or before is None:
        return found
    last = shape[axis.dim] // parts - 1
    so_far = call(_aten.slice.Tensor, (before, axis.dim, last, last + 1), {})
    return call(_aten.add.Tensor, (found, so_far), {})


def rebuilt(node: fx.Node, split: Mapping[fx.Node, OperatorSplit]) -> fx.Node | None:
    """The split instruction of whose whole the whole of `node` is a view; None: it is put together from its parts."""
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
    graph: fx.Graph, node: fx.Node, way: OperatorSplit, parts: int, value: Callable[[fx.Node, Axis | Rows | None], Any]
) -> fx.Node:
    """One part of an instruction that rows go into or come out of; `value` as for `run_part`."""
    given = tuple(value(one, way.inputs[one]) for one in node.all_input_nodes)
    made = graph.call_function(operation_of(node, way), given)
    made.meta["val"] = part_like(node, way.axis, parts)
    return made


def part_like(node: fx.Node, axis: Axis | Rows, parts: int) -> Any:
    """The fake value of a part. Of rows, whose number nobody knows yet, it is the whole."""
    like = node.meta["val"]
    if isinstance(axis, Rows):
        return like
    shape = part_shape(like.shape, axis, parts)
    return fake_call(like.fake_mode)(_aten.new_empty.default, (like, shape), {})


def join_rows(graph: fx.Graph, node: fx.Node, rows: Rows, pieces: Sequence[fx.Node]) -> fx.Node:
    """The whole of a split instruction whose parts are rows."""
    made = graph.call_function(whole_of(node, rows), tuple(pieces))
    made.meta["val"] = node.meta["val"]
    return made


def _layout(like: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory; as they are where the tensor has gaps or overlaps."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if like.shape[dim] != 1 and strides[dim] != step:
            return list(range(like.dim()))
        step *= like.shape[dim]
    return order
