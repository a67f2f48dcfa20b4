"""Gates and experts from what clients hand in: dicts, lists of them, and old names."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fusedmoe.errors import ConfigError

Description = Mapping[str, Any]

_COUNTS = ("num_experts_per_device", "count_per_node")
_OLD_OPTIONS = {
    "implicit_dropout_p": "for hidden activations give activation_fn=lambda x: dropout(F.relu(x)) with dropout = "
    "nn.Dropout(p), and for results apply nn.Dropout(p) to what the layer returns",
    "fused_custom_fn": "write such experts as a module and give {'type': 'custom', 'module': …}",
}
_KINDS = {"gates": ("top", "cosine_top"), "experts": ("ffn", "llama_ffn")}


def gate_descriptions(gate_type: str | Description | Sequence[Description]) -> Sequence[Description]:
    """Returns one description for each gate.

    Raises:
        ConfigError: a name that is none of the old ones, 'Top1Gate', 'Top2Gate', ….
    """
    if isinstance(gate_type, str):
        named = re.fullmatch(r"Top(\d+)Gate", gate_type)
        if named is None:
            raise ConfigError(f"unknown gate_type {gate_type!r}; give {{'type': 'top', 'k': 2}}")
        logging.warning("gate_type=%r is an old form of {'type': 'top', 'k': %s}", gate_type, named[1])
        return [{"type": "top", "k": int(named[1])}]
    return [gate_type] if isinstance(gate_type, Mapping) else list(gate_type)


def make_gate(description: Description, model_dim: int, num_global_experts: int) -> nn.Module:
    """Makes a gate with `top_k`, `gate_noise` and `capacity_factor`.

    Raises:
        ConfigError: its type is unknown, a custom one lacks its module, or does not say its `top_k`.
    """
    options = dict(description)
    kind = options.pop("type", None)
    module = _custom_module(options, "gate") if kind == "custom" else _module_of("gates", kind).Gate
    gate: Any = module(model_dim=model_dim, num_global_experts=num_global_experts, **options)
    if not hasattr(gate, "gate_noise"):
        gate.gate_noise = options.get("gate_noise", 0.0)
    if not hasattr(gate, "capacity_factor"):
        gate.capacity_factor = options.get("capacity_factor", float(os.environ.get("CAP_FACTOR", 1.0)))
    if not hasattr(gate, "top_k"):
        raise ConfigError(f"{type(gate).__name__} does not say how many experts a token gets: set self.top_k")
    made: nn.Module = gate
    return made


def wanted_experts(description: Description) -> float:
    """Returns how many experts each rank is to have, or −n or 1/n: n ranks share one."""
    return next((description[name] for name in _COUNTS if name in description), 1)


def experts_in_all(wanted: float, ranks: int) -> int:
    """Returns E for n experts on each rank, or for −n or 1/n: n ranks share one.

    Raises:
        ConfigError: none of these, or ranks that cannot share evenly.
    """
    if 0 < wanted < 1:
        wanted = -round(1 / wanted)
    if not wanted or wanted != int(wanted):
        raise ConfigError(f"num_experts_per_device = {wanted}; give a count, or −n for n ranks that share an expert")
    count = int(wanted)
    if count > 0:
        return count * ranks
    if ranks % -count:
        raise ConfigError(f"{ranks} ranks cannot share experts by {-count}; choose a divisor")
    return ranks // -count


def make_experts(description: Description, model_dim: int, count: int, shards: int) -> nn.Module:
    """Makes `count` experts, or one of `shards` parts of an expert.

    Raises:
        ConfigError: their type is unknown, custom ones lack their module, or an option is one of old versions of Tutel.
    """
    options = {key: value for key, value in description.items() if key not in _COUNTS}
    kind = options.pop("type", None)
    if kind != "custom":
        for old, cure in _OLD_OPTIONS.items():
            if old in options:
                raise ConfigError(f"experts take no {old!r}, which Tutel has given up: {cure}")
    module: Callable[..., nn.Module]
    module = _custom_module(options, "experts") if kind == "custom" else _module_of("experts", kind).ExpertModule
    options |= {"model_dim": model_dim, "sharded_count": shards}
    try:
        return module(num_experts_per_device=count, **options)
    except TypeError:
        if kind != "custom":
            raise
        return module(local_experts=count, **options)  # the argument's older name


def _custom_module(options: dict[str, Any], what: str) -> Callable[..., nn.Module]:
    if "module" not in options:
        raise ConfigError(f"custom {what} without a 'module'; give the class that makes them")
    module: Callable[..., nn.Module] = options.pop("module")
    return module


def _module_of(folder: str, kind: Any) -> Any:
    """Imports the module `fusedmoe.tutel.gates.KIND` or `fusedmoe.tutel.experts.KIND`."""
    known = _KINDS[folder]
    if kind not in known:
        raise ConfigError(f"unknown type {kind!r} of {folder}; choose {', '.join(known)} or custom")
    return importlib.import_module(f"fusedmoe.tutel.{folder}.{kind}")
