"""What a layer keeps from its forward for its backward, and the most it needs in between."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.layer import Layer


def saved_bytes(layer: Layer) -> int:
    """Bytes of the tensors that autograd keeps, tokens included, the parameters not: these exist anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_SM = layer.forward()  # until the end, so that no address is used again
    for parameter in layer.leaves[2:]:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del y_SM
    return sum(kept.values())


def peak_bytes(layer: Layer, dy_SM: Tensor) -> int | None:
    """The most that a forward and backward allocate above what was there, gradients included; None off the GPU."""
    if not dy_SM.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.backward(layer.forward(), dy_SM)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
