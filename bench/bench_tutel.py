"""`make bench`: fusedmoe.tutel and Tutel on a CPU in one process: equal weights and inputs, interleaved.

Skipped unless Tutel is importable (built for the CPU).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusedmoe.tutel import moe


@dataclass(frozen=True)
class Shape:
    """S tokens, model dim M, expert hidden dim H, E experts, top K, capacity factor."""

    S: int = 8192
    M: int = 512
    H: int = 2048
    E: int = 8
    K: int = 2
    capacity_factor: float = 1.25


@dataclass(frozen=True)
class Comparison:
    """Medians over rounds; `ratio`: time of the peer divided by the time of fusedmoe.tutel."""

    peer: str
    threads: int
    ours_s: float
    theirs_s: float
    ratio: float


def make(module: Any, shape: Shape) -> torch.nn.Module:
    layer: torch.nn.Module = module.moe_layer(
        gate_type={"type": "top", "k": shape.K, "capacity_factor": shape.capacity_factor},
        model_dim=shape.M,
        experts={
            "type": "ffn",
            "count_per_node": shape.E,
            "hidden_size_per_expert": shape.H,
            "activation_fn": lambda x: F.relu(x),
        },
    )
    return layer


def step(layer: Any, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> list[torch.Tensor]:
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    y_SM = layer(x_SM)
    torch.autograd.backward([y_SM, layer.l_aux], [dy_SM, torch.ones_like(layer.l_aux)])
    return [y_SM.detach(), x_SM.grad, *(p.grad for p in layer.parameters())]


def compare(theirs: Any, peer: str, shape: Shape, threads: int, rounds: int) -> Comparison:
    """Time both implementations interleaved, after checking that their results agree.

    Args:
        theirs: a module with Tutel's `moe_layer`.
        peer: its name in the result.
    Raises:
        AssertionError: results differ.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [make(moe, shape), make(theirs, shape)]
    layers[1].load_state_dict(layers[0].state_dict())
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    dy_SM = torch.randn(shape.S, shape.M)
    for ours, other in zip(*(step(layer, x_SM, dy_SM) for layer in layers), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(seconds(lambda layer=layers[which]: step(layer, x_SM, dy_SM)))  # type: ignore[misc]
    ratio = statistics.median(other / ours for ours, other in zip(*times, strict=True))
    return Comparison(peer, threads, statistics.median(times[0]), statistics.median(times[1]), ratio)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize("threads", [1, 2])
def test_beside_tutel(benchmark, threads: int) -> None:  # type: ignore[no-untyped-def]
    try:
        theirs = importlib.import_module("tutel.moe")
    except Exception as error:  # may be installed but built for another machine
        pytest.skip(f"Tutel cannot be imported here, so there is nothing to compare with: {error}")
    shape = Shape()
    peer = getattr(importlib.import_module("tutel"), "__version__", "Tutel of an unknown version")
    found = compare(theirs, peer, shape, threads, rounds=6)
    layer = make(moe, shape)
    x_SM = torch.randn(shape.S, shape.M).requires_grad_()
    benchmark.extra_info.update(shape=asdict(shape), **asdict(found))
    benchmark.pedantic(step, args=(layer, x_SM, torch.randn(shape.S, shape.M)), rounds=3, warmup_rounds=1)
    print(f"\n{threads} threads: tutel / fusedmoe.tutel = {found.ratio:.2f}")
