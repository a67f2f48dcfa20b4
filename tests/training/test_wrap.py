"""PyTorch's wrappers around a real model: gradients equal those of the unwrapped loop, which equal one process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.engine import wrappers
from fusedmoe.errors import ConfigError
from fusedmoe.experts import add_adapters
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.training import (
    clip_grad_norm,
    data_parallel,
    distributed_data_parallel,
    expert_parameter_names,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    sync_gradients,
)
from fusedmoe.training.replicated_parameters import local_part
from tests.cluster import Cluster
from tests.marks import slowly
from tests.training.toy import ONE, Sizes

CONFIG = ModelConfig(
    layers=2, model_dim=8, heads=4, hidden=6, experts=4, k=2, capacity_factor=1.0, seq_len=5, bias=True, moe_every=2
)
WORLDS = [
    Sizes(2, ep=2),
    *slowly(Sizes(4, ep=2, esp=2, mp=2), Sizes(2, mp=2), Sizes(4, ep=2), Sizes(4, ep=4, mp=2)),
]


def _model(topology: Topology, seed: int = 5) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(CONFIG, topology, dtype=torch.float64)


def _batch(topology: Topology, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + topology.dp.index)
    tokens, targets = torch.randint(256, (2, 3, 5), generator=generator)
    return tokens, targets


def _backward(model: nn.Module, topology: Topology, number: int) -> None:
    loss = model(*_batch(topology, number))
    (loss.nats + 0.3 * loss.aux).backward()


def _plain(topology: Topology, batches: range) -> Transformer:
    model = _model(topology)
    for number in batches:
        _backward(model, topology, number)
    sync_gradients(model, topology)
    return model


def _compare(model: nn.Module, plain: nn.Module) -> None:
    """Compare the gradients of both models; FSDP's shards are gathered first."""
    others = dict(plain.named_parameters())
    assert others.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient, other = parameter.grad, others[name].grad
        assert gradient is not None and other is not None, name
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def _check_data_parallel(rank: int, world: int, sizes: Sizes) -> None:
    topology = sizes.topology()
    # Ranks that hold copies must agree on initial values, for any seeds.
    wrapped = distributed_data_parallel(_model(topology, seed=rank), topology)
    start = _model(topology)
    with torch.no_grad():
        for ours, theirs in zip(wrapped.module.parameters(), start.parameters(), strict=True):
            ours.copy_(theirs)
    _backward(wrapped, topology, 0)
    _compare(wrapped.module, _plain(topology, range(1)))
    sync_gradients(wrapped, topology)  # already wrapped: no effect
    _compare(wrapped.module, _plain(topology, range(1)))
    # Accumulation with a sync each time, then without one until the end.
    _backward(wrapped, topology, 1)
    _compare(wrapped.module, _plain(topology, range(2)))
    syncs: list[None] = []
    finish = wrapped._finish_backward
    wrapped._finish_backward = lambda: finish() or syncs.append(None)
    with wrapped.no_sync():
        _backward(wrapped, topology, 2)
    assert not syncs
    _backward(wrapped, topology, 3)
    assert len(syncs) == 1
    _compare(wrapped.module, _plain(topology, range(4)))
    wrapped.zero_grad()
    with wrapped.no_sync():
        _backward(wrapped, topology, 0)
    with torch.no_grad():
        wrapped(*_batch(topology, 7))
    _backward(wrapped, topology, 1)
    _compare(wrapped.module, _plain(topology, range(2)))


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_data_parallel_gradients_equal_plain_loop(cluster: Cluster, sizes: Sizes) -> None:
    cluster.run(sizes.world, _check_data_parallel, sizes)


def test_data_parallel_in_a_world_of_one() -> None:
    topology = Topology()
    wrapped = distributed_data_parallel(_model(topology), topology)
    with wrapped.no_sync():
        _backward(wrapped, topology, 0)
    _backward(wrapped, topology, 1)
    _compare(wrapped.module, _plain(topology, range(2)))
    assert fully_shard(wrapped.module, topology) is wrapped.module


class _Root(nn.Module):
    """Owns a sharded parameter, and may skip it in a forward."""

    shardings = {"own": {"ep": 0}}

    def __init__(self, value: float) -> None:
        super().__init__()
        self.own, self.dense = nn.Parameter(torch.full((2,), value)), nn.Parameter(torch.full((2,), value))
        self.register_buffer("state", torch.full((2,), value))

    def forward(self, x: Tensor, with_own: bool) -> Tensor:
        y = (x * self.dense).sum()
        return y + (x * self.own).sum() if with_own else y


def _check_sharded_root(rank: int, world: int) -> None:
    topology = Sizes(4, ep=2).topology()
    model = _Root(float(rank))
    assert expert_parameter_names(model) == {"own"}
    wrapped = distributed_data_parallel(model, topology)
    assert model.own.tolist() == [rank % 2] * 2, "the first holder's"
    assert model.dense.tolist() == [0.0, 0.0] and model.state.tolist() == [0.0, 0.0]
    # Only rank 0 uses its experts: the copy on rank 2 counts as zero, and the gradient of the other shard is 0.
    wrapped(torch.ones(2), rank == 0).backward()
    assert model.dense.grad.tolist() == [1.0, 1.0]
    assert model.own.grad.tolist() == ([0.25] * 2 if rank % 2 == 0 else [0.0] * 2)
    # A failed backward leaves no state that would prevent the next sync.
    model.zero_grad()
    y = wrapped(torch.ones(2), True)
    bad = y * 1.0
    bad.register_hook(lambda _: (_ for _ in ()).throw(ValueError("from a hook")))
    with pytest.raises(ValueError, match="from a hook"):
        bad.backward()
    y.backward()
    assert model.own.grad.tolist() == [0.5, 0.5]
    # Without its wrapper the model behaves as before.
    del wrapped, y, bad
    gc.collect()
    model.zero_grad()
    model(torch.full((2,), 3.0), True).backward()
    assert model.own.grad.tolist() == [3.0, 3.0]


def test_data_parallel_with_sharded_root_parameter(cluster: Cluster) -> None:
    cluster.run(4, _check_sharded_root)


def _check_copy_and_pickle(rank: int, world: int) -> None:
    topology = Sizes(2, ep=2).topology()
    wrapped = distributed_data_parallel(_model(topology), topology, gradient_as_bucket_view=True)
    _backward(wrapped, topology, 0)
    twin = copy.deepcopy(wrapped)
    if rank == 0:
        copy.deepcopy([wrapped])  # no other rank has a part in it
    assert twin.gradient_as_bucket_view
    for each, batches in ((wrapped, range(2)), (twin, range(1, 2))):  # copies of parameters are without gradients
        _backward(each, topology, 1)
        _compare(each.module, _plain(topology, batches))
    for ours, theirs in zip(twin.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    for each in (wrapped, wrapped.module, nn.Sequential(wrapped.module), topology, topology.ep):
        for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
            with pytest.raises(ConfigError, match=f"rank {rank}: cannot pickle.*state_dict.*save_checkpoint.*deepcopy"):
                save(each)


def test_wrapped_models_can_be_copied_but_not_pickled(cluster: Cluster) -> None:
    cluster.run(2, _check_copy_and_pickle)


def _check_fully_sharded(rank: int, world: int, sizes: Sizes, path: str, with_experts: bool) -> None:
    topology = sizes.topology()
    if with_experts:  # as other libraries name the axes
        mesh = init_device_mesh("cpu", (1, world // sizes.ep, sizes.ep), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
        topology = Topology.from_mesh(mesh, ep="ep")
    model = _model(topology)
    for block in model.blocks:
        fully_shard(block, topology, shard_experts=with_experts)
    fully_shard(model, topology, shard_experts=with_experts)
    experts = {name for name in expert_parameter_names(model) if sizes.ep * sizes.esp > 1}
    assert experts or sizes.ep * sizes.esp == 1
    for name, parameter in model.named_parameters():
        spread = topology.edp.size > 1 if with_experts and name in experts else name not in experts
        assert isinstance(parameter, DTensor) == (topology.dp.size > 1 and spread), name
        if with_experts and name in experts and spread:
            assert sorted(parameter.device_mesh.mesh.tolist()) == sorted(topology.edp.ranks)
    for number in range(2):
        _backward(model, topology, number)
    sync_gradients(model, topology)
    plain = _plain(topology, range(2))
    _compare(model, plain)
    for each in (model, plain):
        norm = clip_grad_norm(each, topology, 0.01)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        optimizer.step()
        if each is model:
            first = norm
            save_checkpoint(path, model, optimizer, topology)
    torch.testing.assert_close(first, norm, rtol=1e-10, atol=0)
    # Sharded to sharded, and sharded to plain.
    again = torch.optim.AdamW(model.parameters(), lr=0.3)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(path, model, again, topology)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        assert torch.equal(_whole(parameter), _whole(value))
    fresh = _model(topology, seed=9)
    load_checkpoint(path, fresh, torch.optim.AdamW(fresh.parameters()), topology)
    for (name, ours), theirs in zip(fresh.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_fully_shard_gradients_equal_plain_loop(cluster: Cluster, tmp_path: Path, sizes: Sizes) -> None:
    path = str(tmp_path / "checkpoint")
    cluster.run(sizes.world, _check_fully_sharded, sizes, path, False)
    _loads_on_one_rank(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, ep=2),
        *slowly(Sizes(2), Sizes(4, ep=2), Sizes(8, ep=2)),
    ],
    ids=str,
)
def test_fully_shard_with_experts_equals_plain_loop(cluster: Cluster, tmp_path: Path, sizes: Sizes) -> None:
    path = str(tmp_path / "checkpoint")
    cluster.run(sizes.world, _check_fully_sharded, sizes, path, True)
    _loads_on_one_rank(path)


def _check_few_experts(rank: int, world: int) -> None:
    """One expert on each rank and its replica on another: its second dimension is sharded where possible."""
    topology = Topology.from_sizes(ep=2)

    def layer(dtype: torch.dtype = torch.float64, **options: Any) -> fusedmoe.MoELayer:
        torch.manual_seed(3)
        gate, experts = fusedmoe.gates.TopK(2, k=1), fusedmoe.experts.FeedForward(5)
        return fusedmoe.MoELayer(4, gate, experts, topology=topology, dtype=dtype, **options)

    sharded, plain = fully_shard(layer(), topology, shard_experts=True), layer()
    splits = {name: part.placements for name, part in sharded.named_parameters() if name.startswith("experts.")}
    assert {split for (split,) in splits.values()} == {Shard(0), Shard(1)}
    x_SM = torch.randn(rank + 3, 4, dtype=torch.float64)
    for model in (sharded, plain):
        for _ in range(2):
            (model(x_SM).square().sum() + model.aux_loss).backward()
        sync_gradients(model, topology)
    _compare(sharded, plain)
    norms = [clip_grad_norm(model, topology, 0.1) for model in (sharded, plain)]
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
    _compare(sharded, plain)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        sharded, plain = fully_shard(layer(dtype), topology, shard_experts=True), layer(dtype)
        for model in (sharded, plain):
            model(x_SM.to(dtype)).square().mean().backward()
            sync_gradients(model, topology)
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert (_whole(ours.grad) - theirs.grad).norm() <= error * theirs.grad.norm(), dtype
    with pytest.raises(ConfigError, match="move between ranks"):
        fully_shard(layer(placement="fssdp"), topology, shard_experts=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="Update PyTorch"):
        patch.setattr(data_parallel, "shard_placement_maker", lambda mesh: None)
        fully_shard(layer(), topology, shard_experts=True)
    other = layer()
    torch.distributed.fsdp.fully_shard(other.experts, mesh=topology.expert_mesh["edp"])
    with pytest.raises(ConfigError, match="shard_experts=True"):
        sync_gradients(other, topology)


@pytest.mark.slow
def test_fully_shard_of_one_expert_per_rank(cluster: Cluster) -> None:
    cluster.run(4, _check_few_experts)


def _loads_on_one_rank(path: str) -> None:
    # The checkpoint of four sharded ranks is one of the model on one rank, with its optimizer's state.
    alone, model = Topology(), _model(Topology(), seed=9)
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(path, model, optimizer, alone)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert ONE.topology().size == 1


def _save_wrapped(rank: int, world: int, path: str) -> None:
    topology = Sizes(2, ep=2).topology()
    wrapped = distributed_data_parallel(_model(topology), topology)
    save_checkpoint(path, wrapped, torch.optim.AdamW(wrapped.parameters()), topology)


def test_checkpoint_of_wrapped_model_loads_on_one_rank(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, _save_wrapped, str(tmp_path / "c"))
    reference, alone = _model(Topology()), Topology()
    wrapped: Any = distributed_data_parallel(_model(alone, seed=9), alone)
    load_checkpoint(tmp_path / "c", wrapped, torch.optim.AdamW(wrapped.parameters()), alone)
    for ours, theirs in zip(wrapped.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _check_unused_parameter_error(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "left": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    wrapped = distributed_data_parallel(model, topology)
    wrapped(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction") as seen:
        wrapped(torch.ones(2, 3))
    assert type(seen.value) is RuntimeError
    assert topology.world.board.read() is None, "no rank is at fault"


def test_ddp_unused_parameter_error_is_preserved(cluster: Cluster) -> None:
    """An unused parameter does not count as a lost connection."""
    cluster.run(2, _check_unused_parameter_error)


# By step: the expert whose gradient overflows.
OVERFLOWS = {1: 3, 3: 0, 4: 2}


def _scaled_training(topology: Topology, way: str, replicas: range) -> tuple[list[float], dict[str, Tensor]]:
    """The loss scale after each of six steps, and all parameters at the end."""
    torch.manual_seed(5)
    gate, experts = fusedmoe.gates.TopK(experts=4, k=2), fusedmoe.experts.SwiGLU(6)
    layer = fusedmoe.MoELayer(8, gate, experts, topology=topology)
    model = nn.Sequential(nn.Linear(8, 8), layer).double()
    step, local, first = 0, 4 // topology.ep.size, topology.ep.index * 4 // topology.ep.size

    def overflow(gradient: Tensor) -> Tensor:
        expert = OVERFLOWS.get(step, -1) - first
        return gradient.index_fill(0, torch.tensor([expert]), torch.inf) if 0 <= expert < local else gradient

    layer.experts.w2.register_hook(overflow)
    run: Any = distributed_data_parallel(model, topology) if way == "wrapped" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    for step in range(6):
        for replica in replicas:
            generator = torch.Generator().manual_seed(100 * step + replica)
            x = torch.randn(10, 8, generator=generator, dtype=torch.float64)
            scaler.scale(run(x).square().mean() / len(replicas)).backward()
        sync_gradients(run, topology)
        scaler.unscale_(optimizer)
        clip_grad_norm(run, topology, 0.5)
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _check_scaled_training(rank: int, world: int, way: str) -> None:
    topology = Topology.from_sizes(ep=2, timeout_s=30.0)
    scales, held = _scaled_training(topology, way, range(rank, rank + 1))
    wanted_scales, wanted = _scaled_training(Topology(), way, range(world))
    assert scales == wanted_scales == [1024.0, 512.0, 512.0, 256.0, 128.0, 128.0]
    for name, value in held.items():
        whole = wanted[name].chunk(2)[rank] if "experts" in name else wanted[name]
        torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-14, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("way", ["synced", *slowly("wrapped")])
def test_expert_overflow_on_one_rank_skips_step_on_all(cluster: Cluster, way: str) -> None:
    cluster.run(2, _check_scaled_training, way)


def _check_sharded_overflow(rank: int, world: int) -> None:
    """Each rank has another part of a dense parameter, and other experts."""
    topology = Topology.from_sizes(ep=2, timeout_s=30.0)
    model = _model(topology)
    fully_shard(model, topology)
    for name, parameter in model.named_parameters():
        model.zero_grad()
        _backward(model, topology, 0)
        if rank == 1:
            local_part(parameter.grad).view(-1)[-1] = torch.nan
        sync_gradients(model, topology)
        bad = {own for own, one in model.named_parameters() if not local_part(one.grad).isfinite().all()}
        assert bad == {name}


@pytest.mark.slow
def test_overflow_in_fsdp_shard_skips_step_on_all_ranks(cluster: Cluster) -> None:
    cluster.run(2, _check_sharded_overflow)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def _check_torch_wrappers(rank: int, world: int) -> None:
    """PyTorch's wrappers treat experts of different ranks as replicas; around replicas they are right."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for axis in ("ep", "esp"):
        topology = Topology.from_sizes(**{axis: 2}, timeout_s=30)

        def block(topology: Topology = topology) -> nn.Module:
            torch.manual_seed(3)
            gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.FeedForward(6)
            return nn.Sequential(nn.Linear(4, 4), fusedmoe.MoELayer(4, gate, experts, topology=topology))

        def wrapped(model: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(model)

        def outer(model: nn.Module) -> nn.Module:
            torch.distributed.fsdp.fully_shard(model[0])  # the root wraps the rest
            return torch.distributed.fsdp.fully_shard(model)

        refusal = r"experts of this layer are this rank's own.*fusedmoe.training"
        model = block()
        model(x)  # before it is wrapped it counts as plain
        with pytest.raises(ConfigError, match=refusal):
            wrapped(model)
        sharded = outer(block())
        for _ in range(2):
            with pytest.raises(ConfigError, match=refusal):
                sharded(x)
        for wrap in (wrapped, outer):
            wrap(block(Topology()))(x).sum().backward()
        blocks = fusedmoe.pipeline([(Twice(), block()[1])], degrees=(2, 2))
        with pytest.raises(ConfigError, match="experts of this layer are this rank's own"):
            wrapped(blocks)(x[:, None])
        for own in (distributed_data_parallel, fully_shard):
            own(block(), topology)(x).sum().backward()
            adapted = block()
            add_adapters(adapted[1].experts, rank=2)  # over esp some of its factors are replicated on all ranks
            own(adapted, topology)(x).sum().backward()


def test_torch_wrappers_reject_sharded_experts(cluster: Cluster) -> None:
    cluster.run(2, _check_torch_wrappers)


def _check_ddp_around_later_experts(rank: int, world: int) -> None:
    """Parameters that become experts after DistributedDataParallel has begun to reduce them."""
    topology, x = Topology.from_sizes(ep=2, timeout_s=30), torch.randn(3, 4)
    refusal = r"experts of this layer are this rank's own.*DistributedDataParallel"

    def layer(experts: Any) -> nn.Module:
        return fusedmoe.MoELayer(4, fusedmoe.gates.TopK(4, k=2), experts, topology=topology)

    def custom(modules: list[nn.Module]) -> nn.Module:
        made = iter(modules)
        return layer(fusedmoe.experts.Custom(lambda *_: next(made)))

    for is_recorded in (True, False):
        modules: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        wrapper = nn.parallel.DistributedDataParallel(nn.Sequential(*modules))
        if not is_recorded:  # like a wrapper made before the import of fusedmoe
            del wrappers._reduced_ids[wrapper]
            wrappers._find_earlier_ddp()
        late = custom(modules)
        with pytest.raises(ConfigError, match=refusal):
            late(x)
        del wrapper  # an unwrapped model works again
        late(x)

    # Experts added to a wrapped module later are not reduced.
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    wrapper = nn.parallel.DistributedDataParallel(model)
    model[1] = layer(fusedmoe.experts.FeedForward(6))
    wrapper(x).sum().backward()

    # PyTorch also reduces parameters that it delays.
    model = nn.Sequential(nn.Linear(4, 4), layer(fusedmoe.experts.FeedForward(6)))
    delayed = ((name, parameter) for name, parameter in model.named_parameters() if "experts" in name)
    with pytest.raises(ConfigError, match=refusal):
        nn.parallel.DistributedDataParallel(
            model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[0].weight
        )


def test_ddp_rejects_experts_added_later(cluster: Cluster) -> None:
    cluster.run(2, _check_ddp_around_later_experts)


def _check_torch_wrappers_of_compiled_layers(rank: int, world: int) -> None:
    x, topology = torch.randn(3, 4), Topology.from_sizes(ep=2, timeout_s=60)

    def block() -> nn.Module:
        torch.manual_seed(3)
        gate, experts = fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.FeedForward(6)
        model = nn.Sequential(nn.Linear(4, 4), fusedmoe.MoELayer(4, gate, experts, topology=topology))
        model[1].compile(backend="aot_eager", fullgraph=True)
        return model

    for wrap in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.fully_shard):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="experts of this layer are this rank's own"):
            wrap(block())(x)
    for own in (distributed_data_parallel, fully_shard):
        torch._dynamo.reset()
        own(block(), topology)(x).sum().backward()


@pytest.mark.slow  # it imports the compiler
def test_torch_wrappers_reject_compiled_sharded_layers(cluster: Cluster) -> None:
    cluster.run(2, _check_torch_wrappers_of_compiled_layers)
