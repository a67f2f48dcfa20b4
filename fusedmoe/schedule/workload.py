"""Workloads: how much one MoE layer sends and computes, and how long that takes on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel, Line, check_contention
from fusedmoe.schedule.gradient import gradient_ranges
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task
from fusedmoe.schedule.text import name
from fusedmoe.schedule.timeline import PHASES

#: Matrix products of an expert's forward pass, by its network.
_GEMMS = {"ffn": 2, "swiglu": 3}

#: The line of the cost model that each part of a layer is on.
_LINES = {
    "dispatch": "all-to-all/ep",
    "all-gather": "all-gather/esp",
    "expert": "gemm",
    "reduce-scatter": "reduce-scatter/esp",
    "combine": "all-to-all/ep",
}


@dataclass(frozen=True)
class Workload:
    """One transformer layer with experts as one rank sees it (FSMoE §4.1, Table 1).

    B samples of L tokens, model dim M, expert hidden H, E experts, top k, capacity factor f (None: no capacity, with
    the volume of 1), an expert network of "ffn" or "swiglu"; ep and esp ranks in the groups of experts and of their
    shards. Attention is split over as many ranks as an expert (N_MP = N_ESP).

    Raises `ConfigError` for a number that is not positive, and an unknown expert network.
    """

    batch: int
    seq_len: int
    model_dim: int
    hidden: int
    experts: int
    k: int = 2
    capacity_factor: float | None = 1.0
    expert: str = "ffn"
    ep: int = 1
    esp: int = 1
    itemsize: int = 4

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if what != "expert" and value is not None and not value > 0:
                raise ConfigError(f"workload: {what} must be positive, not {value!r}")
        if self.expert not in _GEMMS:
            raise ConfigError(f"workload: expert {self.expert!r} is not one of {', '.join(_GEMMS)}")

    @property
    def tokens(self) -> int:
        """Of the ranks that share an expert's shards: B·L."""
        return self.batch * self.seq_len

    def volumes(self) -> dict[str, float]:
        """What each part of the layer handles in one pass, in bytes, for "expert" in FLOP forward (F9).

        A part that has no peers is left out: dispatch and combine without expert parallelism, all-gather and
        reduce-scatter without expert sharding.
        """
        rows = self.k * (1.0 if self.capacity_factor is None else self.capacity_factor) * self.tokens
        gathered = rows * self.model_dim * self.itemsize
        flop = 2 * _GEMMS[self.expert] * rows * self.model_dim * self.hidden / self.esp
        found = {"expert": flop}
        if self.ep > 1:
            found |= dict.fromkeys(("dispatch", "combine"), gathered / self.esp)
        if self.esp > 1:
            found |= dict.fromkeys(("all-gather", "reduce-scatter"), gathered)
        return {kind: found[kind] for kind in PIPELINE if kind in found}

    def projection_flop(self) -> float:
        """Of attention's four projections, forward."""
        return 2 * _PROJECTIONS * self.tokens * self.model_dim**2 / self.esp

    def attention_flop(self) -> float:
        """Forward: the projections, scores and their product with the values."""
        return self.projection_flop() + 4 * self.tokens * self.seq_len * self.model_dim / self.esp

    def gradient_bytes(self) -> int:
        """Of attention's four projections, split over MP, and the gate: what is summed over data parallelism."""
        return self.itemsize * (4 * self.model_dim**2 // self.esp + self.model_dim * self.experts)

    def layer_costs(self, model: CostModel) -> LayerCosts:
        """What the layer costs on a machine. Backward, experts and attention take twice their time (F13).

        The dense part is attention's matrix products, and the model-parallel reduce-scatter and all-gather of B·L rows
        around the experts (F7): with them the coefficients of the paper's Fig. 5 give the times of its Table 2.

        In micro-batches each part of it starts anew for every one. Of the backward pass, one product of two of the
        experts and of attention's projections is a weight gradient.
        """
        chunks: dict[str, dict[str, Chunks]] = {}
        dense_s: dict[str, dict[str, float]] = {}
        gemm = model.line("gemm")
        attention = Chunks(_ATTENTION_GEMMS * gemm.alpha_s, gemm.beta_s * self.attention_flop())
        shared = Chunks(0.0, 0.0)
        if self.esp > 1:
            rows_bytes = self.tokens * self.model_dim * self.itemsize
            for kind in ("all-gather", "reduce-scatter"):
                line = model.line(f"{kind}/esp")
                shared += Chunks(line.alpha_s, line.beta_s * rows_bytes)
        dense: dict[str, dict[str, Chunks]] = {}
        for phase in PHASES:
            chunks[phase] = {}
            twice = 2 if phase == "backward" else 1
            for kind, volume in self.volumes().items():
                line = model.line(_LINES[kind])
                times = twice if kind == "expert" else 1
                starts = _GEMMS[self.expert] if kind == "expert" else 1
                chunks[phase][kind] = Chunks(times * starts * line.alpha_s, times * line.beta_s * volume)
            dense[phase] = {"attention": attention * twice + shared}
            dense_s[phase] = {kind: part.seconds(1) for kind, part in dense[phase].items()}
        projections = Chunks(_PROJECTIONS * gemm.alpha_s, gemm.beta_s * self.projection_flop())
        weights = {"expert": chunks["backward"]["expert"] * 0.5, "attention": projections}
        return LayerCosts(chunks, dense_s, self.gradient_bytes(), MicroBatches(dense, weights))

    def step_costs(
        self,
        model: CostModel,
        gradient_bytes: Sequence[int],
        parts: Iterable[str],
        *,
        whole: bool = False,
        waits: bool = False,
    ) -> StackCosts:
        """What a training step costs on a machine, of such layers one after the other.

        Args:
            gradient_bytes: of each layer's dense part, as far as it is reduced over data parallelism.
            parts: of the layers' pipelines (`LayerCosts.with_parts`).
            whole: micro-batches can go through all of a layer; otherwise nothing but its pipeline is in chunks.
            waits: all of them are routed before the first is sent (`MicroBatches.waits`).
        """
        layer = self.layer_costs(model).with_parts(parts)
        assert layer.micro is not None
        layer = replace(layer, micro=replace(layer.micro, waits=waits) if whole else None)
        of_size = {size: replace(layer, gradient_bytes=size) for size in set(gradient_bytes)}
        all_reduce = model.line("all-reduce/dp") if any(gradient_bytes) else Line(0.0, 0.0)
        return StackCosts(tuple(of_size[size] for size in gradient_bytes), all_reduce, model.contention)


# Matrix products of attention: projections; with scores, and these with the values.
_PROJECTIONS, _ATTENTION_GEMMS = 4, 6

# What weight gradients are cut off from.
_SOURCES = {kind: source for source, kind in WEIGHT_GRADIENTS.items()}


@dataclass(frozen=True)
class Chunks:
    """Each of r chunks takes alpha_s + whole_s/r seconds."""

    alpha_s: float
    whole_s: float

    def seconds(self, degree: int) -> float:
        return self.alpha_s + self.whole_s / degree

    def __add__(self, other: Chunks) -> Chunks:
        """One after the other."""
        return Chunks(self.alpha_s + other.alpha_s, self.whole_s + other.whole_s)

    def __mul__(self, times: float) -> Chunks:
        return Chunks(self.alpha_s * times, self.whole_s * times)


@dataclass(frozen=True)
class MicroBatches:
    """What a layer costs where micro-batches go through all of it, and where weight gradients are tasks of their own.

    `dense[phase][kind]`: the dense parts in micro-batches. `weights[kind]`: how much of the backward pass of "expert"
    and "attention" is weight gradients: "weight-gradient" and "attention-weight-gradient". `waits`: forward, all
    micro-batches are routed before the first is sent, as where second choices compete for an expert's places; an
    "order" in one piece then stands between them, which takes no time.
    """

    dense: Mapping[str, Mapping[str, Chunks]]
    weights: Mapping[str, Chunks]
    waits: bool = False


@dataclass(frozen=True)
class LayerCosts:
    """What one layer costs: its parts in chunks and in one piece, by phase and kind, and its dense gradient.

    A plan for the layer has the parts that are here. `micro`: None where dense parts cannot be split.
    """

    chunks: Mapping[str, Mapping[str, Chunks]]
    dense_s: Mapping[str, Mapping[str, float]]
    gradient_bytes: int = 0
    micro: MicroBatches | None = None

    def with_parts(self, kinds: Iterable[str]) -> LayerCosts:
        """The same with these parts of the pipeline; those that were not in it take no time."""
        free = Chunks(0.0, 0.0)
        chunks = {phase: {kind: of.get(kind, free) for kind in kinds} for phase, of in self.chunks.items()}
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
                without = (WEIGHT_GRADIENTS.get(kind, ""), layer, phase) in counts
                known[kind, layer, phase] = self.task_s(task, counts[kind, layer, phase], without)
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
            found = _piece_s(self.layers[layer], phase, kind, count, without_weights)
        if found is None:
            raise ConfigError(f"costs: nothing is known of {name(task)} ({kind}); the plan is not for these layers")
        return found


def _piece_s(layer: LayerCosts, phase: str, kind: str, count: int, without_weights: bool) -> float | None:
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
    if part is not None and without_weights:
        weights = None if micro is None else micro.weights.get(kind)
        part = None if weights is None else part + weights * -1.0
    return None if part is None else part.seconds(count)
