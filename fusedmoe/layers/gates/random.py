"""Random routing: a baseline with an even load and no router."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.layers.gates.base import Gate, Routing
from fusedmoe.layers.gates.hash import constant_routing, constant_weights
from fusedmoe.layers.gates.router import top_experts


class Random(Gate):
    """k distinct experts per token, uniformly at random (Zuo et al. 2022, THOR; Lancet's random gate).

    weight = 1/k, a constant: the router has no parameters, no logits and no losses.
    Random: the choice, in training and in evaluation, from the default generator of the input's device (S·E
    uniform draws); ``torch.manual_seed`` repeats it.
    """

    losses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, experts: int, k: int = 1, capacity_factor: float | None = None) -> None:
        super().__init__(experts, k, capacity_factor)

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        return (torch.rand(len(x_SM), self.experts, dtype=torch.float32, device=x_SM.device),)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return top_experts(drawn[0], self.k), constant_weights(self, x_SM)

    def choose(self, *scores: Tensor) -> Routing:
        return constant_routing(self, *scores)
