"""What the Triton form was measured to take: the results of a GPU in bench/results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.forecast.machine import Gpu
from bench.gpu.ours import NAME
from bench.gpu.results import RESULTS


class Measured(NamedTuple):
    """`seconds` by kernel and shape, `tflops` by pass and shape; `file`: they are of."""

    file: Path
    gpu: str
    seconds: Mapping[tuple[str, str], float]
    tflops: Mapping[tuple[str, str], float]


def measured(gpu: Gpu, folder: Path = RESULTS) -> Measured | None:
    """The last results of such a GPU; None where there are none."""
    files = sorted(folder.glob(f"gpu_*{gpu.name.lower()}*.json"))  # their names end with the time
    if not files:
        return None
    results: dict[str, Any] = json.loads(files[-1].read_text())
    rows = [row for row in results["rows"] if row["variant"] == NAME]
    return Measured(
        files[-1],
        results["gpu"]["name"],
        {(row["name"], row["shape"]): row["measured_ms"] / 1e3 for row in rows if row["kind"] == "kernel"},
        {(row["name"], row["shape"]): row["tflops"] for row in rows if row["kind"] == "pass"},
    )
