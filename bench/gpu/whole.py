"""A whole layer on the GPU: without host synchronisation, in a CUDA graph, and under torch.compile.

`python -m bench.gpu.whole waits|graph|compiled` ends with the line "whole: passed" or an error. On a CPU, for a
rehearsal, graphs and synchronisation checks are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import fusedmoe

PASSED = "whole: passed"
# Fused operations round bfloat16 at different points.
_TOLERANCE = 2e-2
_SIZES = {"cuda": (4096, 2048, 768, 32, 4), "cpu": (64, 32, 24, 8, 2)}

Layer = fusedmoe.MoELayer


def make(device: torch.device) -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    S, M, H, E, K = _SIZES[device.type]
    gate = fusedmoe.gates.TopK(experts=E, k=K, capacity_factor=1.25, aux={"balance": 0.01, "z": 0.001})
    layer = fusedmoe.MoELayer(M, gate, fusedmoe.experts.SwiGLU(H), device=device, dtype=torch.bfloat16)
    return layer, torch.randn(S, M, device=device, dtype=torch.bfloat16).requires_grad_()


def step(call: Callable[[Tensor], Tensor], layer: Layer, x_SM: Tensor) -> list[Tensor]:
    y_SM = call(x_SM)
    leaves = [x_SM, *layer.parameters()]
    return [y_SM.detach(), *torch.autograd.grad(y_SM.float().square().mean() + layer.aux_loss, leaves)]


def waits(device: torch.device) -> None:
    """Run a step in which host synchronisation raises."""
    layer, x_SM = make(device)
    step(layer, layer, x_SM)
    with _no_waiting(device):
        step(layer, layer, x_SM)


def graph(device: torch.device) -> None:
    """Capture the step; a replay on other tokens must be bitwise equal to the eager step."""
    if device.type != "cuda":
        print("graph: needs a GPU")
        return
    layer, x_SM = make(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, layer, x_SM)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step(layer, layer, x_SM)
    for _ in range(3):
        with torch.no_grad():
            x_SM.copy_(torch.randn_like(x_SM))
        captured.replay()
        _compare(found, step(layer, layer, x_SM), 0.0)


def compiled(device: torch.device) -> None:
    """Compile the step as one graph with PyTorch's default compiler; without a GPU, with one that needs no C++."""
    layer, x_SM = make(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    call = torch.compile(layer, fullgraph=True, backend=backend)
    _compare(step(call, layer, x_SM), step(layer, layer, x_SM), _TOLERANCE)


PIECES = {"waits": waits, "graph": graph, "compiled": compiled}


def main(names: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in names or PIECES:
        PIECES[name](device)
        print(f"whole: {name}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(PASSED)


def _compare(found: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for place, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-20))
        if not error <= tolerance:
            raise AssertionError(f"tensor {place}, {list(ours.shape)}: off by {error:.1e}, {tolerance:g} may be")


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main(sys.argv[1:])
