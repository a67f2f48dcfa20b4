"""Rules for splitting operators: for chunks along an axis of the result, the chunks that each input must have.

An elementwise operator needs chunks along the same axis of its inputs, but broadcast operands whole. A reshape needs
the axis with the same elements. A matrix product needs the rows of its first factor, or the columns of its second one.
An operator that works along an axis, such as softmax, can be split along the other axes only; a cumsum or a shift by
one row can also be split along its own axis, with chunks in sequence. An all-to-all can be split along any axis but the
first, which counts ranks. All chunks are equally large. Operators without a rule here, and operators that draw random
numbers or change memory, are not split.

Chunks may also be rows (`Rows`, Lancet's irregular axis). A GEMM over the tokens that assigns each token an exclusive
slot maps a chunk of tokens to some rows of its result. All-to-alls send these rows, experts compute them, and the GEMM
that reads them back yields the same chunk of tokens. If tokens are repeated once per choice, choice by choice, a chunk
has some tokens of each choice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fusedmoe.graph.instructions import OPERATOR, is_all_to_all, is_collective, is_mutating, is_random, is_wait, name_of

_UNARY = frozenset({"_to_copy", "clone", "detach", "alias", "zeros_like", "ones_like", "full_like", "relu", "gelu"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"})
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "argmax", "argmin", "any", "all", "var", "prod"})
# Position of the argument `dim` of operators, and its defaults other than 0.
_DIM_ARGUMENT = {
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "sort", "slice"), 1),
    **dict.fromkeys(("topk", "split", "split_with_sizes", "chunk"), 2),
}
_DEFAULT_DIM = {"topk": -1, "sort": -1}
# Operators that concatenate or separate equal parts.
_CAT_LIKE = frozenset({"cat", "repeat", "slice", "split"})
PERMUTES = frozenset({"permute", "transpose", "t"})
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
# Maximum number of `outer` factors tried per dimension: more lengthen the search.
_MAX_OUTERS = 6


class Axis(NamedTuple):
    """Dimension `dim` viewed as [outer, chunks, inner]; chunk j is [:, j, :].

    `outer` is 1 for consecutive chunks, and larger after a reshape that joins the axis with a preceding dimension.
    """

    dim: int
    outer: int = 1


class Rows(NamedTuple):
    """Chunks are disjoint sets of rows, known only at run time.

    Attributes:
        dims: dimensions that count rows, in order, without dimensions of size 1. The other dimensions are the contents
            of a row.
        hops: number of all-to-alls that the rows have passed: 1 after dispatch, 2 after combine.
    """

    dims: tuple[int, ...]
    hops: int


class OperatorSplit(NamedTuple):
    """One way to split an operator.

    Attributes:
        axis: axis along which the results are in chunks.
        inputs: axis of each input; None: every chunk needs the whole input.
        token_outer: `outer` of the token axis in a GEMM between token chunks and rows; else 0.
        needs_previous: a chunk needs the previous chunk, as in a running sum.
    """

    axis: Axis | Rows
    inputs: dict[fx.Node, Axis | Rows | None]
    token_outer: int = 0
    needs_previous: bool = False

    @property
    def has_rows(self) -> bool:
        return any(isinstance(axis, Rows) for axis in (self.axis, *self.inputs.values()))


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's value, or of its first element; None for other values and symbolic sizes."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = shape_of(node)
    assert shape is not None
    return shape


def can_split(shape: Sequence[int], axis: Axis | Rows, chunks: int) -> bool:
    if isinstance(axis, Rows):
        return bool(axis.dims) and 0 not in shape and all(shape[dim] > 1 for dim in axis.dims)
    return 0 <= axis.dim < len(shape) and shape[axis.dim] > 0 and shape[axis.dim] % (axis.outer * chunks) == 0


def chunk_shape(shape: Sequence[int], axis: Axis, chunks: int) -> list[int]:
    return [size // chunks if dim == axis.dim else size for dim, size in enumerate(shape)]


def reshape_axis(shape: Sequence[int], axis: Axis, other: Sequence[int], chunks: int) -> Axis | None:
    """Return the axis after a reshape to shape `other` whose chunks hold the same elements; None if there is none."""
    # The elements form `before` blocks, each cut into the chunks.
    before = math.prod(shape[: axis.dim]) * axis.outer
    for dim in range(len(other)):
        prefix = math.prod(other[:dim])
        if prefix and before % prefix == 0 and can_split(other, Axis(dim, before // prefix), chunks):
            return Axis(dim, before // prefix)
    return None


def reshape_rows(shape: Sequence[int], rows: Rows, other: Sequence[int]) -> Rows | None:
    """Return the rows after a reshape to shape `other`; None if it joins row-counting and other dimensions."""
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
    return Rows(tuple(dims), rows.hops)


def _reshape(shape: Sequence[int], axis: Axis | Rows, other: Sequence[int], chunks: int) -> Axis | Rows | None:
    return reshape_rows(shape, axis, other) if isinstance(axis, Rows) else reshape_axis(shape, axis, other, chunks)


def all_to_all_axes(node: fx.Node, chunks: int, by_rows: bool = False) -> list[Axis | Rows]:
    """Return the axes along which an all-to-all may be split; with `by_rows`, also into rows."""
    shape = shape_of(node)
    if shape is None:
        return []
    found: list[Axis | Rows] = []
    if by_rows and 0 not in shape:
        counting = [tuple(dim for dim in range(last) if shape[dim] != 1) for last in range(1, len(shape))]
        found += [Rows(dims, hops) for dims in dict.fromkeys(counting) if dims for hops in (1, 2)]
    # Excludes axes that start inside a joined dimension.
    for dim in range(1, len(shape)):
        outers = [outer for outer in range(1, shape[dim] // chunks + 1) if can_split(shape, Axis(dim, outer), chunks)]
        found += [Axis(dim, outer) for outer in outers[:_MAX_OUTERS]]
    return found


def num_token_copies(node: fx.Node) -> int:
    """Return how often the tokens are repeated in a GEMM operand: once per choice."""
    name, args, shape = name_of(node), node.args, shape_of(node)
    many: Any = args[0 if name == "cat" else 1] if name in ("cat", "repeat", "expand") and shape else ()
    if name == "cat" and _dim(args[1] if len(args) > 1 else 0, len(shape or ())) == 0:
        return len(many)
    if name == "repeat" or (name == "expand" and math.prod(shape or ()) > math.prod(shape_of(args[0]) or ())):  # type: ignore[arg-type]
        return int(many[0])
    is_unary = (name in RESHAPES or name in PERMUTES or name in _UNARY) and len(node.all_input_nodes) == 1
    return num_token_copies(node.all_input_nodes[0]) if is_unary else 1


def splits_from_input(
    node: fx.Node, given: fx.Node, axis: Axis | Rows, chunks: int, token_outers: Sequence[int] = ()
) -> list[OperatorSplit]:
    """Return the ways to split `node` if its input `given` is in chunks along `axis`.

    `token_outers` lists the possible `outer` of the token axis in GEMMs between token chunks and rows.
    """
    shape, source = shape_of(node), shape_of(given)
    if shape is None or source is None:
        return []
    name = name_of(node)
    candidates: list[tuple[Axis | Rows, int]] = []
    if name in RESHAPES:
        reshaped = _reshape(source, axis, shape, chunks)
        candidates = [] if reshaped is None else [(reshaped, 0)]
    elif isinstance(axis, Rows):
        moved = permuted_dims(name, node.args, len(shape)) if name in PERMUTES else range(len(shape))
        dims = tuple(dim for dim, of in enumerate(moved) if of in axis.dims)
        candidates = [(Rows(dims, axis.hops + is_all_to_all(node)), 0)]
        if name in PRODUCTS:
            candidates.append((Rows(_row_dims(shape), axis.hops), 0))
            candidates += [(Axis(len(shape) - 2, outer), outer) for outer in token_outers]
    else:
        # Concatenation and separation change the number of blocks.
        outers = {axis.outer}
        if name in _CAT_LIKE and source and all(source):
            outers |= {axis.outer * size // old for size, old in zip(shape[-len(source) :], source, strict=True)} - {0}
        candidates = [(Axis(dim, outer), 0) for dim in range(len(shape)) for outer in sorted(outers)]
        if name in PRODUCTS and axis.outer in token_outers:
            candidates.append((Rows(_row_dims(shape), 0), axis.outer))
    op_splits = (split_operator(node, *candidate, chunks=chunks) for candidate in candidates)
    return [op_split for op_split in op_splits if op_split is not None and op_split.inputs.get(given) == axis]


def split_operator(node: fx.Node, axis: Axis | Rows, token_outer: int = 0, *, chunks: int) -> OperatorSplit | None:
    """Return the split of `node` with its result in chunks along `axis`; None if there is none."""
    shape = shape_of(node)
    if shape is None or not can_split(shape, axis, chunks) or is_random(node) or is_mutating(node):
        return None
    if node.target is operator.getitem:
        return None if token_outer else _split_getitem(node, axis, chunks)
    if not isinstance(node.target, OPERATOR) or None in map(shape_of, node.all_input_nodes):
        return None
    if node.target is torch.ops.aten.view.dtype:  # reinterprets bits as another dtype
        return None
    if token_outer:
        found = _token_row_gemm(node, axis, shape, token_outer)
    else:
        found = _row_inputs(node, axis, shape) if isinstance(axis, Rows) else _axis_inputs(node, axis, shape, chunks)
    if not found or all(input_axis is None for _, input_axis in found):
        return None
    inputs: dict[fx.Node, Axis | Rows | None] = {}
    for source, input_axis in found:
        other = inputs.setdefault(source, input_axis) != input_axis
        if other or input_axis is not None and not can_split(_shape(source), input_axis, chunks):
            return None
    for source in node.all_input_nodes:
        inputs.setdefault(source, None)
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        given = [one for one in value if one is not None]
        if not all(isinstance(one, torch.Tensor) and can_split(one.shape, axis, chunks) for one in given):
            return None
    carried = {"cumsum": lambda: _dim(node.args[1], len(shape)), "constant_pad_nd": lambda: _shift_dim(node)}
    needs_previous = isinstance(axis, Axis) and axis.dim == carried.get(name_of(node), lambda: None)()
    return OperatorSplit(axis, inputs, token_outer, needs_previous)


def _split_getitem(node: fx.Node, axis: Axis | Rows, chunks: int) -> OperatorSplit | None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if not isinstance(source.meta.get("val"), (tuple, list)) or not isinstance(index, int):
        return None
    return None if split_operator(source, axis, chunks=chunks) is None else OperatorSplit(axis, {source: axis})


Inputs = list[tuple[fx.Node, Axis | Rows | None]]


def _axis_inputs(node: fx.Node, axis: Axis, shape: tuple[int, ...], chunks: int) -> Inputs | None:
    name, args = name_of(node), node.args
    tensors = node.all_input_nodes
    first = args[0] if args else None
    if is_collective(node):
        return [(tensors[0], axis)] if is_all_to_all(node) and axis.dim > 0 else None
    if not isinstance(first, fx.Node):
        return _inputs_of_cat(node, axis) if name in ("cat", "stack") else None
    source_shape = _shape(first)
    if name in RESHAPES:
        found = reshape_axis(shape, axis, source_shape, chunks)
        return None if found is None else [(first, found)]
    if is_wait(node) or torch.Tag.pointwise in node.target.tags or name in _UNARY:  # type: ignore[union-attr]
        return [(tensor, _broadcast(tensor, shape, axis)) for tensor in tensors]
    if name == "expand":
        return [(first, _broadcast(first, shape, axis))]
    if name in PERMUTES:
        return [(first, Axis(permuted_dims(name, args, len(shape))[axis.dim], axis.outer))]
    if name in PRODUCTS:
        return _inputs_of_product(name, args, shape, axis)
    if name in _DIM_ARGUMENT:
        index, default = _DIM_ARGUMENT[name], _DEFAULT_DIM.get(name, 0)
        dim = _dim(args[index] if len(args) > index else node.kwargs.get("dim", default), len(source_shape))
        if axis.dim == dim and name in ("slice", "split"):
            unit = _part_size(node, dim)
            blocks, rest = divmod(axis.outer * unit, shape[dim]) if unit and shape[dim] else (0, 1)
            return None if rest else [(first, Axis(dim, blocks * source_shape[dim] // unit))]
        return [(first, axis)] if axis.dim != dim or (name == "cumsum" and axis.outer == 1) else None
    if name == "constant_pad_nd":
        shifted = _shift_dim(node)
        return None if shifted is None or axis == Axis(shifted, axis.outer) != Axis(shifted) else [(first, axis)]
    if name == "repeat":
        return _inputs_of_repeat(node, first, axis)
    if name in _REDUCTIONS:
        return _inputs_of_reduction(node, first, source_shape, axis)
    if name == "native_layer_norm":
        normalised = args[1]
        assert isinstance(normalised, (list, tuple))
        if axis.dim >= len(shape) - len(normalised):
            return None
        return [(first, axis), *((tensor, None) for tensor in args[2:4] if isinstance(tensor, fx.Node))]
    if name in ("select", "unbind"):
        dim = _dim(args[1] if len(args) > 1 else 0, len(source_shape))
        return [(first, Axis(axis.dim + (axis.dim >= dim), axis.outer))]
    if name in ("gather", "scatter"):
        fits = all(shape_of(tensor) in (source_shape, shape) for tensor in tensors)
        same = fits and {_shape(tensor)[axis.dim] for tensor in tensors} == {shape[axis.dim]}
        return [(tensor, axis) for tensor in tensors] if same and axis.dim != _dim(args[1], len(source_shape)) else None
    if name in ("embedding", "index_select", "index"):
        return _inputs_of_index(name, args, axis)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        heads = len({_shape(tensor)[:2] for tensor in tensors}) == 1
        plain = "attn_mask" not in node.kwargs and (len(args) < 4 or args[3] == 0.0)
        return [(tensor, axis) for tensor in tensors] if plain and heads and axis.dim < 2 else None
    return None


def _row_inputs(node: fx.Node, rows: Rows, shape: tuple[int, ...]) -> Inputs | None:
    """Return the inputs' axes for an operator that computes each row independently; None if it does not."""
    name, args, first = name_of(node), node.args, node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    source_shape = _shape(first)
    if is_collective(node):
        # With equal shares of the first dimension, a row's index determines its rank.
        equal = is_all_to_all(node) and len({str(rows) for of in args[1:3] for rows in of}) == 1  # type: ignore[union-attr]
        return [(first, rows._replace(hops=rows.hops - 1))] if equal and rows.dims[0] == 0 and rows.hops else None
    if name in RESHAPES:
        found = reshape_rows(shape, rows, source_shape)
        return None if found is None else [(first, found)]
    if name in PERMUTES:
        order = permuted_dims(name, args, len(shape))
        # The contents must stay in order, because rows are stored as vectors.
        held = [order[dim] for dim, size in enumerate(shape) if size != 1 and dim not in rows.dims]
        before = rows._replace(dims=tuple(sorted(order[dim] for dim in rows.dims)))
        return [(first, before)] if held == sorted(held) else None
    if is_wait(node) or torch.Tag.pointwise in node.target.tags or name in _UNARY:  # type: ignore[union-attr]
        return [(tensor, rows if shape_of(tensor) == shape else None) for tensor in node.all_input_nodes]
    if name == "expand":
        return [(first, rows)] if source_shape == shape else None
    if name in PRODUCTS:
        given = args[-2:]
        if rows.dims != _row_dims(shape) or node.kwargs or not all(isinstance(tensor, fx.Node) for tensor in given):
            return None
        rest: Inputs = [(tensor, None) for tensor in node.all_input_nodes if tensor is not given[0]]
        return [*rest, (given[0], rows)]  # type: ignore[list-item]
    if name in ("slice", "split", "split_with_sizes"):
        index = _DIM_ARGUMENT[name]
        dim = _dim(args[index] if len(args) > index else node.kwargs.get("dim", 0), len(source_shape))
        held = [tensor for tensor, size in enumerate(source_shape) if size != 1 and tensor not in rows.dims]
        return [(first, rows)] if held == [dim] else None
    return None


def _token_row_gemm(node: fx.Node, axis: Axis | Rows, shape: tuple[int, ...], outer: int) -> Inputs | None:
    """Return the inputs' axes of a GEMM from tokens to rows, or from rows to tokens; None for other nodes."""
    last = len(shape) - 1
    if name_of(node) not in ("mm", "bmm") or (last == 2 and shape[0] != 1):
        return None
    left, right = node.args[0], node.args[1]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    # Rows start before any all-to-all, and are read after two (dispatch and combine).
    if isinstance(axis, Rows):
        tokens: Inputs = [(left, Axis(last, outer)), (right, Axis(last - 1, outer))]
        return tokens if axis == Rows((last - 1,), 0) else None
    return [(left, axis), (right, Rows((last - 1,), 2))] if axis == Axis(last - 1, outer) else None


def _row_dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(shape[:-1]) if size != 1)


def _broadcast(operand: fx.Node, shape: tuple[int, ...], axis: Axis) -> Axis | None:
    """Return the axis of an operand that is broadcast to `shape`; None if every chunk needs the whole operand."""
    own = _shape(operand)
    dim = axis.dim - (len(shape) - len(own))
    return None if dim < 0 or own[dim] != shape[axis.dim] else Axis(dim, axis.outer)


def permuted_dims(name: str, args: Sequence[Any], count: int) -> list[int]:
    if name == "permute":
        return [_dim(dim, count) for dim in args[1]]
    order = list(range(count))
    if count > 1:
        one, other = (0, 1) if name == "t" else (_dim(args[1], count), _dim(args[2], count))
        order[one], order[other] = order[other], order[one]
    return order


def _inputs_of_product(name: str, args: Sequence[Any], shape: tuple[int, ...], axis: Axis) -> Inputs:
    added: Inputs = []
    if name in ("addmm", "baddbmm"):
        added, args = [(args[0], _broadcast(args[0], shape, axis))], args[1:]
    last = len(shape) - 1
    left, right = None if axis.dim == last else axis, None if axis.dim == last - 1 else axis
    return [*added, (args[0], left), (args[1], right)]


def _inputs_of_reduction(node: fx.Node, first: fx.Node, source_shape: tuple[int, ...], axis: Axis) -> Inputs | None:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == [] or isinstance(dims, bool):
        return None
    listed = [_dim(dim, len(source_shape)) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    left = [dim for dim in range(len(source_shape)) if dim not in listed]
    kept = len(shape_of(node) or ()) == len(source_shape)
    dim = axis.dim if kept else left[axis.dim]
    return [(first, Axis(dim, axis.outer))] if dim in left else None


def _inputs_of_cat(node: fx.Node, axis: Axis) -> Inputs | None:
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
    moved = Axis(axis.dim - (name_of(node) == "stack" and axis.dim > dim), axis.outer)
    return [(tensor, moved) for tensor in tensors if isinstance(tensor, fx.Node)]


def _shift_dim(node: fx.Node) -> int | None:
    """Return the dimension along which a `constant_pad_nd` shifts rows by one, or None."""
    pads: Any = node.args[1]
    if len(node.args) > 2 or pads[-2:] != [1, -1] or any(pads[:-2]):
        return None
    return len(_shape(node)) - len(pads) // 2


def _inputs_of_repeat(node: fx.Node, first: fx.Node, axis: Axis) -> Inputs | None:
    repeats: Any = node.args[1]
    dim = axis.dim - (len(repeats) - len(_shape(first)))
    if dim < 0 or axis.outer % repeats[axis.dim]:
        return None
    return [(first, Axis(dim, axis.outer // repeats[axis.dim]))]


def _part_size(node: fx.Node, dim: int) -> int:
    """Return the largest equal part size along `dim` that divides all borders of a split or slice; 0 if none."""
    args, first = node.args, node.args[0]
    assert isinstance(first, fx.Node)
    whole, size = _shape(first)[dim], _shape(node)[dim]
    if name_of(node) == "split":
        return 0 if whole % size else size
    return math.gcd(whole, start_of(node), size) if len(args) < 5 or args[4] == 1 else 0


def start_of(node: fx.Node) -> int:
    given: Any = node.args
    dim, start = (0, None) if len(given) < 2 else (given[1], given[2] if len(given) > 2 else None)
    source_shape = _shape(given[0])
    return range(source_shape[_dim(dim, len(source_shape))])[slice(start, None)].start


def _inputs_of_index(name: str, args: Sequence[Any], axis: Axis) -> Inputs | None:
    table, indices, first = args[0], args[-1], 0
    if name == "embedding":
        indices = args[1]
    elif name == "index_select":
        first = _dim(args[1], len(_shape(table)))
    else:
        # A boolean mask yields chunks of unequal size.
        if len(indices) != 1 or not isinstance(indices[0], fx.Node) or indices[0].meta["val"].dtype == torch.bool:
            return None
        indices = indices[0]
    count = len(_shape(indices))
    if first <= axis.dim < first + count:
        return [(indices, Axis(axis.dim - first, axis.outer)), (table, None)]
    dim = axis.dim if axis.dim < first else axis.dim - count + 1
    return [(indices, None), (table, Axis(dim, axis.outer))]


def _dim(dim: Any, count: int) -> int:
    return int(dim) % count if count else 0
