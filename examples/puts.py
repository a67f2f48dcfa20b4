"""Experts over ranks whose kernels send and receive by themselves; the same numbers as by collectives.

    TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 examples/puts.py

On GPUs that reach each other leave TRITON_INTERPRET out. Without a GPU Triton's interpreter runs the kernels, over
memory that the processes share: slowly, and to the same effect.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe import autograd
from fusedmoe.comm import RowForm, exchange_metadata, make_all_to_all
from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.kernels import Layout, Weights

EXPERTS, K, WIDTH, HIDDEN = 4, 2, 64, 128


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size())
    rank, local = topology.rank, EXPERTS // dist.get_world_size()

    torch.manual_seed(rank)
    x_SM = torch.randn(24, WIDTH, device=device, requires_grad=True)
    scores_SE = torch.rand(24, EXPERTS, device=device)
    weight_SK, expert_SK = scores_SE.topk(K)
    layout = autograd.order(expert_SK, EXPERTS)
    w1 = torch.randn(local, 2, HIDDEN, WIDTH, device=device) / WIDTH**0.5
    w2 = torch.randn(local, WIDTH, HIDDEN, device=device) / HIDDEN**0.5
    weights = Weights(w1.requires_grad_(), w2.requires_grad_())

    # Memory that the kernels of all ranks address, with room for the tokens of any rank; made once.
    with open_heap(topology.ep, device) as heap:
        buffers = ReceiveBuffers(heap, BufferSizes(24, K, EXPERTS, WIDTH, x_SM.dtype))
        y_SM = fused_experts(x_SM, weight_SK, layout, buffers, GroupedExperts(weights, "swiglu"), degree=2)
        y_SM.square().mean().backward()
    by_puts = [y_SM.detach(), x_SM.grad, w1.grad]
    x_SM.grad = w1.grad = w2.grad = None

    # The same by collectives.
    layout = layout.exact()
    form = RowForm.of(x_SM, layout, weight_SK)
    exchange = exchange_metadata(make_all_to_all("direct", topology), topology.esp, layout.counts_E, form)
    rows_NM, weight_N = autograd.permute(x_SM, layout), autograd.take_pairs(weight_SK, layout)

    def compute(rows: torch.Tensor, received: Layout, weight: torch.Tensor | None) -> torch.Tensor:
        return autograd.experts(rows, received, weight, weights, "swiglu")

    y_SM = autograd.unpermute(autograd.through_experts(rows_NM, weight_N, exchange, compute), layout)
    y_SM.square().mean().backward()
    by_collectives = [y_SM.detach(), x_SM.grad, w1.grad]

    pairs = zip(by_puts, by_collectives, strict=True)
    worst = max(float((one - other).abs().max()) for one, other in pairs if one is not None and other is not None)
    print(f"rank {rank}: largest difference {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
