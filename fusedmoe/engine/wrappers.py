"""Checks that refuse PyTorch wrappers and utilities which would treat the ranks' different experts as replicas.

FSDP2 is refused in its first forward; DistributedDataParallel at its construction, or in the first forward of a layer
constructed later; other utilities when they are called, before they send anything.
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

from fusedmoe.compat.torch import fsdp_parameters, install_average_check, install_ddp_check, module_states
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.derivatives import mark_constant_in_graphs


class RefusesScripting(list[str]):
    """Value of a module class's `__jit_ignored_attributes__` that makes `torch.jit.script` raise `ConfigError`.

    `torch.jit` iterates over this empty list for every module that it scripts.
    """

    def __iter__(self) -> Iterator[str]:
        raise jit_error()


def jit_error() -> ConfigError:
    return ConfigError(
        "torch.jit cannot script or trace layers of fusedmoe, whose numbers of rows depend on the tokens. Use "
        "torch.compile, or torch.export for a layer in a world of one"
    )


def require_swappable(experts: nn.Module) -> None:
    """Raise `ConfigError` if converting the experts would fail because a parameter has weak references.

    Only applies while `torch.__future__.set_swap_module_params_on_conversion(True)` is set.
    """
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
    """Refuses wrappers that treat the different experts of ranks as replicas.

    DistributedDataParallel would broadcast one rank's experts and average gradients of different experts; FSDP2 would
    treat each rank's experts as a slice of one tensor.

    Args:
        replica_ranks: ranks with the same experts as this rank, over which wrappers may reduce gradients.
        axes: the axes that split the experts; `shardings` of the experts may restrict them per parameter.
    Attributes:
        checked_state: at the last check, the number of modules wrapped by FSDP2 and the id of an expert parameter.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Not in `__init__`, which copies of a layer do not call.
        check = super().__new__(cls)
        _checks.add(check)
        watch_utilities()
        # The compiler calls the check once while tracing; graphs do not contain it.
        mark_constant_in_graphs(cls.__call__)
        return check

    def __init__(
        self, experts: nn.Module, rank: int, replica_ranks: Iterable[int], axes: Collection[str] = ("ep", "esp")
    ) -> None:
        self._experts, self._rank = experts, rank
        self._replica_ranks, self._axes = frozenset(replica_ranks), frozenset(axes)
        self.checked_state = (0, 0)

    def __call__(self) -> None:
        """Raise `ConfigError` if FSDP2 or DistributedDataParallel reduces split parameters over different experts.

        Does nothing if FSDP2 wrapped no module and the experts' first parameter is the same as in the last check.
        """
        state = (len(module_states), id(next(self._experts.parameters(), None)))
        if state != self.checked_state:
            split = self.split_parameters()
            for sharded in fsdp_parameters():
                if (sharded.module, sharded.name) in split and self.has_other_experts(sharded.ranks):
                    raise self._refusal("fully_shard", "has cut and joined them, and averages", "fully_shard")
            if self._ddp_reduces_split():
                gc.collect()  # a discarded wrapper lives in a reference cycle until collected
                if self._ddp_reduces_split():
                    raise self._ddp_refusal()
            self.checked_state = state

    def check_ddp(self, wrapper: DistributedDataParallel, reduced: Collection[int]) -> None:
        if self._is_reduced_by(wrapper, reduced):
            raise self._ddp_refusal()

    def _ddp_reduces_split(self) -> bool:
        return any(self._is_reduced_by(*each) for each in list(_reduced_ids.items()))

    def _is_reduced_by(self, wrapper: DistributedDataParallel, reduced: Collection[int]) -> bool:
        if not any(id(parameter) in reduced for parameter in self.split_parameters().values()):
            return False
        return self.has_other_experts(dist.get_process_group_ranks(wrapper.process_group))

    def split_parameters(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Return the parameters that differ between EP or ESP ranks, by (submodule, name in it).

        Parameters that the experts' `shardings` mark as replicated, such as adapter factors, are left out.
        """
        split, shardings = {}, getattr(self._experts, "shardings", {})
        for name, parameter in self._experts.named_parameters():
            if not self._axes.isdisjoint(shardings.get(name, self._axes)):
                path, _, own_name = name.rpartition(".")
                split[self._experts.get_submodule(path), own_name] = parameter
        return split

    def has_other_experts(self, ranks: Iterable[int]) -> bool:
        return not self._replica_ranks.issuperset(ranks)

    def _ddp_refusal(self) -> ConfigError:
        does, ours = "has made them equal and averages", "model = distributed_data_parallel"
        return self._refusal("DistributedDataParallel", does, ours)

    def _refusal(self, wrapper: str, does: str, ours: str) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: the experts of this layer are this rank's own, and PyTorch's {wrapper} "
            f"{does} them as if all ranks had the same. Make the model anew and wrap it by fusedmoe.training: "
            f"{ours}(…, topology)"
        )


_checks: WeakSet[WrapperCheck] = WeakSet()


def _require_equal(parameters: Iterable[Tensor], groups: Iterable[Any], utility: str, cure: str) -> None:
    """Raise `ConfigError` if any of these parameters differs between the ranks of one of the process groups.

    `utility` and `cure`: what would treat them as replicas, and what to do instead, for the error.
    """
    parameters_by_id = {id(parameter): parameter for parameter in parameters}
    for group in groups:
        if not dist.is_initialized() or group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        ranks = dist.get_process_group_ranks(group)
        has_split_experts = any(
            check.has_other_experts(ranks)
            and not parameters_by_id.keys().isdisjoint(map(id, check.split_parameters().values()))
            for check in list(_checks)
        )
        # With Hugging Face's expert parallelism, experts are DTensors split over ranks.
        if has_split_experts or any(_is_sharded_over(parameter, ranks) for parameter in parameters_by_id.values()):
            raise ConfigError(
                f"rank {dist.get_rank()}: PyTorch's {utility} treats the parameters of ranks {ranks} as replicas, and "
                f"these ranks hold different experts. {cure}"
            )


def _is_sharded_over(parameter: Tensor, ranks: list[int]) -> bool:
    from torch.distributed.tensor import DTensor  # import takes 0.5 s, and most models have none

    if not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements):
        return False
    return len(set(ranks).intersection(parameter.device_mesh.mesh.flatten().tolist())) > 1


def _before_average(parameters: list[Tensor], group: Any) -> None:
    _require_equal(
        parameters,
        [group],
        "average_parameters (model averagers, PostLocalSGDOptimizer)",
        "Leave the experts (fusedmoe.training.expert_parameter_names(model)) out of the averaged parameters; "
        "fusedmoe.training.sync_gradients keeps their replicas equal",
    )


def _before_fsdp1(parameters: list[Tensor], groups: list[Any]) -> None:
    _require_equal(
        parameters, groups, "FullyShardedDataParallel", "Shard by fusedmoe.training.fully_shard(…, topology)"
    )


def _before_state_dict(model: nn.Module, options: Any) -> None:
    if options is None or not options.full_state_dict:
        return  # a rank's own state
    from torch.distributed.tensor import DTensor

    # A DTensor is gathered whole, unless its mesh has only ranks that hold the same experts.
    gathered = {id(parameter) for parameter in model.parameters() if isinstance(parameter, DTensor)}
    for check in list(_checks):
        for parameter in check.split_parameters().values():
            if isinstance(parameter, DTensor) and not check.has_other_experts(
                parameter.device_mesh.mesh.flatten().tolist()
            ):
                gathered.discard(id(parameter))
    _require_equal(
        (parameter for parameter in model.parameters() if id(parameter) not in gathered),
        [dist.group.WORLD],
        "StateDictOptions(full_state_dict=True)",
        "Save by fusedmoe.training.save_checkpoint and load by load_checkpoint; without full_state_dict the state is "
        "this rank's own",
    )


def _before_zero_step(parameters: list[Tensor], group: Any) -> None:
    _require_equal(
        parameters,
        [group],
        "ZeroRedundancyOptimizer",
        "Give the experts (fusedmoe.training.expert_parameter_names(model)) an optimizer of their own on each rank, or "
        "shard by fusedmoe.training.fully_shard(…, topology, shard_experts=True)",
    )


# Ids of the parameters that each DistributedDataParallel reduces, fixed at its construction.
_reduced_ids: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()


def _after_ddp_construction(wrapper: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    reduced = frozenset(map(id, parameters))
    for check in list(_checks):
        check.check_ddp(wrapper, reduced)
    _reduced_ids[wrapper] = reduced


# At import, so that later imports of the functions get the checked ones.
install_average_check(_before_average)
install_ddp_check(_after_ddp_construction)


@cache
def watch_utilities() -> None:
    """Install the checks of FSDP1, state dicts and ZeRO. Only for several ranks: the imports take 1.5 s."""
    from fusedmoe.compat.torch_distributed import check_state_dicts, check_zero_steps, install_fsdp1_check

    install_fsdp1_check(_before_fsdp1)
    check_state_dicts(_before_state_dict)
    check_zero_steps(_before_zero_step)
    _find_earlier_ddp()


def _find_earlier_ddp() -> None:
    """Record the DistributedDataParallel modules made before this module was imported."""
    for wrapper in gc.get_objects() if dist.is_initialized() else ():
        if not issubclass(type(wrapper), DistributedDataParallel) or wrapper in _reduced_ids:
            continue
        if hasattr(wrapper, "module"):  # its constructor did not fail
            named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
            _reduced_ids[wrapper] = frozenset(id(parameter) for name, parameter in named if name not in ignored)
