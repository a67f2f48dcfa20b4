"""Gradients over ranks, and their norm, equal those of the whole model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedmoe
from fusedmoe import training
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training import broadcast_parameters, clip_grad_norm, replicated_parameters, sync_gradients
from tests.cluster import Cluster
from tests.marks import slowly
from tests.training.host_reads import HostReads, fake_gpu
from tests.training.toy import ONE, Sizes, Toy, names, part, sharding, whole

WORLDS = [
    Sizes(2, ep=2),
    Sizes(4, ep=2, esp=2, mp=2),
    *slowly(Sizes(2, mp=2), Sizes(4), Sizes(4, ep=2, mp=2), Sizes(4, esp=2, mp=4), Sizes(4, ep=4)),
]


def _has_gradient(name: str, rank: int) -> bool:
    """Some parameters have a gradient on some ranks only, one on none."""
    if name in ("experts.w2", "dense.frozen"):
        return False
    return not (name in ("attention.rows", "experts.b2") and rank % 2) and not ("list.3" in name and rank < 2)


def _copies(name: str, sizes: Sizes, rank: int) -> list[int]:
    """Ranks whose shard of `name` equals this rank's, by the definition of the rank layout."""
    own = {axis: place for axis, place in sizes.places(rank).items() if axis in sharding(name)}
    return [other for other in range(sizes.world) if own.items() <= sizes.places(other).items()]


def _expected(name: str, sizes: Sizes, rank: int) -> torch.Tensor | None:
    """(1/DP) times the sum over the ranks that hold a copy; None where no rank has a gradient for any part."""
    named = "custom" in name
    if not any(_has_gradient(name, other) for other in (_copies(name, sizes, rank) if named else range(sizes.world))):
        return None
    total = part(torch.zeros_like(whole(name, "gradient")), name, sizes, rank)
    for other in _copies(name, sizes, rank):
        if _has_gradient(name, other):
            total += part(whole(name, "gradient", other), name, sizes, other)
    return total / sizes.dp


def _give_gradients(model: Toy, sizes: Sizes, rank: int) -> None:
    for name, parameter in model.named_parameters():
        if _has_gradient(name, rank):
            parameter.grad = part(whole(name, "gradient", rank), name, sizes, rank).to(parameter.dtype)


def _sync(rank: int, world: int, sizes: Sizes, bucket_bytes: int) -> dict[str, tuple[Any, Any]]:
    topology, model = sizes.topology(), Toy(sizes, rank, custom=True)
    _give_gradients(model, sizes, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_parameters, "BUCKET_BYTES", bucket_bytes)
        sync_gradients(model, topology)
    return {name: (p.grad, _expected(name, sizes, rank)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_gradient_is_sum_over_copies_divided_by_dp(cluster: Cluster, sizes: Sizes) -> None:
    bucket_bytes = 56 if sizes.ep == 2 else 2**20  # 7 elements: tensors end inside buckets, buckets inside tensors
    for result in cluster.run(sizes.world, _sync, sizes, bucket_bytes):
        assert len(result) > 9
        for name, (gradient, expected) in result.items():
            assert (gradient is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-15, msg=name)


def test_world_of_one_keeps_gradients() -> None:
    model = Toy()
    model.set_gradients(ONE, 0, 0)
    model.dense.weight.grad = None
    before = {name: p.grad for name, p in model.named_parameters()}
    sync_gradients(model, Topology())
    assert all(p.grad is before[name] for name, p in model.named_parameters())


class _Odd(nn.Module):
    """Gradients with every memory layout."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.transposed, self.expanded, self.strided, self.plain = (
            nn.Parameter(torch.zeros(3, 4, dtype=dtype)) for _ in range(4)
        )


def _gradients_of_all_layouts(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    topology, model = Sizes(world).topology(), _Odd(dtype)
    drawn = [torch.randn(world, 3, 4, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    expanded = drawn[1][:, :1].expand(world, 3, 4)
    model.transposed.grad = drawn[0][rank].t().contiguous().t()
    model.expanded.grad = expanded[rank]
    model.strided.grad = torch.stack([drawn[2][rank], torch.zeros(3, 4, dtype=dtype)], 2)[..., 0]
    model.plain.grad = drawn[3][rank].clone()
    assert not any(p.grad.is_contiguous() for p in list(model.parameters())[:3])
    sync_gradients(model, topology)
    wanted = zip(("transposed", "expanded", "strided", "plain"), (drawn[0], expanded, *drawn[2:]), strict=True)
    return {name: (getattr(model, name).grad, values.double().mean(0)) for name, values in wanted}


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float64, torch.float32)], ids=str)
def test_sync_of_any_layout_and_dtype_rounds_once(cluster: Cluster, dtype: torch.dtype) -> None:
    first, second = cluster.run(4, _gradients_of_all_layouts, dtype), cluster.run(4, _gradients_of_all_layouts, dtype)
    for name, (gradient, exact) in first[0].items():
        assert gradient.dtype == dtype
        # Sums of four in bfloat16 would round three times.
        torch.testing.assert_close(gradient, exact.to(dtype), rtol=0 if dtype == torch.bfloat16 else 1e-7, atol=1e-7)
        for result in (*first, *second):
            assert torch.equal(result[name][0], gradient), "the same bits on every rank, every time"


def _sync_error(rank: int, world: int, what: str) -> str:
    topology, model = Sizes(world).topology(), nn.Embedding(4, 3, sparse=what == "sparse" and rank == 1)
    model(torch.tensor([rank])).sum().backward()
    wrapped = DistributedDataParallel(model) if what == "wrapped" else model
    with pytest.raises(ConfigError) as error:
        sync_gradients(wrapped, topology)
    return str(error.value)


def test_sparse_gradients_and_ddp_are_rejected_on_all_ranks(cluster: Cluster) -> None:
    for rank, text in enumerate(cluster.run(2, _sync_error, "sparse")):
        assert f"rank {rank}: gradient all-reduce" in text and "weight is sparse" in text and "sparse=False" in text
    for text in cluster.run(2, _sync_error, "wrapped"):
        assert "fusedmoe.training.distributed_data_parallel" in text


def _skipped_parameters(rank: int, world: int, sizes: Sizes) -> list[tuple[set[str], list[str], float]]:
    """Parameters that each rank's scaler skips, with one non-finite element of each parameter on one of its ranks."""
    topology, model = sizes.topology(), Toy(sizes, rank, custom=True)
    mine, results = dict(model.named_parameters()), []
    every = [name for name in names(ONE, 0, custom=True) if name != "dense.frozen"]
    for number, name in enumerate(every):
        optimizers = {own: torch.optim.SGD([parameter]) for own, parameter in mine.items() if own != "dense.frozen"}
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        for own in optimizers:
            mine[own].grad = part(whole(own, "gradient", rank), own, sizes, rank)
        holds = name in mine and bool(mine[name].numel())
        everyone = all_gather_object(topology.world, holds)
        if rank == [other for other, there in enumerate(everyone) if there][-1]:
            mine[name].grad.view(-1)[-1] = (float("inf"), float("-inf"), float("nan"))[number % 3]
        sync_gradients(model, topology)
        for optimizer in optimizers.values():
            scaler.unscale_(optimizer)
        found = {own for own, optimizer in optimizers.items() if _skips(scaler, optimizer)}
        scaler.update()
        held = [own for own in optimizers if mine[own].numel()]
        results.append(({"custom" if "custom" in own else own for own in found}, held, scaler.get_scale()))
    return results


def _skips(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    scaler.step(optimizer)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    return all(map(torch.equal, before, after)) and any(p.numel() for p in after)


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_loss_scaler_skips_same_parameters_as_one_process(cluster: Cluster, sizes: Sizes) -> None:
    results = cluster.run(sizes.world, _skipped_parameters, sizes)
    every = [name for name in names(ONE, 0, custom=True) if name != "dense.frozen"]
    for found in results:
        for name, (skipped, held, scale) in zip(every, found, strict=True):
            assert scale == 4.0, name
            name = "custom" if "custom" in name else name
            if name in held or name == "custom":
                assert skipped == {name}
            else:  # a rank with no element of it
                assert len(skipped) == 1


def _clip_gradients(rank: int, world: int, sizes: Sizes, max_norm: float) -> tuple[Any, dict[str, Any]]:
    topology, model = sizes.topology(), Toy(sizes, rank, custom=sizes.esp == 1)
    model.set_gradients(sizes, rank, 0)
    model.experts.w2.grad = None
    norm = clip_grad_norm(model, topology, max_norm)
    return norm, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("sizes", "max_norm"),
    [
        (ONE, 1.5),
        (Sizes(4, ep=2, esp=2, mp=2), 1.5),
        (Sizes(4, ep=2, mp=2), 1e3),
        *slowly((Sizes(4, esp=2, mp=4), 1.5)),
    ],
    ids=str,
)
def test_norm_and_clipped_gradients_equal_whole_model(cluster: Cluster, sizes: Sizes, max_norm: float) -> None:
    reference = Toy(custom=sizes.esp == 1)
    reference.set_gradients(ONE, 0, 0)
    reference.experts.w2.grad = None
    exact_norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    whole_gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert 1.5 < exact_norm < 1e3
    results = (
        [_clip_gradients(0, 1, sizes, max_norm)]
        if sizes == ONE
        else cluster.run(sizes.world, _clip_gradients, sizes, max_norm)
    )
    for rank, (norm, gradients) in enumerate(results):
        torch.testing.assert_close(norm, exact_norm, rtol=1e-13, atol=0)
        assert torch.equal(norm, results[0][0])
        for name, gradient in gradients.items():
            if whole_gradients[name] is None:
                assert gradient is None
            else:
                expected = part(whole_gradients[name], name, sizes, rank)
                torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=0)


def test_clipping_of_bfloat16_missing_and_infinite_gradients() -> None:
    alone, model = Topology(), nn.Linear(300, 300).bfloat16()
    assert clip_grad_norm(model, alone, 1.0) == 0.0
    model.weight.grad = torch.full((300, 300), 1e-2, dtype=torch.bfloat16)
    exact = model.weight.grad.double().norm()
    torch.testing.assert_close(clip_grad_norm(model, alone, float("inf")), exact, rtol=2e-4, atol=0)
    model.weight.grad[0, 0] = float("inf")
    assert torch.isinf(clip_grad_norm(model, alone, 1.0))


@pytest.mark.parametrize("sizes", [Sizes(2, ep=2), Sizes(4, ep=2, mp=2)], ids=str)
def test_sync_waits_for_device_once_and_clip_never(cluster: Cluster, sizes: Sizes) -> None:
    for synced, clipped in cluster.run(sizes.world, _count_device_waits, sizes):
        assert synced == 1 and clipped == 0


def _count_device_waits(rank: int, world: int, sizes: Sizes) -> tuple[int, int]:
    """Calls that wait for the device in a sync and in a clip."""
    topology, model = sizes.topology(), Toy(sizes, rank, custom=True)
    for _ in range(2):  # the first two syncs read values to compare them
        sync_gradients(model, topology)
    _give_gradients(model, sizes, rank)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        tolist = torch.Tensor.tolist
        read: list[int] = []
        patch.setattr(torch.Tensor, "tolist", lambda self: (read.append(self.numel()), tolist(self))[1])
        for step in (lambda: sync_gradients(model, topology), lambda: clip_grad_norm(model, topology, 1.0)):
            read.clear()
            with HostReads() as reads:
                step()
            found.append(len(read) + reads.count)
    return found[0], found[1]


def test_clipping_on_one_gpu_never_waits_for_device() -> None:
    with fake_gpu() as reads:
        model = nn.ParameterList(torch.empty(size, device="cuda") for size in (30, 20, 7))
        for parameter in model:
            parameter.grad = torch.empty_like(parameter)
        norm = clip_grad_norm(model, Topology(), 1.0)
        assert norm.is_cuda and norm.dtype == torch.float64
        assert reads.count == 0
        norm.cpu()
        assert reads.count == 1  # the counter detects it


def test_clipping_scales_half_precision_by_float32_scale() -> None:
    """The scale has float32 precision, and scalars are scaled too."""
    torch.manual_seed(3)  # a scale that bfloat16 represents exactly could not distinguish the two
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(50).bfloat16()), nn.Parameter(torch.zeros(()).half())
    model.a.grad, model.b.grad = torch.randn(50).bfloat16(), torch.randn(()).half()
    a, b = model.a.grad.float(), model.b.grad.float()
    norm = clip_grad_norm(model, Topology(), 0.37)
    scale = (0.37 / (norm + 1e-6)).float()
    assert torch.equal(model.a.grad, (a * scale).bfloat16()) and torch.equal(model.b.grad, (b * scale).half())
    assert not torch.equal(model.a.grad, (a * scale.bfloat16()).bfloat16())


def _broadcast(rank: int, world: int, sizes: Sizes) -> dict[str, bool]:
    topology, model = sizes.topology(), Toy(sizes, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    model.dense.bias += rank
    model.dense.register_buffer("flags", torch.tensor([rank == 0, True]))
    broadcast_parameters(model, topology)
    same = {
        name: torch.equal(p, part(whole(name, "value") + _copies(name, sizes, rank)[0], name, sizes, rank))
        for name, p in model.named_parameters()
    }
    return same | {"bias": torch.equal(model.dense.bias, torch.arange(3.0)), "flags": bool(model.dense.flags.all())}


def test_broadcast_copies_values_of_first_holder(cluster: Cluster) -> None:
    for result in cluster.run(4, _broadcast, Sizes(4, ep=2, mp=2)):
        assert all(result.values()), result


def _check_differently_seeded_copies(rank: int, world: int, sizes: Sizes) -> None:
    """Different seeds or different steps raise in the first two syncs, and no longer after the fix."""
    topology = sizes.topology()

    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        gate, experts = fusedmoe.gates.TopK(4, 2), fusedmoe.experts.SwiGLU(6)
        layer = fusedmoe.MoELayer(8, gate, experts, topology=topology, mp_input="split")
        model = nn.Sequential(nn.Linear(8, 8), layer)
        model.register_parameter("own", nn.Parameter(torch.tensor(float(rank)), requires_grad=False))
        return model

    model = made(rank)
    for _ in range(2):
        with pytest.raises(fusedmoe.RankError) as error:
            sync_gradients(model, topology)
        assert "0.weight should be a copy" in str(error.value) and "broadcast_parameters" in str(error.value)
        assert ", another on ".join(f"ranks {[other]}" for other in range(world)) in str(error.value)
    frozen = model[0].requires_grad_(False)
    with pytest.raises(fusedmoe.RankError, match=r"1\.gate\.\w+ should be a copy"):
        sync_gradients(model, topology)
    frozen.requires_grad_(True)
    broadcast_parameters(model, topology)
    model.own.fill_(rank)  # frozen parameters may differ
    sync_gradients(model, topology)
    with torch.no_grad():
        model[0].weight.mul_(1 + rank)  # as a step scaled by a rank-local norm
    with pytest.raises(fusedmoe.RankError, match=r"0\.weight should be a copy.* It was equal before: steps differ"):
        sync_gradients(model, topology)
    broadcast_parameters(model, topology)
    model.own.fill_(rank)
    sync_gradients(copy.deepcopy(model) if rank == 1 else model, topology)  # compared on one rank, so on all
    sync_gradients(model, topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_parameters, "compare_replicas", None)
        sync_gradients(model, topology)
    for seed, wrong in ((5, False), (5 + (rank == world - 1), True)):
        model, holders = made(5), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            layer_expert = next(iter(model[1].experts.parameters()))
            layer_expert += torch.randn((), generator=holders) + topology.ep.index
        if wrong and topology.edp.size > 1:
            with pytest.raises(fusedmoe.RankError, match=r"1\.experts\.\w+ should be a copy"):
                sync_gradients(model, topology)
        else:
            sync_gradients(model, topology)
    with pytest.raises(fusedmoe.RankError, match="should be a copy"):
        training.distributed_data_parallel(made(rank), topology, init_sync=False)
    sync_gradients(training.distributed_data_parallel(made(rank), topology).module, topology)


@pytest.mark.parametrize("sizes", [Sizes(2), *slowly(Sizes(2, ep=2), Sizes(4, ep=2, mp=2))], ids=str)
def test_different_initial_copies_are_reported(cluster: Cluster, sizes: Sizes) -> None:
    cluster.run(sizes.world, _check_differently_seeded_copies, sizes)


def build(topology: Topology | None, mp_input: str) -> nn.Module:
    torch.manual_seed(5)
    layer = fusedmoe.MoELayer(
        8,
        fusedmoe.gates.TopK(experts=4, k=2, aux={}),  # no drops, and no losses that depend on slicing
        fusedmoe.experts.SwiGLU(8),
        shared=fusedmoe.experts.FeedForward(4),
        topology=topology,
        mp_input=mp_input,  # type: ignore[arg-type]
    )
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)).double()


def data(replica: int) -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))


def gradients(rank: int, world: int, ep: int, mp: int, wrapped: bool) -> dict[str, Tensor]:
    topology = Topology.from_sizes(ep=ep, mp=mp)
    model = build(topology, "replicated")
    x = data(topology.dp.index)
    if wrapped:
        wrapper = training.distributed_data_parallel(model, topology, mp_loss="replicated")
        wrapper(x).square().mean().backward()
    else:
        model(x).square().mean().backward()
        training.sync_gradients(model, topology, mp_loss="replicated")
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize("wrapped", [True, *slowly(False)])
@pytest.mark.parametrize(("world", "ep", "mp"), [(4, 2, 2), *slowly((2, 1, 2), (4, 4, 4))])
def test_layer_gradients_equal_one_process(cluster: Cluster, world: int, ep: int, mp: int, wrapped: bool) -> None:
    whole = build(None, "replicated")
    torch.stack([whole(data(replica)).square().mean() for replica in range(world // mp)]).mean().backward()
    for rank, found in enumerate(cluster.run(world, gradients, ep, mp, wrapped)):
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            expected = parameter.grad
            if name.startswith("1.experts."):
                expected = expected.chunk(ep)[rank % ep]
            error = (found[name] - expected).norm() / expected.norm().clamp(min=1e-6)  # an expert may be idle
            assert error < 1e-10, (rank, name, float(error))


def test_unknown_divisor_convention_is_rejected() -> None:
    model = nn.Linear(2, 2)
    replica = training.replicated_parameters.list_replicas(model, Topology())[0]
    with pytest.raises(fusedmoe.ConfigError, match="choose summands or replicated"):
        training.replicated_parameters.gradient_divisor(replica, Topology(), "shared")  # type: ignore[arg-type]
