"""Gates: which experts see which tokens. ``GATES`` finds a class by its name."""

from __future__ import annotations

from fusedmoe.layers.gates.base import Gate, Routing, SoftRouting
from fusedmoe.layers.gates.deepseek_v3 import DeepSeekV3
from fusedmoe.layers.gates.expert_choice import ExpertChoice
from fusedmoe.layers.gates.gshard import GShard
from fusedmoe.layers.gates.hash import Hash
from fusedmoe.layers.gates.random import Random
from fusedmoe.layers.gates.sigmoid import Sigmoid
from fusedmoe.layers.gates.softmoe import SoftMoE
from fusedmoe.layers.gates.topk import BatchPrioritised, Switch, TopK
from fusedmoe.layers.gates.xmoe import XMoE

GATES: dict[str, type[Gate]] = {
    "topk": TopK,
    "switch": Switch,
    "gshard": GShard,
    "sigmoid": Sigmoid,
    "xmoe": XMoE,
    "softmoe": SoftMoE,
    "expert_choice": ExpertChoice,
    "batch_prioritised": BatchPrioritised,
    "hash": Hash,
    "random": Random,
    "deepseek_v3": DeepSeekV3,
}

__all__ = [
    "GATES",
    "BatchPrioritised",
    "DeepSeekV3",
    "ExpertChoice",
    "GShard",
    "Gate",
    "Hash",
    "Random",
    "Routing",
    "Sigmoid",
    "SoftMoE",
    "SoftRouting",
    "Switch",
    "TopK",
    "XMoE",
]
