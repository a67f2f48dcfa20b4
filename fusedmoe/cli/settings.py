"""Settings of a training job: values, defaults, command-line flags and their JSON form."""

from __future__ import annotations

import argparse
import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fusedmoe.errors import TIMEOUT_CURE, ConfigError, printable
from fusedmoe.files import parse_json, read_text
from fusedmoe.models.config import ALIASES, EXPERTS, MODELS, NORMS, OBJECTIVES, POSITIONS, ModelConfig, named_model
from fusedmoe.names import ACTIVATIONS, ALGORITHMS, FP8_WIRES, GATES, ORDERS, PLACEMENT_BALANCES, PLACEMENT_POLICIES
from fusedmoe.schedule import POLICIES, CostModel

DTYPES = ("fp32", "bf16", "fp64")
WIRES = ("same", "bf16", "fp16", *FP8_WIRES)
DEVICES = ("auto", "cpu", "cuda")

#: Values of `--placement`: "ep" (static), or a policy of `ShardedExperts` that moves and replicates experts.
PLACEMENTS = ("ep", "fssdp", *(policy for policy in PLACEMENT_POLICIES if policy not in ("ep", "hecate")))

_MINIMUM = {
    **dict.fromkeys(("ranks_per_node", "ep", "esp", "mp", "steps", "eval_batches"), 1),
    **dict.fromkeys(("placement_memory", "placement_overlap", "warmup", "checkpoint_every", "survive"), 0),
    **dict.fromkeys(("timeline_step", "lr", "weight_decay", "clip", "aux_weight"), 0),
}
# One year. PyTorch stores time-outs as int64 nanoseconds.
_MAX_TIMEOUT_S = 3.2e7

# Flags with more choices than this list them in the help text instead of the metavar.
_MAX_METAVAR_CHOICES = 3


def schedules() -> tuple[str, ...]:
    return ("off", "auto", *POLICIES)


def gates() -> tuple[str, ...]:
    """Return the values of `--gate`: all of `fusedmoe.gates.GATES` if that is imported, else the library's."""
    module = sys.modules.get("fusedmoe.gates")
    return GATES if module is None else tuple(module.GATES)


@dataclass(frozen=True)
class Settings:
    """Settings of `fusedmoe train`, documented as `GROUPS`. None: chosen at startup from the model and the ranks."""

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
    placement_balance: str = "predicted"
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
    survive: int = 0
    timeline_step: int = 10
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in _MINIMUM.items():
            value = getattr(self, name)
            # NaN fails this comparison.
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} = {value} must be a finite number >= {least}")
        for flag in (flag for flags in GROUPS.values() for flag in flags if hasattr(self, flag.setting)):
            value, known = getattr(self, flag.setting), flag.valid_values
            if known and value not in known:
                cure = "; register your own policy with fusedmoe.register_policy, then call fusedmoe.cli.main.main()"
                cure = cure if flag.setting == "schedule" else ""
                raise ConfigError(f"{flag.setting} = {value!r} is not one of {', '.join(known)}{cure}")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s = {self.timeout_s} must be positive and at most {_MAX_TIMEOUT_S:g}")

    @property
    def peak_lr(self) -> float:
        return 0.0025 * math.sqrt(128 / self.model.model_dim) if self.lr is None else self.lr

    @property
    def warmup_steps(self) -> int:
        return max(1, self.steps // 20) if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0): linear warm-up, then cosine decay to 10% of the peak."""
        # `step + 1`: a first step with learning rate 0 would be wasted.
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = min(1.0, max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak_lr * rise * (0.55 + 0.45 * math.cos(math.pi * progress))

    def changed(self, changes: dict[str, Any]) -> Settings:
        """Return a copy with some settings replaced. A setting of the model has the prefix "model." ("model.layers").

        Gate options are merged into the existing ones unless the gate changes.
        """
        model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
        own = {name: value for name, value in changes.items() if not name.startswith("model.")}
        before = own.pop("model", self.model)
        if model.keys() & {"gate", "gate_options"}:
            kept = before.gate_options if model.get("gate", before.gate) == before.gate else {}
            model["gate_options"] = {**kept, **model.get("gate_options", {})}
        return replace(self, model=replace(before, **model), **own)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Settings:
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ConfigError("it contains no settings")
        hints = get_type_hints(cls) | {f"model.{name}": hint for name, hint in get_type_hints(ModelConfig).items()}
        values = {name: value for name, value in data.items() if name != "model"}
        values |= {f"model.{name}": value for name, value in data["model"].items()}
        # Ignoring an unknown setting would silently train a different model.
        if unknown := values.keys() - hints:
            raise ConfigError(f"unknown settings in this version: {', '.join(sorted(unknown))}")
        for name, value in values.items():
            if not _matches_type(value, hints[name]):
                raise ConfigError(f"{name} = {reprlib.repr(value)} has the wrong type")
        return cls().changed(values)


def read_settings(run_dir: Path) -> Settings:
    """Read the settings in a run folder's config.json. Raises `ConfigError` without a valid file."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: no config.json. Pass a run folder to --resume.")
    data = parse_json(read_text(path), str(path))
    try:
        return Settings.from_dict(data.get("settings") if isinstance(data, dict) else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _matches_type(value: Any, hint: Any) -> bool:
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {get_origin(hint) or hint}
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float):
        # JSON integers are unbounded.
        return abs(value) < 2**63 and (float in kinds or type(value) in kinds)
    return isinstance(value, tuple(kinds))


def parse_capacity(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


@dataclass(frozen=True)
class Flag:
    """Command-line flag of a setting, whose default value is that of `Settings`.

    `setting`: "model.NAME" for a field of `ModelConfig`. `kind`: parses the text; bool makes a pair `--flag`,
    `--no-flag`. `default_help`: description of the default if it is None.
    """

    setting: str
    help: str
    kind: Callable[[str], Any] = int
    choices: Sequence[str] | Callable[[], Sequence[str]] = ()
    default_help: str = "chosen"
    metavar: str = ""

    @property
    def name(self) -> str:
        """The flag: "--timeout" for `timeout_s`, "--seq-len" for `model.seq_len`."""
        return "--" + self.setting.removeprefix("model.").removesuffix("_s").replace("_", "-")

    @property
    def valid_values(self) -> Sequence[str]:
        """Valid values now (programs may register policies at any time); empty if any value is accepted."""
        return self.choices() if callable(self.choices) else self.choices


GROUPS: dict[str, tuple[Flag, ...]] = {
    "training": (
        Flag("steps", "number of optimizer steps"),
        Flag("model.batch", "batch size per data-parallel rank, in sequences"),
        Flag("model.seq_len", "sequence length, in tokens (bytes of text)"),
        Flag("lr", "peak learning rate (AdamW)", float, default_help="0.0025·√(128 / model dim)"),
        Flag(
            "warmup",
            "linear warm-up, in steps; cosine decay to 10%% of the peak follows",
            default_help="5%% of the steps",
        ),
        Flag("weight_decay", "weight decay of matrices; biases and norms have none", float),
        Flag("clip", "maximum gradient norm; 0 disables clipping", float),
        Flag("aux_weight", "coefficient of the gates' auxiliary losses", float),
        Flag("dtype", "compute dtype; bf16 uses autocast with float32 parameters", str, DTYPES),
        Flag("recompute", "activation checkpointing of each block", bool),
        Flag("seed", "random seed of parameters, batches and gate noise"),
    ),
    "model": (
        Flag("model.objective", "training objective: next-byte or masked-byte prediction", str, OBJECTIVES),
        Flag("model.layers", "number of transformer blocks"),
        Flag("model.model_dim", "model dimension M"),
        Flag("model.heads", "number of attention heads"),
        Flag("model.kv_heads", "number of key/value heads", default_help="--heads"),
        Flag("model.head_dim", "channels of a head", default_help="model dim / heads"),
        Flag("model.vocab_size", "number of symbols of embedding and head", default_help="256, of bytes"),
        Flag("model.dense_layers", "number of leading blocks without experts"),
        Flag("model.dense_hidden", "hidden dimension of blocks without experts", default_help="--hidden"),
        Flag("model.norm", "normalization: LayerNorm or RMSNorm", str, NORMS),
        Flag("model.positions", "position embedding: learned or rotary", str, POSITIONS),
        Flag("model.bias", "add biases to attention and experts", bool),
    ),
    "experts and routing": (
        Flag("model.expert", "expert network: ffn (two matrices) or swiglu (three)", str, EXPERTS),
        Flag("model.activation", "activation of ffn experts", str, ACTIVATIONS),
        Flag("model.hidden", "expert hidden dimension H"),
        Flag("model.experts", "number of experts per layer, E", default_help="--experts-per-rank times the ranks"),
        Flag("model.experts_per_rank", "experts per rank if --experts is not set"),
        Flag("model.moe_every", "use an MoE layer in every N-th block, a dense feed-forward in the rest"),
        Flag("model.shared_hidden", "hidden dimension of the shared expert; 0 disables it"),
        Flag("model.gate", "gate that selects experts", str, gates),
        Flag("model.k", "experts per token (switch: always 1; softmoe: all)"),
        Flag(
            "model.capacity_factor",
            "expert capacity relative to a uniform load; none disables token dropping",
            parse_capacity,
            default_help="none",
        ),
        Flag("model.order", "layout of dispatched tokens", str, ORDERS, "sparse; dropless without capacity"),
    ),
    "parallelism (remaining ranks are data parallel)": (
        Flag("ranks_per_node", "ranks per node", default_help="LOCAL_WORLD_SIZE"),
        Flag("ep", "expert-parallel (EP) size", default_help="number of nodes"),
        Flag("esp", "expert-sharding (ESP) size: ranks that share one expert", default_help="ranks per node"),
        Flag("mp", "model-parallel (MP) size of attention", default_help="ranks per node"),
        Flag("dispatch", "all-to-all algorithm", str, ALGORITHMS),
        Flag(
            "wire_dtype",
            "dtype of tokens during dispatch and combine; fp8: dispatch only, fp8-both: both, each with scales",
            str,
            WIRES,
        ),
        Flag("schedule", "schedule that overlaps communication with computation", str, schedules),
        Flag("placement", "expert placement: ep is static, others move and replicate experts", str, PLACEMENTS),
        Flag("placement_memory", "maximum number of expert replicas per rank and layer"),
        Flag(
            "placement_overlap",
            "maximum number of experts sent per layer and step",
            default_help="as many as computation hides, measured in the first 5 steps",
        ),
        Flag("placement_balance", "loads used to balance tokens across replicas", str, PLACEMENT_BALANCES),
        Flag("rematerialise", "send expert replicas again for the backward pass instead of keeping them", bool),
        Flag("device", "device; auto uses GPUs if every local rank has its own", str, DEVICES),
        Flag("timeout_s", "seconds a rank waits for another before it raises an error", float, metavar="S"),
    ),
    "data": (
        Flag(
            "data", "folder of text files, or one file", str, default_help="Python's standard library", metavar="PATH"
        ),
        Flag("pattern", "glob of the files to read, such as '*.md'", str, metavar="GLOB"),
        Flag("held_out", "fraction of the files held out for evaluation, by a hash of the path", float),
        Flag("eval_batches", "evaluation batches per data-parallel rank"),
    ),
    "run": (
        Flag("checkpoint_every", "steps between checkpoints; 0 saves only at the end"),
        Flag(
            "survive",
            "steps between in-memory copies of the state on two nodes, from which the job continues after it loses a "
            "rank or a node; 0 disables copies",
            metavar="N",
        ),
        Flag("timeline_step", "steps before the step whose timeline is recorded"),
    ),
}


#: Flags that affect a training step and its plan.
STEP_FLAGS = (
    *("--batch", "--seq-len", "--dtype", "--recompute", "--objective", "--layers", "--model-dim", "--heads"),
    *("--kv-heads", "--head-dim", "--vocab-size", "--norm", "--positions", "--bias", "--expert", "--activation"),
    *("--hidden", "--experts", "--dense-layers", "--dense-hidden", "--experts-per-rank"),
    *("--moe-every", "--shared-hidden", "--gate", "--k", "--capacity-factor", "--order"),
    *("--ranks-per-node", "--ep", "--esp", "--mp", "--dispatch", "--wire-dtype", "--schedule", "--device", "--timeout"),
)


def add_flags(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, defaults: Settings | None = None
) -> None:
    """Add the flags in `names` (None: all), and `--model` and `--gate-option` with them. Help shows `defaults`."""
    defaults = defaults or Settings()
    for title, all_flags in GROUPS.items():
        flags = [flag for flag in all_flags if names is None or flag.name in names]
        if not flags:
            continue
        # Flags that are not given stay out of the namespace: a resumed job keeps its settings.
        group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
        if title == "model":
            group.add_argument(
                "--model",
                type=_model_name,
                choices=tuple(MODELS),
                metavar="NAME",
                help=f"model preset (default: {defaults.model.name}): {', '.join(MODELS)}; "
                f"{', '.join(f'{alias} is {name}' for alias, name in ALIASES.items())}. Sets batch, sequence length "
                "and experts too; other flags override it. Defaults shown below are those of bytes-small",
            )
        for flag in flags:
            _add_flag(group.add_argument, flag, reduce(getattr, flag.setting.split("."), defaults))
        if any(flag.name == "--gate" for flag in flags):
            group.add_argument(
                "--gate-option",
                action="append",
                metavar="NAME=VALUE",
                help="gate argument, as JSON or text; repeatable. Added to those of the model preset: "
                """--gate-option noise=1 --gate-option 'aux={"balance": 1, "z": 0.1}'""",
            )


def _model_name(text: str) -> str:
    try:
        return named_model(text).name
    except ConfigError:
        return text  # argparse lists the names


def _add_flag(add_argument: Callable[..., Any], flag: Flag, default: Any) -> None:
    shown = (
        flag.default_help if default is None else {True: "yes", False: "no"}[default] if flag.kind is bool else default
    )
    more: dict[str, Any] = {"type": flag.kind, "metavar": flag.metavar or ("N" if flag.kind is int else "X")}
    help, known = flag.help, flag.valid_values
    if flag.kind is bool:
        more = {"action": argparse.BooleanOptionalAction}
    elif len(known) > _MAX_METAVAR_CHOICES:
        help = f"{help}: {', '.join(known)}"
        more |= {"choices": known, "metavar": "NAME"}
    elif known:
        more |= {"choices": known, "metavar": "{" + ",".join(known) + "}"}
    add_argument(flag.name, dest=flag.setting, help=f"{help} (default: {shown})", **more)


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as flags, by name. A model preset is the entry "model"."""
    known = {flag.setting for flags in GROUPS.values() for flag in flags}
    changes = {name: value for name, value in vars(arguments).items() if name in known}
    if hasattr(arguments, "model"):
        changes["model"] = named_model(arguments.model)
    if hasattr(arguments, "gate_option"):
        changes["model.gate_options"] = dict(map(_option, arguments.gate_option))
    return changes


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--gate-option {text!r}: expected NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except (ValueError, RecursionError):
        return name.replace("-", "_"), value


def describe_error(error: Exception) -> str:
    """Return an error on one line, with the command's flag instead of the library's argument as its fix."""
    return printable(str(error)).replace(TIMEOUT_CURE, "use a larger --timeout")


def describe(model: ModelConfig) -> str:
    routing = f"{model.experts} {model.expert} experts of {model.hidden}, gate {model.gate}, k {model.k}"
    layers = f"{model.layers} layer{'s' * (model.layers > 1)}"
    return printable(f"{model.label}: {layers}, model dim {model.model_dim}, {model.heads} heads, {routing}")


def parse_output_path(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"folder {path.parent} does not exist; create it first")
    return path


def parse_figure_path(text: str) -> Path:
    path = parse_output_path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path.name}: expected the suffix .png, .svg or .pdf")
    return path


def read_costs(path: Path) -> CostModel:
    try:
        return CostModel.from_json(read_text(Path(os.path.expanduser(path))))
    except ConfigError as error:
        raise ConfigError(f"--costs {path}: {error}; create the file with fusedmoe profile --json FILE") from error
