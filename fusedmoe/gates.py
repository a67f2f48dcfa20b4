"""Gates, and what one of your own is built of: the router's product, the choice of experts, no autocast."""

from fusedmoe.layers.gates import *  # noqa: F403
from fusedmoe.layers.gates import __all__ as _GATES
from fusedmoe.layers.gates.base import outside_autocast, router_logits, unit_vectors
from fusedmoe.layers.gates.topk import top_experts

__all__ = [*_GATES, "outside_autocast", "router_logits", "top_experts", "unit_vectors"]  # noqa: PLE0604
