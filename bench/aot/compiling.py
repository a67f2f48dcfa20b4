"""Compile launches in one process per core, before anything is launched.

The processes write to Triton's on-disk cache under the keys that launches use. A launch finds the result with the same
Triton, sources and environment variables; the processes inherit those of the caller.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

from bench.aot.standin import Launch, driving

#: Line information takes a fifth of the time and is not needed to inspect the code.
WITHOUT_LINES = MappingProxyType({"TRITON_DISABLE_LINE_INFO": "1"})

# Picklable function that extracts data from a compiled kernel (`triton.compiler.CompiledKernel`).
Look = Callable[[Launch, Any], Any]


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a launch.

    Attributes:
        seconds: compile time.
        cached: it was already in the cache.
        error: fault description, or "".
        found: result of `look`; None on error.
    """

    launch: Launch
    seconds: float
    cached: bool
    error: str = ""
    found: Any = None


def compile_one(launch: Launch, look: Look | None = None) -> Compiled:
    """Compile a launch in this process, which must not run Triton's interpreter."""
    from triton import knobs

    hits: list[bool] = []
    start = time.perf_counter()
    try:
        kernel = getattr(import_module(launch.module), launch.kernel)
        with driving(launch.target), knobs.compilation.scope():
            knobs.compilation.listener = lambda cache_hit, **others: hits.append(cache_hit)
            compiled = kernel.preload(launch.data)
        build_launcher(compiled)
        found = None if look is None else look(launch, compiled)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[-2000:]}"
        return Compiled(launch, time.perf_counter() - start, False, text)
    return Compiled(launch, time.perf_counter() - start, hits == [True], "", found)


def build_launcher(compiled: Any) -> None:
    """Build the C launcher of a signature, which Triton up to 3.6 needs and caches.

    Requires CUDA's driver library, but no GPU.
    """
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    driver.CudaLauncher(compiled.src, compiled.metadata)


def compile_all(
    launches: Iterable[Launch],
    workers: int | None = None,
    look: Look | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Compiled]:
    """Compile launches in parallel processes, yielding each on completion.

    Args:
        workers: number of processes; default one per core.
        look: function of a module that extracts the data to return.
        environment: additional variables for the processes. Launches find the results only with equal Triton variables.
    """
    with processes(workers, environment) as pool:
        tasks = [pool.submit(compile_one, launch, look) for launch in launches]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            # Wait here: exiting the block would otherwise undo the cancellation.
            pool.shutdown(cancel_futures=True)


def processes(workers: int | None = None, environment: Mapping[str, str] = MappingProxyType({})) -> ProcessPoolExecutor:
    """Start compile processes, which exit with this process and do not interpret kernels."""
    begin = partial(_begin, os.getpid(), {**environment, "TRITON_INTERPRET": "0"})
    return ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn"), initializer=begin)


def _begin(parent: int, environment: Mapping[str, str]) -> None:
    from tests.lifetime import end_with

    end_with(parent)
    os.environ |= environment
