"""Draw cases from a seed, run them on persistent ranks, and judge them.

Outcomes of a case:
- right: every rank has the numbers of a world of one;
- clean: every living rank ends, by `timeout_s` + 10 s after the fault, with an error that names a rank, an operation
  and a fix, or with right numbers if it no longer needed its peers;
- any other outcome is a failure, named by the worst finding.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.chaos.faults import AT_PLACES, FAULTS, OF_INPUT, OF_MESSAGES, WORDS, Fault
from tests.chaos.jobs import LAYOUTS, Layout, Spec, WrongNumber, expected, probe_of_checkpoint, steps_of
from tests.chaos.ranks import ANSWER, END, FIRED, PORT, Answer, Attack, Order, hear, serve, tell
from tests.cluster import start

RIGHT, CLEAN_ERROR = "right", "clean"
HANG, WRONG, LEFTOVER, BARE, LOST = "hang", "wrong number", "leftover", "bare error", "lost checkpoint"
#: Failures, worst first.
FAILURES = (WRONG, LOST, HANG, BARE, LEFTOVER)
#: Leftovers of PyTorch, outside the package's reach: (fault, leftover) and the reason.
OUTSIDE = "PyTorch's own"
_NOT_OURS = {
    ("memory limit", "descriptor anon_inode:[eventpoll]"): "where there is no memory for its thread, Gloo's loop keeps "
    "its descriptor: its constructor throws, and its destructor, which would close it, does not run",
}

# Seconds beyond the topology's time-out after a fault, and the limit of a run without a fault.
GRACE_S, RUN_S = 10.0, 60.0
_PAUSE_S = 0.4
HOST = "the store's host"

_PLAIN = {
    name: layout
    for name, layout in LAYOUTS.items()
    if not (layout.shape or layout.wraps or layout.moves or layout.captured or layout.door or layout.hooked)
}


def _share(layout: Layout) -> float:
    """Compiling and measuring jobs are slow, so they are drawn less often."""
    return 0.15 if layout.captured or layout.cold else 0.4 if layout.moves or layout.meshes or layout.hooked else 1.0


#: (kind, layout): relative frequency.
SCENES: dict[tuple[str, str], float] = {
    **{("train", name): _share(layout) for name, layout in LAYOUTS.items()},
    **{("checkpoint", name): 0.3 for name in [*_PLAIN, "ddp 2", "blocks 2", "fssdp 2"]},
    **{("plan", name): 0.2 for name in [*_PLAIN, "2dh 4"]},
    **{("profile", name): 0.2 for name in _PLAIN},
    **{("survival", name): 0.4 for name in ("ep 2", "ep 4", "ep esp mp 4", "blocks 2")},
    ("one-sided", "ep 2"): 1.0,
}

_OPERATION = re.compile(
    r"ended because|over the|failed in|failed on|exchange|check of|all-reduce|MoELayer|topology|pipeline|closing|"
    r"distributed_data_parallel|job's store"
)
_STOPPED_PROCESS_ADVICE = re.compile(
    r"see (its|their|the) logs?|pass the same|give |choose|lower |raise |build |must |make |convert|use |check|"
    r"open a new|save it|load |freeze |same configuration",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Case:
    """One fault in one job. `hosted`: rank 0 hosts the rendezvous store, not a launcher."""

    index: int
    spec: Spec
    attack: Attack
    hosted: bool

    @property
    def fault(self) -> Fault:
        return FAULTS.get(self.attack.fault, Fault(id))

    @property
    def place(self) -> str:
        """The place that the statistics count."""
        struck = self.attack.fault in ("kill", "exit", "terminate", "stop", "pause", "late")
        return HOST if self.hosted and self.attack.culprit == 0 and struck else self.attack.place

    def __str__(self) -> str:
        attack = self.attack
        if not attack.fault:
            return f"no fault; {self.spec.kind} on {self.spec.layout}"
        where = f"at call {attack.number} of {attack.place}" if attack.fault in AT_PLACES else "in the input"
        guard = ", guarded" if self.spec.guarded else ""
        store = "rank 0" if self.hosted else "the launcher"
        return (
            f"{attack.fault} on rank {attack.culprit} {where}; {self.spec.kind} on {self.spec.layout}{guard}, "
            f"store at {store}"
        )


@dataclass
class Result:
    """Outcome of a case. `named`: every rank's error names the faulty rank; None without errors.

    `seconds`: from the fault to the last error of another rank; None without.   `fired`: the fault was injected.
    """

    case: Case
    outcome: str
    text: str = ""
    named: bool | None = None
    same: bool | None = None
    seconds: float | None = None
    fired: bool = True
    more: list[str] = field(default_factory=list)


class Campaign:
    """Draw cases from a seed. `ranks`: allowed world sizes; `faults`: names of the faults to draw; by default all."""

    def __init__(
        self,
        seed: int,
        ranks: tuple[int, ...] = (2, 4),
        faults: tuple[str, ...] = (),
        scenes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.seed = seed
        self._scenes = {
            scene: share
            for scene, share in SCENES.items()
            if LAYOUTS[scene[1]].world in ranks and (not scenes or scene in scenes)
        }
        self._faults = {name: fault for name, fault in FAULTS.items() if not faults or name in faults}
        self._calls: dict[tuple[str, str], list[Counter[str]]] = {}
        self._lock = threading.Lock()

    def run(self, index: int, team: Team) -> Result:
        """Run the case of an index. A job that fails without a fault is also a result."""
        try:
            return team.run(self.draw(index, team))
        except _WrongAlone as error:
            return replace(error.result, case=replace(error.result.case, index=index))

    def draw(self, index: int, team: Team) -> Case:
        """Draw the case of an index, deterministic in the seed. Counts calls once for each kind and layout."""
        rng = random.Random(f"{self.seed}/{index}")
        name = rng.choices(list(self._faults), [fault.share for fault in self._faults.values()])[0]
        scenes = {scene: share for scene, share in self._scenes.items() if name in AT_PLACES or _takes(name, scene)}
        kind, layout = rng.choices(list(scenes), list(scenes.values()))[0]
        world = LAYOUTS[layout].world
        culprit = rng.randrange(world)
        if name == "seed":
            culprit = rng.randrange(1, world)  # rank 0's parameters are the reference
        most = 40 if name == "skew" else 9
        counts = tuple(tuple(rng.randint(1, most) for _ in range(steps_of(kind, layout))) for _ in range(world))
        if name == "empty":
            counts = tuple(tuple(count * rng.randrange(2) for count in of) for of in counts)
        if name == "skew":
            few = rng.randrange(world)
            counts = tuple(of if rank == few else tuple(rng.randrange(2) for _ in of) for rank, of in enumerate(counts))
        if LAYOUTS[layout].captured:
            counts = tuple((6,) * len(of) for of in counts)  # a graph of other sizes is recompiled
        spec = Spec(
            kind,
            layout,
            rng.randrange(2**31),
            counts,
            skew=name == "skew",
            timeout_s=Spec.timeout_s * (6 if LAYOUTS[layout].captured or LAYOUTS[layout].cold else 1),
            guarded=rng.random() < 0.5,
            meets=name.split(",")[0] in ("nan", "shape", "dtype"),
            catches=name.endswith("caught"),
        )
        hosted, seed, at = rng.random() < 0.4, rng.randrange(2**31), rng.random()
        attack = Attack(name, "input", culprit, seed=seed, stays=rng.random() < 0.4)
        if name in AT_PLACES:
            with self._lock:
                if (kind, layout) not in self._calls:
                    self._calls[kind, layout] = team.count(replace(spec, timeout_s=RUN_S))
            calls = self._calls[kind, layout][culprit]
            place = rng.choice(sorted(place for place in calls if calls[place]))
            attack = replace(attack, place=place, number=1 + int(at * calls[place]))
        return Case(index, spec, attack, hosted)


def _takes(fault: str, scene: tuple[str, str]) -> bool:
    """Whether the fault applies to the job's input. Inputs of integrations and graphs are always right."""
    layout = LAYOUTS[scene[1]]
    return scene[0] == OF_INPUT[fault].kind and not (layout.door or (layout.captured and fault not in OF_MESSAGES))


class Gone(Exception):
    """A rank's process has ended."""


class _WrongAlone(Exception):
    """A job without a fault, run to count its calls, ends wrong."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.outcome)
        self.result = result


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    log: Path
    seen: int = 0

    def tell(self, thing: Any) -> None:
        try:
            tell(self.pipe, thing)
        except OSError as error:
            raise Gone from error

    def hear(self) -> Any:
        try:
            return hear(self.pipe)
        except (EOFError, OSError) as error:
            raise Gone from error

    def words(self) -> str:
        """Return the log text written since the last call."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        new, self.seen = text[self.seen :], len(text)
        return new

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(10)


class Team:
    """Ranks that run one case after another. Ranks that a fault ended or that leak are replaced."""

    def __init__(self, folder: Path, port: int, first_run: int = 0) -> None:
        self._folder, self._port, self._run = folder, port, first_run
        folder.mkdir()
        self._workers: list[_Worker | None] = []  # by rank, which a process keeps: see `Cluster`
        self._made = 0

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.end()

    def count(self, spec: Spec) -> list[Counter[str]]:
        """Count each rank's calls at each place in a run without a fault, and require right numbers."""
        found = _Run(self, Case(-1, self._at_home(spec), Attack("", "", -1), hosted=False), counts=True)
        result = found.judge()
        if result.outcome != RIGHT:
            # A clean error without a fault is spurious.
            outcome = result.outcome if result.outcome in FAILURES else BARE
            raise _WrongAlone(replace(result, outcome=outcome, text=f"without a fault: {result.text}", fired=False))
        return [answer.calls or Counter() for answer in found.answers.values()]

    def run(self, case: Case) -> Result:
        return _Run(self, replace(case, spec=self._at_home(case.spec))).judge()

    def _at_home(self, spec: Spec) -> Spec:
        return replace(spec, folder=str(self._folder / "job"))

    def workers(self, count: int) -> list[_Worker]:
        self._workers += [None] * (count - len(self._workers))
        workers = [worker or self._begin() for worker in self._workers[:count]]
        self._workers[:count] = workers
        return workers

    def _begin(self) -> _Worker:
        log = self._folder / f"rank-{self._made}.log"
        self._made += 1
        with _STARTING:
            process, pipe = start(serve, "tests.chaos.ranks")
        worker = _Worker(process, pipe, log)
        worker.tell(str(log))
        return worker

    def replace(self, worker: _Worker) -> None:
        """Start another process for this rank in the next run."""
        worker.end()
        self._workers[self._workers.index(worker)] = None

    def next_run(self) -> tuple[int, int]:
        """Return the run number and the port of the launcher's store."""
        self._run += 1
        return self._run, self._port


_STARTING = threading.Lock()
# A world of one draws its parameters from the process's generator.
_ALONE = threading.Lock()


class _Run:
    def __init__(self, team: Team, case: Case, counts: bool = False) -> None:
        self.team, self.case, self.counts = team, case, counts
        self.answers: dict[int, Answer] = {}
        self.dead: set[int] = set()
        self.left: dict[int, dict[str, int]] = {}
        self.hung: dict[int, str] = {}
        self.fired_at: float | None = None
        folder = Path(case.spec.folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._workers = dict(enumerate(team.workers(LAYOUTS[case.spec.layout].world)))
        for worker in self._workers.values():
            worker.words()
        self._start()
        self._gather(self._has_answered)
        self._tell_the_end()
        self._end_hung()
        self._until = time.monotonic() + case.spec.timeout_s + GRACE_S
        self._gather(lambda rank: rank in self.left)
        # PyTorch's compiled graphs and device meshes keep a job's process groups until the process ends. Such a
        # process runs one job, and its leftovers do not count.
        captured = LAYOUTS[case.spec.layout].captured or LAYOUTS[case.spec.layout].meshes
        for rank, worker in self._workers.items():
            # Leftovers must not count against the next case.
            if captured or rank in self.dead or rank in self.hung or self.left.get(rank, True):
                if rank not in {*self.dead, *self.hung, *self.left}:
                    self.hung[rank] = f"does not end\n{self._stacks(worker)}"
                team.replace(worker)
        if captured:
            self.left = {rank: {} for rank in self.left}

    def _start(self) -> None:
        run, port = self.team.next_run()
        # Compiled jobs have a longer time-out, and are slower without any fault.
        self._until = time.monotonic() + RUN_S + 4 * self.case.spec.timeout_s
        if self.case.hosted:
            self._workers[0].tell(PORT)
            port = self._workers[0].hear()[1]
        attack = None if self.counts else self.case.attack
        for rank, worker in self._workers.items():
            worker.tell(Order(rank, self.case.spec, attack, run, port, self.counts))

    def _has_answered(self, rank: int) -> bool:
        # A rank stopped for good does not answer.
        return rank in self.answers or (self.fired_at is not None and self._frozen(rank))

    def _frozen(self, rank: int) -> bool:
        return self.case.attack.fault == "stop" and rank == self.case.attack.culprit

    def _gather(self, done: Callable[[int], bool]) -> None:
        """Receive messages until each rank is done, dead, or late."""
        while time.monotonic() < self._until:
            open_ = {
                worker.pipe: rank
                for rank, worker in self._workers.items()
                if rank not in self.dead and rank not in self.hung and not done(rank)
            }
            if not open_:
                return
            pause = 0.05 if self.case.attack.fault == "pause" else max(0.0, self._until - time.monotonic())
            for pipe in wait(list(open_), pause):
                rank = open_[pipe]  # type: ignore[index]
                try:
                    kind, thing = self._workers[rank].hear()
                except Gone:
                    self.dead.add(rank)
                    self._workers[rank].process.join(10)  # the other ranks check for this process
                    continue
                if kind == FIRED:
                    self.fired_at = thing
                    late_s = self.case.spec.timeout_s + 2.0 if self.case.attack.fault == "late" else 0.5
                    self._until = min(self._until, thing + late_s + self.case.spec.timeout_s + GRACE_S)
                    if self.case.fault.harmless or self.case.attack.fault in ("memory limit", *OF_INPUT):
                        self._until = thing + RUN_S  # the rank continues its job
                elif kind == ANSWER:
                    self.answers[rank] = thing
                else:
                    self.left[rank] = thing
            paused = self.case.attack.fault == "pause" and self.fired_at is not None
            if paused and time.monotonic() > self.fired_at + _PAUSE_S:  # type: ignore[operator]
                os.kill(self._workers[self.case.attack.culprit].process.pid, signal.SIGCONT)

    def _tell_the_end(self) -> None:
        for rank, answer in self.answers.items():
            if answer.error is None and rank not in self.dead:
                try:
                    self._workers[rank].tell(END)
                except Gone:
                    self.dead.add(rank)

    def _end_hung(self) -> None:
        for rank, worker in self._workers.items():
            if rank not in self.answers and rank not in self.dead:
                self.hung[rank] = "" if self._frozen(rank) and self.fired_at else self._stacks(worker)
                worker.process.kill()

    def _stacks(self, worker: _Worker) -> str:
        if worker.process.is_alive():
            worker.words()
            os.kill(worker.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return worker.words()[-4000:]

    def judge(self) -> Result:
        case, culprit = self.case, self.case.attack.culprit
        found: list[tuple[str, str]] = []
        errors, others = 0, []
        for rank in self._workers:
            if rank in self.hung:
                if not (self._frozen(rank) and self.fired_at is not None):
                    found.append((HANG, f"rank {rank}: {self.hung[rank]}"))
            elif rank in self.dead and rank not in self.answers:
                code = self._workers[rank].process.exitcode
                if rank != culprit or not (case.fault.ends or case.attack.fault == "memory limit"):
                    found.append(
                        (BARE, f"rank {rank} died with exit code {code}\n{self._workers[rank].words()[-2000:]}")
                    )
            else:
                error = self.answers[rank].error
                if error is None:
                    continue
                errors += 1
                if rank != culprit:
                    others.append(rank)
                if error[0] == WrongNumber.__name__:
                    found.append((WRONG, f"rank {rank}: {error[2]}"))
                elif not self._is_clean(rank, error):
                    found.append((BARE, f"rank {rank}: {error[2]}"))
        found += self._wrong()
        found += self._lost(errors > 0 or bool(self.dead))
        for rank, more in self.left.items():
            reasons = [_NOT_OURS.get((case.attack.fault, what), "") for what in more]
            if more:
                found.append((OUTSIDE if all(reasons) else LEFTOVER, f"rank {rank} keeps {more} {reasons}"))
        found += self._files()
        if case.fault.harmless and errors and case.index >= 0:
            texts = "\n".join(
                f"rank {rank}: {answer.error[2]}" for rank, answer in self.answers.items() if answer.error
            )
            found.append((BARE, f"the fault is none, but ranks end with errors\n{texts}"))
        seconds = named = same = None
        if others and case.index >= 0:
            causes = [_cause(self.answers[rank].error[1]) for rank in others]  # type: ignore[index]
            named = all(_names(cause, culprit, case.attack.fault) for cause in causes)
            same = len(set(causes)) == 1
            if self.fired_at is not None:
                seconds = max(self.answers[rank].at_s for rank in others) - self.fired_at
                if seconds > case.spec.timeout_s + GRACE_S:
                    found.append((HANG, f"the last error came {seconds:.1f} s after the fault"))
        found.sort(key=lambda pair: (*FAILURES, OUTSIDE).index(pair[0]))
        outcome = found[0][0] if found else (CLEAN_ERROR if errors else RIGHT)
        more = [f"rank {rank}: {a.error[1]}" for rank, a in sorted(self.answers.items()) if a.error is not None]
        text = "\n".join(text for _, text in found)
        result = Result(case, outcome, text, named, same, seconds, self.fired_at is not None, more)
        return result

    def _is_clean(self, rank: int, error: tuple[str, str, str]) -> bool:
        kind, text, _ = error
        fault = self.case.attack.fault
        if rank == self.case.attack.culprit:  # the culprit's own error names the fault
            # The culprit's own failure after a wrong message or input may take any form.
            own = fault in OF_MESSAGES or (fault in OF_INPUT and kind in ("RankError", "ConfigError"))
            if own or WORDS in text or fault in ("memory limit", "signals, unhandled"):
                return True
        if (
            kind not in ("RankError", "ConfigError")
            or not re.search(r"\branks? \[?\d", text)
            or not _OPERATION.search(text)
        ):
            return False
        # The faulty rank has already reported its own error.
        told = re.search(r"failed (in|on) .*: \w*(Error|Interrupt|Exit|bad_alloc)", text, re.DOTALL)
        return bool(_STOPPED_PROCESS_ADVICE.search(text) or told or WORDS in text)

    def _wrong(self) -> list[tuple[str, str]]:
        given = {rank: answer.value for rank, answer in self.answers.items() if answer.error is None}
        if not given:
            return []
        with _ALONE:
            wanted = expected(self.case.spec)
        found = []
        for rank, value in given.items():
            for name, numbers in (value or {}).items():
                try:
                    torch.testing.assert_close(numbers, wanted[rank][name], rtol=1e-9, atol=1e-11)
                except AssertionError as error:
                    found.append((WRONG, f"rank {rank}, {name}: {error}"))
        return found

    def _lost(self, failed: bool) -> list[tuple[str, str]]:
        """Return the defects of the checkpoint that an interrupted job left."""
        spec = self.case.spec
        if spec.kind != "checkpoint" or not failed:
            return []
        saved = max((answer.saved for answer in self.answers.values()), default=0)
        folder = Path(spec.folder, "checkpoint")
        if not saved and not list(folder.parent.glob("*checkpoint*")):
            return []
        with _ALONE:
            probes = expected(spec)[0]["probes"]
            try:
                probe = probe_of_checkpoint(spec)
            except Exception as error:
                # Before the first save ends, no checkpoint may exist.
                return [(LOST, f"saved after step {saved}, but {type(error).__name__}: {error}")] if saved else []
        first = max(1, saved)
        for steps in range(first, min(first + 2, spec.steps)):
            if torch.allclose(probe, probes[steps - 1], rtol=1e-9, atol=1e-11):
                return []
        return [(LOST, f"saved after step {saved}, but the checkpoint is of none of the steps that it may be of")]

    def _files(self) -> list[tuple[str, str]]:
        """Return abandoned files. A killed rank cannot delete its own files."""
        if self.dead or self.hung:
            return []
        folder = Path(self.case.spec.folder)
        kept = ("checkpoint", "cache", "node-0", "node-1")
        names = [str(path.relative_to(folder)) for path in folder.iterdir() if path.name not in kept]
        pids = [worker.process.pid for worker in self._workers.values()]
        shared = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]
        return [(LEFTOVER, f"files: {names + shared}")] if names + shared else []


def _cause(text: str) -> str:
    """Extract the cause, which is equal on all ranks."""
    return text.split(" because ", 1)[-1].split("\n")[0]


def _names(cause: str, culprit: int, fault: str) -> bool:
    """Whether the text names the faulty rank.

    If a rank calls a different operation, or the same operation with another path or row form, no rank can identify the
    culprit: the error must then list it among the ranks that differ, in any position.
    """
    failed = re.match(r"(?:torchrun on the host of )?rank (\d+) failed", cause)
    if failed and fault not in ("order", "path", "part", "frozen", "wrong form"):
        return int(failed[1]) == culprit
    return bool(re.search(rf"\branks? \[?{culprit}\b", cause))


def new_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fusedmoe-chaos-", ignore_cleanup_errors=True)
