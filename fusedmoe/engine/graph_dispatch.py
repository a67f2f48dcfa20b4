"""The way through the experts without a plan in a graph of `torch.compile`, for any number of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from fusedmoe.autograd import exchange_operators
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed


def by_operators_in_graph(
    dispatcher: Collectives, routed: Routed, experts: nn.Module, bad: Tensor | None, loss: Tensor, masked: bool
) -> tuple[Tensor, Tensor]:
    """Returns [S, M] as `Collectives.by_operators` does, for any number of tokens, and the loss, tied to the exchange.

    Args:
        masked: a mask says how many tokens there are when the graph runs; the graph then has all of the exchange.
    """
    x_SM = routed.x_SM
    if masked or len(x_SM):
        return dispatcher.by_operators(routed, experts, bad), loss
    # A compiler leaves out what gives no number, also where other ranks wait for it. A row of padding ties the exchange
    # to a parameter, and to the loss, whose gradients go through the exchange: no rank waits for this one.
    like = next((one for one in experts.parameters() if one.requires_grad), x_SM.new_zeros(1))
    padding_1M = like.reshape(-1)[:1].to(x_SM.dtype).expand(1, x_SM.shape[1])
    weight_1 = None if routed.weight_SK is None else routed.weight_SK.new_zeros(1)
    sent, sizes = dispatcher.metadata_by_operators(routed, bad)
    x_RM, handle = dispatcher.send_by_operators(padding_1M, weight_1, sent, sizes, dispatcher.way)
    y_RM = experts(x_RM, handle.layout, handle.weight_N)
    back_1M = exchange_operators.combine(y_RM, *sizes, 1, dispatcher.way.name)
    return back_1M[:0], loss + back_1M.sum()
