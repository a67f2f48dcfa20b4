"""The gate's kernels compared with float64, and gates on kernels compared with plain torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe.autograd.gate import gate, gate_from_logits, router_product
from fusedmoe.gates import Routing
from fusedmoe.gates import base as router
from fusedmoe.kernels.gate import GateChoice, GateRule, count_invalid, define_choice
from fusedmoe.kernels.triton.gate import choose as kernels
from fusedmoe.kernels.triton.gate import router as products
from fusedmoe.kernels.triton.gate.router import Tile
from tests.layers.gate_cases import best_first, make, parts
from tests.marks import slow_without_gpu

ALL: dict[str, Any] = {"statistics": True, "logsumexp": True}
# The rule (k is inserted), and whether there is a bias.
RULES = {
    "softmax": (GateRule(1, **ALL), False),
    "softmax bias": (GateRule(1, scale=0.5, **ALL), True),
    "probability": (GateRule(1, normalize=False, scale=2.5, **ALL), False),
    "probability bias": (GateRule(1, normalize=False, **ALL), True),
    "sigmoid": (GateRule(1, "sigmoid", normalize=False, **ALL), False),
    "sigmoid bias": (GateRule(1, "sigmoid", scale=2.5, **ALL), True),
    "none": (GateRule(1, "none", scale=1.5, **ALL), False),
    "none bias": (GateRule(1, "none", normalize=False, **ALL), True),
}
SIZES = [(1, 100, 1, 1), (37, 100, 7, 2), (300, 512, 64, 8), (37, 512, 128, 10), (300, 100, 512, 16), (1, 512, 128, 3)]
SINGLE = (torch.float32, torch.float32)


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown on failure


def differentiable(choice: GateChoice) -> list[Tensor]:
    results = (choice.weight_SK, choice.score_BE, choice.logsumexp_S)
    return [result for result in results if result is not None]


def double(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def assert_close(got: Tensor, exact: Tensor, tolerance: float = 1e-5, summands: float = 0.0) -> None:
    """Compare norms. `summands`: norm of the terms of sums that may cancel; their float32 rounding remains."""
    assert got.shape == exact.shape
    rounding = 8 * torch.finfo(torch.float32).eps * summands
    assert (got.double() - exact).norm() <= tolerance * exact.norm() + rounding


def check(got: GateChoice, exact: GateChoice, leaves: list[tuple[Tensor, Tensor]]) -> None:
    """Compare results, and the leaves' gradients for random gradients of the results."""
    assert torch.equal(got.expert_SK, exact.expert_SK)
    assert_close(got.logits_SE, exact.logits_SE)
    assert got.bad is not None and got.bad.dtype == torch.int64 and got.bad == 0
    if exact.count_BE is not None:
        assert got.count_BE is not None and torch.equal(got.count_BE.double(), exact.count_BE)
    results, expected = differentiable(got), differentiable(exact)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        assert_close(result, want)
    grads = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for leaf, want in leaves:
        assert leaf.grad is not None and want.grad is not None and leaf.grad.dtype == leaf.dtype
        tolerance = 1e-5 if leaf.dtype == torch.float32 else torch.finfo(leaf.dtype).eps
        # A gradient of logits is a difference of the results' gradients, multiplied by the other operand.
        others = math.prod(float(other.detach().norm()) for _, other in leaves if other is not want)
        assert_close(leaf.grad, want.grad, tolerance, others * sum(float(grad.norm()) for grad in grads))


def sort_by(logits_SE: Tensor, rule: GateRule, bias_E: Tensor | None) -> Tensor:
    if bias_E is None:
        return logits_SE
    score_SE = {"softmax": logits_SE.softmax(1), "sigmoid": logits_SE.sigmoid(), "none": logits_SE}[rule.score]
    return score_SE + bias_E


def operands(
    S: int,
    M: int,
    E: int,
    rule: GateRule,
    device: torch.device,
    bias_E: Tensor | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = SINGLE,
) -> tuple[Tensor, Tensor]:
    """Draw x and W; tokens whose expert choice depends on rounding are drawn again."""
    sign = (lambda t: t.abs()) if rule.score == "none" else (lambda t: t)  # scores are not negative
    x_SM = sign(torch.randn(S, M, device=device)).to(dtypes[0])
    weight_EM = sign(torch.randn(E, M, device=device) / M**0.5).to(dtypes[1])
    for _ in range(1000):
        by_SE = sort_by(x_SM.double() @ weight_EM.double().t(), rule, bias_E)
        best = by_SE.sort(1, descending=True).values[:, : rule.k + 1]
        near_S = (best.diff(dim=1).abs() < 1e-6 * best[:, 1:].abs().clamp(min=1)).any(1)
        if not near_S.any():
            break
        x_SM[near_S] = sign(torch.randn_like(x_SM[near_S]))
    return x_SM.requires_grad_(), weight_EM.requires_grad_()


@pytest.mark.parametrize(
    "name, size, one_kernel",
    [
        pytest.param(name, SIZES[(i + 2 * j) % 6], (i + j) % 2 == 0, marks=() if i % 3 == j else slow_without_gpu)
        for i, name in enumerate(RULES)
        for j in range(3)
    ],
)
def test_gate_kernels_equal_float64_definition(
    name: str,
    size: tuple[int, int, int, int],
    one_kernel: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    S, M, E, k = size
    rule = dataclasses.replace(RULES[name][0], k=k)
    bias_E = torch.randint(-3, 4, (E,), device=device) / 4 if RULES[name][1] else None
    if not one_kernel:
        monkeypatch.setattr(kernels, "fused_tile", lambda *_: None)
    x_SM, weight_EM = operands(S, M, E, rule, device, bias_E)
    exact_x, exact_weight = double(x_SM), double(weight_EM)
    exact = define_choice(exact_x @ exact_weight.t(), rule, bias_E)
    check(gate(x_SM, weight_EM, rule, bias_E), exact, [(x_SM, exact_x), (weight_EM, exact_weight)])


@pytest.mark.parametrize(
    "rule",
    [
        GateRule(2, sequence=20, **ALL),
        GateRule(2, sequence=60, normalize=False, statistics=True),
        GateRule(2, "sigmoid", sequence=15, statistics=True),
        GateRule(2, "sigmoid", logsumexp=True),
        GateRule(2, "none", normalize=False),
    ],
    ids=str,
)
def test_gate_from_logits_returns_only_requested_results(rule: GateRule, device: torch.device) -> None:
    logits_SE = torch.rand(60, 9, device=device).requires_grad_()
    exact_logits = double(logits_SE)
    choice = gate_from_logits(logits_SE, rule)
    assert not choice.logits_SE.requires_grad and logits_SE.requires_grad
    assert (choice.score_BE is not None) == rule.statistics and (choice.logsumexp_S is not None) == rule.logsumexp
    check(choice, define_choice(exact_logits, rule), [(logits_SE, exact_logits)])


@pytest.mark.parametrize("used", ["weight_SK", "score_BE", "logsumexp_S"])
@pytest.mark.parametrize("name", ["softmax", "probability", "sigmoid", "none"])
def test_gradient_of_single_gate_result(name: str, used: str, device: torch.device) -> None:
    logits_SE = torch.rand(37, 7, device=device).requires_grad_()
    exact_logits, rule = double(logits_SE), dataclasses.replace(RULES[name][0], k=3)
    result, expected = (
        getattr(c, used) for c in (gate_from_logits(logits_SE, rule), define_choice(exact_logits, rule))
    )
    grad = torch.randn_like(result)
    result.backward(grad)
    expected.backward(grad.double())
    assert logits_SE.grad is not None and exact_logits.grad is not None
    assert_close(logits_SE.grad, exact_logits.grad)


@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("E", [16, 40, 512])
def test_ties_select_lowest_expert_number(E: int, k: int, device: torch.device) -> None:
    logits_SE = torch.randint(-1, 2, (37, E), device=device).float()
    logits_SE[:3] = 0.25
    logits_SE[2, ::3] = -0.0  # equals 0
    logits_SE[2, 1::3] = 0.0
    expected = [best_first(row, k) for row in logits_SE.tolist()]
    assert gate_from_logits(logits_SE, GateRule(k)).expert_SK.tolist() == expected
    bias_E = torch.full((E,), 0.5, device=device)
    assert gate_from_logits(logits_SE, GateRule(k), bias_E).expert_SK.tolist() == expected


@pytest.mark.parametrize("k", [1, 8, 16])
@pytest.mark.parametrize("E", [16, 40, 512])
def test_logits_differing_in_last_bit_are_ranked_correctly(E: int, k: int, device: torch.device) -> None:
    """Some rows differ by a bit at a selected expert, at the first rejected one, or everywhere; some by much."""
    logits_SE = torch.randn(150, E, device=device)
    best_SE = logits_SE.sort(1, descending=True).indices
    for s in range(100):  # equal to the previous logit, or one bit lower or higher
        place = int(torch.randint(1, min(k + 2, E), ()))
        near = logits_SE[s, best_SE[s, place - 1]].view(torch.int32) + int(torch.randint(-3, 4, ()))
        logits_SE[s, best_SE[s, place]] = near.view(torch.float32)
    logits_SE[:20] = 1 + torch.randint(0, 40, (20, E), device=device) * 2.0**-23
    logits_SE[20:30] *= -1
    expected = logits_SE.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(gate_from_logits(logits_SE, GateRule(k)).expert_SK, expected)


@pytest.mark.parametrize("sequence", [None, 75])
def test_gate_programs_with_several_tiles(
    sequence: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    rule = GateRule(2, sequence=sequence, **ALL)
    logits_SE = torch.rand(300, 9, device=device).requires_grad_()
    exact_logits = double(logits_SE)
    check(gate_from_logits(logits_SE, rule), define_choice(exact_logits, rule), [(logits_SE, exact_logits)])


@pytest.mark.parametrize("name", ["softmax", "probability", "sigmoid", "sigmoid bias"])
def test_logits_of_minus_infinity_are_never_selected(name: str, device: torch.device) -> None:
    rule = dataclasses.replace(RULES[name][0], k=3)
    logits_SE = torch.randn(37, 12, device=device)
    logits_SE[torch.rand_like(logits_SE) < 0.4] = -math.inf
    logits_SE[0, 1:] = -math.inf  # fewer than k remain
    logits_SE[:, 0] = 1.0
    exact_logits = double(logits_SE)
    bias_E = torch.arange(12, device=device) * 2.0 if RULES[name][1] else None
    got = gate_from_logits(logits_SE.requires_grad_(), rule, bias_E)
    exact = define_choice(exact_logits, rule, bias_E)
    results, expected = differentiable(got), differentiable(exact)
    assert got.bad == 0 and torch.equal(got.expert_SK, exact.expert_SK)
    grads = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert logits_SE.grad is not None and exact_logits.grad is not None and logits_SE.grad.isfinite().all()
    # If only scores of zero are chosen, plain torch computes 0 / 0.
    for result, want in zip([*results, logits_SE.grad], [*expected, exact_logits.grad.nan_to_num()], strict=True):
        assert_close(result, want)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_stay_in_range_for_non_finite_logits(bad: float, biased: bool, device: torch.device) -> None:
    logits_SE = torch.randn(9, 7, device=device)
    logits_SE[1], logits_SE[2, 4], logits_SE[3, 2:] = bad, bad, bad
    if math.isnan(bad):  # a sign that arithmetic does not show
        logits_SE.view(torch.int32)[logits_SE.isnan()] |= -(2**31) if math.copysign(1, bad) < 0 else 0
    bias_E = torch.randn(7, device=device) if biased else None
    choice = gate_from_logits(logits_SE, GateRule(3, "sigmoid"), bias_E)
    expected = define_choice(logits_SE.double(), GateRule(3, "sigmoid"), bias_E)
    for row in choice.expert_SK.tolist():
        assert len(set(row)) == 3 and min(row) >= 0 and max(row) < 7
    assert torch.equal(choice.expert_SK, expected.expert_SK)
    torch.testing.assert_close(choice.weight_SK.double(), expected.weight_SK, equal_nan=True)
    assert choice.bad is not None
    wrong = 1 if bad == -math.inf else 3  # rows 2 and 3 have other valid logits
    assert choice.bad == count_invalid(logits_SE) == wrong


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("one_kernel", [True, False])
def test_tokens_with_non_finite_logits_are_counted(name: str, one_kernel: bool, device: torch.device) -> None:
    """Several programs and sequences, every rule; the last program of a sequence has rows of padding."""
    rule, E, S = dataclasses.replace(RULES[name][0], k=2, sequence=75), 5, 300
    bias_E = torch.randn(E, device=device) if RULES[name][1] else None
    x_SM, weight_EM = torch.randn(S, E, device=device).abs(), torch.eye(E, device=device)
    bad_S = torch.rand(S, device=device) < 0.2
    bad_S[74] = True  # repeated in the padding
    where_S, what = torch.randint(E, (S,), device=device), torch.tensor([math.nan, math.inf], device=device)
    if one_kernel:  # a product with NaN is NaN: all logits of the token are
        x_SM[bad_S, where_S[bad_S]] = math.nan
    else:
        x_SM[bad_S, where_S[bad_S]] = what[torch.randint(2, (int(bad_S.sum()),), device=device)]
        x_SM[10] = -math.inf
        bad_S[10] = True
    choice = gate(x_SM, weight_EM, rule, bias_E) if one_kernel else gate_from_logits(x_SM, rule, bias_E)
    assert choice.bad is not None
    assert choice.bad == count_invalid(choice.logits_SE) == bad_S.sum()


def test_sequence_count_beyond_grid_limit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's second axis ends at 65,535; each sequence has two sums."""
    rule, logits_SE = GateRule(2, statistics=True, sequence=2), torch.randn(30, 5, device=device)
    whole = kernels.choose(logits_SE, rule)
    monkeypatch.setattr(products, "_MAX_SUMS", 4)
    launched = []
    launch = products.sum_kernel.__class__.__getitem__
    monkeypatch.setattr(
        products.sum_kernel.__class__, "__getitem__", lambda kernel, grid: launched.append(grid) or launch(kernel, grid)
    )
    found, right = kernels.choose(logits_SE, rule), define_choice(logits_SE.double(), rule)
    assert torch.equal(found.score_BE, whole.score_BE) and torch.equal(found.count_BE, right.count_BE.float())
    torch.testing.assert_close(found.score_BE.double(), right.score_BE, rtol=1e-5, atol=1e-6)
    assert max(grid[1] for grid in launched if len(grid) > 1) == 4


def test_gate_without_tokens(device: torch.device) -> None:
    rule = GateRule(2, sequence=5, **ALL)
    x_SM = torch.empty(0, 100, device=device, requires_grad=True)
    weight_EM = torch.randn(7, 100, device=device, requires_grad=True)
    choice = gate(x_SM, weight_EM, rule)
    assert choice.expert_SK.shape == choice.weight_SK.shape == (0, 2) and choice.expert_SK.dtype == torch.int64
    assert choice.logits_SE.shape == (0, 7)
    for sums in (choice.score_BE, choice.count_BE):
        assert sums is not None and torch.equal(sums, torch.zeros(1, 7, device=device))
    sum(result.sum() for result in differentiable(choice)).backward()
    assert x_SM.grad is not None and x_SM.grad.shape == (0, 100)
    assert weight_EM.grad is not None and torch.equal(weight_EM.grad, torch.zeros_like(weight_EM))
    assert router_product(x_SM, weight_EM).shape == (0, 7)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("E", [40, 300])  # one kernel or two, on a GPU
def test_half_precision_gate_is_as_exact_as_float32(
    E: int, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    """As exact as float32, except for rounding the gradients to the operands' dtypes."""
    rule = GateRule(2, **ALL)
    x_SM, weight_EM = operands(50, 200, E, rule, device, dtypes=dtypes)
    exact_x, exact_weight = double(x_SM), double(weight_EM)
    exact = define_choice(exact_x @ exact_weight.t(), rule)
    check(gate(x_SM, weight_EM, rule), exact, [(x_SM, exact_x), (weight_EM, exact_weight)])


@pytest.mark.parametrize("S, M, E", [(50, 200, 7), (300, 256, 16)])
def test_router_gradient_with_experts_as_columns(
    S: int, M: int, E: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of few experts, whose experts are the columns of dW's product."""
    own = products.product_tile
    few = Tile(16, 128, 64, 4, 2)
    monkeypatch.setattr(products, "product_tile", lambda name, *rest: few if name == "dw" else own(name, *rest))
    x_SM, weight_EM = operands(S, M, E, GateRule(2), device, dtypes=(torch.bfloat16, torch.bfloat16))
    exact_x, exact_weight = double(x_SM), double(weight_EM)
    exact = define_choice(exact_x @ exact_weight.t(), GateRule(2))
    check(gate(x_SM, weight_EM, GateRule(2)), exact, [(x_SM, exact_x), (weight_EM, exact_weight)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("S, M, E", [(1, 1, 1), (37, 16, 7), (300, 100, 600), (20, 512, 3)])
def test_router_product_equals_matmul_with_gradients(
    S: int, M: int, E: int, dtype: torch.dtype, device: torch.device
) -> None:
    x_SM = torch.randn(S, M, device=device).to(dtype).requires_grad_()
    weight_EM = torch.randn(E, M, device=device).to(dtype).requires_grad_()
    exact_x, exact_weight = double(x_SM), double(weight_EM)
    logits_SE, exact = router_product(x_SM, weight_EM), exact_x @ exact_weight.t()
    grad = torch.randn(E, S, device=device).t()
    logits_SE.backward(grad)
    exact.backward(grad.double())
    assert logits_SE.dtype == torch.float32
    assert_close(logits_SE, exact)
    for leaf, want in ((x_SM, exact_x), (weight_EM, exact_weight)):
        assert leaf.grad is not None and want.grad is not None and leaf.grad.dtype == dtype
        assert_close(leaf.grad, want.grad, 1e-5 if dtype == torch.float32 else 1e-3)


def test_strided_operands_are_read_within_bounds(device: torch.device) -> None:
    rule = GateRule(3, **ALL)
    memory = torch.full((64, 100), math.nan, device=device)
    x_SM, weight_EM = operands(37, 100, 7, rule, device)
    memory[:37] = x_SM.detach()
    behind = torch.full((9, 100), math.nan, device=device)
    behind[:7] = weight_EM.detach()
    wide = torch.full((100, 2, 37), math.nan, device=device)
    wide[:, 0] = x_SM.detach().t()
    inputs = [(x_SM.detach(), weight_EM.detach()), (memory[:37], behind[:7]), (wide[:, 0].t(), weight_EM.detach())]
    found = []
    for x, weight in inputs:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        choice = gate(x, weight, rule)
        sum(result.square().sum() for result in differentiable(choice)).backward()
        found.append([choice.expert_SK, *differentiable(choice), x.grad, weight.grad])
    for other in found[1:]:  # bitwise, also for a second run of the same sums
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_gate_never_synchronizes(device: torch.device, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    x_SM, weight_EM = torch.randn(37, 16, device=device), torch.randn(7, 16, device=device)
    x_SM.requires_grad_(), weight_EM.requires_grad_()
    with no_sync():
        choice = gate(x_SM, weight_EM, GateRule(2, **ALL))
        sum(result.sum() for result in differentiable(choice)).backward()


def test_gate_saves_only_inputs_logits_and_experts(device: torch.device) -> None:
    """Only x and W, S·E logits and S·K experts are saved."""
    S, M, E, K = 37, 64, 7, 2
    x_SM = torch.randn(S, M, device=device, dtype=torch.float16, requires_grad=True)
    weight_EM = torch.randn(E, M, device=device, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gate(x_SM, weight_EM, GateRule(K, **ALL))
    own = [t for t in saved if t.data_ptr() not in (x_SM.data_ptr(), weight_EM.data_ptr())]
    assert sorted(t.untyped_storage().nbytes() for t in own) == sorted([4 * S * E, 8 * S * K])


GATE_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"k": 2, "aux": {"balance": 1.0, "z": 0.1}}),
    ("topk", {"k": 1}),
    ("topk", {"k": 3, "normalize": False, "noise": 1.0, "aux": {"importance_load": 1.0, "balance": 0.5}}),
    ("switch", {"aux": {"balance": 1.0, "z": 0.1}}),
    ("batch_prioritised", {"k": 2}),
    ("batch_prioritised", {"k": 2, "normalize": True}),
    ("gshard", {"k": 2, "aux": {"importance_load": 1.0, "balance": 0.5, "z": 0.1}}),
    ("sigmoid", {"k": 2, "aux": {"balance": 1.0, "z": 0.1}}),
    ("xmoe", {"k": 2, "proj_dim": 4}),
    ("deepseek_v3", {"k": 3, "route_scale": 2.5, "sequence": 10, "aux": {"balance": 1.0}}),
    ("deepseek_v3", {"k": 2, "groups": 3, "groups_kept": 2, "aux": {"z": 1.0}}),
    ("expert_choice", {"k": 2, "aux": {"z": 0.1}}),
    ("softmoe", {"aux": {"z": 0.1}}),
]


@pytest.mark.parametrize("S", [0, 40])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name, options", GATE_OPTIONS, ids=str)
def test_gates_with_kernels_equal_plain_torch(
    name: str, options: dict[str, Any], training: bool, S: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "k": options.get("k", 1)}
    layer = make(name, 6, dim=20, **options).train(training).to(device)
    if name == "deepseek_v3":
        layer.bias_E.normal_(std=0.1)
    x_SM = torch.randn(S, 20, device=device, requires_grad=True)
    grad: list[Tensor] = []

    def run() -> list[Tensor | None]:
        torch.manual_seed(5)
        x_SM.grad = None
        layer.zero_grad()
        routing = layer(x_SM)
        results = parts(routing)
        grad.extend(torch.randn_like(result) for result in results if len(grad) < len(results))
        torch.autograd.backward(results, grad)
        if isinstance(routing, Routing):
            results = [*results, routing.expert_SK, routing.logits_SE, routing.priority_S]
        return [*results, x_SM.grad, *(p.grad for p in layer.parameters())]

    calls: list[int] = []
    monkeypatch.setattr(kernels, "_choose", lambda *a, real=kernels._choose: (calls.append(1), real(*a))[1])
    with_kernels = run()
    assert bool(calls) == (name not in ("expert_choice", "softmoe") and options.get("groups") is None)
    monkeypatch.setattr(router, "has_kernels", lambda *_: False)
    for got, expected in zip(with_kernels, run(), strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_float64_and_large_gates_use_plain_torch(device: torch.device) -> None:
    for dtype, E, k in ((torch.float64, 7, 2), (torch.float32, 600, 2), (torch.float32, 40, 33)):
        x_SM = torch.randn(5, 8, device=device, dtype=dtype)
        weight_EM = torch.randn(E, 8, device=device, dtype=dtype)
        choice, exact = gate(x_SM, weight_EM, GateRule(k)), define_choice(x_SM @ weight_EM.t(), GateRule(k))
        assert choice.weight_SK.dtype == dtype and torch.equal(choice.expert_SK, exact.expert_SK)
