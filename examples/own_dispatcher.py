"""Define a dispatcher that sends one row per (token, k) pair, from public functions only.

python examples/own_dispatcher.py                                          # one process
torchrun --standalone --nproc-per-node 2 examples/own_dispatcher.py        # experts split over two ranks
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedmoe
from fusedmoe import autograd, comm


class PairDispatcher(fusedmoe.Dispatcher):
    """Send one row per (token, k) pair. All functions used here are differentiable."""

    def __init__(self, topology: fusedmoe.Topology) -> None:
        self.topology, self.all_to_all = topology, comm.make_all_to_all("direct", topology)

    def through_experts(self, routed: fusedmoe.Routed, local_experts: Any) -> Tensor:
        layout = routed.layout.exact()  # padding rows are not sent
        weight_N = autograd.row_weights(routed.weight_SK, layout)
        form = comm.RowForm.of(routed.x_SM, layout, weight_N)
        # All ranks agree on the number of rows. With a refusal (non-finite input), all ranks raise here.
        exchange = comm.exchange_metadata(
            self.all_to_all, self.topology.esp, layout.counts_E, form, routed.refusal, call=str(self)
        )
        # Sends rows and weights to the ranks of their experts, sorts them by local expert, and returns the results.
        rows_NM = autograd.permute(routed.x_SM, layout)
        out_NM = autograd.through_experts(rows_NM, weight_N, exchange, local_experts)
        return autograd.unpermute(out_NM, layout)  # sums each token's k results


def main() -> float:
    """Return the largest difference of outputs and input gradients to those of the library's dispatcher."""
    topology = fusedmoe.Topology()
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        topology = fusedmoe.Topology.from_sizes(ep=dist.get_world_size())
    results = []
    for dispatch in (PairDispatcher(topology), "direct"):
        torch.manual_seed(0)  # the same gate on every rank
        layer = fusedmoe.MoELayer(
            model_dim=32,
            gate=fusedmoe.gates.TopK(experts=4, k=2),
            experts=fusedmoe.experts.SwiGLU(hidden=64),
            topology=topology,
            dispatch=dispatch,
        )
        x_SM = torch.randn(100 + topology.rank, 32, requires_grad=True)
        y_SM = layer(x_SM)
        y_SM.square().mean().backward()
        assert x_SM.grad is not None
        results.append((y_SM.detach(), x_SM.grad))
    difference = max((own - library).abs().max().item() for own, library in zip(*results, strict=True))
    print(f"rank {topology.rank}: largest difference {difference:.1e}")
    topology.close()
    if "RANK" in os.environ:
        dist.destroy_process_group()
    return difference


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
