"""Gates and experts made from descriptions (dicts, lists of dicts, old names); expert numbers in checkpoints."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fusedmoe.environment import read_number
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import PerRankTensor, wrong_experts_error
from fusedmoe.sizes import require_within
from fusedmoe.tutel.impls.dispatcher import Degree

Description = Mapping[str, Any]
#: Key of the expert numbers in a state_dict's metadata.
NUMBERS = "fusedmoe_experts"

_MAX_CHUNKS = 4096
_COUNTS = ("num_experts_per_device", "count_per_node")
_OLD_OPTIONS = {
    "implicit_dropout_p": "for hidden activations give activation_fn=lambda x: dropout(F.relu(x)) with dropout = "
    "nn.Dropout(p), and for results apply nn.Dropout(p) to what the layer returns",
    "fused_custom_fn": "write such experts as a module and give {'type': 'custom', 'module': …}",
}
# Options that may differ between ranks. Experts of this package are compared as modules.
RANK_SPECIFIC = (
    *("seeds", "experts", "group", "_group", "_marks", "_dispatchers", "_require_wrapper"),
    *("l_aux", "dispatch_count", "protected_shape", "megablocks_size"),
)
# By folder: its modules, their class name, and the word used in errors.
_KINDS = {
    "gates": (("top", "cosine_top"), "Gate", "gate"),
    "experts": (("ffn", "llama_ffn"), "ExpertModule", "experts"),
}


def gate_descriptions(gate_type: str | Description | Sequence[Description]) -> Sequence[Description]:
    """Return one description per gate; also accepts the old names 'Top1Gate', 'Top2Gate', …."""
    if isinstance(gate_type, str):
        named = re.fullmatch(r"Top(\d+)Gate", gate_type)
        if named is None:
            raise ConfigError(f"unknown gate_type {gate_type!r}; give {{'type': 'top', 'k': 2}}")
        logging.warning("gate_type=%r is an old form of {'type': 'top', 'k': %s}", gate_type, named[1])
        return [{"type": "top", "k": int(named[1])}]
    return [gate_type] if isinstance(gate_type, Mapping) else list(gate_type)


def make_gate(description: Description, model_dim: int, num_global_experts: int) -> nn.Module:
    """Create a gate with attributes `top_k`, `gate_noise` and `capacity_factor`."""
    options = dict(description)
    kind = options.pop("type", None)
    gate = _find_class("gates", kind, options)(model_dim=model_dim, num_global_experts=num_global_experts, **options)
    if not hasattr(gate, "gate_noise"):
        gate.gate_noise = options.get("gate_noise", 0.0)
    if not hasattr(gate, "capacity_factor"):
        gate.capacity_factor = options.get("capacity_factor", read_number("CAP_FACTOR", 1.0))
    require_within("moe_layer", capacity_factor=gate.capacity_factor)
    if not hasattr(gate, "top_k"):
        raise ConfigError(f"{type(gate).__name__} has no top_k, the number of experts per token: set self.top_k")
    return gate


def experts_per_rank(description: Description) -> float:
    """Return the description's number of experts per rank, by default 1; −n and 1/n mean n ranks per expert."""
    return next((description[name] for name in _COUNTS if name in description), 1)


def count_global_experts(per_rank: float, ranks: int) -> int:
    """Return the number of experts over all ranks, from the result of `experts_per_rank`.

    Raises `ConfigError` if it is invalid for this number of ranks.
    """
    require_within("moe_layer", num_experts_per_device=per_rank)
    if 0 < per_rank < 1:
        per_rank = -round(1 / per_rank)
    if not per_rank or per_rank != int(per_rank):
        raise ConfigError(f"num_experts_per_device = {per_rank}; give a count, or −n for n ranks that share an expert")
    count = int(per_rank)
    if count > 0:
        return count * ranks
    if ranks % -count:
        raise ConfigError(f"{ranks} ranks cannot share experts by {-count}; choose a divisor")
    return ranks // -count


def parse_degree(degree: Any) -> Degree:
    """Validate a2a_ffn_overlap_degree: "auto", or a Python, NumPy or tensor integer from 1 to 4096."""
    if degree == "auto":
        return "auto"
    if not isinstance(degree, str) and 0 < degree <= _MAX_CHUNKS and degree == int(degree):
        return int(degree)
    raise ConfigError(
        f"a2a_ffn_overlap_degree = {degree!r}; give a number of chunks from 1 on (at most {_MAX_CHUNKS}), or 'auto'"
    )


def make_experts(description: Description, model_dim: int, count: int, shards: int) -> nn.Module:
    """Create `count` experts, or one of `shards` parts of an expert."""
    options = {key: value for key, value in description.items() if key not in _COUNTS}
    kind = options.pop("type", None)
    if kind != "custom":
        # Ignoring these would train a different model.
        for old, cure in _OLD_OPTIONS.items():
            if old in options:
                raise ConfigError(f"experts no longer support {old!r}, removed in Tutel: {cure}")
    module = _find_class("experts", kind, options)
    options |= {"model_dim": model_dim, "sharded_count": shards}
    try:
        return module(num_experts_per_device=count, **options)
    except TypeError:
        if kind != "custom":
            raise
        # Argument name in older versions of Tutel.
        return module(local_experts=count, **options)


def _find_class(folder: str, kind: Any, options: dict[str, Any]) -> Any:
    known, name, kinds = _KINDS[folder]
    if kind == "custom":
        if "module" not in options:
            raise ConfigError(f"custom {kinds} without a 'module'; pass the class that constructs them")
        return options.pop("module")
    if kind not in known:
        raise ConfigError(f"unknown type {kind!r} of {folder}; choose {', '.join(known)} or custom")
    return getattr(importlib.import_module(f"fusedmoe.tutel.{folder}.{kind}"), name)


def store_expert_numbers(
    numbers: list[Any],
    num_global_experts: int,
    experts: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    """Store the expert numbers in a state's metadata and mark its tensors as per rank; a `state_dict` hook."""
    metadata[NUMBERS] = numbers
    for name in state if numbers != list(range(num_global_experts)) else ():
        # DTensors describe their own shard.
        if name.startswith(prefix) and type(state[name]) is Tensor:
            state[name] = state[name].as_subclass(PerRankTensor)


def require_same_experts(
    numbers: list[Any], experts: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
) -> None:
    """Raise `ConfigError` if the state contains another rank's experts; a `load_state_dict` hook."""
    # A plain dict or a state written by Tutel has no expert numbers.
    given = metadata.get(NUMBERS, numbers)
    if given != numbers:
        raise wrong_experts_error(prefix, given, numbers, "A state put together by hand loads as dict(state)")
