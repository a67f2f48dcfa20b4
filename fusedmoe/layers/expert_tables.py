"""Parameters of experts that move: memory with room for copies behind those that a rank owns, and new shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedmoe.errors import ConfigError
from fusedmoe.layers.expert_networks import Experts


def table(parameter: nn.Parameter, rows: int) -> Tensor:
    """Returns [rows, ...] in memory that begins with a parameter, [owned, ...]; takes more where needed."""
    storage = parameter.data.untyped_storage()
    # A view of other memory, or a parameter whose memory was given anew (`.to`), moves to memory of its own, once.
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


def unstacked_of(experts: Experts) -> list[str]:
    """Lists parameters that are not said to be [experts, ...]."""
    return [name for name, _ in experts.named_parameters() if experts.shardings.get(name, {}).get("ep") != 0]


def require_stacked(experts: Experts, owned: int) -> None:
    """Checks that all parameters are tables still: experts may have been parametrised since they were made.

    Raises:
        ConfigError: a parameter that is not known to be [owned, ...], one part for each expert.
    """
    wrong = unstacked_of(experts)
    wrong += [name for name, one in experts.named_parameters() if one.dim() == 0 or len(one) != owned]
    if wrong:
        raise ConfigError(
            f"placement='fssdp' moves the rows of parameters, [experts, ...]; {type(experts).__name__} has "
            f"{', '.join(dict.fromkeys(wrong))} besides, parts of a parametrisation (LoRA), say. Make them "
            "[local experts, ...], one part for each expert, and say so before ShardedExperts is made: "
            "experts.shardings['parametrizations.w1.0.A'] = {'ep': 0}, and "
            "experts.shardings['parametrizations.w1.original'] = experts.shardings.pop('w1'); or use placement='ep'"
        )
