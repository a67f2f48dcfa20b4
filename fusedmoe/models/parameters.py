"""Parameters whose values do not depend on how many ranks hold them.

Every rank draws the whole tensor, on the CPU in float32 from torch's default generator, and keeps its shard: after
`torch.manual_seed(seed)` a model is the same model on one rank and on forty-eight, on every device and in every dtype,
and the ranks' generators stay in step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedmoe.comm.group import Group


def normal_parameter(
    *shape: int,
    std: float,
    group: Group | None = None,
    dim: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A parameter of normal numbers; with a group, this rank's chunk of them along `dim`.

    On the meta device it is without values, as everything there.
    """
    if torch.empty(0, device=device).is_meta:
        return nn.Parameter(shard(torch.empty(shape, device=device, dtype=dtype), group, dim))
    whole = torch.randn(shape, dtype=torch.float32, device="cpu") * std
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    return nn.Parameter(shard(whole, group, dim).to(device=device, dtype=dtype))


def zero_parameter(
    *shape: int,
    group: Group | None = None,
    dim: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A parameter of zeros; with a group, this rank's chunk along `dim`."""
    return nn.Parameter(shard(torch.zeros(shape, device=device, dtype=dtype), group, dim))


def shard(whole: Tensor, group: Group | None, dim: int) -> Tensor:
    """This rank's chunk of a tensor, in memory of its own; the size along `dim` is a multiple of the group's."""
    if group is None or group.size == 1:
        return whole
    return whole.chunk(group.size, dim)[group.index].clone(memory_format=torch.contiguous_format)
