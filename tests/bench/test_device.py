"""Parsing the output of a fake nvidia-smi."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu.device import environment, state

GPU = torch.device("cuda", 0)


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    properties = {"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 150 * 10**9, "uuid": "ab-cd"}
    found = SimpleNamespace(**properties, multi_processor_count=132, L2_cache_size=60 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_environment_reports_gpu_properties(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(monkeypatch, tmp_path, '[ "$1" = --id=GPU-ab-cd ] && echo "580.1, 1980, [N/A], 700.00"')
    assert environment(GPU)["gpu"] == {
        "name": "NVIDIA H200",
        "driver": "580.1",
        "capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150 * 10**9,
        "l2_bytes": 60 * 2**20,
        "most_sm_clock_mhz": 1980.0,
        "power_limit_w": 700.0,
    }


def test_gpu_state_is_parsed_or_empty_on_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(monkeypatch, tmp_path, 'echo "1755, 3201, 512.25, 61"')
    assert state(GPU) == {
        "sm_clock_mhz": 1755.0,
        "memory_clock_mhz": 3201.0,
        "power_w": 512.25,
        "temperature_c": 61.0,
    }
    fake_nvidia_smi(monkeypatch, tmp_path, "echo unknown field >&2; exit 2")
    assert state(GPU) == {} and environment(GPU)["gpu"]["driver"] is None


def test_cpu_has_no_gpu_environment_or_state() -> None:
    assert environment(torch.device("cpu"))["gpu"] is None and state(torch.device("cpu")) == {}
