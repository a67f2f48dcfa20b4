"""Selects this library for the experts of an existing transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fusedmoe import Schedule, Topology
from fusedmoe.compat.transformers import implementation_of, is_expert_parallel
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import find_experts
from fusedmoe.hf.module_experts import NAME, TRANSFORMERS_MODULES, check_experts, defining_module
from fusedmoe.hf.peft_adapters import forbid_split_merges, synchronize_adapters
from fusedmoe.layers.schedule import with_wire
from fusedmoe.layers.scheduled_exchange import EXCHANGE


def apply(model: Any, schedule: str | Schedule | None = None, wire: str | None = None) -> Any:
    """Make this library compute the experts of a transformers model. Returns the model.

    Collective with expert parallelism if a schedule or `wire` is given or the model has peft adapters, whose values and
    gradients are then synchronised over ranks.

    Args:
        model: a `PreTrainedModel`, bare or wrapped (DistributedDataParallel, FSDP, PEFT, `torch.compile`), with or
            without accelerate's hooks (`device_map`, offloading), before training or between steps.
        schedule: schedule of `fusedmoe.MoELayer` for expert parallelism, the same on all ranks. None keeps the current
            schedule.
        wire: format of rows between ranks, as for `fusedmoe.Schedule`, the same on all ranks; None: that of the
            schedule.
    Raises:
        ConfigError: not a model; no experts from transformers' registry; a forward replaced by another library;
            unsupported experts; experts outside a `PreTrainedModel`; adapters with tp_size or pp_size above 1; an
            unknown schedule or `wire`, or one for experts whose tokens transformers itself sends.
        RankError: ranks with different schedules or formats.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"fusedmoe.hf.apply: {model!r} is no model; load it first, by from_pretrained")
    modules = find_experts(model)
    who = type(model).__name__
    if not modules:
        raise ConfigError(
            f"fusedmoe.hf.apply: {who} has no experts that transformers' registry serves: it is dense, or its experts "
            "are separate modules. For such a model see fusedmoe.MoELayer"
        )
    for name, module in modules.items():
        # A replaced forward ignores transformers' registry.
        replaced_by = defining_module(module)
        if replaced_by not in TRANSFORMERS_MODULES:
            raise ConfigError(
                f"fusedmoe.hf.apply: {replaced_by} has replaced the forward of {name} ({type(module).__name__}), so "
                "experts_implementation has no effect; disable that part of it, and call fusedmoe.hf.apply first"
            )
        check_experts(module)
    forbid_split_merges()
    if any(is_expert_parallel(module) for module in modules.values()):
        _synchronize_adapters(model)
    for owner_of_experts in _outermost(model):
        owner_of_experts.set_experts_implementation(NAME)
    for name, module in modules.items():
        chosen = implementation_of(module)
        # A model that does not pass its choice on to submodules, or a module outside of any model.
        if chosen != NAME:
            raise ConfigError(
                f"fusedmoe.hf.apply: {name or 'it'} ({type(module).__name__}) keeps experts_implementation={chosen!r}, "
                f"which only its PreTrainedModel can set; apply this to that model, not to {who}"
            )
    if schedule is not None or wire is not None:
        _set_schedule(modules, schedule, wire)
    return model


def _synchronize_adapters(model: Any) -> None:
    if not any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        return
    config: Any = next(_outermost(model)).config.distributed_config
    if config.tp_size > 1 or config.pp_size > 1:
        raise ConfigError(
            f"fusedmoe.hf.apply: {type(model).__name__} has adapters, and tp_size={config.tp_size}, "
            "where gradients of adapters are not averaged over all ranks; use fsdp_size and ep_size alone"
        )
    synchronize_adapters(model, Topology.from_group(torch.distributed.group.WORLD).world)


def _set_schedule(modules: dict[str, Any], schedule: str | Schedule | None, wire: str | None) -> None:
    # Reject unknown names even without expert parallelism.
    if isinstance(schedule, str):
        Schedule.named(schedule)
    chosen = with_wire("off" if schedule is None else schedule, wire)
    for name, module in modules.items():
        exchange = getattr(module, EXCHANGE, None)
        if exchange is not None and schedule is None:
            exchange.set_wire(wire)
        elif exchange is not None:
            exchange.set_schedule(chosen)
        elif is_expert_parallel(module) and chosen != "off":
            raise ConfigError(
                f"fusedmoe.hf.apply: transformers itself sends the tokens of {name} ({type(module).__name__}), so the "
                f"schedule has no effect; load the model with DistributedConfig(…, ep_implementation={NAME!r})"
            )


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        if find_experts(module):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)
