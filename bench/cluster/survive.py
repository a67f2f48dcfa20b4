"""`python -m bench.cluster.survive`: inject random losses of ranks and nodes, and record each job's recovery.

Four ranks as two nodes of two, each node a torchrun agent in its own network namespace (without root: all on loopback).
Each trial is a job with one fault at a random step and moment, followed by 50 more steps. Losses are compared step by
step with an uninterrupted job. Recovery time is measured from the fault to the end of the first step after it. The
overhead of survival is measured by interleaved jobs with and without it.

Faults, in rotation:

  rank killed      one rank, by SIGKILL
  rank frozen      one rank, by SIGSTOP
  node killed      a torchrun agent and its ranks
  node comes back  the same; the agent is restarted after a while
  copies lost      all ranks and the in-memory snapshots: only the checkpoint is left
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from bench.cluster.agents import RENDEZVOUS, Agents, kept_files, metrics
from bench.cluster.network import TwoNodes, missing
from bench.provenance import provenance
from fusedmoe.training.survival.node_memory import NodeMemory

MEASURED = ["fusedmoe/training/survival", "fusedmoe/cli/restart.py", "fusedmoe/cli/train.py", "fusedmoe/comm"]
MEASURED += ["bench/cluster/survive.py", "bench/cluster/agents.py"]

EXAMPLES = """\
examples:
  a few faults:
    python -m bench.cluster.survive --faults 5 --rounds 0
  the published results, half an hour at a time; repeat the command to continue:
    python -m bench.cluster.survive --faults 100 --minutes 30 --json bench/results/survive.json
"""

# A node counts as lost after three seconds without heartbeat; additional nodes are awaited for two seconds.
QUICK = {"last_call_timeout": 2, "keep_alive_max_attempt": 3}
FAULTS = ("rank killed", "rank frozen", "node killed", "node comes back", "copies lost")
# Results do not depend on the layout (no loss depends on a rank's own tokens), so losses are comparable.
MODEL = ["--layers", "2", "--model-dim", "32", "--heads", "4", "--hidden", "64", "--experts", "8", "--seq-len", "32"]
MODEL += ["--gate", "deepseek_v3", "--batch", "2", "--capacity-factor", "none", "--dtype", "fp64"]
MODEL += ["--eval-batches", "2"]
# A larger model, to measure the overhead.
LARGER = ["--layers", "2", "--model-dim", "128", "--heads", "4", "--hidden", "512", "--experts", "16"]
LARGER += ["--seq-len", "64", "--gate", "topk", "--batch", "2", "--eval-batches", "1"]
#: Steps after the last possible fault, and between checkpoints of jobs that need one.
AFTER, CHECKPOINT_EVERY = 50, 3
#: Relative tolerance of losses of the same step: different summation orders in float64, over this number of steps.
NOISE = 1e-6
# Timeout of a job, far above its usual duration.
_JOB_S = 300.0
_GO_ON = re.compile(r"survival: (\d+) ranks? continues? after step (\d+) with the state from (memory|the \w+)")
_PRICE = re.compile(r"survival: \d+ nodes?, ([\d.e+]+) MB .*? s, ([\d.e+]+) MB")
_HELD_OUT = re.compile(r"held-out loss: ([\d.]+)")


class Trials:
    """Jobs in one folder, one per fault and one without.

    Args:
        every: steps between refreshes.   timeout_s: of the jobs.   most: last step for a fault.
    """

    def __init__(
        self, folder: Path, spaces: TwoNodes | None, seed: int, every: int, timeout_s: float, most: int
    ) -> None:
        self._folder, self._spaces, self._seed = folder, spaces, seed
        self._every, self._timeout_s, self._most = every, timeout_s, most
        text = folder / "text"
        text.mkdir()
        for number in range(10):
            (text / f"{number}.txt").write_text(f"Text number {number} has {number * 17} words, or so it says. " * 40)

    def _agents(self, name: str, model: list[str], steps: int, *more: str) -> tuple[Agents, Path]:
        place = self._folder / name
        place.mkdir()
        flags = ["--data", str(self._folder / "text"), "--run-dir", str(place / "run"), "--steps", str(steps)]
        flags += ["--timeline-step", "1000000", "--timeout", str(self._timeout_s), "--checkpoint-every", "0"]
        return Agents(place, 2, 2, *model, *flags, *more, spaces=self._spaces, rendezvous=QUICK), place / "run"

    def without_faults(self) -> tuple[dict[int, float], str]:
        """Return each step's loss, and the held-out loss, of an uninterrupted job with as many steps as the trials."""
        agents, run = self._agents("without", MODEL, self._most + AFTER)
        with agents:
            if set(agents.wait(_JOB_S)) != {0}:
                raise RuntimeError(agents.said())
            said = agents.said()
        return _losses(run), _held_out(said)

    def trial(self, number: int, right: dict[int, float], held_out: str) -> dict[str, Any]:
        """Run a job with fault `number`, deterministic for a seed, and return the outcome."""
        rng, fault = random.Random(f"{self._seed} {number}"), FAULTS[number % len(FAULTS)]
        step, delay_s, steps = rng.randint(2, self._most), rng.random() * 0.2, self._most + AFTER
        if fault == "copies lost":
            step = max(step, CHECKPOINT_EVERY + 1)
        more = ["--survive", str(self._every)]
        more += ["--checkpoint-every", str(CHECKPOINT_EVERY)] * (fault == "copies lost")
        record: dict[str, Any] = {"number": number, "fault": fault, "step": step}
        agents, run = self._agents(f"trial {number}", MODEL, steps, *more)
        with agents:
            try:
                agents.wait_for_step(run, step - 1, _JOB_S)
                time.sleep(delay_s)
                at, back = time.time(), None
                self._hurt(agents, fault, rng)
                if fault == "node comes back":
                    agents.wait_for_step(run, step + 5, _JOB_S)
                    time.sleep(delay_s)
                    back = time.time()
                    agents.start(1 - agents.place(agents.running[0]))
                codes = agents.wait(_JOB_S)
            except AssertionError as error:
                return record | {"problem": str(error)[-3000:]}
            said = agents.said(10**9)
        found = [(int(ranks), int(since), source) for ranks, since, source in _GO_ON.findall(said)]
        found.sort(key=lambda restart: restart[1])  # as reported by the first rank, which may be on either node
        if set(codes) != {0} or not found:
            return record | {"problem": f"{codes}: {said[-3000:]}"}
        lines = [line for line in metrics(run) if "loss" in line]
        times, losses = {line["step"]: line["time"] for line in lines}, _losses(run)
        ranks, since, source = found[-1]
        expected = {"rank killed": 4, "rank frozen": 4, "node killed": 2, "node comes back": 4, "copies lost": 4}
        record |= {
            "ranks": ranks,
            "state_of_step": found[0][1],
            "from": source,
            "seconds_to_go_on": round(times[found[0][1] + 1] - at, 2),
            "restarts": len(found),
            "steps_once": [line["step"] for line in lines] == list(range(1, steps + 1)),
            "worst_difference": max(abs(loss - right[step]) / right[step] for step, loss in losses.items()),
            "held_out": _held_out(said),
            "left": kept_files(),
        }
        if back is not None:
            record["seconds_to_take_in"] = round(times[since + 1] - back, 2)
        problems = {
            "some steps are not there once": not record["steps_once"],
            "losses differ": record["worst_difference"] > NOISE or record["held_out"] != held_out,
            "files are left": bool(record["left"]),
            "another number of ranks": ranks != expected[fault],
            "the state is from elsewhere": (source == "memory") == (fault == "copies lost"),
        }
        if any(problems.values()):
            record["problem"] = ", ".join(name for name, is_so in problems.items() if is_so) + f": {said[-3000:]}"
        return record

    def _hurt(self, agents: Agents, fault: str, rng: random.Random) -> None:
        node = rng.choice(agents.running)
        rank = rng.choice(agents.ranks(node))
        if "node" in fault:
            agents.lose(node)
        elif fault != "copies lost":
            os.kill(rank, signal.SIGKILL if fault == "rank killed" else signal.SIGSTOP)
        else:
            ranks = [rank for agent in agents.running for rank in agents.ranks(agent)]
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stop all processes before removing their files
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        os.kill(rank, number)
                if number == signal.SIGSTOP:
                    for agent in agents.running:
                        memory = NodeMemory(agent.pid)
                        for slot in memory.slots():
                            memory.remove(slot)

    def price(self, rounds: int, steps: int = 30) -> dict[str, Any]:
        """Return the median seconds of a step and of a refresh, and the bytes stored and sent per rank."""
        found: dict[str, list[float]] = {"step_without": [], "step_with": [], "refresh": []}
        sizes: dict[str, float] = {}
        for number in range(rounds):
            for name, more in (("step_without", ()), ("step_with", ("--survive", "1"))):
                agents, run = self._agents(f"price {name} {number}", LARGER, steps, *more)
                with agents:
                    if set(agents.wait(_JOB_S)) != {0}:
                        raise RuntimeError(agents.said())
                    said = agents.said()
                lines = [record for record in metrics(run) if "loss" in record][5:]
                found[name] += [record["seconds"] for record in lines]
                found["refresh"] += [record["refresh_s"] for record in lines if "refresh_s" in record]
                if (words := _PRICE.search(said)) is not None:
                    sizes = {"memory_mb_of_a_rank": float(words[1]), "sent_mb_by_a_rank": float(words[2])}
        medians = {f"{name}_s": round(statistics.median(values), 4) for name, values in found.items()}
        return medians | sizes | {"rounds": rounds, "model": " ".join(LARGER)}


def _losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


def _held_out(said: str) -> str:
    found = _HELD_OUT.search(said)
    return "" if found is None else found[1]


def summary(trials: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarise by fault: number of trials, successful recoveries, source of the state, and recovery seconds."""
    found: dict[str, dict[str, Any]] = {}
    trials = list(trials)
    for fault in FAULTS:
        of = [one for one in trials if one["fault"] == fault]
        good = [one for one in of if "problem" not in one]
        row: dict[str, Any] = {"faults": len(of), "went_on": len(good)}
        if good:
            sources = [one["from"] for one in good]
            row["from"] = {source: sources.count(source) for source in sorted(set(sources))}
            row["worst_difference"] = max(one["worst_difference"] for one in good)
            for key in ("seconds_to_go_on", "seconds_to_take_in"):
                values = [one[key] for one in good if key in one]
                if values:
                    row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        found[fault] = row
    return found


class Record:
    """Results file, written after each trial; may consist of several runs of one series.

    Args:
        conditions: common to all runs; a file with other conditions or of another commit is restarted.
    """

    def __init__(self, path: Path | None, conditions: dict[str, Any]) -> None:
        self._path, run = path, provenance(MEASURED)
        self._record: dict[str, Any] = {"run": run, "conditions": conditions, "pieces": [], "price": {}, "trials": []}
        earlier = json.loads(path.read_text()) if path is not None and path.exists() else None
        if earlier is not None:
            same = earlier.get("conditions") == conditions and earlier["run"]["commit"] == run["commit"]
            if same and not run["changed_files"] and not earlier["run"]["changed_files"]:
                self._record = earlier
                print(f"continuing after {len(self.trials)} faults in {path}")
            else:
                print(f"{path} is of another commit or of other conditions: starting over")
        self._piece = {"date": run["date"], "load": run["load"], "faults": 0}
        self._record["pieces"].append(self._piece)

    @property
    def trials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._record["trials"]
        return found

    @property
    def price(self) -> dict[str, Any]:
        found: dict[str, Any] = self._record["price"]
        return found

    def note(self, trial: dict[str, Any] | None = None, price: dict[str, Any] | None = None) -> None:
        if trial is not None:
            self.trials.append(trial)
            self._piece["faults"] += 1
        self._record["price"] = price or self.price
        self._record["faults"] = summary(self.trials)
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._record, indent=1) + "\n")
            part.replace(self._path)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # runs clean-up handlers


def main() -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="bench.cluster.survive",
        description=f"{about}\n\n{more}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--faults", type=int, default=10, metavar="N", help="number of faults, kinds in rotation (default: 10)"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="time limit; no trial starts that may exceed it (default: 30)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="pairs of jobs with and without survival, for its overhead; 0: none (default: 3)",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="steps between refreshes (default: 1)")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="timeout of the jobs in seconds (default: 10)"
    )
    parser.add_argument("--most", type=int, default=20, metavar="STEP", help="last step for a fault (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    parser.add_argument("--loopback", action="store_true", help="run without network namespaces")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results file, written after each fault; an existing one is continued"
    )
    given = parser.parse_args()
    began = time.monotonic()
    lacking = None if given.loopback else missing()
    if lacking is not None:
        print(f"on loopback: {lacking}")
    conditions = {
        "ranks": "2 nodes of 2",
        "model": " ".join(MODEL),
        "seed": given.seed,
        "refreshed_every": given.every,
        "timeout_s": given.timeout,
        "last_step_of_a_fault": given.most,
        "steps_after_it": AFTER,
        "noise": NOISE,
        "rendezvous": RENDEZVOUS | QUICK,
        "namespaces": not given.loopback and lacking is None,
    }
    record = Record(given.json, conditions)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        spaces = None
        if conditions["namespaces"]:
            spaces = TwoNodes(1000, 8000, 256)
            held.callback(spaces.remove)
            spaces.make()
        of = Trials(folder, spaces, given.seed, given.every, given.timeout, given.most)
        if given.rounds and not record.price:
            record.note(price=of.price(given.rounds))
            print(f"price: {record.price}", flush=True)
        longest = 0.0
        right, held_out = of.without_faults() if len(record.trials) < given.faults else ({}, "")
        for number in range(len(record.trials), given.faults):
            start = time.monotonic()
            if start + longest - began > 60 * given.minutes:
                print(f"{given.minutes:g} minutes are over: repeat the command to continue with fault {number + 1}")
                break
            trial = of.trial(number, right, held_out)
            record.note(trial)
            print(json.dumps(trial), flush=True)
            shutil.rmtree(folder / f"trial {number}", ignore_errors=True)
            longest = max(longest, time.monotonic() - start)
    bad = [trial["number"] for trial in record.trials if "problem" in trial]
    done = f"{len(record.trials)} of {given.faults} faults, {len(bad)} that ended otherwise {bad or ''}"
    print(f"seed {given.seed}: {done}")
    print(json.dumps(summary(record.trials), indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
