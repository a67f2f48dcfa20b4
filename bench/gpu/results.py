"""Results file of a run; `document` defines its schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.costs import Cost
from bench.gpu.limits import Ceilings, highest, limit_s
from bench.gpu.part import write_json
from bench.gpu.shapes import SHAPES, Shape
from bench.gpu.spool import Record, Spool
from bench.gpu.suite import Row

RESULTS = Path(__file__).parents[1] / "results"
SCHEMA = 1


def document(spool: Spool, checks: Sequence[Record], shapes: Sequence[Shape] = SHAPES) -> dict[str, Any]:
    """Return the contents of the results file.

    Every row has limit_ms, measured_ms (median), fraction = limit / measured, and useful TFLOP/s. The limit uses the
    highest measured ceilings; `ceilings` lists all.
    """
    environment = spool.of("environment")[0]
    measured = [_without(record, "event") for record in spool.of("ceilings")]
    limit = highest(Ceilings(record["flops_per_s"], record["bytes_per_s"]) for record in measured)
    return {
        "schema": SCHEMA,
        "when": datetime.fromtimestamp(environment["time"], UTC).isoformat(timespec="seconds"),
        **_without(environment, "event", "time"),
        "checks": list(checks),
        "ceilings": measured,
        "limit": limit._asdict(),
        "shapes": [asdict(shape) for shape in shapes],
        "rows": [complete(_without(row, "event", "time"), limit) for row in spool.of("row")],
        "skipped": [_without(record, "event", "time") for record in spool.of("skipped")],
    }


def complete(row: Row, ceilings: Ceilings) -> Row:
    limit_ms = 1e3 * limit_s((Cost(*part) for part in row["parts"]), ceilings)
    return row | {
        "limit_ms": limit_ms,
        "fraction": limit_ms / row["measured_ms"],
        "tflops": row["flops"] / row["measured_ms"] / 1e9,
    }


def save(found: dict[str, Any], folder: Path) -> Path:
    """Write the results under the name of the GPU and the start time, replacing an existing file.

    Raises:
        ValueError: results without a GPU for the folder of real results.
    """
    if found["gpu"] is None and folder.resolve() == RESULTS.resolve():
        raise ValueError(f"no GPU was measured: such results do not belong in {RESULTS}")
    when = re.sub(r"[^0-9T]", "", found["when"].split("+")[0])
    path = folder / f"gpu_{name_of_gpu(found)}_{when}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return path


def name_of_gpu(found: dict[str, Any]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", (found["gpu"] or {"name": "none"})["name"].lower()).strip("-")


def _without(record: Record, *keys: str) -> Record:
    return {key: value for key, value in record.items() if key not in keys}
