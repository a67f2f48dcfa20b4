"""Mixture-of-experts layers for PyTorch whose communication hides behind computation."""

import sys

from fusedmoe import graph, ops
from fusedmoe.autograd.hooks import HookContext, Hooks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers import experts, gates, hooks, losses, orders
from fusedmoe.layers.fsmoe import CallbackBase, ExpertBase, LinearGate, MOELayer, SimpleOrder
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.pipeline import pipeline
from fusedmoe.layers.schedule import Schedule

__version__ = "0.1.0"

# The parts of the layers are public without the floor they live on: `from fusedmoe.gates import TopK` works, too.
for _part in (experts, gates, hooks, losses, orders):
    sys.modules[f"fusedmoe.{_part.__name__.rpartition('.')[2]}"] = _part

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
    "Schedule",
    "SimpleOrder",
    "Topology",
    "experts",
    "gates",
    "graph",
    "hooks",
    "losses",
    "ops",
    "orders",
    "pipeline",
]
