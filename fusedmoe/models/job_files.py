"""Jobs of other frameworks, and those of Hugging Face transformers from their config.json.

Nothing is downloaded, and nothing from a file is executed. Fields that do not change sizes (dropout, RoPE scaling,
norms of queries and keys) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig

#: Model types of Hugging Face transformers whose parameters were compared with this module's.
HF_TYPES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

#: Components of every supported model of transformers and torchtitan.
SWIGLU_ROPE: dict[str, Any] = {"expert": "swiglu", "norm": "rms", "positions": "rope", "capacity_factor": None}

_MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class TrainingState:
    """Bytes of training state per parameter element, and the parts that data-parallel ranks share among them.

    `sharded`: "none"; "optimizer" (ZeRO-1, Megatron-core's distributed optimizer); "all" (FSDP).
    """

    parameter: int = 4
    gradient: int = 4
    optimizer: int = 8  # AdamW's two moments
    sharded: str = "none"
    in_flight: int = 1  # micro-batches whose activations a rank holds

    def __str__(self) -> str:
        kept = {"none": "unsharded", "optimizer": "optimizer state sharded over replicas"}
        dtypes = "float32 parameters, gradients and AdamW moments"
        if self.parameter == 2:
            dtypes = "16-bit parameters, float32 gradients, master weights and AdamW moments"
        fsdp = "sharded over all ranks (FSDP), whose all-gathers are not in the step"
        return f"{dtypes}, {kept.get(self.sharded, fsdp)}"


@dataclass(frozen=True)
class ExternalJob:
    """A job of another framework.

    Attributes:
        model: its model. Batch and sequence length are those of a micro-batch per data-parallel replica.
        settings: parallel sizes and other settings that the file states ("ep", "esp", "mp", "recompute").
        assumptions: what the file leaves open, and what the plan does not model.
        pipeline: function of the integration that runs blocks in micro-batches; None: there is none.
        global_batch: samples of all replicas in one step; None: one micro-batch per replica.
        stages: pipeline stages that share the layers and ranks.
        selective: name of the field that selects selective recomputation; None: none does.
    """

    model: ModelConfig
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    state: TrainingState = TrainingState()
    selective: str | None = None
    pipeline: str | None = None
    global_batch: int | None = None
    stages: int = 1

    def one_stage(self, ranks: int | None, layers: int | None) -> tuple[ExternalJob, int | None]:
        """Return the job of one pipeline stage and the stage's ranks: an equal share of `ranks`.

        With `layers` given, layers and ranks are those of the stage. Raises `ConfigError` if ranks are not divisible.
        """
        if self.stages == 1:
            return self, ranks
        model, number = self.model, self.stages
        if layers is None and (ranks is None or ranks % number):
            raise ConfigError(
                f"--config: {number} pipeline stages share the ranks: give --ranks as a multiple of {number}, or plan "
                f"one stage: --layers {-(-model.layers // number)} and its own --ranks"
            )
        stage = "one pipeline stage"
        if layers is None:
            assert ranks is not None
            share, ranks = -(-model.layers // number), ranks // number
            stage += f" ({share} of {model.layers} layers, all with experts, on {ranks} of {ranks * number} ranks)"
            model = replace(model, layers=share, dense_layers=0)
        words = (
            f"{stage}, with embedding and head; bubbles and sends between stages are not in the step; memory has the "
            f"activations of {number} micro-batches, as the first stage in 1F1B order"
        )
        state = replace(self.state, in_flight=number)
        return replace(self, model=model, assumptions=(words, *self.assumptions), state=state, stages=1), ranks

    def micro_batches(self, batch: int, replicas: int) -> int:
        """Return the micro-batches of `batch` samples per replica and step. Raises `ConfigError` for a fraction."""
        if self.global_batch is None:
            return 1
        if self.global_batch % (batch * replicas):
            raise ConfigError(
                f"--config: the global batch of {self.global_batch} samples is not a multiple of {batch} samples on "
                f"each of {replicas} replicas; change --batch or --ranks"
            )
        return self.global_batch // (batch * replicas)


class Fields:
    """Fields of a configuration file. Errors name the field and the file."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"--config {self.path}: {message}")

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these fields that is set. Raises `ConfigError` if none is and there is no default."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self.error(f"{name} = {value!r} must be an integer >= {least}")
            return value
        if default is None:
            raise self.error(f"the field {' or '.join(names)} is missing")
        return default

    def stages(self, pipeline: str, context: str) -> int:
        """Return the number of pipeline stages. Raises `ConfigError` for context parallelism."""
        if (shards := self.count(context, default=1)) > 1:
            raise self.error(
                f"{context} = {shards} is not supported: plan has no context parallelism. For an estimate, remove it "
                f"from a copy of the file and divide --seq-len by {shards}"
            )
        return self.count(pipeline, default=1)

    def optional(self, *names: str) -> int | None:
        return self.count(*names) if any(self.data.get(name) is not None for name in names) else None

    def model(self, name: str, **sizes: Any) -> ModelConfig:
        try:
            return ModelConfig(name, **sizes)
        except ConfigError as error:
            raise self.error(str(error)) from error


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
    latent = _latent(fields)
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
    model = fields.model(kind, **SWIGLU_ROPE, seq_len=seq_len, batch=1, **sizes)
    # fsdp_size * tp_size is the number of ranks in `DistributedConfig`.
    state = TrainingState(sharded="all")
    return ExternalJob(model, {}, tuple(assumptions), state, pipeline="fusedmoe.hf.pipeline")


def _latent(fields: Fields) -> dict[str, int | None]:
    rank = fields.optional("kv_lora_rank")
    if rank is None:
        return {}
    rope = fields.count("qk_rope_head_dim")
    head_dim = fields.count("qk_nope_head_dim") + rope
    value_dim, q_rank = fields.count("v_head_dim"), fields.optional("q_lora_rank")
    return {"kv_rank": rank, "rope_dim": rope, "head_dim": head_dim, "value_dim": value_dim, "q_rank": q_rank}


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
