"""The shared expert of another library's block as a task of the plan of the block's `ScheduledExchange`.

The block calls both kinds of experts itself. In between, the shared expert's `forward` returns the plan's result once:

    y = self.experts(x, …)            # the plan also computes self.shared_experts(x)
    y = y + self.shared_experts(x)    # returns this result

The plan calls the block's module, so parameters, parametrizations and adapters stay as they are. Without a result, as
in some activation checkpoints, the block computes the shared expert after the combine, as without a plan.
"""

from __future__ import annotations

from inspect import currentframe, unwrap
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmoe.compat.torch import tensor_version
from fusedmoe.engine.chunk_experts import AutogradExperts, ChunkExperts
from fusedmoe.engine.dispatcher import SharedExpert, has_saved_tensor_hooks
from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.gated_module import gated_experts

if TYPE_CHECKING:
    from fusedmoe.schedule.workload import Workload

#: Attributes under which blocks hold a shared expert.
NAMES = ("shared_experts", "shared_expert")
# Frames from the call of an exchange to the forward of its block, and forwards among them: the block's, and those of
# wrappers of its experts. Reading a frame's variables keeps their tensors until its function returns.
_MAX_FRAMES, _MAX_FORWARDS = 24, 4
# Packages whose forwards, set on a module, communicate only under tensor parallelism.
_FORWARDS_OF = ("torchtitan.",)


class CallingBlock(NamedTuple):
    """A block whose forward is running.

    `is_shared_first`: it calls its shared expert before the routed experts.
    """

    module: nn.Module
    shared: nn.Module
    is_shared_first: bool


class SharedModule:
    """A shared expert in a module of another library, with the interface by which plans call and predict it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        y_SM: Tensor = self._module(x_SM)
        return y_SM

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        if has_saved_tensor_hooks() and (gated := gated_experts(self._module, x_SM)) is not None:
            return gated
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


class _ComputedForward:
    """Replaces the forward of `module` in its next call. Returns `y` if the input is `x`."""

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self._module, self._x, self._y, self._version = module, x, y, _version(x)
        self._replaced = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.remove()
        if len(args) == 1 and not kwargs and self._is_input(args[0]):
            return self._y.view(args[0].shape)
        y: Tensor = self._module.forward(*args, **kwargs)
        return y

    def remove(self) -> None:
        del self._module.forward
        if self._replaced is not None:
            self._module.forward = self._replaced

    def _is_input(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not x.is_contiguous() or _version(x) != self._version:
            return False
        own, given = ((one.data_ptr(), one.numel(), one.dtype, one.requires_grad) for one in (self._x, x))
        return own == given


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else tensor_version(x)


def calling_block(experts: nn.Module) -> CallingBlock | None:
    """Return the block that calls these experts now, if it has a shared expert.

    Libraries create experts without a reference to their block. None in compiled blocks, whose code is another.
    """
    frame: FrameType | None = currentframe()
    forwards = 0
    for _ in range(_MAX_FRAMES):
        if frame is None or forwards == _MAX_FORWARDS:
            break
        if frame.f_code.co_name == "forward":
            forwards += 1
            if (block := _block_of(frame, experts)) is not None:
                return block
        frame = frame.f_back
    return None


def _block_of(frame: FrameType, experts: nn.Module) -> CallingBlock | None:
    module, code = frame.f_locals.get("self"), frame.f_code
    if not isinstance(module, nn.Module):
        return None
    children = {name: child for name, child in module.named_children()}
    shared = next((children[name] for name in NAMES if name in children), None)
    own = type(module).forward, vars(module).get("forward")
    if shared is None or all(code is not getattr(unwrap(each), "__code__", None) for each in own if each is not None):
        return None
    # Wrappers, such as peft's, contain the experts.
    holder = next((name for name, one in children.items() if one is not shared and experts in [*one.modules()]), None)
    order, name = code.co_names, next(name for name, child in children.items() if child is shared)
    if holder not in order or name not in order:
        return None
    return CallingBlock(module, shared, order.index(name) < order.index(str(holder)))


def offer(block: CallingBlock, x: Tensor) -> SharedExpert | None:
    """Return the block's shared expert for a plan; None if the block must call it.

    `x`: the input of both kinds of experts, [..., M].
    """
    before = vars(block.shared).get("forward")
    if isinstance(before, _ComputedForward):  # the block did not call it
        before.remove()
    return SharedExpert(SharedModule(block.shared), x.view(-1, x.shape[-1])) if can_offer(block.shared, x) else None


def can_offer(shared: nn.Module, x: Tensor) -> bool:
    """Return whether a plan may call this shared expert: it has no hooks and calls no collectives."""
    return x.is_contiguous() and not has_hooks(shared) and all(map(_is_plain, shared.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has neither a user's own forward nor parameters that a wrapper manages."""
    forward = vars(module).get("forward")
    if forward is not None and not str(getattr(forward, "__module__", "")).startswith(_FORWARDS_OF):
        return False
    if any(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
        return False
    # FSDP1 replaces parameters by views of its flat parameter, whose gradients a plan could not return.
    return not any(isinstance(value, Tensor) and value.requires_grad for value in vars(module).values())


def set_result(block: CallingBlock, x: Tensor, y_SM: Tensor | None) -> None:
    """Make the block's next call of its shared expert return the plan's result, if there is one."""
    if y_SM is not None:
        block.shared.forward = _ComputedForward(block.shared, x, y_SM)
