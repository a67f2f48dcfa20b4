"""Measures of a step besides its time: the GPU's energy, and the most memory (FlowMoE, Table 6).

Energy is that of the whole GPU by its own counter, what it takes while idle included. Memory on a GPU is what PyTorch
has allocated; on a CPU it is what is resident, which the kernel keeps the highest value of.
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
    """`peak_bytes`: above what was there before the step. `energy_j`: joules of one step. None where it cannot be told;
    `missing` says why."""

    peak_bytes: int | None
    energy_j: float | None
    missing: str = ""


def measure_use(step: Step, device: torch.device, seconds: float = 1.0) -> Use:
    """Runs the step once, so that what is made only once is there; then again, and again for energy.

    `seconds`: how long energy is measured for; the counters of GPUs go on about ten times a second.
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
    """The most memory during a step, above what was there before; None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _give_back()
    try:
        _CLEAR_REFS.write_text(_CLEAR_PEAK)
        before = _status_bytes("VmRSS")
        step()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, LookupError):  # not Linux, or not allowed
        return None


def page_faults(step: Step) -> int:
    """Pages that the system gives this process anew in one step, the second."""
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def energy_j(step: Step, device: torch.device, read_j: Callable[[], float], seconds: float) -> float | None:
    """Joules of a step: over at least so many seconds, from one change of the counter to another. None where it stands
    still for three times as long."""
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
    """Reads the joules that the device has taken so far; None, and why, where nothing counts them."""
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
    except (pynvml.NVMLError, AttributeError) as error:  # a PyTorch without uuid, a GPU without a counter
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


def _give_back() -> None:
    """Memory that was freed and that the C library keeps would hide what a step asks for."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
