"""Requirements of blocks that run in micro-batches: on their layers, and on the plans of both passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusedmoe.blocks.moe_block import MoEBlock
from fusedmoe.engine.run import Plans
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.names import ALGORITHMS
from fusedmoe.runtime.execute import Capabilities, require_runnable, runnable_kinds
from fusedmoe.schedule.plan import Plan, task_name
from fusedmoe.schedule.task import FUSED, SPARSE_GATHER, SPARSE_REDUCE, STAGES, TaskKind


def require_followable(blocks: Sequence[MoEBlock], plans: Plans, *, reduces_gradients: bool) -> None:
    """Raise `ConfigError` for plans that these blocks cannot follow.

    `reduces_gradients`: there is a `GradientReducer` for the gradient buckets of the backward plan.
    """
    for phase, plan in zip(STAGES, (plans.forward, plans.backward), strict=True):
        _require_tasks(blocks, phase, plan, reduces_gradients)
        _require_complete(blocks, phase, plan)
    for number, block in enumerate(blocks):
        degrees = plans.forward.degrees.get(("forward", number)), plans.backward.degrees.get(("backward", number))
        if degrees[0] != degrees[1] and not block.experts.can_rechunk:
            raise ConfigError(
                f"pipeline: block {number}: experts that are modules of their own need one degree for both passes, "
                f"not {degrees}"
            )


def _require_tasks(blocks: Sequence[MoEBlock], phase: str, plan: Plan, reduces_gradients: bool) -> None:
    if any(task.kind in FUSED for task in plan):
        # A fused operation occupies computation and a link from the first token to the last result.
        raise ConfigError(
            f"pipeline: the {phase} plan has fused operations, which leave micro-batches nothing to overlap with: "
            "use MoELayer(schedule='fused') without a pipeline, or a plan by collectives"
        )
    has_replicas, topology = [block.layer.placed is not None for block in blocks], blocks[0].layer.topology
    here = Capabilities(topology.ep.size, topology.esp.size, has_replicas=any(has_replicas))
    require_runnable(plan, runnable_kinds(here, "blocks"), f"pipeline: the {phase} plan")
    for task in plan:
        if task.phase != phase or (task.layer or 0) >= len(blocks):
            raise ConfigError(f"pipeline: {task} is not of the {phase} pass of {len(blocks)} blocks")
        sparse = {SPARSE_GATHER: "forward", SPARSE_REDUCE: "backward"}.get(task.kind)
        if sparse is not None and (not has_replicas[task.layer or 0] or phase != sparse):
            raise ConfigError(
                f"pipeline: the {phase} plan has {task_name(task)}; only blocks with placement='fssdp' have replicas, "
                "whose parameters are gathered in the forward pass and whose gradients are reduced in the backward pass"
            )
        if task.kind == TaskKind.GRADIENT_ALL_REDUCE and not reduces_gradients:
            raise ConfigError("pipeline: the plan reduces gradients, so set_plan() needs what reduces them")


def _require_complete(blocks: Sequence[MoEBlock], phase: str, plan: Plan) -> None:
    kinds = {TaskKind.ATTENTION, *blocks[0].layer.parts}
    for number, block in enumerate(blocks):
        counts = Counter(task.kind for task in plan if task.layer == number)
        lacks = sorted(kinds - counts.keys())
        if lacks:
            raise ConfigError(f"pipeline: the {phase} plan has no {lacks[0]} of block {number}")
        split = counts[TaskKind.ATTENTION] > 1 and not counts[TaskKind.PERMUTE]
        if phase == "forward" and block.routes_first and split:
            raise ConfigError(
                f"pipeline: block {number} cannot tell whose rows there is room for before all of a batch is "
                "routed (k > 1 with a capacity): the plan needs a permute task between attention and dispatch"
            )


def require_splittable(layer: MoELayer, number: int, first: MoELayer) -> None:
    """Raise `ConfigError` for a layer whose batches cannot be split into micro-batches.

    Args:
        number: index of the layer's block, for the error.
        first: the first block's layer; all blocks have its topology and `mp_tokens.is_joint`.
    """
    topology = first.topology
    gate, order = type(layer.gate).__name__, type(layer.order).__name__
    for wrong, text in (
        (not layer.gate.splits, f"{gate} looks at whole batches; only what follows it can be split: use schedule=…"),
        (
            not layer.order.splits,
            f"{order} has a layout() or restore() of its own, of whole batches: use schedule=…, or Sparse()",
        ),
        (
            layer.dispatch not in (*ALGORITHMS, "auto"),
            "a dispatcher of your own takes whole layers: name an all-to-all algorithm",
        ),
        (
            layer.topology is not topology and topology.size * layer.topology.size > 1,
            "all blocks must have the same topology",
        ),
        (
            layer.mp_tokens.is_joint != first.mp_tokens.is_joint,
            "either all blocks have mp_input='split', or none: x is either an MP rank's own tokens or the group's",
        ),
    ):
        if wrong:
            raise ConfigError(f"pipeline: block {number}: {text}")
