"""Jobs of Megatron-core, read from its arguments: a YAML file, or a file with a command line.

YAML keys may be arguments ("--num-layers", "num_layers") at any depth. In a command line, all words that start with
"--" are arguments; the file may be a shell script without variables in the values that matter.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.job_files import Fields, Job, TrainingState

_PARALLEL = {
    "mp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "esp": "expert_tensor_parallel_size",
}
_UNSUPPORTED_SIZES = ("pipeline_model_parallel_size", "context_parallel_size")
_TRUE, _FALSE = (True, "true", "True"), (False, None, "false", "False")


def yaml_arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of a YAML file by name, with underscores. Raises `ConfigError` without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"--config {path}: YAML needs PyYAML: pip install pyyaml") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: invalid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: expected a mapping of arguments")
    found: dict[str, Any] = {}

    def collect(part: Mapping[Any, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                collect(value)
            else:
                found[_name(str(key))] = value

    collect(data)
    return found


def line_arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of a command line by name, with underscores; an argument without a value is True."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"--config {path}: not a command line: {error}") from error
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            has_value = not after.startswith("--") and after not in (")", "(")
            found[_name(name)] = _parsed(value if equals else after) if equals or has_value else True
    return found


def _name(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _parsed(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def megatron_job(path: Path, data: Mapping[str, Any]) -> Job:
    """Return the job of Megatron-core's arguments. Missing arguments have Megatron's defaults.

    Raises:
        ConfigError: an argument is missing or unsupported; names it and the file.
    """
    of = Fields(path, data)
    for name in _UNSUPPORTED_SIZES:
        if of.count(name, default=1) > 1:
            raise of.error(
                f"{name} = {data[name]} is not supported: plan has no pipeline or context parallelism; set 1"
            )
    layers, model_dim, heads = (of.count(name) for name in ("num_layers", "hidden_size", "num_attention_heads"))
    latent = _latent(of) if _is_set(of, "multi_latent_attention") else {}
    is_gated = _is_set(of, "swiglu") or _is_set(of, "gated_linear_unit")
    dense_hidden = of.count("ffn_hidden_size", default=_default_hidden(model_dim, is_gated))
    dense_layers, every = _dense_layers(of, layers)
    has_groups = _is_set(of, "group_query_attention") or "group_query_attention" not in data
    groups = of.optional("num_query_groups") if has_groups else None
    capacity = data.get("moe_expert_capacity_factor")
    sizes: dict[str, Any] = {
        "layers": layers,
        "model_dim": model_dim,
        "heads": heads,
        "kv_heads": heads if latent or groups is None else groups,
        "hidden": of.count("moe_ffn_hidden_size", default=dense_hidden),
        "dense_hidden": dense_hidden,
        "experts": of.count("num_experts", "num_moe_experts"),
        "k": of.count("moe_router_topk", default=2),
        "shared_hidden": of.count("moe_shared_expert_intermediate_size", default=0, least=0),
        "dense_layers": dense_layers,
        "moe_every": every,
        "seq_len": of.count("seq_length"),
        "batch": of.count("micro_batch_size", default=1),
        "vocab_size": of.optional("padded_vocab_size", "vocab_size"),
        "capacity_factor": None if capacity is None else _number(of, "moe_expert_capacity_factor"),
        "bias": not latent and not _is_set(of, "disable_bias_linear") and data.get("add_bias_linear") is not False,
        "expert": "swiglu" if is_gated else "ffn",
        "norm": "rms" if data.get("normalization") == "RMSNorm" else "layer",
        "positions": "rope" if latent or data.get("position_embedding_type") in ("rope", "yarn") else "learned",
        "head_dim": of.count("kv_channels", default=max(1, model_dim // heads)),
    }
    try:
        model = ModelConfig("megatron", **sizes | latent)
    except ConfigError as error:
        raise of.error(str(error)) from error
    return Job(model, _settings(of), tuple(_assumptions(of)), _state(of))


def _is_set(of: Fields, name: str) -> bool:
    value = of.data.get(name)
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise of.error(f"{name} = {value!r} must be true or false")


def _number(of: Fields, name: str) -> float:
    try:
        return float(of.data[name])
    except (TypeError, ValueError):
        raise of.error(f"{name} = {of.data[name]!r} must be a number") from None


def _default_hidden(model_dim: int, is_gated: bool) -> int:
    # As in Megatron-LM's arguments.
    return int(4 * model_dim * 2 / 3 / 64) * 64 if is_gated else 4 * model_dim


def _latent(of: Fields) -> dict[str, int | None]:
    rope = of.count("qk_pos_emb_head_dim", default=64)
    head_dim = of.count("qk_head_dim", default=128) + rope
    sizes: dict[str, int | None] = {
        "kv_rank": of.count("kv_lora_rank"),
        "q_rank": of.optional("q_lora_rank"),
    }
    return sizes | {"rope_dim": rope, "head_dim": head_dim, "value_dim": of.count("v_head_dim", default=128)}


def _dense_layers(of: Fields, layers: int) -> tuple[int, int]:
    """Return the leading dense layers and `moe_every`, from a number or a pattern such as ([0]*3+[1]*58)."""
    value = of.data.get("moe_layer_freq", 1)
    if isinstance(value, int) and not isinstance(value, bool) and value == 1:
        return 0, 1
    pattern = value if isinstance(value, list) else _pattern(str(value))
    if pattern is None or len(pattern) != layers or set(pattern) - {0, 1}:
        raise of.error(f"moe_layer_freq = {value!r}: plan reads 1, or {layers} zeros and ones such as ([0]*3+[1]*58)")
    dense = pattern.index(1) if 1 in pattern else layers
    if dense == layers or 0 in pattern[dense:]:
        raise of.error(f"moe_layer_freq = {value!r}: plan models dense layers only before all layers with experts")
    return dense, 1


def _pattern(text: str) -> list[int] | None:
    """Return the numbers of a sum of lists, each with an optional factor, without evaluating it."""
    text = re.sub(r"[\s()]", "", text)
    if not re.fullmatch(r"(\[[01](,[01])*\](\*\d{1,4})?)(\+\[[01](,[01])*\](\*\d{1,4})?)*", text):
        return None
    parts = re.findall(r"\[([01,]+)\](?:\*(\d+))?", text)
    return [int(one) for numbers, times in parts for one in numbers.split(",") * int(times or 1)]


def _settings(of: Fields) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if any(name in of.data for name in _PARALLEL.values()):
        # Megatron's defaults: 1, and for experts the size of tensor parallelism.
        mp = of.count(_PARALLEL["mp"], default=1)
        settings = {"mp": mp, "ep": of.count(_PARALLEL["ep"], default=1), "esp": of.count(_PARALLEL["esp"], default=mp)}
    if of.data.get("recompute_granularity") == "full":
        settings["recompute"] = True
    return settings


def _state(of: Fields) -> TrainingState:
    shards = "optimizer" if _is_set(of, "use_distributed_optimizer") else "none"
    if _is_set(of, "use_megatron_fsdp"):
        shards = "all"
    if _is_set(of, "bf16") or _is_set(of, "fp16"):
        return TrainingState(2, 4, 12, shards)  # with float32 gradients and master weights
    return TrainingState(sharded=shards)


def _assumptions(of: Fields) -> list[str]:
    found = ["one micro-batch with the gradients' reduction; Megatron reduces them once per global batch"]
    if of.optional("padded_vocab_size", "vocab_size") is None:
        found.append("no vocabulary in the file, so embedding and head have 256 symbols: give --vocab-size")
    elif not _is_set(of, "untie_embeddings_and_output_weights"):
        found.append("embedding and head as two matrices, although they are tied")
    if of.data.get("recompute_granularity") == "selective":
        found.append("no recomputation (recompute_granularity is selective)")
    if of.data.get("mtp_num_layers"):
        found.append("no multi-token prediction")
    return found
