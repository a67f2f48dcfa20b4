"""A stack of layers in micro-batches: dense parts, dispatch, experts and combine as tasks of one plan for each pass.

A batch is cut along its samples, or along its positions (`blocks/cuts.py`). Each unit of it goes through a layer's
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

from fusedmoe.blocks.backward import BlocksBackward
from fusedmoe.blocks.forward import BlocksForward
from fusedmoe.blocks.state import Cut, Stage
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.run import Run
from fusedmoe.kernels.derivatives import Function


class _Through(Function):
    operation = "fusedmoe.pipeline"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        run: Run,
        cut: Cut,
        stages: Sequence[Stage],
        experts: Sequence[ChunkExperts],
        keep: bool,
        refusal: str | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        forward = BlocksForward(run, cut, stages, x, experts, keep, refusal)
        z, aux = forward.run()
        ctx.given, ctx.layers = (run, cut), forward.layers if keep else None
        ctx.set_materialize_grads(False)
        ctx.like = z.shape, z.dtype, z.device
        return (z, *aux)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, *daux: Tensor | None) -> tuple[Tensor | None, ...]:
        layers, ctx.layers = ctx.layers, None
        if layers is None:
            raise RuntimeError("the backward of a pipeline runs once: what it needs is gone; call its forward again")
        if dz is None:
            shape, dtype, device = ctx.like
            dz = torch.zeros(shape, dtype=dtype, device=device)
        run, cut = ctx.given
        backward = BlocksBackward(run, cut, layers, dz, daux)
        dx = backward.run()
        grads: list[Tensor | None] = []
        for layer, totals, dense in zip(layers, backward.totals, backward.dense, strict=True):
            grads += [dense.get(place) for place in range(len(layer.parameters))]
            own = layer.experts.parameters
            for parameter, total in zip(own, totals or [None] * len(own), strict=True):
                grads.append(None if parameter is None or total is None else total.to(parameter.dtype))
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None, None, None, *grads


def through_stack(
    x: Tensor, stages: Sequence[Stage], run: Run, cut: Cut, refusal: str | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The batch through all layers by the plans of `run`, and each layer's auxiliary loss. Collective.

    Args:
        x: [B, …, M], B samples.
        refusal: why this rank cannot take part, if so; x is then any without samples. All ranks end with that reason.
    Returns:
        [B, …, M], and a scalar for each layer; differentiable once.
    Saves for backward:
        of each layer what autograd keeps of its dense part and gate, received rows, R·M, and what the experts keep, the
        pre-activation R·H (gated 2·R·H); where rows have other chunks in the two passes, the backward copies these
        once, one layer at a time.
    Raises:
        RankError: this or another rank refused its input, or what a stage made of it, before anything of that was sent;
            see also `fusedmoe.comm.collectives`.
    """
    experts = [stage.experts(x) for stage in stages]  # once: under autocast their parameters are cast here
    parameters: list[Tensor | None] = []
    for stage, of in zip(stages, experts, strict=True):
        parameters += [*stage.dense_parameters, *of.parameters]
    z, *aux = _Through.apply(x, run, cut, stages, experts, torch.is_grad_enabled(), refusal, *parameters)
    return z, aux
