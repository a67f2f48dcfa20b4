"""Private names of PyTorch's FSDP1, ZeRO and distributed state dicts, checked against 2.11 to 2.15.

Their import takes 1.5 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp1
from torch.distributed.optim import ZeroRedundancyOptimizer

from fusedmoe.compat import require_names
from fusedmoe.compat.torch import CHECKED, check_before

require_names("torch", torch.__version__, CHECKED, state_dict, "_verify_options")
require_names("torch", torch.__version__, CHECKED, fsdp1, "_init_param_handle_from_module")


def check_state_dicts(check: Callable[[Any, Any], None]) -> None:
    """Have `check(model, options)` called before PyTorch gets or sets the distributed state of a model or optimizer."""

    def verify(model: Any, *_: Any, options: Any = None, **__: Any) -> None:
        check(model, options)

    check_before(state_dict, "_verify_options", verify)


def check_fsdp1(check: Callable[[list[Any], list[Any]], None]) -> None:
    """Have `check(parameters, process_groups)` called before FullyShardedDataParallel flattens parameters."""

    def initialise(state: Any, module: Any, *_: Any, **__: Any) -> None:
        ignored = {id(parameter) for parameter in state._ignored_params}
        parameters = [parameter for parameter in module.parameters() if id(parameter) not in ignored]
        # Only sharding over several nodes has the second group; a missing attribute recurses without end here.
        check(parameters, [vars(state)[name] for name in ("process_group", "_inter_node_pg") if name in vars(state)])

    check_before(fsdp1, "_init_param_handle_from_module", initialise)


def check_zero_steps(check: Callable[[list[Any], Any], None]) -> None:
    """Have `check(parameters, process_group)` called before a step of ZeroRedundancyOptimizer."""

    # A hook of all optimizers' steps would be called for those of any model.
    def step(optimizer: Any, *_: Any, **__: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        check(parameters, optimizer.process_group)

    check_before(ZeroRedundancyOptimizer, "step", step)
