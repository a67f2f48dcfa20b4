"""Parameters that stay float32 in a model of half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32Linear(nn.Linear):
    """A linear map that `.to(torch.bfloat16)` and the like leave in float32, with values rounded as they were asked to.

    Tutel makes such parameters float32 in its first forward, so that the optimizer trains them so: the parameters
    themselves, which an optimizer may hold already. Here they are it at once, with the same values: what is built
    around a model between its conversion and its first forward, such as DDP's buckets, sees the dtype that stays.
    (FSDP's `fully_shard` wants one dtype for what it shards together: shard this module by itself first.) Where the
    parameters are in another dtype all the same, as under FSDP's mixed precision, the product raises copies.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.float()

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Linear:
        super()._apply(fn, recurse)
        if any(parameter.dtype != torch.float32 for parameter in self.parameters()):
            super()._apply(lambda t: t.float(), recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.weight.dtype != torch.float32:
            self.float()  # `load_state_dict(assign=True)` has put others in their place
