"""`make bench-placement`: simulate expert placements on long synthetic load traces; results in bench/results/.

Traces cover every policy's period: for SmartMoE and FlexMoE the fastest period of 5 to 100 iterations, stated in the
results; Hecate's owners change every 100. Only exact balance is timed; all other numbers are independent of the
machine's load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.gpu.process import ROOT, Process, watch
from bench.placement.baselines import CLUSTER_A
from bench.placement.exact import price_gap
from bench.placement.made_loads import make_loads
from bench.provenance import provenance
from fusedmoe.placement.balance import balance, cheapest_balance
from fusedmoe.placement.expert_map import balance_experts
from fusedmoe.placement.hecate import materialise
from fusedmoe.placement.placement import NodeLayout, Placement

#: Results file and measured code.
FILE = "placement_simulated.json"
MEASURED = ("fusedmoe/placement", "bench/placement")

_ITERATIONS, _SEEDS, _MEMORIES = 220, (0, 1), (2, 4)
_SECONDS = 3600
# Number of small layers that are compared with the optimum.
_GAPS = 100
# Exact balance: ranks in nodes of 8, experts, and calls per median.
_RANKS, _EXPERTS, _CALLS = (8, 64, 512), (64, 256), 9


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.placement", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--iterations", type=int, default=_ITERATIONS, help=f"iterations per trace (default: {_ITERATIONS})"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench/results", help="results folder (default: bench/results)"
    )
    parser.add_argument("--balancer", action="store_true", help="time exact balance only; other results are kept")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    file, run = options.results / FILE, provenance(MEASURED)
    exact: dict[str, Any] = {
        f"{ranks} ranks, {experts} experts": balanced(ranks, experts) for ranks in _RANKS for experts in _EXPERTS
    }
    for name, cases in exact.items():
        print(name, *(f"{case} {one['balance_s'] * 1e3:.1f} ms" for case, one in cases.items()), sep="  ", flush=True)
    if options.balancer:
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | {"exact_run": run, "exact": exact}, indent=1) + "\n")
        return 0
    found = dict[str, Any]()
    gaps = [price_gap(seed) for seed in range(_GAPS)]
    gap = {"cases": _GAPS, "mean": statistics.mean(gaps), "median": statistics.median(gaps), "most": max(gaps)}
    print("over the best", *(f"{key} {value:.3g}" for key, value in gap.items()), sep="  ", flush=True)
    for memory in _MEMORIES:
        for seed in _SEEDS:
            name = f"m = {memory}, seed {seed}"
            found[name] = simulated(options.iterations, seed, memory)
            rows = found[name]["policies"].items()
            print(name, *(f"{policy} {one['speedup']:.2f}x" for policy, one in rows), sep="  ", flush=True)
            data = {"run": run | {"iterations": options.iterations}, "simulations": found, "gap": gap}
            file.write_text(json.dumps(data | {"exact_run": run, "exact": exact}, indent=1) + "\n")
    return 0


def simulated(iterations: int, seed: int, memory: int) -> dict[str, Any]:
    """Return the result of `bench.placement.loads` for 24 layers of 32 experts on 4 nodes of 4, without single layers.

    Raises:
        RuntimeError: it failed; contains the end of its output.
    """
    flags = {"--iterations": iterations, "--seed": seed, "--memory": memory}
    pairs = (str(part) for flag in flags.items() for part in flag)
    done = watch(Process([sys.executable, "-m", "bench.placement.loads", "--json", *pairs]), _SECONDS)
    if done.code != 0:
        raise RuntimeError(f"bench.placement.loads ended with {done.code}\n{done.output}")
    data: dict[str, Any] = json.loads(done.output[done.output.index("{") :])
    data.pop("layer")
    for row in data["policies"].values():
        row.pop("layer_speedups")
    return data


def balanced(ranks: int, experts: int) -> dict[str, Any]:
    """Time exact balance of synthetic loads, without replicas and with Algorithm 1's for the previous iteration."""
    node_layout, m = NodeLayout(ranks, 8), 2
    trace = make_loads(2, 1, ranks, experts)
    even, tokens_WE = Placement.even(ranks, experts), trace.tokens_ILWE[1, 0]
    copied = materialise(even, trace.load_ILE[0, 0], node_layout, experts, m)
    found = {}
    for name, before in (("no copies", even), ("copies", copied)):
        exact = balance(before, tokens_WE, node_layout, m)
        found[name] = {
            "balance_s": _median_s(lambda before=before: balance(before, tokens_WE, node_layout, m)),
            "cheapest_s": _median_s(
                lambda before=before: cheapest_balance(before, tokens_WE, node_layout, m, CLUSTER_A)
            ),
            # A new balance, to include its one-time work.
            "split_s": _median_s(lambda exact=exact: replace(exact).sent_from(0)),
            "over_mean": exact.max_rank_rows * ranks / int(tokens_WE.sum()),
            "over_mean_before": balance(before, tokens_WE, node_layout, 0).max_rank_rows * ranks / int(tokens_WE.sum()),
            "new_copies": int((exact.placement.extra_W() - before.extra_W()).sum()),
        }
    quick = balance_experts(tokens_WE, replicas=m, ranks_per_node=8)
    found["no copies"] |= {
        "quick_s": _median_s(lambda: balance_experts(tokens_WE, replicas=m, ranks_per_node=8)),
        "quick_over_mean": quick.balance.max_rank_rows * ranks / int(tokens_WE.sum()),
    }
    return found


def _median_s(call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_CALLS):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
