"""Orders: tokens into the experts' layout and back (FSMoE §3.1, Order and I-Order).

`Order.layout` decides which rows have room: the capacity is the gate's, the dropping is the order's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.autograd.order import order, take_pairs
from fusedmoe.construction import Constructed
from fusedmoe.gates.base import Gate, Routing, SoftRouting, said_beside
from fusedmoe.kernels.layout import Layout, contiguous_layout

__all__ = ["ORDERS", "Dropless", "Einsum", "Order", "Ordered", "Sparse"]


@dataclass(frozen=True, eq=False)
class Ordered:
    """Rows of a batch as they are dispatched.

    Attributes:
        x_SM: the tokens, or rows that were made of them.
        layout: sorts their rows by expert.
        weight_SK: router weights that the experts' side applies; None if `restore` applies them.
        kept_E: slots that each expert got.
        all_kept: no slot with an expert is without a row, as far as is known.
        combine_SN: the matrix that restores tokens; None: a token's result is the sum of its rows'.
    """

    x_SM: Tensor
    layout: Layout
    weight_SK: Tensor | None
    kept_E: Tensor
    combine_SN: Tensor | None = None
    all_kept: bool = False


class Order(Constructed):
    """Base of the orders. `restore` is the exact inverse way: a token gets the weighted sum of its rows' results.

    A gate that mixes tokens (SoftMoE) brings its own matrices; every order then multiplies by them.

    The three traits below say what `fusedmoe.pipeline` may do. An order of your own that defines one of the methods
    anew, and does not say the trait beside it, is taken for one that cannot.
    """

    drops: ClassVar[bool] = True
    """True where an expert gets no more rows than the gate's capacity."""
    copies: ClassVar[bool] = True
    """True where rows are copies of tokens, and a token's result is the sum of its rows'; not with `order`, `_order` or
    `restore` of one's own."""
    splits: ClassVar[bool] = True
    """True where it can be asked for parts of a batch: it drops what there is no room for, and nothing but `combine_SN`
    restores tokens; not with `layout` or `restore` of one's own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Traits hold for the methods of the class that says them, not for new ones, of a mixin in front of it too.
        if not said_beside(cls, "copies", ("order", "_order", "restore")):
            cls.copies = False
        if not said_beside(cls, "splits", ("layout", "restore")):
            cls.splits = False

    def layout(self, routing: Routing, experts: int) -> Layout:
        """Returns where every routing slot's row lies, and which slots are dropped."""
        return order(routing.expert_SK, experts, routing.capacity, routing.priority_S)

    def rows_per_token(self, gate: Gate, tokens: int) -> float:
        """Rows that each of a rank's tokens becomes, at most, on average, for the choice of a schedule."""
        return gate.rows_per_token(tokens)

    def order(self, x_SM: Tensor, routing: Routing | SoftRouting, experts: int) -> Ordered:
        """Sorts the rows of tokens [S, M] by expert; differentiable."""
        # Slots are mixtures of all tokens: `slots` rows for each expert, in order, and nothing to sort or to drop.
        if isinstance(routing, SoftRouting):
            rows_NM = routing.dispatch_SN.to(x_SM.dtype).t() @ x_SM
            counts_E = torch.full((experts,), routing.slots, device=x_SM.device)
            layout = contiguous_layout(counts_E, rows_NM.shape[0])
            return Ordered(rows_NM, layout, None, counts_E, routing.combine_SN)
        return self._order(x_SM, routing, experts)

    def restore(self, y_SM: Tensor, ordered: Ordered) -> Tensor:
        """Makes tokens' results of those of `ordered.x_SM`; differentiable."""
        # Rows that are copies of tokens have been summed for each token on the experts' side, or by the dispatcher.
        return y_SM if ordered.combine_SN is None else ordered.combine_SN.to(y_SM.dtype) @ y_SM

    def _order(self, x_SM: Tensor, routing: Routing, experts: int) -> Ordered:
        layout = self.layout(routing, experts)
        # An order with a layout of its own, which does not split, may drop for other reasons than the capacity.
        all_kept = self.splits and not (self.drops and routing.capacity is not None)
        return Ordered(x_SM, layout, routing.weight_SK, layout.counts_E, all_kept=all_kept)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Sparse(Order):
    """Sorts and gathers rows (Tutel's order): only the rows that are kept, at most the capacity for each expert."""


class Dropless(Order):
    """Sorts and gathers rows and keeps all of them, whatever the gate's capacity."""

    drops: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    def layout(self, routing: Routing, experts: int) -> Layout:
        return order(routing.expert_SK, experts, None, routing.priority_S)

    def rows_per_token(self, gate: Gate, tokens: int) -> float:
        return gate.rows_per_token(tokens) if gate.capacity_factor is None else gate.k


class Einsum(Order):
    """Products with one-hot matrices [S, E·C] (GShard's order): every expert gets exactly C rows, empty ones zero.

    Same results as `Sparse` to rounding, at S·E·C·M work and memory S·E·C. For study, and for small sizes.
    """

    def _order(self, x_SM: Tensor, routing: Routing, experts: int) -> Ordered:
        layout = self.layout(routing, experts).exact()
        assert layout.source_N is not None
        capacity = max(layout.counts, default=0) if routing.capacity is None else routing.capacity
        # An expert's kept rows lie behind each other; its C columns begin at expert · C, and the rest stay zero.
        start_E = layout.counts_E.cumsum(0) - layout.counts_E
        expert_N = torch.arange(experts, device=x_SM.device).repeat_interleave(layout.counts_E)
        place_N = torch.arange(layout.rows, device=x_SM.device) - start_E[expert_N] + expert_N * capacity
        index = (layout.source_N, place_N)
        # The one-hot entries carry no gradient; those of `combine_SN` are the router's weights and do.
        weight_N = take_pairs(routing.weight_SK, layout)
        blank_SN = weight_N.new_zeros(layout.tokens, experts * capacity)
        dispatch_SN = blank_SN.index_put(index, torch.ones_like(weight_N)).to(x_SM.dtype)
        combine_SN = blank_SN.index_put(index, weight_N)
        counts_E = torch.full_like(layout.counts_E, capacity)
        rows_NM = dispatch_SN.t() @ x_SM
        return Ordered(rows_NM, contiguous_layout(counts_E, rows_NM.shape[0]), None, layout.counts_E, combine_SN)


ORDERS: dict[str, type[Order]] = {"sparse": Sparse, "dropless": Dropless, "einsum": Einsum}
