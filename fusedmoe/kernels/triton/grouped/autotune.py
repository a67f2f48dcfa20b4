"""Chooses configurations of the grouped products by timing them, on a GPU, when one is first needed.

The candidates are the configurations that gave right results on this kind of GPU (`verified.py`). Nothing is checked
here. The candidates are timed on the launch itself, interleaved. Choices are kept for each GPU in a file, for the next
run. FUSEDMOE_GLUON=0 leaves out the Gluon form.

Not tuned, but run in what suits the shapes by the table of `configs`: launches too small to matter, launches under CUDA
graph capture or with deterministic algorithms asked for (a choice by time may change the last bits from machine to
machine), all where the environment variable FUSEDMOE_AUTOTUNE is 0, and all on a GPU without verified configurations.

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
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

from fusedmoe.files import cache_dir, read_kept, write_kept
from fusedmoe.kernels.generation import generation
from fusedmoe.kernels.triton.grouped.call import Choose
from fusedmoe.kernels.triton.grouped.configs import (
    Candidate,
    Capability,
    Config,
    Key,
    by_shape,
    candidates,
    gluon_candidates,
    with_programs,
)
from fusedmoe.kernels.triton.grouped.holder import HELD, Holder
from fusedmoe.kernels.triton.grouped.verified import Gpu, is_verified

# Configurations that may serve, first the one that serves without tuning.
Candidates = Callable[[Key], Sequence[Config]]
# Prepares to time a call, where `shared` while multiprocessors are held; what it returns takes one time, in seconds.
Measure = Callable[[Callable[[], object], bool], Callable[[], float]]
Found = TypeVar("Found")

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


def every_candidate(gpu: Gpu, key: Key) -> list[Config]:
    """Returns all candidates, verified or not, the default of the shape first: those of the table, and those of the
    Gluon form where there is one; beside communication with so few programs that `HELD` multiprocessors stay free."""
    table = generation(gpu.capability, gpu.shared_bytes)
    gluon: Sequence[Candidate] = gluon_candidates(key.variant, table)
    if key.shared:
        free = gpu.multiprocessors - HELD
        gluon = [one._replace(config=with_programs(one.config, free)) for one in gluon] if free > 0 else ()
    return by_shape((*by_table(table, key), *gluon), key.rows, key.depth)


def to_time(gpu: Gpu, key: Key) -> list[Config]:
    """Returns the candidates that are verified on a GPU; where none is, the default of the shape alone."""
    every = every_candidate(gpu, key)
    return [config for config in every if is_verified(gpu, key.variant, config)] or every[:1]


class Record:
    """Knowledge of one kind of GPU, in memory and in a JSON file, for the next run.

    The file serves only: one that is missing, damaged or cannot be written costs tuning again, never a run. Each
    process writes all it knows and what it finds, whole or not at all. Where two write at once, one's news may be lost
    until it writes again; what is there is always whole.

    Args:
        file: or None, to remember only as long as this object lives.
    Attributes:
        faults: errors of configurations that failed while they were timed, by variant.
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
        candidates: the configurations that may serve, first the default.
        measure: prepares to time a call.
        record: where choices are kept.
        allowed: whether this is a moment to tune.
        fixed: whether choices must be those of any machine: then they are by the table, whatever was timed before.
    Attributes:
        record: as given.
    """

    def __init__(
        self,
        candidates: Candidates,
        measure: Measure,
        record: Record,
        allowed: Callable[[], bool],
        fixed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._candidates, self._measure = candidates, measure
        self.record, self._allowed, self._fixed = record, allowed, fixed
        self._chosen: dict[Key, Config] = {}
        # Choices without tuning, until the next fault: to look through all again takes as long as a launch.
        self._passing: dict[Key, Config] = {}
        self._lock = threading.Lock()

    def choose(self, key: Key, launch: Callable[[Config], object]) -> Config:
        """The configuration for a launch.

        Raises:
            RuntimeError: every configuration fails; or one has taken the GPU from this process, by a launch that does
                not end or an illegal access. It is written down, so that the next process goes on.
        """
        fixed = self._fixed()
        # Without the lock: a choice never changes, and every launch comes here.
        if key in self._chosen and not fixed:
            return self._chosen[key]
        passing = self._passing.get(key)
        if passing is not None and (fixed or not self._may_tune(key)):
            return passing
        configs = self._candidates(key)
        if os.environ.get("FUSEDMOE_AUTOTUNE") == "0":
            return configs[0]
        with self._lock:
            chosen = None if fixed else self._chosen.get(key) or self._recorded(key, configs)
            if chosen is None:
                if fixed or not self._may_tune(key):
                    self._passing[key] = self._usable(key, configs)[0]
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

    def _usable(self, key: Key, configs: Sequence[Config]) -> list[Config]:
        """Returns the configurations that are not known to fail.

        Raises:
            RuntimeError: there are none.
        """
        usable = [config for config in configs if _name(key, config) not in self.record.faults]
        if not usable:
            raise RuntimeError(
                f"every configuration of {key.variant} fails on this GPU, e.g. {configs[0]}: "
                f"{self.record.faults[_name(key, configs[0])]}; report it, and set FUSEDMOE_AUTOTUNE=0 meanwhile"
            )
        return usable

    def _recorded(self, key: Key, configs: Sequence[Config]) -> Config | None:
        """The choice that was made among all of these: with FUSEDMOE_GLUON=0 there were fewer."""
        found = self.record.choices.get(str(key), {})
        name, timed = found.get("config"), found.get("microseconds")
        usable = {str(config): config for config in self._usable(key, configs)}
        # Where configurations have come since it is no choice among all.
        is_whole = name in usable and usable.keys() <= {name, *(timed if isinstance(timed, dict) else ())}
        return usable[str(name)] if is_whole else None

    def _tune(self, key: Key, configs: Sequence[Config], launch: Callable[[Config], object]) -> Config:
        usable = self._usable(key, configs)
        if len(usable) == 1:
            return usable[0]
        with _may_wait():
            try:
                seconds = self._times(key, usable, launch)
            except torch.OutOfMemoryError:
                # There is room for the launch alone. The choice is not written down: the next run may have more.
                return self._usable(key, configs)[0]
        chosen = min(seconds, key=seconds.__getitem__)
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
        self._usable(key, configs)  # raises where none is left
        return {config: statistics.median(taken) for config, taken in times.items()}

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
        warnings.warn(f"{key.variant} in {config} is not used: {fault}", RuntimeWarning, stacklevel=2)


def _name(key: Key, config: Config) -> str:
    """Names a configuration that failed; the number of programs is no part of its code."""
    return f"{key.variant}, {with_programs(config, 0)}"


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
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}")
    record = Record(cache_dir() / f"grouped-{name}-{_sources()}.json")
    return make_tuner(device, partial(to_time, gpu_of(device)), record)


def gpu_of(device: torch.device) -> Gpu:
    """Returns the properties of a CUDA device."""
    found: Any = torch.cuda.get_device_properties(device)  # PyTorch's types lack a field
    return Gpu((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)


def make_tuner(device: torch.device, candidates: Candidates, record: Record) -> Tuner:
    """Makes a tuner that times candidates on a GPU."""
    holder = cache(partial(Holder, device))  # one for all that is timed, made with the first

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        def taken() -> float:
            with torch.cuda.device(device):  # whose events they are
                return take()

        with torch.cuda.device(device):
            take = _prepare(device, run, holder() if shared else None)
        return taken

    return Tuner(
        candidates,
        measure,
        record,
        lambda: not torch.cuda.is_current_stream_capturing(),
        torch.are_deterministic_algorithms_enabled,
    )


def _sources() -> str:
    """Stands for the kernels as they are written."""
    # Times of other code mean nothing, so a change of the kernels begins a new file.
    together = hashlib.sha256()
    kernels = Path(__file__).parents[2]
    forms = (kernels / "triton" / "grouped", kernels / "gluon" / "grouped")
    compiling = (kernels / "grouped.py", kernels / "triton" / "jit.py", kernels / "gluon" / "__init__.py")
    for file in (*compiling, *(file for form in forms for file in sorted(form.glob("*.py")))):
        together.update(file.read_bytes())
    return together.hexdigest()[:12]


def wait(ended: Callable[[], bool], seconds: float) -> None:
    """Waits for an end.

    Raises:
        TimeoutError: there is none in so many seconds.
    """
    limit = time.monotonic() + seconds
    while not ended():
        if time.monotonic() > limit:
            raise TimeoutError(f"has not ended after {seconds:g} seconds")
        time.sleep(1e-3)


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
