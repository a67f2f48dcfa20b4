"""Models of published training systems: seconds of their steps, all-to-alls and balanced layers.

Costs are those of the library's machines. Functions take the conditions that a source does not state as arguments.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.placement.made_loads import make_loads
from fusedmoe.placement.balance import Balance, quick_balance
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.row_sharing import nearest_rows
from fusedmoe.placement.traffic import PlacementCosts, exposed_s, layer_s
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.machines import MACHINES, Machine, SourcedValue
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step import ChunkedPass, extract_phase, step_plan
from fusedmoe.schedule.step_costs import LayerCosts, StageTime, StepCosts
from fusedmoe.schedule.task import PHASES, TaskKind
from fusedmoe.schedule.workload import Workload, uniform_share

_ITEMSIZE = 2  # bytes of bfloat16


class Model(NamedTuple):
    """A transformer of equal MoE layers with SwiGLU experts and causal attention."""

    layers: int
    model_dim: int
    hidden: int
    experts: int
    k: int
    attention: int  # weights of attention in one layer
    heads: int
    head_dims: int  # of a key and a value, added
    shared_hidden: int = 0  # of all shared experts
    vocab: int = 0

    def attention_flop(self, tokens: float, seq_len: float) -> float:
        """Return the forward FLOP of one layer's attention. Half of the scores are masked."""
        return 2 * tokens * self.attention + tokens * seq_len * self.heads * self.head_dims

    def mlp_flop(self, tokens: float, hidden: float) -> float:
        """Return the forward FLOP of a SwiGLU network."""
        return 6 * tokens * self.model_dim * hidden

    def share(self, ranks: int) -> float:
        """Return the rows sent per (token, k) pair if a token is sent once to each of `ranks`."""
        return uniform_share(self.experts, self.k, ranks)

    def workload(self, tokens: int, ep: int, share: float = 1.0, imbalance: float = 1.0) -> Workload:
        """Return a layer's workload on the busiest rank. `imbalance`: rows of this rank over the mean."""
        shapes = (self.model_dim, self.hidden, self.experts, self.k)
        return Workload(1, tokens, *shapes, imbalance, "swiglu", ep, itemsize=_ITEMSIZE, share=share)


def _latent(model_dim: int, heads: int, query_rank: int) -> int:
    """Return the weights of DeepSeek's latent attention; `query_rank` 0: queries are not compressed."""
    queries = query_rank * (model_dim + 192 * heads) if query_rank else model_dim * 192 * heads
    return queries + model_dim * (512 + 64) + 512 * 256 * heads + 128 * heads * model_dim


def _grouped(model_dim: int, heads: int, kv_heads: int) -> int:
    """Return the weights of attention whose heads of 128 share keys and values."""
    return 2 * 128 * model_dim * (heads + kv_heads)


#: From the models' published configurations.
MODELS = {
    "DeepSeek-V3 16B": Model(26, 2048, 1408, 64, 6, _latent(2048, 16, 0), 16, 320, 2 * 1408, 102400),
    "Qwen3-30B-A3B": Model(48, 2048, 768, 128, 8, _grouped(2048, 32, 4), 32, 256, vocab=151936),
    "GLM-4.5-Air": Model(45, 4096, 1408, 128, 8, _grouped(4096, 96, 8), 96, 256, 1408),
    "Qwen3-235B-A22B": Model(94, 4096, 1536, 128, 8, _grouped(4096, 64, 4), 64, 256),
    "DeepSeek-V3": Model(58, 7168, 2048, 256, 8, _latent(7168, 128, 1536), 128, 320, 2048),
}


_H100 = MACHINES["dgx-h100"]


def h100(**rates: float) -> Machine:
    """Return an H100 machine with other rates.

    Args:
        flops: FLOP/s of products.   overlapped: fraction of its speed that computation keeps alongside communication.
        network, nvlink: fraction of its bandwidth that a link reaches.
    """
    known = {name: SourcedValue(rate, "as given") for name, rate in rates.items()}
    return replace(
        _H100,
        flops=known.get("flops", _H100.flops),
        computes_beside=known.get("overlapped", _H100.computes_beside),
        inter=replace(_H100.inter, reached=known.get("network", _H100.inter.reached)),
        intra=replace(_H100.intra, reached=known.get("nvlink", _H100.intra.reached)),
    )


def layer_costs(
    model: Model, costs: CostModel, work: Workload, seq_len: float, *, copies: int = 1, whole: float = 0.0
) -> LayerCosts:
    """Return the costs of a layer.

    Args:
        work: pipeline of the layer on the rank with the most rows.
        copies: copies of all pairs' rows in each direction: into the experts' order, and from each token into pairs.
        whole: 1 if chunks contain the shared expert and all copies, 0 if they contain the pipeline alone.
    """
    layer, tokens = work.layer_costs(costs), work.tokens
    gemm, copy = costs.line("gemm"), costs.line("copy")
    ordered = StageTime(2 * copy.alpha_s, 2 * copy.beta_s * work.rows * model.model_dim * _ITEMSIZE)
    chunks, dense_s = {}, {}
    for phase, times in zip(PHASES, (1, 2), strict=True):
        shared_s = gemm.beta_s * times * model.mlp_flop(tokens, model.shared_hidden)
        block = StageTime(0.0, shared_s) + ordered * (copies - 1)
        expert = layer.chunks[phase][TaskKind.EXPERT] + ordered + block * whole
        chunks[phase] = {**layer.chunks[phase], TaskKind.EXPERT: expert}
        dense_s[phase] = {
            TaskKind.ATTENTION: gemm.seconds(times * model.attention_flop(tokens, seq_len)),
            TaskKind.OTHER: (block * (1 - whole)).seconds(1),
        }
    return LayerCosts(chunks, dense_s)


def step_s(
    model: Model, costs: CostModel, layer: LayerCosts, tokens: int, degree: int, *, rest_flop: float, recomputes: bool
) -> float:
    """Return the seconds of a micro-batch in `degree` chunks, without gradient reduction and optimizer.

    Args:
        rest_flop: forward FLOP of layers without experts.
        recomputes: the forward pass of all layers runs again during the backward pass.
    """
    rest_flop += 2 * tokens * model.model_dim * model.vocab
    rest_s = 3 * costs.line("gemm").seconds(rest_flop)
    step = StepCosts((layer,) * model.layers, contention=costs.contention, loss_s=rest_s)
    passes = [ChunkedPass(three_queues, degree)] * model.layers
    plan = step_plan(step, passes, passes)
    again_s = makespan(extract_phase(plan, "forward"), step) if recomputes else 0.0
    return makespan(plan, step) + again_s


def titan_s(degree: int, *, samples: float, whole: float, **rates: float) -> float:
    """Return torchtitan's seconds per token on a GPU. `samples`: sequences of 4,096 tokens per GPU."""
    model, tokens = MODELS["DeepSeek-V3 16B"], int(4096 * samples)
    costs = h100(**rates).costs(32, ep=32)
    layer = layer_costs(model, costs, model.workload(tokens, 32), 4096, copies=2, whole=whole)
    first_flop = model.attention_flop(tokens, 4096) + model.mlp_flop(tokens, 10944)  # has no experts
    return step_s(model, costs, layer, tokens, degree, rest_flop=first_flop, recomputes=False) / tokens


def megatron_s(degree: int, *, seq_len: float, imbalance: float, **rates: float) -> float:
    """Return the seconds of Megatron-core's step: 16 micro-batches of 16,384 tokens per GPU, full recomputation."""
    model, tokens = MODELS["Qwen3-30B-A3B"], 16384
    costs = h100(**rates).costs(16, ep=8)
    layer = layer_costs(model, costs, model.workload(tokens, 8, model.share(8), imbalance), seq_len)
    return 16 * step_s(model, costs, layer, tokens, degree, rest_flop=0.0, recomputes=True)


@lru_cache(maxsize=64)
def deduplication(experts: float, k: float, skew: float) -> float:
    """Return the pairs per token sent to the busiest of 16 ranks.

    `skew`: pairs that this rank receives, over the mean. 1: uniform choices. Otherwise the popularity of experts
    follows Zipf's law, in a random order; its exponent is found by bisection on 8,192 sampled tokens.
    """
    experts, k, ranks, tokens = int(experts), int(k), 16, 8192
    if skew == 1:
        return 1 / uniform_share(experts, k, ranks)
    rng = np.random.default_rng(0)
    rank_E, noise_SE = rng.permutation(experts) + 1, rng.gumbel(size=(tokens, experts))
    low, high, ratio = 0.0, 4.0, 1.0
    for _ in range(16):
        exponent = (low + high) / 2
        host_SK = np.argsort(exponent * np.log(rank_E) - noise_SE, axis=1)[:, :k] // (experts // ranks)
        pairs_W = np.bincount(host_SK.ravel(), minlength=ranks)
        busiest = int(pairs_W.argmax())
        ratio = float(pairs_W[busiest] / (host_SK == busiest).any(axis=1).sum())
        low, high = (exponent, high) if pairs_W[busiest] / pairs_W.mean() < skew else (low, exponent)
    return ratio


def forwarding(*, experts: float, k: float, pipelined: float, **rates: float) -> float:
    """Return how many times faster an all-to-all of 16 ranks on two nodes is with forwarding than with pairs.

    A token is sent once to each node, and from there to the ranks inside it. `pipelined`: fraction of the shorter of
    these two transfers that overlaps with the other.
    """
    machine, pairs_bytes = h100(**rates), 8192 * k * 2048 * _ITEMSIZE

    def exchange_s(share: float, ranks: int, ep: int) -> float:
        line = machine.costs(ranks, ep=ep, esp=ranks // ep).line("all-to-all/ep")
        return line.seconds(share * pairs_bytes)

    across_s = exchange_s(uniform_share(int(experts), int(k), 2), 16, 2)
    inside_s = exchange_s(uniform_share(int(experts), int(k), 16), 8, 8)
    return exchange_s(1.0, 16, 16) / (across_s + inside_s - pipelined * min(across_s, inside_s))


def sonic_ms(share: float, **rates: float) -> float:
    """Return the milliseconds of a dispatch of 16,384 tokens of 4,096 elements per rank, top-8, on four GPUs.

    `share`: rows sent per (token, k) pair.
    """
    return 1e3 * h100(**rates).costs(4, ep=4).line("all-to-all/ep").seconds(share * 16384 * 8 * 4096 * _ITEMSIZE)


_RACK = NodeLayout(64, 64)
_LAYERS = 4


@lru_cache(maxsize=64)
def uneven_loads(experts: int, pairs: int, imbalance: float) -> NDArray[np.int64]:
    """Return loads [L, W, E] of 64 ranks, where the busiest rank has `imbalance` times the mean, averaged over layers.

    Popularity follows Zipf's law, equal on all ranks; its exponent is found by bisection.
    """
    low, high = 0.0, 4.0
    for _ in range(30):
        skew = (low + high) / 2
        loads = make_loads(
            1,
            _LAYERS,
            _RACK.num_ranks,
            experts,
            tokens=pairs,
            skew=skew,
            spread=0.0,
            drift=0.0,
            jitter=0.0,
            difference=0.0,
        ).tokens_ILWE[0]
        work_LW = loads.sum(axis=1).reshape(_LAYERS, _RACK.num_ranks, -1).sum(axis=2)
        low, high = (skew, high) if (work_LW.max(axis=1) / work_LW.mean(axis=1)).mean() < imbalance else (low, skew)
    return loads


class Balanced(NamedTuple):
    """Seconds of a layer with balanced routing, unbalanced, and balanced by replicas; and the remaining imbalance."""

    forced_s: float
    uneven_s: float
    balanced_s: float
    imbalance: float


@lru_cache(maxsize=64)
def balanced(model: str, tokens: int, imbalance: float, slots: int) -> Balanced:
    """Return a layer's training pass on 64 GPUs of a rack, averaged over `_LAYERS` layers.

    The library's `quick_balance` adds up to `slots` replicas per rank. Their parameters are sent before the experts
    run; the transfer of their gradients is hidden by the dense part's backward pass.
    """
    shape, machine = MODELS[model], MACHINES["gb200-nvl72"]
    flop_s = machine.costs(_RACK.num_ranks, ep=_RACK.num_ranks).line("gemm").beta_s
    parameters = 3 * shape.model_dim * shape.hidden
    forward_s = flop_s * (shape.attention_flop(tokens, 4096) + shape.mlp_flop(tokens, shape.shared_hidden))
    row_bytes = round(_ITEMSIZE * shape.model_dim * shape.share(_RACK.num_ranks))
    speed = machine.intra.speed
    costs = PlacementCosts(6 * parameters * flop_s, row_bytes, _ITEMSIZE * parameters, 0, speed, speed)
    owners = Placement.even(_RACK.num_ranks, shape.experts)
    layers = []
    for tokens_WE in uneven_loads(shape.experts, tokens * shape.k, imbalance):
        uneven = Balance(owners, tokens_WE, nearest_rows(owners, tokens_WE, _RACK), _RACK)
        even = quick_balance(owners, tokens_WE, _RACK, slots)
        layers.append(
            (
                3 * forward_s + layer_s(uneven.mean_load(), costs),
                3 * forward_s + layer_s(uneven.load, costs),
                3 * forward_s
                + layer_s(even.load, costs)
                + exposed_s(owners, even.placement, _RACK, costs, hidden_s=2 * forward_s),
                even.max_rank_rows * _RACK.num_ranks / int(tokens_WE.sum()),
            )
        )
    return Balanced(*map(float, np.mean(layers, axis=0)))
