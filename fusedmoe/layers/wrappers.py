"""Refusal of PyTorch's own wrappers around experts of which each rank has different ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.errors import ConfigError


class WrapperCheck:
    """Refuses a wrapper that takes the experts of different ranks for copies of each other.

    DistributedDataParallel begins by giving all ranks the experts of one and then averages gradients of different ones;
    FSDP2 keeps a slice of each rank's as if together they were one whole. Neither would say so.

    Args:
        experts: of which not all ranks have the same.
        rank: this one.
        copies: the ranks over which a wrapper may reduce them.
        axes: those that split them; the experts' `shardings` say which of them split a parameter, else all do.
    Attributes:
        passed: how many modules FSDP2 and the like had, and the id of a parameter of the experts, at the last look.
    """

    def __init__(
        self, experts: nn.Module, rank: int, copies: Iterable[int], axes: Collection[str] = ("ep", "esp")
    ) -> None:
        self._experts, self._rank, self._copies, self._axes = experts, rank, frozenset(copies), frozenset(axes)
        self.passed = (0, 0)
        self._served: ref[DistributedDataParallel] | None = None

    def __call__(self) -> None:
        """Looks at the DistributedDataParallel whose forward this is, and at FSDP2 where a module or parameter is new.

        Raises:
            ConfigError: it reduces parameters that ranks split, and over other ranks than those with the same ones.
        """
        # The private names here are those by which PyTorch's own parts find wrappers; nothing public does.
        wrapper = DistributedDataParallel._active_ddp_module
        # Once for a wrapper, which fixes what it reduces as it is made.
        if wrapper is not None and (self._served is None or self._served() is not wrapper):
            reduced = {id(parameter) for parameter in wrapper._module_parameters}
            ours = any(id(parameter) in reduced for parameter in self._split().values())
            if ours and self._strangers(dist.get_process_group_ranks(wrapper.process_group)):
                raise self._refusal(
                    "DistributedDataParallel", "has made them equal and averages", "model = distributed_data_parallel"
                )
            self._served = ref(wrapper)
        now = (len(_module_state_mapping), id(next(self._experts.parameters(), None)))
        if now != self.passed:
            split = self._split()
            for sharded in _fsdp_parameters():
                if (sharded._module_info.module, sharded._module_info.param_name) not in split:
                    continue
                if self._strangers(sharded.mesh_info.mesh.mesh.flatten().tolist()):
                    raise self._refusal("fully_shard", "has cut and joined them, and averages", "fully_shard")
            self.passed = now

    # Where a graph is made of the layer, the compiler calls it once, and the graph does not hold it.
    __call__._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _split(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Finds the parameters that ep or esp split, by module and name. All ranks may share an adapter's factor."""
        split, shardings = {}, getattr(self._experts, "shardings", {})
        for name, parameter in self._experts.named_parameters():
            if not self._axes.isdisjoint(shardings.get(name, self._axes)):
                path, _, own_name = name.rpartition(".")
                split[self._experts.get_submodule(path), own_name] = parameter
        return split

    def _strangers(self, ranks: list[int]) -> bool:
        return not self._copies.issuperset(ranks)

    def _refusal(self, wrapper: str, does: str, ours: str) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: the experts of this layer are this rank's own, and PyTorch's {wrapper} "
            f"{does} them as if all ranks had the same. Make the model anew and wrap it by fusedmoe.training: "
            f"{ours}(…, topology)"
        )


def _fsdp_parameters() -> Iterator[Any]:
    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # PyTorch 2.11 has one at most
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            yield from group.fsdp_params
