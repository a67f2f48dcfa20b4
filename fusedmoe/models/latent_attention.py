"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1), with heads split over the MP group.

Queries come from a latent vector of `q_rank` channels (None: directly from the token), keys and values from one of
`kv_rank`. A key consists of channels from the latent vector and of `rope_dim` rotated channels that all heads share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.models.tensor_parallel import Attention, normal_parameter, rotary_angles, rotate


class LatentAttention(Attention):
    """Latent attention. N channels without rotation and R with it per query and key, V per value.

    Attributes:
        q_down_weight, q_up_weight: [q_rank, M], and [heads·(N + R) / MP, q_rank or M]; the first may be None.
        kv_down_weight, kv_up_weight: [kv_rank + R, M] and [heads·(N + V) / MP, kv_rank].
        out_weight: [M, heads·V / MP].
    """

    q_down_weight: nn.Parameter | None
    q_up_weight: nn.Parameter
    kv_down_weight: nn.Parameter
    kv_up_weight: nn.Parameter
    shardings = {"q_up_weight": {"mp": 0}, "kv_up_weight": {"mp": 0}, "out_weight": {"mp": 1}}

    def _make_projections(self, **factory_kwargs: Any) -> None:
        config, mp, dim = self.config, self.topology.mp, self.config.model_dim
        assert config.kv_rank is not None and config.rope_dim is not None and config.value_dim is not None
        heads, std_out = config.heads, dim**-0.5 * (2 * config.layers) ** -0.5
        source = config.q_rank or dim
        shapes = {
            "q_down_weight": None if config.q_rank is None else (config.q_rank, dim),
            "q_up_weight": (heads * config.head_size, source),
            "kv_down_weight": (config.kv_rank + config.rope_dim, dim),
            "kv_up_weight": (heads * (config.head_size - config.rope_dim + config.value_dim), config.kv_rank),
            "out_weight": (dim, heads * config.value_dim),
        }
        self._std_of = {name: shape[1] ** -0.5 for name, shape in shapes.items() if shape is not None}
        self._std_of["out_weight"] = std_out
        for name, shape in shapes.items():
            at = self.shardings.get(name)
            split: dict[str, Any] = {} if at is None else {"group": mp, "dim": at["mp"]}
            made = (
                None if shape is None else normal_parameter(*shape, std=self._std_of[name], **split, **factory_kwargs)
            )
            self.register_parameter(name, made)
        self.q_norm = None if config.q_rank is None else nn.RMSNorm(config.q_rank, **factory_kwargs)
        self.kv_norm = nn.RMSNorm(config.kv_rank, **factory_kwargs)
        self.register_parameter("out_bias", None)

    def _project(self, x_BLM: Tensor, before: int) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self.config, self.config.heads // self.topology.mp.size
        assert config.kv_rank is not None and config.rope_dim is not None
        fixed = config.head_size - config.rope_dim
        q_BLQ = x_BLM if self.q_norm is None else self.q_norm(F.linear(x_BLM, self.q_down_weight))  # type: ignore[arg-type]
        q_BHLD = F.linear(q_BLQ, self.q_up_weight).unflatten(-1, (heads, -1)).transpose(1, 2)
        latent = F.linear(x_BLM, self.kv_down_weight)
        c_BLC, r_BLR = latent.split([config.kv_rank, config.rope_dim], -1)
        kv = F.linear(self.kv_norm(c_BLC), self.kv_up_weight).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_BHLN, v_BHLV = kv[..., :fixed], kv[..., fixed:]
        angles_LD = rotary_angles(before + x_BLM.shape[1], config.rope_dim, q_BHLD.device, q_BHLD.dtype)
        angles = [of[before:] for of in angles_LD]
        k_BHLR = rotate(r_BLR[:, None], *angles).expand(-1, heads, -1, -1)
        q_BHLD = torch.cat([q_BHLD[..., :fixed], rotate(q_BHLD[..., fixed:], *angles)], -1)
        return q_BHLD, torch.cat([k_BHLN, k_BHLR], -1), v_BHLV
