"""Checks configurations in processes of their own, which may hang or lose the GPU: `python -m bench.gpu.apart`.

A process is told what to check on its standard input. Lines of its standard output say that it has the GPU, that a
launch was made, and the verdict.
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

# To start, import and find the GPU; to compile; and for what follows a launch, which has a bound of its own.
_START_S, _COMPILE_S, _LAUNCHED_S = 180.0, 60.0, SECONDS + 5.0
# Not even SIGKILL ends a process that is in a call to the GPU which never returns: it is left behind then.
_PATIENCE_S = 10.0
# Lines that are meant for us begin so: compilers talk, too.
_STARTED, _LAUNCHED, _CHECKED = "started", "launched", "checked: "
_PROGRAM = (sys.executable, "-m", "bench.gpu.apart")


class Case(NamedTuple):
    """A configuration to check in a variant."""

    variant: Variant
    config: Config


def check_apart(
    cases: Sequence[Case], device: torch.device, at_once: int = 3, program: Sequence[str] = _PROGRAM
) -> Iterator[tuple[Case, str | None]]:
    """Begins to check configurations, each in a process of its own, and yields each verdict as soon as it is known.

    A verdict is "" where the results are right, or what is wrong with them, or how the process ended; None where the
    process lacked memory, or time to start or to compile. A check takes seconds; where something hangs, a minute or
    two. Each process takes half a gigabyte of the GPU's memory.

    Args:
        at_once: processes at the same time; compiling is most of what they do.
        program: that checks.
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
    """A process that checks one configuration."""

    def __init__(self, case: Case, device: torch.device, program: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  until `end`; a pipe could be full
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
        with suppress(BrokenPipeError):  # it has ended already
            stdin.write(asked)
            stdin.close()
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None: it says no more
        threading.Thread(target=self._listen, args=(stdout,), daemon=True).start()

    def _listen(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def verdict(self) -> str | None:
        """Waits for it, as `check_apart` says."""
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
    """Returns a case as JSON takes it; `parsed` is the inverse."""
    return {
        "variant": case.variant,
        "gluon": isinstance(case.config, HopperConfig),
        "config": asdict(case.config),
    }


def parsed(told: dict[str, Any]) -> Case:
    return Case(Variant(*told["variant"]), (HopperConfig if told["gluon"] else Config)(**told["config"]))


def main() -> None:
    """The other process."""
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
