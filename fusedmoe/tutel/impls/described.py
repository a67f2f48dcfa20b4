"""Gates and experts of clients' descriptions (dicts, lists of dicts, old names), and the marks of their states."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fusedmoe.environment import number
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import RanksOwn, other_experts
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls.dispatcher import Degree

Description = Mapping[str, Any]
#: In the metadata of a state_dict, whose keys are Tutel's alone: the numbers of its experts.
NUMBERS = "fusedmoe_experts"

# More chunks than any batch has use for; each is a task of a plan.
_MOST_CHUNKS = 4096
_COUNTS = ("num_experts_per_device", "count_per_node")
_OLD_OPTIONS = {
    "implicit_dropout_p": "for hidden activations give activation_fn=lambda x: dropout(F.relu(x)) with dropout = "
    "nn.Dropout(p), and for results apply nn.Dropout(p) to what the layer returns",
    "fused_custom_fn": "write such experts as a module and give {'type': 'custom', 'module': …}",
}
# Of a layer, what ranks do not compare. Clients seed experts by rank, and make modules for it; experts of this package
# are compared as modules.
RANK_SPECIFIC = (
    *("seeds", "experts", "group", "_group", "_marks", "_dispatchers", "_require_wrapper"),
    *("l_aux", "dispatch_count", "protected_shape", "megablocks_size"),
)
# By folder: its modules, the name of their class, and the word in errors.
_KINDS = {
    "gates": (("top", "cosine_top"), "Gate", "gate"),
    "experts": (("ffn", "llama_ffn"), "ExpertModule", "experts"),
}


def gate_descriptions(gate_type: str | Description | Sequence[Description]) -> Sequence[Description]:
    """Returns one description for each gate; 'Top1Gate', 'Top2Gate', … are old forms of one."""
    if isinstance(gate_type, str):
        named = re.fullmatch(r"Top(\d+)Gate", gate_type)
        if named is None:
            raise ConfigError(f"unknown gate_type {gate_type!r}; give {{'type': 'top', 'k': 2}}")
        logging.warning("gate_type=%r is an old form of {'type': 'top', 'k': %s}", gate_type, named[1])
        return [{"type": "top", "k": int(named[1])}]
    return [gate_type] if isinstance(gate_type, Mapping) else list(gate_type)


def make_gate(description: Description, model_dim: int, num_global_experts: int) -> nn.Module:
    """Makes a gate with `top_k`, `gate_noise` and `capacity_factor`."""
    # A copy: Tutel's constructor pops keys from the caller's dict, which breaks a second layer.
    options = dict(description)
    kind = options.pop("type", None)
    gate = _maker("gates", kind, options)(model_dim=model_dim, num_global_experts=num_global_experts, **options)
    if not hasattr(gate, "gate_noise"):
        gate.gate_noise = options.get("gate_noise", 0.0)
    if not hasattr(gate, "capacity_factor"):
        gate.capacity_factor = options.get("capacity_factor", number("CAP_FACTOR", 1.0))
    require_within("moe_layer", capacity_factor=gate.capacity_factor)
    if not hasattr(gate, "top_k"):
        raise ConfigError(f"{type(gate).__name__} does not say how many experts a token gets: set self.top_k")
    return gate


def wanted_experts(description: Description) -> float:
    """Returns how many experts each rank is to have, or −n or 1/n: n ranks share one."""
    return next((description[name] for name in _COUNTS if name in description), 1)


def experts_in_all(wanted: float, ranks: int) -> int:
    """Returns E for n experts on each rank, or for −n or 1/n: n ranks share one."""
    require_within("moe_layer", num_experts_per_device=wanted)
    if 0 < wanted < 1:
        # 1/n and −n both mean that n ranks share an expert.
        wanted = -round(1 / wanted)
    if not wanted or wanted != int(wanted):
        raise ConfigError(f"num_experts_per_device = {wanted}; give a count, or −n for n ranks that share an expert")
    count = int(wanted)
    if count > 0:
        return count * ranks
    if ranks % -count:
        raise ConfigError(f"{ranks} ranks cannot share experts by {-count}; choose a divisor")
    return ranks // -count


def valid_degree(degree: Any) -> Degree:
    """Checks a2a_ffn_overlap_degree: "auto", or a whole number of Python, NumPy or a tensor, from 1 on."""
    if degree == "auto":
        return "auto"
    if not isinstance(degree, str) and 0 < degree <= _MOST_CHUNKS and degree == int(degree):
        return int(degree)
    raise ConfigError(
        f"a2a_ffn_overlap_degree = {degree!r}; give a number of chunks from 1 on (at most {_MOST_CHUNKS}), or 'auto'"
    )


def make_experts(description: Description, model_dim: int, count: int, shards: int) -> nn.Module:
    """Makes `count` experts, or one of `shards` parts of an expert."""
    options = {key: value for key, value in description.items() if key not in _COUNTS}
    kind = options.pop("type", None)
    if kind != "custom":
        # Silently ignored, they would train another model.
        for old, cure in _OLD_OPTIONS.items():
            if old in options:
                raise ConfigError(f"experts take no {old!r}, which Tutel has given up: {cure}")
    module = _maker("experts", kind, options)
    options |= {"model_dim": model_dim, "sharded_count": shards}
    try:
        return module(num_experts_per_device=count, **options)
    except TypeError:
        if kind != "custom":
            raise
        # The argument had this name in older versions of Tutel.
        return module(local_experts=count, **options)


def _maker(folder: str, kind: Any, options: dict[str, Any]) -> Any:
    """Returns the client's own class, or that of the module `KIND` in `fusedmoe/tutel/gates` or `experts`."""
    known, name, kinds = _KINDS[folder]
    if kind == "custom":
        if "module" not in options:
            raise ConfigError(f"custom {kinds} without a 'module'; give the class that makes them")
        return options.pop("module")
    if kind not in known:
        raise ConfigError(f"unknown type {kind!r} of {folder}; choose {', '.join(known)} or custom")
    return getattr(importlib.import_module(f"fusedmoe.tutel.{folder}.{kind}"), name)


def say_whose(
    numbers: list[Any],
    num_global_experts: int,
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    """Notes in a state's metadata which experts it is of; a hook of the experts' `state_dict`."""
    metadata[NUMBERS] = numbers
    for name in state if numbers != list(range(num_global_experts)) else ():
        # DTensors say themselves what a rank has.
        if name.startswith(prefix) and type(state[name]) is Tensor:
            state[name] = state[name].as_subclass(RanksOwn)


def require_own(numbers: list[Any], experts: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    """Refuses another rank's experts; a hook of `load_state_dict`."""
    # A plain dict, and a state of Tutel's own, do not say whose they are.
    given = metadata.get(NUMBERS, numbers)
    if given != numbers:
        raise other_experts(prefix, given, numbers, "A state put together by hand loads as dict(state)")
