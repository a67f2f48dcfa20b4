"""Train one MoE layer in one process: 16 experts learn a function with 16 regimes.

python examples/layer.py
"""

from __future__ import annotations

import torch

import fusedmoe


def main(steps: int = 200) -> float:
    torch.manual_seed(0)
    layer = fusedmoe.MoELayer(
        model_dim=32,
        gate=fusedmoe.gates.TopK(experts=16, k=2, capacity_factor=1.25),
        experts=fusedmoe.experts.SwiGLU(hidden=64),
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)

    # Tokens are clustered around 16 centres; each cluster has its own linear target.
    centre_EM = 3 * torch.randn(16, 32)
    map_EMM = torch.randn(16, 32, 32) / 32**0.5

    for step in range(steps):
        regime_S = torch.randint(16, (512,))
        x_SM = centre_EM[regime_S] + torch.randn(512, 32)
        target_SM = torch.einsum("sm,smn->sn", x_SM, map_EMM[regime_S])

        y_SM = layer(x_SM)
        loss = torch.nn.functional.mse_loss(y_SM, target_SM) + 0.01 * layer.aux_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0 or step == steps - 1:
            # (token, k) pairs beyond an expert's capacity are dropped: they add nothing to y.
            print(f"step {step:3}  loss {loss.item():6.3f}  load {layer.load_E.tolist()}  dropped {layer.dropped}")
    return loss.item()


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
