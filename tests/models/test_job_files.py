"""Models of other frameworks' jobs: parameters of published configurations, and refused files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.errors import ConfigError
from fusedmoe.models.job_files import HF_TYPES, read_job
from fusedmoe.models.transformer import Transformer
from tests.marks import slowly

FILES = Path(__file__).parents[1] / "data" / "job_files"
#: Published totals in billions, and the widths that the file alone determines.
PUBLISHED = {
    "mixtral_8x7b": (46.7, {"heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 14336, "experts": 8, "k": 2}),
    "qwen3_30b_a3b": (30.5, {"head_dim": 128, "hidden": 768, "experts": 128, "k": 8, "dense_layers": 0}),
    "deepseek_v3": (671.0, {"dense_layers": 3, "dense_hidden": 18432, "shared_hidden": 2048, "kv_rank": 512, "k": 8}),
    "gpt_oss_120b": (117.0, {"model_dim": 2880, "head_dim": 64, "bias": True, "vocab_size": 201088}),
}
STANDARD = {
    **{"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    **{"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000},
}


def written(folder: Path, data: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def num_parameters(path: Path) -> int:
    return sum(parameter.numel() for parameter in Transformer(read_job(path).model, device="meta").parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_has_published_parameters(name: str) -> None:
    path = FILES / f"{name}.json"
    billions, widths = PUBLISHED[name]
    assert num_parameters(path) == pytest.approx(billions * 1e9, rel=0.01)
    model = read_job(path).model
    assert {field: getattr(model, field) for field in widths} == widths


@pytest.mark.parametrize("kind", ["deepseek_v3", *slowly(*(kind for kind in HF_TYPES if kind != "deepseek_v3"))])
def test_parameters_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Of a model with three blocks; norms of queries and keys, and some biases, are not counted."""
    transformers = pytest.importorskip("transformers")
    more = {"num_experts_per_tok": 4} if kind == "deepseek_v2" else {}
    config = transformers.CONFIG_MAPPING[kind](num_hidden_layers=3, **more)
    config.layer_types = None if getattr(config, "layer_types", None) is None else config.layer_types[:3]
    if kind.startswith("deepseek"):
        config.first_k_dense_replace = 1
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    path = written(tmp_path, config.to_diff_dict())
    assert num_parameters(path) == pytest.approx(sum(p.numel() for p in real.parameters()), rel=1e-3)


def test_unknown_type_with_standard_fields_is_read_with_assumption(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, STANDARD | {"model_type": "novel_moe"}))
    assert (job.model.layers, job.model.hidden, job.model.key_heads, job.model.head_dim) == (3, 96, 4, 16)
    assert any("novel_moe is unknown" in words for words in job.assumptions)
    inner = read_job(written(tmp_path, {"model_type": "novel_vl", "text_config": STANDARD}))
    assert inner.model.layers == 3 and any("text_config" in words for words in inner.assumptions)


def test_dense_blocks_and_shared_experts_are_read(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "n_shared_experts": 2, "mlp_only_layers": [0]}
    model = read_job(written(tmp_path, STANDARD | sizes)).model
    assert (model.hidden, model.dense_size, model.shared_hidden, model.num_moe_layers) == (32, 96, 64, 2)
    assert [model.has_experts(layer) for layer in range(3)] == [False, True, True]
    every = read_job(written(tmp_path, STANDARD | {"decoder_sparse_step": 2})).model
    assert [every.has_experts(layer) for layer in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok .* is missing"),
        ({"num_experts": None}, "mixture-of-experts models only"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers = 'three'"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        *(({"mlp_only_layers": value}, "mlp_only_layers = .* list of integers") for value in (3, True, ["0"], [False])),
        ({"first_k_dense_replace": 3}, "no experts"),
        ({"kv_lora_rank": 8}, "qk_rope_head_dim is missing"),
        ({"hidden_size": 65}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"vocab_size": True}, "vocab_size"),
    ],
)
def test_unsupported_config_error_names_field_and_file(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, STANDARD | change)
    with pytest.raises(ConfigError, match=message) as error:
        read_job(path)
    assert str(path) in str(error.value)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    plain = read_job(written(tmp_path, STANDARD))
    assert read_job(written(tmp_path, "\ufeff" + json.dumps(STANDARD))) == plain


@pytest.mark.parametrize(("text", "name"), [("[1]", "a.json"), ("{", "a.json"), ("", "weights.bin")])
def test_other_files_are_refused_by_path(text: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path, text, name)
    for refused in (path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=refused.name):
            read_job(refused)
