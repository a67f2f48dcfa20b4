"""Memory that a layer saves in forward for backward."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.layer import Layer


def saved_bytes(layer: Layer) -> int:
    """Return the bytes of tensors that autograd saves, including tokens, excluding parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_SM = layer.forward()  # kept alive so that addresses stay unique
    for parameter in layer.leaves[2:]:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del y_SM
    return sum(kept.values())
