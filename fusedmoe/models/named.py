"""Models by name: those of the papers' experiments, and a small one that learns in minutes on any machine.

FlowMoE, Table 2 (layers, batch, sequence, M, H, experts per GPU, k; capacity factor 1): GPT2-Tiny-MoE, BERT-Large-MoE,
LLaMA2-MoE, DeepSeek-V2-S. FSMoE, section 6.4 (batch 1, k = 2, capacity factor 1.2): GPT2-XL-MoE and Mixtral-7B with the
dimensions of GPT-2 XL and Mixtral 8x7B; the paper gives them one expert a node, `experts` says how many here. Heads,
where a paper is silent, follow the family: 64 per head dim, 128 in the large ones. All of them read bytes here, so the
vocabulary is 256, and DeepSeek-V2-S has plain multi-head attention in place of its latent one.
"""

from __future__ import annotations

from dataclasses import replace

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig

_GPT2 = ModelConfig(norm="layer", positions="learned", bias=True, expert="ffn")
_LLAMA = ModelConfig(norm="rms", positions="rope", bias=False, expert="swiglu")

MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        ModelConfig(),
        replace(
            _GPT2,
            name="GPT2-Tiny-MoE",
            layers=12,
            batch=4,
            seq_len=256,
            model_dim=256,
            heads=4,
            hidden=512,
            experts=None,
            experts_per_rank=1,
            k=2,
            capacity_factor=1.0,
        ),
        replace(
            _GPT2,
            name="BERT-Large-MoE",
            objective="masked",
            layers=24,
            batch=4,
            seq_len=512,
            model_dim=512,
            heads=8,
            hidden=1024,
            experts=None,
            experts_per_rank=2,
            k=1,
            capacity_factor=1.0,
        ),
        replace(
            _LLAMA,
            name="LLaMA2-MoE",
            layers=32,
            batch=4,
            seq_len=512,
            model_dim=1024,
            heads=16,
            hidden=4096,
            experts=None,
            experts_per_rank=1,
            k=1,
            capacity_factor=1.0,
        ),
        replace(
            _LLAMA,
            name="DeepSeek-V2-S",
            layers=4,
            batch=4,
            seq_len=256,
            model_dim=5120,
            heads=40,
            hidden=1536,
            experts=None,
            experts_per_rank=2,
            k=8,
            capacity_factor=1.0,
        ),
        replace(
            _GPT2,
            name="GPT2-XL-MoE",
            layers=48,
            batch=1,
            seq_len=1024,
            model_dim=1600,
            heads=25,
            hidden=6400,
            experts=8,
            k=2,
            capacity_factor=1.2,
        ),
        replace(
            _LLAMA,
            name="Mixtral-7B",
            layers=32,
            batch=1,
            seq_len=1024,
            model_dim=4096,
            heads=32,
            kv_heads=8,
            hidden=14336,
            experts=8,
            k=2,
            capacity_factor=1.2,
        ),
    )
}


def named_model(name: str) -> ModelConfig:
    """The model of that name, upper and lower case alike. Raises `ConfigError` for an unknown one."""
    for known, model in MODELS.items():
        if known.lower() == name.lower():
            return model
    raise ConfigError(f"no model is called {name!r}; known: {', '.join(MODELS)}")
