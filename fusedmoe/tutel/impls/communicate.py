"""Process groups, and collectives with and without gradients (Tutel's signatures).

Backward of each function, for the sum of the ranks' losses, in the group of the forward:

| function | forward | backward |
|---|---|---|
| all_to_all, all_to_all_single, batch_all_to_all_v | all-to-all | reverse all-to-all |
| all_gather | all-gather | own slice: all ranks are assumed to compute the same result |
| all_gather(fused=True), zero_gather, batch_all_gather_v | all-gather | reduce-scatter |
| reduce_scatter | reduce-scatter | all-gather |
| spatial_split | own slice | all-gather |
| allreduce_forward | all-reduce | identity |
| allreduce_backward | identity | all-reduce |
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedmoe import Topology
from fusedmoe.comm import collectives, init_process_group, make_all_to_all
from fusedmoe.comm.all_to_all import TwoLevelAllToAll
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import group_of
from fusedmoe.environment import read_integer, read_seconds
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import LinearMap, linear
from fusedmoe.layers.scheduled_exchange import shared_topology

#: Timeout of every wait for other ranks in seconds. The default is PyTorch's; Tutel's is one day.
TUTEL_GLOBAL_TIMEOUT_SEC = read_seconds("TUTEL_GLOBAL_TIMEOUT_SEC", 1800.0)
#: The backend under key "", and results of `create_groups_from_world` by argument.
TUTEL_GROUPING_CACHE: dict[Any, Any] = {}


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the size of a group (default: the job); 1 if torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's index in a group; 0 if torch.distributed is not initialised."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size_of(handle: ProcessGroup | None) -> int:
    size = get_world_size(handle)
    if size < 1:
        raise ConfigError("this rank is not in the group; construct layers and call collectives on its ranks only")
    return size


def as_group(handle: ProcessGroup | None) -> Group:
    """Wrap a process group as a `Group`: waits are bounded by TUTEL_GLOBAL_TIMEOUT_SEC, and errors name ranks."""
    if size_of(handle) == 1:
        return Group("tutel")
    world: Any = dist.group.WORLD
    return group_of(handle or world, "tutel", TUTEL_GLOBAL_TIMEOUT_SEC)


def topology_of(handle: ProcessGroup | None, shards: int = 1, degree: int = 1) -> Topology:
    """Return the topology of a group in which s = `shards` consecutive ranks share an expert. Collective on first use.

    The weights of an expert are split into r = `degree` parts, one for each block of s/r consecutive ranks. An ESP
    group has one rank of each block of an expert, an EP group all ranks with the same part of their expert.

    Example of 8 ranks, s = 4, r = 2: ranks 0–3 share an expert, in blocks 0, 1 and 2, 3. The ESP groups are (0, 2), (1,
    3), (4, 6) and (5, 7), the EP groups (0, 1, 4, 5) and (2, 3, 6, 7).
    """
    experts, ranks_per_node = None, read_integer("LOCAL_SIZE", None, 1)
    if shards > 1:
        ranks = torch.arange(get_world_size(handle), device="cpu")
        experts = ranks.view(-1, degree, shards // degree).transpose(1, 2).reshape(-1, degree)
    return shared_topology(handle or dist.group.WORLD, experts, TUTEL_GLOBAL_TIMEOUT_SEC, ranks_per_node)


class ParallelEnv(SimpleNamespace):
    """Position of this rank in `group_count` groups of `model_size` consecutive ranks; attributes as in Tutel."""


def create_standalone_group() -> ProcessGroup | None:
    """Create a group of only this rank; None without torch.distributed. Collective over all ranks."""
    if not dist.is_initialized():
        return None
    _wait_for_ranks(None)
    return [dist.new_group(ranks=[rank]) for rank in range(get_world_size())][get_world_rank()]


def create_groups_from_world(
    group_count: int, include_init: str | None = None, parent_group: ProcessGroup | None = None
) -> ParallelEnv:
    """Split the world into `group_count` groups of consecutive ranks; a negative count is minus the group size.

    Collective over the parent's ranks; equal arguments return the same object.

    Args:
        include_init: "nccl" or "gloo": initialise torch.distributed with this backend from the launcher's environment
            variables; without a launcher, the job is a single process. None: do not initialise it.
        parent_group: group to split instead of the world; ranks are then indices in it.
    Raises:
        ConfigError: groups of unequal size; a backend other than before; "nccl" without a GPU.
    """
    parent = None if parent_group in (None, dist.group.WORLD) else parent_group
    if include_init is not None:
        _initialise(include_init)
    world = parent if parent is not None else dist.group.WORLD if dist.is_initialized() else None
    key = group_count if parent is None else (group_count, parent)
    if key not in TUTEL_GROUPING_CACHE or TUTEL_GROUPING_CACHE[key].global_group is not world:
        _wait_for_ranks(parent)
        TUTEL_GROUPING_CACHE[key] = _split(group_count, world)
    return TUTEL_GROUPING_CACHE[key]


def _wait_for_ranks(parent: ProcessGroup | None) -> None:
    members = as_group(parent)
    if members.size > 1:
        # `new_group` would wait without naming a missing rank.
        timeout_s, cure = TUTEL_GLOBAL_TIMEOUT_SEC, "set TUTEL_GLOBAL_TIMEOUT_SEC to more seconds"
        members.board.all_gather_json(members.ranks, None, timeout_s, operation="making groups", cure=cure)


def _initialise(backend: str) -> None:
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"unknown backend {backend!r}; choose nccl or gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("backend='nccl' needs a CUDA GPU; give backend='gloo' to run on CPUs")
    if not dist.is_initialized():
        TUTEL_GROUPING_CACHE.clear()
    known = TUTEL_GROUPING_CACHE.setdefault("", backend)
    if known != backend:
        raise ConfigError(f"already initialised with {known}, requested {backend}: a job has one backend")
    if dist.is_initialized():
        return
    # Open MPI's launcher sets neither RANK nor MASTER_PORT.
    if "LOCAL_RANK" not in os.environ and "OMPI_COMM_WORLD_SIZE" in os.environ:
        size = read_integer("OMPI_COMM_WORLD_SIZE", 1, 1)
        rank_and_size = {"rank": read_integer("OMPI_COMM_WORLD_RANK", 0, 0, size - 1), "world_size": size}
        address = os.environ.get("MASTER_ADDR", "localhost")
        port = read_integer("MASTER_PORT", 23456, 1, 65535)
        init_process_group(backend, TUTEL_GLOBAL_TIMEOUT_SEC, **rank_and_size, address=address, port=port)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        init_process_group(backend, TUTEL_GLOBAL_TIMEOUT_SEC)


def _split(group_count: int, world: ProcessGroup | None) -> ParallelEnv:
    size, rank = get_world_size(world), get_world_rank(world)
    count = size // -group_count if group_count < 0 else group_count
    if count < 1 or size % count or (group_count < 0 and count * -group_count != size):
        raise ConfigError(f"{size} ranks do not divide into {group_count} groups (a negative count is minus a size)")
    inner = size // count
    data_rank, model_rank = divmod(rank, inner)
    backend = TUTEL_GROUPING_CACHE.get("")
    if backend is None and world is not None:
        backend = dist.get_backend(world)
    on_gpu = backend == "nccl"
    device = None if backend is None else torch.device("cpu")
    local_rank = _read_local_variable("RANK", 0, 0)
    if on_gpu:
        local_rank = min(local_rank, torch.cuda.device_count() - 1)
        device = torch.device("cuda", local_rank)
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
        local_size=_read_local_variable("SIZE", read_integer("LOCAL_WORLD_SIZE", 1, 1), 1),
        data_group=_group_of([list(range(i, size, inner)) for i in range(inner)], model_rank, world),
        model_group=_group_of([list(range(i, i + inner)) for i in range(0, size, inner)], data_rank, world),
        global_group=world,
        is_distributed=world is not None,
        is_cuda=on_gpu,
        dist_print=print_on_first,
    )


def _group_of(grid: list[list[int]], own: int, world: ProcessGroup | None) -> ProcessGroup | None:
    """Create one group per row of ranks, and return this rank's group, that of row `own`."""
    if world is None or len(grid) == 1:
        return world
    timeout = datetime.timedelta(seconds=TUTEL_GLOBAL_TIMEOUT_SEC)
    global_ranks = dist.get_process_group_ranks(world)
    groups = [[global_ranks[rank] for rank in ranks] for ranks in grid]
    if world is dist.group.WORLD:
        # `new_group` is collective over the world: every rank creates every group.
        return [dist.new_group(ranks=ranks, timeout=timeout) for ranks in groups][own]
    return dist.new_group(ranks=groups[own], timeout=timeout, use_local_synchronization=True)


def _read_local_variable(what: str, default: int, least: int) -> int:
    return read_integer(f"LOCAL_{what}", read_integer(f"OMPI_COMM_WORLD_LOCAL_{what}", default, least), least)


def _part_length(length: int, group: Group) -> int:
    if length % group.size:
        raise ConfigError(f"a dimension of {length} has no equal parts for the {group.size} ranks of the {group}")
    return length // group.size


def _swap_parts(group: Group, rows: Tensor) -> Tensor:
    """All-to-all of equal parts along dimension 0, which is its own backward."""
    counts = [_part_length(len(rows), group)] * group.size
    return collectives.all_to_all_rows(group, rows, counts, counts)


def _swap_parts_2dh(process_group: ProcessGroup | None, rows: Tensor) -> Tensor:
    """Compute `_swap_parts` with the two-level algorithm, for nodes of LOCAL_SIZE ranks."""
    algorithm = make_all_to_all("2dh", topology_of(process_group))
    assert isinstance(algorithm, TwoLevelAllToAll)
    traffic = algorithm.uniform_traffic(_part_length(len(rows), algorithm.group))
    collectives.compare_calls(algorithm.group, "all-to-all", f"in two levels of {len(rows)} {rows.dtype}")
    return algorithm.exchange(rows, traffic, "all-to-all")


def start_swap(group: Group, rows: Tensor) -> tuple[Tensor, Callable[..., None]]:
    """Start `_swap_parts` on contiguous rows; return the result and a function that waits for it."""
    _part_length(len(rows), group)
    out = torch.empty_like(rows)
    _compare_calls(group, "all-to-all", rows)
    work = dist.all_to_all_single(out, rows, group=group.handle, async_op=True)
    return out, partial(collectives.wait, work, group, "all-to-all")


def _compare_calls(group: Group, operation: str, tensor: Tensor, more: str = "") -> None:
    collectives.compare_calls(group, operation, f"of {tensor.numel()} {tensor.dtype}{more}")


def _gather_parts(group: Group, rows: Tensor) -> Tensor:
    return collectives.all_gather_rows(group, rows, [len(rows)] * group.size)


def _sum_and_split(group: Group, rows: Tensor) -> Tensor:
    return collectives.reduce_scatter_rows(group, rows, [_part_length(len(rows), group)] * group.size)


def _own_part(group: Group, rows: Tensor) -> Tensor:
    count = _part_length(len(rows), group)
    return rows[group.index * count : (group.index + 1) * count]


_GroupMap = Callable[[Group, Tensor], Tensor]
_SUM = dist.ReduceOp.SUM
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def skips_all_to_all() -> bool:
    """Return whether SKIP_A2A is set: rows are not sent, and results are wrong, to time other work."""
    return read_integer("SKIP_A2A", 0) > 0


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of the group; raise an error that names a rank that failed or timed out."""
    members = as_group(group)
    # `tolist` waits for the GPU.
    arrived = torch.zeros(1, device=collectives.device_of(members))
    collectives.all_reduce(members, arrived, operation="barrier").tolist()


def simple_all_reduce(
    input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM, inplace: bool = False
) -> Tensor:
    if get_world_size(group) == 1:
        return input
    output = input if inplace else input.detach().clone(memory_format=torch.contiguous_format)
    if op in _OPS:
        return collectives.all_reduce(as_group(group), output, _OPS[op])
    members = as_group(group)
    _compare_calls(members, "all-reduce", output, f", {op}")
    collectives.wait(dist.all_reduce(output, op=op, group=group, async_op=True), members, "all-reduce")
    return output


def simple_all_to_all(input: Tensor, group: ProcessGroup | None = None, background: bool = False) -> Any:
    """All-to-all of equal parts along dimension 0; with `background` return (result, wait function)."""
    rows = input.detach().contiguous()
    if get_world_size(group) == 1 or skips_all_to_all():
        return (rows, lambda *_: None) if background else rows
    members = as_group(group)
    return start_swap(members, rows) if background else _swap_parts(members, rows)


def simple_split(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return _own_part(as_group(group), input)


def simple_reduce_scatter(input: Tensor, group: ProcessGroup | None = None, op: Any = _SUM) -> Tensor:
    members = as_group(group)
    if op == _SUM:
        return _sum_and_split(members, input.detach())
    # Not every backend supports reduce-scatter for every operation.
    _part_length(len(input), members)
    return _own_part(members, simple_all_reduce(input, group, op))


def simple_all_gather(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """All-gather along dimension 0; scalars yield [W]."""
    members = as_group(group)
    return input.detach() if members.size == 1 else _gather_parts(members, torch.atleast_1d(input.detach()))


def simple_broadcast(input: Tensor, src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Broadcast `input` from global rank `src`, in place."""
    if get_world_size(group) > 1:
        members = as_group(group)
        _compare_calls(members, "broadcast", input, f" from rank {src}")
        collectives.wait(dist.broadcast(input, src, group=group, async_op=True), members, "broadcast")
    return input


def all_to_all_single(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """All-to-all of equal parts along dimension 0."""
    if skips_all_to_all():
        return input
    return _along(input, 0, group, "all_to_all_single", _swap_parts, _swap_parts)


def all_to_all(
    input: Tensor,
    input_dim: int,
    output_dim: int,
    group: ProcessGroup | None = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Any:
    """All-to-all: split `input` along `output_dim` over the ranks, and concatenate received parts along `input_dim`.

    Args:
        background: start the all-to-all and return a function that waits for it and returns the result.
        use_2dh: use the two-level algorithm.
    """
    members = as_group(group)
    if input_dim == output_dim or members.size == 1:
        return (lambda *_: input) if background else input
    _part_length(input.shape[output_dim], members)
    parts = input.unflatten(output_dim, (members.size, -1)).movedim(output_dim, 0).contiguous()

    def joined(received: Tensor) -> Tensor:
        return received.movedim(0, input_dim).flatten(input_dim, input_dim + 1)

    if skips_all_to_all():
        return (lambda *_: joined(parts)) if background else joined(parts)
    swap: LinearMap = partial(_swap_parts_2dh, group) if use_2dh else partial(_swap_parts, members)
    if not background:
        return joined(linear(parts, swap, swap, "all_to_all"))
    if use_2dh:
        raise ConfigError("all_to_all: the two-level algorithm has no background mode; leave one of them out")
    out, finish = start_swap(members, parts.detach())
    begun = [out]

    def there(rows: Tensor) -> Tensor:
        # The first call takes the started result; a second derivative communicates again.
        if not begun:
            return swap(rows)
        finish()
        return begun.pop()

    return lambda *_: joined(linear(parts, there, swap, "all_to_all"))


def all_gather(input: Tensor, dim: int, fused: bool = False, group: ProcessGroup | None = None) -> Tensor:
    return _along(input, dim, group, "all_gather", _gather_parts, _sum_and_split if fused else _own_copy)


def reduce_scatter(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    return _along(input, dim, group, "reduce_scatter", _sum_and_split, _gather_parts)


def spatial_split(input: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    return _along(input, dim, group, "spatial_split", _own_copy, _gather_parts)


def _along(input: Tensor, dim: int, group: ProcessGroup | None, name: str, fwd: _GroupMap, bwd: _GroupMap) -> Tensor:
    members = as_group(group)
    if members.size == 1:
        return input
    rows = linear(input.movedim(dim, 0).contiguous(), partial(fwd, members), partial(bwd, members), name)
    return rows.movedim(0, dim)


def _own_copy(members: Group, rows: Tensor) -> Tensor:
    return _own_part(members, rows).clone()


def zero_gather(input: Tensor, full_shape: Sequence[int] | None = None, group: ProcessGroup | None = None) -> Tensor:
    """All-gather a tensor from its flat parts, as the inverse of `zero_scatter`.

    `full_shape` is the shape of the result, without padding; None concatenates the parts along dimension 0.
    """
    members = as_group(group)
    shape = list(full_shape) if full_shape else [input.shape[0] * members.size, *input.shape[1:]]
    flat = all_gather(input.reshape(-1), 0, fused=True, group=group)
    return flat[: torch.Size(shape).numel()].view(shape)


def zero_scatter(
    input: Tensor, scatter_fn: Callable[..., Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, torch.Size]:
    """Flatten a tensor, pad it to equal parts, and return `scatter_fn` of it (as `simple_split`) and its shape."""
    flat = input.reshape(-1)
    return scatter_fn(torch.nn.functional.pad(flat, (0, -len(flat) % size_of(group))), group=group), input.shape


def allreduce_forward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: simple_all_reduce(t, group, op), lambda grad: grad, "allreduce_forward")


def allreduce_backward(input: Tensor, op: Any = _SUM, group: ProcessGroup | None = None) -> Tensor:
    return linear(input, lambda t: t, lambda grad: simple_all_reduce(grad, group, op), "allreduce_backward")


def batch_all_to_all_v(
    datas: Sequence[Tensor], partition_sizes: Tensor | Sequence[int], group: ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """All-to-all of flat tensors of equal length in parts of `partition_sizes[r]` elements for rank r.

    Returns the received tensors, and the number of elements received from each rank. Raises `ConfigError` before
    sending if the sizes do not match the ranks or the tensors.
    """
    members = as_group(group)
    send = [int(size) for size in partition_sizes]
    if len(send) != members.size:
        raise ConfigError(f"batch_all_to_all_v: {len(send)} sizes for {members.size} ranks; give one for each")
    _require_length("batch_all_to_all_v", datas, sum(send))
    recv_W = _swap_parts(members, torch.tensor(send, device=datas[0].device))
    recv = recv_W.tolist()
    there = partial(collectives.all_to_all_rows, members, send=send, recv=recv)
    back = partial(collectives.all_to_all_rows, members, send=recv, recv=send)
    return [linear(data.reshape(-1), there, back, "batch_all_to_all_v") for data in datas], recv_W


def batch_all_gather_v(datas: Sequence[Tensor], group: ProcessGroup | None = None) -> tuple[list[Tensor], Tensor]:
    """Concatenate flat tensors of any per-rank length in rank order; also return the lengths.

    Raises `ConfigError` before sending if this rank's tensors differ in length.
    """
    members = as_group(group)
    _require_length("batch_all_gather_v", datas, datas[0].numel())
    counts_W = _gather_parts(members, torch.tensor([datas[0].numel()], device=datas[0].device))
    there = partial(collectives.all_gather_rows, members, counts=counts_W.tolist())
    back = partial(collectives.reduce_scatter_rows, members, counts=counts_W.tolist())
    return [linear(data.reshape(-1), there, back, "batch_all_gather_v") for data in datas], counts_W


def _require_length(name: str, datas: Sequence[Tensor], length: int) -> None:
    sizes = [data.numel() for data in datas]
    if set(sizes) != {length}:
        raise ConfigError(f"{name}: tensors of {sizes} elements; each must have {length}")
