"""Self-attention whose heads are split over the MP group (Megatron-LM, Shoeybi et al. 2019, section 3).

Between the attentions every MP rank holds a slice of each sequence (sequence parallelism, Korthikanti et al. 2022,
section 4.2): an all-gather brings the sequences together in front of the heads of this rank, a reduce-scatter adds the
heads up behind them. Backward, the two change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.autograd.parallel import gather_rows, reduce_scatter_rows
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.parameters import normal_parameter, zero_parameter
from fusedmoe.models.recorded import recorded
from fusedmoe.models.rotary import rotary_angles, rotate
from fusedmoe.models.sequence import TokenSplit
from fusedmoe.runtime.recorder import Recorder


class Attention(nn.Module):
    """Multi-head or grouped-query attention, causal or over the whole sequence.

    The rows of `qkv_weight` come key head by key head: the query heads that share it, the key, the value, D rows each.
    So a chunk of the rows is a set of whole heads, and one product makes all three.

    Attributes:
        qkv_weight: [(heads + 2·kv_heads)·D / MP, M].   out_weight: [M, heads·D / MP].   out_bias: [M] or None.
    Raises:
        ConfigError: the key heads do not split over the MP group.
    """

    qkv_bias: nn.Parameter | None
    out_bias: nn.Parameter | None
    shardings = {"qkv_weight": {"mp": 0}, "qkv_bias": {"mp": 0}, "out_weight": {"mp": 1}}

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        mp = topology.mp
        if config.key_heads % mp.size:
            raise ConfigError(
                f"{config.key_heads} heads (of keys) do not split over mp = {mp.size} ranks; "
                "choose an mp that divides them, or other heads"
            )
        self.config, self.topology, self.layer = config, topology, layer
        self.recorder: Recorder | None = None
        dim, head = config.model_dim, config.head_dim
        rows = (config.heads + 2 * config.key_heads) * head
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_weight = normal_parameter(rows, dim, std=dim**-0.5, group=mp, **make)
        self.register_parameter("qkv_bias", zero_parameter(rows, group=mp, **make) if config.bias else None)
        # Two residual branches a block: together they keep the variance of the stream (GPT-2).
        std = dim**-0.5 * (2 * config.layers) ** -0.5
        self.out_weight = normal_parameter(dim, config.heads * head, std=std, group=mp, dim=1, **make)
        self.register_parameter("out_bias", zero_parameter(dim, **make) if config.bias else None)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """The attention of some samples, [B, P, M] -> [B, P, M], of which this rank has P positions each; collective
        over the MP group."""
        mp, recorder = self.topology.mp, self.recorder
        if torch.is_autocast_enabled(x_BPM.device.type):  # what the product would be cast to, cast before it travels
            x_BPM = x_BPM.to(torch.get_autocast_dtype(x_BPM.device.type))
        counts = split.rows(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, recorder)
        x_BLM = split.by_sample(x_TM, len(x_BPM))
        y_BLM = recorded(recorder, self._heads, x_BLM, kind="attention", layer=self.layer)
        y_SM = reduce_scatter_rows(split.by_rank(y_BLM), mp, counts, recorder)
        y_BPM = y_SM.view(x_BPM.shape)
        return y_BPM if self.out_bias is None else y_BPM + self.out_bias

    def continued(self, x_BPM: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The attention of some positions, [B, P, M] -> [B, P, M], that follow others, of one MP rank.

        `past`: keys and values of those before, as they were given. Returns this part's, too, [B, heads, P, D] each.
        """
        y_BPM, own = self._attend(x_BPM, past)
        return (y_BPM if self.out_bias is None else y_BPM + self.out_bias), own

    def _heads(self, x_BLM: Tensor) -> Tensor:
        """This rank's heads over whole sequences: [B, L, M] -> [B, L, M], its part of the sum."""
        return self._attend(x_BLM, ())[0]

    def _attend(self, x_BLM: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        config, mp = self.config, self.topology.mp.size
        keys, sharing = config.key_heads // mp, config.heads // config.key_heads
        qkv = F.linear(x_BLM, self.qkv_weight, self.qkv_bias)
        qkv = qkv.unflatten(-1, (keys, sharing + 2, config.head_dim))
        q_BHLD = qkv[:, :, :, :sharing].flatten(2, 3).transpose(1, 2)
        k_BHLD, v_BHLD = (qkv[:, :, :, sharing + i].transpose(1, 2) for i in (0, 1))
        before = sum(keys.shape[2] for keys, _ in past)
        if config.positions == "rope":
            # In the dtype of the products under autocast, in float64 throughout a float64 model.
            every = rotary_angles(before + x_BLM.shape[1], config.head_dim, q_BHLD.device, q_BHLD.dtype)
            angles = [of[before:] for of in every]
            q_BHLD, k_BHLD = rotate(q_BHLD, *angles), rotate(k_BHLD, *angles)
        own, causal, seen = (k_BHLD, v_BHLD), config.objective == "causal", None
        if before:
            k_BHLD, v_BHLD = (torch.cat([*(one[i] for one in past), own[i]], 2) for i in (0, 1))
            seen = torch.ones(q_BHLD.shape[2], k_BHLD.shape[2], dtype=torch.bool, device=x_BLM.device).tril(before)
        y_BHLD = F.scaled_dot_product_attention(
            q_BHLD, k_BHLD, v_BHLD, attn_mask=seen, is_causal=causal and seen is None, enable_gqa=sharing > 1
        )
        return F.linear(y_BHLD.transpose(1, 2).flatten(2), self.out_weight), own
