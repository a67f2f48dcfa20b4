"""Autotuning of the grouped GEMMs: time candidate configurations on first use, on a GPU.

Candidates are the configurations verified on this kind of GPU (`configs.VERIFIED`); tuning does not check results. They
are timed interleaved, on the launch itself. Choices are cached in a file per GPU. FUSEDMOE_GLUON=0 excludes the Gluon
form.

The default of `configs` is used for small launches; under CUDA graph capture or deterministic algorithms (a timed
choice may change the last bits between machines); if FUSEDMOE_AUTOTUNE is 0; and on a GPU without verified
configurations.

Launches overlapped with communication (`Key.shared`) are tuned separately, while another kernel occupies some
multiprocessors. A program of the Gluon form needs a whole multiprocessor, and its tiles are fixed at launch: a program
that waits for an occupied one can double the time. The Gluon form therefore leaves `NUM_OCCUPIED` multiprocessors free.
Untuned, such launches use the Triton form.
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
import triton.language as tl
from torch import Tensor

from fusedmoe.files import cache_dir, read_cache_file, write_cache_file
from fusedmoe.kernels.backend import generation
from fusedmoe.kernels.triton.grouped.call import ChooseConfig
from fusedmoe.kernels.triton.grouped.configs import (
    Capability,
    Config,
    ConfigCandidate,
    Gpu,
    Key,
    candidates,
    gluon_candidates,
    is_verified,
    order_by_shape,
    with_programs,
)
from fusedmoe.kernels.triton.jit import jit

# Candidate configurations, the untuned default first.
Candidates = Callable[[Key], Sequence[Config]]
# Prepare to time a call, with multiprocessors occupied if `shared`; the result returns one time in seconds.
Measure = Callable[[Callable[[], object], bool], Callable[[], float]]
Result = TypeVar("Result")

# Smaller launches take about 20 µs with any tiles.
MIN_TUNED_FLOPS = 10**10
# Before times count: clocks are low after idling during compilation.
_WARMUP_S = 0.1
# Rounds over all candidates; further rounds, within the time limit, are over the fastest.
_ROUNDS, _MAX_ROUNDS, _NUM_FASTEST = 3, 20, 3
_TIME_LIMIT_S = 1.0
_HANG_TIMEOUT_S = 30.0
_MAX_FLUSHES = 32
# Occupied by one program each.
NUM_OCCUPIED = 16
# As in communication kernels: a program that needs most of a multiprocessor does not fit alongside.
HOLDER_WARPS, NUMBERS = 16, 512
# Maximum polls of a program, some hundred milliseconds; and of a short delay.
_MAX_POLLS, _DELAY_POLLS = 100_000, 200


def untuned_choice(capability: Capability | None) -> ChooseConfig:
    return lambda key, launch: _untuned(capability, key)


@cache
def _untuned(capability: Capability | None, key: Key) -> Config:
    return order_by_shape(table_candidates(capability, key), key.rows, key.depth)[0]


def table_candidates(capability: Capability | None, key: Key) -> Sequence[ConfigCandidate]:
    variant = key.variant
    return candidates(variant.operation, getattr(torch, variant.dtype), capability, variant.even)


def all_candidates(gpu: Gpu, key: Key) -> list[Config]:
    """Return all candidates, verified or not, the default for the shape first.

    The Gluon form leaves `NUM_OCCUPIED` multiprocessors free if overlapped with communication.
    """
    table = generation(gpu.capability, gpu.shared_bytes)
    gluon: Sequence[ConfigCandidate] = gluon_candidates(key.variant, table)
    if key.shared:
        free = gpu.multiprocessors - NUM_OCCUPIED
        gluon = [one._replace(config=with_programs(one.config, free)) for one in gluon] if free > 0 else ()
    return order_by_shape((*table_candidates(table, key), *gluon), key.rows, key.depth)


def verified_candidates(gpu: Gpu, key: Key) -> list[Config]:
    """Return the candidates verified on a GPU; without any, only the default for the shape."""
    all_configs = all_candidates(gpu, key)
    return [config for config in all_configs if is_verified(gpu, key.variant, config)] or all_configs[:1]


class TuningRecord:
    """Tuning results for one kind of GPU, in memory and in a JSON file, if given.

    A missing, damaged or unwritable file causes tuning again, never a failure. Each process atomically writes all its
    results; concurrent writers may lose each other's additions until the next write.

    Attributes:
        faults: errors of configurations that failed while being timed, by variant and configuration.
        choices: per key {"config": ..., "microseconds": {config: ...}}.
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
            write_cache_file(self._file, json.dumps({"faults": self.faults, "choices": self.choices}))

    def _read(self) -> None:
        text = None if self._file is None else read_cache_file(self._file)
        if text is not None:
            found = json.loads(text)
            self.faults = found["faults"] | self.faults
            self.choices = found["choices"] | self.choices


class Tuner:
    """Chooses configurations and caches the choices.

    `candidates` returns configurations, the default first. If `is_deterministic()`, choices must not depend on the
    machine: always the default, despite tuning.
    """

    def __init__(
        self,
        candidates: Candidates,
        measure: Measure,
        record: TuningRecord,
        is_allowed: Callable[[], bool],
        is_deterministic: Callable[[], bool] = lambda: False,
    ) -> None:
        self._candidates, self._measure = candidates, measure
        self.record, self._is_allowed, self._is_deterministic = record, is_allowed, is_deterministic
        self._chosen: dict[Key, Config] = {}
        # Untuned choices until the next fault: recomputing one takes as long as a launch.
        self._untuned: dict[Key, Config] = {}
        self._lock = threading.Lock()

    def choose(self, key: Key, launch: Callable[[Config], object]) -> Config:
        """Return the configuration for a launch.

        Raises:
            RuntimeError: every configuration fails, or a hanging launch or illegal access made the GPU unusable for
                this process. The fault is recorded, so the next process excludes its configuration.
        """
        is_deterministic = self._is_deterministic()
        # No lock: choices never change, and every launch runs this.
        if key in self._chosen and not is_deterministic:
            return self._chosen[key]
        untuned = self._untuned.get(key)
        if untuned is not None and (is_deterministic or not self._may_tune(key)):
            return untuned
        configs = self._candidates(key)
        if os.environ.get("FUSEDMOE_AUTOTUNE") == "0":
            return configs[0]
        with self._lock:
            chosen = None if is_deterministic else self._chosen.get(key) or self._recorded(key, configs)
            if chosen is None:
                if is_deterministic or not self._may_tune(key):
                    self._untuned[key] = self._usable(key, configs)[0]
                    return self._untuned[key]
                chosen = self._tune(key, configs, launch)
            self._chosen[key] = chosen
        return chosen

    def tuning_times_us(self, key: Key) -> dict[str, float]:
        """Return the tuning times of a key in microseconds, by configuration name."""
        found = self.record.choices.get(str(key), {}).get("microseconds")
        return dict(found) if isinstance(found, dict) else {}

    def _may_tune(self, key: Key) -> bool:
        return key.flops >= MIN_TUNED_FLOPS and self._is_allowed()

    def _usable(self, key: Key, configs: Sequence[Config]) -> list[Config]:
        usable = [config for config in configs if _failed_config_key(key, config) not in self.record.faults]
        if not usable:
            raise RuntimeError(
                f"every configuration of {key.variant} fails on this GPU, e.g. {configs[0]}: "
                f"{self.record.faults[_failed_config_key(key, configs[0])]}; report it, and set FUSEDMOE_AUTOTUNE=0 "
                "meanwhile"
            )
        return usable

    def _recorded(self, key: Key, configs: Sequence[Config]) -> Config | None:
        """Return the recorded choice; None if it was made without timing all of these configurations."""
        found = self.record.choices.get(str(key), {})
        name, timed = found.get("config"), found.get("microseconds")
        usable = {str(config): config for config in self._usable(key, configs)}
        # FUSEDMOE_GLUON=0 also invalidates the record, if it excludes the choice.
        is_whole = name in usable and usable.keys() <= {name, *(timed if isinstance(timed, dict) else ())}
        return usable[str(name)] if is_whole else None

    def _tune(self, key: Key, configs: Sequence[Config], launch: Callable[[Config], object]) -> Config:
        usable = self._usable(key, configs)
        if len(usable) == 1:
            return usable[0]
        with _allow_sync():
            try:
                seconds = self._times(key, usable, launch)
            except torch.OutOfMemoryError:
                # Memory suffices only for the launch. Not recorded: the next run may have more.
                return self._usable(key, configs)[0]
        chosen = min(seconds, key=seconds.__getitem__)
        times = {str(config): round(1e6 * time, 1) for config, time in seconds.items()}
        self.record.choices[str(key)] = {"config": str(chosen), "microseconds": times}
        self.record.save()
        return chosen

    def _times(self, key: Key, configs: Sequence[Config], launch: Callable[[Config], object]) -> dict[Config, float]:
        """Return the median seconds of each configuration that runs at these sizes, timed interleaved."""
        timers = {}
        for config in configs:
            timer = self._attempt(key, config, partial(self._measure, partial(launch, config), key.shared))
            if timer is not None:
                timers[config] = timer

        def time_all(among: Iterable[Config]) -> dict[Config, float]:
            times_s = {config: self._attempt(key, config, timers[config]) for config in among}
            return {config: seconds for config, seconds in times_s.items() if seconds is not None}

        remaining, spent_s = list(timers), 0.0
        while remaining and spent_s < _WARMUP_S:
            times_s = time_all(remaining)
            remaining, spent_s = list(times_s), spent_s + sum(times_s.values())
        times: dict[Config, list[float]] = {config: [] for config in remaining}
        spent_s = 0.0
        for number in range(_MAX_ROUNDS):
            if number == _ROUNDS and spent_s >= _TIME_LIMIT_S:
                break
            times_s = time_all(remaining)
            spent_s += sum(times_s.values())
            for config in remaining:
                if config in times_s:
                    times[config].append(times_s[config])
                else:
                    del times[config]  # it has failed
            remaining = sorted(times, key=lambda config: statistics.median(times[config]))
            if number + 1 >= _ROUNDS:
                remaining = remaining[:_NUM_FASTEST]
        self._usable(key, configs)  # raises if none is left
        return {config: statistics.median(times_s) for config, times_s in times.items()}

    def _attempt(self, key: Key, config: Config, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Recorded first, so the next process does not retry it.
            self._record_fault(key, config, f"{type(error).__name__}: {error}"[:1000])
            if isinstance(error, TimeoutError) or _is_gpu_lost():
                raise RuntimeError(
                    f"{key.variant} in {config} {error}; this process cannot use the GPU any more. The configuration "
                    "is excluded from now on: restart the process"
                ) from error
            return None

    def _record_fault(self, key: Key, config: Config, fault: str) -> None:
        self.record.faults[_failed_config_key(key, config)] = fault
        self.record.save()
        self._untuned.clear()
        warnings.warn(f"{key.variant} in {config} is not used: {fault}", RuntimeWarning, stacklevel=2)


def _failed_config_key(key: Key, config: Config) -> str:
    """Return the key of a failed configuration in `TuningRecord.faults`; the number of programs is not compiled in."""
    return f"{key.variant}, {with_programs(config, 0)}"


def _is_gpu_lost() -> bool:
    """Return whether this process has lost its GPU: after an illegal access every call fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@cache
def tuner(device: torch.device) -> Tuner:
    """Return the GPU's tuner. Launches are tuned one at a time, because concurrent tuning would disturb the times."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{torch.cuda.get_device_name(device)}-triton-{triton.__version__}")
    record = TuningRecord(cache_dir() / f"grouped-{name}-{_hash_sources()}.json")
    return make_tuner(device, partial(verified_candidates, gpu_of(device)), record)


def gpu_of(device: torch.device) -> Gpu:
    found: Any = torch.cuda.get_device_properties(device)  # PyTorch's type stubs lack a field
    return Gpu((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)


def make_tuner(device: torch.device, candidates: Candidates, record: TuningRecord) -> Tuner:
    holder = cache(partial(MultiprocessorHolder, device))  # shared by all timed launches, created on first use

    def measure(run: Callable[[], object], shared: bool) -> Callable[[], float]:
        def time_on_device() -> float:
            with torch.cuda.device(device):  # CUDA events belong to a device
                return time_launch()

        with torch.cuda.device(device):
            time_launch = _prepare_timer(device, run, holder() if shared else None)
        return time_on_device

    return Tuner(
        candidates,
        measure,
        record,
        lambda: not torch.cuda.is_current_stream_capturing(),
        torch.are_deterministic_algorithms_enabled,
    )


def _hash_sources() -> str:
    """Return a hash of the kernel sources: a changed kernel starts a new file."""
    together = hashlib.sha256()
    kernels = Path(__file__).parents[2]
    forms = (kernels / "triton" / "grouped", kernels / "gluon" / "grouped")
    compiling = (kernels / "grouped.py", kernels / "triton" / "jit.py", kernels / "gluon" / "__init__.py")
    for file in (*compiling, *(file for form in forms for file in sorted(form.glob("*.py")))):
        together.update(file.read_bytes())
    return together.hexdigest()[:12]


def poll_until(ended: Callable[[], bool], seconds: float) -> None:
    """Poll until `ended()`; raises TimeoutError after `seconds`."""
    limit = time.monotonic() + seconds
    while not ended():
        if time.monotonic() > limit:
            raise TimeoutError(f"has not ended after {seconds:g} seconds")
        time.sleep(1e-3)


@jit(do_not_specialize=["epoch", "max_polls"])
def hold_kernel(flag_ptr, sink_ptr, epoch, max_polls, NUMBERS: tl.constexpr):
    """Run until the flag equals `epoch`, at most `max_polls` polls; load and store a few numbers between polls."""
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    polls = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen != epoch) & (polls < max_polls):
        tl.store(sink_ptr + at, tl.load(sink_ptr + at, volatile=True) + 1)
        seen = tl.load(flag_ptr, volatile=True)
        polls += 1


class MultiprocessorHolder:
    """Occupies multiprocessors between `hold` and `release` around a launch on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._sink = torch.zeros((NUM_OCCUPIED + 1) * NUMBERS, dtype=torch.int32, device=device)
        self._epoch = 0

    def hold(self) -> None:
        self._epoch += 1
        self._stream.wait_stream(torch.cuda.current_stream())  # not before the timed launch could start
        with torch.cuda.stream(self._stream):
            self._launch(NUM_OCCUPIED, self._sink, self._epoch, _MAX_POLLS)
        # The programs must be resident before the launch, which could fill the GPU.
        self._launch(1, self._sink[NUM_OCCUPIED * NUMBERS :], -1, _DELAY_POLLS)

    def release(self) -> None:
        self._flag.fill_(self._epoch)
        torch.cuda.current_stream().wait_stream(self._stream)  # must not overlap the next timed launch

    def _launch(self, programs: int, sink: Tensor, epoch: int, max_polls: int) -> None:
        hold_kernel[(programs,)](self._flag, sink, epoch, max_polls, NUMBERS=NUMBERS, num_warps=HOLDER_WARPS)


def _prepare_timer(
    device: torch.device, run: Callable[[], object], holder: MultiprocessorHolder | None
) -> Callable[[], float]:
    """Compile a call; the result measures its GPU time in seconds, with none of its operands in the L2 cache."""
    # Flush by reading: written lines would be written back while the call runs.
    numbers = max(torch.cuda.get_device_properties(device).L2_cache_size, 2**24)

    def flush() -> None:
        torch.sum(torch.empty(numbers, device=device), 0)

    def time_s(call: Callable[[], object], flushes: int, holder: MultiprocessorHolder | None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            flush()
        if holder is not None:
            holder.hold()
        start.record()
        call()
        end.record()
        if holder is not None:
            holder.release()
        poll_until(end.query, _HANG_TIMEOUT_S)
        return start.elapsed_time(end) / 1e3

    run()
    time_s(run, 1, holder)
    # Wait for earlier launches on other streams (communication).
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    launched = time.perf_counter() - begin
    # The flushes outlast the host's launch time, so the GPU's time is measured.
    flushes = 1 + min(int(launched / time_s(flush, 0, None)), _MAX_FLUSHES)
    return lambda: time_s(run, flushes, holder)


@contextlib.contextmanager
def _allow_sync() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
