"""Stand-in for Triton's CUDA driver that records launches instead of executing them.

Tensors of device "meta", with shapes but without memory, represent GPU tensors. Inside `recording` they report to be
CUDA tensors, library operators run their real implementations instead of fakes, and the tuner tries every candidate, as
on a GPU for a new shape. The launching code is therefore the library's own, down to Triton, which specialises arguments
and would compile next.

There are no values: reading one on the host (`.item()`, `.tolist()`) raises.
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
from fusedmoe.kernels.backend import INTERPRET, Capability, generation
from fusedmoe.kernels.triton import experts
from fusedmoe.kernels.triton.grouped.autotune import Tuner, TuningRecord, all_candidates
from fusedmoe.kernels.triton.grouped.configs import Gpu

# Multiprocessors of the GPU that represents each generation: A100, H200, B200, RTX PRO 6000.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 188}
#: Compute capability that represents each supported generation, 90 for sm_90.
TARGETS = tuple(MULTIPROCESSORS)


def table_of(target: int) -> Capability:
    return generation(divmod(target, 10), SHARED[target])


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be compiled for a launch.

    Attributes:
        module, kernel: of the function.
        target: 90 for sm_90.
        data: JSON as accepted by `JITFunction.preload`: signature, constants, attributes and options.
    """

    module: str
    kernel: str
    target: int
    data: str

    @property
    def options(self) -> dict[str, Any]:
        """Return num_warps, num_stages, maxnreg, …, including Triton's defaults."""
        return json.loads(self.data)["options"]

    @property
    def arguments(self) -> dict[str, Any]:
        """Return each parameter's value if constant, else its type, with ":16" if known to be a multiple of 16."""
        data = json.loads(self.data)
        constants = {path[0]: value for path, value in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        aligned = {path[0] for path, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True) if value}
        return {
            name: constants[place] if place in constants else kind + ":16" * (place in aligned)
            for place, (name, kind) in enumerate(data["signature"].items())
        }

    @property
    def told(self) -> dict[str, Any]:
        options = {name: self.options[name] for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")}
        libraries = sorted(name for name, _ in self.options["extern_libs"] if name != "libdevice")
        return {**self.arguments, **options, "libraries": libraries}

    @property
    def title(self) -> str:
        """Return a short name, unique among launches of all targets: constants of the code and a digest of the rest."""
        constants = " ".join(f"{name}={value}" for name, value in self.told.items() if name.isupper())
        digits = hashlib.sha256(json.dumps(self.told, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.kernel} {constants} w{self.told['num_warps']} s{self.told['num_stages']} {digits}"

    def __str__(self) -> str:
        return f"{self.title} @ sm_{self.target}"


class Driver:
    """Answers Triton's driver queries before anything is loaded.

    `device`: cache key of compiled kernels, distinct from real devices so that recorded kernels are never launched.
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
    with patch.object(triton.runtime.driver, "_active", Driver(target, device)):
        yield


@contextmanager
def recording(target: int) -> Iterator[list[Launch]]:
    """Record launches on tensors of device "meta", each specialisation once, in order.

    Raises:
        ConfigError: under TRITON_INTERPRET=1, where nothing is compiled.
    """
    if INTERPRET:
        raise ConfigError("TRITON_INTERPRET=1 interprets kernels instead of compiling them: unset it")
    found: dict[Launch, None] = {}
    launches: list[Launch] = []

    def take_down(fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        launch = Launch(fn.module, fn.name, target, compile["specialization_data"])
        if launch not in found:
            found[launch] = None
            launches.append(launch)
        return True  # Triton then neither compiles nor launches

    with ExitStack() as stack:
        for place, name, value in _patches(target):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(driving(target, "stand-in"))
        stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", take_down))
        stack.enter_context(_Bodies())
        yield launches


_current = [0]  # stack; the last entry is current


def current_device() -> int:
    return _current[-1]


@contextmanager
def _device(device: torch.device | int) -> Iterator[None]:
    _current.append(device if isinstance(device, int) else device.index or 0)
    try:
        yield
    finally:
        _current.pop()


def _patches(target: int) -> list[tuple[Any, str, Any]]:
    """Return the patches that make tensors of device "meta" pass for GPU tensors."""
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
    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        run()
        return lambda: 1.0

    return Tuner(partial(all_candidates, gpu), measure, TuningRecord(None), lambda: True)


# Composite operators have one implementation for all devices.
_BODY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Bodies(TorchDispatchMode):
    """Mode that runs library operators as on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedmoe":
            return func.redispatch(_BODY, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
