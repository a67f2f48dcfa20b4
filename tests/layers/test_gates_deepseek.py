"""DeepSeek-V3's gate: groups, and a bias that balances the load without changing weights or gradients."""

from __future__ import annotations

import math

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.gates import DeepSeekV3
from tests.layers.gate_cases import best_first


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown on failure


def prepared(gate: DeepSeekV3, dim: int = 6) -> DeepSeekV3:
    gate.setup(dim, dtype=torch.float64)
    with torch.no_grad():
        gate.weight_EM.normal_()
        gate.bias_E.normal_(std=0.3)
    return gate


@pytest.mark.parametrize(
    "E, k, groups, kept, normalize",
    [
        (8, 2, 1, 1, True),
        (8, 1, 1, 1, True),
        (12, 4, 4, 2, True),
        (12, 3, 4, 1, False),
        (6, 3, 6, 4, True),
        (8, 8, 2, 2, True),
    ],
)
def test_deepseek_gate_equals_definition(E: int, k: int, groups: int, kept: int, normalize: bool) -> None:
    S, size = 19, E // groups
    gate = prepared(
        DeepSeekV3(E, k, groups=groups, groups_kept=kept, normalize=normalize, route_scale=2.5, aux={"balance": 1.0})
    )
    x = torch.randn(S, 6, dtype=torch.float64)
    score = (x @ gate.weight_EM.t()).sigmoid().tolist()
    bias = gate.bias_E.double().tolist()
    chosen, weights = [], []
    for row in score:
        biased = [v + b for v, b in zip(row, bias, strict=True)]
        best = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        allowed = best_first(best, kept)
        chosen.append(best_first([v if e // size in allowed else -math.inf for e, v in enumerate(biased)], k))
        own = [row[e] for e in chosen[-1]]
        weights.append([2.5 * w / (sum(own) if normalize and k > 1 else 1) for w in own])
    slots = [e for row in chosen for e in row]
    aux = E * sum(sum(row[e] / sum(row) for row in score) / S * slots.count(e) / len(slots) for e in range(E))
    routing = gate(x)
    assert routing.expert_SK.tolist() == chosen
    torch.testing.assert_close(routing.weight_SK, torch.tensor(weights, dtype=torch.float64))
    assert routing.aux_loss.item() == pytest.approx(aux)


def test_balance_loss_per_sequence() -> None:
    whole = prepared(DeepSeekV3(4, 2, sequence=5, aux={"balance": 1.0}))
    one = DeepSeekV3(4, 2, aux={"balance": 1.0})
    one.setup(6, dtype=torch.float64)
    one.load_state_dict(whole.state_dict())
    x = torch.randn(15, 6, dtype=torch.float64)
    expected = torch.stack([one(part).aux_loss for part in x.split(5)]).mean()
    torch.testing.assert_close(whole(x).aux_loss, expected)
    with pytest.raises(ConfigError, match="14 tokens do not divide into sequences of 5"):
        whole(x[:14])


def test_update_moves_bias_by_sign_of_load() -> None:
    gate = DeepSeekV3(4, 2, bias_rate=0.25)
    gate.setup(6)
    gate.update(torch.tensor([10, 2, 6, 6]))
    assert gate.bias_E.tolist() == [-0.25, 0.25, 0, 0]
    gate.update(torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert gate.bias_E.tolist() == [-0.5, 0, -0.25, 0.25]
    before = gate.bias_E.clone()
    gate.update(torch.zeros(4))
    assert torch.equal(gate.bias_E, before)
    with pytest.raises(ConfigError, match=r"load must be \[4\], got \[3\]"):
        gate.update(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"call setup\(model_dim\)"):
        DeepSeekV3(4, 2).update(torch.zeros(4))


def test_bias_updates_balance_skewed_load() -> None:
    E, k, S, rate = 8, 2, 2048, 0.01
    gate = DeepSeekV3(E, k, bias_rate=rate)
    gate.setup(16)
    with torch.no_grad():
        gate.weight_EM.normal_(std=0.25)
        gate.weight_EM[:, 0] = torch.linspace(-1.5, 1.5, E)  # with x[:, 0] = 1: a preference for late experts
    x = torch.randn(S, 16)
    x[:, 0] = 1

    def load() -> torch.Tensor:
        return torch.bincount(gate(x).expert_SK.flatten(), minlength=E)

    mean = S * k / E
    assert load().max() > 2 * mean and load().min() < 0.2 * mean  # skewed at first
    for _ in range(200):
        gate.update(load())
    assert load().max() < 1.25 * mean and load().min() > 0.75 * mean


def test_bias_changes_choices_only() -> None:
    gate = prepared(DeepSeekV3(4, 4, normalize=False))  # all experts: the bias can only reorder them
    x = torch.randn(9, 6, dtype=torch.float64)

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        gate.zero_grad()
        routing = gate(x)
        routing.weight_SK.square().sum().backward()
        assert gate.weight_EM.grad is not None
        return routing.weight_SK.detach().sort(1).values, gate.weight_EM.grad.clone()

    first = outcome()
    with torch.no_grad():
        gate.bias_E.copy_(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    second = outcome()
    assert gate(x).expert_SK.tolist() == [[0, 2, 1, 3]] * 9
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert not gate.bias_E.requires_grad


def test_bias_stays_float32_after_casts() -> None:
    gate = DeepSeekV3(4, 2)
    gate.setup(6)
    gate.bias_E.fill_(1.001)
    for cast in (gate.bfloat16, gate.half, gate.double, lambda: gate.to(torch.bfloat16), gate.float):
        cast()
        assert gate.bias_E.dtype == torch.float32
        assert torch.equal(gate.bias_E, torch.full((4,), 1.001))
    assert gate.state_dict()["bias_E"] is not None
    gate.bfloat16()
    assert gate.weight_EM.dtype == torch.bfloat16
    gate.to("meta")
    assert gate.bias_E.is_meta and gate.bias_E.dtype == torch.float32
    gate.to_empty(device="cpu").reset_parameters()
    assert torch.equal(gate.bias_E, torch.zeros(4)) and gate.weight_EM.abs().max() > 0
