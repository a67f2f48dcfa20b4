"""One kernel of a shape, once, by its default configuration: for profilers. `python -m bench.gpu.once up 30B-H1024`"""

from __future__ import annotations

import os
import sys

import torch

from bench.gpu.case import make_case
from bench.gpu.kernels import grouped_steps
from bench.gpu.rehearsal import TINY
from bench.gpu.shapes import SHAPES


def main(kernel: str, name: str) -> None:
    os.environ["FUSEDMOE_AUTOTUNE"] = "0"
    shape = next(shape for shape in (*SHAPES, *TINY) if shape.name == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = make_case(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    step = next(step for step in grouped_steps(case) if step.name == kernel)
    step.run(step.before())
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"once: {kernel} at {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
