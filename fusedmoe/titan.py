"""Torchtitan's models with this library's exchange of rows and kernels, by names of overrides:

    torchtitan … --override.imports fusedmoe.titan.routed_experts,fusedmoe.titan.selective_ac

`token_dispatcher` sends rows by this library, and leaves the experts to torchtitan; `routed_experts` is both, with the
experts by this library's kernels; take one of them. `selective_ac` has selective activation checkpointing run each
exchange once. See `fusedmoe.integrations.titan`.
"""

from __future__ import annotations

from torchtitan.config import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from fusedmoe.errors import ConfigError
from fusedmoe.integrations.titan import (
    FusedExperts,
    FusedGptOssExperts,
    FusedRoutedExperts,
    SelectiveAC,
    TokenDispatcher,
)

__all__ = ["routed_experts", "selective_ac", "token_dispatcher"]

_TIMEOUT_S = 300.0

# Torchtitan's experts, and ours in their place.
_EXPERTS = {GroupedExperts.Config: FusedExperts.Config, GptOssGroupedExperts.Config: FusedGptOssExperts.Config}


@override(target=AllToAllTokenDispatcher.Config, description="Rows travel by fusedmoe's exchange")
def token_dispatcher(cfg: AllToAllTokenDispatcher.Config, *, timeout_s: float = _TIMEOUT_S) -> TokenDispatcher.Config:
    """Replaces the dispatcher's configuration by this library's.

    Args:
        timeout_s: seconds that a rank waits for others.
    Raises:
        ConfigError: a dispatcher that pads rows, for quantised experts.
    """
    # A derived configuration adds behaviour that this dispatcher would drop.
    if type(cfg) is not AllToAllTokenDispatcher.Config:
        raise ConfigError(
            f"fusedmoe.titan.token_dispatcher: {_name(cfg)} does more than send rows, such as pad them for quantised "
            "experts, which would be lost; leave this override or the quantisation of experts out"
        )
    return derive(cfg, TokenDispatcher.Config, timeout_s=timeout_s)


@override(target=RoutedExperts.Config, description="Rows travel, and experts compute, by fusedmoe")
def routed_experts(cfg: RoutedExperts.Config, *, timeout_s: float = _TIMEOUT_S) -> FusedRoutedExperts.Config:
    """Replaces the routed experts' configuration: dispatcher and kernels are this library's.

    Args:
        timeout_s: seconds that a rank waits for others.
    Raises:
        ConfigError: experts, or a dispatcher, of another kind than torchtitan's plain ones and gpt-oss's, named.
    """
    inner, dispatcher = cfg.inner_experts, cfg.token_dispatcher
    if type(cfg) is not RoutedExperts.Config or type(inner) not in _EXPERTS:
        raise ConfigError(
            f"fusedmoe.titan.routed_experts computes plain SwiGLU experts and gpt-oss's, and not {_name(inner)} in "
            f"{_name(cfg)}; take fusedmoe.titan.token_dispatcher, which leaves the experts as they are"
        )
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ConfigError(
            f"fusedmoe.titan.routed_experts sends rows itself, but {_name(dispatcher)} was chosen; set the model's "
            "moe_comm_backend to 'standard', or leave this override out"
        )
    return derive(
        cfg,
        FusedRoutedExperts.Config,
        inner_experts=derive(inner, _EXPERTS[type(inner)]),
        token_dispatcher=derive(dispatcher, TokenDispatcher.Config, timeout_s=timeout_s),
    )


@override(target=activation_checkpoint.SelectiveAC.Config, description="Each exchange of fusedmoe runs once")
def selective_ac(cfg: activation_checkpoint.SelectiveAC.Config) -> SelectiveAC.Config:
    """Replaces the policy's configuration by one that saves what travelled.

    Raises:
        ConfigError: a policy of another class, named.
    """
    if type(cfg) is not activation_checkpoint.SelectiveAC.Config:
        raise ConfigError(
            f"fusedmoe.titan.selective_ac would lose what {_name(cfg)} saves; leave this override out, and add "
            "fusedmoe.training.KEPT_OPERATORS to what its get_save_ops returns"
        )
    return derive(cfg, SelectiveAC.Config)


def _name(cfg: object) -> str:
    return f"{type(cfg).__module__}.{type(cfg).__qualname__}"
