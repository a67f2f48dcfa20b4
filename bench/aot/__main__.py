"""`python -m bench.aot`: compile all kernels that layers of the published shapes launch, without a GPU.

Checks the machine code (`machine_code.py`) and writes bench/launches.json for this Triton version. Then compares the
results of every tile of the grouped products with the definition, in Triton's interpreter (`values.py`), and writes
bench/tiles.json. On a fault, exits with 1 and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time

import triton

from bench.aot import record, values
from bench.aot.compiling import WITHOUT_LINES, compile_all
from bench.aot.standin import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.aot", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--target", type=int, choices=TARGETS, help="compile for one generation only, without writing the record"
    )
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    chosen = parser.parse_args()
    start, done = time.monotonic(), []
    launches = [launch for at in TARGETS if chosen.target in (None, at) for launch in record.launches(at)]
    for one in compile_all(launches, chosen.workers, record.look, WITHOUT_LINES):
        done.append(one)
        if len(done) % 50 == 0:
            print(f"{len(done)} of {len(launches)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    bad = record.faults(done)
    if not bad and chosen.target is None:
        record.write(record.merged(record.read(), triton.__version__, done))
    print(*bad, sep="\n", end="\n" if bad else "")
    seconds = sum(one.seconds for one in done)
    print(
        f"Triton {triton.__version__}: {len(done)} launches compiled, {len(bad)} wrong, {seconds:.0f} s of processes, "
        f"{time.monotonic() - start:.0f} s in all"
    )
    wrong = check_values(chosen.workers) if chosen.target is None else []
    return 1 if bad or wrong else 0


def check_values(workers: int | None) -> list[str]:
    start, wrong = time.monotonic(), []
    right: values.Passed = {}
    for operation, config, fault in values.check_all(workers):
        if fault:
            wrong.append(f"{operation} {config}: {fault}")
        right.setdefault(operation, []).append(config)
    if not wrong:
        values.write(triton.__version__, {operation: sorted(names) for operation, names in sorted(right.items())})
    print(*wrong, sep="\n", end="\n" if wrong else "")
    count = sum(map(len, right.values()))
    print(f"Triton's interpreter: {count} tiles, {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
