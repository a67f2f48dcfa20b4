"""Tasks: what a schedule puts in order, and what each task waits for.

A layer's rows go through the same kinds of tasks in both passes, so a task is named after what it does, not after the
operation whose backward it is: in the backward pass `dispatch` carries gradients of results to the experts and
`combine` brings gradients of rows back.

    forward    attention → gate → permute → count-exchange → [dispatch → … → combine] → unpermute
    backward   permute → [dispatch → all-gather → expert → reduce-scatter → combine] → unpermute → gate → attention

The tasks in brackets, the layer's pipeline, go in chunks; any of them may be missing (without expert sharding a layer
has no all-gather). In a count-exchange ranks tell each other how many rows they will send: once for all chunks, and for
both passes. What a pass was seen to take beside these tasks is "other", after "permute" forward, before "gate"
backward.

A fused operation does the whole pipeline in one task: its kernels send and receive rows while they compute. It is named
after the tasks that it replaces, and occupies the processor and its link together, from its start to its end. All
chunks of a layer's pass have the same kinds; the backward pass may have another number of chunks than the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class TaskKind(StrEnum):
    """Kinds of tasks, and of spans in a timeline. A member is a string, so that plans' texts and JSON hold its value.

    The engine has a method for each kind that a plan may run (`fusedmoe.engine`); a new kind also needs its place in
    `STAGES`, its link in `LINKS` where it only moves data, its symbol in `SYMBOLS` and its colour in `draw`.
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
        return repr(self.value)  # messages quote a kind as users write it


_K = TaskKind

#: All kinds of tasks.
KINDS: tuple[str, ...] = tuple(TaskKind)

#: What a task occupies: the processor, the links inside a node, the links between nodes.
RESOURCES = ("compute", "intra", "inter")

#: The two passes of a training step.
PHASES = ("forward", "backward")

#: The parts of a layer that a plan pipelines, in the order in which a chunk goes through them.
PIPELINE: tuple[str, ...] = (_K.DISPATCH, _K.ALL_GATHER, _K.EXPERT, _K.REDUCE_SCATTER, _K.COMBINE)

#: The fused operations, each with the parts that it does: all of a layer whose experts are split over ep, or over esp
#: alone. With both axes, rows go straight to all shards of their experts, so the first one needs no gathering.
FUSED: dict[str, tuple[str, ...]] = {
    _K.DISPATCH_EXPERT_COMBINE: PIPELINE[::2],
    _K.ALL_GATHER_EXPERT_REDUCE_SCATTER: PIPELINE[1:-1],
}

#: Ranks tell each other how many rows they will send.
COUNTS: str = _K.COUNT_EXCHANGE

_CHUNKS = (*PIPELINE[:3], *FUSED, *PIPELINE[3:])

#: All kinds of a layer's tasks, in the order in which its rows go through them.
STAGES: dict[str, tuple[str, ...]] = {
    "forward": (_K.ATTENTION, _K.GATE, _K.PERMUTE, _K.OTHER, COUNTS, *_CHUNKS, _K.UNPERMUTE),
    "backward": (_K.PERMUTE, *_CHUNKS, _K.UNPERMUTE, _K.OTHER, _K.GATE, _K.ATTENTION),
}

#: The W tasks: weight gradients of a split backward pass, by the part that then has the gradients of its input alone.
WEIGHT_GRADIENTS: dict[str, str] = {_K.EXPERT: _K.WEIGHT_GRADIENT, _K.ATTENTION: _K.ATTENTION_WEIGHT_GRADIENT}

#: Sparse collectives: copies of experts come to where they are used, and gradients of the copies go to the owners. Of a
#: layer's gathers in a pass that of late copies, chosen after the gate, has the number 1 where others have a chunk's.
GATHER: str
REDUCE: str
GATHER, REDUCE = _K.SPARSE_ALL_GATHER, _K.SPARSE_REDUCE_SCATTER
LATE = 1

#: The kinds that only move data, by the link that they use; every other kind computes.
LINKS: dict[str, str] = {
    COUNTS: "inter",
    _K.DISPATCH: "inter",
    _K.ALL_GATHER: "intra",
    _K.REDUCE_SCATTER: "intra",
    _K.COMBINE: "inter",
    _K.GRADIENT_ALL_REDUCE: "inter",
    GATHER: "inter",
    REDUCE: "inter",
}

#: Short names of the kinds, as in the text form of a plan: ``D0`` is the dispatch of chunk 0, ``DEC0`` a fused
#: operation that is its expert and its combine as well.
SYMBOLS: dict[str, str] = {
    _K.GATE: "G",
    _K.PERMUTE: "P",
    COUNTS: "CX",
    **dict(zip(PIPELINE, ("D", "AG", "E", "RS", "C"), strict=True)),
    _K.DISPATCH_EXPERT_COMBINE: "DEC",
    _K.ALL_GATHER_EXPERT_REDUCE_SCATTER: "AGERS",
    _K.UNPERMUTE: "U",
    _K.ATTENTION: "A",
    _K.WEIGHT_GRADIENT: "WG",
    _K.ATTENTION_WEIGHT_GRADIENT: "AWG",
    _K.GRADIENT_ALL_REDUCE: "AR",
    GATHER: "SAG",
    REDUCE: "SRS",
    _K.LOSS: "L",
    _K.OPTIMIZER: "Opt",
    _K.OTHER: "",
}

_OCCUPIED = {
    **{kind: (link,) for kind, link in LINKS.items()},
    **{kind: ("compute", LINKS[parts[0]]) for kind, parts in FUSED.items()},
}


class Task(NamedTuple):
    """One operation of a step. Its first four fields name it: a plan has at most one task of each name.

    `chunk`: which of its stage's chunks, from 0; None for a stage that is not in chunks.
    `layer`: None for work that belongs to no layer (the loss, the optimizer).
    `phase`: "forward", "backward", or None outside both.
    `size`: of a gradient-all-reduce, its bytes; None elsewhere, and for all that is left of its layer's gradient.

    The gradients of the dense parts form one array of bytes, in the order of back-propagation (last layer first).
    Buckets are cut off it in the order in which the plan runs them. A bucket belongs to the last layer that it carries
    anything of: it has to wait for that layer's dense part, and for no other.
    """

    kind: str
    chunk: int | None = None
    layer: int | None = 0
    phase: str | None = "forward"
    size: int | None = None


def resources_of(kind: str) -> tuple[str, ...]:
    """Returns what a task of this kind occupies: "compute" or a link; of a fused operation both."""
    return _OCCUPIED.get(kind, ("compute",))


def standard_dependencies(tasks: Iterable[Task]) -> dict[Task, tuple[Task, ...]]:
    """Returns the tasks that each task waits for, by the rules of a model of MoE layers; a key for every task.

    * A chunk goes through the parts of its layer in the order above; a part in one piece waits for all chunks of the
      one before, and all chunks after it wait for it.
    * Layers follow each other, forward from 0, then the loss, then backward from the last. A layer starts when the
      one before has ended; but where attention is in chunks (micro-batches), chunk i goes on to chunk i. One part may
      then be in other chunks than the next: a chunk waits for those that it has anything of.
    * Nothing of the backward pass starts before all of the forward pass has ended, and the loss: it is a batch's.
    * Chunks of one layer's attention run in order, in both passes: chunk i waits for chunk i − 1, too.
    * A weight-gradient waits for the expert of its chunk (without one: for all of its layer), and an
      attention-weight-gradient for the attention.
    * An expert also waits for the sparse-all-gathers of its layer and pass, and a sparse-reduce-scatter for its layer's
      weight gradients (without them: its experts).
    * A gradient-all-reduce waits for the gate, the attention, its weight gradients and "other" of its layer's backward
      pass, where the plan has them.
    * An optimizer waits for all of the backward pass; one with a layer only for this layer's.
    * A task of another kind waits for nothing.
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

    # The loss stands between the passes as a pass of its own, so that all of the backward pass waits for it.
    loss = [kinds[_K.LOSS] for kinds in stages.values() if _K.LOSS in kinds]
    back = [pass_of("backward", layer) for layer in reversed(backward)]
    passes = [*(pass_of("forward", layer) for layer in forward), loss, *back]

    before: list[Task] = []
    earlier: list[list[Task]] = []
    for stages_of_pass in passes:
        micro = _in_micro_batches(stages_of_pass) and _in_micro_batches(earlier)
        for index, stage in enumerate(stages_of_pass):
            _link(after, before, stage, within=micro or index > 0)
            before = stage
        # A pass without stages does not break the chain.
        earlier = stages_of_pass or earlier
    for (phase, layer), kinds in stages.items():
        if phase is not None and layer is not None:
            chunks = {task.chunk: task for task in kinds.get(_K.ATTENTION, ()) if task.chunk is not None}
            for chunk, task in chunks.items():
                if chunk - 1 in chunks:
                    after[task] = (*after[task], chunks[chunk - 1])
        # W tasks are on no row's way: they wait for the part that they are cut off from, and no row waits for them.
        for source, kind in WEIGHT_GRADIENTS.items():
            sources = kinds.get(source, ())
            for task in kinds.get(kind, ()):
                after[task] = tuple(whole for whole in sources if whole.chunk == task.chunk) or tuple(sources)
        # Copies of experts must have come before any row is computed with them.
        for task in kinds.get(_K.EXPERT, ()):
            after[task] = (*after[task], *kinds.get(GATHER, ()))
        for task in kinds.get(REDUCE, ()):
            after[task] = tuple(kinds.get(WEIGHT_GRADIENTS[_K.EXPERT], ()) or kinds.get(_K.EXPERT, ()))
        # Gradients of the dense part are complete when autograd has been through all of it.
        dense = (_K.OTHER, _K.GATE, _K.ATTENTION, _K.ATTENTION_WEIGHT_GRADIENT) if phase == "backward" else ()
        complete = tuple(task for kind in dense for task in kinds.get(kind, ()))
        for task in kinds.get(_K.GRADIENT_ALL_REDUCE, ()):
            after[task] = complete
        for task in kinds.get(_K.OPTIMIZER, ()):
            after[task] = tuple(t for t in after if t.phase == "backward" and task.layer in (None, t.layer))
    return after


def _in_micro_batches(stages: Sequence[Sequence[Task]]) -> bool:
    return any(stage[0].kind == _K.ATTENTION and stage[0].chunk is not None for stage in stages)


def _link(after: dict[Task, tuple[Task, ...]], before: Sequence[Task], stage: Sequence[Task], within: bool) -> None:
    """Makes `stage` wait for `before`: chunk by chunk where both are in chunks, else for all of it."""
    together = {task.chunk: task for task in before}
    # Between two layers only micro-batches go on chunk by chunk: other chunks are put together at a layer's end. From
    # one pass to the other nothing does.
    micro = within or any(tasks and tasks[0].kind == _K.ATTENTION for tasks in (before, stage))
    micro = micro and bool(before) and before[0].phase == stage[0].phase
    chunks, count, count_before = {task.chunk for task in stage}, len(stage), len(before)
    all_chunks = chunks == {*range(count)} and together.keys() == {*range(count_before)}
    if micro and None not in together and together.keys() == chunks:
        for task in stage:
            after[task] = (together[task.chunk],)
    # Numbers of chunks differ: a chunk waits for those that it shares a row with.
    elif micro and all_chunks:
        for task in stage:  # chunk i of n is what stands between shares i/n and (i + 1)/n
            chunk = task.chunk or 0
            first, stop = chunk * count_before // count, -(-(chunk + 1) * count_before // count)
            after[task] = tuple(together[number] for number in range(first, stop))
    else:
        everything = tuple(before)
        for task in stage:
            after[task] = everything
