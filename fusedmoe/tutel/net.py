"""Communication under Tutel's names, and its distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmoe.tutel.impls import communicate
from fusedmoe.tutel.impls.communicate import *  # noqa: F403


class TutelDistributedOptimizer:
    """Optimizer whose state is sharded over ranks.

        optimizer = TutelDistributedOptimizer(model.parameters()).warp_local(torch.optim.Adam, lr=…)
        optimizer.zero_grad(); loss.backward(); optimizer.step()

    A step sums the gradients of shared parameters over the group (or averages them, with `average_shared`), updates
    this rank's shard of each parameter, and all-gathers the results. Expert parameters, marked by `_tutel_expert`, are
    local to each rank.
    """

    def __init__(
        self, params: Iterable[Tensor], group: dist.ProcessGroup | None = None, average_shared: bool = False
    ) -> None:
        parameters = list(params)
        self.params = [p for p in parameters if not hasattr(p, "_tutel_expert")]
        self.expert_params = [p for p in parameters if hasattr(p, "_tutel_expert")]
        self.group = group
        self.average_shared = average_shared
        self.virt_params: list[Tensor] = []
        self.local_optim: torch.optim.Optimizer | None = None

    def warp_local(
        self, local_optim: Callable[..., torch.optim.Optimizer], *args: Any, **kwargs: Any
    ) -> TutelDistributedOptimizer:
        """Construct the optimizer of this rank's shard. Returns `self`."""
        with torch.no_grad():
            self.virt_params = [self._part(p).clone() for p in self.params]
        self.local_optim = local_optim([*self.virt_params, *self.expert_params], *args, **kwargs)
        return self

    def zero_grad(self) -> None:
        for p in (*self.params, *self.expert_params):
            if p.grad is not None:
                p.grad = p.grad.detach().zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters. Collective: a parameter has a gradient on all ranks of the group or on none."""
        assert self.local_optim is not None, "call warp_local first"
        share = communicate.get_world_size(self.group) if self.average_shared else 1
        for p, part in zip(self.params, self.virt_params, strict=True):
            part.copy_(self._part(p))
            part.grad = None
            if p.grad is not None:
                grad = p.grad / share
                part.grad = communicate.zero_scatter(grad, communicate.simple_reduce_scatter, group=self.group)[0]
        self.local_optim.step()
        for p, part in zip(self.params, self.virt_params, strict=True):
            p.copy_(communicate.simple_all_gather(part, self.group)[: p.numel()].view(p.shape))

    def _part(self, p: Tensor) -> Tensor:
        return communicate.zero_scatter(p.detach(), communicate.simple_split, group=self.group)[0]
