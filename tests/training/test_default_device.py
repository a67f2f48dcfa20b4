"""Steps under a default device other than the tensors': the library's own tensors are on the right device.

On the default device "meta" any tensor made without a device has no values, and fails where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import experts, gates
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.experts.networks import Place, RowExperts
from fusedmoe.metrics import Metrics
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.training import (
    ShardedExperts,
    broadcast_parameters,
    clip_grad_norm,
    distributed_data_parallel,
    load_checkpoint,
    save_checkpoint,
    sync_gradients,
)
from fusedmoe.tutel import moe
from tests.cluster import Cluster

M, E, H = 6, 4, 5


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def expert_kinds() -> dict[str, Callable[[], experts.Experts]]:
    return {
        "feed-forward": lambda: experts.FeedForward(H),
        "swiglu": lambda: experts.SwiGLU(H, bias=True),
        "custom": lambda: experts.Custom(lambda m: nn.Linear(m, m)),
    }


GATES = {name: (lambda kind=kind: kind(E)) for name, kind in gates.GATES.items()}
GATES |= {"deepseek_v3": lambda: gates.DeepSeekV3(E, 2)}


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def made_on_meta(make: Callable[[], nn.Module], seed: int, how: Callable[[], Any]) -> nn.Module:
    with how():
        model = make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -7)
    torch.manual_seed(seed)
    reset(model)
    return model


def require_equal(model: nn.Module, right: nn.Module) -> None:
    state, wanted = model.state_dict(), right.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    "how", [lambda: torch.device("meta"), lambda: default_device("meta")], ids=["context", "default"]
)
@pytest.mark.parametrize("gate", GATES)
def test_gate_reset_after_meta_construction(gate: str, how: Callable[[], Any]) -> None:
    def make() -> nn.Module:
        return fusedmoe.MoELayer(M, GATES[gate](), experts.SwiGLU(H), shared=experts.FeedForward(H))

    torch.manual_seed(3)
    right = make()
    layer = made_on_meta(make, 3, how)
    require_equal(layer, right)
    layer(torch.randn(9, M)).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", expert_kinds())
def test_expert_reset_after_meta_construction(kind: str, dtype: torch.dtype) -> None:
    def make() -> fusedmoe.MoELayer:
        return fusedmoe.MoELayer(M, gates.TopK(E), expert_kinds()[kind](), dtype=dtype)

    torch.manual_seed(3)
    right = make()
    layer = made_on_meta(make, 3, lambda: torch.device("meta"))
    if kind == "custom":  # the loop has reset the modules inside; the experts' own reset is right
        torch.manual_seed(3)
        layer.gate.reset_parameters()
        layer.experts.reset_parameters()
    require_equal(layer, right)


def test_custom_expert_reset_after_meta_construction() -> None:
    class Own(RowExperts):
        def make(self, model_dim: int, place: Place, seed: int, *, device: Any, dtype: Any) -> None:
            drawn = [
                torch.randn(model_dim, generator=torch.Generator().manual_seed(seed % 97 + n)) for n in place.numbers
            ]
            self.scale_eM = nn.Parameter(torch.stack(drawn).to(device=device, dtype=dtype))
            self.register_buffer("shift_e", torch.arange(float(place.local)).to(device=device))

        def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
            return torch.cat([part * one for part, one in zip(rows_NM.split(counts), self.scale_eM, strict=True)])

    def make() -> fusedmoe.MoELayer:
        return fusedmoe.MoELayer(M, gates.TopK(E), Own(), device="cpu")

    torch.manual_seed(3)
    right = make()
    torch.manual_seed(4)
    other = make()
    torch.manual_seed(3)
    reset(other)
    require_equal(other, right)


def test_reset_rejects_missing_and_parametrized_experts() -> None:
    with pytest.raises(fusedmoe.ConfigError, match="SwiGLU.reset_parameters: no experts yet"):
        experts.SwiGLU(H).reset_parameters()
    layer = fusedmoe.MoELayer(M, gates.TopK(E), experts.SwiGLU(H))
    experts.add_adapters(layer.experts, rank=2, alpha=2)
    with pytest.raises(fusedmoe.ConfigError, match="parametrised"):
        layer.experts.reset_parameters()


@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
@pytest.mark.parametrize("gate", ["top", "cosine_top"])
def test_tutel_layer_reset_after_meta_construction(kind: str, gate: str) -> None:
    def make() -> nn.Module:
        described = {"type": kind, "hidden_size_per_expert": 8, "num_experts_per_device": 2}
        return moe.moe_layer({"type": gate, "k": 2}, M, described)

    torch.manual_seed(3)
    right = make()
    layer = made_on_meta(make, 3, lambda: torch.device("meta"))
    if gate == "top":  # the cosine gate draws in another order
        require_equal(layer, right)
    assert int(layer._num_global_experts) == 2
    y = layer(torch.randn(9, M))
    assert y.isfinite().all()
    (y.square().sum() + layer.l_aux).backward()


@pytest.mark.parametrize("moe_every", [1, 2])
def test_model_reset_after_meta_construction(moe_every: int) -> None:
    config = ModelConfig(
        layers=2, model_dim=16, heads=2, seq_len=8, batch=2, hidden=12, experts=4, positions="learned", bias=True,
        moe_every=moe_every,
    )  # fmt: skip
    torch.manual_seed(3)
    right = Transformer(config)
    model = made_on_meta(lambda: Transformer(config), 3, lambda: torch.device("meta"))
    # The head is drawn with the embeddings, and all later parameters in construction order.
    first = ("symbol_weight", "position_weight")
    for name, value in right.state_dict().items():
        mine = model.state_dict()[name]
        assert mine.isfinite().all() and (name not in first or torch.equal(mine, value)), name
        if value.is_floating_point() and value.std() > 0:
            assert 0.7 < mine.std() / value.std() < 1.4, name
    tokens = torch.randint(256, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    (loss.nats + loss.aux).backward()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(M, M, device="cpu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


def run_all_operations_of_job(
    rank: int, world: int, folder: str, schedule: Any, placement: str, costs: PlacementCosts | None
) -> None:
    """All operations of a job, each under a default device that cannot compute."""
    with default_device("meta"):
        topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
        torch.manual_seed(0)
        layer = fusedmoe.MoELayer(
            M, gates.DeepSeekV3(E, 2, aux={"balance": 0.1}), experts.SwiGLU(H), topology=topology, device="cpu",
            shared=experts.FeedForward(H), schedule=schedule, placement=placement,
        )  # fmt: skip
        model = nn.Sequential(nn.Linear(M, M, device="cpu"), layer)
        broadcast_parameters(model, topology)
        optimizer = torch.optim.AdamW(model.parameters())
        sharded = ShardedExperts(model, optimizer, topology, costs=costs) if placement == "fssdp" else None
        metrics = Metrics(model)
        for _ in range(3):
            mask = torch.tensor([True] * 8 + [False], device="cpu")
            x = torch.randn(9, M, device="cpu")
            y = model[1](model[0](x), mask)
            (y.square().sum() + layer.aux_loss).backward()
            sync_gradients(model, topology)
            clip_grad_norm(model, topology, 1.0)
            with torch.device("cpu"):  # AdamW of PyTorch 2.11 makes its step counter on the default device
                optimizer.step()
            optimizer.zero_grad()
            layer.update_gate()
        assert metrics.collect(per_expert=True)["moe/max_vio"] >= 0
        save_checkpoint(folder, model, optimizer, topology, {"step": 3})
        assert load_checkpoint(folder, model, optimizer, topology) == {"step": 3}
        if sharded is not None:
            sharded.close()
        if placement == "ep" and schedule == "off":
            run = fusedmoe.pipeline([Parts(Dense(), layer)], (2, 2))
            run(torch.randn(4, 3, M, device="cpu")).square().sum().backward()
            wrapped = distributed_data_parallel(nn.Sequential(model[0], layer), topology)
            wrapped(x).square().sum().backward()


@pytest.mark.parametrize(
    ("schedule", "placement", "costs"),
    [
        pytest.param("off", "ep", None, id="no schedule"),
        pytest.param(fusedmoe.Schedule("fsmoe", degrees=(2, 2)), "ep", None, id="schedule"),
        pytest.param("off", "fssdp", PlacementCosts(1e-3, 8, 100, 200, 1e6, 1e7), id="fssdp"),
        pytest.param("off", "fssdp", None, id="fssdp with measured costs", marks=pytest.mark.slow),
    ],
)
def test_training_job_under_meta_default_device(
    cluster: Cluster, tmp_path: Path, schedule: Any, placement: str, costs: PlacementCosts | None
) -> None:
    cluster.run(2, run_all_operations_of_job, str(tmp_path / "checkpoint"), schedule, placement, costs)


def experts_reset_on_rank(rank: int, world: int, esp: int) -> dict[str, Tensor]:
    topology = fusedmoe.Topology.from_sizes(ep=world // esp, esp=esp, timeout_s=60)

    def make() -> nn.Module:
        return fusedmoe.MoELayer(M, gates.TopK(E, 2), experts.SwiGLU(H * 2), topology=topology)

    torch.manual_seed(3)
    right = make()
    layer = made_on_meta(make, 3, lambda: torch.device("meta"))
    require_equal(layer, right)
    torch.manual_seed(rank)
    layer(torch.randn(9, M)).square().sum().backward()
    sync_gradients(layer, topology)
    return {name: value.clone() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("esp", [1, 2])
def test_ranks_initialize_different_experts_and_equal_gates(cluster: Cluster, esp: int) -> None:
    one, other = cluster.run(2, experts_reset_on_rank, esp)
    assert not torch.equal(one["experts.w1"], other["experts.w1"]) and torch.equal(
        one["gate.weight_EM"], other["gate.weight_EM"]
    )
