"""Orders: sort tokens into the experts' layout and restore them (FSMoE §3.1, Order and I-Order)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.construction import Constructed
from fusedmoe.gates.base import Gate, Routing, SoftRouting, trait_applies
from fusedmoe.kernels.layout import Layout, contiguous_layout

__all__ = ["Dropless", "Einsum", "Order", "Sparse"]


@dataclass(frozen=True, eq=False)
class Ordered:
    """Rows to be dispatched.

    Attributes:
        x_SM: the tokens, or rows computed from them.
        layout: sorts the rows by expert.
        weight_SK: router weights that the experts' side applies; None if `restore` applies them.
        kept_E: slots kept for each expert.
        all_kept: True if no routed slot was dropped; False also if this is unknown.
        combine_SN: matrix from rows to tokens; None: a token's result is the sum of its rows' results.
    """

    x_SM: Tensor
    layout: Layout
    weight_SK: Tensor | None
    kept_E: Tensor
    combine_SN: Tensor | None = None
    all_kept: bool = False


class Order(Constructed):
    """Base class of orders. `restore` inverts `order`: a token's result is the weighted sum of its rows' results.

    The gate sets the capacity; `layout` decides which rows are dropped. A gate that mixes tokens (SoftMoE) supplies
    matrices, which every order then multiplies by.

    The three traits describe what `fusedmoe.pipeline` may do. In a subclass that overrides a method without restating
    its trait, the trait is False.
    """

    drops: ClassVar[bool] = True
    """True if an expert gets at most the gate's capacity of rows."""
    copies: ClassVar[bool] = True
    """True if rows are copies of tokens and a token's result is the sum of its rows' results. Restate it with a custom
    `order`, `_order` or `restore`."""
    splits: ClassVar[bool] = True
    """True if parts of a batch can be ordered: rows are dropped only for capacity, and only `combine_SN` restores
    tokens. Restate it with a custom `layout` or `restore`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not trait_applies(cls, "copies", ("order", "_order", "restore")):
            cls.copies = False
        if not trait_applies(cls, "splits", ("layout", "restore")):
            cls.splits = False

    def layout(self, routing: Routing, experts: int) -> Layout:
        """Return the layout: the row of each routing slot, -1 if dropped."""
        return order(routing.expert_SK, experts, routing.capacity, routing.priority_S)

    def mean_rows_per_token(self, gate: Gate, tokens: int) -> float:
        """Return an upper bound of the mean rows per token, for choosing a schedule."""
        return gate.mean_rows_per_token(tokens)

    def order(self, x_SM: Tensor, routing: Routing | SoftRouting, experts: int) -> Ordered:
        """Prepare tokens [S, M] for dispatch. Differentiable.

        With a `Routing`: returns the tokens unsorted, with the layout that sorts them by expert; subclasses may compute
            rows
        instead (`Einsum`). With a `SoftRouting`: returns each expert's slots, which are mixtures of all tokens, in
        order.
        """
        # SoftMoE slots are mixtures of all tokens: `slots` rows per expert, already sorted, none dropped.
        if isinstance(routing, SoftRouting):
            rows_NM = routing.dispatch_SN.to(x_SM.dtype).t() @ x_SM
            counts_E = torch.full((experts,), routing.slots, device=x_SM.device)
            layout = contiguous_layout(counts_E, rows_NM.shape[0])
            return Ordered(rows_NM, layout, None, counts_E, routing.combine_SN)
        return self._order(x_SM, routing, experts)

    def restore(self, y_SM: Tensor, ordered: Ordered) -> Tensor:
        """Compute the tokens' results from those of `ordered.x_SM`. Differentiable."""
        # Results of copies of tokens have already been summed per token.
        return y_SM if ordered.combine_SN is None else ordered.combine_SN.to(y_SM.dtype) @ y_SM

    def _order(self, x_SM: Tensor, routing: Routing, experts: int) -> Ordered:
        layout = self.layout(routing, experts)
        # A custom layout may drop rows for other reasons than capacity.
        all_kept = self.splits and not (self.drops and routing.capacity is not None)
        return Ordered(x_SM, layout, routing.weight_SK, layout.counts_E, all_kept=all_kept)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sparse(Order):
    """Sort and gather the kept rows only, at most the capacity per expert (Tutel's order)."""


class Dropless(Order):
    """Sort and gather all rows, whatever the gate's capacity."""

    drops: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    def layout(self, routing: Routing, experts: int) -> Layout:
        return order(routing.expert_SK, experts, None, routing.priority_S)

    def mean_rows_per_token(self, gate: Gate, tokens: int) -> float:
        return gate.mean_rows_per_token(tokens) if gate.capacity_factor is None else gate.k


class Einsum(Order):
    """Multiply by one-hot matrices [S, E·C] (GShard's order): every expert gets exactly C rows, unused rows are zero.

    Equals `Sparse` up to rounding, with S·E·C·M work and S·E·C memory. For small sizes.
    """

    def _order(self, x_SM: Tensor, routing: Routing, experts: int) -> Ordered:
        layout = self.layout(routing, experts).exact()
        assert layout.source_N is not None
        capacity = max(layout.counts, default=0) if routing.capacity is None else routing.capacity
        # An expert's kept rows start at column expert · C; its other columns stay zero.
        start_E = layout.counts_E.cumsum(0) - layout.counts_E
        expert_N = torch.arange(experts, device=x_SM.device).repeat_interleave(layout.counts_E)
        place_N = torch.arange(layout.rows, device=x_SM.device) - start_E[expert_N] + expert_N * capacity
        index = (layout.source_N, place_N)
        # The one-hot entries have no gradient; the entries of `combine_SN`, router weights, do.
        weight_N = take_pairs(routing.weight_SK, layout)
        blank_SN = weight_N.new_zeros(layout.tokens, experts * capacity)
        dispatch_SN = blank_SN.index_put(index, torch.ones_like(weight_N)).to(x_SM.dtype)
        combine_SN = blank_SN.index_put(index, weight_N)
        counts_E = torch.full_like(layout.counts_E, capacity)
        rows_NM = dispatch_SN.t() @ x_SM
        return Ordered(rows_NM, contiguous_layout(counts_E, rows_NM.shape[0]), None, layout.counts_E, combine_SN)


ORDERS: dict[str, type[Order]] = {"sparse": Sparse, "dropless": Dropless, "einsum": Einsum}
