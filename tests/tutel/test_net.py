"""Collectives: gradients by finite differences over all ranks' inputs, on the world and on a subgroup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.tutel import net
from fusedmoe.tutel.impls import communicate
from tests.cluster import Cluster
from tests.marks import slowly

Function = Callable[[Tensor], Tensor]


def members(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return net.get_world_rank(group), net.get_world_size(group)


def rank_slice(X: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Slice this rank's input from all ranks' inputs, which every rank holds; its gradient reaches all ranks."""
    return net.allreduce_backward(X, group=group)[net.get_world_rank(group)]


def gather_results(y: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather all ranks' results on every rank, where the same function of them follows."""
    return net.all_gather(y[None], 0, group=group)


def with_rank_specific_values(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Inputs and results that differ between ranks."""
    return lambda X: gather_results(function(rank_slice(X, group)), group)


def with_replicated_result(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Inputs that differ between ranks, and a result that is equal on all."""
    return lambda X: function(rank_slice(X, group))


def with_replicated_input(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Inputs that are equal on all ranks."""
    return lambda X: gather_results(function(X[0]), group)


def collective_cases(group: dist.ProcessGroup | None) -> dict[str, tuple[Function, tuple[int, ...]]]:
    rank, W = members(group)
    sizes = torch.tensor([[1, 2], [0, 3]]) if W == 2 else torch.ones(W, W, dtype=torch.long)

    def scaled(x: Tensor) -> Tensor:  # ranks apply different functions to equal inputs
        return net.allreduce_backward(x, group=group) * (rank + 1)

    def all_to_all_v(x: Tensor) -> Tensor:
        (out, other), _ = net.batch_all_to_all_v([x, 2 * x], sizes[rank], group=group)
        return torch.nn.functional.pad(out + other, (0, 6 - len(out)))

    def all_gather_v(x: Tensor) -> Tensor:
        return net.batch_all_gather_v([x[: rank + 1]], group=group)[0][0]

    a2a = partial(net.all_to_all, group=group)
    return {
        "all_to_all 1 0": (with_rank_specific_values(lambda x: a2a(x, 1, 0), group), (W, 2, 2)),
        "all_to_all 0 1": (with_rank_specific_values(lambda x: a2a(x, 0, 1), group), (2, W, 1)),
        "all_to_all 2 1": (with_rank_specific_values(lambda x: a2a(x, 2, 1), group), (1, W, 2)),
        "all_to_all background": (with_rank_specific_values(lambda x: a2a(x, 1, 0, background=True)(), group), (W, 2)),
        "all_to_all 2dh": (with_rank_specific_values(lambda x: a2a(x, 1, 0, use_2dh=True), group), (W, 2)),
        "all_to_all_single": (
            with_rank_specific_values(partial(net.all_to_all_single, group=group), group),
            (2 * W, 1),
        ),
        "all_gather": (with_replicated_result(lambda x: net.all_gather(x, 1, group=group), group), (2, 2)),
        "all_gather fused": (
            with_rank_specific_values(lambda x: net.all_gather(x, 0, fused=True, group=group), group),
            (2, 2),
        ),
        "reduce_scatter": (with_rank_specific_values(lambda x: net.reduce_scatter(x, 1, group=group), group), (2, W)),
        "spatial_split": (with_replicated_input(lambda x: net.spatial_split(x, 1, group=group), group), (2, W)),
        "zero_gather": (with_rank_specific_values(lambda x: net.zero_gather(x, [3, W - 1], group=group), group), (3,)),
        "zero_scatter": (
            with_replicated_input(lambda x: net.zero_scatter(x, partial(net.spatial_split, dim=0), group)[0], group),
            (3,),
        ),
        "allreduce_forward": (with_replicated_result(partial(net.allreduce_forward, group=group), group), (2, 2)),
        "allreduce_backward": (with_replicated_input(scaled, group), (2, 2)),
        "batch_all_to_all_v": (with_rank_specific_values(all_to_all_v, group), (int(sizes[0].sum()),)),
        "batch_all_gather_v": (with_rank_specific_values(all_gather_v, group), (W,)),
    }


def check_gradients(rank: int, world: int, ranks: list[int]) -> list[str]:
    group = None if len(ranks) == world else dist.new_group(ranks)
    if rank not in ranks:
        return []
    W = len(ranks)
    passed = []
    for name, (function, shape) in collective_cases(group).items():
        X = torch.randn(W, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        assert torch.autograd.gradcheck(function, (X,), raise_exception=True), name
        passed.append(name)
    return passed


@pytest.mark.parametrize("world,ranks", [(3, [0, 2]), *slowly((2, [0, 1]), (3, [0, 1, 2]))])
def test_collective_gradients_equal_finite_differences(cluster: Cluster, world: int, ranks: list[int]) -> None:
    passed = cluster.run(world, check_gradients, ranks)
    assert all(len(passed[rank]) == 16 for rank in ranks)


def check_groups(rank: int, world: int) -> None:
    env = net.create_groups_from_world(2)
    assert (env.global_rank, env.global_size, env.group_count) == (rank, 4, 2)
    assert (env.data_rank, env.model_rank, env.model_size) == (rank // 2, rank % 2, 2)
    assert dist.get_process_group_ranks(env.model_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(env.data_group) == [rank % 2, rank % 2 + 2]
    assert net.create_groups_from_world(2) is env
    assert dist.get_process_group_ranks(net.create_groups_from_world(-4).model_group) == [0, 1, 2, 3]
    nested = net.create_groups_from_world(2, parent_group=env.data_group)
    assert nested.model_size == 1 and nested.global_size == 2
    assert net.get_world_size(net.create_standalone_group()) == 1
    assert net.simple_broadcast(torch.tensor([rank]), src=2).item() == 2
    maximum = net.simple_all_reduce(torch.tensor([rank]), group=env.data_group, op=dist.ReduceOp.MAX)
    assert maximum.item() == rank % 2 + 2
    top = net.simple_reduce_scatter(torch.arange(8) + rank, op=dist.ReduceOp.MAX)
    assert top.tolist() == [2 * rank + 3, 2 * rank + 4]
    assert net.simple_all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]
    net.barrier()
    for count in (3, 0, -3):
        with pytest.raises(ConfigError, match="do not divide"):
            net.create_groups_from_world(count)


def check_split_sizes_rejected(rank: int, world: int) -> None:
    """Each rank raises before any data is sent, and can continue."""
    x = torch.arange(3)
    with pytest.raises(ConfigError, match="3 sizes for 2 ranks"):
        net.batch_all_to_all_v([x], [1, 1, 1])
    with pytest.raises(ConfigError, match=r"tensors of \[3, 2\] elements; each must have 3"):
        net.batch_all_to_all_v([x, x[1:]], [1, 2])
    with pytest.raises(ConfigError, match=r"tensors of \[3\] elements; each must have 5"):
        net.batch_all_to_all_v([x], torch.tensor([1, 4]))
    with pytest.raises(ConfigError, match=r"tensors of \[3, 2\] elements; each must have 3"):
        net.batch_all_gather_v([x, x[1:]])
    # One rank sends nothing, the other receives nothing.
    (mine,), came = net.batch_all_to_all_v([x[:0] if rank else x], [0, 0] if rank else [0, 3])
    assert (mine.tolist(), came.tolist()) == (([0, 1, 2], [3, 0]) if rank else ([], [0, 0]))


def test_wrong_split_sizes_are_rejected_before_sending(cluster: Cluster) -> None:
    cluster.run(2, check_split_sizes_rejected)


def call_without_last_rank(rank: int, world: int, call: str) -> None:
    """The last rank does not call the collective, and ends after the other ranks have raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicate, "TUTEL_GLOBAL_TIMEOUT_SEC", 3.0)
        if rank == world - 1:
            assert communicate.as_group(None).board.read(wait_s=60.0) is not None
            return
        x = torch.ones(4)
        calls: dict[str, Callable[[], object]] = {
            "barrier": net.barrier,
            "broadcast": lambda: net.simple_broadcast(x),
            "all-reduce": lambda: net.simple_all_reduce(x, op=dist.ReduceOp.PRODUCT),
            "all-to-all": lambda: net.simple_all_to_all(x, background=True),
            "making groups": lambda: net.create_groups_from_world(2),
        }
        with pytest.raises(RankError, match=f"rank {rank}: {call}.* because rank {world - 1} did not join {call}: "):
            calls[call]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "making groups",
        *slowly("all-to-all", "barrier", "broadcast", "all-reduce"),
    ],
)
def test_timeout_error_names_missing_rank(cluster: Cluster, call: str) -> None:
    cluster.run(2, call_without_last_rank, call)


def broadcast_different_sizes(rank: int, world: int) -> None:
    with pytest.raises(RankError, match=r"call different operations: rank 0 calls broadcast of 3 .*; rank 1 calls bro"):
        net.simple_broadcast(torch.ones(3 + 500 * rank))


def test_different_broadcast_sizes_across_ranks_are_rejected(cluster: Cluster) -> None:
    cluster.run(2, broadcast_different_sizes)


def test_create_groups_from_world(cluster: Cluster) -> None:
    cluster.run(4, check_groups)


def test_world_of_one_needs_no_process_group() -> None:
    x = torch.randn(2, 3)
    env = net.create_groups_from_world(1)
    assert (env.global_size, env.is_distributed, env.model_group) == (1, False, None)
    assert net.get_world_size() == 1 and net.get_world_rank() == 0
    for same in (net.all_to_all(x, 1, 0), net.all_gather(x, 0), net.simple_all_reduce(x), net.zero_gather(x)):
        assert torch.equal(same, x)
    assert net.all_to_all(x, 1, 0, background=True)() is x
    assert net.simple_all_gather(torch.tensor(3)).dim() == 0
    net.barrier()


def train_distributed(rank: int, world: int, average: bool) -> list[Tensor]:
    """Three steps of Adam on shared parameters and one rank-local parameter."""
    torch.manual_seed(0)
    shared = [torch.nn.Parameter(torch.randn(3, 3)), torch.nn.Parameter(torch.randn(5))]
    mine = torch.nn.Parameter(torch.full((2,), float(rank)))
    mine._tutel_expert = True  # type: ignore[attr-defined]
    optimizer = net.TutelDistributedOptimizer([*shared, mine], average_shared=average).warp_local(
        torch.optim.Adam, lr=0.1
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = sum((p * torch.arange(p.numel()).view(p.shape).sub(2 + rank + step)).square().sum() for p in shared)
        (loss + (mine * (rank + 1)).square().sum()).backward()
        optimizer.step()
    assert sum(p.numel() for p in optimizer.virt_params) == -(-9 // world) + -(-5 // world)
    return [p.detach() for p in (*shared, mine)]


def train_reference(world: int, average: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shared = [torch.nn.Parameter(torch.randn(3, 3)), torch.nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.Adam(shared, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(world):
            for p in shared:
                loss = (p * torch.arange(p.numel()).view(p.shape).sub(2 + rank + step)).square().sum()
                (loss / (world if average else 1)).backward()
        optimizer.step()
    return [p.detach() for p in shared]


@pytest.mark.parametrize("average", [False, True])
def test_distributed_optimizer_equals_one_process(cluster: Cluster, average: bool) -> None:
    expected = train_reference(2, average)
    found = cluster.run(2, train_distributed, average)
    for first, second, _ in found:
        torch.testing.assert_close([first, second], expected)
    assert not torch.equal(found[0][2], found[1][2])  # an expert's parameters are rank-local
