"""Parts of your own: a gate, an expert, and a hook that counts what travels.

python examples/own_parts.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import gates


class SignGate(gates.Gate):
    """Routes by the sign pattern of the first components: nothing to learn, perfectly repeatable."""

    def route(self, x_SM: Tensor) -> gates.Routing:
        bits = self.experts.bit_length() - 1
        place = 2 ** torch.arange(bits, device=x_SM.device)
        expert_S1 = ((x_SM[:, :bits] > 0) * place).sum(1, keepdim=True)
        weight_S1 = torch.ones_like(expert_S1, dtype=x_SM.dtype)
        capacity = self.row_capacity(len(x_SM))
        return gates.Routing(expert_S1, weight_S1, capacity, None, weight_S1.new_zeros(()), None)


def expert(model_dim: int) -> nn.Module:
    """Any module that maps rows to rows can be an expert."""
    return nn.Sequential(nn.Linear(model_dim, 48), nn.Tanh(), nn.Linear(48, model_dim))


class CountRows(fusedmoe.Hooks):
    """Counts the rows that are dispatched, apart for activations and for gradients."""

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
        # Rows would cross ranks as bfloat16, half the bytes. Hooks nest: CountRows sees rows before they are cast.
        hooks=[count, fusedmoe.hooks.WireCast(torch.bfloat16)],
    )
    x_SM = torch.randn(200, 24)
    layer(x_SM).square().mean().backward()
    print("rows dispatched:", count.rows, " load of the experts:", layer.load_E.tolist())
    return count


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
