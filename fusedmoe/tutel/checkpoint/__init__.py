"""Merge per-rank checkpoints into one (`gather`), or split one (`scatter`)."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.tutel.impls.described import NUMBERS

_COUNT = "_num_global_experts"
# Each of s ranks that share an expert holds ⌈D_out/s⌉ columns of its output bias; the last part may be zero-padded.
_BIAS, _ITS_WEIGHT = "batched_fc2_bias", "batched_fc2_w"
State = dict[str, Any]


def arguments_of(description: str | None, given: Sequence[str] | None, **required: str) -> argparse.Namespace:
    """Parse the command line of `gather` or `scatter`; `required`: option names and their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in required.items():
        parser.add_argument(f"--{name}", type=int if name.endswith("size") else str, required=True, help=text)
    parser.add_argument(
        "--namespace",
        default="",
        help="keys that lead to the state_dict inside each file, separated by slashes (default: top level)",
    )
    parser.add_argument(
        "--default_num_global_experts",
        type=int,
        default=0,
        help="global number of experts, for old files that do not store it",
    )
    parsed = parser.parse_args(given)
    for name in (name for name in required if name.endswith("size") and getattr(parsed, name) < 1):
        parser.error(f"--{name} {getattr(parsed, name)} must be at least 1")
    return parsed


def read(path: str, namespace: str) -> tuple[Any, State]:
    """Return a file's content and its state_dict under the slash-separated keys `namespace`.

    Removes expert numbers from the metadata. Raises `ConfigError` if the file is unreadable or lacks a key.
    """
    # Reading a pipe would block.
    if not os.path.isfile(path):
        raise ConfigError(f"{path} does not exist or is not a file")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} is no checkpoint of tensors and plain values; save state_dict() without other objects"
        ) from error
    except Exception as error:  # a parser may raise anything on damaged input
        raise ConfigError(f"{path} cannot be read, or is damaged: {error}") from error
    state = whole
    for key in filter(None, namespace.split("/")):
        if not isinstance(state, dict) or key not in state:
            names = ", ".join(map(repr, list(state)[:8])) if isinstance(state, dict) else type(state).__name__
            raise ConfigError(f"{path} has no {namespace!r}; found {names} instead of {key!r}")
        state = state[key]
    for metadata in getattr(state, "_metadata", {}).values():
        metadata.pop(NUMBERS, None)
    return whole, state


def layers_of(path: str, state: State, experts: int) -> dict[str, int]:
    """Map the prefix of each layer's expert parameters to its global number of experts.

    If the state stores no numbers, as in old checkpoints, `experts` (unless 0) is added to it as the number. Raises
    `ConfigError` if there is no layer.
    """
    if not any(_is_expert_count(key) for key in state) and experts > 0:
        for key in list(state):
            head, found, _ = f".{key}".rpartition(".experts.")
            if found:
                state.setdefault(f"{head}.{_COUNT}".removeprefix("."), torch.tensor(experts, device="cpu"))
    layers = {key.removesuffix(_COUNT) + "experts.": int(state[key]) for key in state if _is_expert_count(key)}
    if not layers:
        raise ConfigError(
            f"{path} holds no moe_layer, or has an old format: pass --default_num_global_experts, the "
            "global number of experts"
        )
    return layers


def _is_expert_count(key: str) -> bool:
    return key.rpartition(".")[2] == _COUNT


def layer_of(key: str, layers: dict[str, int]) -> int | None:
    """Return the global number of experts of the parameter's layer; None for other parameters."""
    return next((count for prefix, count in layers.items() if key.startswith(prefix)), None)


def joined(parts: list[Tensor], experts: int) -> Tensor:
    """Join the parts of all ranks, experts [e, …] or shards [1, n, …] of one expert, to [E, …]."""
    whole = torch.cat(parts)
    if parts[0].dim() == 1:
        # The padding of flat shards remains in place.
        return whole
    return whole.view(experts, -1, *whole.shape[2:]).clone()


def without_padding(key: str, state: State) -> Tensor:
    """Return a joined parameter; an output bias without its padding."""
    if not key.endswith(_BIAS):
        return state[key]
    return state[key][:, : state[key.removesuffix(_BIAS) + _ITS_WEIGHT].shape[-1]].clone()


def split(key: str, whole: Tensor, experts: int, size: int) -> list[Tensor]:
    """Split [E, …] into the parts of `size` ranks: experts, or with fewer experts than ranks equal shards.

    Raises `ConfigError` if it cannot be split evenly.
    """
    if whole.dim() == 1 or experts % size == 0:
        return _even(whole, size)
    shards = size // experts
    if shards and key.endswith(_BIAS):
        whole = torch.nn.functional.pad(whole, (0, -whole.shape[1] % shards))
    if size % experts or whole.shape[1] % shards:
        raise ConfigError(
            f"{key}: {experts} experts of {list(whole.shape[1:])} cannot be held by {size} ranks: one number must "
            "divide the other, and the ranks that share an expert its first dimension"
        )
    return _even(whole.view(size, whole.shape[1] // shards, *whole.shape[2:]), size)


def _even(whole: Tensor, size: int) -> list[Tensor]:
    if len(whole) % size:
        raise ConfigError(f"a parameter of {len(whole)} cannot be split evenly over {size} ranks")
    return [part.clone() for part in whole.chunk(size)]
