"""Configurations of the papers' models: published sizes, and refused dimensions and splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import MODELS, ModelConfig, named_model
from fusedmoe.models.transformer import Transformer, block_workload
from fusedmoe.schedule.cost import CostModel, Line

# FlowMoE, Table 2, FSMoE, section 6.4, and published configurations: layers, batch, sequence, M, H, k, f.
PAPERS = {
    "GPT2-Tiny-MoE": (12, 4, 256, 256, 512, 2, 1.0),
    "BERT-Large-MoE": (24, 4, 512, 512, 1024, 1, 1.0),
    "LLaMA2-MoE": (32, 4, 512, 1024, 4096, 1, 1.0),
    "DeepSeek-V2-S": (4, 4, 256, 5120, 1536, 8, 1.0),
    "GPT2-XL-MoE": (48, 1, 1024, 1600, 6400, 2, 1.2),
    "Mixtral-7B": (32, 1, 1024, 4096, 14336, 2, 1.2),
    "Qwen3-30B-A3B": (48, 1, 4096, 2048, 768, 8, None),
    "DeepSeek-V3": (61, 1, 4096, 7168, 2048, 8, None),
}


def test_named_models_have_published_sizes() -> None:
    assert {"bytes-small", *PAPERS} == set(MODELS)
    for name, sizes in PAPERS.items():
        m = named_model(name.lower())
        assert (m.layers, m.batch, m.seq_len, m.model_dim, m.hidden, m.k, m.capacity_factor) == sizes
    assert named_model("BERT-Large-MoE").objective == "masked"
    assert named_model("Mixtral-7B").key_heads == 8


@pytest.mark.parametrize(
    ("name", "ranks", "ep", "experts"),
    [
        ("GPT2-Tiny-MoE", 4, 2, 4),  # E/P = 1
        ("GPT2-Tiny-MoE", 1, 1, 2),  # k = 2 needs two
        ("BERT-Large-MoE", 4, 4, 8),  # E/P = 2
        ("DeepSeek-V2-S", 6, 6, 12),
        ("DeepSeek-V2-S", 3, 3, 9),  # k = 8, and a multiple of 3
        ("Mixtral-7B", 4, 2, 8),  # published value
    ],
)
def test_expert_count_follows_ranks(name: str, ranks: int, ep: int, experts: int) -> None:
    assert named_model(name).with_experts(ranks, ep).experts == experts


def test_label_names_changes_of_preset() -> None:
    mixtral = named_model("Mixtral-7B")
    assert mixtral.label == "Mixtral-7B" and replace(mixtral, k=4).label == "Mixtral-7B with k=4"
    assert named_model("GPT2-Tiny-MoE").with_experts(4, 2).label == "GPT2-Tiny-MoE"
    own = replace(mixtral, layers=1, model_dim=1024, heads=16, hidden=512, k=1)
    assert own.label == "Mixtral-7B with layers=1, model_dim=1024, heads=16 and 2 more"
    assert ModelConfig(name="mine", k=1).label == "mine"


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_is_constructed(name: str) -> None:
    config = named_model(name).with_experts(1)
    model = Transformer(config, device="meta")
    assert len(list(model.moe_layers())) == config.layers
    assert model.symbol_weight.shape == (256 + (config.objective == "masked"), config.model_dim)


def test_unknown_model_error_lists_names() -> None:
    with pytest.raises(ConfigError, match="GPT2-Tiny-MoE"):
        named_model("GPT5")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"layers": 0}, "layers"),
        ({"norm": "batch"}, "layer, rms"),
        ({"heads": 128}, "rotary"),
        ({"activation": "tanh"}, "gelu"),
        ({"shared_hidden": -1}, "shared_hidden"),
        ({"dense_layers": -1}, "dense_layers"),
        ({"head_dim": 15}, "even head dim"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_invalid_dimensions_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "best"}, "deepseek_v3"),
        ({"order": "random"}, "sparse"),
        ({"gate_options": {"volume": 11}}, "volume"),
        ({"gate_options": {"k": 3}}, "'k' is a setting of the model"),
        ({"gate_options": {"noise": "much"}}, "noise='much'"),
        ({"experts": None}, "with_experts"),
        ({"k": 9}, "9"),
    ],
)
def test_unknown_gate_order_or_option_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transformer(ModelConfig(**changes), device="meta")


def test_gate_order_and_shared_experts_follow_config() -> None:
    config = ModelConfig(
        gate="deepseek_v3", gate_options={"groups": 2, "groups_kept": 1}, order="einsum", shared_hidden=8, expert="ffn"
    )
    layer = next(Transformer(config, device="meta").moe_layers())
    assert (type(layer.gate).__name__, type(layer.order).__name__) == ("DeepSeekV3", "Einsum")
    assert layer.shared is not None and torch.Size([8, 128]) in {p.shape[1:] for p in layer.shared.parameters()}


LATENT = {"head_dim": 12, "kv_rank": 6, "rope_dim": 4, "value_dim": 10}


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 2, "head_dim": 24}, LATENT, LATENT | {"q_rank": 7}, {"expert": "ffn", "head_dim": 8}]
)
def test_dense_work_counts_the_matrices_of_built_blocks(changes: dict[str, Any]) -> None:
    more = {"layers": 4, "dense_layers": 1, "dense_hidden": 40, "moe_every": 2, "shared_hidden": 24, "vocab_size": 500}
    config = ModelConfig(**more | changes)
    model = Transformer(config, device="meta")
    assert [config.has_experts(layer) for layer in range(4)] == [False, False, True, False]
    assert config.num_moe_layers == len(list(model.moe_layers())) == 1 and model.head_weight.shape == (500, 128)

    def elements(module: Any) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)

    for layer, block in enumerate(model.blocks):
        work, experts = config.dense_work(layer), block.get_submodule("experts")
        assert work.attention == elements(block.get_submodule("attention"))
        assert work.feed_forward == elements(experts.shared if layer == 2 else experts)


def test_costs_count_the_dense_part_of_the_published_model() -> None:
    """FLOP per token: two per weight and four per channel of a score, with the block before the first experts."""
    config = ModelConfig(layers=3, heads=4, head_dim=48, dense_layers=1, dense_hidden=96, shared_hidden=40, seq_len=64)
    work = block_workload(config, 2, 1, 1, 4)
    first, moe = config.dense_work(0), config.dense_work(1)
    tokens = config.batch * config.seq_len
    projections, attention = work.dense_flop(work.dense)
    assert projections == 2 * tokens * (moe.attention + moe.feed_forward)
    assert attention == 4 * tokens * 64 * 4 * 48
    model = CostModel({"gemm": Line(0.0, 1.0), "all-to-all/ep": Line(0.0, 1.0)})
    layers = work.step_costs(model, [0, 0], work.volumes(), before=[[first], []]).layers
    attention_s = [layer.dense_s["forward"]["attention"] for layer in layers]
    assert attention_s[1] == projections + attention
    assert attention_s[0] - attention_s[1] == sum(work.dense_flop(first))
    # The dense part of the papers is unchanged without a head dim.
    by_width = block_workload(replace(config, head_dim=None), 2, 1, 1, 4)
    assert by_width.dense_flop(by_width.dense)[0] == 8 * tokens * 128**2
