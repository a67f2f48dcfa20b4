"""Compare the results of each tile of the grouped products with the definition, in Triton's interpreter.

The interpreter runs a configuration's tiles and steps. It has no warps, stages or registers, and does not run the Gluon
form. `machine_code.py` checks the code of both forms; only a GPU shows that the code computes the right numbers
(`bench.gpu.verify`). bench/tiles.json records the configurations that passed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

# Functions import Triton: interpreting processes set TRITON_INTERPRET first.
if TYPE_CHECKING:
    from fusedmoe.kernels.triton.grouped.configs import Config

FILE = Path(__file__).parents[1] / "tiles.json"

# Names of the configurations that passed, by operation.
Passed = dict[str, list[str]]


def tiles() -> list[tuple[str, Config]]:
    """Return the half-precision configurations of each operation's Triton form, on any generation."""
    import torch

    from fusedmoe.kernels.backend import TABLE_SHARED_BYTES
    from fusedmoe.kernels.triton.grouped.configs import OPERATIONS, candidates

    found = [
        (operation, candidate.config)
        for operation in OPERATIONS
        for table in TABLE_SHARED_BYTES
        for candidate in candidates(operation, torch.bfloat16, table)
    ]
    return [*dict.fromkeys(found)]


def check_tile(operation: str, config: Config) -> str:
    """Return the fault of a configuration's results, or "". Requires an interpreting process."""
    import torch

    from bench.gpu.correctness import check
    from fusedmoe.kernels.triton.grouped.configs import Variant

    activation = "swiglu" if operation in ("up", "dhidden") else ""
    gather, extra = operation not in ("down", "dinput"), operation != "dinput"
    variant = Variant(operation, "float32", "ieee", activation, gather, extra, True, True)
    return check(variant, config, torch.device("cpu"))


def check_all(workers: int | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield operation, configuration and fault of each tile, from `workers` processes (None: one per core)."""
    context, begin = get_context("spawn"), partial(_interpret, os.getpid())
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context, initializer=begin) as pool:
        tasks = {pool.submit(check_tile, *tile): tile for tile in tiles()}
        for task in as_completed(tasks):
            operation, config = tasks[task]
            yield operation, str(config), task.result()


def _interpret(parent: int) -> None:
    from tests.lifetime import end_with

    end_with(parent)
    os.environ["TRITON_INTERPRET"] = "1"


def read() -> dict[str, Passed]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(version: str, right: Mapping[str, list[str]]) -> None:
    record = {**read(), version: dict(right)}
    FILE.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
