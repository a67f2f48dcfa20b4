"""Counted loads: forwards with gradients count, once even if a checkpoint recomputes them. Also the bias dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.gates import DeepSeekV3
from fusedmoe.layers.load import expert_load
from fusedmoe.metrics import Metrics

M, E, K = 6, 4, 2


def make_layer(**options: Any) -> fusedmoe.MoELayer:
    torch.manual_seed(0)
    return fusedmoe.MoELayer(M, DeepSeekV3(E, K, **options), fusedmoe.experts.SwiGLU(5))


def expected_load(layer: fusedmoe.MoELayer, *batches: Tensor) -> list[int]:
    chosen = [layer.gate(x_SM).expert_SK for x_SM in batches]
    return expert_load(torch.cat(chosen), E).tolist()


def reported_load(layer: fusedmoe.MoELayer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the load that the gate receives."""
    loads: list[list[int]] = []
    monkeypatch.setattr(layer.gate, "update", lambda load_E: loads.append(load_E.tolist()))
    layer.update_gate()
    monkeypatch.undo()
    return loads[0]


def plain(layer: nn.Module, x_SM: Tensor) -> Tensor:
    return layer(x_SM)


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x_SM: checkpoint(layer, x_SM, use_reentrant=reentrant)


def nested(outer: bool, inner: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x_SM: checkpoint(
        lambda x: checkpoint(layer, x, use_reentrant=inner), x_SM, use_reentrant=outer
    )


CALLS = {
    "plain": plain,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "checkpoint in checkpoint": nested(False, False),
    "checkpoint in reentrant checkpoint": nested(True, False),
    "reentrant checkpoint in checkpoint": nested(False, True),
    "reentrant checkpoint in reentrant checkpoint": nested(True, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_training_forwards_are_counted_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call = make_layer(), CALLS[name]
    metrics = Metrics(layer)
    trained, other = torch.randn(9, M, requires_grad=True), torch.randn(40, M) + 5
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            call(layer, other)
    call(layer, trained).square().sum().backward()
    call(layer, trained).square().sum().backward()
    with torch.no_grad():
        call(layer, other)
    layer.eval()
    call(layer, other.requires_grad_()).sum().backward()
    layer.train()
    load = expected_load(layer, trained, trained)
    collected = metrics.collect(per_expert=True)
    assert [collected[f"moe/layer/load/{e}"] for e in range(E)] == load
    assert reported_load(layer, monkeypatch) == load
    assert reported_load(layer, monkeypatch) == [0] * E


class Twice(nn.Module):
    """Dense part without parameters."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_load_of_micro_batches_equals_whole_batch(reentrant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    run = fusedmoe.pipeline([Parts(Twice(), layer)], (2, 2))
    x = torch.randn(4, 3, M, requires_grad=True)
    with torch.no_grad():
        run(torch.randn(4, 3, M) + 5)
    z = run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
    z.square().sum().backward()
    assert reported_load(layer, monkeypatch) == expected_load(layer, x.reshape(-1, M))


def test_bias_stays_float32_after_bfloat16_load() -> None:
    small = {"bias_E": torch.ones(E, dtype=torch.bfloat16)}
    for assign in (True, False):
        gate = DeepSeekV3(E, K)
        gate.setup(M)
        gate.bfloat16().load_state_dict(gate.state_dict() | small, assign=assign)
        assert gate.bias_E.dtype == torch.float32
        gate.update(torch.tensor([9.0, 0.0, 9.0, 0.0]))
        torch.testing.assert_close(gate.bias_E, torch.tensor([0.999, 1.001, 0.999, 1.001]))
        assert gate.state_dict()["bias_E"].dtype == torch.float32


def test_assigned_state_on_meta_keeps_float32_bias() -> None:
    layer = make_layer()
    state = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in layer.state_dict().items()
    }
    empty = fusedmoe.MoELayer(M, DeepSeekV3(E, K), fusedmoe.experts.SwiGLU(5), device="meta")
    empty.load_state_dict(state, assign=True)
    assert empty.gate.bias_E.dtype == torch.float32 and empty.gate.weight_EM.dtype == torch.bfloat16


def test_manually_cast_bias_is_restored_to_float32() -> None:
    for cast in (
        lambda gate: setattr(gate, "bias_E", gate.bias_E.bfloat16()),
        lambda gate: setattr(gate.bias_E, "data", gate.bias_E.data.bfloat16()),
    ):
        gate = DeepSeekV3(E, K)
        gate.setup(M)
        gate.bias_E.fill_(1)
        cast(gate)
        gate.update(torch.tensor([9, 0, 9, 0]))
        torch.testing.assert_close(gate.bias_E, torch.tensor([0.999, 1.001, 0.999, 1.001]))
        cast(gate)
        assert gate.float().bias_E.dtype == gate.half().bias_E.dtype == torch.float32
