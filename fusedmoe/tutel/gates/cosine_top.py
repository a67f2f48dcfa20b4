"""Cosine gate (Chi et al. 2022, X-MoE)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.gates.base import unit_vectors
from fusedmoe.tutel.gates.top import Float32Linear, refuse_unknown
from fusedmoe.tutel.impls.fast_dispatch import experts_of_a_token

_MAX_LOG_SCALE = math.log(100.0)


class CosineTopKGate(nn.Module):
    """logits = cos(W·x + b, s_e) · exp(min(temperature, ln 100)).

    Vectors shorter than 1e-4 are not normalised (`unit_vectors`); Tutel clamps norms at 1e-12.

    Parameters: `temperature` [1], ln(1/τ); `cosine_projector` (W [P, D], b [P]); `sim_matrix` [P, E], normal with
    standard deviation 0.01. With `fp32_gate`, logits and the projector's parameters are float32, even after the model
    is converted; `sim_matrix` and `temperature` follow the model's dtype, as in Tutel.

    Args:
        k, options: as for `LinearTopKGate`.
        proj_dim: P.
        init_t: initial τ.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        proj_dim: int = 256,
        init_t: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(options, "proj_dim", "init_t")
        self.top_k = experts_of_a_token(k, num_global_experts)
        self.fp32_gate = fp32_gate
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.init_t = init_t
        self.temperature = nn.Parameter(torch.full((1,), -math.log(init_t), **made))
        self.cosine_projector = (Float32Linear if fp32_gate else nn.Linear)(model_dim, proj_dim, **made)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts, **made))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters, for example after `to_empty`."""
        nn.init.constant_(self.temperature, -math.log(self.init_t))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        project, sim_PE = self.cosine_projector, self.sim_matrix
        token_SP = unit_vectors(project(x.to(project.weight.dtype)), dim=1)
        # Half-precision norms lose small angles.
        cosine_SE = token_SP @ unit_vectors(sim_PE.float() if self.fp32_gate else sim_PE, dim=0)
        return cosine_SE * self.temperature.clamp(max=_MAX_LOG_SCALE).exp()


Gate = CosineTopKGate
