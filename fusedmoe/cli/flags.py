"""The flags of `fusedmoe train`: each one sets one of the `Settings`, and says so in its help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from fusedmoe.cli.settings import DEVICES, DTYPES, PLACEMENTS, SCHEDULES, WIRES, Settings
from fusedmoe.comm.all_to_all import ALGORITHMS
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.layers.gates import GATES
from fusedmoe.layers.orders import ORDERS
from fusedmoe.models.config import EXPERTS, MODELS, NORMS, OBJECTIVES, POSITIONS, ModelConfig, named_model


def capacity(text: str) -> float | None:
    """A capacity factor; "none" for no capacity."""
    return None if text.lower() == "none" else float(text)


# More choices than this are listed in the help instead of beside the flag.
_SHORT = 3


@dataclass(frozen=True)
class Flag:
    """A flag, the setting it stands for, and its help. The default is read from the settings themselves.

    `kind`: what makes a value of the text; bool makes a pair --flag, --no-flag.   `chosen`: what None comes to.
    """

    name: str
    setting: str
    help: str
    kind: Callable[[str], Any] = int
    choices: Sequence[str] | None = None
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
        Flag("--schedule", "schedule", "how what travels overlaps with what is computed", str, SCHEDULES),
        Flag("--placement", "placement", "which ranks have which experts, and copies of them", str, PLACEMENTS),
        Flag("--placement-memory", "placement_memory", "copies of experts that a rank has room for, a layer"),
        Flag(
            "--placement-overlap",
            "placement_overlap",
            "experts that may travel for a layer and step",
            chosen="as many as go unnoticed, measured in the first 5 steps",
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
        Flag("--timeline-step", "timeline_step", "the step whose timeline is drawn"),
    ),
}


def add_flags(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, defaults: Settings | None = None
) -> None:
    """Flags of the settings, all of them or those of these names; --model in any case.

    Only those that are given appear in the parsed arguments. `defaults`: what the help shows as such.
    """
    defaults = defaults or Settings()
    for title, every in GROUPS.items():
        flags = tuple(flag for flag in every if names is None or flag.name in names)
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
            if flag.choices and len(flag.choices) > _SHORT:
                metavar, name["help"] = "NAME", f"{flag.help}: {', '.join(flag.choices)} (default: {shown})"
            elif flag.choices:
                metavar = "{" + ",".join(flag.choices) + "}"
            group.add_argument(flag.name, type=flag.kind, choices=flag.choices, metavar=metavar, **name)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags gave, by name; "model" is a whole one, if a name was given.

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
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


def describe(model: ModelConfig) -> str:
    """A model in one line."""
    routing = f"{model.experts} {model.expert} experts of {model.hidden}, gate {model.gate}, k {model.k}"
    return f"{model.name}: {model.layers} layers, model dim {model.model_dim}, {model.heads} heads, {routing}"
