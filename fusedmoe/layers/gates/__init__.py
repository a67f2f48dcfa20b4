"""Gates: which experts see which tokens. `GATES` finds a class by its name."""

from __future__ import annotations

from fusedmoe.layers.gates.base import Gate, RouterGate, Routing, SoftRouting
from fusedmoe.layers.gates.fixed import Hash, Random
from fusedmoe.layers.gates.sigmoid import DeepSeekV3, Sigmoid
from fusedmoe.layers.gates.topk import BatchPrioritised, GShard, Switch, TopK, XMoE
from fusedmoe.layers.gates.whole_batch import ExpertChoice, SoftMoE

# By the names that settings and the command use; a new gate gets its line here.
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
    "RouterGate",
    "Routing",
    "Sigmoid",
    "SoftMoE",
    "SoftRouting",
    "Switch",
    "TopK",
    "XMoE",
]
