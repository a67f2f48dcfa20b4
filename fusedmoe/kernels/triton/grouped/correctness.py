"""Compares one configuration of one variant with its operation's definition, on small random inputs of the ugly kind.

Experts without rows between, before and behind others, experts of one row, last tiles and last steps that are not full,
more steps than a pipeline has stages, and NaN in everything that must not be read.

Configurations of the Gluon form are checked in processes of their own, which may hang or lose the GPU (`check_apart`):
`python -m fusedmoe.kernels.triton.grouped.correctness`. It is told what to check on its standard input. Lines of its
standard output say that it has the GPU, that a launch was made, and the verdict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

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
# A launch of these sizes takes microseconds; a GPU that others use may take its turn first.
_SECONDS = 5.0
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
    launched: Callable[[], None] = lambda: None,
) -> str:
    """Returns what is wrong with the results of a configuration, or "" where nothing is. `launched` is called after
    each launch: what was compiled is on the GPU then.

    Raises:
        TimeoutError: a launch does not end. Nothing else can be done on this GPU then.
    """
    sides = sides or (EVEN if variant.even else ODD)

    def compare(config: Config) -> str:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _compare(variant, config, device, counts, sides, launched)

    # In a thread of its own: the caller's may be inside an operator, where autograd is off, which definitions need.
    with ThreadPoolExecutor(1) as thread:
        if isinstance(config, HopperConfig):
            fault = thread.submit(compare, replace(config, programs=_FEW)).result()
            if fault:
                return f"{fault}, by {_FEW} programs"
        return thread.submit(compare, config).result()


def _compare(
    variant: Variant,
    config: Config,
    device: torch.device,
    counts: tuple[int, ...],
    sides: tuple[int, int],
    launched: Callable[[], None],
) -> str:
    depth, columns = sides
    case = RandomRows(variant, config, device, counts, launched)
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

    def __init__(
        self,
        variant: Variant,
        config: Config,
        device: torch.device,
        counts: tuple[int, ...],
        launched: Callable[[], None] = lambda: None,
    ) -> None:
        self.variant, self.config, self.device, self._launched = variant, config, device, launched
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
            self._launched()
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
    # Its derivative is taken on the host: the one thread in which PyTorch takes those of a GPU's tensors may be the
    # caller's, in the midst of a layer's backward, and waits for this check.
    right = define_dhidden(
        dy_SM.cpu().double(),
        case.source_N.cpu(),
        case.expert_N.cpu(),
        factor_N.cpu().double(),
        h[: case.kept].cpu().double().view(shape),
        w2.cpu().double(),
        activation.name,
    )
    yield "dH", dh[: case.kept], right[0].flatten(1).to(dh.device)
    yield "A", a[: case.kept], right[1].to(a.device)
    if ds_N is not None:
        yield "the router weights' gradient", ds_N[: case.kept], right[2].to(ds_N.device)


def _dweight(case: RandomRows, depth: int, columns: int) -> Results:
    """The gradient of W1 or W2; of W1 the gathered side is the right one, of W2 the left one."""
    gather = "right" if case.variant.operation == "dw1" else "left"
    left, right = (
        case.random(case.tokens, width) if side == gather else case.random_rows(width)
        for side, width in (("left", depth), ("right", columns))
    )
    index = [case.source_N if side == gather else slice(case.kept) for side in ("left", "right")]
    left_NP, right_NQ = (values[rows].double() for values, rows in zip((left, right), index, strict=True))
    right_EPQ = define_dweight(left_NP, right_NQ, case.expert_N, case.experts)
    # What is added is a first chunk's, of the rows' dtype, or a sum of several in float32.
    totals: list[Tensor | None] = [None]
    if case.variant.extra:
        dtypes = dict.fromkeys((torch.float32, case.dtype))
        totals = [case.random(case.experts, depth, columns, dtype=of) for of in dtypes]
    for total in totals:
        before = 0.0 if total is None else total.double()
        out = dweight(case.call, case.variant.operation, left, right, gather, total)
        yield "the matrices' gradient", out, right_EPQ + before


_RESULTS: dict[str, Callable[[RandomRows, int, int], Results]] = {
    "up": _up,
    "down": _product,
    "dhidden": _dhidden,
    "dinput": _product,
    "dw1": _dweight,
    "dw2": _dweight,
}


# To start, import and find the GPU; to compile; and for what follows a launch, which has a bound of its own.
_START_S, _COMPILE_S, _LAUNCHED_S = 60.0, 60.0, _SECONDS + 5.0
# Not even SIGKILL ends a process that is in a call to the GPU which never returns: it is left behind then.
_PATIENCE_S = 10.0
# Processes beside each other: compiling is most of what they do, and each takes half a gigabyte of the GPU's memory.
_AT_ONCE = 3
# Lines that are meant for us begin so: compilers talk, too.
_STARTED, _LAUNCHED, _CHECKED = "started", "launched", "checked: "
_PROGRAM = (sys.executable, "-m", "fusedmoe.kernels.triton.grouped.correctness")


def check_apart(
    variant: Variant, configs: Sequence[HopperConfig], device: torch.device, program: Sequence[str] = _PROGRAM
) -> Iterator[tuple[HopperConfig, str | None]]:
    """Begins to check configurations, each in a process of its own, some beside each other. What it returns yields what
    is wrong with the results of each, or that it has ended its process, as soon as it is known; so much memory of the
    device as a process takes is needed once more for each that runs.

    "" where it is right; None where nobody knows, and another try may tell: for lack of memory, or of time to start or
    to compile. It takes seconds; where something hangs, a minute or two.

    Args:
        program: that checks.
    """
    pool = ThreadPoolExecutor(_AT_ONCE)
    verdicts = {pool.submit(_verdict, variant, config, device, program): config for config in configs}
    pool.shutdown(wait=False)
    return ((verdicts[verdict], verdict.result()) for verdict in as_completed(verdicts))


def _verdict(variant: Variant, config: HopperConfig, device: torch.device, program: Sequence[str]) -> str | None:
    process = _Checking(variant, config, device, program)
    try:
        return process.verdict()
    finally:
        process.end()


class _Checking:
    """A process that checks one configuration."""

    def __init__(self, variant: Variant, config: HopperConfig, device: torch.device, program: Sequence[str]) -> None:
        # The process imports this very library, wherever it was imported from.
        root = str(Path(__file__).parents[4])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  until `end`; a pipe could be full
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        asked = json.dumps({"variant": variant, "config": asdict(config), "device": str(device)})
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


def main() -> None:
    """The other process."""
    asked: dict[str, Any] = json.load(sys.stdin)
    device, fault = torch.device(asked["device"]), None
    torch.empty(0, device=device)
    print(_STARTED, flush=True)
    try:
        config = HopperConfig(**asked["config"])
        fault = check(Variant(*asked["variant"]), config, device, launched=lambda: print(_LAUNCHED, flush=True))
    except Exception as error:
        if "out of memory" not in str(error):
            fault = f"{type(error).__name__}: {error}"[:1000]
    print(_CHECKED + json.dumps(fault), flush=True)


if __name__ == "__main__":
    main()
