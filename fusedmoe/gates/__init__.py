"""Gates select the experts of each token. Custom gates: see `Gate` and `RouterGate`."""

from __future__ import annotations

from fusedmoe.gates.base import Gate, RouterGate, Routing
from fusedmoe.gates.fixed import Hash, Random
from fusedmoe.gates.sigmoid import DeepSeekV3, Sigmoid
from fusedmoe.gates.topk import BatchPrioritised, GShard, Switch, TopK, XMoE, top_experts
from fusedmoe.gates.whole_batch import ExpertChoice, SoftMoE

# Names in settings and of the command; `names.GATES` lists them for help texts.
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
    "Switch",
    "TopK",
    "XMoE",
    "top_experts",
]
