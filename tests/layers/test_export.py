"""`torch.export` of a layer in a world of one, with any number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import fusedmoe
from fusedmoe import gates, orders
from fusedmoe.errors import ConfigError
from fusedmoe.experts import Custom, FeedForward, SwiGLU

D, E = 8, 4
GATES = {
    "topk": lambda: gates.TopK(E, k=2, aux={"balance": 0.1}),
    "topk with capacity": lambda: gates.TopK(E, k=2, capacity_factor=1.0),
    "switch": lambda: gates.Switch(E),
    "gshard": lambda: gates.GShard(E),
    "deepseek": lambda: gates.DeepSeekV3(E, k=2, groups=2, groups_kept=1, aux={"balance": 0.1}),
    "sigmoid": lambda: gates.Sigmoid(E),
    "xmoe": lambda: gates.XMoE(E),
    "softmoe": lambda: gates.SoftMoE(E),
    "batch_prioritised": lambda: gates.BatchPrioritised(E, k=2, capacity_factor=0.5),
    "hash": lambda: gates.Hash(E),
    "expert_choice": lambda: gates.ExpertChoice(E, capacity_factor=1.0),
}
QUICK = ("topk", "topk with capacity")


def _layer(gate: Any, experts: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fusedmoe.MoELayer(D, gate, experts or SwiGLU(6), **options).eval()


def _compare(layer: nn.Module, exported: Any, x: Tensor) -> None:
    y = exported.module()(x)
    torch.testing.assert_close(y, layer(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in GATES])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_exported_layer_accepts_any_number_of_tokens(name: str, strict: bool) -> None:
    layer = _layer(GATES[name]())
    exported = export(layer, (torch.randn(12, D),), dynamic_shapes=({0: Dim.DYNAMIC},), strict=strict)
    # One graph of expert choice covers two or more rows per expert.
    for tokens in (12, 33, 7, *([] if name == "expert_choice" else [2, 1, 0])):
        _compare(layer, exported, torch.randn(tokens, D))


@torch.no_grad()
def test_export_with_two_dynamic_dimensions_and_shared_expert() -> None:
    layer = _layer(gates.TopK(E, k=2), FeedForward(6), shared=SwiGLU(5))
    shapes = ({0: Dim("batch", min=2, max=64), 1: Dim.DYNAMIC},)
    exported = export(layer, (torch.randn(3, 5, D),), dynamic_shapes=shapes)
    for shape in ((3, 5), (2, 7), (8, 1)):
        _compare(layer, exported, torch.randn(*shape, D))


def test_export_rejects_custom_experts_and_einsum() -> None:
    x, shapes = torch.randn(12, D), ({0: Dim.DYNAMIC},)
    for layer in (
        _layer(gates.TopK(E, k=2), Custom(lambda model_dim: nn.Linear(model_dim, model_dim))),
        _layer(gates.TopK(E, k=2), order=orders.Einsum()),
    ):
        with pytest.raises(ConfigError, match="torch.export: Custom experts and the order Einsum"):
            export(layer, (x,), dynamic_shapes=shapes)
        layer(x)
