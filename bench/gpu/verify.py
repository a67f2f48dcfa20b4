"""Check every configuration of the grouped products on this GPU: `python -m bench.gpu.verify`, a few minutes.

Each candidate is checked in each variant of `variants`, in a separate process (`apart.py`). Verdicts are written as
available to `configurations_NAME_TIME.json` in the results folder. The run-time tuner only times configurations in
`fusedmoe/kernels/triton/grouped/configs.py`. The last lines of output name verified configurations missing from this
table, and entries that failed. The table is edited manually and cites the file as evidence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.gpu.apart import Case, check_apart
from bench.gpu.device import environment
from bench.gpu.part import write_json
from bench.gpu.results import RESULTS, name_of_gpu
from fusedmoe.kernels.backend import generation
from fusedmoe.kernels.triton.grouped.autotune import all_candidates, gpu_of
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Gpu,
    HopperConfig,
    Key,
    Variant,
    has_bulk_copies,
    is_verified,
    name_of,
)

DTYPES = ("bfloat16", "float16")
# Sizes for which the tuner runs; checks use their own.
_SIZES = {"depth": 4096, "columns": 1024, "experts": 64, "rows": 1024}
# Half of the cores, because other parts compile at the same time.
_AT_ONCE = max(2, (os.cpu_count() or 2) // 2)

# Fault of each configuration by variant and name: "" if correct, None if unknown.
Verdicts = dict[str, dict[str, str | None]]


def variants(dtypes: Sequence[str] = DTYPES, bulk: bool = True) -> Iterator[Variant]:
    """Yield the variants of even sizes.

    Experts with and without a gate, with and without biases, router weights and accumulation. Other sizes and float32
    have one configuration each, so they are not tuned.
    """
    for dtype in dtypes:
        for operation in OPERATIONS:
            for activation in ("swiglu", "gelu") if operation in ("up", "dhidden") else ("",):
                for extra in (False, True) if operation != "dinput" else (False,):
                    gather = operation not in ("down", "dinput")
                    yield Variant(operation, dtype, "ieee", activation, gather, extra, True, bulk)


def cases(gpu: Gpu, dtypes: Sequence[str] = DTYPES) -> list[Case]:
    """Return every candidate in every variant with all programs; a check also runs it with fewer."""
    bulk = has_bulk_copies(generation(gpu.capability, gpu.shared_bytes))
    return [
        Case(variant, config)
        for variant in variants(dtypes, bulk)
        for config in all_candidates(gpu, Key(variant, **_SIZES))
    ]


def note(verdicts: Verdicts, case: Case, fault: str | None) -> None:
    """Record a verdict. For the Gluon form it covers all programs and fewer."""
    found = verdicts.setdefault(str(case.variant), {})
    name = name_of(case.config)
    found[name] = fault
    if isinstance(case.config, HopperConfig):
        found[f"{name} p"] = fault


def compare(gpu: Gpu, checked: Mapping[Case, str | None]) -> list[str]:
    """Return the differences between the table of verified configurations and the verdicts, one per line."""
    lines = []
    for (variant, config), fault in checked.items():
        known = is_verified(gpu, variant, config)
        if known and fault:
            lines.append(f"the table has {name_of(config)} for {variant}, which is wrong: {fault}")
        if not known and fault == "":
            lines.append(f"the table lacks {name_of(config)} for {variant}, which is right")
    return lines


def verify(device: torch.device, folder: Path, dtypes: Sequence[str], at_once: int = _AT_ONCE) -> int:
    """Check all candidates; return the number of faults."""
    gpu, begin = gpu_of(device), datetime.now(UTC)
    document: dict[str, Any] = {
        "schema": 1,
        "when": begin.isoformat(timespec="seconds"),
        **environment(device),
        "shared_bytes": gpu.shared_bytes,
        "verdicts": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"configurations_{name_of_gpu(document)}_{begin:%Y%m%dT%H%M%S}.json"
    todo, checked = cases(gpu, dtypes), {}
    for case, fault in check_apart(todo, device, at_once):
        checked[case] = fault
        note(document["verdicts"], case, fault)
        write_json(file, document)
        word = "UNKNOWN" if fault is None else "WRONG" if fault else "RIGHT"
        print(f"{word}  {case.variant}, {case.config}  {fault or ''}", flush=True)
    wrong, unknown = (sum(map(of, checked.values())) for of in (bool, lambda fault: fault is None))
    print(*compare(gpu, checked), sep="\n")
    print(f"{file.name}: {len(checked)} of {len(todo)} checked, {wrong} wrong, {unknown} unknown", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.verify", description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="for the verdicts (default: bench/results)")
    parser.add_argument("--at-once", type=int, default=_AT_ONCE, help=f"processes (default: {_AT_ONCE})")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("requires a GPU, but PyTorch finds none; `make aot` runs the checks that need none")
    return 1 if verify(torch.device("cuda", 0), given.folder, given.dtype or DTYPES, given.at_once) else 0


if __name__ == "__main__":
    raise SystemExit(main())
