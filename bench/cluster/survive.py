"""`python -m bench.cluster.survive`: ranks and nodes are lost at random moments, and what became of each job.

Four ranks as two nodes of two, each node an agent of torchrun in a network namespace of its own (without root: all on
loopback). In each trial one rank is killed or frozen, or all processes of a node are, at a random step and moment. The
time to go on is from the fault to the end of the first step after it; losses are compared, step by step,
with those of a job that nothing interrupts. The price of the copies is that of two jobs, with and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.cluster.agents import RENDEZVOUS, Agents, kept_files, metrics
from bench.cluster.network import TwoNodes, missing
from bench.provenance import provenance

MEASURED = ["fusedmoe/training/survival", "fusedmoe/cli/survive.py", "fusedmoe/comm", "bench/cluster/survive.py"]

# A node is lost after three seconds of silence, and nobody is waited for longer than two.
QUICK = {"last_call_timeout": 2, "keep_alive_max_attempt": 3}
FAULTS = ("rank killed", "rank frozen", "node killed")
# The same numbers in any layout (no loss is of a rank's own tokens), so that losses can be compared.
MODEL = ["--layers", "2", "--model-dim", "32", "--heads", "4", "--hidden", "64", "--experts", "8", "--seq-len", "32"]
MODEL += ["--gate", "deepseek_v3", "--batch", "2", "--capacity-factor", "none", "--dtype", "fp64"]
MODEL += ["--eval-batches", "2"]
# A larger one, for the price of copies.
LARGER = ["--layers", "2", "--model-dim", "128", "--heads", "4", "--hidden", "512", "--experts", "16"]
LARGER += ["--seq-len", "64", "--gate", "topk", "--batch", "2", "--eval-batches", "1"]
AFTER = 50
_GO_ON = re.compile(r"survival: (\d+) ranks? go on after step (\d+) with the state from (\w+)")
_PRICE = re.compile(r"survival: \d+ nodes?, ([\d.e+]+) MB .*? s, ([\d.e+]+) MB")


class Trials:
    """Jobs in one folder, each with its own fault, and one without.

    Args:
        every: steps between refreshes.   timeout_s: of the jobs.
    """

    def __init__(self, folder: Path, spaces: TwoNodes | None, seed: int, every: int, timeout_s: float) -> None:
        self._folder, self._spaces, self._rng = folder, spaces, random.Random(seed)
        self._every, self._timeout_s = every, timeout_s
        text = folder / "text"
        text.mkdir()
        for number in range(10):
            (text / f"{number}.txt").write_text(f"Text number {number} has {number * 17} words, or so it says. " * 40)

    def _agents(self, name: str, model: list[str], steps: int, *more: str) -> tuple[Agents, Path]:
        place = self._folder / name
        place.mkdir()
        flags = ["--data", str(self._folder / "text"), "--run-dir", str(place / "run"), "--steps", str(steps)]
        flags += ["--timeline-step", "1000000", "--checkpoint-every", "0", "--timeout", str(self._timeout_s)]
        return Agents(place, 2, 2, *model, *flags, *more, spaces=self._spaces, rendezvous=QUICK), place / "run"

    def without_faults(self, steps: int) -> dict[int, float]:
        """The loss of each step."""
        agents, run = self._agents("without", MODEL, steps)
        with agents:
            if set(agents.wait(600)) != {0}:
                raise RuntimeError(agents.said())
        return {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}

    def trial(self, number: int, fault: str, right: dict[int, float], most: int) -> dict[str, Any]:
        """What became of a job with this fault."""
        # As many steps in all jobs: the learning rate follows from their number.
        rng, step = self._rng, self._rng.randint(2, most)
        agents, run = self._agents(f"trial {number}", MODEL, most + AFTER, "--survive", str(self._every))
        with agents:
            agents.wait_for_step(run, step - 1, 300)
            time.sleep(rng.random() * 0.2)
            node = rng.choice(agents.running)
            rank = rng.choice(agents.ranks(node))
            at = time.time()
            if fault == "node killed":
                agents.lose(node)
            else:
                os.kill(rank, signal.SIGKILL if fault == "rank killed" else signal.SIGSTOP)
            codes = agents.wait(300)
            said = agents.said()
        found = _GO_ON.search(said)
        if set(codes) != {0} or found is None:
            return {"fault": fault, "step": step, "problem": f"{codes}: {said[-3000:]}"}
        ranks, since, source = int(found[1]), int(found[2]), found[3]
        lines = [record for record in metrics(run) if "loss" in record]
        first = next(record for record in lines if record["step"] == since + 1)
        worst = max(abs(record["loss"] - right[record["step"]]) / right[record["step"]] for record in lines)
        return {
            "fault": fault,
            "step": step,
            "ranks": ranks,
            "state_of_step": since,
            "from": source,
            "seconds_to_go_on": round(first["time"] - at, 2),
            "restarts": len(_GO_ON.findall(said)),
            "steps_once": [record["step"] for record in lines] == list(range(1, most + AFTER + 1)),
            "worst_difference": worst,
            "left": kept_files(),
        }

    def price(self, rounds: int, steps: int = 30) -> dict[str, Any]:
        """Median seconds of a step and of a refresh, bytes kept for a rank and sent by one."""
        found: dict[str, list[float]] = {"without": [], "with": [], "refresh": []}
        sizes: dict[str, float] = {}
        for number in range(rounds):
            for name, more in (("without", ()), ("with", ("--survive", "1"))):
                agents, run = self._agents(f"price {name} {number}", LARGER, steps, *more)
                with agents:
                    if set(agents.wait(300)) != {0}:
                        raise RuntimeError(agents.said())
                    said = agents.said()
                lines = [record for record in metrics(run) if "loss" in record][5:]
                found[name] += [record["seconds"] for record in lines]
                found["refresh"] += [record["refresh_s"] for record in lines if "refresh_s" in record]
                if (words := _PRICE.search(said)) is not None:
                    sizes = {"memory_mb": float(words[1]), "sent_mb": float(words[2])}
        return {f"{name}_s": round(statistics.median(values), 4) for name, values in found.items()} | sizes


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cluster.survive", description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=9, help="faults, the kinds in turn (default: 9)")
    parser.add_argument("--rounds", type=int, default=1, help="jobs with and without copies, for their price; 0: none")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="steps between refreshes (default: 1)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="of the jobs (default: 10)")
    parser.add_argument("--most", type=int, default=40, metavar="STEP", help="the last step for a fault (default: 40)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--loopback", action="store_true", help="without namespaces")
    parser.add_argument("--json", type=Path, help="a file for the record")
    given = parser.parse_args()
    lacking = None if given.loopback else missing()
    if lacking is not None:
        print(f"on loopback: {lacking}")
    begun = provenance(MEASURED)
    trials: list[dict[str, Any]] = []
    price: dict[str, Any] = {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        spaces = None
        if not given.loopback and lacking is None:
            spaces = TwoNodes(1000, 8000, 256)
            held.callback(spaces.remove)
            spaces.make()
        of = Trials(folder, spaces, given.seed, given.every, given.timeout)
        if given.rounds:
            price = of.price(given.rounds)
            print(f"price: {price}", flush=True)
        if given.trials:
            right = of.without_faults(given.most + AFTER)
        for number in range(given.trials):
            trials.append(of.trial(number, FAULTS[number % len(FAULTS)], right, given.most))
            print(json.dumps(trials[-1]), flush=True)
    seconds = {
        fault: [one["seconds_to_go_on"] for one in trials if one["fault"] == fault and "problem" not in one]
        for fault in FAULTS
    }
    medians = {fault: statistics.median(values) for fault, values in seconds.items() if values}
    bad = [
        one
        for one in trials
        if "problem" in one or not one["steps_once"] or one["worst_difference"] > 1e-6 or one["left"]
    ]
    print(f"seed {given.seed}: {len(trials)} faults, {len(bad)} that ended otherwise")
    print(f"median seconds to go on: {medians}")
    if given.json is not None:
        record = {
            "run": begun,
            "seed": given.seed,
            "every": given.every,
            "timeout_s": given.timeout,
            "rendezvous": RENDEZVOUS | QUICK,
            "namespaces": not given.loopback and lacking is None,
            "price": price,
            "median_seconds_to_go_on": medians,
            "trials": trials,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
