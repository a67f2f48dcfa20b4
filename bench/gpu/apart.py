"""Check configurations in separate processes, which may hang or lose the GPU: `python -m bench.gpu.apart`.

A process reads its case from standard input. Lines on standard output report that it has a GPU, each launch, and the
verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

import torch

from bench.gpu.correctness import SECONDS, check
from bench.gpu.process import ROOT
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Variant

# Timeouts for start-up, for compiling, and after a launch, which has its own timeout.
_START_S, _COMPILE_S, _LAUNCHED_S = 180.0, 60.0, SECONDS + 5.0
# SIGKILL does not end a process in a GPU call that never returns; it is abandoned.
_PATIENCE_S = 10.0
# Prefixes of protocol lines: compilers print, too.
_STARTED, _LAUNCHED, _CHECKED = "started", "launched", "checked: "
_PROGRAM = (sys.executable, "-m", "bench.gpu.apart")


class Case(NamedTuple):
    """A configuration to check in a variant."""

    variant: Variant
    config: Config


def check_apart(
    cases: Sequence[Case], device: torch.device, at_once: int = 3, program: Sequence[str] = _PROGRAM
) -> Iterator[tuple[Case, str | None]]:
    """Check configurations in separate processes and yield verdicts as they complete.

    A verdict is "" for correct results, otherwise the fault or how the process ended; None if it ran out of memory or
    of time to start or compile. A check takes seconds, a hanging one up to two minutes. Each process uses half a
    gigabyte of GPU memory.

    Args:
        at_once: number of concurrent processes, which mostly compile.
        program: command line of the checker.
    """
    pool = ThreadPoolExecutor(at_once)
    verdicts = {pool.submit(_verdict, case, device, program): case for case in cases}
    pool.shutdown(wait=False)
    return ((verdicts[verdict], verdict.result()) for verdict in as_completed(verdicts))


def _verdict(case: Case, device: torch.device, program: Sequence[str]) -> str | None:
    process = _Checking(case, device, program)
    try:
        return process.verdict()
    finally:
        process.end()


class _Checking:
    """Process that checks one configuration."""

    def __init__(self, case: Case, device: torch.device, program: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `end`; a pipe could block
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
        )
        asked = json.dumps({**described(case), "device": str(device)})
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # it has already ended
            stdin.write(asked)
            stdin.close()
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None: end of output
        threading.Thread(target=self._listen, args=(stdout,), daemon=True).start()

    def _listen(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def verdict(self) -> str | None:
        """Wait for the verdict; see `check_apart`."""
        limit_s, started, launched = _START_S, False, False
        until = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                why = f"the process that checks it has said nothing for {limit_s:g} seconds after its launch"
                return why if launched else None
            if line is None:
                if not started:
                    return None  # it never had the GPU
                return f"the process that checks it ended with {self._process.wait()}: {self._last_words()}"
            if line.startswith(_CHECKED):
                fault: str | None = json.loads(line.removeprefix(_CHECKED))
                return fault
            if line.startswith((_STARTED, _LAUNCHED)):
                started, launched = True, line.startswith(_LAUNCHED)
                limit_s = _LAUNCHED_S if launched else _COMPILE_S
                until = time.monotonic() + limit_s

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"

    def end(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._errors.close()


def described(case: Case) -> dict[str, Any]:
    """Return a case as JSON; inverse of `parsed`."""
    return {
        "variant": case.variant,
        "gluon": isinstance(case.config, HopperConfig),
        "config": asdict(case.config),
    }


def parsed(told: dict[str, Any]) -> Case:
    return Case(Variant(*told["variant"]), (HopperConfig if told["gluon"] else Config)(**told["config"]))


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    device, fault = torch.device(asked["device"]), None
    torch.empty(0, device=device)
    print(_STARTED, flush=True)
    try:
        fault = check(*parsed(asked), device, launched=lambda: print(_LAUNCHED, flush=True))
    except Exception as error:
        if "out of memory" not in str(error):
            fault = f"{type(error).__name__}: {error}"[:1000]
    print(_CHECKED + json.dumps(fault), flush=True)


if __name__ == "__main__":
    main()
