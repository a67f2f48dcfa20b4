"""The state of a GPU during a measurement, with a fake NVML."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from bench.gpu.monitor import monitored

GPU = torch.device("cuda", 0)
REASONS = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


def sampled(values: list[Any]) -> Callable[..., Any]:
    """Return a function that returns these values one by one, then the last one."""
    left = iter(values)
    return lambda *_: next(left, values[-1])


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> list[str]:
    called: list[str] = []
    power_cap = pynvml.nvmlClocksThrottleReasonSwPowerCap
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: called.append("init"),
        nvmlShutdown=lambda: called.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=sampled([1980, 1200, 1500]),
        nvmlDeviceGetPowerUsage=lambda handle: 650_000,
        nvmlDeviceGetTemperature=sampled([50, 61, 40]),
        nvmlDeviceGetCurrentClocksThrottleReasons=sampled([0, power_cap, 0]),
        **{name: getattr(pynvml, name) for name in (f"nvmlClocksThrottleReason{reason}" for reason in REASONS)},
    )
    vars(nvml).update(functions)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return called


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_range_of_clocks_and_all_reasons_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reasons = sampled([0, pynvml.nvmlClocksThrottleReasonSwPowerCap, 0])

    def read_reasons(handle: str) -> int:
        read.append(1)
        return int(reasons())

    called = fake_nvml(monkeypatch, nvmlDeviceGetCurrentClocksThrottleReasons=read_reasons)
    with monitored(GPU) as found:
        wait_until(lambda: len(read) >= 3)
        assert found == {}
    expected = {"sm_clock_mhz": [1200, 1980], "power_w": pytest.approx(650.0), "temperature_c": 61}
    assert found == {**expected, "throttled_by": ["power cap"]} and called == ["init", "shutdown"]


def test_missing_nvml_gives_no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("not supported")

    fake_nvml(monkeypatch, nvmlInit=refuse)
    with monitored(GPU) as found:
        pass
    assert found == {}
    called = fake_nvml(monkeypatch, nvmlDeviceGetClockInfo=refuse)
    with monitored(GPU) as found:
        pass
    assert found == {} and called == ["init", "shutdown"]
    with monitored(torch.device("cpu")) as found:
        pass
    assert found == {}
