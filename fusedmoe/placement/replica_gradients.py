"""Autograd of replicas: forward maps owned parameters to the rank's tables, backward sends gradients to the owners.

The backward of `attach_tables` sends replica gradients once the layer's backward is done. The backward of
`receive_gradients` waits for the gradients from other ranks and adds them to the owners' gradients. Its forward runs
before the whole model, so its backward runs last, and the backward of other layers hides the transfers (Hecate, section
4.1). Gradient hooks and `.grad` see complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.kernels.derivatives import Function
from fusedmoe.placement.expert_transport import SparseWork

# Sends the replica rows of table gradients: [rows, ...] for each parameter that requires gradients.
SendGradients = Callable[[Sequence[Tensor]], SparseWork]


class GradientRoute:
    """Transfers of the replica gradients of one forward pass.

    `attach_tables` starts the transfers in backward, `receive_gradients` waits for them. `row_of_expert`: row of each
    owned expert in the parameters. `is_sent`: a task of a plan has sent the gradients; autograd must not send them
    again.
    """

    def __init__(self, row_of_expert: dict[int, int], needs_grad: Sequence[bool]) -> None:
        self.row_of_expert, self.needs_grad, self.is_sent = row_of_expert, needs_grad, False
        self.works: list[SparseWork] = []

    def send(self, send: SendGradients, grads: Sequence[Tensor]) -> SparseWork:
        work = send(grads)
        self.works.append(work)
        return work


def receive_gradients(parameters: Sequence[Tensor], route: GradientRoute) -> tuple[Tensor, ...]:
    """Return aliases of the parameters. Backward waits for the gradients of their replicas and adds them."""
    return _ReceiveGradients.apply(route, *parameters)


def attach_tables(
    parameters: Sequence[Tensor], tables: Sequence[Tensor], route: GradientRoute, send: SendGradients
) -> tuple[Tensor, ...]:
    """Return the tables with the parameters as their inputs in the autograd graph.

    Args:
        parameters: [owned, ...], outputs of `receive_gradients`.
        tables: [rows, ...], for each parameter the owned rows, then the replica rows.
    """
    return _AttachTables.apply(route, send, list(tables), *parameters)


def send_accumulated(
    send: SendGradients,
    tables: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    totals: Sequence[Tensor | None] | None,
) -> SparseWork:
    """Compute the gradients of the tables from the gradients of the experts' inputs, and send those of replica rows.

    Args:
        inputs: the weights that the experts used, which depend on the tables (for example cast under autocast).
        totals: gradients of `inputs`, summed over chunks; None: there are none.
    """
    tables = [table for table in tables if table.requires_grad]
    pairs = zip(inputs, totals or [None] * len(inputs), strict=True)
    given = [(one, total.to(one.dtype)) for one, total in pairs if one is not None and total is not None]
    given = [(one, total) for one, total in given if one.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(tables)
    if given:
        outputs, totals = zip(*given, strict=True)
        grads = torch.autograd.grad(outputs, tables, totals, retain_graph=True, allow_unused=True)
    # The owner waits for a gradient from each replica.
    filled = zip(tables, grads, strict=True)
    return send([torch.zeros_like(table) if grad is None else grad.contiguous() for table, grad in filled])


def before_backward(y: Tensor, call: Callable[[], None]) -> Tensor:
    """Return `y`. Its backward first calls `call`."""
    return _BeforeBackward.apply(y, call)


class _AttachTables(Function):
    operation = "experts with replicas (placement='fssdp')"

    @staticmethod
    def forward(
        ctx: Any, route: GradientRoute, send: SendGradients, tables: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.send = route, send
        ctx.num_owned = [len(parameter) for parameter in parameters]
        return _aliases(ctx, route, tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        route = ctx.route
        whole = [grad.contiguous() if needed else None for grad, needed in zip(grads, route.needs_grad, strict=True)]
        # After a plan's task, the link belongs to another layer.
        if not route.is_sent:
            route.send(ctx.send, [grad for grad in whole if grad is not None])
        owned = zip(whole, ctx.num_owned, strict=True)
        return None, None, None, *(None if grad is None else grad[:rows] for grad, rows in owned)


class _ReceiveGradients(Function):
    operation = "gradients of experts' replicas (placement='fssdp')"

    @staticmethod
    def forward(ctx: Any, route: GradientRoute, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        return _aliases(ctx, route, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        works, route.works = route.works, []
        arrived = [one for work in works for one in work.wait()]
        needed = [grad for grad, needs_grad in zip(grads, route.needs_grad, strict=True) if needs_grad]
        # A view would keep the replica gradients in memory.
        own = [grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad for grad in needed]
        by_row: dict[int, list[tuple[Tensor, ...]]] = {}
        for expert, parts in arrived:
            by_row.setdefault(route.row_of_expert[expert], []).append(parts)
        for row, several in by_row.items():
            for grad, *others in zip(own, *several, strict=True):
                # In transfer order (deterministic), rounded once.
                dtype = torch.promote_types(grad.dtype, torch.float32)
                total = grad[row].to(dtype)
                for other in others:
                    total = total + other.to(dtype)
                grad[row] = total
        whole = iter(own)
        return None, *(next(whole) if needs_grad else None for needs_grad in route.needs_grad)


def _aliases(ctx: Any, route: GradientRoute, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # Autograd does not treat an input that is returned unchanged as an output.
    aliases = tuple(tensor.detach() for tensor in tensors)
    frozen = (one for one, needs_grad in zip(aliases, route.needs_grad, strict=True) if not needs_grad)
    ctx.mark_non_differentiable(*frozen)
    return aliases


class _BeforeBackward(Function):
    operation, double_backward = "experts with replicas (placement='fssdp')", True

    @staticmethod
    def forward(ctx: Any, y: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return y.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None
