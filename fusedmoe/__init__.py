"""Mixture-of-experts layers for PyTorch whose communication hides behind computation."""

from fusedmoe import ops
from fusedmoe.autograd.hooks import HookContext, Hooks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers import experts, gates, hooks, losses, orders
from fusedmoe.layers.fsmoe import CallbackBase, ExpertBase, LinearGate, MOELayer, SimpleOrder
from fusedmoe.layers.moe import MoELayer

__version__ = "0.1.0"

__all__ = [
    "CallbackBase",
    "ConfigError",
    "ExpertBase",
    "HookContext",
    "Hooks",
    "LinearGate",
    "MOELayer",
    "MoELayer",
    "RankError",
    "SimpleOrder",
    "Topology",
    "experts",
    "gates",
    "hooks",
    "losses",
    "ops",
    "orders",
]
