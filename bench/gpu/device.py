"""Provenance of results: GPU and its state, software, commit."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.provenance import git


def has_gpu() -> bool:
    return torch.cuda.is_available()


def environment(device: torch.device) -> dict[str, Any]:
    """Return the provenance; `gpu` is None without a GPU."""
    return {
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "cuda": torch.version.cuda,
            "fusedmoe": package_version("fusedmoe"),
        },
        "commit": git("rev-parse", "HEAD"),
        "changed_files": None if (status := git("status", "--porcelain")) is None else len(status.splitlines()),
    }


def state(device: torch.device) -> dict[str, float]:
    """Return current clocks, power and temperature; empty if nvidia-smi does not report them."""
    if device.type != "cuda":
        return {}
    keys = {
        "clocks.sm": "sm_clock_mhz",
        "clocks.mem": "memory_clock_mhz",
        "power.draw": "power_w",
        "temperature.gpu": "temperature_c",
    }
    values = _nvidia_smi(device, list(keys))
    return {key: float(value) for key, value in zip(keys.values(), values, strict=False) if _is_number(value)}


def state_under_load(device: torch.device) -> dict[str, float]:
    """Return `state` during matrix products: an idle GPU lowers its clocks."""
    if device.type != "cuda":
        return {}
    a = torch.randn((8192, 8192), device=device, dtype=torch.bfloat16)
    c = torch.empty_like(a)
    for _ in range(400):  # about half a second, longer than nvidia-smi takes
        torch.mm(a, a, out=c)
    found = state(device)
    torch.cuda.synchronize()
    return found


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    found = _nvidia_smi(device, ["driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit"])
    keys = ("most_sm_clock_mhz", "most_memory_clock_mhz", "power_limit_w")
    return {
        "name": properties.name,
        "driver": found[0] if found else None,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        **{key: float(value) for key, value in zip(keys, found[1:], strict=False) if _is_number(value)},
    }


def _nvidia_smi(device: torch.device, keys: list[str]) -> list[str]:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = str(device.index or 0) if uuid is None else f"GPU-{uuid}"
    query = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [value.strip() for value in done.stdout.split(",")] if done.returncode == 0 else []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:  # "[N/A]"
        return False
    return True


if __name__ == "__main__":
    place = torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")
    print(json.dumps({**environment(place), **state(place)}))
