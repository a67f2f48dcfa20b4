"""Refusal of PyTorch's own wrappers around experts of which each rank has different ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.errors import ConfigError

# The attribute of a wrapper that keeps the ids of the parameters whose gradients it reduces.
_REDUCED = "_fusedmoe_reduced"


class WrapperCheck:
    """Refuses a wrapper that takes the experts of different ranks for copies of each other.

    DistributedDataParallel begins by giving all ranks the experts of one and then averages gradients of different ones;
    FSDP2 keeps a slice of each rank's as if together they were one whole. Neither would say so.

    Args:
        experts: of which not all ranks have the same.
        rank: this one.
        copies: the ranks over which a wrapper may reduce them.
    Attributes:
        passed: how many modules FSDP2 and the like knew when it was looked at, and an id of the experts' parameters.
    """

    def __init__(self, experts: nn.Module, rank: int, copies: Iterable[int]) -> None:
        self._experts, self._rank, self._copies = experts, rank, frozenset(copies)
        self.passed = (0, 0)

    def __call__(self) -> None:
        """Looks at the wrapper whose forward this is; at FSDP2's only when there are others, or other parameters.

        Raises:
            ConfigError: the experts are among what it reduces, and over other ranks than those with the same experts.
        """
        # The private names here are those by which PyTorch's own parts find wrappers; nothing public does.
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and self._strangers(dist.get_process_group_ranks(wrapper.process_group)):
            # Once for a wrapper, which fixes what it reduces as it is made: each layer asks in each forward.
            if (reduced := wrapper.__dict__.get(_REDUCED)) is None:
                reduced = wrapper.__dict__[_REDUCED] = _reduced(wrapper)
            if any(id(parameter) in reduced for parameter in self._experts.parameters()):
                raise self._refusal(
                    "DistributedDataParallel", "has made them equal and averages", "model = distributed_data_parallel"
                )
        now = (len(_module_state_mapping), id(next(self._experts.parameters(), None)))
        if now != self.passed:
            own = set(self._experts.modules())
            for sharded in _fsdp_parameters():
                if sharded._module_info.module not in own:
                    continue
                if self._strangers(sharded.mesh_info.mesh.mesh.flatten().tolist()):
                    raise self._refusal("fully_shard", "has cut and joined them, and averages", "fully_shard")
            self.passed = now

    def _strangers(self, ranks: list[int]) -> bool:
        return not self._copies.issuperset(ranks)

    def _refusal(self, wrapper: str, does: str, ours: str) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: the experts of this layer are this rank's own, and PyTorch's {wrapper} "
            f"{does} them as if all ranks had the same. Make the model anew and wrap it by fusedmoe.training: "
            f"{ours}(…, topology)"
        )


def _reduced(wrapper: DistributedDataParallel) -> set[int]:
    ignored = wrapper.parameters_to_ignore  # with a dot in front where the root module itself has them
    every = wrapper.module.named_parameters()
    return {id(parameter) for name, parameter in every if not ignored & {name, f".{name}"}}


def _fsdp_parameters() -> Iterator[Any]:
    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # PyTorch 2.6 to 2.9 have one at most
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            yield from group.fsdp_params
