"""Compiles what launches need, in processes, one a core, before anything is launched.

The processes put it into Triton's cache on disk, under the keys that launches look for: with the same Triton, sources
and environment variables, a launch finds it there. Those of the caller are theirs, too.
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

#: Lines of source take a fifth of the time, and nobody who only looks at the code asks for them.
WITHOUT_LINES = MappingProxyType({"TRITON_DISABLE_LINE_INFO": "1"})

# Of a compiled kernel (`triton.compiler.CompiledKernel`) whatever is wanted; it must be possible to send it.
Look = Callable[[Launch, Any], Any]


@dataclass(frozen=True)
class Compiled:
    """Outcome of compiling a launch.

    Attributes:
        seconds: that it took.
        cached: it was there before.
        error: "" or what is wrong.
        found: what `look` has returned; None where there is an error.
    """

    launch: Launch
    seconds: float
    cached: bool
    error: str = ""
    found: Any = None


def compile_one(launch: Launch, look: Look | None = None) -> Compiled:
    """Compiles a launch in this process, which must not interpret kernels."""
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
    """Has the C compiler make the launcher of a signature, which Triton needs up to 3.6, and keeps.

    It can where CUDA's driver is installed. Nothing here touches a GPU.
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
    """Compiles launches in processes, and yields each as it is done.

    Args:
        workers: processes; one a core if not told.
        look: what to return of each, a function of a module.
        environment: more variables for these processes. What is compiled with some of Triton's is found by launches
            with the same only.
    """
    with processes(workers, environment) as pool:
        tasks = [pool.submit(compile_one, launch, look) for launch in launches]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            # To wait here, too: leaving the block would else take the order to cancel back.
            pool.shutdown(cancel_futures=True)


def processes(workers: int | None = None, environment: Mapping[str, str] = MappingProxyType({})) -> ProcessPoolExecutor:
    """Starts processes that compile. They end with this one, and none of them interprets kernels."""
    begin = partial(_begin, os.getpid(), {**environment, "TRITON_INTERPRET": "0"})
    return ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn"), initializer=begin)


def _begin(parent: int, environment: Mapping[str, str]) -> None:
    from tests.lifetime import end_with

    end_with(parent)
    os.environ |= environment
