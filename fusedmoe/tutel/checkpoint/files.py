"""What gather and scatter share: where a checkpoint's layers are, and how experts' parameters split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError

_COUNT = "_num_global_experts"
State = dict[str, Any]


def read(path: str, namespace: str) -> tuple[Any, State]:
    """The file's content, and the state_dict in it: under `namespace`, keys joined by slashes."""
    whole = torch.load(path, map_location="cpu", weights_only=True)
    state = whole
    for key in namespace.split("/"):
        state = state[key] if key else state
    return whole, state


def experts_of(state: State) -> dict[str, int]:
    """The prefix of each layer's expert parameters -> how many experts it has in all."""
    return {key.removesuffix(_COUNT) + "experts.": int(state[key]) for key in state if key.split(".")[-1] == _COUNT}


def add_counts(state: State, experts: int) -> None:
    """Gives every layer of an old checkpoint its number of experts."""
    for key in list(state):
        head, found, _ = f".{key}".rpartition(".experts.")
        if found:
            state.setdefault(f"{head}.{_COUNT}".removeprefix("."), torch.tensor(experts))


def layer_of(key: str, layers: dict[str, int]) -> int | None:
    """How many experts the layer has whose expert parameter this is; None for other parameters."""
    return next((count for prefix, count in layers.items() if key.startswith(prefix)), None)


def joined(parts: list[Tensor], experts: int) -> Tensor:
    """The parts of W ranks, [e, …] each, or of a shared expert [1, n, …], as [E, …]."""
    whole = torch.cat(parts)
    if parts[0].dim() == 1:
        return whole  # flat shards stay flat
    return whole.view(experts, -1, *whole.shape[2:]).clone()


def split(whole: Tensor, experts: int, size: int) -> list[Tensor]:
    """[E, …] -> what each of `size` ranks holds; experts are shared where there are fewer than ranks.

    Raises:
        ConfigError: neither number divides the other, or an expert's second dimension.
    """
    if whole.dim() == 1:
        return _even(whole, size)
    if experts % size == 0:
        return _even(whole, size)
    shards = size // experts
    if size % experts or whole.shape[1] % shards:
        raise ConfigError(
            f"{experts} experts of {list(whole.shape[1:])} cannot be held by {size} ranks: one number must divide the "
            "other, and the ranks that share an expert its first dimension"
        )
    return _even(whole.view(size, whole.shape[1] // shards, *whole.shape[2:]), size)


def _even(whole: Tensor, size: int) -> list[Tensor]:
    if len(whole) % size:
        raise ConfigError(f"a parameter of {len(whole)} cannot be split evenly over {size} ranks")
    return [part.clone() for part in whole.chunk(size)]
