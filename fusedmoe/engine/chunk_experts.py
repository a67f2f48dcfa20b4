"""The experts of a planned layer: forward and backward of one chunk, called without autograd."""

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
from fusedmoe.autograd.experts import WeightParts, cast_down, parts_need_grad, placeholder_like
from fusedmoe.autograd.moves import Compute
from fusedmoe.compat.torch import RefuseCollectives, retains_graph
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import (
    Gradients,
    HiddenRows,
    NeedsGrad,
    Weights,
    experts_backward,
    experts_backward_rows,
    experts_backward_weights,
    experts_forward,
)
from fusedmoe.kernels.grouped import at_least_float32
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.low_rank import Adapters, low_rank_backward, low_rank_forward

# Gradients of parameters; None before the first chunk. An entry is None if its parameter needs no gradient.
Totals = Sequence["Tensor | None"] | None

# Adds the parameter gradients of one chunk to the totals of the previous chunks.
AddGrads = Callable[[Totals], Totals]


class ChunkExperts(Protocol):
    """The local experts, called with one chunk: R received tokens and their (token, expert) pairs, sorted by `layout`.

    `weight_R` has one router weight per pair; None: all weights are 1.

    Attributes:
        parameters: tensors that get gradients, in the order of `Totals`.
        can_rechunk: backward may use another number of chunks than forward. The saved activations of a chunk are then
            one tensor, whose n-th row belongs to the n-th sorted row.
        needs_input_rows: backward reads the input rows of the forward; otherwise it gets None.
        tokens_require_grad, weights_require_grad: some rank needs gradients of rows or of router weights
            (`Exchange.tokens_require_grad`); otherwise backward returns None for them. Set before the first forward.
    """

    tokens_require_grad: bool
    weights_require_grad: bool

    @property
    def parameters(self) -> Sequence[Tensor | None]: ...

    @property
    def can_rechunk(self) -> bool: ...

    @property
    def needs_input_rows(self) -> bool: ...

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        """Return [R, M], each token's weighted sum of results, and the activations that backward needs."""
        ...

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        """Return the gradients of rows and router weights, and the parameter gradients summed over the chunks so far.

        `totals`: sums returned for the previous chunk; None for the first. From the second chunk on, half-precision
        gradients are summed in float32.
        """
        ...

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        """Return the gradients of rows and router weights, and a function that adds parameter gradients to totals."""
        ...

    def for_backward(self) -> ChunkExperts:
        """Return experts for the backward pass that reference no module.

        The autograd graph holds them: a module that keeps a tensor of this graph would otherwise never be freed.
        """
        ...


class GroupedExperts:
    """Feed-forward experts with this library's kernels, outside autograd. A chunk saves its pre-activations.

    Args:
        needs_grad: whether w1, w2, b1 and b2 need gradients; None: their `requires_grad`.
    """

    can_rechunk = tokens_require_grad = weights_require_grad = True

    def __init__(self, weights: Weights, activation: str, needs_grad: Sequence[bool] | None = None) -> None:
        # Once for all chunks: kernels copy non-contiguous matrices on every call.
        weights = weights.contiguous()
        self.weights, self.activation = weights, ACTIVATIONS[activation]
        self.parameters = (weights.w1, weights.w2, weights.b1, weights.b2)
        self._needs_grad = grad_flags(self.parameters) if needs_grad is None else needs_grad
        self.needs_input_rows = self._needs_grad[0]

    @property
    def needs_grad(self) -> NeedsGrad:
        return NeedsGrad(self.tokens_require_grad, self.weights_require_grad, *self._needs_grad)

    def for_backward(self) -> GroupedExperts:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return experts_forward(x_RM, layout, weight_R, self.weights, self.activation, shared=True)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        # Kernels accumulate into the totals: no second tensor of the parameters' size.
        given = (layout, weight_R, self.weights, self.activation, _gradients(totals), self.needs_grad)
        grads = experts_backward(dy_RM, x_RM, saved, *given, shared=True)
        return grads.x_SM, grads.weight_N, grads.parameters

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        given = (layout, weight_R, self.weights, self.activation, self.needs_grad)
        dx_RM, dweight_R, intermediates = experts_backward_rows(dy_RM, saved, *given, shared=True)
        return dx_RM, dweight_R, partial(self.weight_gradients, dy_RM, x_RM, intermediates, layout, weight_R)

    def weight_gradients(
        self,
        dy_RM: Tensor,
        x_RM: Tensor | None,
        intermediates: HiddenRows,
        layout: Layout,
        weight_R: Tensor | None,
        totals: Totals,
    ) -> Totals:
        given = (layout, weight_R, self.weights, _gradients(totals), self.needs_grad)
        return experts_backward_weights(dy_RM, x_RM, intermediates, *given, shared=True).parameters


def grad_flags(parameters: Sequence[Tensor | None]) -> list[bool]:
    return [parameter is not None and parameter.requires_grad for parameter in parameters]


class _SplitTotals(list["Tensor | None"]):
    """Gradients of the weight parts: views of the joined weights' gradients, into which chunks accumulate."""

    def __init__(self, joined: Totals, part_grads: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
        super().__init__(grad if needs else None for grad, needs in zip(part_grads, needs_grad, strict=True))
        self.joined = joined


class JoinedExperts:
    """`GroupedExperts` whose weights are joined from several tensors in each pass, and freed after it."""

    can_rechunk = tokens_require_grad = weights_require_grad = True

    def __init__(self, parts: Sequence[Tensor], weight_parts: WeightParts, activation: str) -> None:
        self.parameters, self._weight_parts, self._activation = tuple(parts), weight_parts, activation
        self._needs_grad = grad_flags(parts)
        self.needs_input_rows = any(self._needs_grad)
        self._grouped: GroupedExperts | None = None

    def for_backward(self) -> JoinedExperts:
        # A graph that held the joined weights would hold a copy of all experts.
        experts = copy(self)
        experts._grouped = None
        return experts

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._experts(x_RM).forward(x_RM, layout, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        dx_RM, dweight_R, joined = self._experts(dy_RM).backward(
            dy_RM, x_RM, saved, layout, weight_R, _joined_totals(totals)
        )
        return dx_RM, dweight_R, self._split(joined)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        dx_RM, dweight_R, add_grads = self._experts(dy_RM).backward_rows(dy_RM, x_RM, saved, layout, weight_R)
        return dx_RM, dweight_R, lambda totals: self._split(add_grads(_joined_totals(totals)))

    def _experts(self, like: Tensor) -> GroupedExperts:
        if self._grouped is None:
            w1, w2 = self._weight_parts.join([part.to(like.dtype) for part in self.parameters])
            needs_grad = (*parts_need_grad(self._weight_parts, w1, w2, self._needs_grad), False, False)
            self._grouped = GroupedExperts(Weights(w1, w2, None, None, 0), self._activation, needs_grad)
            self._grouped.tokens_require_grad = self.tokens_require_grad
            self._grouped.weights_require_grad = self.weights_require_grad
        return self._grouped

    def _split(self, joined: Totals) -> Totals:
        assert joined is not None and self._grouped is not None
        weights = self._grouped.weights.w1, self._grouped.weights.w2
        grads = (placeholder_like(w) if grad is None else grad for w, grad in zip(weights, joined, strict=False))
        return _SplitTotals(joined, self._weight_parts.split(*grads), self._needs_grad)


# (phase, training) pairs of each owner that ran without a collective. A dispatch mode costs microseconds per operator,
# and a compiler skips functions called under one, so only one chunk of each pair is checked.
_COLLECTIVE_FREE: WeakKeyDictionary[Any, set[tuple[str, bool]]] = WeakKeyDictionary()


class AutogradExperts:
    """Experts of any kind, called under autograd once per chunk.

    The graph of each chunk is saved, so backward uses the same chunks as forward.

    Args:
        parameters: tensors that get gradients.
        owner: the module that `compute` runs, for errors; None: `compute` itself.
        leaves: tensors that `compute` reads in place of `parameters`, if these are not leaves; None: the same.
    Raises:
        ConfigError: in forward or backward, if the experts call a collective, whose order with the layer's collectives
            could differ between ranks.
    """

    can_rechunk = needs_input_rows = False
    tokens_require_grad = weights_require_grad = True

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
        # Owners of other types are checked in each call. A graph that looked up owners would be specialized on their
        # number.
        is_module = isinstance(owner, torch.nn.Module) and not torch.compiler.is_compiling()
        self._checked_modes = _COLLECTIVE_FREE.setdefault(owner, set()) if is_module else set()

    def for_backward(self) -> AutogradExperts:
        experts = copy(self)
        experts._compute = None
        return experts

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Any]:
        assert self._compute is not None
        with torch.enable_grad(), self._without_collectives("forward", len(x_RM)):
            # Leaves of a separate graph: the surrounding pass runs without autograd.
            x_RM = x_RM.detach().requires_grad_(self.tokens_require_grad)
            weight_R = None if weight_R is None else weight_R.detach().requires_grad_(self.weights_require_grad)
            y_RM = cast_down(self._compute(x_RM, layout, weight_R), x_RM)
            check_rows("experts in chunks", "their result", y_RM, len(x_RM))
        return y_RM.detach(), (y_RM, x_RM, weight_R)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Any, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        totals = totals or (None,) * len(self.parameters)
        y_RM, own_x_RM, own_weight_R = saved
        # Frozen tensors have no gradient; a parameter that these rows did not use has None.
        differentiated = own_x_RM, own_weight_R, *self._leaves
        inputs = [tensor for tensor in differentiated if tensor is not None and tensor.requires_grad]
        grads: Iterator[Tensor | None] = iter(())
        if y_RM.requires_grad:
            # Keep the graph if the surrounding backward keeps its own: another backward may follow.
            retain_graph = retains_graph()
            with self._without_collectives("backward", len(dy_RM)):
                grads = iter(torch.autograd.grad(y_RM, inputs, dy_RM, retain_graph=retain_graph, allow_unused=True))
        dx_RM, dweight_R, *dparameters = (
            next(grads, None) if tensor is not None and tensor.requires_grad else None for tensor in differentiated
        )
        # Send zeros: the other ranks wait for as many gradients as they sent rows.
        if dx_RM is None and own_x_RM.requires_grad:
            dx_RM = torch.zeros_like(own_x_RM)
        return dx_RM, dweight_R, add_to_totals(totals, tuple(dparameters))

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Any, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, saved, layout, weight_R, None)
        return dx_RM, dweight_R, lambda totals: add_to_totals(totals, grads)

    @contextmanager
    def _without_collectives(self, phase: str, rows: int) -> Iterator[None]:
        """Context in which a collective raises `ConfigError`. Checks each phase and mode until a non-empty chunk."""
        phase_and_mode = phase, self._training
        if phase_and_mode in self._checked_modes:
            yield
            return
        what = f"the experts {self._name} call"
        with RefuseCollectives(what, "Communicate before or after the layer, or run it without a schedule"):
            yield
        if rows:
            self._checked_modes.add(phase_and_mode)


class LowRankExperts:
    """Frozen experts with trainable LoRA adapters.

    Each chunk saves hidden_NL: per row, side by side, the pre-activation and the products x·Aᵀ of both adapters.
    """

    can_rechunk = needs_input_rows = tokens_require_grad = weights_require_grad = True

    def __init__(self, weights: Weights, adapters: Adapters, activation: str) -> None:
        self.weights, self.adapters = weights.contiguous(), adapters.contiguous()
        self.activation = ACTIVATIONS[activation]
        self.parameters = tuple(factor for adapter in self.adapters if adapter is not None for factor in adapter[:2])

    def for_backward(self) -> LowRankExperts:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        return low_rank_forward(x_RM, layout, weight_R, self.weights, self.adapters, self.activation)

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None, totals: Totals
    ) -> tuple[Tensor | None, Tensor | None, Totals]:
        assert x_RM is not None
        given = (dy_RM, x_RM, saved, layout, weight_R, self.weights, self.adapters, self.activation)
        trained = any(factor.requires_grad for factor in self.parameters)
        dx_RM, dweight_R, factors = low_rank_backward(*given, trained, self.tokens_require_grad)
        grads = [grad for grad in factors if grad is not None] if trained else [None] * len(self.parameters)
        return dx_RM, dweight_R, add_to_totals(totals, grads)

    def backward_rows(
        self, dy_RM: Tensor, x_RM: Tensor | None, saved: Tensor, layout: Layout, weight_R: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, AddGrads]:
        dx_RM, dweight_R, grads = self.backward(dy_RM, x_RM, saved, layout, weight_R, None)
        return dx_RM, dweight_R, partial(add_to_totals, grads=grads)


def _gradients(totals: Totals) -> Gradients | None:
    return None if totals is None else Gradients(None, None, *totals)


def _joined_totals(totals: Totals) -> Any:
    assert totals is None or isinstance(totals, _SplitTotals)
    return None if totals is None else totals.joined


def cast_totals(totals: Totals, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(totals or (None,) * len(parameters), parameters, strict=True)
    return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]


def add_to_totals(totals: Totals, grads: Totals) -> Totals:
    if totals is None or grads is None:
        return grads if totals is None else totals
    return tuple(_add(total, grad) for total, grad in zip(totals, grads, strict=True))


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return grad if total is None else total
    return at_least_float32(total).add_(grad)
