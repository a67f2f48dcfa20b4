"""Megatron-core's mixture-of-experts layer with another dispatcher."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.integrations.megatron.stacked_experts import StackedExperts
from fusedmoe.integrations.megatron.staged_dispatcher import StagedDispatcher

# What may be captured as CUDA graphs beside a layer that asks how many rows come.
_CAPTURED = {"attn", "mlp", "mamba"}


class MegatronMoELayer(MoELayer):
    """Megatron's layer, of which rows travel by this library.

    Args: as Megatron's `MoELayer` has them, and
        timeout_s: how long a rank waits for others, in seconds.
    Raises:
        ConfigError: a setting of which this layer could keep only a part, named.
        RankError: from a step, or where it is made: a rank fails, or does not come within `timeout_s`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        timeout_s: float = 300.0,
    ) -> None:
        _check(config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups)
        self.token_dispatcher = StagedDispatcher(config, groups, timeout_s)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The results of rows that came."""
        if isinstance(self.experts, StackedExperts):
            return self.token_dispatcher.through_experts(self.experts, hidden_states), None
        output, bias = super().routed_experts_compute(hidden_states, probs)
        return output, bias


def _check(config: Any) -> None:
    captured = {getattr(scope, "name", str(scope)) for scope in config.cuda_graph_scope or ()}
    graphs = config.cuda_graph_impl != "none" and not (captured and captured <= _CAPTURED)
    wrong = {
        "moe_token_dispatcher_type='flex'": config.moe_token_dispatcher_type == "flex",
        "moe_pad_expert_input_to_capacity": config.moe_pad_expert_input_to_capacity,
        "moe_router_padding_for_quantization": config.moe_router_padding_for_quantization,
        "moe_shared_expert_overlap": config.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        f"cuda_graph_scope={sorted(captured)}": graphs,
    }
    names = ", ".join(what for what, there in wrong.items() if there)
    if names:
        raise ConfigError(
            f"fusedmoe.megatron: the layer sends rows itself, as many as there are, and cannot do {names}; leave that "
            "out, or fusedmoe.megatron"
        )
