"""Operators on some rows of a buffer: the rows of one token chunk, or the nonzero rows (Lancet §5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph.axes import PERMUTES, PRODUCTS, RESHAPES, OperatorSplit, Rows, permuted_dims, shape_of
from fusedmoe.graph.instructions import argument_of, describe, group_of, is_all_to_all, is_wait, name_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_all_to_all = torch.ops._c10d_functional.all_to_all_single
_wait = torch.ops._c10d_functional.wait_tensor


class StartedAllToAll(NamedTuple):
    """An all-to-all in flight.

    Attributes:
        received_NM, slot_N: rows to be received, and their indices in the buffer.
        num_sent: number of rows that this rank sends.
    """

    received_NM: Tensor
    slot_N: Tensor
    num_sent: int

    def wait_for_rows(self) -> Tensor:
        received_NM: Tensor = _wait(self.received_NM)
        return received_NM


def start_row_all_to_all(rows_NM: Tensor, occupied_P: Tensor, ranks: int, group: Any) -> StartedAllToAll:
    """Start an all-to-all of the occupied rows of a buffer, whose P rows are equally divided among `ranks` ranks.

    `occupied_P` (bool) marks the occupied rows, and `rows_NM` has them in order. Synchronizes with the host.
    """
    share = [len(occupied_P) // ranks] * ranks
    received_P = _wait(_all_to_all(occupied_P.to(torch.uint8), share, share, group)).bool()
    counts = torch.stack([received_P.reshape(ranks, -1).sum(-1), occupied_P.reshape(ranks, -1).sum(-1)]).tolist()
    return StartedAllToAll(_all_to_all(rows_NM, *counts, group), received_P.nonzero().squeeze(-1), sum(counts[1]))


class PaddingFreeAllToAlls:
    """Replaces all-to-alls by ones that do not send all-zero rows; receivers fill in zeros.

    `rows` and `sent` count the rows of all buffers and the rows sent.
    """

    def __init__(self) -> None:
        self.rows = self.sent = 0

    def replace_in(self, graph: fx.Graph) -> None:
        """Replace a graph's all-to-alls, except for vectors, complex dtypes and unequal shares."""
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
        x_NM = x.flatten(0, -2).contiguous()
        # Comparing bits sends −0 too, so results are bitwise equal.
        occupied_N = (x_NM.view(_BITS[x.element_size()]) != 0).any(-1)
        started = start_row_all_to_all(x_NM[occupied_N], occupied_N, ranks, group)
        self.rows += len(x_NM)
        self.sent += started.num_sent
        return started, x.shape

    def wait(self, in_flight: tuple[StartedAllToAll, torch.Size]) -> Tensor:
        started, shape = in_flight
        received_NM = started.wait_for_rows()
        out = received_NM.new_zeros(shape)
        out.flatten(0, -2).index_copy_(0, started.slot_N, received_NM)
        return out


class IndexedRows(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        values_NF: the rows' contents, flattened.
        slot_N: flat index of each row over the dimensions that count rows, in row-major order.
    """

    values_NF: Tensor
    slot_N: Tensor


Operation = Callable[..., Any]
#: Called with a message if a slot is not exclusive to one token.
OnViolation = Callable[[str], object]


OWN_PLACES_CURE = (
    "own_places=True requires slots that are exclusive to one token: remove own_places from the GraphBackend on every "
    "rank"
)


def raise_violation(message: str) -> None:
    raise ConfigError(f"captured graph, rank {dist.get_rank()}: {message}, but {OWN_PLACES_CURE}")


def row_operation(node: fx.Node, op_split: OperatorSplit, raise_violation: OnViolation = raise_violation) -> Operation:
    """Return a function that computes the rows of one chunk of `node`; its arguments are the chunks of the inputs."""
    if op_split.token_outer:
        gemm = _dispatch_gemm if isinstance(op_split.axis, Rows) else _combine_gemm
        return gemm(node, raise_violation)
    assert isinstance(op_split.axis, Rows)
    if is_all_to_all(node):
        return _start_all_to_all(node, op_split.axis)
    if is_wait(node):
        return _wait_for_rows
    name = name_of(node)
    if name in RESHAPES or name == "expand":
        return _unchanged
    if name in PERMUTES:
        return _permute(node, op_split)
    if name in PRODUCTS:
        return _multiply(node, op_split.axis)
    if name in ("slice", "split", "split_with_sizes"):
        return _slice_contents(node)
    if name == "":
        return _element(node)
    return _elementwise(node, op_split.axis)


def _dispatch_gemm(node: fx.Node, raise_violation: OnViolation) -> Operation:
    """Return the dispatch GEMM of one chunk: it computes the rows of the slots that the chunk's tokens fill."""
    numbers = [node.all_input_nodes.index(one) for one in node.args[:2]]  # type: ignore[arg-type]
    text = describe(node)

    def dispatch_rows(*given: Tensor) -> IndexedRows:
        tokens_PS, x_SF = (given[number].flatten(0, -2) for number in numbers)
        taken_P = (tokens_PS != 0).sum(1)
        if (taken_P > 1).any():
            raise_violation(f"a slot of {text} has several tokens")
        slot_N = taken_P.nonzero()[:, 0]  # synchronizes with the host, once per chunk and layer
        return IndexedRows(tokens_PS[slot_N] @ x_SF, slot_N)

    return dispatch_rows


def _combine_gemm(node: fx.Node, raise_violation: OnViolation) -> Operation:
    """Return the combine GEMM of one chunk: it computes each token's weighted sum over the slots of the chunk."""
    numbers = [node.all_input_nodes.index(one) for one in node.args[:2]]  # type: ignore[arg-type]
    text = describe(node)
    dims = len(shape_of(node) or ())

    def combine_rows(*given: Any) -> Tensor:
        weight_SP, rows = given[numbers[0]].flatten(0, -2), given[numbers[1]]
        own_SN = weight_SP[:, rows.slot_N]
        out_SF = own_SN @ rows.values_NF
        more_S = (weight_SP != 0).sum(1) != (own_SN != 0).sum(1)
        if more_S.any():
            spoiled_S = ~weight_SP.isfinite().all(1)  # NaN times any row is NaN
            if (more_S & ~spoiled_S).any():
                raise_violation(f"in {text} a token reads a slot that it did not fill")
            out_SF = out_SF.masked_fill(spoiled_S[:, None], math.nan)
        return out_SF if dims == 2 else out_SF[None]

    return combine_rows


def check_slots(node: fx.Node, raise_violation: OnViolation = raise_violation) -> Operation:
    """Return a function of all chunks that reports a violation if two chunks share a slot."""
    text = describe(node)

    def check_exclusive(*chunks: IndexedRows) -> None:
        slot_N = torch.cat([rows.slot_N for rows in chunks])
        if len(slot_N.unique()) < len(slot_N):
            raise_violation(f"tokens of two micro-batches share a slot of {text}")

    return check_exclusive


def _start_all_to_all(node: fx.Node, rows: Rows) -> Operation:
    ranks, group = len(argument_of(node, "input_split_sizes")), group_of(node)
    num_slots = math.prod(_sizes(node, rows))

    def start_rows(chunk: IndexedRows) -> StartedAllToAll:
        slot_N, order_N = chunk.slot_N.sort()
        occupied_P = slot_N.new_zeros(num_slots, dtype=torch.bool)
        occupied_P[slot_N] = True
        return start_row_all_to_all(chunk.values_NF[order_N], occupied_P, ranks, group)

    return start_rows


def _wait_for_rows(started: StartedAllToAll) -> IndexedRows:
    return IndexedRows(started.wait_for_rows(), started.slot_N)


def _unchanged(chunk: IndexedRows) -> IndexedRows:
    return chunk


def _permute(node: fx.Node, op_split: OperatorSplit) -> Operation:
    (source,) = node.all_input_nodes
    before, after = op_split.inputs[source], op_split.axis
    assert isinstance(before, Rows) and isinstance(after, Rows)
    moved = permuted_dims(name_of(node), node.args, len(shape_of(node) or ()))
    sizes = dict(zip(before.dims, _sizes(source, before), strict=True))
    order = [moved[dim] for dim in after.dims]

    def permute_rows(chunk: IndexedRows) -> IndexedRows:
        if order == [*before.dims]:
            return chunk
        index = dict(zip(before.dims, _unravel(chunk.slot_N, [*sizes.values()]), strict=True))
        return chunk._replace(slot_N=_ravel([index[dim] for dim in order], [sizes[dim] for dim in order]))

    return permute_rows


def _multiply(node: fx.Node, rows: Rows) -> Operation:
    """Return a function that multiplies each row by the matrix of its batch index, and adds the addend of `addmm`."""
    numbers = [node.all_input_nodes.index(one) for one in node.args]  # type: ignore[arg-type]
    shape, gather_slots = shape_of(node), _gather_broadcast(node, rows)
    assert shape is not None

    def multiply_rows(*given: Any) -> IndexedRows:
        chunk, right = given[numbers[-2]], given[numbers[-1]]
        if right.dim() == 2 or len(right) == 1:
            chunk = chunk._replace(values_NF=chunk.values_NF @ right.flatten(0, -2))
        else:
            # One GEMM per matrix: the groups of rows have unequal sizes, which bmm does not support.
            batch_N, order_N = (chunk.slot_N // shape[1]).sort(stable=True)
            counts = batch_N.bincount(minlength=len(right)).tolist()
            rows_of_matrices = chunk.values_NF[order_N].split(counts)
            out = torch.cat([rows @ matrix for rows, matrix in zip(rows_of_matrices, right, strict=True)])
            chunk = IndexedRows(out, chunk.slot_N[order_N])
        if len(numbers) < 3:
            return chunk
        return chunk._replace(values_NF=chunk.values_NF + gather_slots(given[numbers[0]], chunk.slot_N))

    return multiply_rows


def _slice_contents(node: fx.Node) -> Operation:
    """Return a function that slices or splits the contents of each row, which have one dimension."""
    position, target = 1 if name_of(node) == "slice" else 2, node.target
    args, kwargs = [*node.args[1:]], {key: value for key, value in node.kwargs.items() if key != "dim"}
    args[position - 1 : position] = [1]
    assert callable(target)

    def take_columns(chunk: IndexedRows) -> Any:
        found = target(chunk.values_NF, *args, **kwargs)
        if isinstance(found, Tensor):
            return chunk._replace(values_NF=found)
        return [chunk._replace(values_NF=value) for value in found]

    return take_columns


def _element(node: fx.Node) -> Operation:
    number: Any = node.args[1]

    def element_of(chunks: Sequence[IndexedRows]) -> IndexedRows:
        return chunks[number]

    return element_of


def _elementwise(node: fx.Node, rows: Rows) -> Operation:
    inputs, args, kwargs, target = node.all_input_nodes, node.args, dict(node.kwargs), node.target
    gather_slots = _gather_broadcast(node, rows)
    assert callable(target)

    def elementwise_rows(*given: Any) -> IndexedRows:
        chunks = [value for value in given if isinstance(value, IndexedRows)]
        slot_N = chunks[0].slot_N
        if all(chunk.slot_N is slot_N or torch.equal(chunk.slot_N, slot_N) for chunk in chunks):
            ordered = [chunk.values_NF for chunk in chunks]
        else:
            # The choices of a token have separate rows, in disjoint slots.
            slot_N = torch.cat([chunk.slot_N for chunk in chunks]).unique()
            ordered = [_reorder(chunk, slot_N) for chunk in chunks]
        rest = iter(ordered)
        values = [next(rest) if isinstance(value, IndexedRows) else gather_slots(value, slot_N) for value in given]
        own_args, own_kwargs = fx.node.map_arg((args, kwargs), lambda one: values[inputs.index(one)])
        return IndexedRows(target(*own_args, **own_kwargs), slot_N)

    return elementwise_rows


def _reorder(chunk: IndexedRows, slot_N: Tensor) -> Tensor:
    # Dispatch leaves zeros in unused slots; the first run checks that they are still zero here.
    found = chunk.values_NF.new_zeros(len(slot_N), chunk.values_NF.shape[1])
    found[torch.searchsorted(slot_N, chunk.slot_N)] = chunk.values_NF
    return found


def _gather_broadcast(node: fx.Node, rows: Rows) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that broadcasts a tensor to the node's shape and gathers rows of it, [N, F]."""
    shape, sizes = shape_of(node) or (), _sizes(node, rows)
    order = [*rows.dims, *(dim for dim in range(len(shape)) if dim not in rows.dims)]

    def gather_slots(tensor: Tensor, slot_N: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        return tensor.expand(shape).permute(order)[tuple(_unravel(slot_N, sizes))].flatten(1)

    return gather_slots


def assemble_rows(node: fx.Node, rows: Rows) -> Operation:
    """Return a function that assembles all chunks into the whole tensor, with zeros in unused slots."""
    like, slot_sizes = node.meta["val"], _sizes(node, rows)
    shape, strides = tuple(like.shape), like.stride()
    held = [dim for dim in range(len(shape)) if dim not in rows.dims]
    sizes = [shape[dim] for dim in held]

    def assemble(*chunks: IndexedRows) -> Tensor:
        first = chunks[0].values_NF
        whole = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device).zero_()
        ordered = whole.permute([*rows.dims, *held])
        for chunk in chunks:
            ordered[tuple(_unravel(chunk.slot_N, slot_sizes))] = chunk.values_NF.reshape(-1, *sizes)
        return whole

    return assemble


def _sizes(node: fx.Node, rows: Rows) -> list[int]:
    shape = shape_of(node)
    assert shape is not None
    return [shape[dim] for dim in rows.dims]


def _unravel(slot_N: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    index = []
    for size in reversed(sizes):
        index.append(slot_N % size)
        slot_N = slot_N // size
    return index[::-1]


def _ravel(index: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    slot_N = index[0]
    for one, size in zip(index[1:], sizes[1:], strict=True):
        slot_N = slot_N * size + one
    return slot_N
