"""Chooses configurations of the grouped products by checking and timing them, on a GPU, when one is first needed.

The rule: what is fast must first be right. A configuration is compared with its operation's definition on small random
inputs, in exactly the variant that is about to run; one that differs is never chosen, and its fault is written down.
The right ones are timed on the launch itself. Verdicts and choices are kept for each GPU in a file, for the next run.

Those of the Gluon form, on Hopper, are checked in processes of their own: one that hangs or takes the GPU ends its
process and no other. FUSEDMOE_GLUON=0 leaves them out.

Not tuned, but run in what suits the shapes by the table of `configs`: launches too small to matter, launches under CUDA
graph capture or with deterministic algorithms asked for (a choice by time may change the last bits from machine to
machine), and all where the environment variable FUSEDMOE_AUTOTUNE is 0.

Launches that run beside communication have choices of their own, among Triton's forms only, by times that are taken
while another kernel holds some multiprocessors. A program of the Gluon form takes a whole multiprocessor, and its tiles
are dealt out before: where one of them is held the whole launch waits, up to twice as long.
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

import torch
import triton

from fusedmoe.files import cache_dir, read_kept, write_kept
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
)
from fusedmoe.kernels.triton.grouped.correctness import check, check_apart, wait
from fusedmoe.kernels.triton.grouped.holder import Holder

Candidates = Callable[[Key], Sequence[Candidate]]
Check = Callable[[Variant, Config], str]
Measure = Callable[[Callable[[], object], float], float]
# Verdicts on several, as of `Check`, as they come; None where there is none, for lack of memory or time.
CheckApart = Callable[[Variant, Sequence[HopperConfig]], Iterable[tuple[HopperConfig, str | None]]]

# A launch of fewer takes some twenty microseconds whatever its tiles.
LEAST_FLOPS = 10**10
# What all timings of one key may take together.
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


def to_try(capability: Capability | None, key: Key) -> Sequence[Candidate]:
    """The configurations that are worth trying: those of the table, and those of the Gluon form where there is one."""
    return (*by_table(capability, key), *gluon_candidates(key.variant, capability))


class Record:
    """Knowledge of one kind of GPU, in memory and in a JSON file, for the next run.

    The file serves only: one that is missing, damaged or cannot be written costs tuning again, never a run. Each
    process writes all it knows and what it finds, whole or not at all. Where two write at once, one's news may be lost
    until it writes again; what is there is always whole.

    Args:
        file: or None, to remember only as long as this object lives.
    Attributes:
        faults: of a configuration in a variant; "" where it is right.
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
        measure: seconds that a call takes, found within so many seconds (or one call, if that takes longer).
        record: where verdicts and choices are kept.
        allowed: whether this is a moment to tune.
        check_apart: the same as `check` in another process, for configurations of the Gluon form; without it `check`
            serves for them, too.
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
    ) -> None:
        self._candidates, self._check, self._measure = candidates, check, measure
        self._check_apart = check_apart
        self.record, self._allowed = record, allowed
        self._chosen: dict[Key, Config] = {}
        # Choices without tuning, and how many verdicts there were: to look through all again takes as long as a launch.
        self._passing: dict[Key, tuple[int, Config]] = {}
        self._unknown: set[tuple[Variant, HopperConfig]] = set()  # which this process does not try again
        self._lock = threading.Lock()

    def choose(self, key: Key, launch: Callable[[Config], object]) -> Config:
        """The configuration for a launch.

        Raises:
            RuntimeError: every configuration gives wrong results; or one has taken the GPU from this process, by a
                launch that does not end or an illegal access. It is written down, so that the next process goes on.
        """
        # Without the lock: a choice never changes, and every launch comes here.
        if key in self._chosen:
            return self._chosen[key]
        verdicts, passing = self._passing.get(key, (-1, None))
        if passing is not None and verdicts == len(self.record.faults) and not self._may_tune(key):
            return passing
        configs = by_shape(self._candidates(key), key.rows, key.depth)
        if os.environ.get("FUSEDMOE_AUTOTUNE") == "0":
            return configs[0]
        with self._lock:
            chosen = self._chosen.get(key) or self._recorded(key, configs)
            if chosen is None:
                if not self._may_tune(key):
                    passing = self._untuned(key, configs)
                    self._passing[key] = len(self.record.faults), passing
                    return passing
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
        return self.record.faults.get(f"{key.variant}, {config}")

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
        """Seconds of each configuration that runs at these sizes, too."""
        seconds = {}
        for config in configs:
            try:
                seconds[config] = self._measure(partial(launch, config), _SECONDS / len(configs))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._leave_out(key, config, error)
        if not seconds:
            raise self._all_wrong(key, configs)
        return seconds

    def _right(self, key: Key, configs: Sequence[Config]) -> list[Config]:
        """Returns those that are right; what nobody has checked is, apart where it might take its process along."""
        new = [one for one in configs if self._fault(key, one) is None and (key.variant, one) not in self._unknown]
        apart = [one for one in new if isinstance(one, HopperConfig) and self._check_apart is not None]
        if new:
            _tell(f"checks {len(new)} forms of {key.variant}, once for this kind of GPU")
        # Those apart are compiled beside those that are checked here.
        verdicts = self._check_apart(key.variant, apart) if self._check_apart is not None and apart else ()
        try:
            for config in new:
                if config not in apart:
                    self._check_here(key, config)
        finally:
            for config, fault in verdicts:
                if fault is None:
                    self._unknown.add((key.variant, config))
                else:
                    # At once: whatever becomes of this process, it is not tried again.
                    self._write_down(key, config, fault)
        return [config for config in configs if self._fault(key, config) == ""]

    def _check_here(self, key: Key, config: Config) -> None:
        try:
            fault = self._check(key.variant, config)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._leave_out(key, config, error)
        else:
            self._write_down(key, config, fault)

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
        self.record.faults[f"{key.variant}, {config}"] = fault
        self.record.save()
        if fault:
            warnings.warn(f"{key.variant} in {config} is not used: {fault}", RuntimeWarning, stacklevel=2)


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


def tuner(device: torch.device, shared: bool = False) -> Tuner:
    """Returns the tuner of a GPU; `shared`: for launches beside communication, which holds some multiprocessors."""
    return _tuner(device, shared)


@cache
def _tuner(device: torch.device, shared: bool) -> Tuner:
    capability = torch.cuda.get_device_capability(device)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}")

    holder = cache(partial(Holder, device))  # one for all that is timed, made with the first

    def measure_there(run: Callable[[], object], seconds: float) -> float:
        with torch.cuda.device(device):  # whose events they are
            return _measure(device, run, seconds, holder() if shared else None)

    return Tuner(
        partial(by_table if shared else to_try, capability),
        lambda variant, config: check(variant, config, device),
        measure_there,
        Record(cache_dir() / f"grouped-{'beside-' * shared}{name}-{_sources()}.json"),
        lambda: not (torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled()),
        lambda variant, configs: check_apart(variant, configs, device),
    )


def _sources() -> str:
    """Stands for the kernels as they are written."""
    # Verdicts on other code say nothing, so a change of the kernels begins a new file.
    together = hashlib.sha256()
    kernels = Path(__file__).parents[2]
    forms = (kernels / "triton" / "grouped", kernels / "gluon" / "grouped")
    for file in (kernels / "grouped.py", *(file for form in forms for file in sorted(form.glob("*.py")))):
        together.update(file.read_bytes())
    return together.hexdigest()[:12]


def _measure(device: torch.device, run: Callable[[], object], seconds: float, holder: Holder | None = None) -> float:
    """The median of some calls, each with nothing of its operands left in the L2 cache.

    Args:
        holder: holds multiprocessors meanwhile.
    """
    # In a layer other operands have been through the cache in between. They are read, as what is written would still
    # have to be written back while the call runs.
    numbers = max(torch.cuda.get_device_properties(device).L2_cache_size, 2**24)
    others, total = torch.zeros(numbers, device=device), torch.zeros((), device=device)

    def flush() -> None:
        torch.sum(others, 0, out=total)

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
    first = taken(run, 1, holder)
    begin = time.perf_counter()
    run()
    launched = time.perf_counter() - begin
    # The host gets a lead longer than its launch takes, so that the time is the GPU's and not the host's.
    flushes = 1 + min(int(launched / taken(flush, 0, None)), _MOST_FLUSHES)
    times = [taken(run, flushes, holder) for _ in range(max(1, min(int(seconds / first), 20) - 1))]
    return statistics.median(times)


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
