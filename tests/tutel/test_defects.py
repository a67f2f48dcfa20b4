"""Defects of Tutel that this package does not have. Each test fails on Tutel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.tutel import moe
from tests.cluster import Cluster
from tests.tutel.cases import draw, fill

D, H = 16, 32


def make(experts: int = 4, gate: dict[str, Any] | None = None, **more: Any) -> moe.MOELayer:
    described = {"type": "ffn", "num_experts_per_device": experts, "hidden_size_per_expert": H}
    return moe.moe_layer({"type": "top", "k": 2, **(gate or {})}, D, described, **more)


def gradients(layer: moe.MOELayer, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def check_gradients_on_subgroup(rank: int, world: int) -> None:
    """Ranks 1 and 3 of four shard the experts between them; results equal one process on their tokens."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    place = (rank - 1) // 2
    torch.set_default_dtype(torch.float64)
    try:
        layer, whole = make(2, group=group), make(4, group=dist.new_group([rank], use_local_synchronization=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.world_size == 2 and layer.num_global_experts == whole.num_global_experts == 4
    fill(layer, place, 2)
    fill(whole, 0, 1)
    x, dy = [draw((9, D), 3 + r) for r in range(2)], [draw((9, D), 5 + r) for r in range(2)]
    y, dx, *own = gradients(layer, x[place], dy[place])
    alone = [gradients(copy.deepcopy(whole), x[r], dy[r]) for r in range(2)]
    torch.testing.assert_close([y, dx], alone[place][:2])
    for mine, first, second, (name, _) in zip(own, alone[0][2:], alone[1][2:], layer.named_parameters(), strict=True):
        if "experts" in name:  # the sum over both ranks' tokens, for this rank's experts
            torch.testing.assert_close(mine, (first + second).chunk(2)[place])
        else:
            torch.testing.assert_close(mine, (first, second)[place])


def test_1_gradients_on_subgroup_equal_one_process(cluster: Cluster) -> None:
    cluster.run(4, check_gradients_on_subgroup)


@pytest.mark.parametrize("k", [1, 2])
def test_2_prioritized_routing_without_capacity_drops_nothing(k: int) -> None:
    plain = make(gate={"k": k, "capacity_factor": 0.0})
    prioritised = make(gate={"k": k, "capacity_factor": 0.0}, batch_prioritized_routing=True)
    prioritised.load_state_dict(plain.state_dict())
    x = draw((24, D), 7).float()
    torch.testing.assert_close(prioritised(x), plain(x))
    bounded = make(gate={"k": k, "capacity_factor": -8.0}, batch_prioritized_routing=True)
    bounded.load_state_dict(plain.state_dict())
    torch.testing.assert_close(bounded(x), plain(x))


def test_3_layer_does_not_modify_arguments() -> None:
    gate = {"type": "top", "k": 2, "gate_noise": 0.5}
    experts = {"type": "ffn", "count_per_node": 2, "hidden_size_per_expert": 8, "activation_fn": F.gelu}
    before = dict(gate), dict(experts)
    first, second = (moe.moe_layer(gate, D, experts) for _ in range(2))
    moe.moe_layer([gate, gate], D, experts)
    assert (gate, experts) == before
    assert str(first) == str(second)


def test_4_default_activation_is_relu() -> None:
    default = make()
    relu = moe.moe_layer(
        {"type": "top", "k": 2},
        D,
        {"type": "ffn", "count_per_node": 4, "hidden_size_per_expert": H, "activation_fn": lambda x: F.relu(x)},
    )
    relu.load_state_dict(default.state_dict())
    x = draw((24, D), 7).float()
    assert torch.equal(default(x), relu(x))


@pytest.mark.parametrize("factor", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("postscore", [True, False])
def test_4_zero_tokens_have_zero_loss_and_gradients(factor: float, postscore: bool) -> None:
    layer = make(gate={"capacity_factor": factor}, is_postscore=postscore)
    x = torch.zeros(0, D, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, D) and float(layer.l_aux.detach()) == 0.0
    (y.sum() + layer.l_aux).backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


def test_4_zero_capacity_returns_zeros() -> None:
    layer = make(gate={"capacity_factor": 0.01})
    x = draw((24, D), 7).float().requires_grad_()
    y = layer(x)
    assert not y.any() and y.shape == x.shape
    (y.sum() + layer.l_aux).backward()
    assert not layer.experts.batched_fc1_w.grad.any() and x.grad is not None


def test_4_strided_input_equals_contiguous_input() -> None:
    layer = make()
    x = draw((D, 24), 7).float()
    assert torch.equal(layer(x.t()), layer(x.t().contiguous()))
    scores = draw((4, 10), 3).softmax(0).t()
    critical, _ = moe.extract_critical(scores, 2)
    rows = moe.fast_encode(draw((6, 10), 1).t(), critical)
    assert torch.equal(rows, moe.fast_encode(draw((6, 10), 1).t().contiguous(), critical))
    torch.testing.assert_close(
        moe.fast_decode(rows.transpose(1, 2).contiguous().transpose(1, 2), critical), moe.fast_decode(rows, critical)
    )


def test_5_float64_is_preserved() -> None:
    critical, _ = moe.extract_critical(draw((10, 4), 3).softmax(1), 2, capacity_factor=0.0)
    x = draw((10, 6), 4)
    assert moe.fast_encode(x, critical).dtype == torch.float64
    torch.testing.assert_close(moe.fast_decode(moe.fast_encode(x, critical), critical), x, rtol=1e-14, atol=1e-14)
    x.requires_grad_()
    function = lambda t: moe.fast_decode(moe.fast_encode(t, critical, False), critical)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x,))


def test_5_half_precision_runs_on_cpu() -> None:
    layer = make()
    x = draw((24, D), 7).float()
    expected = layer(x)
    y = layer.half()(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def test_6_megablocks_size_runs_on_cpu() -> None:
    layer = make(gate={"capacity_factor": 0.0})
    x = draw((24, D), 7).float()
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, megablocks_size=8), expected)
    assert layer.megablocks_size == 8
    layer(x, megablocks_size=8)
    assert layer.megablocks_size == 0  # for evaluation only
