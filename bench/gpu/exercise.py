"""Run every kernel once on small, indivisible sizes and compare with its definition, for use under sanitizers.

`python -m bench.gpu.exercise` ends with the line "exercise: passed" or the faults. Definitions are computed on the CPU,
so that the GPU runs mainly the library's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.case import make_case
from bench.gpu.layer import GRADIENTS
from bench.gpu.reference import make_reference
from bench.gpu.shapes import Shape
from fusedmoe import autograd
from fusedmoe.kernels.activation import (
    ACTIVATIONS,
    clamped_swiglu,
    clamped_swiglu_backward,
    define_clamped_swiglu,
)
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.experts import Weights, experts_backward, experts_forward
from fusedmoe.kernels.gate import GateRule, define_choice
from fusedmoe.kernels.gather_sum import define_gather_sum, define_permute, gather_sum, permute, put_pairs, take_pairs
from fusedmoe.kernels.layout import build_layout, define_layout
from fusedmoe.kernels.wire import define_pack_fp8, define_unpack_fp8, pack_fp8, unpack_fp8

PASSED = "exercise: passed"
# Tokens, top K, experts, and sizes of which bfloat16 rows are multiples of 16 bytes but not of a tile.
_S, _K, _E, _M, _H = 301, 3, 7, 200, 72
_TOLERANCE = 2e-2

Pairs = Iterator[tuple[str, Tensor, Tensor]]


def main(device: torch.device) -> list[str]:
    torch.manual_seed(0)
    faults = []
    for part in PARTS:
        for name, found, right in part(device):
            found, right = found.detach().cpu().double(), right.detach().double()
            if found.shape != right.shape:
                faults.append(f"{name}: {list(found.shape)} instead of {list(right.shape)}")
                continue
            error = float((found - right).norm() / right.norm().clamp(min=1e-20))
            if not error <= _TOLERANCE:
                faults.append(f"{name}: off by {error:.1e}")
        print(f"exercise: {part.__name__}", flush=True)
    return faults


def gate(device: torch.device) -> Pairs:
    for rule in (
        GateRule(_K, statistics=True, logsumexp=True),
        GateRule(_K, "sigmoid", statistics=True),
    ):
        x_SM, w_EM = _normal(_S, _M), _normal(_E, _M) / _M**0.5
        leaves = [tensor.to(device).requires_grad_() for tensor in (x_SM, w_EM)]
        right_leaves = [tensor.double().requires_grad_() for tensor in (x_SM, w_EM)]
        found = autograd.gate(leaves[0], leaves[1], rule)
        right = define_choice(right_leaves[0] @ right_leaves[1].t(), rule)
        yield f"gate {rule.score} experts", found.expert_SK, right.expert_SK
        gradient_SK = torch.randn(_S, _K)
        yield f"gate {rule.score} weights", found.weight_SK, right.weight_SK
        gradients = torch.autograd.grad(found.weight_SK, leaves, gradient_SK.to(device))
        right_gradients = torch.autograd.grad(right.weight_SK, right_leaves, gradient_SK.double())
        for name, gradient, right_gradient in zip(("dx", "dW"), gradients, right_gradients, strict=True):
            yield f"gate {rule.score} {name}", gradient, right_gradient


def rows(device: torch.device) -> Pairs:
    """Order, permute, sums, and values per pair."""
    for capacity, priority_S in ((None, None), (50, torch.rand(_S))):
        expert_SK = _choices()
        found = build_layout(
            expert_SK.to(device), _E, capacity, None if priority_S is None else priority_S.to(device)
        ).exact()
        right = define_layout(expert_SK, _E, capacity, priority_S)
        assert found.source_N is not None and right.source_N is not None
        for name in ("counts_E", "offsets_E1", "source_N", "pair_N", "row_SK"):
            yield f"order {name}", getattr(found, name), getattr(right, name)
        x_SM, weight_N = _normal(_S, _M), torch.rand(right.rows)
        yield "permute", permute(x_SM.to(device), found), define_permute(x_SM, right)
        rows_NM = _normal(right.rows, _M)
        summed = gather_sum(rows_NM.to(device), found, weight_N.to(device))
        yield "gather_sum", summed, define_gather_sum(rows_NM.double(), right, weight_N.double())
        value_SK = torch.rand(_S, _K)
        value_N = value_SK.view(-1)[right.pair_N]
        yield "take_pairs", take_pairs(value_SK.to(device), found), value_N
        yield "put_pairs", put_pairs(value_N.to(device), found), value_SK * (right.row_SK >= 0)
    # Enough pairs for the separate counting kernel.
    many_SK = torch.randint(-1, _E, (3000, 1))
    yield "order of many", build_layout(many_SK.to(device), _E).row_SK, define_layout(many_SK, _E).row_SK


def experts(device: torch.device) -> Pairs:
    for name, bias in (("swiglu", False), ("gelu", True)):
        activation, expert_SK = ACTIVATIONS[name], _choices()
        up = (_E, 2, _H) if activation.gated else (_E, _H)
        b1, b2 = (_normal(*up), _normal(_E, _M)) if bias else (None, None)
        weights = Weights(_normal(*up, _M) / _M**0.5, _normal(_E, _M, _H) / _H**0.5, b1, b2)
        x_SM, dy_SM = _normal(_S, _M), _normal(_S, _M)
        layout, right_layout = build_layout(expert_SK.to(device), _E), define_layout(expert_SK, _E)
        weight_N = torch.rand(right_layout.rows)
        on_device = Weights(*(_to(device, w) for w in (weights.w1, weights.w2, b1, b2)))  # type: ignore[arg-type]
        doubled = Weights(*(_double(w) for w in (weights.w1, weights.w2, b1, b2)))  # type: ignore[arg-type]
        slack = layout.rows - right_layout.rows
        weight = torch.cat([weight_N, torch.zeros(slack)]).to(device)
        x, dy = x_SM.to(device), dy_SM.to(device)
        y_SM, h = experts_forward(x, layout, weight, on_device, activation)
        right_y, right_h = experts_forward(x_SM.double(), right_layout, weight_N.double(), doubled, activation)
        yield f"experts {name} y", y_SM, right_y
        found = experts_backward(dy, x, h, layout, weight, on_device, activation)
        right = experts_backward(
            dy_SM.double(), x_SM.double(), right_h, right_layout, weight_N.double(), doubled, activation
        )
        for key, value in vars(right).items():
            if value is not None:
                gradient = getattr(found, key)
                yield f"experts {name} d{key}", gradient[: len(value)] if key == "weight_N" else gradient, value


def activation(device: torch.device) -> Pairs:
    h_NH, da_NI, bounds = _normal(_S, 2 * _H), _normal(_S, _H), (1.7, 2.0)
    leaf = h_NH.double().requires_grad_()
    right = define_clamped_swiglu(leaf, *bounds)
    yield "clamped_swiglu", clamped_swiglu(h_NH.to(device), *bounds), right
    (dh_NH,) = torch.autograd.grad(right, leaf, da_NI.double())
    yield "clamped_swiglu dh", clamped_swiglu_backward(da_NI.to(device), h_NH.to(device), *bounds), dh_NH


def wire(device: torch.device) -> Pairs:
    rows_NM = _normal(33, _M)
    packed = pack_fp8(rows_NM.to(device))
    yield "pack_fp8", packed, define_pack_fp8(rows_NM)
    yield "unpack_fp8", unpack_fp8(packed, torch.float32), define_unpack_fp8(packed.cpu(), torch.float32)


def ranks(device: torch.device) -> Pairs:
    """Two virtual ranks whose kernels put rows to each other."""
    if device.type == "cpu" and not INTERPRET:
        return
    from bench.gpu.ranks import puts_layer

    case = make_case(Shape("exercise", _S, _M, _H, _E + 1, _K, spread=True), device)
    on_host = replace(case, **{name: value.cpu() for name, value in vars(case).items() if isinstance(value, Tensor)})
    right = make_reference(on_host, torch.float64)
    layer = puts_layer(case, 2)
    y_SM = layer.forward()
    yield "puts y", y_SM, right.y_SM
    gradients = layer.ours(layer.backward(y_SM, case.dy_SM))
    for name, found, wanted in zip(GRADIENTS, gradients, right.gradients, strict=True):
        yield f"puts {name}", found, wanted


def gluon(device: torch.device) -> Pairs:
    """Gluon form of each product, on Hopper; the check compares results, a sanitizer observes the launches."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) != (9, 0):
        return
    from bench.gpu.correctness import check
    from bench.gpu.gluon_first import variants
    from fusedmoe.kernels.triton.grouped.configs import gluon_candidates

    nothing = torch.zeros(0)
    for variant in variants():
        for one in gluon_candidates(variant, (9, 0)):
            fault = check(variant, one.config, device)
            yield f"{variant}, {one.config} {fault}", nothing, torch.zeros(1) if fault else nothing


PARTS: tuple[Callable[[torch.device], Pairs], ...] = (gate, rows, experts, activation, wire, ranks, gluon)


def _normal(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


def _choices() -> Tensor:
    score_SE = torch.rand(_S, _E)
    score_SE[:, 2] = -1
    expert_SK = score_SE.topk(_K, 1).indices
    expert_SK[torch.rand(_S, _K) < 0.1] = -1
    return expert_SK


def _to(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


if __name__ == "__main__":
    found = main(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print("\n".join(found) if found else PASSED, flush=True)
    raise SystemExit(bool(found))
