"""Collectives: gradients by finite differences over all ranks' inputs, on the world and on a part of it."""

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


def own(X: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's input out of all ranks' inputs, which every rank holds; its gradient reaches them all."""
    return net.allreduce_backward(X, group=group)[net.get_world_rank(group)]


def together(y: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' results, on every rank, which goes on to compute the same from them."""
    return net.all_gather(y[None], 0, group=group)


def different(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Of each rank's own input and with a result of its own."""
    return lambda X: together(function(own(X, group)), group)


def replicated_out(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Of each rank's own input, with a result that is the same on all."""
    return lambda X: function(own(X, group))


def replicated_in(function: Function, group: dist.ProcessGroup | None) -> Function:
    """Of an input that is the same on all."""
    return lambda X: together(function(X[0]), group)


def functions(group: dist.ProcessGroup | None) -> dict[str, tuple[Function, tuple[int, ...]]]:
    rank, W = members(group)
    sizes = torch.tensor([[1, 2], [0, 3]]) if W == 2 else torch.ones(W, W, dtype=torch.long)

    def scaled(x: Tensor) -> Tensor:  # ranks do different things with what they all have
        return net.allreduce_backward(x, group=group) * (rank + 1)

    def all_to_all_v(x: Tensor) -> Tensor:
        (out, other), _ = net.batch_all_to_all_v([x, 2 * x], sizes[rank], group=group)
        return torch.nn.functional.pad(out + other, (0, 6 - len(out)))

    def all_gather_v(x: Tensor) -> Tensor:
        return net.batch_all_gather_v([x[: rank + 1]], group=group)[0][0]

    a2a = partial(net.all_to_all, group=group)
    return {
        "all_to_all 1 0": (different(lambda x: a2a(x, 1, 0), group), (W, 2, 2)),
        "all_to_all 0 1": (different(lambda x: a2a(x, 0, 1), group), (2, W, 1)),
        "all_to_all 2 1": (different(lambda x: a2a(x, 2, 1), group), (1, W, 2)),
        "all_to_all background": (different(lambda x: a2a(x, 1, 0, background=True)(), group), (W, 2)),
        "all_to_all 2dh": (different(lambda x: a2a(x, 1, 0, use_2dh=True), group), (W, 2)),
        "all_to_all_single": (different(partial(net.all_to_all_single, group=group), group), (2 * W, 1)),
        "all_gather": (replicated_out(lambda x: net.all_gather(x, 1, group=group), group), (2, 2)),
        "all_gather fused": (different(lambda x: net.all_gather(x, 0, fused=True, group=group), group), (2, 2)),
        "reduce_scatter": (different(lambda x: net.reduce_scatter(x, 1, group=group), group), (2, W)),
        "spatial_split": (replicated_in(lambda x: net.spatial_split(x, 1, group=group), group), (2, W)),
        "zero_gather": (different(lambda x: net.zero_gather(x, [3, W - 1], group=group), group), (3,)),
        "zero_scatter": (
            replicated_in(lambda x: net.zero_scatter(x, partial(net.spatial_split, dim=0), group)[0], group),
            (3,),
        ),
        "allreduce_forward": (replicated_out(partial(net.allreduce_forward, group=group), group), (2, 2)),
        "allreduce_backward": (replicated_in(scaled, group), (2, 2)),
        "batch_all_to_all_v": (different(all_to_all_v, group), (int(sizes[0].sum()),)),
        "batch_all_gather_v": (different(all_gather_v, group), (W,)),
    }


def check_gradients(rank: int, world: int, ranks: list[int]) -> list[str]:
    group = None if len(ranks) == world else dist.new_group(ranks)
    if rank not in ranks:
        return []
    W = len(ranks)
    passed = []
    for name, (function, shape) in functions(group).items():
        X = torch.randn(W, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        assert torch.autograd.gradcheck(function, (X,), raise_exception=True), name
        passed.append(name)
    return passed


@pytest.mark.parametrize("world,ranks", [(3, [0, 2]), *slowly((2, [0, 1]), (3, [0, 1, 2]))])
def test_gradients(cluster: Cluster, world: int, ranks: list[int]) -> None:
    passed = cluster.run(world, check_gradients, ranks)
    assert all(len(passed[rank]) == 16 for rank in ranks)


def groups(rank: int, world: int) -> None:
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


def sizes_that_do_not_fit(rank: int, world: int) -> None:
    """Each rank is told by itself, before anything has been sent: all can go on."""
    x = torch.arange(3)
    with pytest.raises(ConfigError, match="3 sizes for 2 ranks"):
        net.batch_all_to_all_v([x], [1, 1, 1])
    with pytest.raises(ConfigError, match=r"tensors of \[3, 2\] elements; each must have 3"):
        net.batch_all_to_all_v([x, x[1:]], [1, 2])
    with pytest.raises(ConfigError, match=r"tensors of \[3\] elements; each must have 5"):
        net.batch_all_to_all_v([x], torch.tensor([1, 4]))
    with pytest.raises(ConfigError, match=r"tensors of \[3, 2\] elements; each must have 3"):
        net.batch_all_gather_v([x, x[1:]])
    # One rank sends nothing, the other keeps nothing.
    (mine,), came = net.batch_all_to_all_v([x[:0] if rank else x], [0, 0] if rank else [0, 3])
    assert (mine.tolist(), came.tolist()) == (([0, 1, 2], [3, 0]) if rank else ([], [0, 0]))


def test_sizes_that_do_not_fit(cluster: Cluster) -> None:
    cluster.run(2, sizes_that_do_not_fit)


def late(rank: int, world: int, call: str) -> None:
    """The last rank does not come, and ends when the others have said so."""
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
        with pytest.raises(RankError, match=f"rank {rank}: {call}.* because rank {world - 1} failed"):
            calls[call]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "making groups",
        *slowly("all-to-all", "barrier", "broadcast", "all-reduce"),
    ],
)
def test_who_does_not_come_is_named(cluster: Cluster, call: str) -> None:
    cluster.run(2, late, call)


def sizes_that_differ(rank: int, world: int) -> None:
    with pytest.raises(RankError, match=r"call different operations: rank 0 calls broadcast of 3 .*; rank 1 calls bro"):
        net.simple_broadcast(torch.ones(3 + 500 * rank))


def test_sizes_that_differ(cluster: Cluster) -> None:
    cluster.run(2, sizes_that_differ)


def test_groups(cluster: Cluster) -> None:
    cluster.run(4, groups)


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


def train(rank: int, world: int, average: bool) -> list[Tensor]:
    """Three steps of Adam on shared parameters and one of the rank's own."""
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


def plain(world: int, average: bool) -> list[Tensor]:
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
def test_distributed_optimizer(cluster: Cluster, average: bool) -> None:
    expected = plain(2, average)
    found = cluster.run(2, train, average)
    for first, second, _ in found:
        torch.testing.assert_close([first, second], expected)
    assert not torch.equal(found[0][2], found[1][2])  # an expert's parameters are each rank's own
