"""A stack of layers in micro-batches: dense parts, dispatch, experts and combine as tasks of one plan for each pass.

A batch is cut along its samples, or along its positions (`engine/chunks.py`). Each unit of it goes through a layer's
dense part and gate by itself; its rows travel with those of the other pieces of their chunk. The backward is written
out, task by task, from what the forward stored: of each unit the graph of its dense part and gate, of each chunk
received rows and pre-activations. What a row meets on its way is what it would meet in the whole batch: the gate
chooses token by token, and rows that exceed an expert's capacity are those that would in the whole batch (Lancet §5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedmoe.engine.backward import Backward
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.forward import Forward
from fusedmoe.engine.state import Stack, Stage


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stack: Stack,
        stages: Sequence[Stage],
        experts: Sequence[ChunkExperts],
        keep: bool,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        run = Forward(stack, stages, x, experts, keep)
        z, aux = run.run()
        ctx.stack, ctx.layers = stack, run.layers if keep else None
        ctx.set_materialize_grads(False)
        ctx.like = z.shape, z.dtype, z.device
        return (z, *aux)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, *daux: Tensor | None) -> tuple[Tensor | None, ...]:
        layers, ctx.layers = ctx.layers, None
        if layers is None:
            raise RuntimeError("the backward of a pipeline runs once: what it needs is gone; call its forward again")
        if dz is None:
            shape, dtype, device = ctx.like
            dz = torch.zeros(shape, dtype=dtype, device=device)
        run = Backward(ctx.stack, layers, dz, daux)
        dx = run.run()
        grads: list[Tensor | None] = []
        for layer, totals, dense in zip(layers, run.totals, run.dense, strict=True):
            grads += [dense.get(place) for place in range(len(layer.parameters))]
            own = layer.experts.parameters
            for parameter, total in zip(own, totals or [None] * len(own), strict=True):
                grads.append(None if parameter is None or total is None else total.to(parameter.dtype))
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None, *grads


def through_stack(x: Tensor, stages: Sequence[Stage], stack: Stack) -> tuple[Tensor, list[Tensor]]:
    """The batch through all layers by the plans of `stack`, and each layer's auxiliary loss. Collective.

    Args:
        x: [B, …, M], B samples.
    Returns:
        [B, …, M], and a scalar for each layer; differentiable once.
    Saves for backward:
        of each layer what autograd keeps of its dense part and gate, received rows, R·M, and what the experts keep, the
        pre-activation R·H (gated 2·R·H); where rows have other chunks in the two passes, the backward copies these
        once, one layer at a time.
    Raises:
        RankError: see `fusedmoe.comm.collectives`.
    """
    experts = [stage.experts(x) for stage in stages]  # once: under autocast their parameters are cast here
    parameters: list[Tensor | None] = []
    for stage, of in zip(stages, experts, strict=True):
        parameters += [*stage.dense_parameters, *of.parameters]
    z, *aux = _Through.apply(x, stack, stages, experts, torch.is_grad_enabled(), *parameters)
    return z, aux
