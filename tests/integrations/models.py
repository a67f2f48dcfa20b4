"""Tiny models of Hugging Face's families, one for each form of experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

VOCABULARY = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TOP_2 = {"num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}

CONFIGS = {
    "mixtral": MixtralConfig(**_SHAPE, **_TOP_2, num_local_experts=4),
    "qwen3": Qwen3MoeConfig(
        **_SHAPE, **_TOP_2, num_experts=4, moe_intermediate_size=16, head_dim=8, decoder_sparse_step=1
    ),
    "olmoe": OlmoeConfig(**_SHAPE, **_TOP_2, num_experts=4),
    "deepseek": DeepseekV3Config(
        **_SHAPE, **_TOP_2, **_LATENT, n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    # The hidden size equals the input size, for both matrices, so shapes alone cannot identify them.
    "gpt-oss": GptOssConfig(
        **_SHAPE | {"intermediate_size": 32}, **_TOP_2, num_local_experts=4, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip


def make(family: str, experts: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a model with random parameters from PyTorch's generator, in evaluation mode."""
    # A copy: a model keeps its configuration, and tests and trainers change it.
    config = copy.deepcopy(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return model.to(dtype).eval()
