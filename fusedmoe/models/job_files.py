"""Read the jobs of Hugging Face transformers, torchtitan and Megatron-core from their configuration files.

Nothing is downloaded, and nothing from a file is executed. Fields that do not change sizes (dropout, RoPE scaling,
norms of queries and keys) are ignored.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json, read_text
from fusedmoe.models.external_job import ExternalJob, Fields, TrainingState
from fusedmoe.models.megatron_job import LINE_DEFAULTS, line_arguments, megatron_job, yaml_arguments

#: Model types of Hugging Face transformers whose parameters were compared with this module's.
HF_TYPES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

# Components of every supported model of transformers and torchtitan.
_SWIGLU_ROPE: dict[str, Any] = {"expert": "swiglu", "norm": "rms", "positions": "rope", "capacity_factor": None}
_MAX_SEQ_LEN = 4096
_TITAN_SECTIONS = ("training", "parallelism", "activation_checkpoint")
_TITAN_PARALLEL = {
    "mp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "esp": "expert_tensor_parallel_degree",
}


def read_job(path: Path) -> ExternalJob:
    """Read a job. Its suffix selects the format.

    `.json`: config.json of Hugging Face transformers. `.toml`: torchtitan. `.yaml`, `.yml`: Megatron-core's arguments.
    Any other: a command line with these arguments.

    Raises `ConfigError` with file and field if the file cannot be read, or a field is missing or unsupported.
    """
    # Editors on Windows start a file with a byte-order mark.
    text = read_text(path).removeprefix("\ufeff")
    if path.suffix == ".json":
        data = parse_json(text, f"--config {path}")
        if not isinstance(data, dict):
            raise ConfigError(f"--config {path}: expected an object with the fields of a model")
        return hf_job(path, data)
    if path.suffix == ".toml":
        return titan_job(path, text)
    if path.suffix in (".yaml", ".yml"):
        return megatron_job(path, yaml_arguments(path, text))
    return megatron_job(path, LINE_DEFAULTS | line_arguments(path, text))


def hf_job(path: Path, data: Mapping[str, Any]) -> ExternalJob:
    """Return the job of a config.json. Unknown model types with the standard fields are planned like Mixtral."""
    kind, assumptions = str(data.get("model_type", "unnamed")), []
    if "num_hidden_layers" not in data and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
        assumptions.append("only text_config is planned, without encoders of images or sound")
    fields = Fields(path, data)
    experts = fields.optional("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts is None:
        raise fields.error(
            f"model type {kind} has none of num_local_experts, num_experts, n_routed_experts, moe_num_experts: "
            "plan reads mixture-of-experts models only"
        )
    if kind not in HF_TYPES:
        assumptions.append(
            f"model type {kind} is unknown: planned with grouped-query attention and gated experts, from its standard "
            "fields"
        )
    layers, model_dim, heads = (fields.count(n) for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    hidden = fields.optional("moe_intermediate_size", "expert_intermediate_size") or fields.count("intermediate_size")
    latent = {} if data.get("kv_lora_rank") is None else fields.latent("qk_nope_head_dim", "qk_rope_head_dim")
    sizes: dict[str, Any] = {
        "layers": layers,
        "model_dim": model_dim,
        "heads": heads,
        "kv_heads": heads if latent else fields.count("num_key_value_heads", default=heads),
        "hidden": hidden,
        "experts": experts,
        "k": fields.count("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
        "vocab_size": fields.count("vocab_size"),
        "dense_hidden": fields.optional("intermediate_size", "dense_intermediate_size"),
        "shared_hidden": _shared_hidden(fields, hidden),
        "dense_layers": _dense_layers(fields, layers),
        "moe_every": fields.count("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1),
    }
    if latent:
        sizes |= latent
    elif (head_dim := fields.optional("head_dim")) is not None:
        sizes["head_dim"] = head_dim
    elif model_dim % heads:
        raise fields.error(
            f"hidden_size = {model_dim} is not a multiple of num_attention_heads = {heads}; head_dim is missing"
        )
    else:
        sizes["head_dim"] = model_dim // heads
    if kind == "gpt_oss":
        sizes["bias"] = True
    positions = fields.count("max_position_embeddings", default=_MAX_SEQ_LEN)
    seq_len = min(positions, _MAX_SEQ_LEN)
    assumptions.append(f"one sequence of {seq_len} tokens per replica and step, unless --batch and --seq-len are given")
    assumptions += _not_modelled(data)
    model = fields.model(kind, **_SWIGLU_ROPE, seq_len=seq_len, batch=1, **sizes)
    # fsdp_size * tp_size is the number of ranks in `DistributedConfig`.
    state = TrainingState(sharded="all")
    return ExternalJob(model, {}, tuple(assumptions), state, pipeline="fusedmoe.hf.pipeline")


def _shared_hidden(fields: Fields, hidden: int) -> int:
    """Return the hidden dim of all shared experts together."""
    own = fields.optional("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    number = fields.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, least=0)
    return number * hidden if own is None else own


def _dense_layers(fields: Fields, layers: int) -> int:
    """Return the number of leading blocks without experts. Raises `ConfigError` if dense blocks are elsewhere."""
    leading = fields.count("first_k_dense_replace", "moe_layer_start_index", default=0, least=0)
    if (listed := fields.data.get("mlp_only_layers")) is None:
        listed = []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise fields.error(f"mlp_only_layers = {listed!r} must be a list of integers")
    leading = leading or len(listed)
    if listed and sorted(listed) != list(range(leading)):
        raise fields.error(f"mlp_only_layers = {listed!r} must be the first layers; plan models leading dense blocks")
    if leading >= layers:
        raise fields.error(f"{leading} of {layers} blocks are dense: the model has no experts")
    return leading


def _not_modelled(data: Mapping[str, Any]) -> list[str]:
    omissions = []
    if data.get("sliding_window") and (data.get("use_sliding_window", True) or data.get("layer_types")):
        omissions.append(
            f"attention over all tokens in every block, not over sliding_window = {data['sliding_window']}"
        )
    if data.get("tie_word_embeddings"):
        omissions.append("embedding and head as two matrices, although tie_word_embeddings is set")
    if data.get("num_nextn_predict_layers"):
        omissions.append(f"no multi-token prediction (num_nextn_predict_layers = {data['num_nextn_predict_layers']})")
    if data.get("topk_group") and data.get("n_group") not in (None, 1):
        omissions.append("uniform choice of experts, not limited to topk_group groups")
    return omissions


def titan_job(path: Path, text: str) -> ExternalJob:
    """Return the job of torchtitan's TOML: [model] name and flavor, or the module and config of its command line.

        module = "qwen3"                            [model]
        config = "qwen3_30b_a3b"                    name = "qwen3"
                                                    flavor = "30B-A3B"
        [training]
        local_batch_size = 2

    The installed torchtitan gives the sizes of a flavor or config. [training], [parallelism] and
    [activation_checkpoint] have precedence over those of a config.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: invalid TOML: {error}") from error
    fields = Fields(path, data)
    model = data.get("model", {})
    if not isinstance(model, dict) or not all(isinstance(data.get(name, {}), dict) for name in _TITAN_SECTIONS):
        raise fields.error(f"expected the tables model, {', '.join(_TITAN_SECTIONS)}")
    trainer: Any = None
    if "config" in data:
        module = _module(fields, data.get("module"), "module", ".config_registry")
        trainer = _module_function(fields, module, str(data["config"]), "config")()
        spec = trainer.model_spec
    else:
        module = _module(fields, model.get("name"), "model.name", "")
        try:
            spec = _module_function(fields, module, "model_registry", "model.name")(str(model.get("flavor", "")))
        except (KeyError, ValueError, AssertionError) as error:
            raise fields.error(f"model.flavor = {model.get('flavor')!r} is unknown to torchtitan: {error!r}") from error
    sections = {
        name: Fields(path, {**_titan_defaults(trainer, name), **data.get(name, {})}) for name in _TITAN_SECTIONS
    }
    training, parallel = sections["training"], sections["parallelism"]
    stages = parallel.stages("pipeline_parallel_degree", "context_parallel_degree")
    mode = sections["activation_checkpoint"].data.get("mode")
    if mode is None and trainer is not None:
        mode = type(trainer.activation_checkpoint).__qualname__.partition(".")[0].removesuffix("AC").lower()
    settings: dict[str, Any] = {}
    if any(field in parallel.data for field in _TITAN_PARALLEL.values()):
        settings = {name: parallel.count(field, default=1) for name, field in _TITAN_PARALLEL.items()}
    # -1: torchtitan's default, one micro-batch.
    global_batch = None if training.data.get("global_batch_size", -1) == -1 else training.count("global_batch_size")
    assumptions = []
    if getattr(spec.model, "enable_weight_tying", False):
        assumptions.append("embedding and head as two matrices, although they are tied")
    sizes = _titan_sizes(fields, spec.model)
    sizes |= {
        "batch": training.count("local_batch_size", default=8),
        "seq_len": training.count("seq_len", default=2048),
    }
    name = str(data.get("config") or f"{model.get('name')} {model.get('flavor')}")
    read = fields.model(name, **_SWIGLU_ROPE, **sizes)
    shards = "none" if parallel.data.get("data_parallel_shard_degree", -1) == 1 else "all"
    state = TrainingState(sharded=shards)
    settings |= {"recompute": True} if mode == "full" else {}
    selective = "activation_checkpoint" if mode == "selective" else None
    return ExternalJob(
        read, settings, tuple(assumptions), state, selective, "fusedmoe.titan.pipeline", global_batch, stages
    )


def _titan_defaults(trainer: Any, section: str) -> dict[str, Any]:
    """Return the fields of a section of a torchtitan config; none without a config, or for unknown kinds."""
    found = getattr(trainer, section, None)
    if section == "activation_checkpoint" or not dataclasses.is_dataclass(found):
        return {}
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def _module(fields: Fields, name: Any, field: str, inner: str) -> Any:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]+", name):
        raise fields.error(f"{field} = {name!r} must be the name of a model of torchtitan")
    try:
        importlib.import_module("torchtitan")
    except ImportError:
        raise fields.error("the sizes of a torchtitan model need torchtitan: pip install torchtitan") from None
    try:
        return importlib.import_module(f"torchtitan.models.{name}{inner}")
    except ImportError as error:
        raise fields.error(f"{field} = {name!r} cannot be imported from the installed torchtitan: {error}") from error


def _module_function(fields: Fields, module: Any, name: str, field: str) -> Any:
    function = vars(module).get(name) if name.isidentifier() and not name.startswith("_") else None
    if not callable(function):
        raise fields.error(f"{field}: {module.__name__} has no {name!r}")
    return function


def _titan_sizes(fields: Fields, model: Any) -> dict[str, Any]:
    """Return the sizes of a decoder's configuration. Raises `ConfigError` without experts, or for unknown attention."""
    moe = [layer for layer in model.layers if getattr(layer, "moe", None) is not None]
    if not moe:
        raise fields.error("the model has no experts: plan reads mixture-of-experts models only")
    dense = len(model.layers) - len(moe)
    if any(getattr(layer, "moe", None) is not None for layer in model.layers[:dense]):
        raise fields.error("plan models dense blocks only before all blocks with experts")
    first, attention = moe[0].moe, moe[0].attention
    try:
        sizes: dict[str, Any] = {
            "layers": len(model.layers),
            "model_dim": model.dim,
            "heads": attention.n_heads,
            "hidden": first.routed_experts.inner_experts.hidden_dim,
            "experts": first.num_experts,
            "k": first.router.top_k,
            "vocab_size": model.vocab_size,
            "dense_layers": dense,
            "shared_hidden": 0 if first.shared_experts is None else first.shared_experts.w1.out_features,
            "dense_hidden": model.layers[0].feed_forward.w1.out_features if dense else None,
            "bias": bool(attention.wo.bias),
        }
        if hasattr(attention, "kv_lora_rank"):
            return sizes | {
                "kv_rank": attention.kv_lora_rank,
                "q_rank": attention.q_lora_rank or None,
                "rope_dim": attention.qk_rope_head_dim,
                "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
                "value_dim": attention.v_head_dim,
            }
        return sizes | {"kv_heads": attention.n_kv_heads or attention.n_heads, "head_dim": attention.head_dim}
    except AttributeError as error:
        raise fields.error(f"the attention or experts of this torchtitan model are not supported: {error}") from error
