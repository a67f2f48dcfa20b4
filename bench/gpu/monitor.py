"""State of a GPU during a measurement, sampled by NVML: clocks, power, temperature, and reasons for lower clocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_INTERVAL_S = 0.05
# NVML's reasons for clocks below the maximum, apart from idleness and applications' own settings.
_THROTTLING = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "thermal slowdown (software)",
    "HwThermalSlowdown": "thermal slowdown (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}


@contextmanager
def monitored(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a dict that is filled at the end; it stays empty without NVML.

    Fields: sm_clock_mhz, [lowest, highest]; power_w, mean; temperature_c, highest; throttled_by, the reasons seen.
    """
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield found
        return
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        samples: list[tuple[int, float, int, int]] = []
        finished = threading.Event()

        def sample() -> None:
            while True:
                with suppress(pynvml.NVMLError):
                    samples.append(
                        (
                            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                            1e-3 * pynvml.nvmlDeviceGetPowerUsage(handle),
                            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                        )
                    )
                if finished.wait(_INTERVAL_S):
                    return

        sampler = threading.Thread(target=sample, name="bench-nvml", daemon=True)
        sampler.start()
        try:
            yield found
        finally:
            finished.set()
            sampler.join()
        if samples:
            found.update(_summary(samples, pynvml))
    finally:
        pynvml.nvmlShutdown()


def _summary(samples: list[tuple[int, float, int, int]], nvml: Any) -> dict[str, Any]:
    clocks, powers, temperatures, masks = zip(*samples, strict=True)
    seen = 0
    for mask in masks:
        seen |= mask
    reasons = [text for name, text in _THROTTLING.items() if seen & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)]
    return {
        "sm_clock_mhz": [min(clocks), max(clocks)],
        "power_w": sum(powers) / len(powers),
        "temperature_c": max(temperatures),
        "throttled_by": reasons,
    }
