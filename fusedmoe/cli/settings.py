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
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from fusedmoe.comm.all_to_all import ALGORITHMS
from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import parse_json, read_text
from fusedmoe.gates import GATES
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.models.config import EXPERTS, MODELS, NORMS, OBJECTIVES, POSITIONS, ModelConfig, named_model
from fusedmoe.orders import ORDERS
from fusedmoe.schedule import POLICIES, CostModel
from fusedmoe.training.sharded_experts import PLACEMENT_BALANCES, PLACEMENT_POLICIES

DTYPES = ("fp32", "bf16", "fp64")
WIRES = ("same", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")

#: Values of `--placement`: experts that stay, or a policy of `ShardedExperts` that moves and copies them.
PLACEMENTS = ("ep", "fssdp", *(policy for policy in PLACEMENT_POLICIES if policy not in ("ep", "hecate")))

# The least number of each setting that is one.
_LEAST = {
    **dict.fromkeys(("ranks_per_node", "ep", "esp", "mp", "steps", "eval_batches"), 1),
    **dict.fromkeys(("placement_memory", "placement_overlap", "warmup", "checkpoint_every", "survive"), 0),
    **dict.fromkeys(("timeline_step", "lr", "weight_decay", "clip", "aux_weight"), 0),
}
# A year; PyTorch counts it in nanoseconds, which have an end.
_MOST_S = 3.2e7

# More choices than this are listed in the help instead of beside the flag.
_SHORT = 3


def schedules() -> tuple[str, ...]:
    """Returns the values of `--schedule`: off, the fastest as measured, or a policy, also one of a user's own."""
    return ("off", "auto", *POLICIES)


@dataclass(frozen=True)
class Settings:
    """The settings of `fusedmoe train`. A setting that is None is chosen when the job starts, by model and ranks.

    The help of each setting's flag (`GROUPS`) says what it means.
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
        for name, least in _LEAST.items():
            value = getattr(self, name)
            # Written so that NaN, which compares with nothing, is refused as well.
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} = {value} must be a number from {least}")
        for flag in (flag for flags in GROUPS.values() for flag in flags if hasattr(self, flag.setting)):
            value, known = getattr(self, flag.setting), flag.known
            if known and value not in known:
                cure = "; a program registers its own by fusedmoe.register_policy, and calls fusedmoe.cli.main.main()"
                cure = cure if flag.setting == "schedule" else ""
                raise ConfigError(f"{flag.setting} = {value!r} is not one of {', '.join(known)}{cure}")
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
        """Returns the settings with some values replaced; names of the model's are written "model.layers". Options of
        the gate are added to those that the same gate has already."""
        model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
        own = {name: value for name, value in changes.items() if not name.startswith("model.")}
        before = own.pop("model", self.model)
        if model.keys() & {"gate", "gate_options"}:
            # Another gate would refuse the options of the one before.
            kept = before.gate_options if model.get("gate", before.gate) == before.gate else {}
            model["gate_options"] = {**kept, **model.get("gate_options", {})}
        return replace(self, model=replace(before, **model), **own)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings in plain types; `from_json` gives equal ones back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Settings:
        """Makes settings of plain types."""
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ConfigError("it holds no settings")
        hints = get_type_hints(cls) | {f"model.{name}": hint for name, hint in get_type_hints(ModelConfig).items()}
        values = {name: value for name, value in data.items() if name != "model"}
        values |= {f"model.{name}": value for name, value in data["model"].items()}
        # A setting that this version ignored would silently train another model.
        if unknown := values.keys() - hints:
            raise ConfigError(f"settings not known to this version: {', '.join(sorted(unknown))}")
        for name, value in values.items():
            if not _fits(value, hints[name]):
                raise ConfigError(f"{name} = {reprlib.repr(value)} cannot be")
        return cls().changed(values)


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
    """A flag of the setting that it has its name from, with its help. The default is read from the settings.

    `kind`: makes a value of the text; bool makes a pair --flag, --no-flag.   `chosen`: the words for None.
    """

    setting: str
    help: str
    kind: Callable[[str], Any] = int
    choices: Sequence[str] | Callable[[], Sequence[str]] = ()
    chosen: str = "chosen"
    metavar: str = ""

    @property
    def name(self) -> str:
        """Returns the flag: "--timeout" of `timeout_s`, "--seq-len" of `model.seq_len`."""
        return "--" + self.setting.removeprefix("model.").removesuffix("_s").replace("_", "-")

    @property
    def known(self) -> Sequence[str]:
        """Returns the values that there are; none where any will do."""
        # Policies are asked for each time: a program may have registered one of its own since.
        return self.choices() if callable(self.choices) else self.choices


GROUPS: dict[str, tuple[Flag, ...]] = {
    "training": (
        Flag("steps", "optimizer steps"),
        Flag("model.batch", "sequences of a step on each data-parallel replica, B"),
        Flag("model.seq_len", "bytes of a sequence, L"),
        Flag("lr", "peak learning rate of AdamW", float, chosen="0.0025·√(128 / model dim)"),
        Flag("warmup", "steps of rising rate; after them a cosine to a tenth", chosen="5%% of the steps"),
        Flag("weight_decay", "of matrices, not of biases and norms", float),
        Flag("clip", "largest gradient norm; 0: as it comes", float),
        Flag("aux_weight", "weight of the gates' auxiliary losses", float),
        Flag("dtype", "bf16 is autocast: parameters stay float32", str, DTYPES),
        Flag("recompute", "keep only the blocks' inputs and compute the rest again backward", bool),
        Flag("seed", "of parameters, batches and the gates' noise"),
    ),
    "model": (
        Flag("model.objective", "next byte, or hidden bytes from both sides", str, OBJECTIVES),
        Flag("model.layers", "blocks"),
        Flag("model.model_dim", "model dim M"),
        Flag("model.heads", "attention heads"),
        Flag("model.kv_heads", "heads of keys and values", chosen="as many as heads"),
        Flag("model.norm", "LayerNorm or RMSNorm", str, NORMS),
        Flag("model.positions", "learned, or rotary", str, POSITIONS),
        Flag("model.bias", "biases in attention and experts", bool),
    ),
    "experts and routing": (
        Flag("model.expert", "an expert's network: two matrices, or three", str, EXPERTS),
        Flag("model.activation", "of ffn experts", str, tuple(ACTIVATIONS)),
        Flag("model.hidden", "an expert's hidden dim H"),
        Flag("model.experts", "number of experts E", chosen="--experts-per-rank times the ranks"),
        Flag("model.experts_per_rank", "experts of each rank, where --experts is not given"),
        Flag("model.moe_every", "every n-th block has experts, the others a dense feed-forward"),
        Flag("model.shared_hidden", "hidden dim of an expert for every token; 0: none"),
        Flag("model.gate", "what chooses a token's experts", str, tuple(GATES)),
        Flag("model.k", "experts of a token (switch: always 1; softmoe: all)"),
        Flag(
            "model.capacity_factor",
            "room of an expert over the even share; none: no token is dropped",
            capacity,
            chosen="none",
        ),
        Flag("model.order", "how rows are laid out", str, tuple(ORDERS), "sparse, or without room dropless"),
    ),
    "parallel layout (what is left over is data parallel)": (
        Flag("ranks_per_node", "ranks that share a node", chosen="the launcher's"),
        Flag("ep", "expert parallel: ranks that experts are spread over", chosen="nodes"),
        Flag("esp", "expert sharding: ranks that split each expert", chosen="ranks of a node"),
        Flag("mp", "model parallel: ranks that split attention heads", chosen="ranks of a node"),
        Flag("dispatch", "all-to-all algorithm", str, ALGORITHMS),
        Flag("wire_dtype", "what dispatched rows travel in", str, WIRES),
        Flag("schedule", "how what travels overlaps with what is computed", str, schedules),
        Flag("placement", "which ranks have which experts, and copies of them", str, PLACEMENTS),
        Flag("placement_memory", "copies of experts that a rank has room for, a layer"),
        Flag(
            "placement_overlap",
            "experts that may travel for a layer and step",
            chosen="as many as computation hides, measured in the first 5 steps",
        ),
        Flag("placement_balance", "loads by which copies compute rows", str, PLACEMENT_BALANCES),
        Flag("rematerialise", "copies of experts are fetched again for the backward pass", bool),
        Flag("device", "auto: GPUs where every rank of the machine has one", str, DEVICES),
        Flag("timeout_s", "seconds a rank waits for another", float, metavar="S"),
    ),
    "data": (
        Flag("data", "folder of text, or one file", str, chosen="Python's own library", metavar="PATH"),
        Flag("pattern", "which files of the folder, such as '*.md'", str, metavar="GLOB"),
        Flag("held_out", "share of the files held out, by a hash of their paths", float),
        Flag("eval_batches", "held-out batches of each replica at the end"),
    ),
    "run": (
        Flag("checkpoint_every", "steps between checkpoints; 0: only at the end"),
        Flag(
            "survive",
            "steps between copies of the state to two nodes' memory, from which the job goes on when a rank or a node "
            "is lost; 0: no copies",
            metavar="N",
        ),
        Flag("timeline_step", "steps before the one whose timeline is drawn"),
    ),
}


class Commands(Protocol):
    """Parent of the commands' parsers, as `argparse.ArgumentParser.add_subparsers` returns it."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Make the parser of a command."""


def add_parser(
    commands: Commands,
    name: str,
    text: str | None,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds the parser of a command; `run` does the command's work and returns the exit code.

    `text`: the docstring of the command's module, a line of summary and the description; its user reads both.
    """
    # Without docstrings (python -OO) a command has no description, and works.
    summary, _, description = (text or "").partition("\n\n")
    parser = commands.add_parser(
        name,
        help=summary[:1].lower() + summary[1:].removesuffix("."),
        usage=f"fusedmoe {name} [FLAG ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


#: Flags that a training step and its plan depend on.
STEP_FLAGS = (
    *("--batch", "--seq-len", "--dtype", "--recompute", "--objective", "--layers", "--model-dim", "--heads"),
    *("--kv-heads", "--norm", "--positions", "--bias", "--expert", "--activation", "--hidden", "--experts"),
    *("--experts-per-rank", "--moe-every", "--shared-hidden", "--gate", "--k", "--capacity-factor", "--order"),
    *("--ranks-per-node", "--ep", "--esp", "--mp", "--dispatch", "--wire-dtype", "--schedule", "--device", "--timeout"),
)


def add_flags(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, defaults: Settings | None = None
) -> None:
    """Adds flags of the settings, all of them or those of these names, and --model in any case.

    `defaults`: the values that the help shows as such.
    """
    defaults = defaults or Settings()
    for title, all_flags in GROUPS.items():
        flags = [flag for flag in all_flags if names is None or flag.name in names]
        if not flags:
            continue
        # Only a flag that was given is in the parsed arguments, so that a resumed job keeps its other settings.
        group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
        if title == "model":
            group.add_argument(
                "--model",
                metavar="NAME",
                help=f"one of {', '.join(MODELS)} (default: {defaults.model.name}); it also sets batch, sequence and "
                "experts. The other flags change it; their defaults are those of bytes-small",
            )
        for flag in flags:
            _add_flag(group.add_argument, flag, reduce(getattr, flag.setting.split("."), defaults))
        if any(flag.name == "--gate" for flag in flags):
            group.add_argument(
                "--gate-option",
                action="append",
                metavar="NAME=VALUE",
                help="an argument of the gate, beside those of the model; as JSON or text; may be repeated: "
                """--gate-option noise=1 --gate-option 'aux={"balance": 1, "z": 0.1}'""",
            )


def _add_flag(add_argument: Callable[..., Any], flag: Flag, default: Any) -> None:
    shown = flag.chosen if default is None else {True: "yes", False: "no"}[default] if flag.kind is bool else default
    more: dict[str, Any] = {"type": flag.kind, "metavar": flag.metavar or ("N" if flag.kind is int else "X")}
    help, known = flag.help, flag.known
    if flag.kind is bool:
        more = {"action": argparse.BooleanOptionalAction}
    elif len(known) > _SHORT:
        # Long lists would make the usage unreadable beside the flag.
        help = f"{help}: {', '.join(known)}"
        more |= {"choices": known, "metavar": "NAME"}
    elif known:
        more |= {"choices": known, "metavar": "{" + ",".join(known) + "}"}
    add_argument(flag.name, dest=flag.setting, help=f"{help} (default: {shown})", **more)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that flags gave, by name; "model" is a whole one, if a name was given."""
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
    layers = f"{model.layers} layer{'s' * (model.layers > 1)}"
    return printable(f"{model.name}: {layers}, model dim {model.model_dim}, {model.heads} heads, {routing}")


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
    """Reads the costs in a file of `fusedmoe profile`, or of `CostModel.to_json`."""
    try:
        return CostModel.from_json(read_text(Path(os.path.expanduser(path))))
    except ConfigError as error:
        raise ConfigError(f"--costs {path}: {error}; fusedmoe profile --json FILE writes such a file") from error
