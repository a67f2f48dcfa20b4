"""The names of the FSMoE paper (Listings 1 and 2) for this library's classes.

class MyExpert(ExpertBase):
    def do_experts(self, args): ...

class MyCallback(CallbackBase):
    def before_dispatch_hook(self, args): ...

moe_module = MOELayer(LinearGate(), SimpleOrder(), model_dim=512)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe.experts.networks import Experts, FeedForward, Place, RowExperts
from fusedmoe.gates import Gate, TopK
from fusedmoe.hooks import HookContext, Hooks
from fusedmoe.layers.moe import MoELayer
from fusedmoe.orders import Order, Sparse

# The paper's "simple" order sorts rows and drops those beyond the capacity.
SimpleOrder = Sparse


class LinearGate(TopK):
    """A top-k gate over a linear map, with the paper's k = 2 and capacity factor 1.2."""

    def __init__(self, experts: int = 8, k: int = 2, capacity_factor: float | None = 1.2, **more: Any) -> None:
        super().__init__(experts=experts, k=k, capacity_factor=capacity_factor, **more)


@dataclass
class ExpertArgs:
    """Arguments of `do_experts`: rows sorted by local expert, and the number of rows of each local expert."""

    rows_NM: Tensor
    counts: list[int]


class ExpertBase(RowExperts):
    """Custom experts: override `do_experts`, which returns rows of the same shape as `args.rows_NM`.

    Experts with parameters also override `make_parameters`; `self.place` identifies the local experts. Over several
    ranks, `self.shardings` must declare how each parameter is split: `{"ep": 0}` if its first dimension counts the
    local experts.
    """

    def do_experts(self, args: ExpertArgs) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define do_experts(self, args)")

    def make_parameters(self, model_dim: int, place: Place) -> None:
        """Create the parameters of the local experts; called once, with a generator seeded by the first expert's id."""

    def make(
        self, model_dim: int, place: Place, seed: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        # The default generator must not advance by an amount that depends on the number of local experts.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed + place.first) % 2**63)
            self.make_parameters(model_dim, place)
        self.to(device=device, dtype=dtype)

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        return self.do_experts(ExpertArgs(rows_NM, counts))


@dataclass
class HookArgs:
    """Arguments of a callback, which may replace `tensor`. `context` has direction and chunk."""

    tensor: Tensor
    context: HookContext


class CallbackBase(Hooks):
    """Hooks in the paper's spelling: override any of the six `…_hook(self, args)`."""

    def before_moe_start_hook(self, args: HookArgs) -> None: ...

    def before_dispatch_hook(self, args: HookArgs) -> None: ...

    def after_dispatch_hook(self, args: HookArgs) -> None: ...

    def before_combine_hook(self, args: HookArgs) -> None: ...

    def after_combine_hook(self, args: HookArgs) -> None: ...

    def before_moe_end_hook(self, args: HookArgs) -> None: ...

    def before_moe_start(self, x: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.before_moe_start_hook, x, context)

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.before_dispatch_hook, rows, context)

    def after_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.after_dispatch_hook, rows, context)

    def before_combine(self, rows: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.before_combine_hook, rows, context)

    def after_combine(self, rows: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.after_combine_hook, rows, context)

    def before_moe_end(self, y: Tensor, context: HookContext) -> Tensor:
        return _call_hook(self.before_moe_end_hook, y, context)


def _call_hook(hook: Callable[[HookArgs], None], tensor: Tensor, context: HookContext) -> Tensor:
    args = HookArgs(tensor, context)
    hook(args)
    return args.tensor


class MOELayer(MoELayer):
    """`MoELayer` with the argument names of the FSMoE paper: `MOELayer(gate, order, model_dim=…, …)`.

    Args:
        callbacks: passed on as `hooks`.
        experts: default: GPT's feed-forward with hidden dimension 4·M.
    """

    def __init__(
        self,
        gate: Gate,
        order: Order,
        *,
        model_dim: int,
        experts: Experts | None = None,
        callbacks: Iterable[Hooks] = (),
        **more: Any,
    ) -> None:
        experts = FeedForward(4 * model_dim) if experts is None else experts
        super().__init__(model_dim, gate, experts, order=order, hooks=callbacks, **more)
