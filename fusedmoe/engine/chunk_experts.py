"""Experts as the pipelined layer calls them: chunk by chunk, forward and backward apart, without autograd around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.checks import check_rows
from fusedmoe.autograd.experts import WeightParts, learning_weights, no_wider, shape_of
from fusedmoe.autograd.moves import Compute
from fusedmoe.compat.torch import RefuseCollectives, retains_graph
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import (
    Gradients,
    Hidden,
    Wanted,
    Weights,
    experts_backward,
    experts_backward_rows,
    experts_backward_weights,
    experts_forward,
)
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.low_rank import Adapters, low_rank_backward, low_rank_forward

# Gradients of parameters; None before the first chunk, and for a parameter without one.
Totals = Sequence["Tensor | None"] | None

# Adds a chunk's gradients of parameters to those of the chunks before.
Rest = Callable[[Totals], Totals]


class ChunkExperts(Protocol):
    """The local experts, for rows of one chunk, sorted by expert by a layout.

    Attributes:
        parameters: what gets gradients, in the order of those.
        any_degree: the backward's chunks may be others than the forward's. Then what a chunk keeps is one tensor whose
            n-th row belongs to the n-th sorted row.
        keeps_rows: the backward reads the rows that the forward was given; else it gets None for them.
        tokens_learn, weights_learn: some rank needs gradients of rows, of their weights
            (`Exchange.tokens_require_grad`); else the backward returns None for them. Set before the first forward.
    """

    tokens_learn: bool
    weights_learn: bool

    @property
    def parameters(self) -> Sequence[Tensor | None]: ...

    @property
    def any_degree(self) -> bool: ...

    @property
    def keeps_rows(self) -> bool: ...

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        """Results, and what the backward needs of them beside the inputs."""
        ...

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        """Gradients of rows, of their weights, and of the parameters, these added up over the chunks.

        `totals`: what the chunk before gave; None at the first one. Of half precision in float32 from the second on.
        """
        ...

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        """Gradients of rows and of their weights, and what gives those of the parameters later."""
        ...

    def for_backward(self) -> ChunkExperts:
        """Returns what the backward pass needs.

        A graph keeps it, and so it holds no module: a layer that keeps a tensor of that graph would never go."""
        ...


class GroupedExperts:
    """Feed-forward experts by their own kernels, beside communication. A chunk keeps its pre-activations.

    Args:
        learns: w1, w2, b1 and b2 that have gradients; None: those that require them.
    Attributes:
        wanted: the gradients that are computed.
    """

    any_degree = tokens_learn = weights_learn = True

    def __init__(self, weights: Weights, activation: str, learns: Sequence[bool] | None = None) -> None:
        # Once for all chunks: kernels would copy matrices with other strides in each of them.
        weights = weights.contiguous()
        self.weights, self.activation = weights, ACTIVATIONS[activation]
        self.parameters = (weights.w1, weights.w2, weights.b1, weights.b2)
        self._learns = learning(self.parameters) if learns is None else learns
        self.keeps_rows = self._learns[0]

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.tokens_learn, self.weights_learn, *self._learns)

    def for_backward(self) -> GroupedExperts:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return experts_forward(x_RM, layout, weight_R, self.weights, self.activation, shared=True)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        # Kernels add to what the chunks before gave: no second tensor of the parameters' size.
        given = (layout, weight_R, self.weights, self.activation, _gradients(totals), self.wanted)
        grads = experts_backward(dy_RM, x_RM, kept, *given, shared=True)
        return grads.x_SM, grads.weight_N, grads.parameters

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        given = (layout, weight_R, self.weights, self.activation, self.wanted)
        dx_RM, dweight_R, left = experts_backward_rows(dy_RM, kept, *given, shared=True)
        return dx_RM, dweight_R, partial(self.weight_gradients, dy_RM, x_RM, left, layout, weight_R)

    def weight_gradients(
        self,
        dy_RM: Tensor,
        x_RM: Tensor | None,
        left: Hidden,
        layout: Layout,
        weight_R: Tensor | None,
        totals: Totals,
    ) -> Totals:
        """The second half of `backward`."""
        given = (layout, weight_R, self.weights, _gradients(totals), self.wanted)
        return experts_backward_weights(dy_RM, x_RM, left, *given, shared=True).parameters


def learning(parameters: Sequence[Tensor | None]) -> list[bool]:
    """Tells which parameters have gradients."""
    return [parameter is not None and parameter.requires_grad for parameter in parameters]


class _SplitTotals(list["Tensor | None"]):
    """Gradients of the parts that learn, which are views of those of the joined weights: chunks add to these."""

    def __init__(self, joined: Totals, parts: Sequence[Tensor], learns: Sequence[bool]) -> None:
        super().__init__(part if learn else None for part, learn in zip(parts, learns, strict=True))
        self.joined = joined


class PartExperts:
    """Experts like `GroupedExperts` whose weights lie in parts: joined for a pass, and not kept between the two.

    Args: as for `fusedmoe.autograd.experts_in_parts`.
    """

    any_degree = tokens_learn = weights_learn = True

    def __init__(self, parts: Sequence[Tensor], how: WeightParts, activation: str) -> None:
        self.parameters, self._how, self._activation = tuple(parts), how, activation
        self._learns = learning(parts)
        self.keeps_rows = any(self._learns)
        self._joined: GroupedExperts | None = None

    def for_backward(self) -> PartExperts:
        # Without the joined weights: a graph that kept them would keep a copy of all experts.
        experts = copy(self)
        experts._joined = None
        return experts

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._experts(x_RM).forward(x_RM, layout, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        dx_RM, dweight_R, joined = self._experts(dy_RM).backward(dy_RM, x_RM, kept, layout, weight_R, _joined(totals))
        return dx_RM, dweight_R, self._split(joined)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        dx_RM, dweight_R, rest = self._experts(dy_RM).backward_rows(dy_RM, x_RM, kept, layout, weight_R)
        return dx_RM, dweight_R, lambda totals: self._split(rest(_joined(totals)))

    def _experts(self, like: Tensor) -> GroupedExperts:
        if self._joined is None:
            w1, w2 = self._how.join([part.to(like.dtype) for part in self.parameters])
            learns = (*learning_weights(self._how, w1, w2, self._learns), False, False)
            self._joined = GroupedExperts(Weights(w1, w2, None, None, 0), self._activation, learns)
            self._joined.tokens_learn, self._joined.weights_learn = self.tokens_learn, self.weights_learn
        return self._joined

    def _split(self, joined: Totals) -> Totals:
        assert joined is not None and self._joined is not None
        weights = self._joined.weights.w1, self._joined.weights.w2
        # Of a matrix that is frozen there is nothing to split but its shape.
        grads = (shape_of(w) if grad is None else grad for w, grad in zip(weights, joined, strict=False))
        return _SplitTotals(joined, self._how.split(*grads), self._learns)


# For each owner of experts: the passes and modes that ran without a collective. A dispatch mode costs microseconds for
# each operator, and a compiler skips functions that are called under one: so one chunk of each kind is watched.
_CHECKED: WeakKeyDictionary[Any, set[tuple[str, bool]]] = WeakKeyDictionary()


class AutogradExperts:
    """Experts of any kind, by autograd inside each chunk. A chunk keeps its graph, so both passes have its chunks.

    Args:
        compute: the experts, called with rows, layout and weights.
        parameters: the tensors that get gradients.
        owner: the module that `compute` runs, for errors; None: `compute` itself.
        leaves: the tensors that `compute` reads in place of `parameters`, where these have a graph; None: the same.
    Raises:
        ConfigError: from a pass, when the experts call a collective: the ranks could not order it among their own.
    """

    # What a chunk keeps has its rows.
    any_degree = keeps_rows = False
    tokens_learn = weights_learn = True

    def __init__(
        self,
        compute: Compute | None,
        parameters: Sequence[Tensor],
        owner: object = None,
        leaves: Sequence[Tensor] | None = None,
    ) -> None:
        self._compute: Callable[..., Tensor] | None = compute
        self.parameters = tuple(parameters)
        self._leaves = self.parameters if leaves is None else tuple(leaves)
        owner = compute if owner is None else owner
        self._name = type(owner).__qualname__ if isinstance(owner, torch.nn.Module) else repr(owner)
        self._training = bool(getattr(owner, "training", True))
        # Owners of other classes are checked in each call. A compiler makes experts to read their parameters, and runs
        # no chunk: a graph that looked owners up would serve that number of them alone.
        known = isinstance(owner, torch.nn.Module) and not torch.compiler.is_compiling()
        self._checked = _CHECKED.setdefault(owner, set()) if known else set()

    def for_backward(self) -> AutogradExperts:
        # What chunks keep has the graph; with the module in it, a layer that holds a tensor of it would never go.
        experts = copy(self)
        experts._compute = None
        return experts

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        assert self._compute is not None
        with torch.enable_grad(), self._without_collectives("forward", len(x_RM)):
            # Leaves of a graph of its own: the pass around it runs without autograd, and asks for gradients by hand.
            x_RM = x_RM.detach().requires_grad_(self.tokens_learn)
            weight_R = None if weight_R is None else weight_R.detach().requires_grad_(self.weights_learn)
            y_RM = no_wider(self._compute(x_RM, layout, weight_R), x_RM)
            check_rows("experts in chunks", "their result", y_RM, len(x_RM))
        return y_RM.detach(), (y_RM, x_RM, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        totals = totals or (None,) * len(self.parameters)
        y_RM, own_x_RM, own_weight_R = kept
        # Of what is frozen there is no gradient; of what these rows did not use it is None.
        learned = own_x_RM, own_weight_R, *self._leaves
        inputs = [tensor for tensor in learned if tensor is not None and tensor.requires_grad]
        grads: Iterator[Tensor | None] = iter(())
        if y_RM.requires_grad:
            # As in the backward around it (`retain_graph`): another one may follow.
            again = retains_graph()
            with self._without_collectives("backward", len(dy_RM)):
                grads = iter(torch.autograd.grad(y_RM, inputs, dy_RM, retain_graph=again, allow_unused=True))
        dx_RM, dweight_R, *own = (
            next(grads, None) if tensor is not None and tensor.requires_grad else None for tensor in learned
        )
        # Rows go back all the same, for other ranks wait for as many as they have sent.
        if dx_RM is None and own_x_RM.requires_grad:
            dx_RM = torch.zeros_like(own_x_RM)
        return dx_RM, dweight_R, add_all(totals, tuple(own))

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        """Gives all gradients, and what adds them up."""
        # Autograd makes all gradients at once: nothing is left for later but the sum.
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, kept, layout, weight_R, None)
        return dx_RM, dweight_R, lambda totals: add_all(totals, grads)

    @contextmanager
    def _without_collectives(self, phase: str, rows: int) -> Iterator[None]:
        """Refuse collectives inside, in the first chunk with rows of a phase and mode."""
        kind = phase, self._training
        if kind in self._checked:
            yield
            return
        what = f"the experts {self._name} call"
        with RefuseCollectives(what, "Communicate before or after the layer, or run it without a schedule"):
            yield
        if rows:
            self._checked.add(kind)


class LowRankChunks:
    """Frozen experts and their adapters, which alone have gradients. A chunk keeps its hidden_NL."""

    any_degree = keeps_rows = tokens_learn = weights_learn = True

    def __init__(self, weights: Weights, adapters: Adapters, activation: str) -> None:
        self.weights, self.adapters = weights.contiguous(), adapters.contiguous()
        self.activation = ACTIVATIONS[activation]
        self.parameters = tuple(factor for adapter in self.adapters if adapter is not None for factor in adapter[:2])

    def for_backward(self) -> LowRankChunks:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return low_rank_forward(x_RM, layout, weight_R, self.weights, self.adapters, self.activation)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        assert x_RM is not None
        given = (dy_RM, x_RM, kept, layout, weight_R, self.weights, self.adapters, self.activation)
        trained = any(factor.requires_grad for factor in self.parameters)
        dx_RM, dweight_R, factors = low_rank_backward(*given, trained, self.tokens_learn)
        # In the order of `parameters`, which has none where there is no adapter.
        grads = [grad for grad in factors if grad is not None] if trained else [None] * len(self.parameters)
        return dx_RM, dweight_R, add_all(totals, grads)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, kept: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Rest]:
        """Gives all gradients: those of the factors are too small to wait for."""
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, kept, layout, weight_R, None)
        return dx_RM, dweight_R, partial(add_all, grads=grads)


def _gradients(totals: Totals) -> Gradients | None:
    return None if totals is None else Gradients(None, None, *totals)


def _joined(totals: Totals) -> Any:
    assert totals is None or isinstance(totals, _SplitTotals)
    return None if totals is None else totals.joined


def gradients_of(totals: Totals, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns what the chunks give each parameter together, as autograd wants it."""
    pairs = zip(totals or (None,) * len(parameters), parameters, strict=True)
    # Sums over chunks are in float32 where the parameters are narrower.
    return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]


def add_all(totals: Totals, grads: Totals) -> Totals:
    if totals is None or grads is None:
        return grads if totals is None else totals
    return tuple(_add(total, grad) for total, grad in zip(totals, grads, strict=True))


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return grad if total is None else total
    return at_least_float32(total).add_(grad)
