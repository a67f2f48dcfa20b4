"""A stand-in for Triton's CUDA driver: launches are noted, not made.

Tensors of device "meta", which have shapes and no memory, stand for those of a GPU. Inside `recording` they say that
they are CUDA's, operators of the library run their real bodies on them instead of their fakes, and the tuner tries
every candidate, as it does on a GPU where a shape is new: so the code that launches is the library's own, down to
Triton's, which specialises arguments and would then compile.

Values do not exist: what reads one on the host (`.item()`, `.tolist()`) raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget

from bench.aot.machine_code import SHARED
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.generation import Capability, generation
from fusedmoe.kernels.triton import experts
from fusedmoe.kernels.triton.grouped.autotune import Record, Tuner, every_candidate
from fusedmoe.kernels.triton.grouped.verified import Gpu

# Multiprocessors of what stands for each generation: A100, H200, B200, RTX PRO 6000.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}
#: Compute capabilities that stand for the generations of GPUs there are kernels for, 90 for sm_90.
TARGETS = tuple(MULTIPROCESSORS)


def table_of(target: int) -> Capability:
    """Return the generation whose tables serve a target."""
    return generation(divmod(target, 10), SHARED[target])


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be compiled for a launch.

    Attributes:
        module, kernel: the function's.
        target: 90 for sm_90.
        data: JSON, what `JITFunction.preload` takes: signature, constants, attributes and options.
    """

    module: str
    kernel: str
    target: int
    data: str

    @property
    def options(self) -> dict[str, Any]:
        """num_warps, num_stages, maxnreg, …, with the ones that are Triton's defaults."""
        return json.loads(self.data)["options"]

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns each parameter's value where that is a constant of the code, else its type; a type ends in ":16"
        where pointer or number is known to be a multiple of 16."""
        data = json.loads(self.data)
        constants = {path[0]: value for path, value in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        aligned = {path[0] for path, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True) if value}
        return {
            name: constants[place] if place in constants else kind + ":16" * (place in aligned)
            for place, (name, kind) in enumerate(data["signature"].items())
        }

    @property
    def told(self) -> dict[str, Any]:
        """`arguments`, and the options that launchers give."""
        options = {name: self.options[name] for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")}
        libraries = sorted(name for name, _ in self.options["extern_libs"] if name != "libdevice")
        return {**self.arguments, **options, "libraries": libraries}

    @property
    def title(self) -> str:
        """Short, and of no other launch for any target: what is constant in the code, and a few digits for the rest."""
        constants = " ".join(f"{name}={value}" for name, value in self.told.items() if name.isupper())
        digits = hashlib.sha256(json.dumps(self.told, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.kernel} {constants} w{self.told['num_warps']} s{self.told['num_stages']} {digits}"

    def __str__(self) -> str:
        return f"{self.title} @ sm_{self.target}"


class Driver:
    """Answers what Triton asks of a driver before anything is loaded.

    `device`: a name, by which Triton remembers what it has compiled: what is taken down must never be found there.
    """

    def __init__(self, target: int, device: str) -> None:
        self._target, self._device = GPUTarget("cuda", target, 32), f"{device} for sm_{target}"

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def driving(target: int, device: str = "compiler") -> Iterator[None]:
    """Triton takes the stand-in for its driver."""
    with patch.object(triton.runtime.driver, "_active", Driver(target, device)):
        yield


@contextmanager
def recording(target: int) -> Iterator[list[Launch]]:
    """Takes down what is launched on tensors of device "meta", each specialisation once, in order.

    Raises:
        ConfigError: under TRITON_INTERPRET=1, where nothing is compiled.
    """
    if INTERPRET:
        raise ConfigError("under TRITON_INTERPRET=1 kernels are interpreted, none is compiled: start without it")
    found: dict[Launch, None] = {}
    launches: list[Launch] = []

    def take_down(fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        launch = Launch(fn.module, fn.name, target, compile["specialization_data"])
        if launch not in found:
            found[launch] = None
            launches.append(launch)
        return True  # Triton compiles nothing then, and launches nothing

    with ExitStack() as stack:
        for place, name, value in _patches(target):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(driving(target, "stand-in"))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", take_down))
        stack.enter_context(_Bodies())
        yield launches


_current = [0]  # the last is what is current, those before what will be again


def current_device() -> int:
    """The index of the one of the GPUs that is current."""
    return _current[-1]


@contextmanager
def _device(device: torch.device | int) -> Iterator[None]:
    """`torch.cuda.device`"""
    _current.append(device if isinstance(device, int) else device.index or 0)
    try:
        yield
    finally:
        _current.pop()


def _patches(target: int) -> list[tuple[Any, str, Any]]:
    """Returns what must be different for tensors of device "meta" to pass for a GPU's."""
    capability = divmod(target, 10)
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=MULTIPROCESSORS[target],
        shared_memory_per_block_optin=SHARED[target],
        L2_cache_size=2**25,
        name=f"stand-in for sm_{target}",
    )

    return [
        (torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta")),
        (torch.Tensor, "get_device", lambda tensor: tensor.device.index or 0),
        (torch.cuda, "device", _device),
        (torch.cuda, "current_device", current_device),
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_name", lambda device=None: properties.name),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (experts, "tuner", lambda device: _tuner(Gpu(capability, SHARED[target], MULTIPROCESSORS[target]))),
    ]


def _tuner(gpu: Gpu) -> Tuner:
    """Runs every candidate, verified or not."""

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        run()
        return lambda: 1.0

    return Tuner(partial(every_candidate, gpu), measure, Record(None), lambda: True)


# What computes an operator has one form for all devices.
_BODY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Bodies(TorchDispatchMode):
    """Operators of the library run as they would on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedmoe":
            return func.redispatch(_BODY, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
