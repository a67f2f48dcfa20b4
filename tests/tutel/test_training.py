"""Tutel's layers under `fusedmoe.training`: results equal the whole model in one process, or the layer is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import training
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.tutel import moe, net
from fusedmoe.tutel.checkpoint import split
from tests.cluster import Cluster

D, H = 8, 12


class Stacked(nn.Module):
    """One matrix and one vector tensor for all local experts, and a count of processed rows."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_experts_per_device, model_dim, model_dim))
        self.b = nn.Parameter(torch.randn(num_experts_per_device, model_dim))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        return torch.tanh(x @ self.w + self.b[:, None])


class Modules(nn.Module):
    """A module for each local expert, with parameter names that lack the expert index."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(model_dim, model_dim) for _ in range(num_experts_per_device))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        return torch.stack([module(rows) for module, rows in zip(self.each, x, strict=True)])


class Slices(nn.Module):
    """Rank-sharded experts that gather their slices; they may declare their split."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int, says: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_experts_per_device, model_dim // sharded_count, model_dim))
        if says:
            self.shardings = {"w": {"ep": 0, "esp": 1}}

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        w = self.w
        if ctx.sharded_count > 1:
            place = net.get_world_rank(ctx.group) // ctx.sharded_count
            w = net.zero_gather(w, group=ctx.group).view(ctx.num_global_experts, -1, D)[place : place + 1]
        return torch.tanh(x @ w)


class Case(NamedTuple):
    """Experts of a layer, its group, and the axes of the topology for it."""

    kind: str | Callable[..., nn.Module]
    count: float
    world: int = 2
    ep: int = 1
    esp: int = 1
    groups: int = 1
    strided: bool = False
    degree: int = 1
    options: dict[str, Any] = {}

    def topology(self) -> Topology:
        if self.strided:
            mesh = init_device_mesh("cpu", (self.ep, self.world // self.ep), mesh_dim_names=("outer", "inner"))
            return Topology.from_mesh(mesh, ep="outer", timeout_s=30.0)
        return Topology.from_sizes(ep=self.ep, esp=self.esp, timeout_s=30.0)

    def group(self) -> Any:
        env = net.create_groups_from_world(self.groups)
        return env.data_group if self.strided else env.model_group

    def model(self, group: Any, count: float) -> nn.Sequential:
        """Two layers of experts between dense ones. Every rank draws different experts."""
        custom = callable(self.kind)
        experts = (
            {"type": "custom", "module": self.kind} if custom else {"type": self.kind, "hidden_size_per_expert": H}
        )
        experts |= {"num_experts_per_device": count, **self.options}
        torch.manual_seed(5)
        gate = {"type": "top", "k": min(2, self.experts), "capacity_factor": 0.0}
        seeds = (1, 2 + dist.get_rank(), 1)
        layers = (moe.moe_layer(gate, D, experts, group=group, seeds=seeds) for _ in range(2))
        out = self.options.get("output_dim", D)
        model = nn.Sequential(nn.Linear(D, D), next(layers), nn.Linear(out, D), next(layers))
        for layer in (model[1], model[3]):
            layer.adaptive_degree = layer._valid_r(self.degree if layer.world_size > 1 else 1)
        return model.double()

    @property
    def experts(self) -> int:
        ranks = self.ep * self.esp
        return ranks * int(self.count) if self.count > 0 else ranks // -int(self.count)


FFN, LLAMA = "ffn", "llama_ffn"
CASES = {
    "ffn": Case(FFN, 2, ep=2),
    "llama": Case(LLAMA, 1, ep=2, degree=0),
    "stacked": Case(Stacked, 2, ep=2),
    "shared ffn": Case(FFN, -2, esp=2, options={"has_fc1_bias": False}),
    "padded biases": Case(FFN, -4, 4, esp=4, options={"output_dim": 6}),
    "shared llama": Case(LLAMA, -2, esp=2),
    "copies": Case(FFN, 2, groups=2),
    "ffn in groups": Case(FFN, 1, 4, ep=2, groups=2),
    "ffn across groups": Case(FFN, 2, 4, ep=2, groups=2, strided=True, degree=0),
    "shared of several": Case(FFN, -2, 4, ep=2, esp=2, degree=2),
    "slices": Case(Slices, -2, 4, ep=2, esp=2),
}


def rank_part(name: str, value: Tensor, case: Case, topology: Topology) -> Tensor:
    """This rank's part of a whole value."""
    if ".experts." not in name:
        return value
    ranks = case.ep * case.esp
    return split(name, value, case.experts, ranks)[topology.ep.index * case.esp + topology.esp.index]


def loss_of(model: nn.Module, x: Tensor, layers: nn.Module) -> Tensor:
    return model(x).square().mean() + 0.1 * (layers[1].l_aux + layers[3].l_aux)


def inputs(rank: int) -> Tensor:
    return torch.randn(7 + rank, D, generator=torch.Generator().manual_seed(70 + rank), dtype=torch.float64)


def assert_same_values(model: nn.Module, whole: nn.Module, case: Case, topology: Topology, grads: bool = False) -> None:
    def values(of: nn.Module) -> list[Tensor]:
        return [(p.grad if grads else p).detach() for p in of.parameters()]

    names = [name for name, _ in whole.named_parameters()]
    for name, mine, theirs in zip(names, values(model), values(whole), strict=True):
        expected = rank_part(name, theirs, case, topology)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12, msg=lambda s, name=name: f"{name}: {s}")


def fully_sharded(model: nn.Module, topology: Topology) -> nn.Module:
    return training.fully_shard(model, topology, shard_experts=True)


def compare_with_one_process(rank: int, world: int, case: Case, folder: Path) -> None:
    topology, group = case.topology(), case.group()
    whole = case.model(net.create_standalone_group(), case.experts)
    training.broadcast_parameters(whole, topology)  # in a group of one rank, all experts are replicated

    def fresh() -> nn.Sequential:
        """A model of this rank's part, with parameters copied and replaced."""
        model = copy.deepcopy(case.model(group, case.count))
        for name, value in whole.named_parameters():
            layer = model.get_submodule(name.rpartition(".")[0])
            setattr(
                layer, name.rpartition(".")[2], nn.Parameter(rank_part(name, value.detach(), case, topology).clone())
            )
        return model

    for each in range(world):
        (loss_of(whole, inputs(each), whole) / world).backward()
    model = fresh()
    names = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert training.expert_parameter_names(model) == names
    loss_of(model, inputs(rank), model).backward()
    training.sync_gradients(model, topology)
    assert_same_values(model, whole, case, topology, grads=True)
    for make in (training.distributed_data_parallel, training.fully_shard, fully_sharded):
        wrapped = fresh()
        wrapper = make(wrapped, topology)
        loss_of(wrapper, inputs(rank), wrapped).backward()
        training.sync_gradients(wrapper, topology)
        if make is training.distributed_data_parallel:
            assert_same_values(wrapped, whole, case, topology, grads=True)
        norm = training.clip_grad_norm(wrapper, topology, 1e9)
        expected = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
    norm = training.clip_grad_norm(model, topology, 0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.01), rtol=1e-10, atol=0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, eps=1e-3) for each in (model, whole)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_values(model, whole, case, topology)
    # Replicas are set to equal values; different experts are unchanged.
    training.broadcast_parameters(model, topology)
    assert_same_values(model, whole, case, topology)
    # From ranks to one process and back.
    training.save_checkpoint(folder / "ranks", model, optimizers[0], topology)
    loaded = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1, eps=1e-3)
    training.load_checkpoint(folder / "ranks", loaded, optimizer, Topology())
    assert_same_values(model, loaded, case, topology)
    for mine, theirs in zip(loaded.parameters(), whole.parameters(), strict=True):
        found, known = optimizer.state[mine]["exp_avg"], optimizers[1].state[theirs]["exp_avg"]
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)
    if rank == 0:
        training.save_checkpoint(folder / "one", whole, optimizers[1], Topology())
    dist.barrier()
    for place in ("one", "ranks"):
        other = fresh()
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.1, eps=1e-3)
        training.load_checkpoint(folder / place, other, optimizer, topology)
        assert_same_values(other, whole, case, topology)


TELLING = ("stacked",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in TELLING else [pytest.mark.slow]) for name in CASES]
)
def test_training_equals_one_process(cluster: Cluster, name: str, tmp_path: Path) -> None:
    cluster.run(CASES[name].world, compare_with_one_process, CASES[name], tmp_path)


def state_of(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *grads)]


def check_missing_information_rejected(rank: int, world: int, folder: Path) -> None:
    """Each helper names the missing information, and changes nothing."""

    def every(model: nn.Module, topology: Topology, message: str) -> None:
        before = state_of(model)
        helpers: list[Callable[[], Any]] = [
            lambda: training.sync_gradients(model, topology),
            lambda: training.clip_grad_norm(model, topology, 0.01),
            lambda: training.broadcast_parameters(model, topology),
            lambda: training.distributed_data_parallel(model, topology),
            lambda: training.fully_shard(model, topology),
            lambda: training.save_checkpoint(folder / "refused", model, None, topology),
        ]
        for helper in helpers:
            with pytest.raises(ConfigError, match=message):
                helper()
        assert all(map(torch.equal, before, state_of(model)))

    def with_gradients(case: Case) -> nn.Sequential:
        model = case.model(case.group(), case.count)
        loss_of(model, inputs(rank), model).backward()
        return model

    ep, esp, dp = (Topology.from_sizes(**sizes, timeout_s=30.0) for sizes in ({"ep": 2}, {"esp": 2}, {}))
    silent = with_gradients(Case(Slices, -2, esp=2, options={"says": False}))
    every(silent, esp, r"1\.experts\.w. Declare it in the module")
    different = with_gradients(Case(FFN, 2, ep=2))
    shared = with_gradients(Case(FFN, -2, esp=2))
    native = fusedmoe.MoELayer(D, fusedmoe.gates.TopK(4, 2), fusedmoe.experts.SwiGLU(H), topology=ep)
    for model, other, axis in (
        (different, dp, "ep=2, esp=1"),
        (shared, ep, "ep=1, esp=2"),
        (native, esp, "ep=2, esp=1"),
    ):
        every(model, other, rf"experts\..* is split over the ranks \[0, 1\] by its layer.*from_sizes\({axis}\)")
    # Without their layer, the group over which experts are sharded is unknown.
    alone = with_gradients(Case(Stacked, 2, ep=2))[1].experts
    every(alone, ep, "w is an expert's parameter by its mark")
    with pytest.raises(ConfigError, match="pass their topology"):
        training.clip_grad_norm(different, None, 1.0)
    # A parameter without a whole is rank-local: supported everywhere except in a checkpoint.
    modules = with_gradients(Case(Modules, 2, ep=2))
    own = [parameter.grad.clone() for parameter in modules[1].experts.parameters()]
    training.sync_gradients(modules, ep)
    training.broadcast_parameters(modules, ep)
    for found, known in zip(modules[1].experts.parameters(), own, strict=True):
        torch.testing.assert_close(found.grad, known / 2)
    refused = r"ranks \[0, 1\] have different tensors of the same name 1\.experts\.each\.0\.weight"
    with pytest.raises(ConfigError, match=refused):
        training.save_checkpoint(folder / "modules", modules, None, ep)


def test_missing_split_information_is_rejected(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, check_missing_information_rejected, tmp_path)


def mark(name: str, parameter: nn.Parameter) -> None:
    parameter.skip_allreduce = True  # type: ignore[attr-defined]


def layer_with_marks() -> moe.MOELayer:
    experts = {"type": FFN, "num_experts_per_device": 2, "hidden_size_per_expert": H}
    return moe.moe_layer({"type": "top"}, D, experts, scan_expert_func=mark)


def test_expert_marks_survive_parameter_replacement() -> None:
    """Operations that replace a layer's parameters: a copy, another device, a loaded state."""
    layer = layer_with_marks()
    layer(torch.randn(3, D))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    onto = nn.Sequential(layer_with_marks())
    onto.load_state_dict(nn.Sequential(layer).state_dict(), assign=True)
    copies = {
        "deepcopy": copy.deepcopy(nn.Sequential(layer)),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "torch.save": torch.load(buffer, weights_only=False),
        "a state": onto,
        "memory": nn.Sequential(layer_with_marks().to("meta")).to_empty(device="cpu"),
        "dtype": layer_with_marks().bfloat16(),
    }
    for way, model in copies.items():
        experts = {name for name, _ in model.named_parameters() if "experts" in name}
        for attribute in ("_tutel_expert", "skip_allreduce"):
            assert {name for name, p in model.named_parameters() if hasattr(p, attribute)} == experts, way
        assert training.expert_parameter_names(model) == experts


def check_selective_checkpoint(rank: int, world: int) -> None:
    described = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": H}
    layer = moe.moe_layer({"type": "top", "k": 2}, D, described, seeds=(1, rank + 1, 1))
    x = torch.randn(5, D, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y = checkpoint(layer, x, use_reentrant=False, context_fn=training.save_communication)
    found, wanted = (torch.autograd.grad(each.square().sum(), leaves) for each in (y, layer(x)))
    torch.testing.assert_close(found, wanted)


def test_layer_in_selective_checkpoint(cluster: Cluster) -> None:
    cluster.run(2, check_selective_checkpoint)
