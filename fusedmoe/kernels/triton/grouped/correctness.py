"""Compares one configuration of one variant with its operation's definition, on small random inputs of the ugly kind.

Experts without rows between, before and behind others, experts of one row, last tiles and last steps that are not full,
more steps than a pipeline has stages, and NaN in everything that must not be read.

Configurations of the Gluon form are checked in a process of their own, which may hang or lose its GPU (`check_apart`):
`python -m fusedmoe.kernels.triton.grouped.correctness`. It is told what to check on its standard input, and says one
line of its standard output for each configuration. After an exception, which may have taken the GPU from it, it ends,
and another goes on with the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.grouped import define_dhidden, define_dweight, define_product, define_up
from fusedmoe.kernels.layout import Layout, offsets
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Key, Variant
from fusedmoe.kernels.triton.grouped.dhidden import dhidden
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.product import product
from fusedmoe.kernels.triton.grouped.up import up

# Rows of the experts; the sides of an expert's matrix, depth and columns: even ones, and others.
COUNTS = (0, 1, 130, 0, 0, 321, 64, 0)
EVEN, ODD = (576, 272), (581, 271)
_PADDING = 37
# Programs of the Gluon form, fewer than tiles: each has several, as it has at a user's sizes.
_FEW = 3
# A launch of these sizes takes microseconds.
_SECONDS = 30.0
_TOKENS = 150
# Elements may differ from the definition by so many of the dtype's epsilon, of themselves and of their mean.
_TOLERANCE = {"bfloat16": 2, "float16": 2, "float32": 100}
# tf32 keeps ten bits of the operands.
_TF32_TOLERANCE = 2**16

Results = Iterator[tuple[str, Tensor, Tensor]]


def check(
    variant: Variant,
    config: Config,
    device: torch.device,
    counts: tuple[int, ...] = COUNTS,
    sides: tuple[int, int] | None = None,
) -> str:
    """Returns what is wrong with the results of a configuration, or "" where nothing is.

    Raises:
        TimeoutError: a launch does not end. Nothing else can be done on this GPU then.
    """
    sides = sides or (EVEN if variant.even else ODD)
    if isinstance(config, HopperConfig):
        fault = _compare(variant, replace(config, programs=_FEW), device, counts, sides)
        if fault:
            return f"{fault}, by {_FEW} programs"
    return _compare(variant, config, device, counts, sides)


def _compare(
    variant: Variant, config: Config, device: torch.device, counts: tuple[int, ...], sides: tuple[int, int]
) -> str:
    depth, columns = sides
    case = RandomRows(variant, config, device, counts)
    tolerance = _TF32_TOLERANCE if variant.precision == "tf32" else _TOLERANCE[variant.dtype]
    for name, found, right in _RESULTS[variant.operation](case, depth, columns):
        # Float64 from the rounded operands, so that only the kernel's own rounding counts.
        error = (found.double() - right).abs()
        mean = right.square().mean().sqrt()
        bound = tolerance * torch.finfo(case.dtype).eps * (right.abs() + mean)
        wrong = int((~(error <= bound)).sum())  # not so for NaN either
        if wrong:
            worst = float((error / bound).max())
            return f"{wrong} of {right.numel()} values of {name} are wrong, the worst by {worst:.3g} times what may be"
    return ""


class RandomRows:
    """Random rows of some experts, and the call that runs them."""

    def __init__(self, variant: Variant, config: Config, device: torch.device, counts: tuple[int, ...]) -> None:
        self.variant, self.config, self.device = variant, config, device
        self.dtype = getattr(torch, variant.dtype)
        self.experts, self.kept, self.rows = len(counts), sum(counts), sum(counts) + _PADDING
        self.tokens = _TOKENS if variant.gather else self.rows
        self._random = torch.Generator(device).manual_seed(0)
        counts_E = torch.tensor(counts, device=device)
        self.expert_N = torch.arange(self.experts, device=device).repeat_interleave(counts_E)
        row_N = torch.arange(self.rows, device=device)
        source_N = torch.randint(self.tokens, (self.rows,), device=device, generator=self._random)
        source_N[self.kept :] = 0  # padding has valid indices
        self.source_N = (source_N if variant.gather else row_N)[: self.kept]
        layout = Layout(counts_E, offsets(counts_E), source_N if variant.gather else None, row_N, row_N.view(-1, 1))
        like = torch.empty(0, device=device, dtype=self.dtype)
        self.call = GroupedCall(layout, like, self._choose, variant.bulk)

    def _choose(self, key: Key, launch: Callable[[Config], object]) -> Config:
        if key.variant != self.variant:
            raise AssertionError(f"checks {key.variant} instead of {self.variant}")
        if self.device.type == "cuda":
            launch(self.config)
            end = torch.cuda.Event()
            end.record()
            wait(end.query, _SECONDS)
        return self.config

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(sizes, device=self.device, dtype=torch.float32, generator=self._random)
        return values.to(dtype or self.dtype)

    def random_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Sorted rows, NaN where there is padding."""
        values = self.random(self.rows, *sizes, dtype=dtype)
        values[self.kept :] = float("nan")
        return values


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


def _up(case: RandomRows, dim: int, hidden: int) -> Results:
    activation = ACTIVATIONS[case.variant.activation]
    halves = (2,) if activation.gated else ()
    x_SM = case.random(case.tokens, dim)
    w1, w2 = case.random(case.experts, *halves, hidden, dim) / dim**0.5, case.random(case.experts, 1, hidden)
    b1 = case.random(case.experts, *halves, hidden) if case.variant.extra else None
    h, a = up(case.call, x_SM, Weights(w1, w2, b1), activation)
    bias = None if b1 is None else b1.double()
    right = define_up(x_SM.double(), case.source_N, case.expert_N, w1.double(), bias, activation.name)
    yield "H", h[: case.kept], right[0].flatten(1)
    yield "A", a[: case.kept], right[1]


def _product(case: RandomRows, depth: int, columns: int) -> Results:
    transposed = case.variant.operation == "down"
    a = case.random_rows(depth)
    b = case.random(case.experts, *((columns, depth) if transposed else (depth, columns)))
    start, width = columns // 3, columns - columns // 3 - 1
    bias = case.random(case.experts, width) if case.variant.extra else None
    out = product(case.call, case.variant.operation, a, b, transposed, bias, start)
    right = define_product(a[: case.kept].double(), case.expert_N, b.double(), transposed)
    if bias is not None:
        right[:, start : start + width] += bias[case.expert_N].double()
    yield "the product", out[: case.kept], right


def _dhidden(case: RandomRows, dim: int, hidden: int) -> Results:
    activation = ACTIVATIONS[case.variant.activation]
    dy_SM, h = case.random(case.tokens, dim), case.random_rows(activation.halves * hidden)
    w2 = case.random(case.experts, dim, hidden) / dim**0.5
    weight_N = case.random_rows(dtype=torch.float32) if case.variant.extra else None
    dh, a, ds_N = dhidden(case.call, dy_SM, h, weight_N, Weights(w2, w2), activation)
    assert dh is not None and a is not None  # all is wanted
    factor_N = torch.ones_like(case.source_N) if weight_N is None else weight_N[: case.kept]
    shape = (case.kept, 2, hidden) if activation.gated else (case.kept, hidden)
    right = define_dhidden(
        dy_SM.double(),
        case.source_N,
        case.expert_N,
        factor_N.double(),
        h[: case.kept].double().view(shape),
        w2.double(),
        activation.name,
    )
    yield "dH", dh[: case.kept], right[0].flatten(1)
    yield "A", a[: case.kept], right[1]
    if ds_N is not None:
        yield "the router weights' gradient", ds_N[: case.kept], right[2]


def _dweight(case: RandomRows, depth: int, columns: int) -> Results:
    """The gradient of W1 or W2; of W1 the gathered side is the right one, of W2 the left one."""
    gather = "right" if case.variant.operation == "dw1" else "left"
    left, right = (
        case.random(case.tokens, width) if side == gather else case.random_rows(width)
        for side, width in (("left", depth), ("right", columns))
    )
    out = dweight(case.call, case.variant.operation, left, right, gather)
    index = [case.source_N if side == gather else slice(case.kept) for side in ("left", "right")]
    left, right = (values[rows].double() for values, rows in zip((left, right), index, strict=True))
    yield "the matrices' gradient", out, define_dweight(left, right, case.expert_N, case.experts)


_RESULTS: dict[str, Callable[[RandomRows, int, int], Results]] = {
    "up": _up,
    "down": _product,
    "dhidden": _dhidden,
    "dinput": _product,
    "dw1": _dweight,
    "dw2": _dweight,
}


# To start, import and find the GPU; and to compile and check one configuration.
_START_S, _CHECK_S = 60.0, 60.0
# Not even SIGKILL ends a process that is in a call to the GPU which never returns: it is left behind then.
_PATIENCE_S = 10.0
# A line that tells of a verdict begins so: compilers talk, too.
_SIGN = "checked: "
_PROGRAM = (sys.executable, "-m", "fusedmoe.kernels.triton.grouped.correctness")


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
    # The process imports this very library, wherever it was imported from.
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
