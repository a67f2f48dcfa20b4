"""Prints how long the kernels of a layer should take on Hopper, beside what was measured and what others published."""

from __future__ import annotations

import argparse

from bench.forecast.machine import GPUS
from bench.forecast.measured import measured
from bench.forecast.tables import candidate_table, check_table, pass_table
from bench.gpu.shapes import SHAPES

_EPILOG = """
The model. A product is cut into tiles, which the multiprocessors take in turn: what counts are the tiles of the one
that has most. A tile takes its steps (a step multiplies 64 of the depth), each as long as the tensor cores need or as
the L2 cache takes to bring its operands, and what comes at its end. Nothing is faster than the memory.

What is measured and what is not:
  - The Triton form's few constants are fitted to an H100's results: "--check" shows how well. On an H200 it is a
    forecast: only the memory is taken to be faster.
  - The Gluon form has been interpreted and compiled, and has never run. Its tensor cores are taken to be as fast as
    in a large product, and its tiles to end as bench/forecast/model.py counts. Trust the order of the candidates, and
    what is bound by memory, more than the numbers.
  - SonicMoE's numbers are its authors', of an H100.

The tuner measures: what it tries first, and in which order, is as forecast here.

examples:
  python -m bench.forecast                      both GPUs, all shapes
  python -m bench.forecast --check              the Triton form, kernel by kernel, beside what was measured
  python -m bench.forecast --gpu h200 --shape Qwen3-30B
"""


def main() -> int:
    options = _parser().parse_args()
    shapes = [shape for shape in SHAPES if options.shape in (None, shape.name)]
    texts = []
    for gpu in (GPUS[name] for name in GPUS if options.gpu in (None, name)):
        found = measured(gpu)
        if options.check:
            texts.append(
                f"no results of an {gpu.name} in bench/results: make bench-gpu measures one"
                if found is None
                else check_table(shapes, gpu, found)
            )
        else:
            texts += [candidate_table(shapes, gpu, found), pass_table(shapes, gpu, found)]
    print("\n\n".join(texts))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.forecast",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=GPUS, help="only this one (default: both)")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], help="only this one (default: all)")
    parser.add_argument("--check", action="store_true", help="the Triton form beside what was measured")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
