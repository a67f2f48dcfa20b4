"""Checks before PyTorch's FSDP1, ZeRO and distributed state dicts run. Checked against 2.11 to 2.15.

Importing this module takes 1.5 s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from fusedmoe.compat import require_names, require_parameters
from fusedmoe.compat.torch import VERSIONS, check_before

_FSDP_GROUPS, _FSDP_IGNORED = ("process_group", "device_mesh"), ("ignored_modules", "ignored_states")

require_names(*VERSIONS, state_dict, "_verify_options")
require_parameters(*VERSIONS, state_dict._verify_options, "model", keywords=["options"])
require_parameters(
    *VERSIONS, FullyShardedDataParallel.__init__, "self", "module", keywords=[*_FSDP_GROUPS, *_FSDP_IGNORED]
)
require_parameters(*VERSIONS, ZeroRedundancyOptimizer.step, "self")


def check_state_dicts(check: Callable[[Any, Any], None]) -> None:
    """Call `check(model, options)` before PyTorch gets or sets the distributed state of a model or optimizer."""

    def verify(model: Any, *_: Any, options: Any = None, **__: Any) -> None:
        check(model, options)

    check_before(state_dict, "_verify_options", verify)


def install_fsdp1_check(check: Callable[[list[Any], list[Any]], None]) -> None:
    """Call `check(parameters, process_groups)` before FullyShardedDataParallel flattens parameters.

    `parameters` excludes parameters that nested instances flatten or ignore.
    """
    original_init = FullyShardedDataParallel.__init__
    signature = inspect.signature(original_init)

    @functools.wraps(original_init)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        group, mesh, *ignored = (given.arguments.get(name) for name in (*_FSDP_GROUPS, *_FSDP_IGNORED))
        # Iterators can be read only once.
        ignored = [None if each is None else list(each) for each in ignored]
        given.arguments |= {name: each for name, each in zip(_FSDP_IGNORED, ignored, strict=True) if each is not None}
        states = [state for each in ignored if each is not None for state in each]
        left_out = [p for state in states for p in (state.parameters() if isinstance(state, nn.Module) else [state])]
        module = given.arguments["module"]
        nested = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
        left_out_by_nested = [p for part in nested for p in (*part.parameters(), *vars(part)["_fusedmoe_left_out"])]
        kept_out = set(map(id, left_out + left_out_by_nested))
        parameters = [parameter for parameter in module.parameters() if id(parameter) not in kept_out]
        # Hybrid sharding has two groups, which together contain all ranks unless given.
        groups = [dist.group.WORLD] if group is None else [*group] if isinstance(group, tuple) else [group]
        check(parameters, groups if mesh is None else mesh.get_all_groups())
        original_init(*given.args, **given.kwargs)
        given.arguments["self"]._fusedmoe_left_out = left_out

    FullyShardedDataParallel.__init__ = checked  # type: ignore[method-assign]


def check_zero_steps(check: Callable[[list[Any], Any], None]) -> None:
    """Call `check(parameters, process_group)` before a step of ZeroRedundancyOptimizer."""

    # A global optimizer hook would run for every optimizer.
    def step(optimizer: Any, *_: Any, **__: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        check(parameters, optimizer.process_group)

    check_before(ZeroRedundancyOptimizer, "step", step)
