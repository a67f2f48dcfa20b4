"""Rows of a buffer that travel by themselves: those of a chunk of the tokens, or those that are not 0 (Lancet §5.1).

A chunk has a few rows of a tensor, with the place of each (`ChunkRows`). `operation_of` returns what an operator does
with them, `whole_of` how the rows of all chunks make the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import PERMUTES, PRODUCTS, RESHAPES, OperatorSplit, Rows, permuted, shape_of
from fusedmoe.graph.instructions import argument_of, describe, group_of, is_all_to_all, is_wait, name_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_all_to_all = torch.ops._c10d_functional.all_to_all_single
_wait = torch.ops._c10d_functional.wait_tensor


class StartedAllToAll(NamedTuple):
    """An all-to-all that has started: the rows to be received, and their places. `sent`: how many this rank sends."""

    came_NM: Tensor
    place_N: Tensor
    sent: int

    def rows(self) -> Tensor:
        """Waits for the rows, and returns them."""
        came_NM: Tensor = _wait(self.came_NM)
        return came_NM


def start_some(rows_NM: Tensor, sends_P: Tensor, ranks: int, group: Any) -> StartedAllToAll:
    """Sends rows of a buffer of P places, of which each rank gets an equal share.

    `rows_NM`: the rows that are sent, in the order of their places. `sends_P`: bool, the places that have one.
    """
    share = [len(sends_P) // ranks] * ranks
    comes_P = _wait(_all_to_all(sends_P.to(torch.uint8), share, share, group)).bool()
    # The host waits here: how many rows each rank sends and receives is part of the call.
    counts = torch.stack([comes_P.reshape(ranks, -1).sum(-1), sends_P.reshape(ranks, -1).sum(-1)]).tolist()
    return StartedAllToAll(_all_to_all(rows_NM, *counts, group), comes_P.nonzero().squeeze(-1), sum(counts[1]))


class IrregularAllToAlls:
    """Irregular all-to-alls of captured passes, and how many of their rows travelled.

    Attributes:
        rows: of all buffers that were sent. `sent`: those of them that travelled.
    """

    def __init__(self) -> None:
        self.rows = self.sent = 0

    def put_into(self, graph: fx.Graph) -> None:
        """Makes the all-to-alls of a graph irregular, but for vectors, complex numbers and unequal shares."""
        for node in graph.nodes:
            if not is_all_to_all(node) or len(node.users) != 1 or not is_wait(wait := next(iter(node.users))):
                continue
            shares = {str(rows) for name in ("output", "input") for rows in argument_of(node, f"{name}_split_sizes")}
            sent, ranks = argument_of(node, "input"), len(argument_of(node, "input_split_sizes"))
            value = sent.meta["val"]
            if len(shares) == 1 and value.dim() > 1 and not value.is_complex() and value.element_size() in _BITS:
                node.target, node.args, node.kwargs = self.start, (sent, ranks, group_of(node)), {}
                wait.target = self.wait

    def start(self, x: Tensor, ranks: int, group: object) -> tuple[StartedAllToAll, torch.Size]:
        """Sends an equal share of the first dimension to each rank."""
        x_NM = x.flatten(0, -2).contiguous()
        # Bits, not values: −0 and NaN travel, so that results are the same to the last bit.
        sends_N = (x_NM.view(_BITS[x.element_size()]) != 0).any(-1)
        started = start_some(x_NM[sends_N], sends_N, ranks, group)
        self.rows += len(x_NM)
        self.sent += started.sent
        return started, x.shape

    def wait(self, under_way: tuple[StartedAllToAll, torch.Size]) -> Tensor:
        """Returns the buffer of that shape, zeros where no row came."""
        started, shape = under_way
        came_NM = started.rows()
        out = came_NM.new_zeros(shape)
        out.flatten(0, -2).index_copy_(0, started.place_N, came_NM)
        return out


_OF_COLUMNS = frozenset({"slice", "split", "split_with_sizes"})


class ChunkRows(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        values_NF: what they hold, as vectors.
        place_N: where each is, counted along the dimensions that count rows, the last one fastest.
    """

    values_NF: Tensor
    place_N: Tensor


Operation = Callable[..., Any]


#: What is done where a place is not one token's own.
Refuse = Callable[[str], object]


def refuse(message: str) -> None:
    """Raises `ConfigError`."""
    raise ConfigError(
        f"captured graph, rank {dist.get_rank()}: {message}, although each place was to be one token's own, as "
        "own_places=True says: leave own_places out of the GraphBackend, on every rank"
    )


def operation_of(node: fx.Node, way: OperatorSplit, refuse: Refuse = refuse) -> Operation:
    """Returns an instruction that rows go into or come out of as a function of chunks of its inputs, in order."""
    if way.crosses:
        return _take(node, refuse) if isinstance(way.axis, Rows) else _give(node, refuse)
    assert isinstance(way.axis, Rows)
    if is_all_to_all(node):
        return _start(node, way.axis)
    if is_wait(node):
        return _arrive
    name = name_of(node)
    if name in RESHAPES or name == "expand":
        return _stay
    if name in PERMUTES:
        return _permute(node, way)
    if name in PRODUCTS:
        return _multiply(node, way.axis)
    if name in _OF_COLUMNS:
        return _columns(node)
    if name == "":
        return _element(node)
    return _each(node, way.axis)


def _take(node: fx.Node, refuse: Refuse) -> Operation:
    """Returns a product over the tokens of a chunk: its rows."""
    numbers = [node.all_input_nodes.index(one) for one in node.args[:2]]  # type: ignore[arg-type]
    text = describe(node)

    def take_rows(*given: Tensor) -> ChunkRows:
        tokens_PS, x_SF = (given[number].flatten(0, -2) for number in numbers)
        taken_P = (tokens_PS != 0).sum(1)
        if (taken_P > 1).any():
            refuse(f"a place of {text} has several tokens")
        place_N = taken_P.nonzero()[:, 0]  # the host waits here, once for each chunk and layer
        return ChunkRows(tokens_PS[place_N] @ x_SF, place_N)

    return take_rows


def _give(node: fx.Node, refuse: Refuse) -> Operation:
    """Returns a product over the places of a chunk's rows: its tokens."""
    numbers = [node.all_input_nodes.index(one) for one in node.args[:2]]  # type: ignore[arg-type]
    text = describe(node)
    dims = len(shape_of(node) or ())

    def give_rows(*given: Any) -> Tensor:
        weight_SP, rows = given[numbers[0]].flatten(0, -2), given[numbers[1]]
        # Other places hold rows of other chunks, which no token of this one may read.
        own_SN = weight_SP[:, rows.place_N]
        out_SF = own_SN @ rows.values_NF
        more_S = (weight_SP != 0).sum(1) != (own_SN != 0).sum(1)
        if more_S.any():
            spoiled_S = ~weight_SP.isfinite().all(1)  # NaN times any row is NaN
            if (more_S & ~spoiled_S).any():
                refuse(f"in {text} a token reads a place that it has not filled")
            out_SF = out_SF.masked_fill(spoiled_S[:, None], math.nan)
        return out_SF if dims == 2 else out_SF[None]

    return give_rows


def check_places(node: fx.Node, refuse: Refuse = refuse) -> Operation:
    """Returns a function that refuses rows of two chunks in one place."""
    text = describe(node)

    def one_place_each(*chunks: ChunkRows) -> None:
        place_N = torch.cat([rows.place_N for rows in chunks])
        if len(place_N.unique()) < len(place_N):
            refuse(f"tokens of two micro-batches are in one place of {text}")

    return one_place_each


def _start(node: fx.Node, rows: Rows) -> Operation:
    ranks, group = len(argument_of(node, "input_split_sizes")), group_of(node)
    places = math.prod(_sizes(node, rows))

    def start_rows(chunk: ChunkRows) -> StartedAllToAll:
        # In the order of places, which is that of the ranks.
        place_N, order_N = chunk.place_N.sort()
        sends_P = place_N.new_zeros(places, dtype=torch.bool)
        sends_P[place_N] = True
        return start_some(chunk.values_NF[order_N], sends_P, ranks, group)

    return start_rows


def _arrive(started: StartedAllToAll) -> ChunkRows:
    return ChunkRows(started.rows(), started.place_N)


def _stay(chunk: ChunkRows) -> ChunkRows:
    return chunk


def _permute(node: fx.Node, way: OperatorSplit) -> Operation:
    """Returns a permutation: rows are counted in another order."""
    (source,) = node.all_input_nodes
    before, after = way.inputs[source], way.axis
    assert isinstance(before, Rows) and isinstance(after, Rows)
    moved = permuted(name_of(node), node.args, len(shape_of(node) or ()))
    sizes = dict(zip(before.dims, _sizes(source, before), strict=True))
    order = [moved[dim] for dim in after.dims]

    def permute_rows(chunk: ChunkRows) -> ChunkRows:
        if order == [*before.dims]:
            return chunk
        index = dict(zip(before.dims, _unravel(chunk.place_N, [*sizes.values()]), strict=True))
        return chunk._replace(place_N=_ravel([index[dim] for dim in order], [sizes[dim] for dim in order]))

    return permute_rows


def _multiply(node: fx.Node, rows: Rows) -> Operation:
    """Returns a product: each row times the matrix of its place in the batch."""
    numbers = [node.all_input_nodes.index(one) for one in node.args]  # type: ignore[arg-type]
    shape, at_places = shape_of(node), _at_places(node, rows)
    assert shape is not None

    def multiply_rows(*given: Any) -> ChunkRows:
        chunk, right = given[numbers[-2]], given[numbers[-1]]
        if right.dim() == 2 or len(right) == 1:
            chunk = chunk._replace(values_NF=chunk.values_NF @ right.flatten(0, -2))
        else:
            # Grouped by matrix: one product for each, as a batch of equal sizes cannot hold them.
            batch_N, order_N = (chunk.place_N // shape[1]).sort(stable=True)
            counts = batch_N.bincount(minlength=len(right)).tolist()
            rows_of_matrices = chunk.values_NF[order_N].split(counts)
            out = torch.cat([rows @ matrix for rows, matrix in zip(rows_of_matrices, right, strict=True)])
            chunk = ChunkRows(out, chunk.place_N[order_N])
        if len(numbers) < 3:
            return chunk
        return chunk._replace(values_NF=chunk.values_NF + at_places(given[numbers[0]], chunk.place_N))

    return multiply_rows


def _columns(node: fx.Node) -> Operation:
    """Returns columns of each row: the dimension is the only one that rows hold, and so that of their vectors."""
    place, target = 1 if name_of(node) == "slice" else 2, node.target
    args, kwargs = [*node.args[1:]], {key: value for key, value in node.kwargs.items() if key != "dim"}
    args[place - 1 : place] = [1]
    assert callable(target)

    def take_columns(chunk: ChunkRows) -> Any:
        found = target(chunk.values_NF, *args, **kwargs)
        if isinstance(found, Tensor):
            return chunk._replace(values_NF=found)
        return [chunk._replace(values_NF=value) for value in found]

    return take_columns


def _element(node: fx.Node) -> Operation:
    number: Any = node.args[1]

    def element_of(chunks: Sequence[ChunkRows]) -> ChunkRows:
        return chunks[number]

    return element_of


def _each(node: fx.Node, rows: Rows) -> Operation:
    """Returns an elementwise operator of rows and rows, or of rows and tensors that are broadcast to them."""
    inputs, args, kwargs, target = node.all_input_nodes, node.args, dict(node.kwargs), node.target
    at_places = _at_places(node, rows)
    assert callable(target)

    def each_row(*given: Any) -> ChunkRows:
        chunks = [value for value in given if isinstance(value, ChunkRows)]
        place_N = chunks[0].place_N
        if all(chunk.place_N is place_N or torch.equal(chunk.place_N, place_N) for chunk in chunks):
            ordered = [chunk.values_NF for chunk in chunks]
        else:
            # Each choice of a token has rows of its own, in places that the others do not have.
            place_N = torch.cat([chunk.place_N for chunk in chunks]).unique()
            ordered = [_in_order(chunk, place_N) for chunk in chunks]
        rest = iter(ordered)
        values = [next(rest) if isinstance(value, ChunkRows) else at_places(value, place_N) for value in given]
        own_args, own_kwargs = fx.node.map_arg((args, kwargs), lambda one: values[inputs.index(one)])
        return ChunkRows(target(*own_args, **own_kwargs), place_N)

    return each_row


def _in_order(chunk: ChunkRows, place_N: Tensor) -> Tensor:
    """Returns the values of a chunk in the order of these places, zeros where it has none."""
    # Products group rows by matrix, all-to-alls by rank: two ways that lead to one operator may differ in it. What puts
    # tokens into places leaves zeros in all others; whether they still are zeros here the first run compares.
    found = chunk.values_NF.new_zeros(len(place_N), chunk.values_NF.shape[1])
    found[torch.searchsorted(place_N, chunk.place_N)] = chunk.values_NF
    return found


def _at_places(node: fx.Node, rows: Rows) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of a tensor that is broadcast to a node's result, and places: its rows there, [N, F]."""
    shape, sizes = shape_of(node) or (), _sizes(node, rows)
    order = [*rows.dims, *(dim for dim in range(len(shape)) if dim not in rows.dims)]

    def at_places(tensor: Tensor, place_N: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        return tensor.expand(shape).permute(order)[tuple(_unravel(place_N, sizes))].flatten(1)

    return at_places


def whole_of(node: fx.Node, rows: Rows) -> Operation:
    """Returns the function that puts all chunks of an instruction together, with its strides and zeros elsewhere."""
    like, places = node.meta["val"], _sizes(node, rows)
    shape, strides = tuple(like.shape), like.stride()
    held = [dim for dim in range(len(shape)) if dim not in rows.dims]
    sizes = [shape[dim] for dim in held]

    def whole_rows(*chunks: ChunkRows) -> Tensor:
        first = chunks[0].values_NF
        # Rows that no token has are in no chunk. The backward pass, say, reads the whole tensor: there they are zeros.
        whole = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device).zero_()
        ordered = whole.permute([*rows.dims, *held])
        for chunk in chunks:
            ordered[tuple(_unravel(chunk.place_N, places))] = chunk.values_NF.reshape(-1, *sizes)
        return whole

    return whole_rows


def _sizes(node: fx.Node, rows: Rows) -> list[int]:
    shape = shape_of(node)
    assert shape is not None
    return [shape[dim] for dim in rows.dims]


def _unravel(place_N: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    index = []
    for size in reversed(sizes):
        index.append(place_N % size)
        place_N = place_N // size
    return index[::-1]


def _ravel(index: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    place_N = index[0]
    for one, size in zip(index[1:], sizes[1:], strict=True):
        place_N = place_N * size + one
    return place_N
