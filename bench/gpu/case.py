"""Random inputs of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.shapes import Shape


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of every variant of a layer, including routing, on one device.

    Attributes:
        x_SM, dy_SM: tokens, and the gradient of the results.
        expert_SK: int64, distinct per row, uniformly distributed; no empty slots.
        weight_SK: float32 values representable in bfloat16, so that variants may use either.
        router_EM: router weights. w1: [E, 2, H, M], g before u. w2: [E, M, H].
    """

    shape: Shape
    x_SM: Tensor
    dy_SM: Tensor
    expert_SK: Tensor
    weight_SK: Tensor
    router_EM: Tensor
    w1: Tensor
    w2: Tensor


def make_case(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
    """Create normally distributed inputs with activations near 1 (zeros and small integers would run faster)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    S, M, H, E = shape.S, shape.M, shape.H, shape.E
    score_SE = torch.rand((S, E), generator=generator, device=device)
    top = score_SE.topk(shape.K, dim=1)
    return Case(
        shape,
        x_SM=normal(S, M),
        dy_SM=normal(S, M),
        expert_SK=top.indices,
        weight_SK=top.values.softmax(1).bfloat16().float(),
        router_EM=normal(E, M, scale=M**-0.5),
        w1=normal(E, 2, H, M, scale=M**-0.5),
        w2=normal(E, M, H, scale=H**-0.5),
    )
