"""Tasks of a plan, and the dependencies between them.

Both passes of a layer consist of the same kinds of tasks, named after their operation: in the backward pass, `dispatch`
sends output gradients to the experts and `combine` returns input gradients.

    forward    attention → gate → permute → count-exchange → [dispatch → … → combine] → unpermute
    backward   permute → [dispatch → all-gather → expert → reduce-scatter → combine] → unpermute → gate → attention

The tasks in brackets form the layer's pipeline and run in chunks. A layer may lack any of them: without expert sharding
it has no all-gather. All kinds of a pass have the same chunks; their number may differ between the passes. A
count-exchange exchanges the row counts of all chunks and both passes. "other" is the measured time outside these tasks.

A fused operation runs the whole pipeline in one task: its kernels send and receive rows while they compute. It is named
after the tasks it replaces, and occupies compute and its link from start to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class TaskKind(StrEnum):
    """Kinds of tasks and of timeline spans. Plans and JSON contain the string values.

    The engine has a method for each kind that plans may run (`fusedmoe.engine`). A new kind needs an entry in `STAGES`,
    `SYMBOLS` and the colours of `draw`, and in `LINKS` if it only transfers data.
    """

    GATE = "gate"
    PERMUTE = "permute"
    COUNT_EXCHANGE = "count-exchange"
    DISPATCH = "dispatch"
    ALL_GATHER = "all-gather"
    EXPERT = "expert"
    REDUCE_SCATTER = "reduce-scatter"
    COMBINE = "combine"
    DISPATCH_EXPERT_COMBINE = "dispatch-expert-combine"
    ALL_GATHER_EXPERT_REDUCE_SCATTER = "all-gather-expert-reduce-scatter"
    UNPERMUTE = "unpermute"
    SHARED_EXPERT = "shared-expert"
    ATTENTION = "attention"
    WEIGHT_GRADIENT = "weight-gradient"
    ATTENTION_WEIGHT_GRADIENT = "attention-weight-gradient"
    GRADIENT_ALL_REDUCE = "gradient-all-reduce"
    SPARSE_ALL_GATHER = "sparse-all-gather"
    SPARSE_REDUCE_SCATTER = "sparse-reduce-scatter"
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    OTHER = "other"

    def __repr__(self) -> str:
        return repr(self.value)  # error messages show the string value


_K = TaskKind

KINDS: tuple[str, ...] = tuple(TaskKind)

#: Resources of a rank: compute, intra-node links, inter-node links.
RESOURCES = ("compute", "intra", "inter")

PHASES = ("forward", "backward")

PIPELINE: tuple[str, ...] = (_K.DISPATCH, _K.ALL_GATHER, _K.EXPERT, _K.REDUCE_SCATTER, _K.COMBINE)

#: Fused operations and the parts they replace, for experts split over EP, or over ESP only. With both axes the first
#: operation sends rows directly to all shards of their experts, without an all-gather.
FUSED: dict[str, tuple[str, ...]] = {
    _K.DISPATCH_EXPERT_COMBINE: PIPELINE[::2],
    _K.ALL_GATHER_EXPERT_REDUCE_SCATTER: PIPELINE[1:-1],
}

COUNT_EXCHANGE: str = _K.COUNT_EXCHANGE

_CHUNKED_KINDS = (*PIPELINE[:3], *FUSED, *PIPELINE[3:])

#: Kinds of a layer's tasks in each pass, in execution order.
STAGES: dict[str, tuple[str, ...]] = {
    "forward": (_K.ATTENTION, _K.GATE, _K.PERMUTE, _K.OTHER, COUNT_EXCHANGE, *_CHUNKED_KINDS, _K.UNPERMUTE),
    "backward": (_K.PERMUTE, *_CHUNKED_KINDS, _K.UNPERMUTE, _K.OTHER, _K.GATE, _K.ATTENTION),
}

#: W tasks by the kind they are split from, whose backward task then computes input gradients only.
WEIGHT_GRADIENTS: dict[str, str] = {_K.EXPERT: _K.WEIGHT_GRADIENT, _K.ATTENTION: _K.ATTENTION_WEIGHT_GRADIENT}

#: Sparse collectives: send expert parameters to replicas, and reduce gradients of replicas on the owners.
SPARSE_GATHER: str
SPARSE_REDUCE: str
SPARSE_GATHER, SPARSE_REDUCE = _K.SPARSE_ALL_GATHER, _K.SPARSE_REDUCE_SCATTER

#: The link of each kind that only transfers data. All other kinds compute.
LINKS: dict[str, str] = {
    COUNT_EXCHANGE: "inter",
    _K.DISPATCH: "inter",
    _K.ALL_GATHER: "intra",
    _K.REDUCE_SCATTER: "intra",
    _K.COMBINE: "inter",
    _K.GRADIENT_ALL_REDUCE: "inter",
    SPARSE_GATHER: "inter",
    SPARSE_REDUCE: "inter",
}

#: Symbols of the kinds in the text form of a plan: ``D0`` is the dispatch of chunk 0, ``DEC0`` a fused operation.
SYMBOLS: dict[str, str] = {
    _K.GATE: "G",
    _K.PERMUTE: "P",
    COUNT_EXCHANGE: "CX",
    **dict(zip(PIPELINE, ("D", "AG", "E", "RS", "C"), strict=True)),
    _K.DISPATCH_EXPERT_COMBINE: "DEC",
    _K.ALL_GATHER_EXPERT_REDUCE_SCATTER: "AGERS",
    _K.UNPERMUTE: "U",
    _K.SHARED_EXPERT: "SE",
    _K.ATTENTION: "A",
    _K.WEIGHT_GRADIENT: "WG",
    _K.ATTENTION_WEIGHT_GRADIENT: "AWG",
    _K.GRADIENT_ALL_REDUCE: "AR",
    SPARSE_GATHER: "SAG",
    SPARSE_REDUCE: "SRS",
    _K.LOSS: "L",
    _K.OPTIMIZER: "Opt",
    _K.OTHER: "",
}

_RESOURCES_BY_KIND = {
    **{kind: (link,) for kind, link in LINKS.items()},
    **{kind: ("compute", LINKS[parts[0]]) for kind, parts in FUSED.items()},
}


class Task(NamedTuple):
    """One operation of a step. The first four fields identify a task within a plan.

    The gradients of dense parts form one array of bytes, last layer first. Buckets are cut off it in the order of the
    plan. A bucket is in the last layer of which it has bytes, whose dense part it waits for.

    Attributes:
        chunk: index from 0; None if the stage is not chunked.
        layer: None for loss and optimizer.
        phase: "forward", "backward", or None outside both.
        size: bytes of a gradient-all-reduce; None: all remaining bytes of its layer.
    """

    kind: str
    chunk: int | None = None
    layer: int | None = 0
    phase: str | None = "forward"
    size: int | None = None


def resources_of(kind: str) -> tuple[str, ...]:
    """Return the resources that a kind occupies: one, or compute and a link for fused operations."""
    return _RESOURCES_BY_KIND.get(kind, ("compute",))


def standard_dependencies(tasks: Iterable[Task]) -> dict[Task, tuple[Task, ...]]:
    """Return the dependencies of each task in a model of MoE layers; every task is a key.

    * Tasks of a layer run in the order of `STAGES`. A chunk waits for the same chunk of the previous stage; an
      unchunked stage waits for all of the previous stage, and all of the next stage waits for it.
    * Layers run in order: forward from 0, then the loss, then backward from the last. A layer waits for all of the
      previous layer. Within a pass with chunked attention (micro-batches), chunk i waits only for chunk i of the
      previous layer, or, if chunk counts differ, for all chunks that share rows with it.
    * Chunk i of a layer's attention also waits for chunk i − 1.
    * A weight-gradient waits for the expert of its chunk, or, unchunked, for all experts of its layer; an
      attention-weight-gradient for the attention.
    * An expert also waits for the sparse-all-gathers of its layer and pass. A sparse-reduce-scatter waits for its
      layer's weight-gradients, or experts if there are none.
    * A gradient-all-reduce waits for gate, attention, attention weight gradients and "other" of its layer's backward
      pass.
    * An optimizer waits for the backward pass of its layer, or of all layers if it has no layer.
    """
    stages: dict[tuple[str | None, int | None], dict[str, list[Task]]] = {}
    after: dict[Task, tuple[Task, ...]] = {}
    for task in tasks:
        after[task] = ()
        stages.setdefault((task.phase, task.layer), {}).setdefault(task.kind, []).append(task)

    forward, backward = (
        sorted(layer for phase, layer in stages if phase == wanted and layer is not None) for wanted in PHASES
    )

    def pass_of(phase: str, layer: int) -> list[list[Task]]:
        return [stages[phase, layer][kind] for kind in STAGES[phase] if kind in stages[phase, layer]]

    # The loss is a pass between the two others.
    loss = [kinds[_K.LOSS] for kinds in stages.values() if _K.LOSS in kinds]
    back = [pass_of("backward", layer) for layer in reversed(backward)]
    passes = [*(pass_of("forward", layer) for layer in forward), loss, *back]

    before: list[Task] = []
    earlier: list[list[Task]] = []
    for stages_of_pass in passes:
        micro = _has_micro_batches(stages_of_pass) and _has_micro_batches(earlier)
        for index, stage in enumerate(stages_of_pass):
            _add_stage_dependencies(after, before, stage, within=micro or index > 0)
            before = stage
        # A layer without stages keeps the chain intact.
        earlier = stages_of_pass or earlier
    for (phase, layer), kinds in stages.items():
        if phase is not None and layer is not None:
            chunks = {task.chunk: task for task in kinds.get(_K.ATTENTION, ()) if task.chunk is not None}
            for chunk, task in chunks.items():
                if chunk - 1 in chunks:
                    after[task] = (*after[task], chunks[chunk - 1])
        for source, kind in WEIGHT_GRADIENTS.items():
            sources = kinds.get(source, ())
            for task in kinds.get(kind, ()):
                after[task] = tuple(whole for whole in sources if whole.chunk == task.chunk) or tuple(sources)
        for task in kinds.get(_K.EXPERT, ()):
            after[task] = (*after[task], *kinds.get(SPARSE_GATHER, ()))
        for task in kinds.get(SPARSE_REDUCE, ()):
            after[task] = tuple(kinds.get(WEIGHT_GRADIENTS[_K.EXPERT], ()) or kinds.get(_K.EXPERT, ()))
        dense = (_K.OTHER, _K.GATE, _K.ATTENTION, _K.ATTENTION_WEIGHT_GRADIENT) if phase == "backward" else ()
        complete = tuple(task for kind in dense for task in kinds.get(kind, ()))
        for task in kinds.get(_K.GRADIENT_ALL_REDUCE, ()):
            after[task] = complete
        for task in kinds.get(_K.OPTIMIZER, ()):
            after[task] = tuple(t for t in after if t.phase == "backward" and task.layer in (None, t.layer))
    return after


def _has_micro_batches(stages: Sequence[Sequence[Task]]) -> bool:
    return any(stage[0].kind == _K.ATTENTION and stage[0].chunk is not None for stage in stages)


def _add_stage_dependencies(
    after: dict[Task, tuple[Task, ...]], before: Sequence[Task], stage: Sequence[Task], within: bool
) -> None:
    """Make `stage` wait for `before`: chunk by chunk if both are chunked, otherwise for all of it."""
    together = {task.chunk: task for task in before}
    # Only micro-batches stay chunked between layers, and none between passes.
    micro = within or any(tasks and tasks[0].kind == _K.ATTENTION for tasks in (before, stage))
    micro = micro and bool(before) and before[0].phase == stage[0].phase
    chunks, count, count_before = {task.chunk for task in stage}, len(stage), len(before)
    all_chunks = chunks == {*range(count)} and together.keys() == {*range(count_before)}
    if micro and None not in together and together.keys() == chunks:
        for task in stage:
            after[task] = (together[task.chunk],)
    elif micro and all_chunks:
        for task in stage:  # chunk i of n has the rows from fraction i/n to (i + 1)/n
            chunk = task.chunk or 0
            first, stop = chunk * count_before // count, -(-(chunk + 1) * count_before // count)
            after[task] = tuple(together[number] for number in range(first, stop))
    else:
        everything = tuple(before)
        for task in stage:
            after[task] = everything


def invert_dependencies(before: Sequence[Iterable[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in before]
    for place, waited in enumerate(before):
        for one in waited:
            followers[one].append(place)
    return followers


def issue_order(before: Sequence[Sequence[int]], followers: Sequence[Iterable[int]]) -> list[int]:
    """Return all tasks, except those in or behind a cycle, in topological order.

    Tasks are sorted by their start with unit durations, then by index.
    """
    waits = list(map(len, before))
    ready = [place for place, count in enumerate(waits) if not count]
    order: list[int] = []
    while ready:
        order += ready
        next_ready = []
        for place in ready:
            for one in followers[place]:
                waits[one] -= 1
                if not waits[one]:
                    next_ready.append(one)
        ready = sorted(next_ready)
    return order
