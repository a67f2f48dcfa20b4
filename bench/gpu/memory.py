"""Memory that a layer keeps from its forward for its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.layer import Layer


def saved_bytes(layer: Layer) -> int:
    """Counts bytes of the tensors that autograd keeps, tokens included, the parameters not: these exist anyway."""
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
