"""Megatron-core's experts by this library's kernels: no copies of rows sorted by expert, nor of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from fusedmoe import ops
from fusedmoe.errors import ConfigError
from fusedmoe.integrations.weights_in_parts import WeightParts, experts_in_parts

# Of Megatron's activation function, without and with a gate: our names.
_ACTIVATIONS = {
    nn.functional.silu: ("silu", "swiglu"),
    nn.functional.gelu: ("gelu", "geglu"),
    nn.functional.relu: ("relu", None),
}


class StackedExperts(SequentialMLP):
    """The parameters of `SequentialMLP`, one network for each expert, with another forward.

    Products run in the dtype of the rows. Weights multiply the results in float32. Each pass makes one copy of the
    rank's weights, which the kernels read as one tensor, and frees it at its end.

    Args: as `SequentialMLP` has them.
    Raises:
        ConfigError: experts with biases, in 8 or 4 bits, with weights on their input, or with an activation that the
            kernels do not have; what it is is named.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        self._activation = _activation(config)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection)
        self._gated = bool(config.gated_linear_unit)

    def forward(self, x_SD: Tensor, layout: ops.Layout, weight_N: Tensor | None) -> Tensor:
        """[S, D] for each token (or received row) the sum of its sorted rows' results, times their weights."""
        linears = [[getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")]
        parts = [linear.weight for one in linears for linear in one]
        return experts_in_parts(x_SD, layout, weight_N, parts, WeightParts(self._join, _split), self._activation)

    def _join(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """[e, (2,) H, D] and [e, D, H]."""
        up, down = (torch.stack(list(half)) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
        return up.unflatten(1, (2, -1)) if self._gated else up, down


def _split(w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    """The matrices of each expert, of both products."""
    up = w1.flatten(1, 2) if w1.dim() == 4 else w1
    return *up.unbind(), *w2.unbind()


def _activation(config: Any) -> str:
    act, gated = config.activation_func, bool(config.gated_linear_unit)
    found = _ACTIVATIONS.get(act, (None, None))[gated]
    name = getattr(act, "__name__", repr(act)) + (" with a gate" if gated else "")
    wrong = {
        "biases (add_bias_linear)": config.add_bias_linear,
        "quantised products (fp8, fp4)": config.fp8 or config.fp4,
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "activation_func_clamp_value": config.activation_func_clamp_value is not None,
        "glu_linear_offset": config.glu_linear_offset != 0,
        f"the activation {name}": found is None,
    }
    names = ", ".join(what for what, there in wrong.items() if there)
    if found is None or names:
        raise ConfigError(
            f"fusedmoe.megatron.routed_experts computes experts with silu, gelu (each with a gate or without) or relu, "
            f"and none with {names}; take fusedmoe.megatron.token_dispatcher, which leaves the experts to Megatron"
        )
    return found
