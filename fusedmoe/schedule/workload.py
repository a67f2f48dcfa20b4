"""Workloads: how much one MoE layer sends and computes, and how long that takes on a machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.refit import refit
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import FUSED, LINKS, PHASES, PIPELINE, TaskKind

#: What a model's costs know its shapes by where they are of steps whose chunks end with their layer, beside those of
#: steps whose micro-batches go through whole layers.
IN_LAYERS = ", chunks of layers"

#: Matrix products of an expert's forward pass, by its network.
GEMMS = {"ffn": 2, "swiglu": 3}

# Matrix products of attention: projections; with scores, and these with the values.
_PROJECTIONS, _ATTENTION_GEMMS = 4, 6

# The matrices of an expert.
_MATRICES = ("w1", "w2")

#: The line of the cost model that each part of a layer is on.
_LINES: dict[str, str] = {
    TaskKind.DISPATCH: "all-to-all/ep",
    TaskKind.ALL_GATHER: "all-gather/esp",
    TaskKind.EXPERT: "gemm",
    TaskKind.REDUCE_SCATTER: "reduce-scatter/esp",
    TaskKind.COMBINE: "all-to-all/ep",
}


@dataclass(frozen=True)
class Workload:
    """One transformer layer with experts as one rank sees it (FSMoE §4.1, Table 1).

    B samples of L tokens, model dim M, expert hidden H, E experts, top k, capacity factor f (None: no capacity, with
    the volume of 1), an expert network of "ffn" or "swiglu"; ep and esp ranks in the groups of experts and of their
    shards. Attention is split over as many ranks as an expert (N_MP = N_ESP).

    A row for each (token, k) pair is computed, and `share` of a row travels for it: 1 as in the papers, and less where
    a token goes once to each rank (`uniform_share`). The matrices that are `trained` have gradients: backward, nothing
    is computed for the others, and experts of which none is trained have no W tasks.

    Raises `ConfigError` for a number that is not positive, and an unknown expert network or matrix.
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
    share: float = 1.0
    trained: tuple[str, ...] = _MATRICES

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if what not in ("expert", "trained") and value is not None and not value > 0:
                raise ConfigError(f"workload: {what} must be positive, not {value!r}")
        if self.expert not in GEMMS:
            raise ConfigError(f"workload: expert {self.expert!r} is not one of {', '.join(GEMMS)}")
        if self.trained not in ((), ("w1",), ("w2",), _MATRICES):
            raise ConfigError(f"workload: trained are w1 and w2, either or none, not {self.trained!r}")

    @classmethod
    def of_rows(
        cls, rows: int, model_dim: int, hidden: int, experts: int, gated: bool, itemsize: int, ep: int, esp: int
    ) -> Workload:
        """Makes the workload of feed-forward experts for a rank that has `rows` (token, k) pairs."""
        # A rank's rows go to the shards of its node, which work on them together: esp ranks' rows meet there.
        expert = "swiglu" if gated else "ffn"
        return cls(1, rows * esp, model_dim, hidden, experts, k=1, expert=expert, ep=ep, esp=esp, itemsize=itemsize)

    @property
    def tokens(self) -> int:
        """Tokens of the ranks that share an expert's shards: B·L."""
        return self.batch * self.seq_len

    @property
    def rows(self) -> float:
        """Rows that a rank's experts compute in one pass, with the other shards' (F9: k·f·B·L)."""
        return self.k * (1.0 if self.capacity_factor is None else self.capacity_factor) * self.tokens

    @property
    def trained_share(self) -> float:
        """The weight gradients' products of all that there may be, as many as the forward has: 0 to 1."""
        products = GEMMS[self.expert]
        return sum({"w1": products - 1, "w2": 1}[name] for name in self.trained) / products

    @property
    def shapes(self) -> str:
        """Words for the layer, however many tokens it is given: `CostModel.observed` knows it by these."""
        esp = f" in {self.esp} shards" if self.esp > 1 else ""
        of = f"{self.experts} experts {self.expert} {self.model_dim}×{self.hidden}{esp} over {self.ep}"
        frozen = "" if self.trained == _MATRICES else f", trained: {' '.join(self.trained) or 'none'}"
        return f"{of}, {self.itemsize} bytes{frozen}"

    def sending(self, share: float) -> Workload:
        """Returns this workload where so many tokens travel for a pair, in 32nds, so that few are planned for."""
        return replace(self, share=max(1, round(32 * share)) / 32)

    def volumes(self) -> dict[str, float]:
        """Returns the bytes that each part of the layer handles in one pass, and for "expert" the FLOP forward (F9).

        A part that has no peers is left out.
        """
        gathered = self.share * self.rows * self.model_dim * self.itemsize
        flop = 2 * GEMMS[self.expert] * self.rows * self.model_dim * self.hidden / self.esp
        volumes: dict[str, float] = {TaskKind.EXPERT: flop}
        if self.ep > 1:
            volumes |= dict.fromkeys((TaskKind.DISPATCH, TaskKind.COMBINE), gathered / self.esp)
        if self.esp > 1:
            volumes |= dict.fromkeys((TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER), gathered)
        return {kind: volumes[kind] for kind in PIPELINE if kind in volumes}

    def kept(self) -> float:
        """Returns the elements that the experts' forward pass keeps: received tokens, which the gradient of W1 alone
        needs, and pre-activations of pairs."""
        tokens = self.share * self.model_dim if "w1" in self.trained else 0.0
        return self.rows * (tokens + (GEMMS[self.expert] - 1) * self.hidden / self.esp)

    def kept_for_weights(self) -> float:
        """Returns the elements that are kept between the gradients of rows and those of the experts' weights:
        activations, and the gradients of pre-activations."""
        return self.trained_share * self.rows * GEMMS[self.expert] * self.hidden / self.esp

    def projection_flop(self) -> float:
        """Returns the FLOP of attention's four projections, forward."""
        return 2 * _PROJECTIONS * self.tokens * self.model_dim**2 / self.esp

    def attention_flop(self) -> float:
        """Returns the FLOP of attention forward."""
        # The projections, the scores, and the product of these with the values.
        return self.projection_flop() + 4 * self.tokens * self.seq_len * self.model_dim / self.esp

    def gradient_bytes(self) -> int:
        """Returns the bytes that are summed over data parallelism: attention's projections, split over MP, and the
        gate."""
        return self.itemsize * (4 * self.model_dim**2 // self.esp + self.model_dim * self.experts)

    def layer_costs(self, model: CostModel) -> LayerCosts:
        """Returns the layer's costs on a machine.

        The dense part is attention's matrix products, and the model-parallel reduce-scatter and all-gather of B·L rows
        around the experts (F7): with them the coefficients of the paper's Fig. 5 give the times of its Table 2. In
        micro-batches each part of it starts anew for every one.
        """

        def stage(name: str, volume: float, starts: int = 1) -> StageTime:
            # Each product starts by itself; all of their FLOP run at one rate.
            line = model.line(name)
            return StageTime(starts * line.alpha_s, line.beta_s * volume)

        attention = stage("gemm", self.attention_flop(), _ATTENTION_GEMMS)
        shared = StageTime(0.0, 0.0)
        if self.esp > 1:
            rows_bytes = self.tokens * self.model_dim * self.itemsize
            shared = stage("all-gather/esp", rows_bytes) + stage("reduce-scatter/esp", rows_bytes)
        chunks: dict[str, dict[str, StageTime]] = {}
        dense: dict[str, dict[str, StageTime]] = {}
        expert = stage("gemm", self.volumes()[TaskKind.EXPERT], GEMMS[self.expert])
        for phase, times in zip(PHASES, (1, 2), strict=True):
            # Backward, attention and experts that are trained whole take twice their time (F13).
            chunks[phase] = {kind: stage(_LINES[kind], volume) for kind, volume in self.volumes().items()}
            chunks[phase][TaskKind.EXPERT] = expert * (1.0 if phase == "forward" else 1.0 + self.trained_share)
            dense[phase] = {TaskKind.ATTENTION: attention * times + shared}
        # Of two products of the backward pass of a weight one is its gradient.
        weights: dict[str, StageTime] = {TaskKind.ATTENTION: stage("gemm", self.projection_flop(), _PROJECTIONS)}
        if self.trained:
            weights[TaskKind.EXPERT] = expert * self.trained_share
        dense_s = {phase: {kind: part.seconds(1) for kind, part in parts.items()} for phase, parts in dense.items()}
        # A model of a machine without this line knows nothing of copies, and charges nothing: neither for those between
        # the chunks of one pass and those of the other, nor for what W tasks must keep.
        copy = model.lines.get("copy", Line(0.0, 0.0))
        apart_s = copy.seconds(self.kept_for_weights() * self.itemsize) if model.tiled else 0.0
        micro = MicroBatches(dense, weights, apart_s=apart_s)
        regroup_s = copy.seconds(self.kept() * self.itemsize)
        return LayerCosts(chunks, dense_s, self.gradient_bytes(), micro, regroup_s)

    def step_costs(
        self,
        model: CostModel,
        gradient_bytes: Sequence[int],
        parts: Collection[str],
        *,
        whole: bool = False,
        waits: bool = False,
    ) -> StepCosts:
        """Returns the costs of a training step of layers like this, as they ran where that was seen.

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
        layers = tuple(of_size[size] for size in gradient_bytes)
        found = StepCosts(layers, all_reduce, model.contention, task_s=model.task_s, workload=self)
        # What ran goes before what lines predict.
        seen = model.observed.get(self.shapes)
        if not whole:
            seen = model.observed.get(self.shapes + IN_LAYERS, seen)
        return found if seen is None else refit(found, seen, 1.0 if seen.rows is None else seen.rows / self.rows)


def uniform_share(experts: int, k: int, ranks: int) -> float:
    """Returns the tokens that travel for each (token, k) pair, where a token's k experts may be any, on any rank.

    Of W ranks a token needs one with probability p = 1 − C(E − E/W, k)/C(E, k), and so W·p/k tokens travel for a pair.
    """
    ranks = min(ranks, experts)
    if ranks <= 1 or k <= 1:
        return 1.0 / max(1, k) if ranks <= 1 else 1.0
    elsewhere = math.comb(experts - experts // ranks, k) / math.comb(experts, k)
    return ranks * (1 - elsewhere) / k


def one_sided_s(kind: str, workload: Workload, model: CostModel) -> dict[str, float] | None:
    """Returns the seconds of both passes of a layer by a fused operation, in one chunk. None where the machine's costs
    know nothing of it. What more chunks take is known only where they ran (`CostModel.observed`).

    A part's bytes travel as fast as its collective takes them by its line (β·n), and no collective has to start: a
    signal for each takes the place of α. Kernels work tile by tile: the product that takes rows computes a tile when
    its rows have come, and the one that gives results sends a tile's on when they are computed. So these two overlap
    with the link (`overlapped_s`), and nothing else does:

        forward     signal + [there | up] + signal + [down | back]
        backward    signal + [there | down] + signal + [up | back] + weight gradients
    """
    first, _, last = FUSED[kind]
    link = LINKS[first]
    if model.fused is None or link not in model.fused.signal_s:
        return None
    layer = workload.step_costs(model, [0], workload.volumes()).layers[0]
    # With shards, the rows of an expert go to each of them, and results come from each, between nodes as well.
    shards = workload.esp if link == "inter" else 1
    tile = min(1.0, model.fused.tile_rows / workload.rows)
    seconds = {}
    for phase in PHASES:
        parts = layer.chunks[phase]
        there, back = (shards * parts[part].moved_s for part in (first, last))
        # What the backward pass has more than the forward is the weights' gradients.
        whole_s = parts[TaskKind.EXPERT].moved_s / (1 if phase == "forward" else 1 + workload.trained_share)
        down_s = whole_s / GEMMS[workload.expert]
        up_s = whole_s - down_s
        steps = ((there, up_s), (down_s, back)) if phase == "forward" else ((there, down_s), (up_s, back))
        apart_s = parts[TaskKind.EXPERT].seconds(1) - whole_s  # all starts, and gradients of weights
        seconds[phase] = apart_s + 2 * model.fused.signal_s[link] + sum(overlapped_s(step, tile) for step in steps)
    return seconds


def costs_of_tokens(costs: CostModel, workload: Workload) -> CostModel:
    """Return costs measured on one layer as those of the same number of tokens, whatever number of rows `workload`
    predicts for them."""
    seen = next(iter(costs.observed.values()), None)
    return replace(costs, observed={} if seen is None else {workload.shapes: replace(seen, rows=None)})


def overlapped_s(stages_s: Sequence[float], tile: float) -> float:
    """Returns the time of stages that one tile after the other goes through: the longest, and one tile of the others.

    `stages_s`: of all rows. `tile`: rows of a tile as a share of all.
    """
    longest = max(stages_s)
    return longest + tile * (sum(stages_s) - longest)
