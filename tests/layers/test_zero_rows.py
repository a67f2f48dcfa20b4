"""All-zero rows before a gate: their gradients are finite, and as large as other rows' gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.gates import DeepSeekV3, Gate, Sigmoid, SoftMoE, Switch, TopK, XMoE
from fusedmoe.gates.base import SoftRouting, unit_vectors
from fusedmoe.kernels.gate import GateRule, define_choice
from fusedmoe.tutel.gates.cosine_top import CosineTopKGate
from fusedmoe.tutel.impls.fast_dispatch import choose

M, E, H = 6, 4, 5
GATES: dict[str, Callable[[], Gate]] = {
    "XMoE": lambda: XMoE(E, 2),
    "XMoE, k = 1": lambda: XMoE(E, 1),
    "SoftMoE": lambda: SoftMoE(E, 2),
    "DeepSeekV3": lambda: DeepSeekV3(E, 2, aux={"balance": 0.1}),
    "Sigmoid": lambda: Sigmoid(E, 2, aux={"balance": 0.1}),
    "TopK": lambda: TopK(E, 2),
    "Switch": lambda: Switch(E),
}


def gradient_of_rows(layer: nn.Module, x_SM: Tensor) -> Tensor:
    """Return each row's largest gradient, for a loss over the experts' results and the gate's losses."""
    x_SM = x_SM.clone().requires_grad_()
    (layer(x_SM).float().square().sum() + layer.aux_loss.float()).backward()
    assert x_SM.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    return x_SM.grad.float().abs().amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("row", [0.0, 1e-30, 1e-7])
def test_zero_row_has_bounded_gradient(name: str, dtype: torch.dtype, row: float) -> None:
    torch.manual_seed(0)
    # With a bias, a zero token has a result, and thus a gradient that reaches the gate.
    layer = fusedmoe.MoELayer(M, GATES[name](), fusedmoe.experts.FeedForward(H), dtype=dtype)
    x_SM = torch.randn(5, M)
    x_SM[2] = row
    size_S = gradient_of_rows(layer, x_SM.to(dtype))
    assert size_S[2] < 100 * size_S[[0, 1, 3, 4]].max() and size_S.isfinite().all()


@pytest.mark.parametrize("name", GATES)
def test_all_zero_batch_has_bounded_gradients(name: str) -> None:
    torch.manual_seed(0)
    layer = fusedmoe.MoELayer(M, GATES[name](), fusedmoe.experts.FeedForward(H))
    usual = gradient_of_rows(layer, torch.randn(5, M)).max()
    assert (gradient_of_rows(layer, torch.zeros(5, M)) < 100 * usual).all()


@pytest.mark.parametrize("gate", [XMoE(E, 2), SoftMoE(E)], ids=["XMoE", "SoftMoE"])
def test_zero_expert_embedding_has_bounded_gradient(gate: Gate) -> None:
    """A zero expert embedding gets a finite, bounded gradient, which only XMoE permits to be zero."""
    gate.setup(M)
    side = gate.expert_EP if isinstance(gate, XMoE) else gate.weight_NM
    with torch.no_grad():
        side[1] = 0
    gate.train()
    result = gate(torch.randn(9, M))
    weights = result.dispatch_SN if isinstance(result, SoftRouting) else result.weight_SK
    (weights * torch.randn_like(weights)).sum().backward()
    assert side.grad is not None and side.grad.isfinite().all() and side.grad[1].abs().max() < 1e3
    assert isinstance(gate, XMoE) or side.grad[1].abs().max() > 0


@pytest.mark.parametrize("fp32_gate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tutel_cosine_gate_of_zero_rows_has_bounded_gradient(fp32_gate: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate = CosineTopKGate(M, E, fp32_gate=fp32_gate, proj_dim=8).to(dtype)
    with torch.no_grad():  # with a bias no token has a zero projection
        gate.cosine_projector.bias.zero_()
        gate.sim_matrix[:, 1] = 0
    x_SM = torch.randn(5, M)
    x_SM[2] = 0
    x_SM = x_SM.to(dtype).requires_grad_()
    logits_SE = gate(x_SM)
    (logits_SE * torch.randn_like(logits_SE)).sum().backward()
    assert x_SM.grad is not None and gate.sim_matrix.grad is not None
    size_S = x_SM.grad.float().abs().amax(1)
    assert 0 < size_S[2] < 100 * size_S[[0, 1, 3, 4]].max()
    assert 0 < gate.sim_matrix.grad[:, 1].float().abs().max() < 1e3


def test_unit_vectors_equal_definition() -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    x[2], x[4] = 0, 1e-6
    x.requires_grad_()
    exact = torch.stack(
        [row / row.square().sum().sqrt() if number not in (2, 4) else row for number, row in enumerate(x)]
    )
    grad = torch.randn_like(exact)
    (expected,) = torch.autograd.grad(exact, x, grad)
    (found,) = torch.autograd.grad(unit_vectors(x, dim=1), x, grad)
    torch.testing.assert_close(unit_vectors(x, dim=1), exact, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(unit_vectors(x.t(), dim=0), exact.t(), rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: unit_vectors(x, dim=1), (x,))
    assert torch.autograd.gradgradcheck(lambda x: unit_vectors(x, dim=1), (x,))


@pytest.mark.parametrize("aux", [{}, {"balance": 1.0}], ids=str)
@pytest.mark.parametrize("logit", [-40.0, -60.0, -87.5, -95.0, -103.0, -200.0])
def test_underflowing_scores_have_finite_gradients(logit: float, aux: dict[str, float]) -> None:
    gate = DeepSeekV3(E, 2, aux=aux)
    gate.setup(M)
    with torch.no_grad():
        gate.weight_EM.fill_(0)
        gate.weight_EM[:, 0] = logit
        gate.weight_EM[:, 1] = torch.tensor([0.1, -0.2, 0.3, 0.0])
    x_SM = torch.randn(5, M)
    x_SM[:, 0] = torch.tensor([0.0, 0.01, 1.0, 1.0, 0.0])
    x_SM.requires_grad_()
    routing = gate(x_SM)
    assert routing.weight_SK.isfinite().all() and routing.weight_SK.max() <= 1
    # float16 training adds a loss scale.
    ((routing.weight_SK * torch.randn(5, 2)).sum() * 2**16 + routing.aux_loss).backward()
    assert x_SM.grad is not None and gate.weight_EM.grad is not None
    assert (x_SM.grad.abs().amax(1) < 2**16 * 1e3).all() and gate.weight_EM.grad.isfinite().all()


def test_zero_scores_have_finite_gradients() -> None:
    score_SE = torch.rand(6, E)
    score_SE[2] = 0
    score_SE.requires_grad_()
    for normalised in (
        define_choice(score_SE, GateRule(2, "none")).weight_SK,
        choose(score_SE, 2, normalize=True, prioritised=False).weight_SK,
    ):
        (grad,) = torch.autograd.grad(normalised, score_SE, torch.randn(6, 2))
        assert grad[2].abs().max() < 10 and grad.isfinite().all()
        assert (normalised[2] == 0).all()
