"""One block of the transformer: attention, then experts (or a dense feed-forward), each behind a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.comm.topology import Topology
from fusedmoe.layers.hooks import Hooks
from fusedmoe.layers.moe import MoELayer, Placements
from fusedmoe.models.attention import Attention
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.feedforward import DenseFeedForward
from fusedmoe.models.parts import make_experts, make_gate, make_order, make_shared
from fusedmoe.models.sequence import TokenSplit


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)), on this MP rank's slice of each sequence."""

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layer: int,
        *,
        dispatch: str = "direct",
        hooks: Sequence[Hooks] = (),
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm = make_norm(config, **make)
        self.attention = Attention(config, topology, layer, **make)
        self.experts_norm = make_norm(config, **make)
        self.experts: MoELayer | DenseFeedForward
        if has_experts(config, layer):
            self.experts = MoELayer(
                config.model_dim,
                make_gate(config),
                make_experts(config),
                order=make_order(config),
                topology=topology,
                dispatch=dispatch,
                hooks=hooks,
                shared=make_shared(config),
                mp_input="split",
                placement=placement,
                **make,
            )
        else:
            self.experts = DenseFeedForward(config, topology, **make)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Some samples, [B, P, M] -> [B, P, M], of which this rank has P positions each, and this rank's share of their
        auxiliary loss (a scalar)."""
        x_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), split)
        if isinstance(self.experts, DenseFeedForward):
            return x_BPM + self.experts(self.experts_norm(x_BPM), split), x_BPM.new_zeros(())
        x_BPM = x_BPM + self.experts(self.experts_norm(x_BPM))
        return x_BPM, self.experts.aux_loss


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Whether block `layer` (from 0) has experts: with `moe_every` = n, the last of every n blocks."""
    return (layer + 1) % config.moe_every == 0


def make_norm(
    config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.model_dim, device=device, dtype=dtype)
