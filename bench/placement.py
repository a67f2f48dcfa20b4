"""`make bench-placement`: placements of experts on long made loads, in simulation, into bench/results/.

Long enough for every policy's own period: SmartMoE's is 25 iterations, FlexMoE's 10, Hecate's owners change every 100.
Nothing is timed, so a busy machine gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.gpu.process import ROOT, Process, watch
from bench.provenance import provenance

#: Where results are; what they measure.
FILE = "placement_simulated.json"
MEASURED = ("fusedmoe/placement", "fusedmoe/cli/loads.py")

_ITERATIONS, _SEEDS, _MEMORIES = 220, (0, 1), (2, 4)
_SECONDS = 3600


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.placement", description=__doc__.split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=_ITERATIONS, help=f"of a trace (default: {_ITERATIONS})")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the numbers")
    options = parser.parse_args()
    run, found = provenance(MEASURED) | {"iterations": options.iterations}, dict[str, Any]()
    for memory in _MEMORIES:
        for seed in _SEEDS:
            name = f"m = {memory}, seed {seed}"
            found[name] = simulated(options.iterations, seed, memory)
            rows = found[name]["policies"].items()
            print(name, *(f"{policy} {one['speedup']:.2f}x" for policy, one in rows), sep="  ", flush=True)
            data = {"run": run, "simulations": found}
            (options.results / FILE).write_text(json.dumps(data, indent=1) + "\n")
    return 0


def simulated(iterations: int, seed: int, memory: int) -> dict[str, Any]:
    """What `fusedmoe loads` says of 24 layers of 32 experts on 4 nodes of 4 ranks, without single layers.

    Raises:
        RuntimeError: it failed; its last words.
    """
    flags = {"--iterations": iterations, "--seed": seed, "--memory": memory}
    pairs = (str(part) for flag in flags.items() for part in flag)
    done = watch(Process([sys.executable, "-m", "fusedmoe", "loads", "--json", *pairs]), _SECONDS)
    if done.code != 0:
        raise RuntimeError(f"fusedmoe loads ended with {done.code}\n{done.output}")
    data: dict[str, Any] = json.loads(done.output[done.output.index("{") :])
    data.pop("layer")
    for row in data["policies"].values():
        row.pop("layer_speedups")
    return data


if __name__ == "__main__":
    sys.exit(main())
