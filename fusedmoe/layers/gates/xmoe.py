"""X-MoE's cosine gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from fusedmoe.layers.gates.base import INIT_STD, Routing, check_count, fill_normal
from fusedmoe.layers.gates.router import router_logits
from fusedmoe.layers.gates.topk import TopK

_MAX_LOG_SCALE = math.log(100.0)


class XMoE(TopK):
    """Cosine between a low-dimensional projection and expert embeddings (Chi et al. 2022, X-MoE, eq. 5–7).

    s_e = cos(W_proj·x, w_e) / τ with both sides l2-normalised, p = softmax(s); then as ``TopK`` without
    noise. The low dimension and the normalisation keep token representations from collapsing towards the
    experts' embeddings. τ is learned as log(1/τ), bounded to 1/τ ≤ 100.

    Random: nothing. Losses: "balance" (share of all k choices), "z".
    Parameters: ``proj_PM`` [P, M] normal with standard deviation 1/√M; ``expert_EP`` [E, P] normal (only its
    direction matters); ``log_scale`` [1].

    Args:
        proj_dim: P, dimension in which tokens and experts are compared (the authors' code uses 16).
        temperature: τ at the start, at least 0.01.
    """

    losses: ClassVar[tuple[str, ...]] = ("balance", "z")
    proj_PM: nn.Parameter
    expert_EP: nn.Parameter
    log_scale: nn.Parameter

    def __init__(
        self,
        experts: int,
        k: int = 1,
        capacity_factor: float | None = None,
        *,
        proj_dim: int = 16,
        temperature: float = 0.3,
        normalize: bool = True,
        aux: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(experts, k, capacity_factor, normalize=normalize, aux=aux)
        check_count(self, "proj_dim", proj_dim)
        self.require(0.01 <= temperature < math.inf, f"temperature must be at least 0.01 and finite, got {temperature}")
        self.proj_dim = proj_dim
        self.temperature = temperature

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {
            "proj_PM": (self.proj_dim, model_dim),
            "expert_EP": (self.experts, self.proj_dim),
            "log_scale": (1,),  # not a scalar: fully sharded data parallelism splits dimension 0
        }

    def reset_parameters(self) -> None:
        fill_normal(self.proj_PM, self.proj_PM.shape[1] ** -0.5)
        fill_normal(self.expert_EP, INIT_STD)
        nn.init.constant_(self.log_scale, -math.log(self.temperature))

    def route(self, x_SM: Tensor) -> Routing:
        return self.choose(*self.score(x_SM))

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        token_SP = nn.functional.normalize(router_logits(x_SM, self.proj_PM), dim=1)
        expert_EP = nn.functional.normalize(self.expert_EP.to(token_SP.dtype), dim=1)
        scale = self.log_scale.to(token_SP.dtype).clamp(max=_MAX_LOG_SCALE).exp()
        return (router_logits(token_SP, expert_EP) * scale,)
