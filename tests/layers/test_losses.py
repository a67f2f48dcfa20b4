"""Auxiliary losses compared with loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.losses import balance_loss, load_importance_loss, z_loss


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown on failure


def random_float64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def cv_squared(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / mean**2


@pytest.mark.parametrize("S, E, K", [(1, 1, 1), (7, 4, 1), (13, 5, 3), (6, 4, 4)])
def test_balance_loss_equals_definition(S: int, E: int, K: int) -> None:
    prob_SE = random_float64(S, E).softmax(1)
    expert_SK = torch.rand(S, E).argsort(1)[:, :K]
    expected = 0.0
    for e in range(E):
        mean = sum(prob_SE[s, e].item() for s in range(S)) / S
        share = sum(expert_SK[s, j].item() == e for s in range(S) for j in range(K)) / (S * K)
        expected += E * mean * share
    assert balance_loss(prob_SE, expert_SK).item() == pytest.approx(expected, rel=1e-12)


def test_balance_loss_of_even_and_collapsed_routing() -> None:
    E, S = 4, 8
    even = torch.full((S, E), 1 / E, dtype=torch.float64)
    assert balance_loss(even, torch.arange(S).remainder(E)[:, None]).item() == pytest.approx(1)
    collapsed = torch.zeros(S, E, dtype=torch.float64)
    collapsed[:, 2] = 1
    assert balance_loss(collapsed, torch.full((S, 1), 2)).item() == pytest.approx(E)


def test_balance_loss_of_first_choices_equals_gshard() -> None:
    prob_SE = random_float64(9, 4).softmax(1)
    expert_SK = prob_SE.argsort(1, descending=True)[:, :2]
    share_E = torch.stack([(expert_SK[:, 0] == e).double().mean() for e in range(4)])
    expected = 4 * (prob_SE.mean(0) * share_E).sum()
    torch.testing.assert_close(balance_loss(prob_SE, expert_SK[:, :1]), expected)


def test_balance_loss_ignores_empty_slots() -> None:
    prob_SE = random_float64(3, 2).softmax(1)
    expert_SK = torch.tensor([[0, -1], [1, 0], [-1, -1]])
    expected = 2 * (prob_SE.mean(0) * torch.tensor([2, 1]) / 6).sum()
    torch.testing.assert_close(balance_loss(prob_SE, expert_SK), expected)


def test_balance_loss_per_sequence_is_mean_over_sequences() -> None:
    prob_SE = random_float64(12, 3).softmax(1)
    expert_SK = torch.rand(12, 3).argsort(1)[:, :2]
    parts = [balance_loss(prob_SE[i : i + 4], expert_SK[i : i + 4]) for i in range(0, 12, 4)]
    torch.testing.assert_close(balance_loss(prob_SE, expert_SK, sequence=4), torch.stack(parts).mean())


@pytest.mark.parametrize("sequence", [0, 5, -1])
def test_balance_loss_rejects_indivisible_sequences(sequence: int) -> None:
    with pytest.raises(ConfigError, match="12 tokens do not divide into sequences"):
        balance_loss(torch.rand(12, 3), torch.zeros(12, 1, dtype=torch.int64), sequence=sequence)


@pytest.mark.parametrize("std", [0.3, "tensor"])
@pytest.mark.parametrize("width", [1, 5])
def test_load_importance_loss_equals_definition(std: float | str, width: int) -> None:
    S, E = 11, 5
    gate_SE, clean_SE, threshold = random_float64(S, E).softmax(1), random_float64(S, E), random_float64(S, width)
    std_SE = random_float64(S, E).abs() + 0.1 if std == "tensor" else torch.full((S, E), 0.3, dtype=torch.float64)
    importance, load = [], []
    for e in range(E):
        importance.append(sum(gate_SE[s, e].item() for s in range(S)))
        distance = [(clean_SE[s, e] - threshold[s, min(e, width - 1)]).item() / std_SE[s, e].item() for s in range(S)]
        load.append(sum((1 + math.erf(d / math.sqrt(2))) / 2 for d in distance))
    expected = (cv_squared(importance) + cv_squared(load)) / 2
    noise_std = std_SE if std == "tensor" else 0.3
    assert load_importance_loss(gate_SE, clean_SE, threshold, noise_std).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("std", [0, -1.0, math.nan])
def test_load_importance_loss_requires_noise(std: float) -> None:
    with pytest.raises(ConfigError, match="noise_std must be positive"):
        load_importance_loss(torch.rand(2, 2), torch.rand(2, 2), torch.rand(2, 1), std)


def test_load_importance_loss_of_one_expert_is_zero() -> None:
    logits = random_float64(3, 1).requires_grad_()
    loss = load_importance_loss(logits.softmax(1), logits, logits.detach(), 1.0)
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_z_loss_equals_definition() -> None:
    logits_SE = random_float64(9, 4)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_SE.tolist()) / 9
    assert z_loss(logits_SE).item() == pytest.approx(expected, rel=1e-12)


def test_loss_gradients_equal_finite_differences() -> None:
    S, E = 6, 4
    expert_SK = torch.rand(S, E).argsort(1)[:, :2]
    logits = random_float64(S, E).requires_grad_()
    std = (random_float64(S, E).abs() + 0.5).requires_grad_()
    threshold = random_float64(S, E).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: balance_loss(v.softmax(1), expert_SK), logits)
    assert torch.autograd.gradcheck(lambda v: balance_loss(v.softmax(1), expert_SK, sequence=3), logits)
    assert torch.autograd.gradcheck(
        lambda v, t, s: load_importance_loss(v.softmax(1), v, t, s), (logits, threshold, std)
    )
    assert torch.autograd.gradcheck(z_loss, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_of_zero_tokens_are_zero(dtype: torch.dtype) -> None:
    logits = torch.randn(0, 4, dtype=dtype, requires_grad=True)
    expert_SK = torch.zeros(0, 2, dtype=torch.int64)
    for loss in (
        balance_loss(logits.softmax(1), expert_SK),
        balance_loss(logits.softmax(1), expert_SK, sequence=8),
        load_importance_loss(logits.softmax(1), logits, logits[:, :1], 0.5),
        z_loss(logits),
    ):
        assert loss.shape == () and loss.dtype == dtype and loss.item() == 0
        loss.backward()
    weight = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    z_loss(torch.empty(0, 3, dtype=dtype) @ weight.t()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
