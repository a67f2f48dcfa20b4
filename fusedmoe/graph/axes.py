"""Axes along which operators can be split: those of the inputs that give chunks along an axis of the result.

    a result in chunks along                        needs in chunks
    any axis of an elementwise operator            the same axis of its inputs; what is broadcast stays whole
    view, reshape, squeeze, unsqueeze              the axis where the same elements lie
    permute, transpose, t, expand, select, unbind  the axis that it was
    rows or columns of mm, addmm                   rows of the first, or columns of the second factor
    batch, rows or columns of bmm, baddbmm         the batch of both; rows of the first; columns of the second
    sum, mean, amax, amin, argmax, argmin, any,    the axis that is left
      all, var, prod
    softmax, log_softmax, cumsum, topk, sort,      the same, if it is not that of the operation
      gather, scatter, split, slice, cat, stack
    cat, repeat, split, slice along their own      the same of all parts, where these are equally large
    cumsum along its own axis, constant_pad_nd     the same, one chunk after the other
      that moves rows on by one
    native_layer_norm                              the same, if it is not normalised; weights stay whole
    embedding, index_select, index (the first)     the indices, or the table's other axes
    batch or heads of attention (CPU)              the same of queries, keys and values
    all-to-all, and its wait                       the same, if it is not the first: that is of the ranks

What is not in the table, and what draws random numbers or changes memory, is not split. All chunks are equally large.

Besides axes there are rows (`Rows`, Lancet's irregular axis). A product over the tokens that puts each token in a place
of its own gives, of a chunk of the tokens, some rows of its result; all-to-alls carry these rows, experts compute them,
and the product that reads them back gives that chunk of the tokens again:

    a result of which a chunk has some rows         needs
    mm, bmm over the tokens                        the tokens of both factors in chunks
    elementwise; view, permute; all-to-all         the same rows
    mm, addmm, bmm, baddbmm of rows and weights    the same rows of the first factor
    split, slice, chunk of what rows hold          the same rows
    and in chunks along the tokens:
    mm, bmm over the places                        rows of the second factor, tokens of the first in chunks

Where tokens stand once for each choice, one choice after the other, a chunk has some tokens of each choice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fusedmoe.graph.instructions import OPERATOR, is_all_to_all, is_random, is_start, is_wait, mutates, name_of

_LIKE = frozenset({"_to_copy", "clone", "detach", "alias", "zeros_like", "ones_like", "full_like", "relu", "gelu"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"})
_REDUCES = frozenset({"sum", "mean", "amax", "amin", "argmax", "argmin", "any", "all", "var", "prod"})
# Operators that go along one dimension, by the place of it among their arguments; and its default where it is not 0.
_ALONG = {
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "sort", "slice"), 1),
    **dict.fromkeys(("topk", "split", "split_with_sizes", "chunk"), 2),
}
_DEFAULT_DIM = {"topk": -1, "sort": -1}
# Operators that put equal parts together along a dimension, or take them apart.
_PARTS = frozenset({"cat", "repeat", "slice", "split"})
PERMUTES = frozenset({"permute", "transpose", "t"})
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
# Of the ways to see a dimension as joined: the more there are, the longer the search.
_OUTERS = 6


class Axis(NamedTuple):
    """Dimension `dim` seen as [outer, chunks, inner]; chunk j is [:, j, :]. `outer` is 1 where chunks are consecutive.

    Where a reshape joins an axis with others (capacity with ranks, say), its chunks are no longer consecutive in the
    joined dimension, but still elements that belong together.
    """

    dim: int
    outer: int = 1


class Rows(NamedTuple):
    """Chunks are rows. Which of them a chunk has it knows itself, at run time; no two chunks have the same.

    `dims` count them, in order, without dimensions of size 1; what the others count a row holds. `trips`: the
    all-to-alls that they have gone through, there and back.
    """

    dims: tuple[int, ...]
    trips: int


class OperatorSplit(NamedTuple):
    """One way to split an operator: the axis of its result, or of all its results, and of each input (None: whole).

    `crosses`: not 0 of a product that makes rows of a chunk of the tokens, or a chunk of the tokens of its rows: the
    `outer` of the tokens' axis.
    `carries`: a chunk needs the chunk before it, as in a running sum.
    """

    axis: Axis | Rows
    inputs: dict[fx.Node, Axis | Rows | None]
    crosses: int = 0
    carries: bool = False

    @property
    def by_rows(self) -> bool:
        """True where rows go in or out."""
        return any(isinstance(axis, Rows) for axis in (self.axis, *self.inputs.values()))


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Returns the shape of a node's (first) tensor; None where there is none, or a size is not a plain number."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node that is known to have one."""
    shape = shape_of(node)
    assert shape is not None
    return shape


def fits(shape: Sequence[int], axis: Axis | Rows, chunks: int) -> bool:
    if isinstance(axis, Rows):
        return bool(axis.dims) and 0 not in shape and all(shape[dim] > 1 for dim in axis.dims)
    return 0 <= axis.dim < len(shape) and shape[axis.dim] > 0 and shape[axis.dim] % (axis.outer * chunks) == 0


def chunk_shape(shape: Sequence[int], axis: Axis, chunks: int) -> list[int]:
    return [size // chunks if dim == axis.dim else size for dim, size in enumerate(shape)]


def relocate(shape: Sequence[int], axis: Axis, other: Sequence[int], chunks: int) -> Axis | None:
    """Returns the axis of a reshape to `other` whose chunks hold the same elements; None where there is none."""
    # The elements, in their order, lie in so many blocks, each of which is cut into the chunks. A dimension of `other`
    # has the same blocks where the product of those in front of it divides their number.
    before = math.prod(shape[: axis.dim]) * axis.outer
    for dim in range(len(other)):
        prefix = math.prod(other[:dim])
        if prefix and before % prefix == 0 and fits(other, Axis(dim, before // prefix), chunks):
            return Axis(dim, before // prefix)
    return None


def same_rows(shape: Sequence[int], rows: Rows, other: Sequence[int]) -> Rows | None:
    """Returns the rows of a reshape to `other`; None where a dimension joins what counts rows with what they hold."""
    left = [dim for dim, size in enumerate(shape) if size != 1]
    right = [dim for dim, size in enumerate(other) if size != 1]
    dims: list[int] = []
    while left:
        joined, apart = [left.pop(0)], [right.pop(0)]
        while (ours := math.prod(shape[dim] for dim in joined)) != (theirs := math.prod(other[dim] for dim in apart)):
            if ours < theirs:
                joined.append(left.pop(0))
            else:
                apart.append(right.pop(0))
        counting = {dim in rows.dims for dim in joined}
        if len(counting) > 1:
            return None
        dims += apart if counting == {True} else []
    return Rows(tuple(dims), rows.trips)


def first_axes(node: fx.Node, chunks: int, rows: bool = False) -> list[Axis | Rows]:
    """Returns the axes along which an all-to-all can be split, and with `rows` also rows of it."""
    shape = shape_of(node)
    if shape is None:
        return []
    found: list[Axis | Rows] = []
    if rows and 0 not in shape:
        counting = [tuple(dim for dim in range(last) if shape[dim] != 1) for last in range(1, len(shape))]
        found += [Rows(dims, trips) for dims in dict.fromkeys(counting) if dims for trips in (1, 2)]
    # Axes that begin inside of a joined dimension are not among them.
    for dim in range(1, len(shape)):
        outers = [outer for outer in range(1, shape[dim] // chunks + 1) if fits(shape, Axis(dim, outer), chunks)]
        found += [Axis(dim, outer) for outer in outers[:_OUTERS]]
    return found


def copies_of(node: fx.Node) -> int:
    """Returns how many times the tokens of a product stand in it, one time after the other: once for each choice."""
    name, args, shape = name_of(node), node.args, shape_of(node)
    many: Any = args[0 if name == "cat" else 1] if name in ("cat", "repeat", "expand") and shape else ()
    if name == "cat" and _dim(args[1] if len(args) > 1 else 0, len(shape or ())) == 0:
        return len(many)
    if name == "repeat" or (name == "expand" and math.prod(shape or ()) > math.prod(shape_of(args[0]) or ())):  # type: ignore[arg-type]
        return int(many[0])
    alike = (name in RESHAPES or name in PERMUTES or name in _LIKE) and len(node.all_input_nodes) == 1
    return copies_of(node.all_input_nodes[0]) if alike else 1


def outputs_from(
    node: fx.Node, given: fx.Node, axis: Axis | Rows, chunks: int, crossings: Sequence[int] = ()
) -> list[OperatorSplit]:
    """Returns the ways to split `node` whose input `given` is in chunks along `axis`.

    `crossings`: numbers that `OperatorSplit.crosses` may be, for ways into rows and out of them.
    """
    shape, source = shape_of(node), shape_of(given)
    if shape is None or source is None:
        return []
    name = name_of(node)
    candidates: list[tuple[Axis | Rows, int]] = []
    if name in RESHAPES:
        found = same_rows(source, axis, shape) if isinstance(axis, Rows) else relocate(source, axis, shape, chunks)
        candidates = [] if found is None else [(found, 0)]
    elif isinstance(axis, Rows):
        moved = permuted(name, node.args, len(shape)) if name in PERMUTES else range(len(shape))
        dims = tuple(dim for dim, of in enumerate(moved) if of in axis.dims)
        candidates = [(Rows(dims, axis.trips + is_all_to_all(node)), 0)]
        if name in PRODUCTS:
            candidates.append((Rows(_leading(shape), axis.trips), 0))
            candidates += [(Axis(len(shape) - 2, outer), outer) for outer in crossings]
    else:
        # Parts that are joined, or taken apart, have fewer blocks of their own.
        outers = {axis.outer}
        if name in _PARTS and source and all(source):
            outers |= {axis.outer * size // old for size, old in zip(shape[-len(source) :], source, strict=True)} - {0}
        candidates = [(Axis(dim, outer), 0) for dim in range(len(shape)) for outer in sorted(outers)]
        if name in PRODUCTS and axis.outer in crossings:
            candidates.append((Rows(_leading(shape), 0), axis.outer))
    ways = [way for way in (way_of(node, *one, chunks=chunks) for one in candidates) if way is not None]
    return [way for way in ways if way.inputs.get(given) == axis]


def way_of(node: fx.Node, axis: Axis | Rows, crosses: int = 0, *, chunks: int) -> OperatorSplit | None:
    """Returns the way to split `node` that gives its (first) result in chunks along `axis`; None where none does."""
    shape = shape_of(node)
    if shape is None or not fits(shape, axis, chunks) or is_random(node) or mutates(node):
        return None
    if node.target is operator.getitem:
        return None if crosses else _element(node, axis, chunks)
    if not isinstance(node.target, OPERATOR) or None in map(shape_of, node.all_input_nodes):
        return None
    if node.target is torch.ops.aten.view.dtype:  # no reshape in spite of its name: bits as elements of another dtype
        return None
    if crosses:
        found = _crossed(node, axis, shape, crosses)
    else:
        found = _rows_inputs(node, axis, shape) if isinstance(axis, Rows) else _inputs(node, axis, shape, chunks)
    if not found or all(wanted is None for _, wanted in found):
        return None
    inputs: dict[fx.Node, Axis | Rows | None] = {}
    for source, wanted in found:
        # An operator that takes a tensor twice needs the same chunks of it both times.
        other = inputs.setdefault(source, wanted) != wanted
        if other or wanted is not None and not fits(_shape(source), wanted, chunks):
            return None
    for source in node.all_input_nodes:
        inputs.setdefault(source, None)
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        given = [one for one in value if one is not None]
        if not all(isinstance(one, torch.Tensor) and fits(one.shape, axis, chunks) for one in given):
            return None
    carried = {"cumsum": lambda: _dim(node.args[1], len(shape)), "constant_pad_nd": lambda: _shifted(node)}
    carries = isinstance(axis, Axis) and axis.dim == carried.get(name_of(node), lambda: None)()
    return OperatorSplit(axis, inputs, crosses, carries)


def _element(node: fx.Node, axis: Axis | Rows, chunks: int) -> OperatorSplit | None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if not isinstance(source.meta.get("val"), (tuple, list)) or not isinstance(index, int):
        return None
    return None if way_of(source, axis, chunks=chunks) is None else OperatorSplit(axis, {source: axis})


Inputs = list[tuple[fx.Node, Axis | Rows | None]]


def _inputs(node: fx.Node, axis: Axis, shape: tuple[int, ...], chunks: int) -> Inputs | None:
    name, args = name_of(node), node.args
    tensors = node.all_input_nodes
    first = args[0] if args else None
    if is_start(node):
        return [(tensors[0], axis)] if is_all_to_all(node) and axis.dim > 0 else None
    if not isinstance(first, fx.Node):
        return _joined(node, axis) if name in ("cat", "stack") else None
    source = _shape(first)
    if name in RESHAPES:
        found = relocate(shape, axis, source, chunks)
        return None if found is None else [(first, found)]
    if is_wait(node) or torch.Tag.pointwise in node.target.tags or name in _LIKE:  # type: ignore[union-attr]
        return [(tensor, _broadcast(tensor, shape, axis)) for tensor in tensors]
    if name == "expand":
        return [(first, _broadcast(first, shape, axis))]
    if name in PERMUTES:
        return [(first, Axis(permuted(name, args, len(shape))[axis.dim], axis.outer))]
    if name in PRODUCTS:
        return _product(name, args, shape, axis)
    if name in _ALONG:
        place = _ALONG[name]
        dim = _dim(args[place] if len(args) > place else node.kwargs.get("dim", _DEFAULT_DIM.get(name, 0)), len(source))
        if axis.dim == dim and name in ("slice", "split"):
            unit = _unit(node, dim)
            blocks, rest = divmod(axis.outer * unit, shape[dim]) if unit and shape[dim] else (0, 1)
            return None if rest else [(first, Axis(dim, blocks * source[dim] // unit))]
        return [(first, axis)] if axis.dim != dim or (name == "cumsum" and axis.outer == 1) else None
    if name == "constant_pad_nd":
        shifted = _shifted(node)
        return None if shifted is None or axis == Axis(shifted, axis.outer) != Axis(shifted) else [(first, axis)]
    if name == "repeat":
        return _repeated(node, first, axis)
    if name in _REDUCES:
        return _reduced(node, first, source, axis)
    if name == "native_layer_norm":
        normalised = args[1]
        assert isinstance(normalised, (list, tuple))
        if axis.dim >= len(shape) - len(normalised):
            return None
        return [(first, axis), *((tensor, None) for tensor in args[2:4] if isinstance(tensor, fx.Node))]
    if name in ("select", "unbind"):
        dim = _dim(args[1] if len(args) > 1 else 0, len(source))
        return [(first, Axis(axis.dim + (axis.dim >= dim), axis.outer))]
    if name in ("gather", "scatter"):
        alike = all(shape_of(tensor) in (source, shape) for tensor in tensors) and source[axis.dim] == shape[axis.dim]
        same = alike and len({_shape(tensor)[axis.dim] for tensor in tensors}) == 1
        return [(tensor, axis) for tensor in tensors] if same and axis.dim != _dim(args[1], len(source)) else None
    if name in ("embedding", "index_select", "index"):
        return _looked_up(name, args, axis)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        heads = len({_shape(tensor)[:2] for tensor in tensors}) == 1
        plain = "attn_mask" not in node.kwargs and (len(args) < 4 or args[3] == 0.0)
        return [(tensor, axis) for tensor in tensors] if plain and heads and axis.dim < 2 else None
    return None


def _rows_inputs(node: fx.Node, rows: Rows, shape: tuple[int, ...]) -> Inputs | None:
    """Returns the inputs of an operator that computes each row by itself."""
    name, args, first = name_of(node), node.args, node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    source = _shape(first)
    if is_start(node):
        # Equal shares, so that a row's place tells its rank; and the first dimension counts the ranks.
        equal = is_all_to_all(node) and len({str(rows) for of in args[1:3] for rows in of}) == 1  # type: ignore[union-attr]
        return [(first, rows._replace(trips=rows.trips - 1))] if equal and rows.dims[0] == 0 and rows.trips else None
    if name in RESHAPES:
        found = same_rows(shape, rows, source)
        return None if found is None else [(first, found)]
    if name in PERMUTES:
        order = permuted(name, args, len(shape))
        # What a row holds stays in its order: rows are kept as vectors.
        held = [order[dim] for dim, size in enumerate(shape) if size != 1 and dim not in rows.dims]
        before = rows._replace(dims=tuple(sorted(order[dim] for dim in rows.dims)))
        return [(first, before)] if held == sorted(held) else None
    if is_wait(node) or torch.Tag.pointwise in node.target.tags or name in _LIKE:  # type: ignore[union-attr]
        return [(tensor, rows if shape_of(tensor) == shape else None) for tensor in node.all_input_nodes]
    if name == "expand":
        return [(first, rows)] if source == shape else None
    if name in PRODUCTS:
        # addmm and baddbmm have what is added in front of the two factors.
        given = args[-2:]
        if rows.dims != _leading(shape) or node.kwargs or not all(isinstance(tensor, fx.Node) for tensor in given):
            return None
        rest: Inputs = [(tensor, None) for tensor in node.all_input_nodes if tensor is not given[0]]
        return [*rest, (given[0], rows)]  # type: ignore[list-item]
    if name in ("slice", "split", "split_with_sizes"):
        place = _ALONG[name]
        dim = _dim(args[place] if len(args) > place else node.kwargs.get("dim", 0), len(source))
        held = [tensor for tensor, size in enumerate(source) if size != 1 and tensor not in rows.dims]
        return [(first, rows)] if held == [dim] else None
    return None


def _crossed(node: fx.Node, axis: Axis | Rows, shape: tuple[int, ...], outer: int) -> Inputs | None:
    """Returns the inputs of a product over the tokens, which makes rows, or over the places that rows have."""
    last = len(shape) - 1
    if name_of(node) not in ("mm", "bmm") or (last == 2 and shape[0] != 1):
        return None
    left, right = node.args[0], node.args[1]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    # No trip made yet: the rows set out here. After two trips, there and back, they are read.
    if isinstance(axis, Rows):
        tokens: Inputs = [(left, Axis(last, outer)), (right, Axis(last - 1, outer))]
        return tokens if axis == Rows((last - 1,), 0) else None
    return [(left, axis), (right, Rows((last - 1,), 2))] if axis == Axis(last - 1, outer) else None


def _leading(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns all dimensions but the last, and but those of size 1."""
    return tuple(dim for dim, size in enumerate(shape[:-1]) if size != 1)


def _broadcast(operand: fx.Node, shape: tuple[int, ...], axis: Axis) -> Axis | None:
    """Returns the axis of an operand that is broadcast to `shape`; None where all chunks need the same of it."""
    own = _shape(operand)
    dim = axis.dim - (len(shape) - len(own))
    return None if dim < 0 or own[dim] != shape[axis.dim] else Axis(dim, axis.outer)


def permuted(name: str, args: Sequence[Any], count: int) -> list[int]:
    """Returns for each dimension of the result that of the input."""
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
        added, args = [(args[0], _broadcast(args[0], shape, axis))], args[1:]
    last = len(shape) - 1
    # Columns need all of the first factor, rows all of the second; a batch is one of both.
    left, right = None if axis.dim == last else axis, None if axis.dim == last - 1 else axis
    return [*added, (args[0], left), (args[1], right)]


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
    dim = _dim(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0), len(_shape(node)))
    if not all(isinstance(tensor, fx.Node) for tensor in tensors):
        return None
    if axis.dim == dim:
        equal = len({_shape(tensor) for tensor in tensors if isinstance(tensor, fx.Node)}) == 1
        if name_of(node) != "cat" or not equal or axis.outer % len(tensors):
            return None
        return [(tensor, Axis(dim, axis.outer // len(tensors))) for tensor in tensors if isinstance(tensor, fx.Node)]
    # A stack has one dimension more than what is stacked.
    moved = Axis(axis.dim - (name_of(node) == "stack" and axis.dim > dim), axis.outer)
    return [(tensor, moved) for tensor in tensors if isinstance(tensor, fx.Node)]


def _shifted(node: fx.Node) -> int | None:
    """Returns the dimension along which a `constant_pad_nd` moves all rows on by one, zeros first, and nothing else."""
    pads: Any = node.args[1]
    if len(node.args) > 2 or pads[-2:] != [1, -1] or any(pads[:-2]):
        return None
    return len(_shape(node)) - len(pads) // 2


def _repeated(node: fx.Node, first: fx.Node, axis: Axis) -> Inputs | None:
    repeats: Any = node.args[1]
    dim = axis.dim - (len(repeats) - len(_shape(first)))
    if dim < 0 or axis.outer % repeats[axis.dim]:
        return None
    return [(first, Axis(dim, axis.outer // repeats[axis.dim]))]


def _unit(node: fx.Node, dim: int) -> int:
    """Returns the size of equal parts along a dimension of which a slice has some, or a split gives one each; 0 where
    there are none."""
    args, first = node.args, node.args[0]
    assert isinstance(first, fx.Node)
    whole, size = _shape(first)[dim], _shape(node)[dim]
    if name_of(node) == "split":
        return 0 if whole % size else size
    return math.gcd(whole, start_of(node), size) if len(args) < 5 or args[4] == 1 else 0


def start_of(node: fx.Node) -> int:
    """Returns where a slice begins."""
    given: Any = node.args
    dim, start = (0, None) if len(given) < 2 else (given[1], given[2] if len(given) > 2 else None)
    source = _shape(given[0])
    return range(source[_dim(dim, len(source))])[slice(start, None)].start


def _looked_up(name: str, args: Sequence[Any], axis: Axis) -> Inputs | None:
    table, indices, place = args[0], args[-1], 0
    if name == "embedding":
        indices = args[1]
    elif name == "index_select":
        place = _dim(args[1], len(_shape(table)))
    else:
        # A mask gives as many rows as it has ones: its chunks would not be equally large.
        if len(indices) != 1 or not isinstance(indices[0], fx.Node) or indices[0].meta["val"].dtype == torch.bool:
            return None
        indices = indices[0]
    count = len(_shape(indices))
    if place <= axis.dim < place + count:
        return [(indices, Axis(axis.dim - place, axis.outer)), (table, None)]
    dim = axis.dim if axis.dim < place else axis.dim - count + 1
    return [(indices, None), (table, Axis(dim, axis.outer))]


def _dim(dim: Any, count: int) -> int:
    return int(dim) % count if count else 0
