"""Replicas of experts in autograd: parameters of the owners in, those of all experts that a rank holds out.

The backward takes two ends. Where the layer's backward is done, gradients of replicas start on their way to the owners
(`materialise`). Where the owner's gradient is due they are waited for and added (`arriving`): that stands before all of
the model, so that its backward comes last, and what travels has the backward of the rest to hide behind (Hecate,
section 4.1). Gradient hooks, and `.grad`, see whole gradients only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.comm.sparse import SparseWork
from fusedmoe.kernels.derivatives import Function

# Sends gradients of all experts that a rank holds, [rows, ...] for each parameter that learns, to where they belong.
SendBack = Callable[[Sequence[Tensor]], SparseWork]


class Returns:
    """A record that ties the two ends of one forward together.

    Attributes:
        rows: where an owned expert lies in the parameters.
        learn: of each parameter, whether it has gradients.
        works: gradients that are on their way.
        sent: these were sent by a plan's task, and not where autograd has them.
    """

    def __init__(self, rows: dict[int, int], learn: Sequence[bool]) -> None:
        self.rows, self.learn, self.sent = rows, learn, False
        self.works: list[SparseWork] = []

    def send(self, send_back: SendBack, grads: Sequence[Tensor]) -> SparseWork:
        """Starts gradients of all experts that this rank holds on their way."""
        work = send_back(grads)
        self.works.append(work)
        return work


def arriving(parameters: Sequence[Tensor], returns: Returns) -> tuple[Tensor, ...]:
    """The parameters; in backward their gradients, with those of the replicas. Saves nothing."""
    return _Arriving.apply(returns, *parameters)


def materialise(
    parameters: Sequence[Tensor], tables: Sequence[Tensor], returns: Returns, send_back: SendBack
) -> tuple[Tensor, ...]:
    """The parameters of all experts that this rank holds.

    Args:
        parameters: [owned, ...], what `arriving` gave.
        tables: [rows, ...], the same and after them the replicas, as they are now.
    Saves nothing: the operations that read the result save it.
    """
    return _Materialise.apply(returns, send_back, list(tables), *parameters)


def send_totals(
    send: SendBack,
    tables: Sequence[Tensor],
    made: Sequence[Tensor | None],
    totals: Sequence[Tensor | None] | None,
) -> SparseWork:
    """Starts gradients of tables on their way, by those of what experts have made of them (in another dtype, say)."""
    tables = [table for table in tables if table.requires_grad]
    pairs = zip(made, totals or [None] * len(made), strict=True)
    given = [(one, total.to(one.dtype)) for one, total in pairs if one is not None and total is not None]
    given = [(one, total) for one, total in given if one.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(tables)
    if given:
        outputs, totals = zip(*given, strict=True)
        grads = torch.autograd.grad(outputs, tables, totals, retain_graph=True, allow_unused=True)
    found = zip(tables, grads, strict=True)
    # Zeros, too: the owner waits for as many gradients as there are replicas.
    return send([torch.zeros_like(table) if grad is None else grad.contiguous() for table, grad in found])


def again(y: Tensor, fetch: Callable[[], None]) -> Tensor:
    """`y`, computed with tables whose replicas are given back after it, or may be; its backward has them fetched
    first."""
    return _Again.apply(y, fetch)


class _Materialise(Function):
    operation = "experts with replicas (placement='fssdp')"

    @staticmethod
    def forward(
        ctx: Any, returns: Returns, send_back: SendBack, tables: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.returns, ctx.send_back = returns, send_back
        ctx.owned = [len(parameter) for parameter in parameters]
        return _marked(ctx, returns, tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        returns = ctx.returns
        whole = [grad.contiguous() if learns else None for grad, learns in zip(grads, returns.learn, strict=True)]
        # With a step's plan its task has sent them already, and the link is another layer's by now.
        if not returns.sent:
            returns.send(ctx.send_back, [grad for grad in whole if grad is not None])
        # An owner's own rows come first in its table; the rest are replicas, whose gradients travel.
        owned = zip(whole, ctx.owned, strict=True)
        return None, None, None, *(None if grad is None else grad[:rows] for grad, rows in owned)


class _Arriving(Function):
    operation = "gradients of experts' replicas (placement='fssdp')"

    @staticmethod
    def forward(ctx: Any, returns: Returns, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.returns = returns
        return _marked(ctx, returns, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        returns = ctx.returns
        works, returns.works = returns.works, []
        arrived = [one for work in works for one in work.wait()]
        # Not a part of what also has the replicas' gradients: that memory is given back.
        learnt = [grad for grad, learns in zip(grads, returns.learn, strict=True) if learns]
        own = [grad.clone() if grad.untyped_storage().nbytes() > grad.nbytes else grad for grad in learnt]
        by_row: dict[int, list[tuple[Tensor, ...]]] = {}
        for expert, parts in arrived:
            by_row.setdefault(returns.rows[expert], []).append(parts)
        for row, several in by_row.items():
            for grad, *others in zip(own, *several, strict=True):
                # In the order of the transfers, the same on every run, and rounded once.
                dtype = torch.promote_types(grad.dtype, torch.float32)
                total = grad[row].to(dtype)
                for other in others:
                    total = total + other.to(dtype)
                grad[row] = total
        found = iter(own)
        return None, *(next(found) if learns else None for learns in returns.learn)


def _marked(ctx: Any, returns: Returns, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # The same memory under new tensors: inputs that are returned as they are would be no outputs.
    found = tuple(tensor.detach() for tensor in tensors)
    ctx.mark_non_differentiable(*(one for one, learns in zip(found, returns.learn, strict=True) if not learns))
    return found


class _Again(Function):
    operation, twice = "experts with replicas (placement='fssdp')", True

    @staticmethod
    def forward(ctx: Any, y: Tensor, fetch: Callable[[], None]) -> Tensor:
        ctx.fetch = fetch
        return y.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fetch()
        return grad, None
