"""The gate as an operation on CPU tensors: compared with loops over tokens and experts, and its errors."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from fusedmoe.autograd.gate import GateRule, gate, gate_from_logits
from fusedmoe.errors import ConfigError
from tests.layers.gate_cases import best_first


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown when a test fails


@pytest.mark.parametrize(
    "score, normalize, biased, sequence",
    [*product(["softmax", "sigmoid", "none"], [True, False], [True, False], [None]), ("softmax", True, False, 4)],
)
def test_gate_equals_loop_definition(score: str, normalize: bool, biased: bool, sequence: int | None) -> None:
    S, M, E, K = 12, 5, 7, 3
    x, weight = torch.rand(S, M, dtype=torch.float64), torch.rand(E, M, dtype=torch.float64)
    bias = torch.randn(E, dtype=torch.float64) if biased else None
    rule = GateRule(K, score, normalize, 2.5, statistics=True, sequence=sequence, logsumexp=True)
    choice = gate(x, weight, rule, bias)
    shares = []
    for s in range(S):
        logits = [sum(a * b for a, b in zip(x[s].tolist(), w, strict=True)) for w in weight.tolist()]
        assert choice.logits_SE[s].tolist() == pytest.approx(logits)
        power = sum(math.exp(v) for v in logits)
        assert choice.logsumexp_S is not None and choice.logsumexp_S[s].item() == pytest.approx(math.log(power))
        scores = {
            "softmax": [math.exp(v) / power for v in logits],
            "sigmoid": [1 / (1 + math.exp(-v)) for v in logits],
            "none": logits,
        }[score]
        by = logits if bias is None else [v + b for v, b in zip(scores, bias.tolist(), strict=True)]
        experts = best_first(by, K)
        assert choice.expert_SK[s].tolist() == experts
        own = [scores[e] for e in experts]
        assert choice.weight_SK[s].tolist() == pytest.approx([2.5 * w / (sum(own) if normalize else 1) for w in own])
        shares.append([v / sum(scores) for v in scores] if score == "sigmoid" else scores)
    length = sequence or S
    assert choice.score_BE is not None and choice.count_BE is not None
    for b, first in enumerate(range(0, S, length)):
        rows = range(first, first + length)
        assert choice.score_BE[b].tolist() == pytest.approx([sum(shares[s][e] for s in rows) for e in range(E)])
        chosen = [e for s in rows for e in choice.expert_SK[s].tolist()]
        assert choice.count_BE[b].tolist() == [chosen.count(e) for e in range(E)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gate_gradients_pass_gradcheck(score: str, normalize: bool) -> None:
    x = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    rule = GateRule(2, score, normalize, statistics=True, sequence=3, logsumexp=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        choice = gate(x, weight, rule)
        return choice.weight_SK, choice.score_BE, choice.logsumexp_S

    assert torch.autograd.gradcheck(run, (x, weight))


def test_half_precision_gate_computes_in_float32() -> None:
    x, weight = torch.randn(20, 8).bfloat16(), torch.randn(4, 8).half()
    with torch.autocast("cpu", torch.bfloat16):
        choice = gate(x, weight, GateRule(2))
    assert choice.weight_SK.dtype == choice.logits_SE.dtype == torch.float32
    torch.testing.assert_close(choice.logits_SE, x.float() @ weight.float().t())
    again = gate_from_logits(choice.logits_SE.bfloat16(), GateRule(2))
    assert again.weight_SK.dtype == torch.float32


def test_mismatched_shapes_raise_config_error() -> None:
    x, weight = torch.randn(6, 4), torch.randn(3, 4)
    with pytest.raises(ConfigError, match=r"tokens \[6, 4\] and matrix \[3, 5\] do not fit"):
        gate(x, torch.randn(3, 5), GateRule(1))
    with pytest.raises(ConfigError, match=r"logits must be \[S, E\], got \[6\]"):
        gate_from_logits(torch.randn(6), GateRule(1))
    with pytest.raises(ConfigError, match="k = 4 is more than its 3 experts"):
        gate(x, weight, GateRule(4))
    with pytest.raises(ConfigError, match=r"bias must be \[3\], got \[4\]"):
        gate(x, weight, GateRule(1), torch.zeros(4))
    with pytest.raises(ConfigError, match="6 tokens do not divide into sequences of 4"):
        gate(x, weight, GateRule(1, sequence=4))
    with pytest.raises(ConfigError, match="k must be an integer of at least 1, got 0"):
        GateRule(0)
    with pytest.raises(ConfigError, match="unknown score 'tanh'; choose one of softmax, sigmoid, none"):
        GateRule(1, "tanh")
