"""Modules that are recognised as gated networks, and modules that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusedmoe.engine.shared_expert_task import SharedExpertTask
from fusedmoe.layers.gated_module import gated_experts

M, H = 6, 5


class Gated(nn.Module):
    def __init__(self, names: tuple[str, str, str], activation: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name, (width, out) in zip(names, ((M, H), (M, H), (H, M)), strict=True):
            self.add_module(name, nn.Linear(width, out, bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(self.activation(gate(x)) * up(x))
        return y


HF, TITAN = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@pytest.mark.parametrize("names", [HF, TITAN])
@pytest.mark.parametrize("rows", [7, 0])
def test_gated_module_has_results_and_gradients_of_the_module(names: Any, rows: int) -> None:
    torch.manual_seed(1)
    module, (x, dy) = Gated(names, functional.silu).double(), torch.randn(2, rows, M, dtype=torch.float64)
    found = gated_experts(module, x)
    assert found is not None and found.can_rechunk
    task = SharedExpertTask(found, x)
    with torch.no_grad():
        for _ in range(2):
            task.forward(2, keep=True)
        result, task = task.take_result(), SharedExpertTask.restored(found, *task.save())
        task.backward(dy, 1)
    inputs = x.clone().requires_grad_()
    wanted = module(inputs)
    torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
    weights = [module.get_submodule(name).weight for name in names]
    grads = torch.autograd.grad(wanted, [inputs, *weights], dy)
    assert task.totals is not None
    for own, value in zip((task.result, *task.totals), grads, strict=True):
        torch.testing.assert_close(own, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_other_modules_are_not_gated(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, M, dtype=dtype)
    swapped = HF[1], HF[0], HF[2]
    others = [Gated(HF, functional.gelu), Gated(HF, functional.silu, bias=True), Gated(swapped, functional.silu)]
    others += [nn.Sequential(nn.Linear(M, M)), Gated(HF, lambda h: 1.01 * functional.silu(h))]
    for module in others:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(scale)
        assert gated_experts(module.to(dtype), x) is None
    assert (
        gated_experts(Gated(HF, functional.silu).to(dtype), x.float() if dtype != torch.float32 else x.double()) is None
    )


def test_module_with_zero_weights_is_compared_again() -> None:
    module, x = Gated(HF, functional.gelu), torch.randn(3, M)
    weight = module.get_submodule("down_proj").weight
    kept = weight.detach().clone()
    for value, activation, is_gated in (
        (0, functional.gelu, False),
        (0, functional.silu, False),
        (1, functional.silu, True),
    ):
        module.activation = activation
        with torch.no_grad():
            weight.copy_(value * kept)
        assert (gated_experts(module, x) is not None) == is_gated
