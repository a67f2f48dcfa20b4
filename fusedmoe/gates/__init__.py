"""Gates choose the experts of each token. `GATES` maps names in settings to classes.

`router_logits`, `unit_vectors`, `top_experts` and `outside_autocast` are for gates of your own.
"""

from __future__ import annotations

from fusedmoe.gates.base import Gate, RouterGate, Routing, SoftRouting, outside_autocast, router_logits, unit_vectors
from fusedmoe.gates.fixed import Hash, Random
from fusedmoe.gates.sigmoid import DeepSeekV3, Sigmoid
from fusedmoe.gates.topk import BatchPrioritised, GShard, Switch, TopK, XMoE, top_experts
from fusedmoe.gates.whole_batch import ExpertChoice, SoftMoE

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
    "outside_autocast",
    "router_logits",
    "top_experts",
    "unit_vectors",
]
