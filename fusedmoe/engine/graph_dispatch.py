"""Dispatch, experts and combine without a plan in a `torch.compile` graph, for any number of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from fusedmoe.autograd import exchange_operators
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed


def run_by_operators_in_graph(
    dispatcher: Collectives, routed: Routed, experts: nn.Module, bad: Tensor | None, loss: Tensor, masked: bool
) -> tuple[Tensor, Tensor]:
    """Send a batch through the experts by operators. Return their results, [S, M], and the loss. Collective.

    On a rank without tokens, the returned loss depends on the exchange: a compiler would otherwise remove the exchange,
    for which the other ranks wait.

    Args:
        bad: scalar count of non-finite values, reported to all ranks.
        masked: the number of tokens depends on a mask at run time: the loss is returned unchanged.
    """
    x_SM = routed.x_SM
    if masked or len(x_SM):
        return dispatcher.run_by_operators(routed, experts, bad), loss
    # Through a padding row the exchange depends on a parameter, so the gradient of the loss takes part in the backward.
    like = next((one for one in experts.parameters() if one.requires_grad), x_SM.new_zeros(1))
    padding_1M = like.reshape(-1)[:1].to(x_SM.dtype).expand(1, x_SM.shape[1])
    weight_1 = None if routed.weight_SK is None else routed.weight_SK.new_zeros(1)
    sent, sizes = dispatcher.metadata_by_operators(routed, bad)
    x_RM, handle = dispatcher.send_by_operators(padding_1M, weight_1, sent, sizes, dispatcher.route)
    y_RM = experts(x_RM, handle.layout, handle.weight_N)
    back_1M = exchange_operators.combine(y_RM, *sizes, 1, dispatcher.route.name)
    return back_1M[:0], loss + back_1M.sum()
