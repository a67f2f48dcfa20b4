"""Jobs of torchtitan, read from TOML: [model] name and flavor, or the module and config of its command line.

    module = "qwen3"                            [model]
    config = "qwen3_30b_a3b"                    name = "qwen3"
                                                flavor = "30B-A3B"
    [training]
    local_batch_size = 2

The installed torchtitan gives the sizes of a flavor or config. [training], [parallelism] and [activation_checkpoint]
have precedence over those of a config.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.job_files import SWIGLU_ROPE, ExternalJob, Fields, TrainingState

_SECTIONS = ("training", "parallelism", "activation_checkpoint")
_PARALLEL = {
    "mp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "esp": "expert_tensor_parallel_degree",
}


def titan_job(path: Path, text: str) -> ExternalJob:
    """Return the job of a TOML file.

    Raises `ConfigError` for invalid TOML, without torchtitan, or for an unknown model or unsupported field.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: invalid TOML: {error}") from error
    fields = Fields(path, data)
    model = data.get("model", {})
    if not isinstance(model, dict) or not all(isinstance(data.get(name, {}), dict) for name in _SECTIONS):
        raise fields.error(f"expected the tables model, {', '.join(_SECTIONS)}")
    trainer: Any = None
    if "config" in data:
        module = _module(fields, data.get("module"), "module", ".config_registry")
        trainer = _made(fields, module, str(data["config"]), "config")()
        spec = trainer.model_spec
    else:
        module = _module(fields, model.get("name"), "model.name", "")
        try:
            spec = _made(fields, module, "model_registry", "model.name")(str(model.get("flavor", "")))
        except (KeyError, ValueError, AssertionError) as error:
            raise fields.error(f"model.flavor = {model.get('flavor')!r} is unknown to torchtitan: {error!r}") from error
    sections = {name: Fields(path, {**_defaults(trainer, name), **data.get(name, {})}) for name in _SECTIONS}
    training, parallel = sections["training"], sections["parallelism"]
    stages = parallel.stages("pipeline_parallel_degree", "context_parallel_degree")
    mode = sections["activation_checkpoint"].data.get("mode")
    if mode is None and trainer is not None:
        mode = type(trainer.activation_checkpoint).__qualname__.partition(".")[0].removesuffix("AC").lower()
    settings: dict[str, Any] = {}
    if any(field in parallel.data for field in _PARALLEL.values()):
        settings = {name: parallel.count(field, default=1) for name, field in _PARALLEL.items()}
    # -1: torchtitan's default, one micro-batch.
    global_batch = None if training.data.get("global_batch_size", -1) == -1 else training.count("global_batch_size")
    assumptions = []
    if getattr(spec.model, "enable_weight_tying", False):
        assumptions.append("embedding and head as two matrices, although they are tied")
    sizes = _sizes(fields, spec.model)
    sizes |= {
        "batch": training.count("local_batch_size", default=8),
        "seq_len": training.count("seq_len", default=2048),
    }
    name = str(data.get("config") or f"{model.get('name')} {model.get('flavor')}")
    read = fields.model(name, **SWIGLU_ROPE, **sizes)
    shards = "none" if parallel.data.get("data_parallel_shard_degree", -1) == 1 else "all"
    state = TrainingState(sharded=shards)
    settings |= {"recompute": True} if mode == "full" else {}
    selective = "activation_checkpoint" if mode == "selective" else None
    return ExternalJob(
        read, settings, tuple(assumptions), state, selective, "fusedmoe.titan.pipeline", global_batch, stages
    )


def _defaults(trainer: Any, section: str) -> dict[str, Any]:
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


def _made(fields: Fields, module: Any, name: str, field: str) -> Any:
    function = vars(module).get(name) if name.isidentifier() and not name.startswith("_") else None
    if not callable(function):
        raise fields.error(f"{field}: {module.__name__} has no {name!r}")
    return function


def _sizes(fields: Fields, model: Any) -> dict[str, Any]:
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
            return sizes | _latent(attention)
        return sizes | {"kv_heads": attention.n_kv_heads or attention.n_heads, "head_dim": attention.head_dim}
    except AttributeError as error:
        raise fields.error(f"the attention or experts of this torchtitan model are not supported: {error}") from error


def _latent(attention: Any) -> dict[str, Any]:
    return {
        "kv_rank": attention.kv_lora_rank,
        "q_rank": attention.q_lora_rank or None,
        "rope_dim": attention.qk_rope_head_dim,
        "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        "value_dim": attention.v_head_dim,
    }
