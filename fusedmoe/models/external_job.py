"""Jobs of other frameworks, and the fields of the configuration files that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig


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

    def latent(
        self, nope: str, rope: str, *, nope_dim: int | None = None, rope_dim: int | None = None
    ) -> dict[str, Any]:
        """Return the sizes of latent attention. `nope`, `rope`: fields of a key's channels, with their defaults."""
        rotated = self.count(rope, default=rope_dim)
        return {
            "kv_rank": self.count("kv_lora_rank"),
            "q_rank": self.optional("q_lora_rank"),
            "rope_dim": rotated,
            "head_dim": self.count(nope, default=nope_dim) + rotated,
            "value_dim": self.count("v_head_dim", default=nope_dim),
        }
