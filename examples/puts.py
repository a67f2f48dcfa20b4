"""Run a layer with one-sided communication, and compare the results with collectives.

    TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 examples/puts.py

On GPUs with peer access, omit TRITON_INTERPRET. Without a GPU, Triton's interpreter runs the kernels over shared
memory, slowly but with the same results.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import fusedmoe

EXPERTS, K, WIDTH, HIDDEN = 4, 2, 32, 64


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size())

    def run(schedule: str | fusedmoe.Schedule) -> list[torch.Tensor]:
        torch.manual_seed(0)  # the same layer in both runs, and the same gate on every rank
        layer = fusedmoe.MoELayer(
            WIDTH,
            fusedmoe.gates.TopK(EXPERTS, k=K),
            fusedmoe.experts.SwiGLU(HIDDEN),
            topology=topology,
            schedule=schedule,
            device=device,
        )
        torch.manual_seed(topology.rank)
        x_SM = torch.randn(16, WIDTH, device=device, requires_grad=True)
        y_SM = layer(x_SM)
        y_SM.square().mean().backward()
        gradients = [x_SM.grad, *(parameter.grad for parameter in layer.parameters())]
        return [y_SM.detach(), *(gradient for gradient in gradients if gradient is not None)]

    # Two chunks in each pass. Without `degrees`, the first forward pass measures the machine.
    one_sided, collective = run(fusedmoe.Schedule("fused", degrees=(2, 2))), run("off")
    worst = max(float((a - b).abs().max()) for a, b in zip(one_sided, collective, strict=True))
    print(f"rank {topology.rank}: largest difference {worst:.1e}")
    topology.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
