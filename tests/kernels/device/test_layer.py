"""The whole layer on its kernels, compared with the same layer in float64 on plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import fusedmoe
from fusedmoe.experts.networks import Experts
from fusedmoe.gates import Gate
from tests.marks import interpreted_slowly


def tanh_expert(model_dim: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(model_dim, 20), torch.nn.Tanh(), torch.nn.Linear(20, model_dim))


@pytest.mark.parametrize("hooks", [(), (fusedmoe.Hooks(),)], ids=["fused", "exchange"])
@pytest.mark.parametrize(
    ("gate", "experts", "order"),
    [
        (fusedmoe.gates.TopK(5, 2, 0.7), fusedmoe.experts.SwiGLU(24), fusedmoe.orders.Sparse()),
        *interpreted_slowly(
            (fusedmoe.gates.Sigmoid(experts=5, k=2), fusedmoe.experts.FeedForward(24), fusedmoe.orders.Dropless()),
            (fusedmoe.gates.Switch(experts=5, capacity_factor=1.0), fusedmoe.experts.Custom(tanh_expert), None),
            (fusedmoe.gates.TopK(5, 2, 0.7), fusedmoe.experts.SwiGLU(24), fusedmoe.orders.Einsum()),
        ),
    ],
    ids=["topk swiglu", "sigmoid feed-forward", "switch custom", "topk einsum"],
)
def test_layer_on_kernels_equals_float64(
    gate: Gate,
    experts: Experts,
    order: fusedmoe.orders.Order | None,
    hooks: tuple[fusedmoe.Hooks, ...],
    device: torch.device,
) -> None:
    gate, experts = copy.deepcopy(gate), copy.deepcopy(experts)
    layer = fusedmoe.MoELayer(32, gate, experts, order=order, hooks=hooks, device=device).eval()
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(41, 32, device=device)
    dy = torch.randn(41, 32, device=device)
    found = []
    for module, dtype, place in ((layer, torch.float32, device), (exact, torch.float64, torch.device("cpu"))):
        mine = x.detach().to(place, dtype, copy=True).requires_grad_()
        y = module(mine)
        ((y * dy.to(place, dtype)).sum() + module.aux_loss).backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append({"y": y, "aux": module.aux_loss, "dx": mine.grad, **grads})
    assert layer.dropped == exact.dropped and layer.load_E.tolist() == exact.load_E.tolist()
    for name, right in found[1].items():
        got = found[0][name]
        if right is None:
            assert got is None or not got.any(), name
            continue
        error = float((got.detach().cpu().double() - right).norm() / right.norm().clamp(min=1e-6))
        assert error <= 1e-5, (name, error)


def test_metrics_never_synchronize(device: torch.device, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    layer = fusedmoe.MoELayer(32, fusedmoe.gates.TopK(5, 2, 0.7), fusedmoe.experts.SwiGLU(24), device=device)
    metrics = fusedmoe.metrics.Metrics(layer)
    x = torch.randn(41, 32, device=device)
    layer(x).sum().backward()
    routing = layer.gate(x)
    with no_sync():
        layer.load.count(routing, layer.load.kept_E, layer.gate, True, False)
        if device.type == "cuda":  # on a CPU the layer itself checks its logits
            layer(x).sum().backward()
    found, load_E = metrics.collect(), layer.load_E.double()
    assert found["moe/max_vio"] == pytest.approx(float(load_E.max() / load_E.mean() - 1))
    assert found["moe/dropped"] > 0


class _OutOfRangeGate(fusedmoe.gates.TopK):
    """Choose a nonexistent expert."""

    def forward(self, *given: Any) -> Any:
        routing = super().forward(*given)
        routing.expert_SK[3, 1] = self.experts
        return routing


def test_expert_numbers_are_checked_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order checks expert numbers on the device; nothing else reads them, including a user-defined gate's."""
    if device.type == "cuda":
        pytest.skip("a failed assertion ends the process")
    layer = fusedmoe.MoELayer(32, _OutOfRangeGate(5, 2), fusedmoe.experts.SwiGLU(24))
    looked: list[str] = []
    assert_async = torch.ops.aten._assert_async.msg

    def noted(holds: torch.Tensor, text: str) -> None:
        looked.append(text)
        assert_async(holds, text)

    monkeypatch.setattr(torch.ops.aten._assert_async, "msg", noted)
    with pytest.raises(RuntimeError, match="order: chosen experts must be numbers from 0 to 4"):
        layer(torch.randn(9, 32))
    assert len(looked) == 1
