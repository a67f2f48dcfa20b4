"""A layer over two processes that share one device: collectives, chunks, and one-sided puts through symmetric memory.

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 torchrun --standalone --nproc-per-node 2 -m bench.gpu.two_procs cuda:0

With `cpu` it runs without a GPU; puts then need TRITON_INTERPRET=1. Each variant is compared with a single rank that
has all experts. NCCL refuses two ranks per GPU, so collectives use Gloo. The processes time-share the GPU, so only
correctness is tested. On a fault, exits with 1 and prints it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import fusedmoe
from fusedmoe.layers.schedule import Schedule

WAYS = {"off": "off", "2 chunks": Schedule("fsmoe", degrees=(2, 2)), "puts": Schedule("fused", degrees=(2, 2))}
_TURNS = 3  # buffers have two slots: the third exchange reuses the first


def main(device: torch.device) -> list[str]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    large = device.type == "cuda"
    S, M, H, E, K = (2048, 1024, 512, 16, 4) if large else (48, 32, 32, 4, 2)
    dtype, tolerance = (torch.bfloat16, 2e-2) if large else (torch.float32, 1e-4)
    rank, topology = dist.get_rank(), fusedmoe.Topology.from_sizes(ep=2, timeout_s=20)

    def make(**more: object) -> fusedmoe.MoELayer:
        torch.manual_seed(0)
        gate, experts = fusedmoe.gates.TopK(experts=E, k=K), fusedmoe.experts.SwiGLU(H)
        return fusedmoe.MoELayer(M, gate, experts, device=device, dtype=dtype, **more)  # type: ignore[arg-type]

    alone, own, wrong = make(), slice(rank * E // 2, (rank + 1) * E // 2), []
    for name, schedule in WAYS.items():
        if name == "puts" and not large and os.environ.get("TRITON_INTERPRET") != "1":
            continue
        layer, errors = make(topology=topology, schedule=schedule), []
        with torch.no_grad():
            for whole, here in zip(alone.parameters(), layer.parameters(), strict=True):
                here.copy_(whole if here.shape == whole.shape else whole[own])
        with _counting() as puts:
            for turn in range(_TURNS):
                torch.manual_seed(10 * turn + rank)
                x_SM = torch.randn(S, M, device=device, dtype=dtype)
                pairs = zip(_step(layer, x_SM), _step(alone, x_SM), strict=True)
                errors += [_error(found, right) for found, right in pairs]
        topology.check()
        told = f"rank {rank} {name}: off by {max(errors):.1e}, {len(puts)} passes by puts"
        print(told, flush=True)
        if not max(errors) < tolerance or bool(puts) != (name == "puts"):
            wrong.append(told)
    topology.close()
    return wrong


@contextmanager
def _counting() -> Iterator[list[object]]:
    """Count forward passes that use one-sided puts."""
    from fusedmoe.engine.one_sided_experts import FusedForward

    passes: list[object] = []
    send = FusedForward.send

    def counted(run: FusedForward) -> None:
        passes.append(run)
        send(run)

    with patch.object(FusedForward, "send", counted):
        yield passes


def _step(layer: fusedmoe.MoELayer, x_SM: Tensor) -> tuple[Tensor, Tensor]:
    x_SM = x_SM.detach().requires_grad_()
    y_SM = layer(x_SM)
    (dx_SM,) = torch.autograd.grad(y_SM.float().square().mean(), x_SM)
    return y_SM.detach(), dx_SM


def _error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    faults = main(torch.device(sys.argv[1]))
    print(f"rank {dist.get_rank()}: {'passed' if not faults else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    sys.exit(bool(faults))
