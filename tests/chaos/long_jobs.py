"""`make long-job`: a job interrupted repeatedly by faults, compared with an uninterrupted job."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusedmoe.cli import train
from fusedmoe.cli.main import main as command
from fusedmoe.cli.trainer import Trainer
from fusedmoe.runtime.progress import Display, make_display
from tests.chaos.command import parser_of, write_record
from tests.chaos.conditions import conditions
from tests.cluster import Cluster, Outcome

DESCRIPTION = """\
Trains a tiny model by `fusedmoe train` twice: once without a word, once with a fault every so many steps, after each of
which the job is resumed from what is left. In the end every line of metrics (loss, norm of gradients, dropped tokens,
held-out loss) must be the same in both, bit for bit.

The faults, one after another, each on a rank and at a step that follow from the seed:
  kill            SIGKILL in a step
  disk full       no file can be written from then on
  pause           SIGSTOP, and SIGCONT half a second later: nothing ends
  kill in a save  SIGKILL some milliseconds after a checkpoint has begun
  stop            SIGINT to one rank: all finish the step, save and end
  other ranks     SIGKILL; a copy of the folder then goes on for some steps on 4 ranks in another layout (EP, ESP, MP),
                  saves, and goes on from there on 2: losses within 1e-6 of those of the job without faults. The job
                  itself goes on from where it was

The command ends with 1 where anything else happens: numbers that differ, a rank that is left waiting, a fault after
which the survivor does not name the rank, a checkpoint that does not load.
"""

EXAMPLES = """\
examples:
  a look, under a minute:  python -m tests.chaos.long_jobs --steps 150 --every 20 --saves 5
  the record of the house: python -m tests.chaos.long_jobs --steps 2000 --json bench/results/long_job.json
  a failure again:         python -m tests.chaos.long_jobs --steps 2000 --seed 7 --keep /tmp/long-job
"""

# Experts drop no tokens and no loss is per rank, so the numbers are independent of the layout. In float64, the
# different order of sums hides no error.
MODEL = ["--layers", "2", "--model-dim", "16", "--hidden", "8", "--experts", "4", "--seq-len", "16", "--batch", "2"]
MODEL += ["--gate", "deepseek_v3", "--capacity-factor", "none", "--dtype", "fp64", "--eval-batches", "2"]
MODEL += ["--timeline-step", "1000000", "--timeout", "20", "--ranks-per-node", "1"]
KEYS = ("step", "loss", "aux_loss", "grad_norm", "dropped", "held_out_loss")
RANKS, OTHER_RANKS, OTHER_STEPS, CLOSE = 2, 4, 10, 1e-6
PATIENCE_S = 3600.0


class Event(NamedTuple):
    """A fault on a rank, after this number of steps."""

    step: int
    fault: str
    rank: int


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill_disk() -> None:
    """Limit new files to one block."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


def _kill_in_a_save() -> None:
    plain = train.save_checkpoint

    def save(*given: Any, **more: Any) -> None:
        threading.Timer(random.uniform(0.0, 0.02), _kill).start()
        plain(*given, **more)
        time.sleep(1.0)

    train.save_checkpoint = save


FAULTS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "disk full": _fill_disk,
    "pause": _pause,
    "kill in a save": _kill_in_a_save,
    "stop": lambda: os.kill(os.getpid(), signal.SIGINT),
    "other ranks": _kill,
}


def train_with_faults(rank: int, world: int, arguments: list[str], events: list[Event]) -> tuple[int, str]:
    """Run the command on this rank with its faults; return the exit code and output."""
    said, plain, unlimited = StringIO(), Trainer.step, resource.RLIM_INFINITY
    due = {event.step: event.fault for event in events if event.rank == rank}

    def faulty(trainer: Trainer, step: int, *recorder: Any) -> Any:
        if step in due:
            FAULTS[due[step]]()
        return plain(trainer, step, *recorder)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
            patch.setenv(name, str(value))
        patch.setattr(train, "process_group", lambda *given: nullcontext())  # cluster ranks already have a group
        patch.setattr(Trainer, "step", faulty)
        try:
            with redirect_stdout(said), redirect_stderr(said):
                return command(["train", *arguments]), said.getvalue()[-3000:]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


def metrics(run: Path) -> dict[tuple[int, bool], dict[str, Any]]:
    """Return the last record of each step; True: the held-out loss."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(record["step"], "held_out_loss" in record): record for record in records}


def draw_events(rng: random.Random, steps: int, every: int, saves: int) -> list[Event]:
    """Draw a fault every `every` steps, after the first steps, at random offsets to the checkpoints."""
    faults = cycle(FAULTS)
    return [
        Event(step + rng.randrange(saves), next(faults), rng.randrange(RANKS))
        for step in range(every, steps - 2 * saves - OTHER_STEPS, every)
    ]


class LongJob:
    """The two jobs in a folder, and the defects of the second job.

    Attributes:
        problems: in words. found: the outcome of each fault.
    """

    def __init__(self, cluster: Cluster, folder: Path, steps: int, every: int, saves: int, seed: int) -> None:
        self._cluster, self._folder, self._steps, self._seed = cluster, folder, steps, seed
        self.events = draw_events(random.Random(seed), steps, every, saves)
        self._flags = [*MODEL, "--steps", str(steps), "--checkpoint-every", str(saves), "--data", str(folder / "text")]
        self.problems: list[str] = []
        self.found: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Run both jobs; return the record."""
        self._write_text()
        whole, parts = self._folder / "whole", self._folder / "parts"
        others = [event for event in self.events if event.fault == "other ranks"]
        total = 2 * self._steps
        began = time.monotonic()
        with make_display(0, total, 0) as display:
            with watched(display, whole, 0):
                self._cluster.run(RANKS, train_with_faults, [*self._flags, "--run-dir", str(whole)], [], **PATIENT)
            reference_s = time.monotonic() - began
            display.show_message(
                f"the job without faults is through after {reference_s:.0f} s; now {len(self.events)} faults"
            )
            with watched(display, parts, self._steps):
                self._interrupted(parts, whole, display)
        lines, expected = metrics(parts), metrics(whole)
        differ = [step for step in expected if not _same(lines.get(step), expected[step])]
        if differ or lines.keys() != expected.keys():
            self.problems.append(f"{len(differ)} lines of metrics differ, the first at {min(differ, default=None)}")
        return {
            "steps": self._steps,
            "seed": self._seed,
            "faults": dict(Counter(event.fault for event in self.events)),
            "lines_compared": len(expected),
            "lines_that_differ": len(differ),
            "resumed_on_other_ranks": len(others),
            "largest_difference_there": max((one.get("difference", 0.0) for one in self.found), default=0.0),
            "problems": self.problems,
            "seconds": {"without_faults": round(reference_s, 1), "both": round(time.monotonic() - began, 1)},
            "events": self.found,
        }

    def _write_text(self) -> None:
        text = self._folder / "text"
        text.mkdir(parents=True)
        for number in range(10):
            words = f"Text number {number} has {number * 17} words, or so it says. " * 20
            (text / f"{number}.txt").write_text(words)

    def _interrupted(self, parts: Path, whole: Path, display: Display) -> None:
        arguments, left = [*self._flags, "--run-dir", str(parts)], list(self.events)
        while True:
            # A pause ends no job; faults after a fatal one belong to the resumed job.
            count = next((i + 1 for i, event in enumerate(left) if event.fault != "pause"), len(left))
            now, left = left[:count], left[count:]
            ends = next((event for event in now if event.fault != "pause"), None)
            began = time.monotonic()
            outcomes = self._cluster.outcomes(RANKS, train_with_faults, arguments, now, **PATIENT)
            for event in now:
                self.found.append({**event._asdict(), "launch_s": round(time.monotonic() - began, 1)})
            self._judge(ends, outcomes)
            if ends is None:
                return
            if not (parts / "checkpoint").exists():
                self.problems.append(f"no checkpoint is left after {ends}")
                return
            display.show_message(f"{ends.fault} of rank {ends.rank} in step {ends.step}; the job goes on")
            if ends.fault == "other ranks":
                self._on_other_ranks(parts, whole, ends)
            arguments = ["--resume", str(parts)]

    def _judge(self, ends: Event | None, outcomes: list[Outcome]) -> None:
        """Check the exit status of the ranks."""

        def wrong(rank: int, why: str) -> None:
            text = outcomes[rank].value if outcomes[rank].error is None else outcomes[rank].error
            self.problems.append(f"{ends or 'the end'}: rank {rank} {why}: {text}")

        for rank, outcome in enumerate(outcomes):
            died = outcome.error is not None and outcome.error[0] == "ProcessDied"
            code, said = (None, "") if outcome.error is not None else outcome.value
            if ends is None or ends.fault == "stop":
                if code not in ((0,) if ends is None or rank != ends.rank else (train.STOPPED,)):
                    wrong(rank, "does not end well")
            elif ends.fault == "disk full":
                if code != 1 or f"rank {ends.rank}" not in said:
                    wrong(rank, f"does not end with an error that names rank {ends.rank}")
            elif rank == ends.rank:
                if not died:
                    wrong(rank, "was not killed")
            elif code != 1 or f"rank {ends.rank} failed" not in said:
                wrong(rank, f"does not end with an error that names rank {ends.rank}")

    def _on_other_ranks(self, parts: Path, whole: Path, event: Event) -> None:
        """Resume a copy in another layout, and then in the first layout again."""
        other = self._folder / f"on {OTHER_RANKS} ranks from {event.step}"
        shutil.copytree(parts, other)
        layouts = [(OTHER_RANKS, "2"), (RANKS, "1")]
        done = event.step
        for ranks, per_node in layouts:
            done += OTHER_STEPS
            flags = ["--resume", str(other), "--ranks-per-node", per_node, "--stop-at", str(done)]
            outcomes = self._cluster.outcomes(ranks, train_with_faults, flags, [], **PATIENT)
            if bad := [one for one in outcomes if one.error is not None or one.value[0] != 0]:
                self.problems.append(f"{event}: on {ranks} ranks: {bad[0]}")
                return
        expected, lines = metrics(whole), metrics(other)
        steps = [key for key in lines if event.step < key[0] <= done and not key[1]]
        pairs = [(lines[step][key], expected[step][key]) for step in steps for key in ("loss", "grad_norm")]
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        self.found[-1] |= {"difference": difference, "steps_there": len(steps)}
        if difference > CLOSE or len(steps) != 2 * OTHER_STEPS:
            self.problems.append(f"{event}: in another layout {len(steps)} steps are off by up to {difference}")


PATIENT = {"timeout_s": PATIENCE_S}


def _same(ours: dict[str, Any] | None, theirs: dict[str, Any]) -> bool:
    return ours is not None and all(ours.get(key) == theirs.get(key) for key in KEYS)


@contextmanager
def watched(display: Display, run: Path, before: int) -> Iterator[None]:
    """Report the progress of the job in that folder, while the context is open."""
    over = threading.Event()

    def look() -> None:
        most = 0
        while not over.wait(1.0):
            file = run / "metrics.jsonl"
            complete = file.read_text().rpartition("\n")[0] if file.exists() else ""
            last = json.loads(complete.rpartition("\n")[2]) if complete else {}
            if last.get("step", 0) > most and "loss" in last:
                most = last["step"]
                display.show_step(before + most, last["loss"], last["tokens"] / last["seconds"])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    parser = parser_of("tests.chaos.long_jobs", DESCRIPTION, EXAMPLES)
    parser.add_argument("--steps", type=int, default=2000, help="of each of the two jobs (default: 2000)")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="steps between faults (default: 100)")
    parser.add_argument("--saves", type=int, default=20, metavar="N", help="steps between checkpoints (default: 20)")
    parser.add_argument("--seed", type=int, help="what faults follow from (default: a new one, which is printed)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for both jobs, which stays")
    given = parser.parse_args()
    if given.saves < 1 or given.every < 2 * given.saves + OTHER_STEPS:
        parser.error(f"--every {given.every} must be at least 2 · {given.saves} (--saves) + {OTHER_STEPS}")
    if given.keep is not None and given.keep.exists():
        parser.error(f"--keep {given.keep} is there already: name a new folder")
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    where, cluster = conditions(), Cluster()
    print(
        f"seed {seed}: {given.steps} steps, a fault every {given.every}, a checkpoint every {given.saves}", flush=True
    )
    with tempfile.TemporaryDirectory() as temporary:
        try:
            job = LongJob(cluster, given.keep or Path(temporary, "job"), given.steps, given.every, given.saves, seed)
            found = job.run()
        finally:
            cluster.close()
    record = {**where, "every": given.every, "saves": given.saves, **found}
    write_record(record, given.json)
    print(json.dumps({key: value for key, value in found.items() if key != "events"}, indent=1))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
