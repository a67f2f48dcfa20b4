"""Workloads: communication volume and computation of one MoE layer, and their time on a machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.schedule.refit import refit
from fusedmoe.schedule.step_costs import LayerCosts, MicroBatches, StageTime, StepCosts
from fusedmoe.schedule.task import FUSED, LINKS, PHASES, PIPELINE, TaskKind

#: Suffix of `Workload.shapes` in `CostModel.observed` for measurements with chunked pipelines instead of micro-batches.
PER_LAYER_SUFFIX = ", chunks of layers"

#: Number of matrix products in an expert's forward pass, by network.
GEMMS = {"ffn": 2, "swiglu": 3}

# Matrix products in attention: projections only; with scores and weighted values.
_PROJECTIONS, _ATTENTION_GEMMS = 4, 6

_EXPERT_MATRICES = ("w1", "w2")

_LINE_BY_KIND: dict[str, str] = {
    TaskKind.DISPATCH: "all-to-all/ep",
    TaskKind.ALL_GATHER: "all-gather/esp",
    TaskKind.EXPERT: "gemm",
    TaskKind.REDUCE_SCATTER: "reduce-scatter/esp",
    TaskKind.COMBINE: "all-to-all/ep",
}


class DenseWork(NamedTuple):
    """Matrices of one block that every token passes, and the width of its attention scores.

    Attributes:
        attention: elements of attention's weight matrices.
        feed_forward: elements of the matrices of a dense feed-forward network or a shared expert.
        score_dim: channels of all query heads: half of heads · (query dim + value dim).
    """

    attention: int
    feed_forward: int
    score_dim: float


@dataclass(frozen=True)
class Workload:
    """One transformer layer with experts, per rank (FSMoE §4.1, Table 1).

    B samples of L tokens, model dim M, expert hidden dim H, E experts, top k, capacity factor f (None: no capacity,
    volume as with 1), an expert network "ffn" or "swiglu"; ep, esp: sizes of the groups of experts and expert shards.
    Attention is split over as many ranks as an expert (N_MP = N_ESP).

    Experts compute one row for each (token, k) pair. `share` is the number of rows sent per pair: 1 in the papers, less
    if a token is sent once per rank (`uniform_share`). Matrices not in `trained` are frozen: backward computes only the
    gradients of the rows. If all are frozen, there are no W tasks.

    `dispatch_bytes` and `combine_bytes`: bytes per element of the rows sent in dispatch (also in the all-gather of
    expert shards) and in combine, scales included; None: `itemsize`.

    `dense`: the block's dense part; None: that of the papers, attention with four M×M projections and M channels.

    Raises `ConfigError` for a number that is not positive, or an unknown expert network or matrix.
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
    trained: tuple[str, ...] = _EXPERT_MATRICES
    dense: DenseWork | None = None
    dispatch_bytes: float | None = None
    combine_bytes: float | None = None

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if what not in ("expert", "trained", "dense") and value is not None and not value > 0:
                raise ConfigError(f"workload: {what} must be positive, not {value!r}")
        if self.expert not in GEMMS:
            raise ConfigError(f"workload: expert {self.expert!r} is not one of {', '.join(GEMMS)}")
        if self.trained not in ((), ("w1",), ("w2",), _EXPERT_MATRICES):
            raise ConfigError(f"workload: trained must be a subset of ('w1', 'w2') in this order, not {self.trained!r}")

    @classmethod
    def of_rows(
        cls, rows: int, model_dim: int, hidden: int, experts: int, gated: bool, itemsize: int, ep: int, esp: int
    ) -> Workload:
        """Return the workload of feed-forward experts for `rows` (token, k) pairs per rank."""
        # The esp ranks of a node send their rows to all shards.
        expert = "swiglu" if gated else "ffn"
        return cls(1, rows * esp, model_dim, hidden, experts, k=1, expert=expert, ep=ep, esp=esp, itemsize=itemsize)

    @property
    def tokens(self) -> int:
        """B·L: tokens of all ranks of an ESP group."""
        return self.batch * self.seq_len

    @property
    def rows(self) -> float:
        """Rows that a rank's experts compute per pass, from all ranks of its ESP group (FSMoE's k·f·B·L)."""
        return self.k * (1.0 if self.capacity_factor is None else self.capacity_factor) * self.tokens

    @property
    def trained_share(self) -> float:
        """Fraction of the weight-gradient products that are computed."""
        products = GEMMS[self.expert]
        return sum({"w1": products - 1, "w2": 1}[name] for name in self.trained) / products

    @property
    def shapes(self) -> str:
        """Description of the layer, independent of its number of tokens. Key of `CostModel.observed`."""
        esp = f" in {self.esp} shards" if self.esp > 1 else ""
        of = f"{self.experts} experts {self.expert} {self.model_dim}×{self.hidden}{esp} over {self.ep}"
        frozen = "" if self.trained == _EXPERT_MATRICES else f", trained: {' '.join(self.trained) or 'none'}"
        sent = self.dispatch_bytes or self.itemsize, self.combine_bytes or self.itemsize
        encoded = "" if sent == (self.itemsize, self.itemsize) else f", sent in {sent[0]:g} and {sent[1]:g} bytes"
        return f"{of}, {self.itemsize} bytes{encoded}{frozen}"

    def sending(self, share: float) -> Workload:
        """Return this workload with `share` rounded to 32nds, to limit the number of plans."""
        return replace(self, share=max(1, round(32 * share)) / 32)

    def encoded(self, dispatch_bytes: float | None, combine_bytes: float | None) -> Workload:
        """Return this workload with rows of these bytes per element."""
        return replace(self, dispatch_bytes=dispatch_bytes, combine_bytes=combine_bytes)

    def volumes(self) -> dict[str, float]:
        """Return the bytes of each part of the layer in one pass, and the forward FLOP of "expert".

        Omits parts without communication peers.
        """

        def gathered(element_bytes: float | None) -> float:
            return self.share * self.rows * self.model_dim * (element_bytes or self.itemsize)

        flop = 2 * GEMMS[self.expert] * self.rows * self.model_dim * self.hidden / self.esp
        volumes: dict[str, float] = {TaskKind.EXPERT: flop}
        if self.ep > 1:
            volumes[TaskKind.DISPATCH] = gathered(self.dispatch_bytes) / self.esp
            volumes[TaskKind.COMBINE] = gathered(self.combine_bytes) / self.esp
        if self.esp > 1:
            volumes[TaskKind.ALL_GATHER] = gathered(self.dispatch_bytes)
            volumes[TaskKind.REDUCE_SCATTER] = gathered(None)
        return {kind: volumes[kind] for kind in PIPELINE if kind in volumes}

    def operation_sizes(self) -> dict[str, list[float]]:
        """Return the n of an unchunked layer's operations by line: FLOP of each product, bytes of each collective."""
        volumes = self.volumes()
        sizes: dict[str, list[float]] = {}
        for kind, volume in volumes.items():
            if kind != TaskKind.EXPERT and volume not in (same := sizes.setdefault(_LINE_BY_KIND[kind], [])):
                same.append(volume)
        products = [self.dense_flop(self.dense)[0] / _PROJECTIONS, volumes[TaskKind.EXPERT] / GEMMS[self.expert]]
        return sizes | {"gemm": products, "all-reduce/dp": [self.gradient_bytes()]}

    def with_shared_expert(self, elements: int) -> Workload:
        """Return this workload with a shared expert of so many matrix elements in its dense part."""
        dense = self.dense or DenseWork(_PROJECTIONS * self.model_dim**2, 0, self.model_dim)
        return replace(self, dense=dense._replace(feed_forward=dense.feed_forward + elements))

    def saved_elements(self) -> float:
        """Return the elements that the experts' forward saves: tokens (if W1 has a gradient) and pre-activations."""
        tokens = self.share * self.model_dim if "w1" in self.trained else 0.0
        return self.rows * (tokens + (GEMMS[self.expert] - 1) * self.hidden / self.esp)

    def saved_for_weights(self) -> float:
        """Return the elements that the experts' backward saves for W tasks: activations, and gradients of
        pre-activations.
        """
        return self.trained_share * self.rows * GEMMS[self.expert] * self.hidden / self.esp

    def dense_flop(self, dense: DenseWork | None) -> tuple[float, float]:
        """Return the forward FLOP of a block's products with dense weights, and of attention's other two products."""
        dense = dense or DenseWork(_PROJECTIONS * self.model_dim**2, 0, self.model_dim)
        rank_tokens = self.tokens / self.esp
        weights = 2 * (dense.attention + dense.feed_forward) * rank_tokens
        return weights, 4 * rank_tokens * self.seq_len * dense.score_dim

    def gradient_bytes(self) -> int:
        """Return the gradient bytes reduced over DP: attention's projections (split over MP) and gate."""
        return self.itemsize * (4 * self.model_dim**2 // self.esp + self.model_dim * self.experts)

    def layer_costs(self, model: CostModel, before: Sequence[DenseWork] = ()) -> LayerCosts:
        """Return the layer's costs on a machine, with those of the blocks without experts `before` it.

        The dense part is attention's matrix products, and the model-parallel reduce-scatter and all-gather of B·L rows
        around the experts. With these, the coefficients of the paper's Fig. 5 reproduce its Table 2. Each
        micro-batch pays the start-up times of all parts.
        """

        def stage(name: str, volume: float, starts: int = 1) -> StageTime:
            # Each product has its own start-up; all FLOP have the same rate.
            line = model.line(name)
            return StageTime(starts * line.alpha_s, line.beta_s * volume)

        blocks = [self.dense_flop(dense) for dense in (*before, self.dense)]
        attention = stage("gemm", sum(map(sum, blocks)), _ATTENTION_GEMMS * len(blocks))
        mp_transfers = StageTime(0.0, 0.0)
        if self.esp > 1:
            rows_bytes = self.tokens * self.model_dim * self.itemsize
            mp_transfers = stage("all-gather/esp", rows_bytes) + stage("reduce-scatter/esp", rows_bytes)
        chunks: dict[str, dict[str, StageTime]] = {}
        dense: dict[str, dict[str, StageTime]] = {}
        expert = stage("gemm", self.volumes()[TaskKind.EXPERT], GEMMS[self.expert])
        for phase, times in zip(PHASES, (1, 2), strict=True):
            # Backward of attention and of fully trained experts takes twice the forward time.
            chunks[phase] = {kind: stage(_LINE_BY_KIND[kind], volume) for kind, volume in self.volumes().items()}
            chunks[phase][TaskKind.EXPERT] = expert * (1.0 if phase == "forward" else 1.0 + self.trained_share)
            dense[phase] = {TaskKind.ATTENTION: attention * times + mp_transfers}
        # Half of the backward products of a weight are its gradient.
        projections = stage("gemm", sum(flop for flop, _ in blocks), _PROJECTIONS * len(blocks))
        weights: dict[str, StageTime] = {TaskKind.ATTENTION: projections}
        if self.trained:
            weights[TaskKind.EXPERT] = expert * self.trained_share
        dense_s = {phase: {kind: part.seconds(1) for kind, part in parts.items()} for phase, parts in dense.items()}
        copy = model.lines.get("copy", Line(0.0, 0.0))
        apart_s = copy.seconds(self.saved_for_weights() * self.itemsize) if model.tiled else 0.0
        micro = MicroBatches(dense, weights, w_task_overhead_s=apart_s)
        rechunk_s = copy.seconds(self.saved_elements() * self.itemsize)
        return LayerCosts(chunks, dense_s, self.gradient_bytes(), micro, rechunk_s)

    def step_costs(
        self,
        model: CostModel,
        gradient_bytes: Sequence[int],
        parts: Collection[str],
        *,
        whole: bool = False,
        waits: bool = False,
        before: Sequence[Sequence[DenseWork]] = (),
    ) -> StepCosts:
        """Return the costs of a training step of such layers; measured times have precedence.

        Args:
            gradient_bytes: all-reduced gradient bytes of each layer's dense part.
            parts: parts of the layers' pipelines (`LayerCosts.with_parts`).
            whole: micro-batches can pass through whole layers; otherwise only pipelines are chunked.
            waits: all micro-batches are routed before the first is sent (`MicroBatches.waits`).
            before: blocks without experts before each layer; empty: none.
        """

        def costs(size: int, dense: Sequence[DenseWork]) -> LayerCosts:
            layer = self.layer_costs(model, dense).with_parts(parts)
            assert layer.micro is not None
            micro = replace(layer.micro, waits=waits) if whole else None
            return replace(layer, gradient_bytes=size, micro=micro)

        keys = [(size, tuple(before[at]) if before else ()) for at, size in enumerate(gradient_bytes)]
        of_key = {key: costs(*key) for key in set(keys)}  # equal layers share one object
        all_reduce = model.line("all-reduce/dp") if any(gradient_bytes) else Line(0.0, 0.0)
        layers = tuple(of_key[key] for key in keys)
        found = StepCosts(layers, all_reduce, model.contention, task_s=model.task_s, workload=self)
        seen = model.observed.get(self.shapes)
        if not whole:
            seen = model.observed.get(self.shapes + PER_LAYER_SUFFIX, seen)
        return found if seen is None else refit(found, seen, 1.0 if seen.rows is None else seen.rows / self.rows)


def uniform_share(experts: int, k: int, ranks: int) -> float:
    """Return the rows sent per (token, k) pair if a token's k experts are uniformly distributed.

    A token is sent to a given one of W ranks with probability p = 1 − C(E − E/W, k)/C(E, k), so W·p/k rows per pair.
    """
    ranks = min(ranks, experts)
    if ranks <= 1 or k <= 1:
        return 1.0 / max(1, k) if ranks <= 1 else 1.0
    elsewhere = math.comb(experts - experts // ranks, k) / math.comb(experts, k)
    return ranks * (1 - elsewhere) / k


def one_sided_s(kind: str, workload: Workload, model: CostModel) -> dict[str, float] | None:
    """Return the seconds of both passes of a layer by a fused operation in one chunk; None without costs for it.

    Times with more chunks can only be measured (`CostModel.observed`). Bytes take the time β·n of the corresponding
    collective; a signal per part replaces the start-up α. The product that consumes received rows computes a tile once
    its rows have arrived, and the product that produces results sends each finished tile. These two overlap with the
    link (`tile_pipeline_s`); the rest does not:

        forward     signal + [there | up] + signal + [down | back]
        backward    signal + [there | down] + signal + [up | back] + weight gradients
    """
    first, _, last = FUSED[kind]
    link = LINKS[first]
    if model.fused is None or link not in model.fused.signal_s:
        return None
    layer = workload.step_costs(model, [0], workload.volumes()).layers[0]
    # Each shard receives all rows of its experts and returns results, also between nodes.
    shards = workload.esp if link == "inter" else 1
    tile = min(1.0, model.fused.tile_rows / workload.rows)
    seconds = {}
    for phase in PHASES:
        parts = layer.chunks[phase]
        there, back = (shards * parts[part].work_s for part in (first, last))
        # Without the weight gradients.
        whole_s = parts[TaskKind.EXPERT].work_s / (1 if phase == "forward" else 1 + workload.trained_share)
        down_s = whole_s / GEMMS[workload.expert]
        up_s = whole_s - down_s
        steps = ((there, up_s), (down_s, back)) if phase == "forward" else ((there, down_s), (up_s, back))
        apart_s = parts[TaskKind.EXPERT].seconds(1) - whole_s  # start-up times and weight gradients
        seconds[phase] = apart_s + 2 * model.fused.signal_s[link] + sum(tile_pipeline_s(step, tile) for step in steps)
    return seconds


def costs_of_tokens(costs: CostModel, workload: Workload) -> CostModel:
    """Return costs measured on a layer with the tokens of `workload`, not scaled by predicted rows."""
    seen = next(iter(costs.observed.values()), None)
    return replace(costs, observed={} if seen is None else {workload.shapes: replace(seen, rows=None)})


def tile_pipeline_s(stages_s: Sequence[float], tile: float) -> float:
    """Return the seconds of a pipeline over tiles: those of the longest stage, plus one tile of each other stage.

    `stages_s`: seconds of all rows per stage. `tile`: fraction of all rows in a tile.
    """
    longest = max(stages_s)
    return longest + tile * (sum(stages_s) - longest)
