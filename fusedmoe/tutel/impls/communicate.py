"""Collectives with and without gradients (Tutel's signatures). Clients find those of `groups.py` here, too.

Gradients, of the ranks' losses summed where a result is used differently on every rank:

| function | forward | backward |
|---|---|---|
| all_to_all, all_to_all_single, batch_all_to_all_v | all-to-all | the way back |
| all_gather | all-gather | own slice: every rank goes on to compute the same |
| all_gather(fused=True), zero_gather, batch_all_gather_v | all-gather | reduce-scatter |
| reduce_scatter | reduce-scatter | all-gather |
| spatial_split | own slice | all-gather |
| allreduce_forward | all-reduce | as it comes |
| allreduce_backward | the identity | all-reduce |

Every backward runs on the group of its forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe import ranks
from fusedmoe.errors import ConfigError
from fusedmoe.ops import Move, linear, make_all_to_all
from fusedmoe.ranks import Group, Traffic
from fusedmoe.tutel.impls.groups import TIMEOUT_S, as_group, get_world_size, topology_of
from fusedmoe.tutel.impls.groups import TUTEL_GROUPING_CACHE as TUTEL_GROUPING_CACHE
from fusedmoe.tutel.impls.groups import create_groups_from_world as create_groups_from_world
from fusedmoe.tutel.impls.groups import create_standalone_group as create_standalone_group
from fusedmoe.tutel.impls.groups import get_world_rank as get_world_rank


def part_of(length: int, group: Group) -> int:
    """Returns the length of each rank's part of a dimension.

    Raises:
        ConfigError: the ranks cannot have equal parts.
    """
    if length % group.size:
        raise ConfigError(f"a dimension of {length} has no equal parts for the {group.size} ranks of the {group}")
    return length // group.size


def swap_parts(group: Group, rows: Tensor) -> Tensor:
    """Sends part i of [W·n, …] to rank i, and returns the received parts in rank order. Its own adjoint."""
    counts = [part_of(len(rows), group)] * group.size
    return ranks.all_to_all_rows(group, rows, counts, counts)


def swap_parts_2dh(handle: dist.ProcessGroup | None, rows: Tensor) -> Tensor:
    """Does `swap_parts` by the two-level algorithm, inside nodes of LOCAL_SIZE ranks first."""
    algorithm = make_all_to_all("2dh", topology_of(handle))
    size = algorithm.group.size
    # All parts are equal, so the ranks need not tell each other how many rows they send.
    count = part_of(len(rows), algorithm.group)
    traffic = Traffic([count] * size, [count] * size, np.full((size, size), count))
    ranks.begin(algorithm.group, "all-to-all", f"in two levels of {len(rows)} {rows.dtype}")
    return algorithm.exchange(rows, traffic, "all-to-all")


def start_swap(group: Group, rows: Tensor) -> tuple[Tensor, Callable[..., None]]:
    """Starts `swap_parts` on contiguous rows, and returns the result and a function that waits for it."""
    part_of(len(rows), group)
    out = torch.empty_like(rows)
    _begin(group, "all-to-all", rows)
    work = dist.all_to_all_single(out, rows, group=group.handle, async_op=True)
    return out, partial(ranks.wait, work, group, "all-to-all")


def _begin(group: Group, operation: str, tensor: Tensor, more: str = "") -> None:
    ranks.begin(group, operation, f"of {tensor.numel()} {tensor.dtype}{more}")


def gather_parts(group: Group, rows: Tensor) -> Tensor:
    """Gathers [n, …] of each rank to [W·n, …]."""
    return ranks.all_gather_rows(group, rows, [len(rows)] * group.size)


def sum_and_split(group: Group, rows: Tensor) -> Tensor:
    """Sums [W·n, …] of each rank, in rank order, and returns this rank's [n, …]."""
    return ranks.reduce_scatter_rows(group, rows, [part_of(len(rows), group)] * group.size)


def own_part(group: Group, rows: Tensor) -> Tensor:
    """Returns this rank's [n, …] of [W·n, …]."""
    count = part_of(len(rows), group)
    return rows[group.index * count : (group.index + 1) * count]


def padded_parts(flat: Tensor, group: Group) -> Tensor:
    """Pads a flat tensor with zeros up to equal parts."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % group.size))


ProcessGroup = dist.ProcessGroup
TUTEL_GLOBAL_TIMEOUT_SEC = int(TIMEOUT_S)
_SUM = dist.ReduceOp.SUM
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def skips_all_to_all() -> bool:
    """Returns whether SKIP_A2A is set, for timing: rows then stay where they are, and results are wrong."""
    return int(os.environ.get("SKIP_A2A", 0)) > 0


def barrier(group: ProcessGroup | None = None) -> None:
    """Waits until all ranks of the group are here.

    Raises:
        RankError: some did not come within TUTEL_GLOBAL_TIMEOUT_SEC, or failed; it names them.
    """
    members = as_group(group)
    # An all-reduce of one number: its wait is bounded and names who did not come. `tolist` waits for the GPU.
    arrived = torch.zeros(1, device=ranks.device_of(members))
    ranks.all_reduce(members, arrived, operation="barrier").tolist()


# Without gradients.


def simple_all_reduce(
    input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM, inplace: bool = False
) -> Tensor:
    if get_world_size(group) == 1:
        return input
    output = input if inplace else input.detach().clone(memory_format=torch.contiguous_format)
    # Sums, maxima and minima go by the library's own all-reduce; other operations are bounded here.
    if op in _OPS:
        return ranks.all_reduce(as_group(group), output, _OPS[op])
    members = as_group(group)
    _begin(members, "all-reduce", output, f", {op}")
    ranks.wait(dist.all_reduce(output, op=op, group=group, async_op=True), members, "all-reduce")
    return output


def simple_all_to_all(input: Tensor, group: ProcessGroup | None = None, background: bool = False) -> Any:
    """Swaps equal parts along dimension 0; with `background` returns (result, a function that waits for it)."""
    rows = input.detach().contiguous()
    if get_world_size(group) == 1 or skips_all_to_all():
        return (rows, lambda *_: None) if background else rows
    members = as_group(group)
    return start_swap(members, rows) if background else swap_parts(members, rows)


def simple_split(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return own_part(as_group(group), input)


def simple_reduce_scatter(input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM) -> Tensor:
    members = as_group(group)
    if op == _SUM:
        return sum_and_split(members, input.detach())
    part_of(len(input), members)
    # Not every backend has a reduce-scatter for every operation.
    return own_part(members, simple_all_reduce(input, group, op))


def simple_all_gather(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Gathers tensors along dimension 0; numbers without a dimension as [W]."""
    members = as_group(group)
    return input.detach() if members.size == 1 else gather_parts(members, torch.atleast_1d(input.detach()))


def simple_broadcast(input: Tensor, src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Sends `input` of rank `src` (its number in the job) to all, in place."""
    if get_world_size(group) > 1:
        members = as_group(group)
        _begin(members, "broadcast", input, f" from rank {src}")
        ranks.wait(dist.broadcast(input, src, group=group, async_op=True), members, "broadcast")
    return input


# With gradients.


def _on_rows(input: Tensor, dim: int, there: Move, back: Move, name: str) -> Tensor:
    """Applies a move along a dimension; its gradient is `back`."""
    return linear(input.movedim(dim, 0).contiguous(), there, back, name).movedim(0, dim)


def all_to_all_single(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Swaps equal parts along dimension 0."""
    members = as_group(group)
    if members.size == 1 or skips_all_to_all():
        return input
    move = partial(swap_parts, members)
    return linear(input, move, move, "all_to_all_single")


def all_to_all(
    input: Tensor,
    input_dim: int,
    output_dim: int,
    group: ProcessGroup | None = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Any:
    """Splits `output_dim` over the ranks and joins the received parts along `input_dim`.

    Args:
        background: start now; returns a function that waits and gives the result.
        use_2dh: by the two-level algorithm.
    """
    members = as_group(group)
    if input_dim == output_dim or members.size == 1:
        return (lambda *_: input) if background else input
    part_of(input.shape[output_dim], members)
    parts = input.unflatten(output_dim, (members.size, -1)).movedim(output_dim, 0).contiguous()

    def joined(received: Tensor) -> Tensor:
        return received.movedim(0, input_dim).flatten(input_dim, input_dim + 1)

    if skips_all_to_all():
        return (lambda *_: joined(parts)) if background else joined(parts)
    move: Move = partial(swap_parts_2dh, group) if use_2dh else partial(swap_parts, members)
    if not background:
        return joined(linear(parts, move, move, "all_to_all"))
    if use_2dh:
        raise ConfigError("all_to_all: the two-level algorithm has no background mode; leave one of them out")
    out, wait = start_swap(members, parts.detach())
    begun = [out]

    def there(rows: Tensor) -> Tensor:
        # The second derivative sends the same way once more.
        if not begun:
            return move(rows)
        wait()
        return begun.pop()

    return lambda *_: joined(linear(parts, there, move, "all_to_all"))


def all_gather(input: Tensor, dim: int, fused: bool = False, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    back = partial(sum_and_split, members) if fused else _own_copy(members)
    return _on_rows(input, dim, partial(gather_parts, members), back, "all_gather")


def reduce_scatter(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    return _on_rows(input, dim, partial(sum_and_split, members), partial(gather_parts, members), "reduce_scatter")


def spatial_split(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    return _on_rows(input, dim, _own_copy(members), partial(gather_parts, members), "spatial_split")


def _own_copy(members: Group) -> Move:
    return lambda rows: own_part(members, rows).clone()


def zero_gather(input: Tensor, full_shape: Sequence[int] | None = None, group: ProcessGroup | None = None) -> Tensor:
    """Joins the tensor whose flat parts the ranks hold; `full_shape` cuts padding off, by default dimension 0 grows."""
    members = as_group(group)
    shape = list(full_shape) if full_shape else [input.shape[0] * members.size, *input.shape[1:]]
    flat = all_gather(input.reshape(-1), 0, fused=True, group=group)
    return flat[: torch.Size(shape).numel()].view(shape)


def zero_scatter(
    input: Tensor, scatter_fn: Callable[..., Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, torch.Size]:
    """Returns `scatter_fn` (such as `simple_split`) of the flat tensor, padded to equal parts, and the shape."""
    return scatter_fn(padded_parts(input.reshape(-1), as_group(group)), group=group), input.shape


def allreduce_forward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: simple_all_reduce(t, group, op), lambda grad: grad, "allreduce_forward")


def allreduce_backward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: t, lambda grad: simple_all_reduce(grad, group, op), "allreduce_backward")


def batch_all_to_all_v(
    datas: Sequence[Tensor], partition_sizes: Tensor | Sequence[int], group: ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Swaps flat tensors of equal length, `partition_sizes[i]` elements of each for rank i; returns received sizes too.

    Raises:
        ConfigError: not a size for each rank, or tensors of another length than their sum. Nothing has been sent then.
    """
    members = as_group(group)
    send = [int(size) for size in partition_sizes]
    if len(send) != members.size:
        raise ConfigError(f"batch_all_to_all_v: {len(send)} sizes for {members.size} ranks; give one for each")
    _require_length("batch_all_to_all_v", datas, sum(send))
    # The ranks tell each other how many elements come, so that any sizes fit.
    recv_W = swap_parts(members, torch.tensor(send, device=datas[0].device))
    recv = recv_W.tolist()
    there = partial(_swap_ragged, members, send, recv)
    back = partial(_swap_ragged, members, recv, send)
    return [linear(data.reshape(-1), there, back, "batch_all_to_all_v") for data in datas], recv_W


def _swap_ragged(members: Group, send: Sequence[int], recv: Sequence[int], rows: Tensor) -> Tensor:
    return ranks.all_to_all_rows(members, rows, send, recv)


def batch_all_gather_v(datas: Sequence[Tensor], group: ProcessGroup | None = None) -> tuple[list[Tensor], Tensor]:
    """Joins flat tensors, of any length on each rank, in rank order; and returns the lengths.

    Raises:
        ConfigError: this rank's tensors differ in length. Nothing has been sent then.
    """
    members = as_group(group)
    _require_length("batch_all_gather_v", datas, datas[0].numel())
    own = torch.tensor([datas[0].numel()], device=datas[0].device)
    counts_W = gather_parts(members, own)
    counts = counts_W.tolist()

    def there(rows: Tensor) -> Tensor:
        return ranks.all_gather_rows(members, rows, counts)

    def back(rows: Tensor) -> Tensor:
        return ranks.reduce_scatter_rows(members, rows, counts)

    return [linear(data.reshape(-1), there, back, "batch_all_gather_v") for data in datas], counts_W


def _require_length(name: str, datas: Sequence[Tensor], length: int) -> None:
    sizes = [data.numel() for data in datas]
    if set(sizes) != {length}:
        raise ConfigError(f"{name}: tensors of {sizes} elements; each must have {length}")
