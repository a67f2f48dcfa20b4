"""Megatron-core's mixture-of-experts layer with this library's exchange of rows and kernels.

`fusedmoe.megatron` puts it into a layer spec. Router, losses, shared experts and the names in checkpoints stay
Megatron's.
"""

from __future__ import annotations

from fusedmoe.integrations.megatron.megatron_layer import MegatronMoELayer
from fusedmoe.integrations.megatron.stacked_experts import StackedExperts
from fusedmoe.integrations.megatron.staged_dispatcher import StagedDispatcher

__all__ = ["MegatronMoELayer", "StackedExperts", "StagedDispatcher"]
