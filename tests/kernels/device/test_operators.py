"""The kernels as operators of `torch.library`, and their uses: compiled layers and layers in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.autograd.gate import gate
from fusedmoe.autograd.order import order_operator
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.gate import GateRule
from fusedmoe.kernels.layout import build_layout
from tests.kernels.operator_cases import cases, check
from tests.kernels.routings import choose
from tests.marks import interpreted_slowly


@pytest.mark.parametrize("name", ["take_pairs", *interpreted_slowly("order", "permute", "experts")])
def test_kernel_operator_passes_opcheck(name: str, device: torch.device) -> None:
    check(name, cases(device)[name])


def test_gate_operators_pass_opcheck(device: torch.device) -> None:
    x_SM = torch.randn(21, 32, device=device, requires_grad=True)
    weight_EM = torch.randn(6, 32, device=device, requires_grad=True)
    logits_SE = torch.randn(21, 6, device=device, requires_grad=True)
    rule = (2, "softmax", True, 1.0, True, 7, True)
    sparse = (2, "sigmoid", False, 2.5, False, None, False)
    bias_E = torch.randn(6, device=device)
    inputs: dict[str, list[tuple[Any, ...]]] = {
        "gate": [(x_SM, weight_EM, None, *rule), (x_SM, weight_EM, bias_E, *sparse)],
        "gate_from_logits": [(logits_SE, None, *rule), (logits_SE, bias_E, *sparse)],
        "router_product": [(x_SM, weight_EM)],
    }
    expert_SK, half = torch.rand(21, 6, device=device).topk(2).indices, torch.bfloat16
    given = (logits_SE.detach(), expert_SK, torch.randn(21, 2, device=device), None, None, *rule)
    two = torch.randn(2, 21, 16, device=device).to(half)
    two[:, :, 6:] = 0
    inputs |= {
        "gate_backward": [(*given, False), (*given, True)],
        "router_dx": [(two, weight_EM.detach().to(half), half)],
        "router_dw": [(two, x_SM.detach().to(half), half, 6)],
    }
    for name, several in inputs.items():
        check(name, several)


def test_frozen_input_gets_no_gradient(device: torch.device) -> None:
    x_SM, weight_EM = torch.randn(21, 32, device=device), torch.randn(6, 32, device=device, requires_grad=True)
    choice = gate(x_SM, weight_EM, GateRule(2, statistics=True))
    assert choice.score_BE is not None
    choice.score_BE.sum().backward()
    assert x_SM.grad is None and weight_EM.grad is not None


def make_layer(device: torch.device) -> fusedmoe.MoELayer:
    gate = fusedmoe.gates.TopK(experts=5, k=2, capacity_factor=0.8, aux={"balance": 1.0, "z": 0.1})
    return fusedmoe.MoELayer(32, gate, fusedmoe.experts.SwiGLU(24), shared=fusedmoe.experts.SwiGLU(16), device=device)


def step(call: Callable[[Tensor], Tensor], layer: fusedmoe.MoELayer, x_SM: Tensor) -> list[Tensor]:
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    (call(x_SM).square().sum() + layer.aux_loss).backward()
    return [x_SM.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]


def test_layer_step_never_synchronizes(
    device: torch.device, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    layer, x_SM = make_layer(device), torch.randn(41, 32, device=device, requires_grad=True)
    step(layer, layer, x_SM)  # compiles and, on a GPU, tunes
    with no_sync():
        step(layer, layer, x_SM)
    assert layer.dropped > 0


def test_compiled_layer_is_bitwise_equal(device: torch.device) -> None:
    layer, x_SM = make_layer(device), torch.randn(41, 32, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(step(compiled, layer, x_SM), step(layer, layer, x_SM), strict=True):
        assert torch.equal(ours, theirs)


def test_layer_replays_in_cuda_graph(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    layer, x_SM = make_layer(device), torch.randn(41, 32, device=device, requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, layer, x_SM)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        (layer(x_SM).square().sum() + layer.aux_loss).backward()
    for _ in range(3):
        with torch.no_grad():
            x_SM.copy_(torch.randn_like(x_SM))
        graph.replay()
        found = [x_SM.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]
        plain = x_SM.detach().clone().requires_grad_()
        twin = make_layer(device)
        twin.load_state_dict(layer.state_dict())
        for ours, theirs in zip(found, step(twin, twin, plain), strict=True):
            assert torch.equal(ours, theirs)
    with torch.no_grad():
        x_SM[3, 4] = float("nan")
    graph.replay()
    with pytest.raises(ConfigError, match="router logits"):
        layer.check()


def test_non_finite_logits_are_reported_asynchronously(device: torch.device) -> None:
    layer, x_SM = make_layer(device), torch.randn(41, 32, device=device)
    x_SM[3, 4] = float("nan")
    layer(x_SM)
    with pytest.raises(ConfigError, match=r"1 tokens with router logits .* before this one"):
        layer.check()
    layer.check()
    if device.type == "cuda":
        layer(x_SM)
        with pytest.raises(ConfigError, match="before this one"):
            for _ in range(100):
                layer(torch.randn(41, 32, device=device))
                torch.cuda.synchronize()


def test_operator_slack_equals_kernel_slack(device: torch.device) -> None:
    expert_SK = choose(20, 3, 4, 0.3).to(device)
    for capacity in (None, 7):
        layout = build_layout(expert_SK, 4, capacity)
        tensors = order_operator(expert_SK, 4, capacity, None, True)
        assert all(torch.equal(a, b) for a, b in zip(layout.tensors, tensors, strict=True))
