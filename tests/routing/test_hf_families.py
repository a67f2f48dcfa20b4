"""Families of transformers with replayable routers, as listed in docs/guides/replay.md, and one without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers
from fusedmoe import ConfigError, routing

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "replay.md"
# By the names that each family uses.
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "num_experts_per_tok": 2, "moe_topk": 2,
    "top_k_experts": 2, "moe_k": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_dense_layers": 0,
    "n_shared_experts": 1, "num_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_layer_start_index": 0, "moe_layer_interval": 1,
}  # fmt: skip


def families_in_guide() -> list[str]:
    """The families that the guide lists."""
    line = re.search(r"tried with (.*?)\.\n", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert line is not None
    return re.findall(r"`(\w+)`", line[1])


def make(family: str) -> Any:
    kind = next(name for name in (family, f"{family}_text") if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    known = CONFIG_MAPPING[kind]()
    config = CONFIG_MAPPING[kind](**{name: value for name, value in SMALL.items() if hasattr(known, name)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="fusedmoe").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 60, (1, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", families_in_guide())
def test_record_and_replay_per_listed_family(family: str) -> None:
    model = make(family)
    with routing.record(model) as own:
        model(input_ids=tokens())
    given = {}
    for name, chosen_TK in own.items():
        given[name] = torch.rand(len(chosen_TK), 4).topk(chosen_TK.shape[1]).indices.short()
        assert not torch.equal(given[name], chosen_TK)
    with routing.replay(model, given), routing.record(model) as found:
        model(input_ids=tokens())
    assert given and all(torch.equal(found[name], given[name]) for name in given)


def test_phimoe_sparse_mixer_is_rejected() -> None:
    model = make("phimoe")
    with routing.record(model) as choices:
        model(input_ids=tokens())
    with pytest.raises(ConfigError, match="model.layers.0.mlp uses experts other"), routing.replay(model, choices):
        model(input_ids=tokens())


def test_guide_lists_at_least_35_families() -> None:
    assert len(families_in_guide()) >= 35
