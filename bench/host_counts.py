"""Count host-side torch operations and kernel launches of one-sided dispatch over two ranks.

    python -m bench.host_counts          # print
    python -m bench.host_counts --keep   # and add to bench/results/host.json

Kernels run in Triton's interpreter, whose own operations are excluded. Counted are a rank's passes in two chunks,
including token ordering in forward and the gradient reduction between the ranks in backward. On a CPU the host reads
sizes that it only bounds on a GPU, so some counts are lower there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bench.gpu.case import make_case
from bench.gpu.ranks import puts_layer
from bench.gpu.results import RESULTS
from bench.gpu.shapes import Shape
from bench.provenance import provenance
from fusedmoe.comm.one_sided.receive_buffers import SLOTS

_RANKS = 2


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def count(call: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Return the torch operations and kernel launches of a call, by name."""
    from triton.runtime.interpreter import GridExecutor

    launches: Counter[str] = Counter()
    run = GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches[executor.fn.__name__] += 1
        with _disable_current_modes():
            return run(executor, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", counted), _Operations() as operations:
        call()
    return operations.found, launches


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_counts", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--keep", action="store_true", help="add the counts to bench/results/host.json")
    keep = parser.parse_args().keep
    case = make_case(Shape("host", 64, 32, 16, 8, 2, spread=True), torch.device("cpu"), torch.float32)
    layer = puts_layer(case, _RANKS)
    for _ in range(SLOTS):  # warm-up: allocate buffers and per-slot state
        y_SM = layer.forward()
    row: dict[str, float] = {}
    for name, prefix, call in (
        ("forward", "", layer.forward),
        ("backward", "backward_", lambda: layer.backward(y_SM, case.dy_SM)),
    ):
        operations, launches = count(call)
        found = {"operations": sum(operations.values()) / _RANKS, "launches": sum(launches.values()) / _RANKS}
        row |= {prefix + what: number for what, number in found.items()}
        print(
            f"a rank's {name} by puts, two chunks: {found['operations']:g} operations, {found['launches']:g} launches"
        )
        for one, number in (*operations.most_common(12), *launches.most_common()):
            print(f"  {number / _RANKS:6g}  {one}")
    if keep:
        file = RESULTS / "host.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps([*rows, provenance(("fusedmoe",)) | row], indent=1) + "\n")


if __name__ == "__main__":
    main()
