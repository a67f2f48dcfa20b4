"""Random inputs of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.shapes import Shape


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs that every variant of a layer is given, routing included; all of them on one device.

    Attributes:
        x_SM, dy_SM: tokens and the gradient of their results.
        expert_SK: int64, distinct in a row, every expert as likely; no slot is empty.
        weight_SK: float32 that bfloat16 holds exactly, so that a variant may take either.
        router_EM: the gate's matrix. w1: [E, 2, H, M], first g, then u. w2: [E, M, H].
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
    """Makes a case of normal random numbers; activations stay near 1 (zeros and small integers would run faster)."""
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
