"""Conditions of a record: commit, software, machine and load."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from bench.gpu.device import environment


def conditions() -> dict[str, Any]:
    """Return the conditions in plain types; call before the work begins."""
    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.release()}
    return {
        **environment(torch.device("cpu")),
        "machine": machine,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }
