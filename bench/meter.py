"""Energy and peak memory of a step (FlowMoE, Table 6).

Energy is read from the GPU's counter for the whole device, including idle power. Memory on a GPU is what PyTorch
allocated; on a CPU, the peak resident set size reported by the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

Step = Callable[[], object]

_STATUS, _CLEAR_REFS, _CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"


class Use(NamedTuple):
    """Resource use of a step.

    `peak_bytes`: above the memory in use before the step. `energy_j`: joules per step. None if unavailable, for the
    reasons in `missing`.
    """

    peak_bytes: int | None
    energy_j: float | None
    missing: str = ""


def measure_use(step: Step, device: torch.device, seconds: float = 1.0) -> Use:
    """Run a warm-up step, then measure memory and energy of further steps.

    `seconds`: duration of the energy measurement; GPU counters update about ten times per second.
    """
    step()
    peak = peak_bytes(step, device)
    missing = [] if peak is not None else ["this system does not tell the peak of resident memory"]
    with energy_counter(device) as (read_j, why):
        energy = None if read_j is None else energy_j(step, device, read_j, seconds)
    if energy is None:
        missing.append(why or "the GPU's energy counter stands still")
    return Use(peak, energy, "; ".join(missing))


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """Return the peak memory of a step above the memory in use before it, or None if unavailable."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _trim_heap()
    try:
        _CLEAR_REFS.write_text(_CLEAR_PEAK)
        before = _status_bytes("VmRSS")
        step()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, LookupError):  # not Linux, or no permission
        return None


def page_faults(step: Step) -> int:
    """Return the number of page faults in a second run of the step."""
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def energy_j(step: Step, device: torch.device, read_j: Callable[[], float], seconds: float) -> float | None:
    """Return the joules per step, measured for at least `seconds` between two updates of the counter.

    None if the counter does not change for three times as long.
    """
    began = time.monotonic()
    first, at, steps, start = read_j(), began, 0, -1.0
    while at - began < 3 * seconds or start >= 0:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found, at = read_j(), time.monotonic()
        steps += start >= 0
        if found != first and start < 0:
            first, start = found, at
        elif found != first and at - start >= seconds:
            return (found - first) / steps
        elif start >= 0 and at - start >= 3 * seconds:
            return None
    return None


@contextmanager
def energy_counter(device: torch.device) -> Iterator[tuple[Callable[[], float] | None, str]]:
    """Yield a function that reads the device's total energy in joules, or None and the reason."""
    if device.type != "cuda":
        yield None, "no GPU, whose counter would tell the energy"
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, f"NVML: {error}"
        return
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (pynvml.NVMLError, AttributeError) as error:  # an old PyTorch without uuid, or a GPU without a counter
        yield None, f"NVML: {error}"
    else:
        yield lambda: 1e-3 * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), ""
    finally:
        pynvml.nvmlShutdown()


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def _trim_heap() -> None:
    """Return memory cached by the C library to the system, so that it does not hide a step's allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
