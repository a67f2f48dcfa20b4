"""Process groups by name, and collectives with and without gradients (Tutel's signatures).

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

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.autograd.linear import Move, linear
from fusedmoe.comm import collectives
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError
from fusedmoe.tutel.impls.exchange import (
    gather_parts,
    own_part,
    padded_parts,
    part_of,
    sizes_of,
    start_swap,
    sum_and_split,
    swap_parts,
    swap_parts_2dh,
)
from fusedmoe.tutel.impls.groups import TIMEOUT_S, as_group, get_world_rank, get_world_size

ProcessGroup = dist.ProcessGroup
TUTEL_GLOBAL_TIMEOUT_SEC = int(TIMEOUT_S)
#: The backend under "", and what `create_groups_from_world` made, by its argument.
TUTEL_GROUPING_CACHE: dict[Any, Any] = {}
_SUM = dist.ReduceOp.SUM
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def skips_all_to_all() -> bool:
    """SKIP_A2A, for timing what remains: rows stay where they are, and results are wrong."""
    return int(os.environ.get("SKIP_A2A", 0)) > 0


def barrier(group: ProcessGroup | None = None) -> None:
    if get_world_size(group) > 1:
        dist.barrier(group=group)


# Groups.


@dataclass
class ParallelEnv:
    """Where this rank stands in `group_count` groups of `model_size` consecutive ranks."""

    global_size: int
    global_rank: int
    group_count: int
    data_rank: int
    model_size: int
    model_rank: int
    local_device: torch.device | None
    local_rank: int
    local_size: int
    data_group: ProcessGroup | None
    model_group: ProcessGroup | None
    global_group: ProcessGroup | None
    is_distributed: bool
    is_cuda: bool
    dist_print: Callable[..., None] = field(repr=False)


def create_standalone_group() -> ProcessGroup | None:
    """A group of this rank alone. Collective over all ranks."""
    if not dist.is_initialized():
        return None
    return [dist.new_group(ranks=[rank]) for rank in range(get_world_size())][get_world_rank()]


def create_groups_from_world(
    group_count: int, include_init: str | None = None, parent_group: ProcessGroup | None = None
) -> ParallelEnv:
    """The world in `group_count` groups of consecutive ranks; a negative count is minus the size of a group.

    Collective over the parent's ranks; the same arguments give the same object.

    Args:
        include_init: the backend to initialise with from the launcher's environment ("nccl", "gloo"); without a
            launcher the result is that of a single process. None: what is there.
        parent_group: split this group instead of the world; ranks are then places in it.
    Raises:
        ConfigError: the groups do not come out even; another backend than before; "nccl" without a GPU.
    """
    parent = None if parent_group in (None, dist.group.WORLD) else parent_group
    if include_init is not None:
        _initialise(include_init)
    key = group_count if parent is None else (group_count, parent)
    if key not in TUTEL_GROUPING_CACHE or TUTEL_GROUPING_CACHE[key].global_group is not _world(parent):
        TUTEL_GROUPING_CACHE[key] = _split(group_count, parent)
    env: ParallelEnv = TUTEL_GROUPING_CACHE[key]
    return env


def _world(parent: ProcessGroup | None) -> ProcessGroup | None:
    return parent if parent is not None else dist.group.WORLD if dist.is_initialized() else None


def _initialise(backend: str) -> None:
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"unknown backend {backend!r}; choose nccl or gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("backend='nccl' needs a CUDA GPU; give backend='gloo' to run on CPUs")
    if not dist.is_initialized():
        TUTEL_GROUPING_CACHE.clear()
    known = TUTEL_GROUPING_CACHE.setdefault("", backend)
    if known != backend:
        raise ConfigError(f"initialised with {known} before, now asked for {backend}: one backend a job")
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=TUTEL_GLOBAL_TIMEOUT_SEC)
    environment = os.environ
    if "LOCAL_RANK" not in environment and "OMPI_COMM_WORLD_SIZE" in environment:
        where = f"tcp://{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', '23456')}"
        rank, size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=timeout)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        dist.init_process_group(backend, timeout=timeout)


def _split(group_count: int, parent: ProcessGroup | None) -> ParallelEnv:
    world = _world(parent)
    size, rank = get_world_size(world), get_world_rank(world)
    count = size // -group_count if group_count < 0 else group_count
    if count < 1 or size % count or (group_count < 0 and count * -group_count != size):
        raise ConfigError(f"{size} ranks do not divide into {group_count} groups (a negative count is minus a size)")
    inner = size // count
    data_rank, model_rank = divmod(rank, inner)
    rows = [list(range(i * inner, (i + 1) * inner)) for i in range(count)]
    columns = [list(range(i, size, inner)) for i in range(inner)]
    backend = TUTEL_GROUPING_CACHE.get("")
    if backend is None and world is not None:
        backend = dist.get_backend(world)
    on_gpu = backend == "nccl"
    local_rank = _local("RANK")
    if on_gpu:
        local_rank = min(local_rank, torch.cuda.device_count() - 1)
    device = torch.device("cuda", local_rank) if on_gpu else None if backend is None else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    def print_on_first(*args: Any, **more: Any) -> None:
        if get_world_rank() == 0:
            print(*args, **more)

    return ParallelEnv(
        global_size=size,
        global_rank=rank,
        group_count=count,
        data_rank=data_rank,
        model_size=inner,
        model_rank=model_rank,
        local_device=device,
        local_rank=local_rank,
        local_size=_local("SIZE"),
        data_group=_group_of(columns, model_rank, world),
        model_group=_group_of(rows, data_rank, world),
        global_group=world,
        is_distributed=world is not None,
        is_cuda=on_gpu,
        dist_print=print_on_first,
    )


def _group_of(grid: list[list[int]], own: int, world: ProcessGroup | None) -> ProcessGroup | None:
    """The group of one line of a grid of places. Every rank makes all lines, unless they lie in a part of the world."""
    if world is None or len(grid) == 1:
        return world
    timeout = datetime.timedelta(seconds=TUTEL_GLOBAL_TIMEOUT_SEC)
    ranks = dist.get_process_group_ranks(world)
    lines = [[ranks[place] for place in line] for line in grid]
    if world is dist.group.WORLD:
        return [dist.new_group(ranks=line, timeout=timeout) for line in lines][own]
    return dist.new_group(ranks=lines[own], timeout=timeout, use_local_synchronization=True)


def _local(what: str) -> int:
    default = {"RANK": "0", "SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1")}[what]
    return int(os.environ.get(f"LOCAL_{what}", os.environ.get(f"OMPI_COMM_WORLD_LOCAL_{what}", default)))


# Without gradients.


def simple_all_reduce(
    input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM, inplace: bool = False
) -> Tensor:
    if get_world_size(group) == 1:
        return input
    output = input if inplace else input.detach().clone(memory_format=torch.contiguous_format)
    if op in _OPS:
        return collectives.all_reduce(as_group(group), output, _OPS[op])
    dist.all_reduce(output, op=op, group=group)
    return output


def simple_all_to_all(input: Tensor, group: ProcessGroup | None = None, background: bool = False) -> Any:
    """Equal parts along dimension 0; with `background` (result, a function that waits for it)."""
    rows = input.detach().contiguous()
    if get_world_size(group) == 1 or skips_all_to_all():
        return (rows, lambda *_: None) if background else rows
    if not background:
        return swap_parts(as_group(group), rows)
    output = torch.empty_like(rows)
    work = dist.all_to_all_single(output, rows, group=group, async_op=True)
    return output, partial(collectives.wait, work, as_group(group), "all-to-all")


def simple_split(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return own_part(as_group(group), input)


def simple_reduce_scatter(input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM) -> Tensor:
    members = as_group(group)
    if op == _SUM:
        return sum_and_split(members, input.detach())
    part_of(len(input), members)
    return own_part(members, simple_all_reduce(input, group, op))


def simple_all_gather(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return gather_parts(as_group(group), input.detach())


def simple_broadcast(input: Tensor, src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """`input` of rank `src` (its number in the job), in place."""
    if get_world_size(group) > 1:
        dist.broadcast(input, src, group=group)
    return input


# With gradients.


def _on_rows(input: Tensor, dim: int, there: Move, back: Move) -> Tensor:
    """A pair of moves along a dimension."""
    return linear(input.movedim(dim, 0).contiguous(), there, back).movedim(0, dim)


def all_to_all_single(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Equal parts along dimension 0."""
    members = as_group(group)
    if members.size == 1 or skips_all_to_all():
        return input
    move = partial(swap_parts, members)
    return linear(input, move, move)


def all_to_all(
    input: Tensor,
    input_dim: int,
    output_dim: int,
    group: ProcessGroup | None = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Any:
    """Splits `output_dim` over the ranks and joins what comes from them along `input_dim`.

    Args:
        background: start now; returns a function that waits and gives the result.
        use_2dh: by the two-level algorithm.
    """
    members = as_group(group)
    if input_dim == output_dim or members.size == 1:
        return (lambda *_: input) if background else input
    part_of(input.shape[output_dim], members)
    parts = input.unflatten(output_dim, (members.size, -1)).movedim(output_dim, 0).contiguous()

    def joined(came: Tensor) -> Tensor:
        return came.movedim(0, input_dim).flatten(input_dim, input_dim + 1)

    if skips_all_to_all():
        return (lambda *_: joined(parts)) if background else joined(parts)
    move: Move = partial(swap_parts_2dh, group) if use_2dh else partial(swap_parts, members)
    if not background:
        return joined(linear(parts, move, move))
    if use_2dh:
        raise ConfigError("all_to_all: the two-level algorithm has no background mode; leave one of them out")
    started = [start_swap(members, parts.detach())]

    def there(rows: Tensor) -> Tensor:
        return started.pop()() if started else move(rows)

    return lambda *_: joined(linear(parts, there, move))


def all_gather(input: Tensor, dim: int, fused: bool = False, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    back = partial(sum_and_split, members) if fused else _own_copy(members)
    return _on_rows(input, dim, partial(gather_parts, members), back)


def reduce_scatter(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    return _on_rows(input, dim, partial(sum_and_split, members), partial(gather_parts, members))


def spatial_split(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    return _on_rows(input, dim, _own_copy(members), partial(gather_parts, members))


def _own_copy(members: Group) -> Move:
    return lambda rows: own_part(members, rows).clone()


def zero_gather(
    input: Tensor, full_shape: Sequence[int] | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """The tensor whose flat parts the ranks hold; `full_shape` cuts padding off, by default dimension 0 grows."""
    members = as_group(group)
    shape = list(full_shape) if full_shape else [input.shape[0] * members.size, *input.shape[1:]]
    flat = all_gather(input.reshape(-1), 0, fused=True, group=group)
    return flat[: torch.Size(shape).numel()].view(shape)


def zero_scatter(
    input: Tensor, scatter_fn: Callable[..., Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, torch.Size]:
    """`scatter_fn` (such as `simple_split`) of the flat tensor with zeros up to equal parts, and the shape."""
    return scatter_fn(padded_parts(input.reshape(-1), as_group(group)), group=group), input.shape


def allreduce_forward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: simple_all_reduce(t, group, op), lambda grad: grad)


def allreduce_backward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: t, lambda grad: simple_all_reduce(grad, group, op))


def batch_all_to_all_v(
    datas: Sequence[Tensor], partition_sizes: Tensor | Sequence[int], group: ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Flat tensors of equal length, `partition_sizes[i]` elements of each for rank i; and how many came from whom."""
    members = as_group(group)
    send_W = torch.as_tensor(sizes_of(partition_sizes), device=datas[0].device)
    if len(send_W) != members.size:
        raise ConfigError(f"batch_all_to_all_v: {len(send_W)} sizes for {members.size} ranks; give one for each")
    recv_W = swap_parts(members, send_W)
    send, recv = send_W.tolist(), recv_W.tolist()
    there = partial(_swap_ragged, members, send, recv)
    back = partial(_swap_ragged, members, recv, send)
    return [linear(data.reshape(-1), there, back) for data in datas], recv_W


def _swap_ragged(members: Group, send: Sequence[int], recv: Sequence[int], rows: Tensor) -> Tensor:
    return collectives.all_to_all_rows(members, rows, send, recv)


def batch_all_gather_v(
    datas: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Flat tensors, of any length on each rank, joined in rank order. Also, how many came from whom."""
    members = as_group(group)
    own = torch.tensor([datas[0].numel()], device=datas[0].device)
    counts_W = gather_parts(members, own)
    counts = counts_W.tolist()

    def there(rows: Tensor) -> Tensor:
        return collectives.all_gather_rows(members, rows, counts)

    def back(rows: Tensor) -> Tensor:
        return collectives.reduce_scatter_rows(members, rows, counts)

    return [linear(data.reshape(-1), there, back) for data in datas], counts_W
