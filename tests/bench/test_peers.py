"""Peer layers compared with the float64 definition, including gradients; wrong peers are left out."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import Enum
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from bench.gpu import suite
from bench.gpu.case import Case, make_case
from bench.gpu.layer import Layer, Unavailable, leaf
from bench.gpu.memory import saved_bytes
from bench.gpu.ours import NAME, fusedmoe_layer
from bench.gpu.peers import PEERS, liger, scattermoe, sonicmoe, torch_grouped
from bench.gpu.reference import find_errors, make_reference, wrong
from bench.gpu.rehearsal import TINY
from bench.gpu.shapes import Shape
from bench.gpu.spool import Spool
from fusedmoe.kernels.experts import Weights, define_experts
from fusedmoe.kernels.gather_sum import take_pairs
from fusedmoe.kernels.layout import define_layout
from tests.marks import slowly

CPU = torch.device("cpu")


def with_empty_experts(case: Case) -> Case:
    """Reroute rows of experts 1, 2 and the last; a token may then have an expert twice."""
    moved = torch.tensor([0, 0, 0, 3, 4, 4])
    return replace(case, expert_SK=moved[case.expert_SK])


def random_case(seed: int, shape: Shape = TINY[0]) -> Case:
    return make_case(shape, CPU, seed=seed)


def differentiable_definition(x_SM: Tensor, weight_SK: Tensor, w1: Tensor, w2: Tensor, expert_SK: Tensor) -> Tensor:
    """The definition, differentiable; w1 [E, 2, H, M], g before u."""
    layout = define_layout(expert_SK, w1.shape[0])
    return define_experts(x_SM, layout, take_pairs(weight_SK, layout), Weights(w1, w2), "swiglu")


def test_reference_equals_differentiable_definition() -> None:
    case = with_empty_experts(random_case(3))
    right = make_reference(case, torch.float64)
    leaves = [tensor.double().requires_grad_() for tensor in (case.x_SM, case.weight_SK, case.w1, case.w2)]
    y_SM = differentiable_definition(*leaves, case.expert_SK)
    gradients = torch.autograd.grad(y_SM, leaves, case.dy_SM.double())
    for found, expected in zip((right.y_SM, *right.gradients), (y_SM, *gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [fusedmoe_layer, torch_grouped.make], ids=["fusedmoe", "torch._grouped_mm"])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_layer_errors_against_float64_are_within_limits(make: suite.Maker, empty: bool, shape: Shape) -> None:
    case = random_case(5, shape)
    if empty and shape == TINY[0]:
        case = with_empty_experts(case)
    layer = make(case)
    errors = find_errors(layer, case, make_reference(case, torch.float64))
    assert set(errors) == {"y", "dx", "dweight", "dW1", "dW2"}
    assert wrong(errors) == [] and max(errors.values()) > 1e-4  # bfloat16 rounding


@pytest.mark.parametrize("place", [1, *slowly(0, 2, 3)])
def test_wrong_or_nan_gradient_is_detected(place: int) -> None:
    case = random_case(7)
    layer = torch_grouped.make(case)

    def spoiled(gradients: tuple[Tensor, ...]) -> list[Tensor]:
        found = [gradient.clone() for gradient in gradients]
        found[place].view(-1)[:40] = 0  # a tile that no program wrote
        return found

    errors = find_errors(replace(layer, ours=spoiled), case, make_reference(case, torch.float64))
    assert len(wrong(errors)) == 1
    errors |= {list(errors)[1 + place]: torch.nan}
    assert len(wrong(errors)) == 1


def test_torch_grouped_mm_rejects_empty_experts_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_empty_experts(random_case(9))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(Unavailable, match="no rows"):
        torch_grouped.make(case)


class LigerFunction:
    """Liger's conventions in plain torch: W1 [E, 2H, M], g before u; int32 experts; weights in the tokens' dtype."""

    @staticmethod
    def apply(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert index.dtype == torch.int32 and weights.dtype == x.dtype
        E, M, H = down.shape
        return differentiable_definition(x, weights, gate_up.view(E, 2, H, M), down, index.long())


class ScatterExperts(nn.Module):
    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))


class ScatterMlp(nn.Module):
    """ScatterMoE's conventions in plain torch: the first half of the first product is u, the second g."""

    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.experts = ScatterExperts(num_experts, input_size, 2 * hidden_size)
        self.output_experts = ScatterExperts(num_experts, hidden_size, input_size)

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        assert expert_p.dtype == x.dtype
        E, M, H = self.output_experts.weight.shape
        w1 = self.experts.weight.view(E, 2, H, M).flip(1)
        return differentiable_definition(x, expert_p, w1, self.output_experts.weight, expert_idxs)


class ActivationType(Enum):
    SWIGLU = "swiglu"


def sonic_routing_inputs(
    x: Tensor,
    scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: None,
    w2: Tensor,
    b2: None,
    E: int,
    stream_id: int,
    activation_type: ActivationType,
    concat_layout: bool = False,
) -> tuple[Tensor, None]:
    """Sonic's conventions in plain torch: experts last, tokens ascending, g before u only with concat_layout."""
    assert concat_layout and activation_type is ActivationType.SWIGLU and (b1, b2) == (None, None)
    assert token_indices.dtype == expert_indices.dtype == torch.int32 and bool((token_indices.diff() >= 0).all())
    assert w1.permute(2, 0, 1).is_contiguous() and w2.permute(2, 0, 1).is_contiguous()
    M, H, _ = w2.shape
    slots = len(token_indices) // len(x)
    split = w1.permute(2, 0, 1).view(E, 2, H, M)
    y_SM = differentiable_definition(
        x, scores.view(-1, slots), split, w2.permute(2, 0, 1), expert_indices.view(-1, slots).long()
    )
    return y_SM, None


def fake_modules(patch: pytest.MonkeyPatch, **modules: dict[str, object]) -> None:
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        patch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", [liger.NAME, scattermoe.NAME, sonicmoe.NAME])
def test_adapters_follow_conventions_of_peer_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_modules(
        monkeypatch,
        liger_kernel__ops={"LigerFusedMoEFunction": LigerFunction},
        scattermoe__mlp={"GLUMLP": ScatterMlp},
        sonicmoe={"moe_general_routing_inputs": sonic_routing_inputs},
        sonicmoe__enums={"ActivationType": ActivationType},
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    case = random_case(11)
    errors = find_errors(PEERS[name](case), case, make_reference(case, torch.float64))
    assert wrong(errors, 2e-2) == []  # `plain` rounds after each element


def test_wrong_peer_is_excluded_and_wrong_own_layer_raises(capsys: pytest.CaptureFixture[str]) -> None:
    case, spool = random_case(13), Spool()

    def half(case: Case) -> Layer:
        layer = torch_grouped.make(case)
        return replace(layer, forward=lambda: 0.5 * layer.forward())

    def broken(case: Case) -> Layer:
        raise RuntimeError("no kernel image\nis available")

    right = make_reference(case, torch.float64)
    makers = {NAME: fusedmoe_layer, "half": half, "broken": broken, "torch": torch_grouped.make}
    ready = suite.ready_layers(case, makers, right, spool)
    assert [layer.name for layer, _ in ready] == [NAME, torch_grouped.NAME]
    words = {record["name"]: record["word"] for record in spool.of("skipped")}
    assert set(words) == {"half", "broken"} and words["half"].startswith("wrong result: y is off by 5")
    assert words["broken"] == "RuntimeError: no kernel image"
    assert spool.unfinished() == []
    with pytest.raises(suite.WrongResult):
        suite.ready_layers(case, {NAME: half}, right, spool)


def test_saved_bytes_exclude_parameters() -> None:
    """A function saves its tokens, H (2·R·H) and its weights: parameters are not counted."""
    case = random_case(17)
    S, M, R, H = TINY[0].S, TINY[0].M, TINY[0].rows, TINY[0].H

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w1, x.new_empty(R, 2 * H), x[:3])
            return x.clone()

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            return dy, None

    leaves = leaf(case.x_SM), leaf(case.weight_SK), leaf(case.w1), leaf(case.w2)
    layer = Layer("saves", None, lambda: Saves.apply(leaves[0], leaves[2]), leaves)
    assert saved_bytes(layer) == 2 * (S * M + 2 * R * H)
    ours, torchs = saved_bytes(fusedmoe_layer(case)), saved_bytes(torch_grouped.make(case))
    assert 2 * (S * M + 2 * R * H) <= ours < torchs
