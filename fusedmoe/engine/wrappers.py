"""Refusal of PyTorch's wrappers and utilities that treat the different experts of ranks as replicas of one module.

FSDP2 is found in the first forward pass around it. DistributedDataParallel is found when it is made, or in the first
forward pass of a layer that is made later around parameters that it reduces. FSDP1, ZeroRedundancyOptimizer, the model
averagers and full state dicts are refused when they are called, before they send anything.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, getweakrefs

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.compat.torch import fsdp_parameters, module_states
from fusedmoe.compat.torch_checks import check_averages, check_ddp
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import constant_in_graphs


class NotScripted(list[str]):
    """An attribute `__jit_ignored_attributes__` that has `torch.jit.script` refuse a class's modules.

    `torch.jit` reads this empty list, and iterates over it, for every module.
    """

    def __iter__(self) -> Iterator[str]:
        raise not_traced()


def not_traced() -> ConfigError:
    """Make the refusal of `torch.jit`."""
    return ConfigError(
        "torch.jit cannot script or trace layers of fusedmoe, whose numbers of rows depend on the tokens. Use "
        "torch.compile, or torch.export for a layer in a world of one"
    )


def require_swaps(experts: nn.Module) -> None:
    """Raise `ConfigError` where PyTorch is to swap parameters in place and something refers to them weakly."""
    if not torch.__future__.get_swap_module_params_on_conversion():
        return
    for name, parameter in experts.named_parameters():
        if getweakrefs(parameter):
            raise ConfigError(
                f"{type(experts).__name__}: {name} is known to gradient synchronisation and cannot be swapped. Call "
                "torch.__future__.set_swap_module_params_on_conversion(False), or convert the model before its first "
                "sync_gradients"
            )


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
        passed: how many modules FSDP2 and the like had, and the id of a parameter of the experts, at the last check.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Not in `__init__`, which a copy of a layer does not call for its check.
        made = super().__new__(cls)
        _checks.add(made)
        watch_utilities()
        # Where a graph is made of a layer, the compiler calls the check once, and the graph does not hold it.
        constant_in_graphs(cls.__call__)
        return made

    def __init__(
        self, experts: nn.Module, rank: int, copies: Iterable[int], axes: Collection[str] = ("ep", "esp")
    ) -> None:
        self._experts, self._rank, self._copies, self._axes = experts, rank, frozenset(copies), frozenset(axes)
        self.passed = (0, 0)

    def __call__(self) -> None:
        """Check FSDP2, and DistributedDataParallels made before this check, where a module or parameter is new.

        Raises:
            ConfigError: it reduces parameters that ranks split, and over other ranks than those with the same ones.
        """
        now = (len(module_states), id(next(self._experts.parameters(), None)))
        if now != self.passed:
            split = self.split()
            for sharded in fsdp_parameters():
                if (sharded.module, sharded.name) in split and self.strangers(sharded.ranks):
                    raise self._refusal("fully_shard", "has cut and joined them, and averages", "fully_shard")
            if self._is_reduced():
                gc.collect()  # a wrapper is part of a reference cycle, and may have been given up
                if self._is_reduced():
                    raise self._ddp_refusal()
            self.passed = now

    def check_ddp(self, wrapper: DistributedDataParallel, reduced: Collection[int]) -> None:
        """Check a wrapper that has been made, and the ids of the parameters that it reduces. Raises: as above."""
        if self._is_reduced_by(wrapper, reduced):
            raise self._ddp_refusal()

    def _is_reduced(self) -> bool:
        return any(self._is_reduced_by(*each) for each in list(_reduced.items()))

    def _is_reduced_by(self, wrapper: DistributedDataParallel, reduced: Collection[int]) -> bool:
        if not any(id(parameter) in reduced for parameter in self.split().values()):
            return False
        return self.strangers(dist.get_process_group_ranks(wrapper.process_group))

    def split(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Finds the parameters that ep or esp split, by module and name. All ranks may share an adapter's factor."""
        split, shardings = {}, getattr(self._experts, "shardings", {})
        for name, parameter in self._experts.named_parameters():
            if not self._axes.isdisjoint(shardings.get(name, self._axes)):
                path, _, own_name = name.rpartition(".")
                split[self._experts.get_submodule(path), own_name] = parameter
        return split

    def strangers(self, ranks: Iterable[int]) -> bool:
        """Return whether some of these ranks hold other experts than this one."""
        return not self._copies.issuperset(ranks)

    def _ddp_refusal(self) -> ConfigError:
        does, ours = "has made them equal and averages", "model = distributed_data_parallel"
        return self._refusal("DistributedDataParallel", does, ours)

    def _refusal(self, wrapper: str, does: str, ours: str) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: the experts of this layer are this rank's own, and PyTorch's {wrapper} "
            f"{does} them as if all ranks had the same. Make the model anew and wrap it by fusedmoe.training: "
            f"{ours}(…, topology)"
        )


# The checks of all layers whose experts ranks split: utilities are given parameters, and no layers.
_checks: WeakSet[WrapperCheck] = WeakSet()


def _refuse(parameters: Iterable[Tensor], groups: Iterable[Any], utility: str, cure: str) -> None:
    """Raise `ConfigError` if parameters that differ between the ranks of a process group are among these."""
    given = {id(parameter): parameter for parameter in parameters}
    for group in groups:
        if not dist.is_initialized() or group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        ranks = dist.get_process_group_ranks(group)
        own = any(
            check.strangers(ranks) and not given.keys().isdisjoint(map(id, check.split().values()))
            for check in list(_checks)
        )
        # Each rank has its part of an expert that is a DTensor, as in Hugging Face's expert parallelism.
        if own or any(_is_cut_over(parameter, ranks) for parameter in given.values()):
            raise ConfigError(
                f"rank {dist.get_rank()}: PyTorch's {utility} treats the parameters of ranks {ranks} as replicas, and "
                f"these ranks hold different experts. {cure}"
            )


def _is_cut_over(parameter: Tensor, ranks: list[int]) -> bool:
    from torch.distributed.tensor import DTensor  # its import takes 0.5 s, and most models have none

    if not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements):
        return False
    return len(set(ranks).intersection(parameter.device_mesh.mesh.flatten().tolist())) > 1


def _before_average(parameters: list[Tensor], group: Any) -> None:
    _refuse(
        parameters,
        [group],
        "average_parameters (model averagers, PostLocalSGDOptimizer)",
        "Leave the experts (fusedmoe.training.expert_parameter_names(model)) out of the averaged parameters; "
        "fusedmoe.training.sync_gradients keeps their replicas equal",
    )


def _before_fsdp1(parameters: list[Tensor], groups: list[Any]) -> None:
    _refuse(parameters, groups, "FullyShardedDataParallel", "Shard by fusedmoe.training.fully_shard(…, topology)")


def _before_state_dict(model: nn.Module, options: Any) -> None:
    if options is None or not options.full_state_dict:
        return  # a rank's own state
    from torch.distributed.tensor import DTensor

    # A DTensor is gathered and scattered whole, unless its mesh has only the ranks that hold copies of these experts.
    whole = {id(parameter) for parameter in model.parameters() if isinstance(parameter, DTensor)}
    for check in list(_checks):
        for parameter in check.split().values():
            if isinstance(parameter, DTensor) and not check.strangers(parameter.device_mesh.mesh.flatten().tolist()):
                whole.discard(id(parameter))
    _refuse(
        (parameter for parameter in model.parameters() if id(parameter) not in whole),
        [dist.group.WORLD],
        "StateDictOptions(full_state_dict=True)",
        "Save by fusedmoe.training.save_checkpoint and load by load_checkpoint; without full_state_dict the state is "
        "this rank's own",
    )


def _before_zero_step(parameters: list[Tensor], group: Any) -> None:
    _refuse(
        parameters,
        [group],
        "ZeroRedundancyOptimizer",
        "Give the experts (fusedmoe.training.expert_parameter_names(model)) an optimizer of their own on each rank, or "
        "shard by fusedmoe.training.fully_shard(…, topology, experts=True)",
    )


# Ids of the parameters that each DistributedDataParallel reduces. Fixed when it is made: it holds them, and does not
# reduce parameters that its module gets later.
_reduced: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()


def _after_ddp(wrapper: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    reduced = frozenset(map(id, parameters))
    for check in list(_checks):
        check.check_ddp(wrapper, reduced)
    _reduced[wrapper] = reduced


# At import: whoever imports the function by its name afterwards gets the checked one.
check_averages(_before_average)
check_ddp(_after_ddp)


@cache
def watch_utilities() -> None:
    """Have the other utilities checked. Called for layers over ranks only, because their import takes 1.5 s."""
    from fusedmoe.compat.torch_distributed import check_fsdp1, check_state_dicts, check_zero_steps

    check_fsdp1(_before_fsdp1)
    check_state_dicts(_before_state_dict)
    check_zero_steps(_before_zero_step)
    _find_earlier_ddp()


def _find_earlier_ddp() -> None:
    """Record the DistributedDataParallels made before this module was imported. PyTorch keeps no list of them."""
    for wrapper in gc.get_objects() if dist.is_initialized() else ():
        if not issubclass(type(wrapper), DistributedDataParallel) or wrapper in _reduced:
            continue
        if hasattr(wrapper, "module"):  # its constructor has not failed early
            named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
            _reduced[wrapper] = frozenset(id(parameter) for name, parameter in named if name not in ignored)
