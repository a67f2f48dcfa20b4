"""`interpret`: a kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon_interpreter.copies import Descriptor
from tests.gluon_interpreter.faults import KernelFault
from tests.gluon_interpreter.functions import Functions
from tests.gluon_interpreter.language import Language
from tests.gluon_interpreter.schedule import EventOrder
from tests.gluon_interpreter.values import Pointer

_NOTHING: Mapping[Any, Callable[[Any], Any]] = MappingProxyType({})


def interpret(
    kernel: Any,
    programs: int,
    *arguments: Any,
    seed: int,
    changed: Mapping[Any, Callable[[Any], Any]] = _NOTHING,
    **keywords: Any,
) -> None:
    """Run a Gluon kernel on CPU tensors, which it writes as on a GPU.

    Args:
        kernel: a `gluon.jit` function.
        programs: the size of the one-dimensional grid. Programs run one after another.
        arguments: the kernel's arguments, and keywords; tensors are contiguous.
        seed: of the order of events.
        changed: a function of the kernel or of Gluon -> a wrapper that takes the function to call and returns its
            replacement, to plant faults.

    Raises:
        KernelFault: the kernel may go wrong on a GPU.
        NotInterpreted: the kernel uses an unsupported part of Gluon.
    """
    random = Random(seed)
    given = [_argument(argument) for argument in arguments]
    named = {name: _argument(argument) for name, argument in keywords.items()}
    for program in range(programs):
        schedule = EventOrder(random)
        functions = Functions(Language(schedule, program, programs).functions, changed)
        try:
            functions.function(kernel)(*given, **named)
            if schedule.late:
                raise KernelFault(f"ends while {schedule.late[0].what} is under way")
        except KernelFault as fault:
            schedule.tell(fault)
            raise


def _argument(argument: Any) -> Any:
    """Convert an argument to its form inside the kernel."""
    if isinstance(argument, Tensor):
        if not argument.is_contiguous():
            raise ValueError("only contiguous tensors have a plain pointer")
        return Pointer(argument, torch.tensor(0))
    if isinstance(argument, TensorDescriptor):
        return Descriptor(argument)
    return argument
