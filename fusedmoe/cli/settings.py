"""Settings of a training job, each with its default, as one value that can be written and read back.

Each flag of the command sets one of them, and its help says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json, read_text
from fusedmoe.gates import GATES
from fusedmoe.models.config import EXPERTS, MODELS, NORMS, OBJECTIVES, POSITIONS, ModelConfig, named_model
from fusedmoe.ops import ACTIVATIONS
from fusedmoe.orders import ORDERS
from fusedmoe.plans import POLICIES, CostModel
from fusedmoe.ranks import ALGORITHMS
from fusedmoe.training import PLACEMENT_POLICIES

DTYPES = ("fp32", "bf16", "fp64")
WIRES = ("same", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")

#: Values of `--placement`: experts that stay, or a policy of `ShardedExperts` that moves and copies them.
PLACEMENTS = ("ep", "fssdp", *(policy for policy in PLACEMENT_POLICIES if policy not in ("ep", "hecate")))

_CHOICES = (
    ("dtype", DTYPES),
    ("wire_dtype", WIRES),
    ("device", DEVICES),
    ("placement", PLACEMENTS),
)

# A year; PyTorch counts it in nanoseconds, which have an end.
_MOST_S = 3.2e7

# Counts of steps, and numbers of them, that may be 0.
_OF_STEPS = ("warmup", "checkpoint_every", "survive", "timeline_step")

# More choices than this are listed in the help instead of beside the flag.
_SHORT = 3


def schedules() -> tuple[str, ...]:
    """Returns the values of `--schedule`: off, the fastest as measured, or a policy, also one of a user's own."""
    return ("off", "auto", *POLICIES)


@dataclass(frozen=True)
class Settings:
    """The settings of `fusedmoe train`. A setting that is None is chosen when the job starts, by model and ranks.

    The help of each setting's flag (`GROUPS`) says what it means.

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
    survive: int = 0
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
        for name in (*_OF_STEPS, "lr", "weight_decay", "clip", "aux_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} = {value} must be a number from 0")
        for name, known in _CHOICES:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.schedule not in schedules():
            raise ConfigError(
                f"schedule = {self.schedule!r} is not one of {', '.join(schedules())}; a program that registers one "
                "(fusedmoe.register_policy) runs the command by fusedmoe.cli.main.main()"
            )
        if not 0 < self.timeout_s <= _MOST_S:
            raise ConfigError(f"timeout_s = {self.timeout_s} must be positive, and {_MOST_S:g} at most")

    @property
    def peak_lr(self) -> float:
        """Returns `lr`, or one that suits the width: 0.0025 at M = 128, falling with the square root."""
        return 0.0025 * math.sqrt(128 / self.model.model_dim) if self.lr is None else self.lr

    @property
    def warmup_steps(self) -> int:
        """Returns `warmup`, or a twentieth of all steps."""
        return max(1, self.steps // 20) if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """Returns the rate of a step (from 0): a straight rise, then a cosine down to a tenth of the peak."""
        # From step 0 on the rate is positive: a first step of rate 0 would be wasted.
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        way = min(1.0, max(0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak_lr * rise * (0.55 + 0.45 * math.cos(math.pi * way))

    def changed(self, changes: dict[str, Any]) -> Settings:
        """Returns the settings with some values replaced; names of the model's are written "model.layers"."""
        model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
        own = {name: value for name, value in changes.items() if not name.startswith("model.")}
        return replace(self, model=replace(own.pop("model", self.model), **model), **own)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings in plain types; `from_json` gives equal ones back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Settings:
        """Makes settings of plain types.

        Raises:
            ConfigError: names that this version does not know, values of another type, or numbers that are none.
        """
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ConfigError("it holds no settings")
        # A setting that this version ignored would silently train another model.
        unknown = [name for name in data if name not in {f.name for f in fields(cls)}]
        unknown += [f"model.{name}" for name in data["model"] if name not in {f.name for f in fields(ModelConfig)}]
        if unknown:
            raise ConfigError(f"settings not known to this version: {', '.join(unknown)}")
        for kind, values in ((cls, data | {"model": ModelConfig()}), (ModelConfig, data["model"])):
            hints = get_type_hints(kind)
            for name, value in values.items():
                if not _fits(value, hints[name]):
                    raise ConfigError(f"{name} = {reprlib.repr(value)} cannot be")
        return cls(**{**data, "model": ModelConfig(**data["model"])})


def read_settings(run_dir: Path) -> Settings:
    """Reads the settings in a run folder's config.json. Raises `ConfigError` where there are none."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no config.json. Give --resume the folder of a run.")
    data = parse_json(read_text(path), str(path))
    try:
        return Settings.from_json(data.get("settings") if isinstance(data, dict) else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value out of JSON is of the types that an annotation names."""
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {get_origin(hint) or hint}
    # bool is an int for Python; a flag in place of a number is a mistake.
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float):
        # JSON knows larger numbers, which no setting can mean.
        return abs(value) < 2**63 and (float in kinds or type(value) in kinds)
    return isinstance(value, tuple(kinds))


def capacity(text: str) -> float | None:
    """Reads a capacity factor; "none" is no capacity."""
    return None if text.lower() == "none" else float(text)


@dataclass(frozen=True)
class Flag:
    """A flag, the setting it stands for, and its help. The default is read from the settings themselves.

    `kind`: makes a value of the text; bool makes a pair --flag, --no-flag.   `chosen`: the words for None.
    """

    name: str
    setting: str
    help: str
    kind: Callable[[str], Any] = int
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    chosen: str = "chosen"
    metavar: str | None = None


GROUPS: dict[str, tuple[Flag, ...]] = {
    "training": (
        Flag("--steps", "steps", "optimizer steps"),
        Flag("--batch", "model.batch", "sequences of a step on each data-parallel replica, B"),
        Flag("--seq-len", "model.seq_len", "bytes of a sequence, L"),
        Flag("--lr", "lr", "peak learning rate of AdamW", float, chosen="0.0025·√(128 / model dim)"),
        Flag("--warmup", "warmup", "steps of rising rate; after them a cosine to a tenth", chosen="5%% of the steps"),
        Flag("--weight-decay", "weight_decay", "of matrices, not of biases and norms", float),
        Flag("--clip", "clip", "largest gradient norm; 0: as it comes", float),
        Flag("--aux-weight", "aux_weight", "weight of the gates' auxiliary losses", float),
        Flag("--dtype", "dtype", "bf16 is autocast: parameters stay float32", str, DTYPES),
        Flag("--recompute", "recompute", "keep only the blocks' inputs and compute the rest again backward", bool),
        Flag("--seed", "seed", "of parameters, batches and the gates' noise"),
    ),
    "model": (
        Flag("--objective", "model.objective", "next byte, or hidden bytes from both sides", str, OBJECTIVES),
        Flag("--layers", "model.layers", "blocks"),
        Flag("--model-dim", "model.model_dim", "model dim M"),
        Flag("--heads", "model.heads", "attention heads"),
        Flag("--kv-heads", "model.kv_heads", "heads of keys and values", chosen="as many as heads"),
        Flag("--norm", "model.norm", "LayerNorm or RMSNorm", str, NORMS),
        Flag("--positions", "model.positions", "learned, or rotary", str, POSITIONS),
        Flag("--bias", "model.bias", "biases in attention and experts", bool),
    ),
    "experts and routing": (
        Flag("--expert", "model.expert", "an expert's network: two matrices, or three", str, EXPERTS),
        Flag("--activation", "model.activation", "of ffn experts", str, tuple(ACTIVATIONS)),
        Flag("--hidden", "model.hidden", "an expert's hidden dim H"),
        Flag("--experts", "model.experts", "number of experts E", chosen="--experts-per-rank times the ranks"),
        Flag("--experts-per-rank", "model.experts_per_rank", "experts of each rank, where --experts is not given"),
        Flag("--moe-every", "model.moe_every", "every n-th block has experts, the others a dense feed-forward"),
        Flag("--shared-hidden", "model.shared_hidden", "hidden dim of an expert for every token; 0: none"),
        Flag("--gate", "model.gate", "what chooses a token's experts", str, tuple(GATES)),
        Flag("--k", "model.k", "experts of a token (switch: always 1; softmoe: all)"),
        Flag(
            "--capacity-factor",
            "model.capacity_factor",
            "room of an expert over the even share; none: no token is dropped",
            capacity,
            chosen="none",
        ),
        Flag("--order", "model.order", "how rows are laid out", str, tuple(ORDERS), "sparse, or without room dropless"),
    ),
    "parallel layout (what is left over is data parallel)": (
        Flag("--ranks-per-node", "ranks_per_node", "ranks that share a node", chosen="the launcher's"),
        Flag("--ep", "ep", "expert parallel: ranks that experts are spread over", chosen="nodes"),
        Flag("--esp", "esp", "expert sharding: ranks that split each expert", chosen="ranks of a node"),
        Flag("--mp", "mp", "model parallel: ranks that split attention heads", chosen="ranks of a node"),
        Flag("--dispatch", "dispatch", "all-to-all algorithm", str, ALGORITHMS),
        Flag("--wire-dtype", "wire_dtype", "what dispatched rows travel in", str, WIRES),
        Flag("--schedule", "schedule", "how what travels overlaps with what is computed", str, schedules),
        Flag("--placement", "placement", "which ranks have which experts, and copies of them", str, PLACEMENTS),
        Flag("--placement-memory", "placement_memory", "copies of experts that a rank has room for, a layer"),
        Flag(
            "--placement-overlap",
            "placement_overlap",
            "experts that may travel for a layer and step",
            chosen="as many as computation hides, measured in the first 5 steps",
        ),
        Flag("--rematerialise", "rematerialise", "copies of experts are fetched again for the backward pass", bool),
        Flag("--device", "device", "auto: GPUs where every rank of the machine has one", str, DEVICES),
        Flag("--timeout", "timeout_s", "seconds a rank waits for another", float, metavar="S"),
    ),
    "data": (
        Flag("--data", "data", "folder of text, or one file", str, chosen="Python's own library", metavar="PATH"),
        Flag("--pattern", "pattern", "which files of the folder, such as '*.md'", str, metavar="GLOB"),
        Flag("--held-out", "held_out", "share of the files held out, by a hash of their paths", float),
        Flag("--eval-batches", "eval_batches", "held-out batches of each replica at the end"),
    ),
    "run": (
        Flag("--checkpoint-every", "checkpoint_every", "steps between checkpoints; 0: only at the end"),
        Flag(
            "--survive",
            "survive",
            "steps between copies of the state to two nodes' memory, from which the job goes on when a rank or a node "
            "is lost; 0: no copies",
            metavar="N",
        ),
        Flag("--timeline-step", "timeline_step", "the step whose timeline is drawn"),
    ),
}


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds the parser of a command; `run` does the command's work and returns the exit code."""
    parser = commands.add_parser(
        name,
        help=summary,
        usage=f"fusedmoe {name} [FLAG ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, defaults: Settings | None = None
) -> None:
    """Adds flags of the settings, all of them or those of these names, and --model in any case.

    Only flags that are given appear in the parsed arguments. `defaults`: the values that the help shows as such.
    """
    defaults = defaults or Settings()
    for title, all_flags in GROUPS.items():
        flags = tuple(flag for flag in all_flags if names is None or flag.name in names)
        if not flags:
            continue
        group = parser.add_argument_group(title)
        if title == "model":
            group.add_argument(
                "--model",
                metavar="NAME",
                default=argparse.SUPPRESS,
                help=f"one of {', '.join(MODELS)} (default: {defaults.model.name}); it also sets batch, sequence and "
                "experts. The other flags change it; their defaults are those of bytes-small",
            )
        _add_flags(group, flags, defaults)
        if any(flag.name == "--gate" for flag in flags):
            group.add_argument(
                "--gate-option",
                action="append",
                metavar="NAME=VALUE",
                default=argparse.SUPPRESS,
                help="a further argument of the gate, as JSON or text; may be repeated: --gate-option noise=1 "
                """--gate-option 'aux={"balance": 1, "z": 0.1}'""",
            )


def _add_flags(group: argparse._ArgumentGroup, flags: tuple[Flag, ...], defaults: Settings) -> None:
    for flag in flags:
        value: Any = reduce(getattr, flag.setting.split("."), defaults)
        shown = flag.chosen if value is None else {True: "yes", False: "no"}[value] if flag.kind is bool else value
        name: dict[str, Any] = {"dest": flag.setting, "default": argparse.SUPPRESS}
        name["help"] = f"{flag.help} (default: {shown})"
        if flag.kind is bool:
            group.add_argument(flag.name, action=argparse.BooleanOptionalAction, **name)
        else:
            metavar = flag.metavar or ("N" if flag.kind is int else "X")
            choices = flag.choices() if callable(flag.choices) else flag.choices
            # Long lists would make the usage unreadable beside the flag.
            if choices and len(choices) > _SHORT:
                metavar, name["help"] = "NAME", f"{flag.help}: {', '.join(choices)} (default: {shown})"
            elif choices:
                metavar = "{" + ",".join(choices) + "}"
            group.add_argument(flag.name, type=flag.kind, choices=choices, metavar=metavar, **name)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that flags gave, by name; "model" is a whole one, if a name was given.

    Raises:
        ConfigError: an unknown model, or a gate option that is not NAME=VALUE.
    """
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
        raise ConfigError(f"--gate-option {text!r}: write NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except (ValueError, RecursionError):
        return name.replace("-", "_"), value


def describe(model: ModelConfig) -> str:
    """Describes a model in one line."""
    routing = f"{model.experts} {model.expert} experts of {model.hidden}, gate {model.gate}, k {model.k}"
    return f"{model.name}: {model.layers} layers, model dim {model.model_dim}, {model.heads} heads, {routing}"


def file_to_write(text: str) -> Path:
    """Checks that a path's folder is there."""
    path = Path(os.path.expanduser(text))
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def picture_to_write(text: str) -> Path:
    """Checks that a path's folder is there, and that its ending is a kind of picture."""
    path = file_to_write(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path.name} ends in none of .png, .svg and .pdf")
    return path


def read_costs(path: Path) -> CostModel:
    """Reads the costs in a file of `fusedmoe profile`, or of `CostModel.to_json`.

    Raises:
        ConfigError: no such file, or none of these.
    """
    try:
        return CostModel.from_json(read_text(Path(os.path.expanduser(path))))
    except ConfigError as error:
        raise ConfigError(f"--costs {path}: {error}; fusedmoe profile --json FILE writes such a file") from error
