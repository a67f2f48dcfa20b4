"""Forward and backward of one layer compared with dense products of equal FLOP: the overhead of routing.

For each expert, the reference multiplies as many rows as were routed to it (without padding) in the dense products of a
SwiGLU expert: up, down; dA, dW2, dX, dW1. Layer and reference are interleaved, so that drift of the machine's speed
cancels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import fusedmoe
from fusedmoe.kernels.gather_sum import gather_sum
from fusedmoe.kernels.layout import build_layout
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime.recorder import Recorder


@dataclass(frozen=True)
class Shape:
    """S tokens, model dim M, expert hidden dim H, E experts, top K."""

    S: int = 8192
    M: int = 512
    H: int = 2048
    E: int = 8
    K: int = 2


@dataclass(frozen=True)
class Cost:
    """Medians over rounds.

    `ratio`: layer / reference. `bare_ratio`: layer / reference with preallocated outputs, which avoids page faults.
    `routing`: fraction of the layer's time in gate, order and combine, including gathers and weighted sums that run
    inside the experts' operation and are timed separately.
    """

    threads: int
    layer_s: float
    reference_s: float
    ratio: float
    bare_ratio: float
    routing: float


def make_layer(shape: Shape, schedule: str | Schedule = "off") -> fusedmoe.MoELayer:
    gate = fusedmoe.gates.TopK(experts=shape.E, k=shape.K)
    return fusedmoe.MoELayer(shape.M, gate, fusedmoe.experts.SwiGLU(shape.H), schedule=schedule)


def layer_step(layer: fusedmoe.MoELayer, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> None:
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    torch.autograd.backward([layer(x_SM), layer.aux_loss], [dy_SM, torch.ones(())])


def reference_step(shape: Shape, counts: list[int], bare: bool = False) -> Callable[[], None]:
    """Return a function that runs the dense products of all experts, forward and backward, with `torch.matmul`.

    `bare`: into preallocated memory.
    """
    w1, w2 = torch.randn(2 * shape.H, shape.M), torch.randn(shape.M, shape.H)
    most = max(counts)
    x, a, dy, dh = (torch.randn(most, n) for n in (shape.M, shape.H, shape.M, 2 * shape.H))
    made: dict[tuple[int, ...], torch.Tensor] = {}

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        if bare:
            size = (left.shape[0], right.shape[1])
            if size not in made:
                made[size] = torch.empty(size)
            torch.matmul(left, right, out=made[size])
        else:
            torch.matmul(left, right)

    def step() -> None:
        for rows in counts:
            product(x[:rows], w1.t())
            product(a[:rows], w2.t())
        for rows in counts:
            product(dy[:rows], w2)
            product(dy[:rows].t(), a[:rows])
            product(dh[:rows], w1)
            product(dh[:rows].t(), x[:rows])

    return step


def measure(shape: Shape, threads: int, rounds: int) -> Cost:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = make_layer(shape)
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    dy_SM = torch.randn(shape.S, shape.M)
    layer_step(layer, x_SM, dy_SM)
    reference = reference_step(shape, layer.load_E.tolist())
    bare = reference_step(shape, layer.load_E.tolist(), bare=True)
    reference()
    bare()
    layers, references, bares, routing = [], [], [], []
    sums = combine_step(shape, layer.load_E.tolist())
    for _ in range(rounds):
        layers.append(seconds(lambda: layer_step(layer, x_SM, dy_SM)))
        references.append(seconds(reference))
        bares.append(seconds(bare))
        outside_s = outside_experts(layer, x_SM, dy_SM)
        routing.append((outside_s + seconds(sums)) / layers[-1])
    layer_s, reference_s = statistics.median(layers), statistics.median(references)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(layers, references, strict=True))
    bare_ratio = statistics.median(ours / theirs for ours, theirs in zip(layers, bares, strict=True))
    return Cost(threads, layer_s, reference_s, ratio, bare_ratio, statistics.median(routing))


def schedule_ratio(shape: Shape, threads: int, rounds: int) -> float:
    """Return the median ratio of a layer with a one-chunk schedule to the same layer without, in one process."""
    torch.set_num_threads(threads)
    layers = [make_layer(shape), make_layer(shape, Schedule("fsmoe", degrees=(1, 1)))]
    layers[1].load_state_dict(layers[0].state_dict())
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    dy_SM = torch.randn(shape.S, shape.M)
    for layer in layers:
        layer_step(layer, x_SM, dy_SM)
    ratios = []
    for number in range(rounds):
        taken = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            taken[which] = seconds(partial(layer_step, layers[which], x_SM, dy_SM))
        ratios.append(taken[1] / taken[0])
    return statistics.median(ratios)


def outside_experts(layer: fusedmoe.MoELayer, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> float:
    """Return the time in seconds of a step outside the experts' operation: gate, order and weights, both passes."""
    layer.recorder = Recorder()
    whole = seconds(lambda: layer_step(layer, x_SM, dy_SM))
    spans = layer.recorder.timeline().spans
    layer.recorder = None
    return whole - sum(span.end_s - span.start_s for span in spans if span.kind == "expert")


def combine_step(shape: Shape, counts: list[int]) -> Callable[[], None]:
    """Return a function for the experts' operation without products and activations: gathers and weighted sums."""
    expert_SK = torch.repeat_interleave(torch.arange(shape.E), torch.tensor(counts)).view(shape.K, shape.S).t()
    layout = build_layout(expert_SK, shape.E)
    rows_NM, x_SM, weight_N = torch.randn(layout.rows, shape.M), torch.randn(shape.S, shape.M), torch.rand(layout.rows)

    def step() -> None:
        gather_sum(rows_NM, layout, weight_N)  # forward: sum over a token's experts
        gather_sum(rows_NM, layout, weight_N)  # backward: equal cost for dx
        for _ in range(3):  # x in forward; x and dy in backward
            torch.index_select(x_SM, 0, layout.source_N, out=rows_NM)
        rows_NM.mul_(weight_N[:, None]).mul_(weight_N[:, None])

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    fusedmoe.keep_memory()
    for threads in (1, 2):
        print(measure(Shape(), threads, rounds=5))
