"""What a training job is told: every setting with its default, as one value that can be written and read back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.whole_policies import WHOLE_POLICIES
from fusedmoe.training.sharded_experts import POLICIES as PLACEMENT_POLICIES

DTYPES = ("fp32", "bf16", "fp64")
WIRES = ("same", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")

#: What `--placement` may be: experts that stay, or a policy of `ShardedExperts` that moves and copies them.
PLACEMENTS = ("ep", "fssdp", *(policy for policy in PLACEMENT_POLICIES if policy not in ("ep", "hecate")))

#: What `--schedule` may be: nothing in chunks, the best of all policies, or one of layers or of whole models.
SCHEDULES = ("off", "auto", *POLICIES, *(name for name in WHOLE_POLICIES if name not in POLICIES))

_CHOICES = (
    ("dtype", DTYPES),
    ("wire_dtype", WIRES),
    ("device", DEVICES),
    ("schedule", SCHEDULES),
    ("placement", PLACEMENTS),
)


@dataclass(frozen=True)
class Settings:
    """The settings of `fusedmoe train`. What is None is chosen when the job starts, from the model and the ranks.

    Attributes:
        model: the model, `batch` and `seq_len` included.
        ranks_per_node, ep, esp, mp: the parallel layout (`fusedmoe.cli.layout`).
        dispatch, wire_dtype: the all-to-all algorithm, and what rows travel in ("same": as they are).
        schedule: what overlaps with computation, and by which policy (`SCHEDULES`).
        placement: which ranks have which experts (`PLACEMENTS`).
        placement_memory, placement_overlap: m and t of `ShardedExperts`.
        rematerialise: copies of experts are given back after each forward pass.
        dtype: "fp32", "bf16" (autocast; parameters stay float32) or "fp64".
        device: "auto" takes a GPU where there is one for each rank of the machine.
        recompute: activations are computed again for the backward pass instead of kept.
        steps, lr, warmup, weight_decay, clip, aux_weight: AdamW under a cosine to a tenth of lr, after `warmup` steps.
        seed: of the parameters, the batches and the gates' noise.
        data, pattern, held_out: text (None: the Python standard library's source), which files, the share held out.
        eval_batches: held-out batches of each replica at the end.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        timeline_step: the step whose timeline is drawn.
        timeout_s: how long a rank waits for another.
    Raises:
        ConfigError: a value that cannot be.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    ranks_per_node: int | None = None
    ep: int | None = None
    esp: int | None = None
    mp: int | None = None
    dispatch: str = "direct"
    wire_dtype: str = "same"
    schedule: str = "off"
    placement: str = "ep"
    placement_memory: int = 2
    placement_overlap: int | None = None
    rematerialise: bool = False
    dtype: str = "fp32"
    device: str = "auto"
    recompute: bool = False
    steps: int = 320
    lr: float | None = None
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    aux_weight: float = 0.01
    seed: int = 1
    data: str | None = None
    pattern: str = "*"
    held_out: float = 0.05
    eval_batches: int = 32
    checkpoint_every: int = 200
    timeline_step: int = 10
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("placement_memory", "placement_overlap"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} = {value} must be at least 0")
        for name in ("ranks_per_node", "ep", "esp", "mp", "steps", "eval_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        for name in ("lr", "warmup", "weight_decay", "clip", "aux_weight", "checkpoint_every", "timeline_step"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value} must be a number from 0")
        for name, known in _CHOICES:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(known)}")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s = {self.timeout_s} must be positive")

    @property
    def peak_lr(self) -> float:
        """`lr`, or one that suits the width: 0.0025 at M = 128, falling with the square root."""
        return 0.0025 * math.sqrt(128 / self.model.model_dim) if self.lr is None else self.lr

    @property
    def warmup_steps(self) -> int:
        """`warmup`, or a twentieth of all steps."""
        return max(1, self.steps // 20) if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """The rate of a step (from 0): a straight rise, then a cosine down to a tenth of the peak."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        way = min(1.0, max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak_lr * rise * (0.55 + 0.45 * math.cos(math.pi * way))

    def changed(self, changes: dict[str, Any]) -> Settings:
        """The settings with some values replaced; names of the model's are written "model.layers"."""
        model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
        own = {name: value for name, value in changes.items() if not name.startswith("model.")}
        return replace(self, model=replace(own.pop("model", self.model), **model), **own)

    def to_json(self) -> dict[str, Any]:
        """In plain types; `from_json` gives equal settings back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """Raises `ConfigError` for settings of another version, with the names that are not known."""
        unknown = [name for name in data if name not in {f.name for f in fields(cls)}]
        unknown += [f"model.{name}" for name in data["model"] if name not in {f.name for f in fields(ModelConfig)}]
        if unknown:
            raise ConfigError(f"settings not known to this version: {', '.join(unknown)}")
        return cls(**{**data, "model": ModelConfig(**data["model"])})


def read_settings(run_dir: Path) -> Settings:
    """The settings that a run folder's config.json holds. Raises `ConfigError` where there are none."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no config.json. Give --resume the folder of a run.")
    return Settings.from_json(json.loads(path.read_text(encoding="utf-8"))["settings"])
