"""Each gate compared with a loop over tokens and experts in float64; gradients compared with finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.gates import (
    BatchPrioritised,
    DeepSeekV3,
    ExpertChoice,
    Gate,
    GShard,
    Hash,
    Random,
    Sigmoid,
    SoftMoE,
    Switch,
    TopK,
    XMoE,
)
from fusedmoe.gates.topk import top_experts
from tests.layers.gate_cases import best_first, parts
from tests.marks import slowly

S, M = 17, 6


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown on failure


def prepared(gate: Gate) -> Gate:
    gate.setup(M, dtype=torch.float64)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return gate


def tokens(count: int = S) -> Tensor:
    return torch.randn(count, M, dtype=torch.float64)


def dot(a: list[float], b: list[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


def linear(x: Tensor, weight: Tensor) -> list[list[float]]:
    return [[dot(token, row) for row in weight.tolist()] for token in x.tolist()]


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def balance(probs: list[list[float]], chosen: list[list[int]], experts: int) -> float:
    slots = [e for row in chosen for e in row]
    return experts * sum(
        sum(row[e] for row in probs) / len(probs) * slots.count(e) / len(slots) for e in range(experts)
    )


def assert_routed(gate: Gate, x: Tensor, chosen: list[list[int]], weights: list[list[float]], aux: float) -> None:
    routing = gate(x)
    assert routing.expert_SK.tolist() == chosen
    torch.testing.assert_close(routing.weight_SK, torch.tensor(weights, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert routing.aux_loss.item() == pytest.approx(aux, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", [TopK, BatchPrioritised])
def test_top_k_equals_reference(kind: Callable[..., TopK], normalize: bool, k: int) -> None:
    gate, x = prepared(kind(5, k, normalize=normalize, aux={"balance": 2.0, "z": 0.5})), tokens()
    logits = linear(x, gate.weight_EM)
    probs = [softmax(row) for row in logits]
    chosen = [best_first(row, k) for row in logits]
    weights = [[p[e] for e in c] for p, c in zip(probs, chosen, strict=True)]
    if normalize and k > 1:
        weights = [[w / sum(row) for w in row] for row in weights]
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits) / S
    assert_routed(gate, x, chosen, weights, 2 * balance(probs, chosen, 5) + 0.5 * z)
    priority_S = gate(x).priority_S
    if kind is BatchPrioritised:
        assert priority_S.tolist() == pytest.approx([max(p) for p in probs])
    else:
        assert priority_S is None


@pytest.mark.parametrize("k", [1, 2])
def test_noisy_top_k_equals_reference(k: int) -> None:
    gate, x = prepared(TopK(4, k, noise=3.0, aux={})), tokens()
    torch.manual_seed(7)
    routing = gate(x)
    torch.manual_seed(7)
    noise = torch.randn(S, 4, dtype=torch.float64) * 3 / 4
    noisy = torch.tensor(linear(x, gate.weight_EM), dtype=torch.float64) + noise
    assert routing.expert_SK.tolist() == [best_first(row, k) for row in noisy.tolist()]
    torch.testing.assert_close(routing.logits_SE, noisy)
    gate.eval()
    assert gate(x).expert_SK.tolist() == [best_first(row, k) for row in linear(x, gate.weight_EM)]


def test_switch_equals_reference() -> None:
    gate, x = prepared(Switch(5, jitter=0.5)), tokens()
    torch.manual_seed(7)
    routing = gate(x)
    torch.manual_seed(7)
    factor = torch.empty(S, M, dtype=torch.float64).uniform_(0.5, 1.5)
    probs = [softmax(row) for row in linear(x * factor, gate.weight_EM)]
    chosen = [best_first(p, 1) for p in probs]
    assert routing.expert_SK.tolist() == chosen
    assert routing.weight_SK[:, 0].tolist() == pytest.approx([max(p) for p in probs])
    assert routing.aux_loss.item() == pytest.approx(balance(probs, chosen, 5))
    gate.eval()
    probs = [softmax(row) for row in linear(x, gate.weight_EM)]
    chosen = [best_first(p, 1) for p in probs]
    assert_routed(gate, x, chosen, [[max(p)] for p in probs], balance(probs, chosen, 5))


def cv_squared(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / mean**2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_gshard_equals_reference(k: int, training: bool) -> None:
    E = 4
    gate, x = prepared(GShard(E, k, aux={"importance_load": 2.0, "balance": 1.0})).train(training), tokens()
    clean = linear(x, gate.weight_EM)
    std = [[math.log1p(math.exp(v)) for v in row] for row in linear(x, gate.noise_weight_EM)]
    torch.manual_seed(7)
    draw = torch.randn(S, E, dtype=torch.float64).tolist() if training else [[0.0] * E] * S
    noisy = [[clean[s][e] + draw[s][e] * std[s][e] for e in range(E)] for s in range(S)]
    chosen = [best_first(row, k) for row in noisy]
    weights = [softmax([noisy[s][e] for e in chosen[s]]) for s in range(S)]
    importance, load = [0.0] * E, [0.0] * E
    for s in range(S):
        for e in range(E):
            others = sorted((noisy[s][o] for o in range(E) if o != e), reverse=True)
            if k < E:
                distance = (clean[s][e] - others[k - 1]) / std[s][e]
                load[e] += (1 + math.erf(distance / math.sqrt(2))) / 2
            else:
                load[e] += 1
            if e in chosen[s]:
                importance[e] += weights[s][chosen[s].index(e)]
    aux = cv_squared(importance) + cv_squared(load) + balance([softmax(row) for row in noisy], chosen, E)
    torch.manual_seed(7)
    assert_routed(gate, x, chosen, weights, aux)


@pytest.mark.parametrize("kind", [TopK, BatchPrioritised])
def test_importance_load_loss_of_fixed_noise_equals_reference(kind: Callable[..., TopK]) -> None:
    E, k = 5, 2
    gate, x = prepared(kind(E, k, noise=2.0, aux={"importance_load": 1.0})), tokens()
    clean = linear(x, gate.weight_EM)
    torch.manual_seed(7)
    noisy = (torch.tensor(clean, dtype=torch.float64) + torch.randn(S, E, dtype=torch.float64) * 2 / E).tolist()
    importance, load = [0.0] * E, [0.0] * E
    for s in range(S):
        for e in range(E):
            others = sorted((noisy[s][o] for o in range(E) if o != e), reverse=True)
            load[e] += (1 + math.erf((clean[s][e] - others[k - 1]) / (2 / E) / math.sqrt(2))) / 2
            importance[e] += softmax(clean[s])[e]
    torch.manual_seed(7)
    assert gate(x).aux_loss.item() == pytest.approx((cv_squared(importance) + cv_squared(load)) / 2)


@pytest.mark.parametrize("k", [1, 3])
def test_sigmoid_gate_equals_reference(k: int) -> None:
    gate, x = prepared(Sigmoid(4, k, aux={"balance": 1.0})), tokens()
    logits = linear(x, gate.weight_EM)
    chosen = [best_first(row, k) for row in logits]
    scores = [[sigmoid(v) for v in row] for row in logits]
    weights = [[row[e] for e in c] for row, c in zip(scores, chosen, strict=True)]
    shares = [[v / sum(row) for v in row] for row in scores]
    assert_routed(gate, x, chosen, weights, balance(shares, chosen, 4))


@pytest.mark.parametrize("k", [1, 2])
def test_xmoe_equals_reference(k: int) -> None:
    gate, x = prepared(XMoE(5, k, proj_dim=3)), tokens()

    def unit(v: list[float]) -> list[float]:
        return [a / math.sqrt(dot(v, v)) for a in v]

    experts = [unit(row) for row in gate.expert_EP.tolist()]
    scale = min(math.exp(gate.log_scale.item()), 100)
    logits = [[dot(unit(t), e) * scale for e in experts] for t in linear(x, gate.proj_PM)]
    probs = [softmax(row) for row in logits]
    chosen = [best_first(row, k) for row in logits]
    weights = [[p[e] for e in c] for p, c in zip(probs, chosen, strict=True)]
    if k > 1:
        weights = [[w / sum(row) for w in row] for row in weights]
    assert_routed(gate, x, chosen, weights, balance(probs, chosen, 5))


def test_xmoe_temperature_is_initialized_and_bounded() -> None:
    gate = XMoE(4, temperature=0.2)
    gate.setup(M, dtype=torch.float64)
    x = tokens()
    assert gate(x).logits_SE.abs().max() <= 5 + 1e-9
    with torch.no_grad():
        gate.log_scale.fill_(50.0)
    assert gate(x).logits_SE.abs().max() <= 100 + 1e-6


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_soft_moe_equals_reference(slots: int, normalize: bool) -> None:
    gate, x = prepared(SoftMoE(4, slots, normalize=normalize, aux={"z": 1.0})), tokens()
    weight, inputs = gate.weight_NM, x
    if normalize:
        weight = torch.stack([row / row.square().sum().sqrt() for row in weight]) * gate.scale
        inputs = torch.stack([row / row.square().sum().sqrt() for row in x])
    logits = linear(inputs, weight)
    columns = [softmax([row[n] for row in logits]) for n in range(4 * slots)]
    routing = gate(x)
    torch.testing.assert_close(routing.dispatch_SN, torch.tensor(columns, dtype=torch.float64).t())
    torch.testing.assert_close(routing.combine_SN, torch.tensor([softmax(r) for r in logits], dtype=torch.float64))
    assert routing.slots == slots
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits) / S
    assert routing.aux_loss.item() == pytest.approx(z)


@pytest.mark.parametrize("k, factor, count", [(2, 1.0, S), (1, 0.3, S), (4, 2.0, S), (2, 1.0, 1), (1, 1.0, 3)])
def test_expert_choice_equals_reference(k: int, factor: float, count: int) -> None:
    E = 4
    gate, x = prepared(ExpertChoice(E, k, factor, aux={})), tokens(count)
    probs = [softmax(row) for row in linear(x, gate.weight_EM)]
    rows = min(math.ceil(k * factor * count / E), count)
    assert gate.picks(count) == rows
    chosen = [[-1] * E for _ in range(count)]
    weights = [[0.0] * E for _ in range(count)]
    for e in range(E):
        for s in best_first([p[e] for p in probs], rows):
            chosen[s][e] = e
            weights[s][e] = probs[s][e]
    assert_routed(gate, x, chosen, weights, 0)
    assert gate.capacity_factor is None and gate(x).capacity is None
    assert ((gate(x).expert_SK >= 0).sum(0) == rows).all()


def test_expert_choice_ties_choose_lowest_tokens() -> None:
    gate = prepared(ExpertChoice(4, 1))
    x = tokens(1).expand(12, M).clone()
    picked = gate(x).expert_SK >= 0
    assert torch.equal(picked, (torch.arange(12) < 3)[:, None].expand(12, 4))
    x[7] = tokens(1)[0]
    for e in range(4):
        score = gate(x).logits_SE.softmax(1)[:, e].tolist()
        assert sorted(best_first(score, 3)) == (gate(x).expert_SK[:, e] >= 0).nonzero()[:, 0].tolist()


def mix(value: int) -> int:
    """splitmix64's finaliser (Steele et al. 2014) on an unsigned integer."""
    value %= 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def hashed(key: int, experts: int, seed: int) -> list[float]:
    salts = [mix(e + (seed + 1) * 0x9E3779B97F4A7C15) for e in range(experts)]
    return [signed(mix(mix(key) + salt)) for salt in salts]


@pytest.mark.parametrize("k, seed", [(1, 0), (3, 5), (4, -2)])
def test_hash_of_token_ids_equals_reference(k: int, seed: int) -> None:
    gate = Hash(4, k, seed=seed)
    gate.setup(M)
    token_ids = torch.randint(-(2**40), 2**40, (3, 6))
    gate.token_ids = token_ids
    routing = gate(tokens(18))
    assert routing.expert_SK.tolist() == [best_first(hashed(i, 4, seed), k) for i in token_ids.flatten().tolist()]
    assert torch.equal(routing.weight_SK, torch.full((18, k), 1 / k, dtype=torch.float64))
    assert routing.logits_SE is None and routing.aux_loss.item() == 0
    gate.token_ids = token_ids.flatten()[:5].to(torch.int32)
    with pytest.raises(ConfigError, match=r"token_ids must be 18 integers, one per token, got torch.int32 \[5\]"):
        gate(tokens(18))
    gate.token_ids = torch.rand(18)
    with pytest.raises(ConfigError, match="token_ids must be 18 integers"):
        gate(tokens(18))


def test_hash_of_rows_equals_reference() -> None:
    gate = Hash(8, 2)
    gate.setup(M)
    x = tokens(200)
    first = gate(x).expert_SK
    factor = [(mix(m) + 2**31) % 2**32 - 2**31 for m in range(1, M + 1)]
    for s in range(5):
        bits = x[s].bfloat16().view(torch.int16).tolist()
        key = (sum(b * f for b, f in zip(bits, factor, strict=True)) + 2**31) % 2**32 - 2**31
        assert first[s].tolist() == best_first(hashed(key, 8, 0), 2)
    order = torch.randperm(200)
    assert torch.equal(gate(x[order]).expert_SK, first[order])  # depends on the row only
    assert torch.equal(gate(x.float()).expert_SK, first)
    assert torch.equal(gate(torch.zeros(1, M)).expert_SK, gate(-torch.zeros(1, M)).expert_SK)


@pytest.mark.parametrize("source", ["ids", "rows", "random"])
def test_hash_and_random_are_uniform(source: str) -> None:
    n, E, k = 20000, 5, 2
    gate = Random(E, k) if source == "random" else Hash(E, k)
    gate.setup(M)
    if source == "ids":
        gate.token_ids = torch.arange(n)  # neighbouring ids
    chosen = gate(torch.randn(n, M)).expert_SK
    pairs = torch.bincount(chosen[:, 0] * E + chosen[:, 1], minlength=E * E).view(E, E)
    assert pairs.diagonal().sum() == 0
    expected = n / (E * (E - 1))
    off = pairs[~torch.eye(E, dtype=torch.bool)]
    # Five standard deviations of a binomial count, for each of the 20 ordered pairs.
    assert ((off - expected).abs() < 5 * math.sqrt(expected)).all()


def test_hash_depends_on_seed() -> None:
    chosen = []
    for seed in (0, 1):
        gate = Hash(8, seed=seed)
        gate.setup(M)
        gate.token_ids = torch.arange(1000)
        chosen.append(gate(tokens(1000)).expert_SK)
    assert 50 < (chosen[0] == chosen[1]).sum() < 250  # one in eight


def test_random_gate_differs_between_calls_in_evaluation() -> None:
    gate = Random(8)
    gate.setup(M)
    gate.eval()
    assert not torch.equal(gate(tokens(100)).expert_SK, gate(tokens(100)).expert_SK)


@pytest.mark.parametrize(
    "make_gate",
    [
        lambda: TopK(4, 2, normalize=False, noise=1.0, aux={"importance_load": 1.0}),
        lambda: Switch(4),
        lambda: BatchPrioritised(4, 2),
        lambda: GShard(4, 2, aux={"balance": 1.0, "importance_load": 1.0, "z": 0.1}),
        lambda: Sigmoid(4, 2, aux={"balance": 1.0, "z": 0.1}),
        lambda: XMoE(4, 2, proj_dim=3, aux={"balance": 1.0, "z": 0.1}),
        lambda: SoftMoE(4, 2, aux={"z": 0.1}),
        lambda: ExpertChoice(4, 2, aux={"z": 0.1}),
        lambda: DeepSeekV3(4, 2, groups=2, groups_kept=1, route_scale=2.5, aux={"balance": 1.0, "z": 0.1}),
        *slowly(
            lambda: GShard(4, 4, aux={"importance_load": 1.0}),
            lambda: SoftMoE(4, 2, normalize=False),
            lambda: DeepSeekV3(4, 1, sequence=3, aux={"balance": 1.0}),
            lambda: TopK(4, 2, aux={"balance": 1.0, "z": 0.1}),
        ),
    ],
)
def test_gate_gradients_equal_finite_differences(make_gate: Callable[[], Gate]) -> None:
    gate = prepared(make_gate())
    x = tokens(6).requires_grad_()
    names = [name for name, _ in gate.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)  # the same noise at every point
        routing = torch.func.functional_call(gate, dict(zip(names, values, strict=True)), (x,))
        return tuple(parts(routing))

    parameters = [p.detach().clone().requires_grad_() for p in gate.parameters()]
    assert torch.autograd.gradcheck(run, (x, *parameters), eps=1e-7, atol=1e-4, rtol=1e-4)


def test_second_derivatives_equal_finite_differences() -> None:
    gate = prepared(TopK(4, 2))
    x = tokens(3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: gate(x).weight_SK, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("E, k", [(1, 1), (6, 1), (6, 6), (40, 3), (40, 33), (40, 40)])
def test_top_experts_with_ties_equals_reference(E: int, k: int, dtype: torch.dtype) -> None:
    score = torch.randint(-2, 3, (50, E)).to(dtype)
    if dtype == torch.int64:
        score[0] = torch.iinfo(dtype).min
    else:
        score[0], score[1, ::2] = -math.inf, math.inf
    kept = score.clone()
    assert top_experts(score, k).tolist() == [best_first(row, k) for row in score.tolist()]
    assert torch.equal(score, kept)
    assert top_experts(score[:0], k).shape == (0, k)


def test_top_experts_of_nan_are_distinct() -> None:
    score = torch.randn(30, 6)
    score[torch.rand(30, 6) < 0.4] = math.nan
    for row, scores in zip(top_experts(score, 4).tolist(), score, strict=True):
        assert len(set(row)) == 4 and set(row) <= set(range(6))
        nans = scores.isnan().nonzero()[:, 0].tolist()
        assert row[: len(nans)] == nans[:4]
