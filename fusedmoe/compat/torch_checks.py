"""Checks around calls of PyTorch's DistributedDataParallel and model averagers. Checked against 2.11 to 2.15."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.compat import require_names, require_parameters
from fusedmoe.compat.torch import CHECKED

_VERSIONS = ("torch", torch.__version__, CHECKED)

require_names(*_VERSIONS, averaging, "average_parameters")


def check_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Call `check` with the arguments of each call of a PyTorch function, before the function runs.

    Not effective for callers that imported the function by name earlier.

    Args:
        owner: module or class in which users look the function up.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, checked)


def install_ddp_check(check: Callable[[DistributedDataParallel, list[nn.Parameter]], None]) -> None:
    """Call `check(wrapper, parameters)` after DistributedDataParallel's constructor, with the reduced parameters."""
    original_init, delayed_name = DistributedDataParallel.__init__, "delay_all_reduce_named_params"
    require_parameters(*_VERSIONS, original_init, "self", "module", keywords=[delayed_name])
    signature = inspect.signature(original_init)

    @functools.wraps(original_init)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        delayed = given.arguments.get(delayed_name)
        if delayed is not None:  # may be an iterator
            given.arguments[delayed_name] = delayed = list(delayed)
        original_init(*given.args, **given.kwargs)
        wrapper = given.arguments["self"]
        # PyTorch also ignores the delayed parameters, and reduces them later in the backward pass.
        named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
        reduced = [parameter for name, parameter in named if name not in ignored]
        check(wrapper, reduced + [parameter for _, parameter in delayed or ()])

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]


def install_average_check(check: Callable[..., None]) -> None:
    """Call `check(parameters, process_group)` before parameters are averaged over ranks.

    All of PyTorch's averagers (periodic, hierarchical, post-local SGD) use this one function.
    """

    def with_list(parameters: Any, process_group: Any) -> Any:
        parameters = list(parameters)
        check(parameters, process_group)
        return average(iter(parameters), process_group)

    average = averaging.average_parameters
    require_parameters(*_VERSIONS, average, "params", "process_group")
    averaging.average_parameters = functools.wraps(average)(with_list)  # type: ignore[assignment]
