"""Host time of a layer's step at sizes small enough to hide other costs, interleaved with another checkout.

    python -m bench.host_time                       # this checkout
    python -m bench.host_time --against ../other    # both, in alternating rounds of one run

Rows: one rank; two ranks without a schedule; two ranks with plans of 1, 2 and 4 chunks in each pass. Values are
microseconds of one forward and backward, the minimum over rounds of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = ("one rank", "two ranks", "1 chunk", "2 chunks", "4 chunks")
_STEPS, _WARM = 200, 20


def step_us(rank: int, world: int, chunks: int) -> float:
    """Return the median of a few hundred steps on one rank. `chunks`: of the plan, 0 for no schedule."""
    import torch

    import fusedmoe

    torch.manual_seed(0)
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else fusedmoe.Topology()
    schedule: Any = fusedmoe.Schedule("fsmoe", degrees=(chunks, chunks)) if chunks else "off"
    gate, experts = fusedmoe.gates.TopK(experts=8, k=2), fusedmoe.experts.SwiGLU(32)
    layer = fusedmoe.MoELayer(16, gate, experts, topology=topology, schedule=schedule)
    times = []
    for _ in range(_WARM + _STEPS):
        x = torch.randn(8, 16, requires_grad=True)
        begun = time.perf_counter()
        (layer(x).sum() + layer.aux_loss).backward()
        times.append(time.perf_counter() - begun)
    topology.close()
    return statistics.median(times[_WARM:]) * 1e6


def measure() -> dict[str, float]:
    import torch

    from tests.cluster import Cluster

    torch.set_num_threads(1)
    cluster, us = Cluster(), {"one rank": step_us(0, 1, 0)}
    for name, chunks in zip(SETTINGS[1:], (0, 1, 2, 4), strict=True):
        us[name] = max(cluster.run(2, step_us, chunks))
    cluster.close()
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure()))
        return
    own = Path(__file__).parents[1]
    checkouts = [own] if given.against is None else [own, given.against.resolve()]
    best: dict[Path, dict[str, float]] = {checkout: {} for checkout in checkouts}
    for _ in range(given.rounds):
        for checkout in checkouts:  # runs this script with the other checkout's library
            env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(Path(__file__)), "--here"]
            output = subprocess.run(command, env=env, cwd=checkout, check=True, capture_output=True, text=True).stdout
            for name, us in json.loads(output.splitlines()[-1]).items():
                best[checkout][name] = min(us, best[checkout].get(name, us))
    for name in SETTINGS:
        print(f"{name:12}" + "".join(f"{best[checkout][name]:10.0f} µs" for checkout in checkouts))


if __name__ == "__main__":
    main()
