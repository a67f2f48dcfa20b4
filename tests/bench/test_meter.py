from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import meter
from bench.meter import energy_counter, energy_j, peak_bytes
from tests.marks import slowly

CPU = torch.device("cpu")
MIB = 2**20

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is Linux'")


@linux
@pytest.mark.parametrize("pieces", [4000, *slowly(1)])
def test_peak_bytes_equals_memory_live_within_step(pieces: int) -> None:
    """Also where memory was used and freed earlier, in small blocks that the C library retains."""

    def step(mib: int) -> None:
        held = [torch.ones(mib * MIB // 4 // pieces) for _ in range(pieces)]
        del held[: pieces // 2]
        again = [torch.ones(mib * MIB // 8 // pieces) for _ in range(pieces)]  # half as much: no new peak
        del held, again

    step(100)
    for mib in (32, 80):
        found = peak_bytes(lambda mib=mib: step(mib), CPU)  # type: ignore[misc]
        assert found is not None and 0.9 * mib * MIB < found < (1.6 * mib + 16) * MIB
    none = peak_bytes(lambda: None, CPU)
    assert none is not None and none < 8 * MIB


class FakeGpu:
    """A fake energy counter that updates every 0.1 s, of a GPU drawing 100 W, on its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(self) -> None:
        self.now += 0.03

    def joules(self) -> float:
        return 10.0 * int(self.now / 0.1)


def test_energy_is_measured_between_counter_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    found = energy_j(gpu.step, CPU, gpu.joules, 1.0)
    assert found == pytest.approx(100 * 0.03, rel=0.05) and gpu.now < 1.3
    assert energy_j(gpu.step, CPU, lambda: 5.0, 1.0) is None
    start = gpu.now
    assert energy_j(gpu.step, CPU, lambda: float(gpu.now > start + 0.5), 1.0) is None  # the counter stops


class FakeNvml(SimpleNamespace):
    NVMLError = type("NVMLError", (Exception,), {})


def test_energy_counter_reads_nvml_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    nvml = FakeNvml(
        nvmlInit=lambda: called.append("init"),
        nvmlShutdown=lambda: called.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 12_345 if handle == "GPU-abc" else 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    gpu = torch.device("cuda", 0)
    with energy_counter(gpu) as (read_j, why):
        assert read_j is not None and read_j() == pytest.approx(12.345) and why == ""
    assert called == ["init", "shutdown"]

    def refuse(*given: Any) -> None:
        raise nvml.NVMLError("not supported")

    for name, calls in (("nvmlDeviceGetTotalEnergyConsumption", ["init", "shutdown"]), ("nvmlInit", [])):
        called.clear()
        monkeypatch.setattr(nvml, name, refuse)
        with energy_counter(gpu) as (read_j, why):
            assert read_j is None and why == "NVML: not supported"
        assert called == calls
