"""What layers cost on a machine, part by part and chunk by chunk, and a training step of a stack of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.chunks import Chunks
from fusedmoe.schedule.cost import Line, check_contention
from fusedmoe.schedule.gradient import gradient_ranges
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task, weight_gradient
from fusedmoe.schedule.text import name

# What weight gradients are cut off from.
_SOURCES = {kind: source for source, kind in WEIGHT_GRADIENTS.items()}


@dataclass(frozen=True)
class MicroBatches:
    """What a layer costs where micro-batches go through all of it, and where weight gradients are tasks of their own.

    `dense[phase][kind]`: the dense parts in micro-batches. `weights[kind]`: how much of the backward pass of "expert"
    and "attention" is weight gradients: "weight-gradient" and "attention-weight-gradient". `waits`: forward, all
    micro-batches are routed before the first is sent, as where second choices compete for an expert's places; an
    "order" in one piece then stands between them, which takes no time. `apart_s`: what the experts' backward pass takes
    longer where weight gradients are tasks of their own, for which it then keeps activations and their gradients.
    """

    dense: Mapping[str, Mapping[str, Chunks]]
    weights: Mapping[str, Chunks]
    waits: bool = False
    apart_s: float = 0.0


@dataclass(frozen=True)
class LayerCosts:
    """What one layer costs: its parts in chunks and in one piece, by phase and kind, and its dense gradient.

    A plan for the layer has the parts that are here. `micro`: None where dense parts cannot be split. `regroup_s`: what
    the experts' backward pass takes longer where it has other chunks than the forward pass, whose rows it then copies.
    """

    chunks: Mapping[str, Mapping[str, Chunks]]
    dense_s: Mapping[str, Mapping[str, float]]
    gradient_bytes: int = 0
    micro: MicroBatches | None = None
    regroup_s: float = 0.0

    def with_parts(self, kinds: Collection[str]) -> LayerCosts:
        """The same with these parts of the pipeline; those that were not in it take no time."""
        parts, free = [kind for kind in PIPELINE if kind in kinds], Chunks(0.0, 0.0)
        chunks = {phase: {kind: of.get(kind, free) for kind in parts} for phase, of in self.chunks.items()}
        return replace(self, chunks=chunks)

    def dense_total_s(self, phase: str) -> float:
        """Seconds of all parts of a pass that are in one piece."""
        return sum(self.dense_s[phase].values())


@dataclass(frozen=True)
class StackCosts:
    """What a training step of a stack of layers costs (`cost.Costs`).

    `loss_s` and `optimizer_s`: None for a step without them.
    """

    layers: tuple[LayerCosts, ...]
    all_reduce: Line = field(default_factory=lambda: Line(0.0, 0.0))
    contention: float = 1.0
    loss_s: float | None = None
    optimizer_s: float | None = None

    def __post_init__(self) -> None:
        check_contention(self.contention)

    @property
    def can_split(self) -> bool:
        """Whether micro-batches can go through all layers."""
        return bool(self.layers) and all(layer.micro is not None for layer in self.layers)

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(layer.gradient_bytes for layer in self.layers)

    def seconds(self, plan: Plan) -> dict[Task, float]:
        """The duration of each task. Raises `ConfigError` for a task of a part that is not in the costs."""
        result: dict[Task, float] = {}
        known: dict[tuple[str, int | None, str | None], float] = {}
        counts = Counter((task.kind, task.layer, task.phase) for task in plan)
        pieces = gradient_ranges(plan, self.gradient_bytes)
        for task in plan.sequence:
            kind, _, layer, phase, _ = task
            if task in pieces:
                result[task] = self.all_reduce.seconds(len(pieces[task]))
                continue
            if (kind, layer, phase) not in known:
                without = (weight_gradient(kind) or "", layer, phase) in counts
                count = counts[kind, layer, phase]
                known[kind, layer, phase] = self.task_s(task, count, without)
                if kind == "expert" and phase == "backward" and counts[kind, layer, "forward"] not in (0, count):
                    assert layer is not None
                    known[kind, layer, phase] += self.layers[layer].regroup_s / count
            result[task] = known[kind, layer, phase]
        return result

    def task_s(self, task: Task, count: int = 1, without_weights: bool = False) -> float:
        """The duration of a task, apart from gradient-all-reduces.

        `count`: how many pieces its part has. `without_weights`: weight gradients of this part are tasks of their own.
        """
        kind, chunk, layer, phase, _ = task
        if layer is None:
            found = {"loss": self.loss_s, "optimizer": self.optimizer_s}.get(kind)
            found = None if found is None else found / count
        elif layer >= len(self.layers) or phase is None:
            found = None
        elif chunk is None and kind in self.layers[layer].dense_s[phase] and not without_weights:
            found = self.layers[layer].dense_s[phase][kind]
        else:
            part = _part(self.layers[layer], phase, kind, without_weights)
            found = None if part is None else part.seconds(count)
        if found is None:
            raise ConfigError(
                f"costs: nothing is known of {name(task)} ({task.kind}); the plan is not for these layers"
            )
        return found


def _part(layer: LayerCosts, phase: str, kind: str, without_weights: bool) -> Chunks | None:
    """What chunks of a kind take; None: the layer has none of it."""
    micro = layer.micro
    if kind in PIPELINE:
        part = layer.chunks[phase].get(kind)
    elif micro is None:
        part = None
    elif kind == "order" and micro.waits:
        part = Chunks(0.0, 0.0)
    elif kind in _SOURCES:
        part = micro.weights.get(_SOURCES[kind]) if phase == "backward" else None
    else:
        part = micro.dense[phase].get(kind)
    if part is None or not without_weights:
        return part
    weights = None if micro is None else micro.weights.get(kind)
    if micro is None or weights is None:
        return None
    return part + weights * -1.0 + Chunks(0.0, micro.apart_s if kind == "expert" else 0.0)
