"""Gradients over ranks: joining the copies, and the norm over all parts.

Each rank's loss is such that the losses of an MP group sum up to the mean loss of one replica, and the true loss is the
mean over the DP replicas. So the gradient of a parameter is 1/DP times the sum over the ranks that hold a copy of it:
all ranks for replicated parameters, the edp group for experts, the dp group for what MP splits.

In a model whose activations between layers are the same on all MP ranks, so is the loss, and the gradient of a
replicated parameter is whole on each of them: it is the mean over all ranks. That is `mp_loss="replicated"`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.buckets import reduce_gradients
from fusedmoe.training.replicas import MpLoss, divisor, local_part, replicas
from fusedmoe.training.stream import GradientStream
from fusedmoe.training.wrap import DataParallel


def sync_gradients(
    model: nn.Module, topology: Topology, *, mp_loss: MpLoss = "summands", stream: GradientStream | None = None
) -> None:
    """Turns each rank's gradients into those of the true loss, in place. Collective over all ranks.

    Call it once for each optimizer step, after the last backward and before `clip_grad_norm`. In a world of one, and
    for a model from `distributed_data_parallel`, whose backward has done it already, nothing is left to do.

    The gradient becomes (1/DP)·Σ over the ranks that hold a copy, with sums in at least float32 that have the same bits
    on all of them. A parameter without a gradient on some ranks only counts as zero there; without one on any rank, it
    stays without. Memory: one buffer of at most 32 MiB. What FSDP has averaged already is summed over what remains, the
    mp group.

    Args:
        mp_loss: what the losses of an MP group are, "summands" of its mean loss (each rank has tokens of its own, as in
            `fusedmoe.models`) or "replicated", the same loss on every rank (`MoELayer(mp_input="replicated")`).
        stream: what has been reduced during the backward pass (`plan_step`); this is its end.
    Raises:
        ConfigError: a sparse gradient, or a model wrapped in PyTorch's own DistributedDataParallel.
        RankError: another rank failed or did not come.
    """
    if isinstance(model, DataParallel):
        return
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"rank {topology.rank}: gradient sync of a model in PyTorch's DistributedDataParallel, which has averaged "
            "experts over ranks that hold different ones. Wrap it with fusedmoe.training.distributed_data_parallel."
        )
    if topology.size == 1:
        return
    done = set() if stream is None else stream.close()
    copies = [replica for replica in replicas(model, topology) if id(replica.parameter) not in done]
    reduce_gradients(copies, [divisor(replica, topology, mp_loss) for replica in copies], topology)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, topology: Topology, max_norm: float) -> Tensor:
    """Scales all gradients such that their joint 2-norm is at most `max_norm`; returns what it was. Collective.

    Call it after `sync_gradients`. Each element of each distinct parameter counts once, on whichever ranks it lies: the
    norm is that of the same model in one process, and the same bits on every rank. Norms are taken in at least float32
    and added in float64. As in `torch.nn.utils.clip_grad_norm_`, gradients are scaled by max_norm/(norm + 1e-6) where
    that is below 1, and a norm that is not finite spoils them: look at the result.

    The host waits for nothing: that is up to who reads the norm.

    Returns:
        The norm before clipping, a float64 scalar where the gradients are.
    """
    gradients = []
    squares: dict[torch.device, list[Tensor]] = {}
    for replica in replicas(model, topology):
        if replica.parameter.grad is None:
            continue
        gradient = local_part(replica.parameter.grad)
        gradients.append(gradient)
        if replica.group.index == 0:  # the first of the ranks that hold a copy counts it
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            squares.setdefault(norm.device, []).append(norm.double().square())
    first = gradients[0].device if gradients else torch.device("cpu")
    device = device_of(topology.world) if topology.size > 1 else first
    sums = [torch.stack(of).sum().to(device) for of in squares.values()]
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    norm = all_reduce(topology.world, total, operation="sum of gradient norms").sqrt()
    # A tensor of one dimension, which half precision is promoted by: the scale is not rounded to it.
    scale_1 = (max_norm / (norm + 1e-6)).clamp(max=1.0).view(1)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient.unsqueeze(0).mul_(scale_1.to(gradient.device, dtype))
    return norm
