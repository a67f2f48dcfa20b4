"""Parameters of experts that move: memory with room for copies behind those that a rank owns, and new shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def table(parameter: nn.Parameter, rows: int) -> Tensor:
    """[rows, ...] in the memory in which a parameter, [owned, ...], lies at the start; more is taken where needed."""
    storage = parameter.data.untyped_storage()
    shared = not parameter.is_contiguous() or parameter.storage_offset() or not storage.resizable()
    if shared or getattr(parameter, "_fusedmoe_table", None) != storage._cdata:
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        storage = parameter.data.untyped_storage()
        parameter._fusedmoe_table = storage._cdata  # type: ignore[attr-defined]
    shape = (rows, *parameter.shape[1:])
    needed = torch.Size(shape).numel() * parameter.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage, 0, shape, stride)


def replace(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Gives a parameter data of another shape.

    A graph of an earlier forward that is still held (a loss that was kept) knows the parameter's old shape, and the
    engine would go by it. A change of dtype makes it forget.
    """
    parameter.grad = None
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = tensor
