"""The shared expert of another library's layer as a task of the plan of its `ScheduledExchange`.

The plan calls the library's module, so parameters, parametrizations and adapters stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.kernels.layout import Layout

if TYPE_CHECKING:
    from fusedmoe.schedule.workload import Workload


class SharedModule:
    """A shared expert in a module of another library, with the interface by which plans call and predict it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        y_SM: Tensor = self._module(x_SM)
        return y_SM

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        # Leaves in place of parameters: hooks of a parameter run once, on the gradient that the plan returns.
        trains = torch.is_grad_enabled()
        named = {name: one for name, one in self._module.named_parameters() if trains and one.requires_grad}
        leaves = {name: one.detach().requires_grad_() for name, one in named.items()}

        def compute(x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
            y_SM: Tensor = torch.func.functional_call(self._module, leaves, (x_SM,))
            return y_SM

        return AutogradExperts(compute, list(named.values()), self._module, list(leaves.values()))

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        from fusedmoe.schedule.workload import Workload

        shapes = [one.shape for one in self._module.parameters() if one.dim() == 2]
        # A gated network with as many elements.
        model_dim = max((min(shape) for shape in shapes), default=1)
        hidden = max(1, round(sum(shape.numel() for shape in shapes) / (3 * model_dim)))
        return Workload.of_rows(rows, model_dim, hidden, 1, True, itemsize, ep, esp)


def can_offer(shared: nn.Module, x: Tensor) -> bool:
    """Return whether a plan may call this shared expert: it has no hooks and calls no collectives."""
    return x.is_contiguous() and not has_hooks(shared) and all(map(_is_plain, shared.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has neither a replaced forward nor parameters that a wrapper manages."""
    if "forward" in vars(module) or any(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
        return False
    # FSDP1 replaces parameters by views of its flat parameter, whose gradients a plan could not return.
    return not any(isinstance(value, Tensor) and value.requires_grad for value in vars(module).values())
