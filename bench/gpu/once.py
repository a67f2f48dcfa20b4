"""Run one kernel of a shape once in its default configuration, for profilers: `python -m bench.gpu.once up 30B-H1024`.

With `--form gluon`, in the first configuration of its Gluon form; `bench.gpu.verify` checks its correctness.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from bench.gpu.case import make_case
from bench.gpu.kernels import grouped_steps
from bench.gpu.rehearsal import TINY
from bench.gpu.shapes import SHAPES


def main() -> None:
    os.environ["FUSEDMOE_AUTOTUNE"] = "0"
    shapes = {shape.name: shape for shape in (*SHAPES, *TINY)}
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.once", description="Run one kernel of a layer once.")
    parser.add_argument("kernel", choices=["up", "down", "dhidden", "dinput", "dW1", "dW2"])
    parser.add_argument("shape", choices=list(shapes), metavar="SHAPE", help=f"one of {', '.join(shapes)}")
    parser.add_argument(
        "--form", choices=["triton", "gluon"], default="triton", help="form of the kernel (default: triton)"
    )
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = make_case(shapes[given.shape], device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    steps = grouped_steps(case, _gluon if given.form == "gluon" else None)
    step = next(step for step in steps if step.name == given.kernel)
    step.run(step.before())
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"once: {given.kernel} at {given.shape}, {step.told()['config']}")


def _gluon(key: Any, launch: Any) -> Any:
    from fusedmoe.kernels.triton.grouped.configs import gluon_candidates, order_by_shape

    found = order_by_shape(gluon_candidates(key.variant, (9, 0)), key.rows, key.depth)
    if not found:
        raise SystemExit(f"{key.variant} has no form in Gluon")
    return found[0]


if __name__ == "__main__":
    main()
