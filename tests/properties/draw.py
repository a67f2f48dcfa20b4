"""Random edge-case input for a property: all values follow from one seed, which a failure names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedmoe import autograd
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from tests.kernels.routings import choose

T = TypeVar("T")


class Draw:
    """Draw from a seed, which also seeds torch's default generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def size(self, least: int = 0, most: int = 9) -> int:
        """Draw a small size, often the minimum."""
        return least if self.random.random() < 0.15 else self.random.randint(least, most)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def one_of(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def floats(self, *shape: int, grad: bool = True) -> Tensor:
        """float64 numbers, half of the time not contiguous: every second column, or transposed."""
        kind = self.one_of(("plain", "plain", "columns", "transposed")) if shape else "plain"
        if kind == "columns":
            made = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2]
        elif kind == "transposed":
            made = torch.randn(*reversed(shape), dtype=torch.float64).permute(*reversed(range(len(shape))))
        else:
            made = torch.randn(shape, dtype=torch.float64)
        return made.requires_grad_(grad)

    def choices(self, tokens: int, slots: int, experts: int) -> Tensor:
        """Chosen experts, distinct in a row, of any integer dtype and strides; at times the same one everywhere."""
        expert_SK = choose(tokens, slots, experts, self.one_of((0.0, 0.0, 0.4, 1.0)))
        if self.maybe(0.2):
            expert_SK[:, 0] = self.random.randrange(experts)
        expert_SK = expert_SK.to(self.one_of((torch.int64, torch.int64, torch.int32, torch.int8)))
        return expert_SK.t().contiguous().t() if self.maybe(0.3) else expert_SK

    def layout(self, tokens: int, slots: int, experts: int) -> Layout:
        """A layout of random choices, with and without capacity and padding."""
        capacity = self.one_of((None, None, 0, 1, 3))
        layout = autograd.order(self.choices(tokens, slots, experts), experts, capacity)
        if self.maybe():
            layout = layout.padded(layout.rows + self.size(0, 5)) if tokens else layout
        if self.maybe(0.3):  # as if made by hand
            layout = Layout(*layout.tensors)
        return layout

    def weights(self, experts: int, dim: int, activation: str, out: int | None = None) -> Weights:
        """Weights for rows of width `dim`; results have width `out`, which defaults to `dim`."""
        hidden, halves = self.size(1), (2,) if ACTIVATIONS[activation].gated else ()
        out = dim if out is None else out
        b1 = self.floats(experts, *halves, hidden) if self.maybe() else None
        start = self.random.randint(0, out)
        b2 = self.floats(experts, self.random.randint(0, out - start)) if self.maybe() else None
        w1 = self.floats(experts, *halves, hidden, dim)
        return Weights(w1, self.floats(experts, out, hidden), b1, b2, start if b2 is not None else 0)


def close(what: str, got: Any, expected: Any) -> None:
    """Compare to 1e-10 of the expected norm. NaN is far from any number."""
    assert isinstance(got, Tensor) and got.shape == expected.shape, (what, got, expected.shape)
    error = (got.detach().double() - expected.detach()).norm()
    assert error <= 1e-10 * max(1.0, float(expected.detach().norm())), (what, float(error))


def same_gradients(got: Tensor, expected: Tensor, inputs: dict[str, Tensor | None]) -> None:
    """Gradients of a random sum of both results are equal, and zero where a gradient is missing."""
    close("result", got, expected)
    named = {name: leaf for name, leaf in inputs.items() if leaf is not None}
    dy = torch.randn(expected.shape, dtype=expected.dtype)
    grads = []
    for result in (got, expected):
        found: Sequence[Tensor | None] = [None] * len(named)
        if result.requires_grad:
            found = torch.autograd.grad(result, list(named.values()), dy, retain_graph=True, allow_unused=True)
        grads.append([torch.zeros_like(i) if g is None else g for g, i in zip(found, named.values(), strict=True)])
    for name, one, other in zip(named, *grads, strict=True):
        close(f"gradient of {name}", one, other)
