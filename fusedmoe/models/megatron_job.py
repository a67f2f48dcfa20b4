"""Jobs of Megatron-core, read from its arguments: a YAML file, or a file with a command line.

YAML keys may be arguments ("--num-layers", "num_layers") at any depth. In a command line, all words that start with
"--" are arguments, also inside ARGS="..."; the file may be a shell script without variables in the values that matter.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.external_job import ExternalJob, Fields, TrainingState

_PARALLEL = {
    "mp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "esp": "expert_tensor_parallel_size",
}
_TRUE, _FALSE = (True, "true", "True"), (False, None, "false", "False")
# Without parentheses, which are part of unquoted patterns.
_SHELL_SYNTAX = ";<>|&"
#: Without the flag, a command line's --num-query-groups has no effect. YAML sets the model's fields directly.
LINE_DEFAULTS: dict[str, Any] = {"group_query_attention": False}


def yaml_arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of a YAML file by name, with underscores. Raises `ConfigError` without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"--config {path}: YAML needs PyYAML: pip install pyyaml") from None
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: invalid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: expected a mapping of arguments")
    arguments: dict[str, Any] = {}

    def collect(part: Mapping[Any, Any], outer: tuple[Mapping[Any, Any], ...]) -> None:
        for key, value in part.items():
            if any(value is mapping for mapping in outer):
                raise ConfigError(f"--config {path}: {key} is an alias of a mapping that contains it")
            if isinstance(value, dict):
                collect(value, (*outer, value))
            else:
                arguments[_name(str(key))] = value

    collect(data, (data,))
    return arguments


def line_arguments(path: Path, text: str) -> dict[str, Any]:
    """Return the arguments of a command line by name, with underscores; an argument without a value is True."""
    try:
        words = _split_words(text)
    except ValueError as error:
        raise ConfigError(f"--config {path}: not a command line: {error}") from error
    arguments: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            has_value = not after.startswith("--") and after not in (")", "(") and bool(after.strip(_SHELL_SYNTAX))
            arguments[_name(name)] = _parse_value(value if equals else after) if equals or has_value else True
    return arguments


def _split_words(text: str) -> list[str]:
    """Return the words of a shell script; those of ARGS="--a 1 ..." are words, too, and end with ";"."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    # The number of a redirected file ("2>&1") is not a value.
    lexer = shlex.shlex(re.sub(r"(?<!\S)\d+(?=[<>])", "", text), posix=True, punctuation_chars=_SHELL_SYNTAX)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        quoted = re.fullmatch(r"\w+\+?=((?:.*\s)?--\w.*)", word, re.DOTALL)
        words += [word] if quoted is None else [*shlex.split(quoted[1]), ";"]
    return words


def _name(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _parse_value(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def megatron_job(path: Path, data: Mapping[str, Any]) -> ExternalJob:
    """Return the job of Megatron-core's arguments. Missing arguments have Megatron's defaults."""
    fields = Fields(path, data)
    stages = fields.stages("pipeline_model_parallel_size", "context_parallel_size")
    layers, model_dim, heads = (fields.count(name) for name in ("num_layers", "hidden_size", "num_attention_heads"))
    latent = {}
    if _is_set(fields, "multi_latent_attention"):
        latent = fields.latent("qk_head_dim", "qk_pos_emb_head_dim", nope_dim=128, rope_dim=64)
    is_gated = _is_set(fields, "swiglu") or _is_set(fields, "gated_linear_unit")
    # As in Megatron-LM's arguments.
    default_hidden = int(4 * model_dim * 2 / 3 / 64) * 64 if is_gated else 4 * model_dim
    dense_hidden = fields.count("ffn_hidden_size", default=default_hidden)
    dense_layers = _dense_layers(fields, layers)
    if _is_set(fields, "group_query_attention"):
        groups: int | None = fields.count("num_query_groups", default=1)
    else:
        groups = None if "group_query_attention" in data else fields.optional("num_query_groups")
    sizes: dict[str, Any] = {
        "layers": layers,
        "model_dim": model_dim,
        "heads": heads,
        "kv_heads": heads if latent or groups is None else groups,
        "hidden": fields.count("moe_ffn_hidden_size", default=dense_hidden),
        "dense_hidden": dense_hidden,
        "experts": fields.count("num_experts", "num_moe_experts"),
        "k": fields.count("moe_router_topk", default=2),
        "shared_hidden": fields.count("moe_shared_expert_intermediate_size", default=0, least=0),
        "dense_layers": dense_layers,
        "seq_len": fields.count("seq_length"),
        "batch": fields.count("micro_batch_size", default=1),
        "vocab_size": fields.optional("padded_vocab_size", "vocab_size"),
        "capacity_factor": _capacity(fields),
        "bias": not latent and not _is_set(fields, "disable_bias_linear") and data.get("add_bias_linear") is not False,
        "expert": "swiglu" if is_gated else "ffn",
        "norm": "rms" if data.get("normalization") == "RMSNorm" else "layer",
        "positions": "rope" if latent or data.get("position_embedding_type") in ("rope", "yarn") else "learned",
        "head_dim": fields.count("kv_channels", default=max(1, model_dim // heads)),
    }
    settings: dict[str, Any] = {}
    if any(name in data for name in _PARALLEL.values()):
        # Megatron's defaults: 1, and for experts the size of tensor parallelism.
        mp, ep = (fields.count(_PARALLEL[axis], default=1) for axis in ("mp", "ep"))
        settings = {"mp": mp, "ep": ep, "esp": fields.count(_PARALLEL["esp"], default=mp)}
    if data.get("recompute_granularity") == "full":
        settings["recompute"] = True
    model = fields.model("megatron", **sizes | latent)
    selective = "recompute_granularity" if data.get("recompute_granularity") == "selective" else None
    return ExternalJob(
        model,
        settings,
        tuple(_assumptions(fields)),
        _state(fields),
        selective,
        global_batch=fields.optional("global_batch_size"),
        stages=stages,
    )


def _is_set(fields: Fields, name: str) -> bool:
    value = fields.data.get(name)
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise fields.error(f"{name} = {value!r} must be true or false")


def _capacity(fields: Fields) -> float | None:
    """Return the capacity factor. As in Megatron, a negative one drops no token."""
    value = fields.data.get("moe_expert_capacity_factor")
    try:
        factor = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if factor is None or factor < 0:
        return None
    if not 0 < factor < math.inf:
        raise fields.error(f"moe_expert_capacity_factor = {value!r} must be positive, or negative for no capacity")
    return factor


def _dense_layers(fields: Fields, layers: int) -> int:
    """Return the number of leading dense layers, from 1 or a pattern such as ([0]*3+[1]*58)."""
    value = fields.data.get("moe_layer_freq", 1)
    if isinstance(value, int) and not isinstance(value, bool) and value == 1:
        return 0
    pattern = value if isinstance(value, list) else _pattern(str(value))
    if pattern is None or len(pattern) != layers or any(one not in (0, 1) for one in pattern):
        raise fields.error(
            f"moe_layer_freq = {value!r}: plan reads 1, or {layers} zeros and ones such as ([0]*3+[1]*58)"
        )
    dense = pattern.index(1) if 1 in pattern else layers
    if dense == layers or 0 in pattern[dense:]:
        raise fields.error(f"moe_layer_freq = {value!r}: plan models dense layers only before all layers with experts")
    return dense


def _pattern(text: str) -> list[int] | None:
    """Return the numbers of a sum of lists, each with an optional factor, without evaluating it."""
    text = re.sub(r"[\s()]", "", text)
    if not re.fullmatch(r"(\[[01](,[01])*\](\*\d{1,4})?)(\+\[[01](,[01])*\](\*\d{1,4})?)*", text):
        return None
    parts = re.findall(r"\[([01,]+)\](?:\*(\d+))?", text)
    return [int(one) for numbers, times in parts for one in numbers.split(",") * int(times or 1)]


def _state(fields: Fields) -> TrainingState:
    shards = "optimizer" if _is_set(fields, "use_distributed_optimizer") else "none"
    if _is_set(fields, "use_megatron_fsdp"):
        shards = "all"
    if _is_set(fields, "bf16") or _is_set(fields, "fp16"):
        return TrainingState(2, 4, 12, shards)  # with float32 gradients and master weights
    return TrainingState(sharded=shards)


def _assumptions(fields: Fields) -> list[str]:
    assumptions = []
    if fields.optional("padded_vocab_size", "vocab_size") is None:
        assumptions.append("no vocabulary in the file, so embedding and head have 256 symbols: give --vocab-size")
    elif not _is_set(fields, "untie_embeddings_and_output_weights"):
        assumptions.append("embedding and head as two matrices, although they are tied")
    if fields.data.get("mtp_num_layers"):
        assumptions.append("no multi-token prediction")
    return assumptions
