"""Expert networks, and how the parameters of a module of your own are split over ranks (its attribute `shardings`)."""

from fusedmoe.layers.adapters import LowRankUpdate, add_adapters, merge_adapters
from fusedmoe.layers.expert_networks import *  # noqa: F403
from fusedmoe.layers.expert_networks import RanksOwn, other_experts, require_own_experts
from fusedmoe.layers.expert_networks import __all__ as _NETWORKS
from fusedmoe.layers.sharding import UNKNOWN, parameter_shardings, require_equal
from fusedmoe.layers.wrappers import NotScripted, WrapperCheck, not_traced

__all__ = [
    *_NETWORKS,
    "LowRankUpdate",
    "NotScripted",
    "RanksOwn",
    "UNKNOWN",
    "WrapperCheck",
    "add_adapters",
    "merge_adapters",
    "not_traced",
    "other_experts",
    "require_equal",
    "require_own_experts",
    "parameter_shardings",
]  # noqa: PLE0604
