"""Blocks of the Qwen family that call their routed experts before their shared expert.

Transformers calls the shared expert first, when no tokens are in flight. With the routed experts first, a plan computes
the shared expert during their communication. All modules are called as before, once each.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fusedmoe.engine.dispatcher import has_saved_tensor_hooks, is_recomputing

# Names in the order in which the forward of these classes uses them: Qwen2 MoE, Qwen3-Next, Qwen3.5 and Qwen3-Omni.
_SHARED_FIRST = (
    *("shape", "view", "shared_expert", "gate", "experts", "F", "sigmoid", "shared_expert_gate"),
    "reshape",
)


def forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute the forward of a Qwen block with a gated shared expert, in another order."""
    x_TM = hidden_states.view(-1, hidden_states.shape[-1])
    _, weight_TK, expert_TK = self.gate(x_TM)
    y_TM = self.experts(x_TM, expert_TK, weight_TK)
    shared_TM = self.shared_expert(x_TM)
    y_TM = y_TM + functional.sigmoid(self.shared_expert_gate(x_TM)) * shared_TM
    y: Tensor = y_TM.reshape(hidden_states.shape)
    return y


def call_experts_first(block: nn.Module) -> None:
    """Replace the forward of a block of these classes from its next call on. No effect on other blocks."""
    code = getattr(type(block).forward, "__code__", None)
    if getattr(code, "co_names", ()) != _SHARED_FIRST or "forward" in vars(block):
        return
    # A checkpoint must recompute the operations of the same forward, in the same order.
    if not (has_saved_tensor_hooks() or is_recomputing()):
        block.forward = MethodType(forward, block)
