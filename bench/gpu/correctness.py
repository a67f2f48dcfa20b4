"""Compare a configuration of a variant with its operation's definition, on small random inputs with edge cases.

Experts without rows between, before and after others; experts of one row; partial last tiles and steps; more steps than
pipeline stages; NaN in everything that must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.grouped import define_dhidden, define_dweight, define_product, define_up
from fusedmoe.kernels.layout import Layout, offsets
from fusedmoe.kernels.triton.grouped.autotune import poll_until
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Key, Variant
from fusedmoe.kernels.triton.grouped.dhidden import dhidden
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.product import product
from fusedmoe.kernels.triton.grouped.up import up

# Rows per expert; sides of an expert's matrix (depth, columns): even ones, and others.
COUNTS = (0, 1, 130, 0, 0, 321, 64, 0)
EVEN, ODD = (576, 272), (581, 271)
_PADDING = 37
# Persistent programs of the Gluon form, fewer than tiles: each has several tiles, as at typical sizes.
_FEW = 3
# A launch takes microseconds; a shared GPU may delay it.
SECONDS = 5.0
_TOKENS = 150
# Tolerance in epsilons of the dtype, relative to the element and to the mean.
_TOLERANCE = {"bfloat16": 2, "float16": 2, "float32": 100}
# tf32 keeps ten bits of the operands' mantissa.
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
    """Return the fault of a configuration's results, or ""; `launched` is called after each launch.

    Raises:
        TimeoutError: a launch does not end. The GPU is unusable for this process then.
    """
    given = device, counts, sides or (EVEN if variant.even else ODD), launched
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if isinstance(config, HopperConfig):
            fault = _compare(variant, replace(config, programs=_FEW), *given)
            if fault:
                return f"{fault}, by {_FEW} programs"
        return _compare(variant, config, *given)


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
        # Float64 from the rounded operands isolates the kernel's own rounding.
        error = (found.double() - right).abs()
        mean = right.square().mean().sqrt()
        bound = tolerance * torch.finfo(case.dtype).eps * (right.abs() + mean)
        wrong = int((~(error <= bound)).sum())  # also counts NaN
        if wrong:
            worst = float((error / bound).max())
            return f"{wrong} of {right.numel()} values of {name} are wrong, the worst by {worst:.3g} times what may be"
    return ""


class RandomRows:
    """Random rows of some experts, and the call that processes them."""

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
            poll_until(end.query, SECONDS)
        return self.config

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(sizes, device=self.device, dtype=torch.float32, generator=self._random)
        return values.to(dtype or self.dtype)

    def random_rows(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return sorted rows with NaN in the padding."""
        values = self.random(self.rows, *sizes, dtype=dtype)
        values[self.kept :] = float("nan")
        return values


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
    dy_SM, h = case.random(case.tokens, dim), case.random_rows(activation.num_projections * hidden)
    w2 = case.random(case.experts, dim, hidden) / dim**0.5
    weight_N = case.random_rows(dtype=torch.float32) if case.variant.extra else None
    dh, a, ds_N = dhidden(case.call, dy_SM, h, weight_N, Weights(w2, w2), activation)
    assert dh is not None and a is not None  # everything is requested
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
    """Return the results of the gradient of W1 (gathered right operand) or W2 (gathered left operand)."""
    gather = "right" if case.variant.operation == "dw1" else "left"
    left, right = (
        case.random(case.tokens, width) if side == gather else case.random_rows(width)
        for side, width in (("left", depth), ("right", columns))
    )
    index = [case.source_N if side == gather else slice(case.kept) for side in ("left", "right")]
    left_NP, right_NQ = (values[rows].double() for values, rows in zip((left, right), index, strict=True))
    right_EPQ = define_dweight(left_NP, right_NQ, case.expert_N, case.experts)
    # Accumulates onto a first chunk in the rows' dtype, or a sum of several in float32.
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
