"""Chooses configurations of the grouped products by checking and timing them, on a GPU, when one is first needed.

The rule: what is fast must first be right. A configuration is compared with its operation's definition on small random
inputs, in exactly the variant that is about to run; one that differs is never chosen, and its fault is written down.
The right ones are timed on the launch itself, by turns, once every check has ended. Verdicts and choices are kept for
each GPU in a file, for the next run.

Those of the Gluon form, on Hopper, are checked in processes of their own: one that hangs or takes the GPU ends its
process and no other. FUSEDMOE_GLUON=0 leaves them out.

Not tuned, but run in what suits the shapes by the table of `configs`: launches too small to matter, launches under CUDA
graph capture or with deterministic algorithms asked for (a choice by time may change the last bits from machine to
machine), and all where the environment variable FUSEDMOE_AUTOTUNE is 0.

Launches that run beside communication (`Key.shared`) have choices of their own, by times that are taken while another
kernel holds some multiprocessors. A program of the Gluon form takes a whole multiprocessor, and its tiles are dealt out
before: where one of them is held the whole launch waits, up to twice as long. So there it has fewer programs, and
leaves as many multiprocessors free as the other kernel holds. Without tuning such launches have Triton's form.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
import triton

from fusedmoe.files import cache_dir, read_kept, write_kept
from fusedmoe.kernels.generation import generation_of
from fusedmoe.kernels.triton.grouped.call import Choose
from fusedmoe.kernels.triton.grouped.configs import (
    Candidate,
    Capability,
    Config,
    HopperConfig,
    Key,
    Variant,
    by_shape,
    candidates,
    gluon_candidates,
    with_programs,
)
from fusedmoe.kernels.triton.grouped.correctness import check, check_apart, wait
from fusedmoe.kernels.triton.grouped.holder import HELD, Holder

Candidates = Callable[[Key], Sequence[Candidate]]
Check = Callable[[Variant, Config], str]
# Prepares to time a call, where `shared` while multiprocessors are held; what it returns takes one time, in seconds.
Measure = Callable[[Callable[[], object], bool], Callable[[], float]]
Found = TypeVar("Found")
# Verdicts on several, as of `Check`, as they come; None where there is none, for lack of memory or time.
CheckApart = Callable[[Variant, Sequence[HopperConfig]], Iterable[tuple[HopperConfig, str | None]]]

# A launch of fewer takes some twenty microseconds whatever its tiles.
LEAST_FLOPS = 10**10
# A GPU that idled while launches compiled runs at a fraction of its clock: what it must have worked before times count.
_WARM_S = 0.1
# Rounds in which all are timed; those that follow are of the fastest few, as many as there is time for.
_ROUNDS, _MOST_ROUNDS, _FASTEST = 3, 20, 3
# What launches of all rounds may take together.
_SECONDS = 1.0
# A launch that takes longer never ends.
_MOST_SECONDS = 30.0
# Readings of unrelated memory before a launch that is timed.
_MOST_FLUSHES = 32


def untuned(capability: Capability | None) -> Choose:
    """The choice by the table alone; capability None: of the interpreter."""
    return lambda key, launch: _first(capability, key)


@cache
def _first(capability: Capability | None, key: Key) -> Config:
    return by_shape(by_table(capability, key), key.rows, key.depth)[0]


def by_table(capability: Capability | None, key: Key) -> Sequence[Candidate]:
    """The configurations that the table has for a key."""
    variant = key.variant
    return candidates(variant.operation, getattr(torch, variant.dtype), capability, variant.even)


def to_try(capability: Capability | None, multiprocessors: int, key: Key) -> Sequence[Candidate]:
    """The configurations that are worth trying: those of the table, and those of the Gluon form where there is one;
    beside communication with so few programs that `HELD` of the multiprocessors stay free."""
    gluon: Sequence[Candidate] = gluon_candidates(key.variant, capability)
    if key.shared:
        free = multiprocessors - HELD
        gluon = [one._replace(config=with_programs(one.config, free)) for one in gluon] if free > 0 else ()
    return (*by_table(capability, key), *gluon)


class Record:
    """Knowledge of one kind of GPU, in memory and in a JSON file, for the next run.

    The file serves only: one that is missing, damaged or cannot be written costs tuning again, never a run. Each
    process writes all it knows and what it finds, whole or not at all. Where two write at once, one's news may be lost
    until it writes again; what is there is always whole.

    Args:
        file: or None, to remember only as long as this object lives.
    Attributes:
        faults: of a configuration in a variant, with any number of programs; "" where it is right.
        choices: of a key: {"config": ..., "microseconds": {config: ...}}.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.faults: dict[str, str] = {}
        self.choices: dict[str, dict[str, object]] = {}
        self._read()

    def save(self) -> None:
        if self._file is None:
            return
        self._read()
        with contextlib.suppress(OSError):
            write_kept(self._file, json.dumps({"faults": self.faults, "choices": self.choices}))

    def _read(self) -> None:
        """Adds what the file knows and this object does not."""
        text = None if self._file is None else read_kept(self._file)
        if text is not None:
            found = json.loads(text)
            self.faults = found["faults"] | self.faults
            self.choices = found["choices"] | self.choices


class Tuner:
    """Chooses, and remembers.

    Args:
        candidates: the configurations that may serve.
        check: "" if a configuration gives right results in a variant, else what is wrong.
        measure: prepares to time a call.
        record: where verdicts and choices are kept.
        allowed: whether this is a moment to tune.
        check_apart: the same as `check` in other processes, for configurations of the Gluon form; they have ended when
            the last verdict comes. None: `check` serves for these, too.
        fixed: whether choices must be those of any machine: then they are by the table, whatever was timed before.
    Attributes:
        record: as given.
    """

    def __init__(
        self,
        candidates: Candidates,
        check: Check,
        measure: Measure,
        record: Record,
        allowed: Callable[[], bool],
        check_apart: CheckApart | None = None,
        fixed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._candidates, self._check, self._measure = candidates, check, measure
        self._check_apart = check_apart
        self.record, self._allowed, self._fixed = record, allowed, fixed
        self._chosen: dict[Key, Config] = {}
        # Choices without tuning, until the next verdict: to look through all again takes as long as a launch.
        self._passing: dict[Key, Config] = {}
        self._unknown: set[tuple[Variant, Config]] = set()  # which this process does not try again
        self._lock = threading.Lock()

    def choose(self, key: Key, launch: Callable[[Config], object]) -> Config:
        """The configuration for a launch.

        Raises:
            RuntimeError: every configuration gives wrong results; or one has taken the GPU from this process, by a
                launch that does not end or an illegal access. It is written down, so that the next process goes on.
        """
        fixed = self._fixed()
        # Without the lock: a choice never changes, and every launch comes here.
        if key in self._chosen and not fixed:
            return self._chosen[key]
        passing = self._passing.get(key)
        if passing is not None and (fixed or not self._may_tune(key)):
            return passing
        configs = by_shape(self._candidates(key), key.rows, key.depth)
        if os.environ.get("FUSEDMOE_AUTOTUNE") == "0":
            return configs[0]
        with self._lock:
            chosen = None if fixed else self._chosen.get(key) or self._recorded(key, configs)
            if chosen is None:
                if fixed or not self._may_tune(key):
                    self._passing[key] = self._untuned(key, configs)
                    return self._passing[key]
                chosen = self._tune(key, configs, launch)
            self._chosen[key] = chosen
        return chosen

    def times(self, key: Key) -> dict[str, float]:
        """Returns the microseconds that configurations took when a key was tuned, by their names."""
        found = self.record.choices.get(str(key), {}).get("microseconds")
        return dict(found) if isinstance(found, dict) else {}

    def _may_tune(self, key: Key) -> bool:
        return key.flops >= LEAST_FLOPS and self._allowed()

    def _fault(self, key: Key, config: Config) -> str | None:
        """Returns what is known to be wrong with a configuration; None if nobody has looked."""
        return self.record.faults.get(_name(key, config))

    def _untuned(self, key: Key, configs: Sequence[Config]) -> Config:
        """The first that is not known to be wrong; of the Gluon form one must be known to be right."""
        for config in configs:
            fault = self._fault(key, config)
            if fault == "" or (fault is None and not isinstance(config, HopperConfig)):
                return config
        raise self._all_wrong(key, configs)

    def _all_wrong(self, key: Key, configs: Sequence[Config]) -> RuntimeError:
        return RuntimeError(
            f"every configuration of {key.variant} gives wrong results on this GPU, e.g. {configs[0]}: "
            f"{self._fault(key, configs[0])}. Please report it. FUSEDMOE_AUTOTUNE=0 skips the check."
        )

    def _recorded(self, key: Key, configs: Sequence[Config]) -> Config | None:
        """The choice that was made among all of these: with FUSEDMOE_GLUON=0 there were fewer."""
        found = self.record.choices.get(str(key), {})
        # Configurations have come since, or verdicts: then it is no choice among all.
        name, timed = found.get("config"), found.get("microseconds")
        right = {str(config): config for config in configs if not self._fault(key, config)}
        if name not in right or self._fault(key, right[name]) is None:
            return None
        return right[name] if right.keys() <= {name, *(timed if isinstance(timed, dict) else ())} else None

    def _tune(self, key: Key, configs: Sequence[Config], launch: Callable[[Config], object]) -> Config:
        with _may_wait():
            try:
                right = self._right(key, configs)
                if not right:
                    raise self._all_wrong(key, configs)
                seconds = {}
                if len(right) > 1:
                    seconds = self._times(key, right, launch)
            except torch.OutOfMemoryError:
                # There is room for the launch alone. The choice is not written down: the next run may have more.
                return self._untuned(key, configs)
        chosen = min(seconds or right, key=lambda config: seconds.get(config, 0.0))
        if any(self._fault(key, config) is None for config in configs):
            return chosen  # without a verdict on all the choice is for this run
        times = {str(config): round(1e6 * time, 1) for config, time in seconds.items()}
        self.record.choices[str(key)] = {"config": str(chosen), "microseconds": times}
        self.record.save()
        return chosen

    def _times(self, key: Key, configs: Sequence[Config], launch: Callable[[Config], object]) -> dict[Config, float]:
        """Returns the median seconds of each configuration that runs at these sizes, too.

        By turns, so that whatever slows the GPU for a while slows all of them.
        """
        takes = {}
        for config in configs:
            take = self._attempt(key, config, partial(self._measure, partial(launch, config), key.shared))
            if take is not None:
                takes[config] = take

        def turn(among: Iterable[Config]) -> dict[Config, float]:
            taken = {config: self._attempt(key, config, takes[config]) for config in among}
            return {config: seconds for config, seconds in taken.items() if seconds is not None}

        left, spent = list(takes), 0.0
        while left and spent < _WARM_S:
            taken = turn(left)
            left, spent = list(taken), spent + sum(taken.values())
        times: dict[Config, list[float]] = {config: [] for config in left}
        spent = 0.0
        for number in range(_MOST_ROUNDS):
            if number == _ROUNDS and spent >= _SECONDS:
                break
            taken = turn(left)
            spent += sum(taken.values())
            for config in left:
                if config in taken:
                    times[config].append(taken[config])
                else:
                    del times[config]  # it has failed
            left = sorted(times, key=lambda config: statistics.median(times[config]))
            if number + 1 >= _ROUNDS:
                left = left[:_FASTEST]
        if not times:
            raise self._all_wrong(key, configs)
        return {config: statistics.median(taken) for config, taken in times.items()}

    def _right(self, key: Key, configs: Sequence[Config]) -> list[Config]:
        """Returns those that are right; what nobody has checked is, apart where it might take its process along."""
        # The number of programs is no part of the code: a verdict by few programs and by many holds for any number.
        forms = dict.fromkeys(with_programs(config, 0) for config in configs)
        new = [one for one in forms if self._fault(key, one) is None and (key.variant, one) not in self._unknown]
        apart = [] if self._check_apart is None else [one for one in new if isinstance(one, HopperConfig)]
        if new:
            _tell(f"checks {len(new)} forms of {key.variant}, once for this kind of GPU")
        # Those apart are compiled beside those that are checked here.
        verdicts = self._check_apart(key.variant, apart) if self._check_apart and apart else ()
        try:
            for config in new:
                if config not in apart:
                    fault = self._attempt(key, config, partial(self._check, key.variant, config))
                    if fault is not None:
                        self._write_down(key, config, fault)
        finally:
            # To the last one: no process of these is on the GPU when times are taken.
            for config, fault in verdicts:
                if fault is None:
                    self._unknown.add((key.variant, config))
                else:
                    # At once: whatever becomes of this process, it is not tried again.
                    self._write_down(key, config, fault)
        return [config for config in configs if self._fault(key, config) == ""]

    def _attempt(self, key: Key, config: Config, call: Callable[[], Found]) -> Found | None:
        """Returns what a call returns that runs a configuration; None where it fails, which is written down."""
        try:
            return call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._leave_out(key, config, error)
            return None

    def _leave_out(self, key: Key, config: Config, error: Exception) -> None:
        """Writes down what a configuration has raised; raises where nothing else can run after it."""
        # Written down first: the next process must not try it again, whatever becomes of this one.
        self._write_down(key, config, f"{type(error).__name__}: {error}"[:1000])
        if isinstance(error, TimeoutError) or _is_lost():
            raise RuntimeError(
                f"{key.variant} in {config} {error}, and nothing else can run on this GPU in this process. It is left "
                "out from now on: please start again."
            ) from error

    def _write_down(self, key: Key, config: Config, fault: str) -> None:
        self.record.faults[_name(key, config)] = fault
        self.record.save()
        self._passing.clear()
        if fault:
            warnings.warn(f"{key.variant} in {config} is not used: {fault}", RuntimeWarning, stacklevel=2)


def _name(key: Key, config: Config) -> str:
    """Names what a verdict is about."""
    return f"{key.variant}, {with_programs(config, 0)}"


def _tell(line: str) -> None:
    """Tells whoever started the program what takes a while; of several ranks the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"fusedmoe: {line}", file=sys.stderr, flush=True)


def _is_lost() -> bool:
    """Returns whether this process has lost its GPU: after an illegal access every call says so."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@cache
def tuner(device: torch.device) -> Tuner:
    """Returns the tuner of a GPU: one, which tunes for one launch at a time, so that nothing else of it is timed."""
    table = generation_of(device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}")

    holder = cache(partial(Holder, device))  # one for all that is timed, made with the first

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        def taken() -> float:
            with torch.cuda.device(device):  # whose events they are
                return take()

        with torch.cuda.device(device):
            take = _prepare(device, run, holder() if shared else None)
        return taken

    return Tuner(
        partial(to_try, table, multiprocessors),
        lambda variant, config: check(variant, config, device),
        measure,
        Record(cache_dir() / f"grouped-{name}-{_sources()}.json"),
        lambda: not torch.cuda.is_current_stream_capturing(),
        lambda variant, configs: check_apart(variant, configs, device),
        torch.are_deterministic_algorithms_enabled,
    )


def _sources() -> str:
    """Stands for the kernels as they are written."""
    # Verdicts on other code say nothing, so a change of the kernels begins a new file.
    together = hashlib.sha256()
    kernels = Path(__file__).parents[2]
    forms = (kernels / "triton" / "grouped", kernels / "gluon" / "grouped")
    compiling = (kernels / "grouped.py", kernels / "triton" / "jit.py", kernels / "gluon" / "__init__.py")
    for file in (*compiling, *(file for form in forms for file in sorted(form.glob("*.py")))):
        together.update(file.read_bytes())
    return together.hexdigest()[:12]


def _prepare(device: torch.device, run: Callable[[], object], holder: Holder | None) -> Callable[[], float]:
    """Compiles a call, and looks how long the host takes for it. What it returns takes the GPU's seconds of one call,
    with nothing of its operands left in the L2 cache.

    Args:
        holder: holds multiprocessors meanwhile.
    """
    # In a layer other operands have been through the cache in between. They are read, as what is written would still
    # have to be written back while the call runs.
    numbers = max(torch.cuda.get_device_properties(device).L2_cache_size, 2**24)

    def flush() -> None:
        torch.sum(torch.empty(numbers, device=device), 0)

    def taken(call: Callable[[], object], flushes: int, held: Holder | None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            flush()
        if held is not None:
            held.hold()
        start.record()
        call()
        end.record()
        if held is not None:
            held.let_go()
        wait(end.query, _MOST_SECONDS)
        return start.elapsed_time(end) / 1e3

    run()
    taken(run, 1, holder)
    # What was launched before on other streams, such as communication, ends first.
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    launched = time.perf_counter() - begin
    # The host gets a lead longer than its launch takes, so that the time is the GPU's and not the host's.
    flushes = 1 + min(int(launched / taken(flush, 0, None)), _MOST_FLUSHES)
    return lambda: taken(run, flushes, holder)


@contextlib.contextmanager
def _may_wait() -> Iterator[None]:
    """Waiting for the device is no error here, whatever the caller's debug mode."""
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
