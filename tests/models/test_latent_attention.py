"""Latent attention, compared with that of transformers' DeepSeek-V3 in float64."""

from __future__ import annotations

import pytest
import torch

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import LatentAttention, TokenSplit

LATENT = {"head_dim": 20, "kv_rank": 6, "rope_dim": 8, "value_dim": 10}


@pytest.mark.parametrize("q_rank", [None, 12])
def test_latent_attention_equals_that_of_deepseek_v3(q_rank: int | None) -> None:
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = ModelConfig(model_dim=32, heads=4, q_rank=q_rank, **LATENT)
    other = module.DeepseekV3Config(
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": q_rank},
        **{"kv_lora_rank": 6, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
        rope_interleave=False,
    )
    other._attn_implementation = "eager"
    attention = LatentAttention(config, Topology(), 0, dtype=torch.float64)
    theirs = module.DeepseekV3Attention(other, 0).double()
    own = {"kv_a_proj_with_mqa": attention.kv_down_weight, "kv_b_proj": attention.kv_up_weight}
    own |= {"o_proj": attention.out_weight, "q_proj" if q_rank is None else "q_b_proj": attention.q_up_weight}
    norms = {"kv_a_layernorm": attention.kv_norm}
    if q_rank is not None:
        assert attention.q_norm is not None and attention.q_down_weight is not None
        own["q_a_proj"], norms["q_a_layernorm"] = attention.q_down_weight, attention.q_norm
    with torch.no_grad():
        for name, weight in own.items():
            theirs.get_submodule(name).weight.copy_(weight)
        for name, norm in norms.items():
            norm.weight.copy_(torch.rand_like(norm.weight))
            theirs.get_submodule(name).weight.copy_(norm.weight)
            norm.eps = theirs.get_submodule(name).variance_epsilon
    x_BLM = torch.randn(2, 7, 32, dtype=torch.float64)
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = module.DeepseekV3RotaryEmbedding(other)(x_BLM, torch.arange(7)[None])
    expected, *_ = theirs(x_BLM, position_embeddings=angles, attention_mask=mask)
    split = TokenSplit.from_length(7, Topology())
    # Their angles are float32.
    torch.testing.assert_close(attention(x_BLM, split), expected, rtol=1e-5, atol=1e-6)


def test_latent_attention_error_names_missing_sizes() -> None:
    with pytest.raises(ConfigError, match="rope_dim, value_dim, head_dim"):
        ModelConfig(kv_rank=4)
    with pytest.raises(ConfigError, match="below head_dim"):
        ModelConfig(**LATENT | {"rope_dim": 20})
