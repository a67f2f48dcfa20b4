"""Checks configurations of the Gluon form in a process of its own, which may hang or lose its GPU.

`python -m fusedmoe.kernels.triton.grouped.apart` is that process. It is told what to check on its standard input, and
says one line of its standard output for each configuration. After an exception, which may have taken the GPU from it,
it ends, and another goes on with the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedmoe.kernels.triton.grouped.configs import HopperConfig, Variant
from fusedmoe.kernels.triton.grouped.correctness import check

# To start, import and find the GPU; and to compile and check one configuration.
_START_S, _CHECK_S = 60.0, 60.0
# Not even SIGKILL ends a process that is in a call to the GPU which never returns: it is left behind then.
_PATIENCE_S = 10.0
# A line that tells of a verdict begins so: compilers talk, too.
_SIGN = "checked: "
_PROGRAM = (sys.executable, "-m", "fusedmoe.kernels.triton.grouped.apart")


class _Ended(NamedTuple):
    """`verdicts` on the first configurations; `why` there are no more, "" where that is no fault of the next one."""

    verdicts: list[str | None]
    why: str


def check_apart(
    variant: Variant, configs: Sequence[HopperConfig], device: torch.device, program: Sequence[str] = _PROGRAM
) -> dict[HopperConfig, str | None]:
    """Returns what is wrong with the results of each configuration, or that it ends the process that checks it.

    "" where it is right; None where there is not memory enough to know. It takes seconds, and at most two minutes for a
    configuration.

    Args:
        program: that checks.
    """
    left = [*configs]
    found: dict[HopperConfig, str | None] = {}
    while left:
        verdicts, why = _run(variant, left, device, program)
        found |= zip(left, verdicts, strict=False)
        left = left[len(verdicts) :]
        if left and why:
            found[left.pop(0)] = why
    return found


def _run(variant: Variant, configs: Sequence[HopperConfig], device: torch.device, program: Sequence[str]) -> _Ended:
    asked = json.dumps({"variant": variant, "configs": [*map(asdict, configs)], "device": str(device)})
    root = str(Path(__file__).parents[4])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    limit = _START_S + _CHECK_S * len(configs)
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        output, errors = process.communicate(asked, limit)
        why = f"the process that checks it ended with {process.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            output, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode()
        why = f"the process that checks it has not ended after {limit:g} seconds"
    lines = [line.removeprefix(_SIGN) for line in output.splitlines() if line.startswith(_SIGN)]
    told = [json.loads(line) for line in lines]
    return _Ended([one["fault"] for one in told], "" if told and told[-1]["last"] else why)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"


def main() -> int:
    """The other process."""
    asked: dict[str, Any] = json.load(sys.stdin)
    variant, device = Variant(*asked["variant"]), torch.device(asked["device"])
    for fields in asked["configs"]:
        fault: str | None
        last = False
        try:
            fault = check(variant, HopperConfig(**fields), device)
        except Exception as error:
            last = True
            fault = f"{type(error).__name__}: {error}"[:1000]
            if "out of memory" in fault:
                fault = None
        print(_SIGN + json.dumps({"fault": fault, "last": last}), flush=True)
        if last:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
