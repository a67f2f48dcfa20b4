"""Two emulated nodes: FlowMoE's components and Lancet's halves, measured and compared with their predictions.

Runs `bench.cluster`: network namespaces joined by a slow link, which requires root. Communication is real, computation
a timed wait.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cluster.network import missing
from bench.gpu.process import Process, watch
from bench.reproduce.flowmoe import TABLE_5
from bench.reproduce.table import Part, Progress, Row, Table

_TEXT = (
    "Two nodes of this machine with two ranks each, joined by 100 Mbit/s; four blocks. Communication is real; "
    "computation is a timed wait, because two cores cannot compute for four ranks. Medians of {rounds} rounds in turn; "
    "the prediction is made before, from the profile of the same machine."
)

FLOWMOE = Table(
    "flowmoe-table5-testbed",
    "FlowMoE part by part, speed-up over one thing after the other",
    "FlowMoE",
    "Table 5",
    "measured",
    ("measured", "predicted"),
    text=_TEXT,
    reasons=(
        "Another machine, other sizes: there one layer of M = H = 8192 on 16 GPUs, here four of M = 1024 and H = 2048 "
        "on four ranks, where attention computes half as long as experts.",
        "Gradients of a layer are 448 KiB here; buckets of 32 KiB stand for the paper's of 1 MB.",
    ),
)
LANCET = Table(
    "lancet-testbed",
    "Lancet's halves: exposed communication less than without overlap",
    "Lancet",
    "§7.1, Figs. 13 and 16",
    "measured",
    ("measured", "predicted"),
    text=_TEXT,
    reasons=(
        "Another machine and model. Two links are in use here, and a layer's all-reduce is small; the paper's figure "
        "is the largest of its models.",
    ),
)
_ROWS = {
    "experts (Tutel)": "experts",
    "experts, attention": "experts, attention",
    "experts, all-reduce, S_p = 1 MB": "experts, all-reduce",
    "experts, all-reduce, tuned S_p": "experts, all-reduce, S_p",
    "FlowMoE": "flowmoe",
}
_SETTING, _PART, _ROUNDS, _SECONDS = "blocks", "steps", 3, 600
_TAKES_S = 210


def testbed(progress: Progress) -> list[Table]:
    """Return both tables of one run, without figures if it is impossible."""
    lacking = missing()
    if lacking is not None:
        return [replace(head, skipped=f"not run: {lacking}") for head in (FLOWMOE, LANCET)]
    with tempfile.TemporaryDirectory() as folder:
        wanted = ("--settings", f"{_SETTING}:{_PART}", "--rounds", str(_ROUNDS))
        places = ("--results", folder, "--pictures", folder)
        process = Process([sys.executable, "-m", "bench.cluster", *wanted, *places])
        began = time.monotonic()

        def show() -> None:
            progress(min(time.monotonic() - began, 0.99 * _TAKES_S), _TAKES_S)

        ended = watch(process, _SECONDS, sign=show)
        file = Path(folder) / f"{_SETTING}.json"
        if ended.code != 0 or not file.exists():
            words = ended.why or " ".join(ended.output.split())[-300:]
            return [replace(head, skipped=f"not run: bench.cluster failed: {words}") for head in (FLOWMOE, LANCET)]
        rows = json.loads(file.read_text())["settings"][_SETTING][_PART]["rows"]
    return from_rows(rows, _ROUNDS)


def from_rows(rows: Mapping[str, Mapping[str, Any]], rounds: int) -> list[Table]:
    """Return both tables from the rows of the benchmark."""
    rows = {name: {**rows[row["same_as"]], **row} if "same_as" in row else row for name, row in rows.items()}
    base = rows["sequential"]
    parts = tuple(
        Row(
            what,
            TABLE_5[what],
            (base["median_s"] / rows[name]["median_s"], base["predicted_s"] / rows[name]["predicted_s"]),
            "{:.2f}×",
            (1, 2) if "all-reduce" in what else (1,),
        )
        for what, name in _ROWS.items()
    )

    def less(name: str, over: str) -> tuple[float, float]:
        one, other = rows[name], rows[over]
        return (
            1 - one["exposed_s"] / other["exposed_s"],
            1 - one["predicted_exposed_s"] / other["predicted_exposed_s"],
        )

    halves = (
        Row("Lancet", "83% (V100), 69% (A100)", less("lancet", "sequential"), "{:.0%}", (1,)),
        Row("… weight gradients alone", None, less("lancet, weights", "sequential"), "{:.0%}"),
        Row("… micro-batches alone", None, less("lancet, ranges", "sequential"), "{:.0%}"),
        Row(
            "Lancet, less than experts in chunks (Tutel)",
            "77% (V100), 66% (A100)",
            less("lancet", "experts"),
            "{:.0%}",
            (1,),
        ),
    )
    text = _TEXT.format(rounds=rounds)
    return [replace(FLOWMOE, rows=parts, text=text), replace(LANCET, rows=halves, text=text)]


PARTS = (Part((FLOWMOE, LANCET), _TAKES_S, testbed),)
