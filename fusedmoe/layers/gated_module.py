"""Recognises modules that compute `down(silu(gate(x)) · up(x))`, the usual shared expert.

An activation checkpoint replaces saved tensors, but not the autograd graph of a module. This library's kernels save
only tensors, so within checkpoints plans compute such modules with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusedmoe.autograd.experts import WeightParts
from fusedmoe.engine.chunk_experts import JoinedExperts

# Names of the gate, up and down projections: transformers', torchtitan's.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# Modules that were compared with the formula on an input, with the result.
_compared: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def gated_experts(module: nn.Module, x_SM: Tensor) -> JoinedExperts | None:
    """Return a module of this form as experts that save only tensors; None if it is not, or if it would cast `x_SM`."""
    weights = _weights(module)
    if weights is None or torch.is_autocast_enabled(x_SM.device.type):
        return None
    gate, up, down = weights
    fits = up.shape == gate.shape and down.shape == gate.t().shape and gate.shape[1] == x_SM.shape[1]
    if not fits or any(weight.dtype != x_SM.dtype for weight in weights) or not x_SM.is_floating_point():
        return None
    is_equal = _compared.get(module)
    if is_equal is None and (is_equal := _equals_formula(module, gate, up, down)) is not None:
        _compared[module] = is_equal
    return JoinedExperts([gate, up, down], WeightParts(_join, _split), "swiglu") if is_equal else None


def _weights(module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    children = dict(module.named_children())
    names = next((names for names in _PROJECTIONS if children.keys() >= {*names}), None)
    if names is None or len([*module.parameters()]) != len(names) or any(len([*children[n].children()]) for n in names):
        return None
    gate, up, down = (children[name].get_parameter("weight") for name in names)
    return gate, up, down


@torch.no_grad()
def _equals_formula(module: nn.Module, gate: Tensor, up: Tensor, down: Tensor) -> bool | None:
    """Compare a module with the formula; None if all results are zero, as with initial weights of zero."""
    dtype, width = torch.promote_types(gate.dtype, torch.float32), gate.shape[1]
    gate, up, down = gate.to(dtype), up.to(dtype), down.to(dtype)
    # No random numbers: they would change those of the model.
    x_SM = torch.arange(2 * width, device=gate.device).view(2, width).sin().to(dtype)
    # Gates of up to 4, where activations differ clearly.
    x_SM *= 4 / functional.linear(x_SM, gate).abs().max().clamp(min=1e-9)
    formula = functional.linear(functional.silu(functional.linear(x_SM, gate)) * functional.linear(x_SM, up), down)
    parameters = {name: one.to(dtype) for name, one in module.named_parameters()}
    difference = (torch.func.functional_call(module, parameters, (x_SM,)) - formula).abs().max()
    largest = formula.abs().max()
    return None if largest == 0 else bool(difference <= 1e-3 * largest)


def _join(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    gate, up, down = parts
    return torch.stack((gate, up))[None], down[None].contiguous()


def _split(w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    gate, up = w1[0].unbind()
    return gate, up, w2[0]
