"""The linear gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.tutel.gates.float32 import Float32Linear
from fusedmoe.tutel.gates.product import gate_product
from fusedmoe.tutel.impls.choice import experts_of_a_token

# What the layer reads of a gate's description; a gate takes it and leaves it.
OF_THE_LAYER = ("capacity_factor", "gate_noise")


class Router(nn.Linear):
    """x·Wᵀ by the gates' product, in the dtype of the weights."""

    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight, fp32=False)


class Float32Router(Float32Linear):
    """The same in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return gate_product(input, self.weight, fp32=True)


class LinearTopKGate(nn.Module):
    """logits = x·Wᵀ, in the dtype of the weights.

    Parameters: `wg.weight` [E, D], initialised as `nn.Linear` is; with `fp32_gate` float32, also in a model that is
    converted to another dtype.

    Args:
        k: experts of a token, from 1 on; more than E are E.
        options: `capacity_factor` and `gate_noise`, which the layer reads.

    Raises:
        ConfigError: any other option; a `k` below 1.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(options)
        router, own = (Float32Router, torch.float32) if fp32_gate else (Router, dtype)
        self.wg = router(model_dim, num_global_experts, bias=False, device=device, dtype=own)
        self.top_k = experts_of_a_token(k, num_global_experts)
        self.fp32_gate = fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.wg(x)
        return logits


def refuse_unknown(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OF_THE_LAYER:
            raise ConfigError(f"this gate has no option {name!r}; besides its own it takes {', '.join(OF_THE_LAYER)}")


Gate = LinearTopKGate
