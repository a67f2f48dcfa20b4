"""Define a custom gate, a custom expert, and a hook that counts dispatched rows.

python examples/own_parts.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import gates


class SignGate(gates.Gate):
    """Route by the signs of the first components. No parameters, deterministic."""

    def route(self, x_SM: Tensor) -> gates.Routing:
        bits = self.experts.bit_length() - 1
        place = 2 ** torch.arange(bits, device=x_SM.device)
        expert_S1 = ((x_SM[:, :bits] > 0) * place).sum(1, keepdim=True)
        weight_S1 = torch.ones_like(expert_S1, dtype=x_SM.dtype)
        capacity = self.row_capacity(len(x_SM))
        return gates.Routing(expert_S1, weight_S1, capacity, None, weight_S1.new_zeros(()), None)


def expert(model_dim: int) -> nn.Module:
    """Make an expert. Any module that maps rows to rows can be one."""
    return nn.Sequential(nn.Linear(model_dim, 48), nn.Tanh(), nn.Linear(48, model_dim))


class CountRows(fusedmoe.Hooks):
    """Count dispatched rows, separately for activations and gradients."""

    def __init__(self) -> None:
        self.rows = {"forward": 0, "backward": 0}

    def before_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> None:
        self.rows[context.direction] += len(rows)


def main() -> CountRows:
    torch.manual_seed(0)
    count = CountRows()
    layer = fusedmoe.MoELayer(
        model_dim=24,
        gate=SignGate(experts=8),
        experts=fusedmoe.experts.Custom(expert),
        # Over several ranks, rows are sent as bfloat16. Hooks nest: CountRows sees rows before the cast.
        hooks=[count, fusedmoe.hooks.WireCast(torch.bfloat16)],
    )
    x_SM = torch.randn(200, 24)
    layer(x_SM).square().mean().backward()
    print("rows dispatched:", count.rows, " expert load:", layer.load_E.tolist())
    return count


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
