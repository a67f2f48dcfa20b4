"""`python -m bench.aot`: compiles all that layers of the published shapes launch, for GPUs that need not be there.

Checks the code (`machine_code.py`) and writes bench/launches.json for this Triton. Ends with 1 where something is
wrong; nothing is written then.
"""

from __future__ import annotations

import argparse
import sys
import time

import triton

from bench.aot import record
from bench.aot.compiling import WITHOUT_LINES, compile_all
from bench.aot.standin import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.aot", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=int, choices=TARGETS, help="only for one generation; nothing is written")
    parser.add_argument("--workers", type=int, help="processes; one a core if not told")
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
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
