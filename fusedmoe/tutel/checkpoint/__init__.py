"""Checkpoints of W ranks as one, and one as those of W ranks: `python -m fusedmoe.tutel.checkpoint.gather --help`.

This file has what `gather` and `scatter` share: the layers of a checkpoint, and the split of experts' parameters.
"""

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
# Ranks that share an expert hold ⌈D_out/s⌉ columns of its output bias each, so that the last may hold zeros behind it.
_BIAS, _ITS_WEIGHT = "batched_fc2_bias", "batched_fc2_w"
State = dict[str, Any]


def arguments_of(description: str | None, given: Sequence[str] | None, **required: str) -> argparse.Namespace:
    """Reads the command line of `gather` or `scatter`; `required`: its own options, with their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in required.items():
        parser.add_argument(f"--{name}", type=int if name.endswith("size") else str, required=True, help=text)
    parser.add_argument("--namespace", default="", help="where in a file the state_dict is: keys, by slashes")
    parser.add_argument("--default_num_global_experts", type=int, default=0, help="for a file that does not tell")
    return parser.parse_args(given)


def read(path: str, namespace: str) -> tuple[Any, State]:
    """Reads a file; returns its content, and the state_dict in it under `namespace`, keys joined by slashes."""
    # A pipe would be waited for.
    if not os.path.isfile(path):
        raise ConfigError(f"{path} is not there, or no file")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} is no checkpoint of tensors and plain values; save state_dict() without other objects beside it"
        ) from error
    except Exception as error:  # a parser may raise anything on damage
        raise ConfigError(f"{path} cannot be read, or is damaged: {error}") from error
    state = whole
    for key in filter(None, namespace.split("/")):
        if not isinstance(state, dict) or key not in state:
            names = ", ".join(map(repr, list(state)[:8])) if isinstance(state, dict) else type(state).__name__
            raise ConfigError(f"{path} has nothing under {namespace!r}; where {key!r} should be it has {names}")
        state = state[key]
    for metadata in getattr(state, "_metadata", {}).values():
        # Experts join or leave, so the numbers in the metadata are no longer true.
        metadata.pop(NUMBERS, None)
    return whole, state


def layers_of(path: str, state: State, experts: int) -> dict[str, int]:
    """Maps the prefix of each layer's expert parameters to the number of experts it has in all.

    `experts`: for an old checkpoint, which does not tell (and then does); 0 where it is not known.
    """
    if not any(_tells(key) for key in state) and experts > 0:
        for key in list(state):
            head, found, _ = f".{key}".rpartition(".experts.")
            if found:
                state.setdefault(f"{head}.{_COUNT}".removeprefix("."), torch.tensor(experts, device="cpu"))
    layers = {key.removesuffix(_COUNT) + "experts.": int(state[key]) for key in state if _tells(key)}
    if not layers:
        raise ConfigError(
            f"{path} holds no moe_layer, or is of an old format: give --default_num_global_experts, the number of "
            "experts in all"
        )
    return layers


def _tells(key: str) -> bool:
    return key.rpartition(".")[2] == _COUNT


def layer_of(key: str, layers: dict[str, int]) -> int | None:
    """Returns the number of experts of the layer whose expert parameter this is; None for other parameters."""
    return next((count for prefix, count in layers.items() if key.startswith(prefix)), None)


def joined(parts: list[Tensor], experts: int) -> Tensor:
    """Joins the parts of W ranks, [e, …] each, or of a shared expert [1, n, …], to [E, …]."""
    whole = torch.cat(parts)
    if parts[0].dim() == 1:
        # Flat shards are joined without a look inside: padding goes where it was made.
        return whole
    return whole.view(experts, -1, *whole.shape[2:]).clone()


def without_padding(key: str, state: State) -> Tensor:
    """Returns a joined parameter; of an output bias without the padding behind its expert's results."""
    if not key.endswith(_BIAS):
        return state[key]
    return state[key][:, : state[key.removesuffix(_BIAS) + _ITS_WEIGHT].shape[-1]].clone()


def split(key: str, whole: Tensor, experts: int, size: int) -> list[Tensor]:
    """Splits [E, …] into the parts of `size` ranks; experts are shared where there are fewer than ranks."""
    if whole.dim() == 1 or experts % size == 0:
        return _even(whole, size)
    # Fewer experts than ranks: the ranks that share one hold equal shards of it.
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
