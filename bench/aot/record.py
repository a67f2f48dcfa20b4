"""bench/launches.json: recorded launches and the resource use of their code, by Triton version."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from bench.aot import layers, standin
from bench.aot.compiling import Compiled
from bench.aot.expected import expected, unwanted
from bench.aot.machine_code import judge
from bench.aot.standin import Launch
from bench.gpu.shapes import SHAPES

FILE = Path(__file__).parents[1] / "launches.json"
COLUMNS = ("registers", "stack", "shared")

# By launch (`Launch.title`), Triton version and target ("sm_90"): the numbers of `COLUMNS`.
Record = dict[str, dict[str, dict[str, list[int]]]]


@cache
def launches(target: int) -> tuple[Launch, ...]:
    """Return all launches of layers of the published shapes on GPUs of a generation."""
    with standin.recording(target) as found:
        for shape in SHAPES:
            layers.run(shape)
    return tuple(found)


def look(launch: Launch, compiled: Any) -> dict[str, Any]:
    return judge(compiled, launch.target, expected(launch), unwanted(launch))


def faults(compiled: Iterable[Compiled]) -> list[str]:
    wrong = ((done.launch, done.error or done.found.get("error", "")) for done in compiled)
    return [f"{launch}: {error}" for launch, error in wrong if error]


def numbers(done: Compiled) -> list[int]:
    return [done.found[column] for column in COLUMNS]


def read() -> Record:
    return json.loads(FILE.read_text())["launches"] if FILE.exists() else {}


def merged(record: Record, version: str, compiled: Iterable[Compiled]) -> Record:
    """Return the record with all current launches compiled by this Triton; other versions keep their data."""
    found: Record = {}
    for done in compiled:
        before = {other: known for other, known in record.get(done.launch.title, {}).items() if other != version}
        entry = found.setdefault(done.launch.title, before)
        entry.setdefault(version, {})[f"sm_{done.launch.target}"] = numbers(done)
    return found


def versions(record: Record) -> list[str]:
    return sorted({version for made in record.values() for version in made})


def write(record: Record) -> None:
    """Write one line per launch and version, so that diffs are readable."""
    lines = []
    for title in sorted(record):
        made = sorted(record[title].items())
        of_versions = (f"      {json.dumps(version)}: {json.dumps(at, sort_keys=True)}" for version, at in made)
        lines.append(f"    {json.dumps(title)}: {{\n" + ",\n".join(of_versions) + "\n    }")
    FILE.write_text(f'{{\n  "columns": {json.dumps(COLUMNS)},\n  "launches": {{\n' + ",\n".join(lines) + "\n  }\n}\n")
