"""How operators can be split: for each the axes of its inputs that give it in parts along an axis of its result.

    a result in parts along                        needs in parts
    any axis of an elementwise operator            the same axis of its inputs; what is broadcast stays whole
    view, reshape, squeeze, unsqueeze              the axis where the same elements lie
    permute, transpose, t, expand, select, unbind  the axis that it was
    rows or columns of mm, addmm                   rows of the first, or columns of the second factor
    batch, rows or columns of bmm, baddbmm         the batch of both; rows of the first; columns of the second
    sum, mean, amax, amin, argmax, argmin, any,    the axis that is left
      all, var, prod
    softmax, log_softmax, cumsum, topk, sort,      the same, if it is not that of the operation
      gather, scatter, split, slice, cat, stack
    native_layer_norm                              the same, if it is not normalised; weights stay whole
    embedding, index_select, index (the first)     the indices, or the table's other axes
    batch or heads of attention (CPU)              the same of queries, keys and values
    all-to-all, and its wait                       the same, if it is not the first: that is of the ranks

What is not in the table, and what draws random numbers or changes memory, is not split. All parts are equally large.

Which axis each tensor of a range is split along (Lancet §5.2) is a constraint problem for OR-Tools CP-SAT. Every
instruction of a range is split in one way, or runs as a whole, before all that is split or after it. One tensor has one
axis. What is split takes parts of what ran before, or parts along the same axis of what is split; what it needs whole
has run before. All all-to-alls are split; besides these as much computation as possible, by its seconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.instructions import is_all_to_all, is_random, is_start, is_wait, mutates
from fusedmoe.schedule.lancet import solved

_LIKE = frozenset({"_to_copy", "clone", "detach", "alias", "zeros_like", "ones_like", "full_like", "relu", "gelu"})
_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"})
_REDUCES = frozenset({"sum", "mean", "amax", "amin", "argmax", "argmin", "any", "all", "var", "prod"})
# Operators that go along one dimension, by the place of it among their arguments; and its default where it is not 0.
_ALONG = {
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "sort", "slice"), 1),
    **dict.fromkeys(("topk", "split", "split_with_sizes", "chunk"), 2),
}
_DEFAULT_DIM = {"topk": -1, "sort": -1}
# Of the ways to see a dimension as joined: the more there are, the longer the search.
_OUTERS = 6
# Of the solver's work (`fusedmoe.schedule.lancet`).
_LIMIT = 2.0
_TICKS, _SCATTERED = 10_000, 256


class Axis(NamedTuple):
    """Dimension `dim` seen as [outer, parts, inner]; part j is [:, j, :]. `outer` is 1 where parts are consecutive.

    Where a reshape joins an axis with others (capacity with ranks, say), its parts are no longer consecutive in the
    joined dimension, but still elements that belong together.
    """

    dim: int
    outer: int = 1


class OperatorSplit(NamedTuple):
    """One way to split an operator: the axis of its result, or of all its results, and of each input (None: whole)."""

    axis: Axis
    inputs: dict[fx.Node, Axis | None]


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a node's tensor (of several the first); None where there is none, or it is not a plain number."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def fits(shape: Sequence[int], axis: Axis, parts: int) -> bool:
    return 0 <= axis.dim < len(shape) and shape[axis.dim] > 0 and shape[axis.dim] % (axis.outer * parts) == 0


def part_shape(shape: Sequence[int], axis: Axis, parts: int) -> list[int]:
    return [size // parts if dim == axis.dim else size for dim, size in enumerate(shape)]


def relocate(shape: Sequence[int], axis: Axis, other: Sequence[int], parts: int) -> Axis | None:
    """The axis of a reshape to `other` whose parts hold the same elements; None where there is none."""
    before = math.prod(shape[: axis.dim]) * axis.outer
    for dim in range(len(other)):
        prefix = math.prod(other[:dim])
        if prefix and before % prefix == 0 and fits(other, Axis(dim, before // prefix), parts):
            return Axis(dim, before // prefix)
    return None


def first_axes(node: fx.Node, parts: int) -> list[Axis]:
    """The axes along which an all-to-all can be split, but for those that start within a joined dimension."""
    shape = shape_of(node)
    if shape is None:
        return []
    found = []
    for dim in range(1, len(shape)):
        outers = [outer for outer in range(1, shape[dim] // parts + 1) if fits(shape, Axis(dim, outer), parts)]
        found += [Axis(dim, outer) for outer in outers[:_OUTERS]]
    return found


def outputs_from(node: fx.Node, given: fx.Node, axis: Axis, parts: int) -> list[OperatorSplit]:
    """The ways to split `node` in which its input `given` is in parts along `axis`."""
    shape, source = shape_of(node), shape_of(given)
    if shape is None or source is None:
        return []
    if _name(node) in _RESHAPES:
        found = relocate(source, axis, shape, parts)
        candidates = [] if found is None else [found]
    else:
        candidates = [Axis(dim, axis.outer) for dim in range(len(shape))]
    ways = [way for way in (way_of(node, one, parts) for one in candidates) if way is not None]
    return [way for way in ways if way.inputs.get(given) == axis]


def way_of(node: fx.Node, axis: Axis, parts: int) -> OperatorSplit | None:
    """The way to split `node` that gives its (first) result in parts along `axis`; None where there is none."""
    shape = shape_of(node)
    if shape is None or not fits(shape, axis, parts) or is_random(node) or mutates(node):
        return None
    if node.target is operator.getitem:
        return _element(node, axis, parts)
    if not isinstance(node.target, torch._ops.OpOverload) or any(shape_of(one) is None for one in node.all_input_nodes):
        return None
    found = _inputs(node, axis, shape, parts)
    if found is None:
        return None
    inputs: dict[fx.Node, Axis | None] = {}
    for one, wanted in found:
        own = shape_of(one)
        assert own is not None
        if one in inputs and inputs[one] != wanted or wanted is not None and not fits(own, wanted, parts):
            return None
        inputs[one] = wanted
    for one in node.all_input_nodes:
        inputs.setdefault(one, None)
    if not any(wanted is not None for wanted in inputs.values()):
        return None
    value = node.meta["val"]
    if isinstance(value, (tuple, list)) and not all(_has(one, axis, parts) for one in value):
        return None
    return OperatorSplit(axis, inputs)


def _element(node: fx.Node, axis: Axis, parts: int) -> OperatorSplit | None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if not isinstance(source.meta.get("val"), (tuple, list)) or not isinstance(index, int):
        return None
    return None if way_of(source, axis, parts) is None else OperatorSplit(axis, {source: axis})


def _has(value: Any, axis: Axis, parts: int) -> bool:
    """Whether a result of several can be in parts along that axis; one that is not there can."""
    return value is None or isinstance(value, torch.Tensor) and fits(value.shape, axis, parts)


Inputs = list[tuple[fx.Node, Axis | None]]


def _inputs(node: fx.Node, axis: Axis, shape: tuple[int, ...], parts: int) -> Inputs | None:
    name, args = _name(node), node.args
    tensors = node.all_input_nodes
    first = args[0] if args else None
    if is_start(node):
        return [(tensors[0], axis)] if is_all_to_all(node) and axis.dim > 0 else None
    if not isinstance(first, fx.Node):
        return _joined(node, axis) if name in ("cat", "stack") else None
    source = shape_of(first)
    assert source is not None
    if name in _RESHAPES:
        found = relocate(shape, axis, source, parts)
        return None if found is None else [(first, found)]
    if is_wait(node) or torch.Tag.pointwise in node.target.tags or name in _LIKE:  # type: ignore[union-attr]
        return [(one, _broadcast(shape_of(one), shape, axis)) for one in tensors]
    if name == "expand":
        return [(first, _broadcast(source, shape, axis))]
    if name in ("permute", "transpose", "t"):
        return [(first, Axis(_permuted(name, args, len(shape))[axis.dim], axis.outer))]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return _product(name, args, shape, axis)
    if name in _ALONG:
        place = _ALONG[name]
        dim = _dim(args[place] if len(args) > place else node.kwargs.get("dim", _DEFAULT_DIM.get(name, 0)), len(source))
        return [(first, axis)] if axis.dim != dim else None
    if name in _REDUCES:
        return _reduced(node, first, source, axis)
    if name == "native_layer_norm":
        normalised = args[1]
        assert isinstance(normalised, (list, tuple))
        if axis.dim >= len(shape) - len(normalised):
            return None
        return [(first, axis), *((one, None) for one in args[2:4] if isinstance(one, fx.Node))]
    if name in ("select", "unbind"):
        dim = _dim(args[1] if len(args) > 1 else 0, len(source))
        return [(first, Axis(axis.dim + (axis.dim >= dim), axis.outer))]
    if name in ("gather", "scatter"):
        alike = all(shape_of(one) in (source, shape) for one in tensors) and source[axis.dim] == shape[axis.dim]
        same = alike and len({shape_of(one)[axis.dim] for one in tensors}) == 1  # type: ignore[index]
        return [(one, axis) for one in tensors] if same and axis.dim != _dim(args[1], len(source)) else None
    if name in ("embedding", "index_select", "index"):
        return _looked_up(name, args, axis)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        heads = len({shape_of(one)[:2] for one in tensors}) == 1  # type: ignore[index]
        plain = "attn_mask" not in node.kwargs and (len(args) < 4 or args[3] == 0.0)
        return [(one, axis) for one in tensors] if plain and heads and axis.dim < 2 else None
    return None


def _broadcast(own: tuple[int, ...] | None, shape: tuple[int, ...], axis: Axis) -> Axis | None:
    """The axis of an operand that is broadcast to `shape`: None where it has the same for all parts."""
    assert own is not None
    dim = axis.dim - (len(shape) - len(own))
    return None if dim < 0 or own[dim] != shape[axis.dim] else Axis(dim, axis.outer)


def _permuted(name: str, args: Sequence[Any], count: int) -> list[int]:
    """For each dimension of the result that of the input."""
    if name == "permute":
        return [_dim(dim, count) for dim in args[1]]
    order = list(range(count))
    if count > 1:
        one, other = (0, 1) if name == "t" else (_dim(args[1], count), _dim(args[2], count))
        order[one], order[other] = order[other], order[one]
    return order


def _product(name: str, args: Sequence[Any], shape: tuple[int, ...], axis: Axis) -> Inputs:
    added: Inputs = []
    if name in ("addmm", "baddbmm"):
        added, args = [(args[0], _broadcast(shape_of(args[0]), shape, axis))], args[1:]
    left, right = args[0], args[1]
    last = len(shape) - 1
    if axis.dim == last:
        return [*added, (left, None), (right, axis)]
    if axis.dim == last - 1:
        return [*added, (left, axis), (right, None)]
    return [*added, (left, axis), (right, axis)]


def _reduced(node: fx.Node, first: fx.Node, source: tuple[int, ...], axis: Axis) -> Inputs | None:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == [] or isinstance(dims, bool):
        return None
    listed = [_dim(dim, len(source)) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    left = [dim for dim in range(len(source)) if dim not in listed]
    kept = len(shape_of(node) or ()) == len(source)
    dim = axis.dim if kept else left[axis.dim]
    return [(first, Axis(dim, axis.outer))] if dim in left else None


def _joined(node: fx.Node, axis: Axis) -> Inputs | None:
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple))
    dim = _dim(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0), len(shape_of(node) or ()))
    if axis.dim == dim or not all(isinstance(one, fx.Node) for one in tensors):
        return None
    moved = Axis(axis.dim - (_name(node) == "stack" and axis.dim > dim), axis.outer)
    return [(one, moved) for one in tensors if isinstance(one, fx.Node)]


def _looked_up(name: str, args: Sequence[Any], axis: Axis) -> Inputs | None:
    table, indices = args[0], args[1]
    place = 0
    if name == "index":
        if len(indices) != 1 or not isinstance(indices[0], fx.Node):
            return None
        indices = indices[0]
        if indices.meta["val"].dtype == torch.bool:
            return None
    elif name == "index_select":
        place, indices = _dim(args[1], len(shape_of(table) or ())), args[2]
    count = len(shape_of(indices) or ())
    if place <= axis.dim < place + count:
        return [(indices, Axis(axis.dim - place, axis.outer)), (table, None)]
    dim = axis.dim if axis.dim < place else axis.dim - count + 1
    return [(indices, None), (table, Axis(dim, axis.outer))]


def _dim(dim: Any, count: int) -> int:
    return int(dim) % count if count else 0


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).partition("::")[2]


class RangeSplit(NamedTuple):
    """How a range is split: what runs before, what in parts, what after; the way of each that is in parts."""

    before: tuple[fx.Node, ...]
    split: dict[fx.Node, OperatorSplit]
    after: tuple[fx.Node, ...]


def ways_in(nodes: Sequence[fx.Node], parts: int) -> dict[fx.Node, dict[Axis, OperatorSplit]]:
    """All ways to split each instruction that lead to or from a split all-to-all of the range, by their axes."""
    inside = set(nodes)
    ways: dict[fx.Node, dict[Axis, OperatorSplit]] = {}
    ends: list[tuple[fx.Node, OperatorSplit]] = []

    def note(node: fx.Node, way: OperatorSplit | None) -> None:
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
) -> RangeSplit | None:
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
    return RangeSplit(
        tuple(node for node in nodes if solver.value(early[node])),
        taken,
        tuple(node for node in nodes if solver.value(late[node])),
    )
