"""Mixture-of-experts models of torchtitan with this library's exchange of rows and kernels.

Torchtitan's overrides put them in, by name, without a change to its code or to a model's (see `fusedmoe.titan`).
Parameters, their names and how they are sharded stay as they are: checkpoints, optimizers, FSDP and the adapters for
Hugging Face's format see no difference.
"""

from __future__ import annotations

from fusedmoe.integrations.titan.checkpointing import SelectiveAC
from fusedmoe.integrations.titan.fused_experts import FusedExperts, FusedRoutedExperts
from fusedmoe.integrations.titan.gpt_oss_experts import FusedGptOssExperts
from fusedmoe.integrations.titan.token_dispatcher import TokenDispatcher

__all__ = ["FusedExperts", "FusedGptOssExperts", "FusedRoutedExperts", "SelectiveAC", "TokenDispatcher"]
