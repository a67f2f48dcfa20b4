"""Passes over captured training graphs (Lancet): all-to-alls of models that were not written for this library hide
behind computation.

    model = torch.compile(model, backend=fusedmoe.graph.backend)
"""

from fusedmoe.graph.compiler import GraphBackend, backend
from fusedmoe.graph.operator_costs import OperatorCosts
from fusedmoe.graph.planning import PassReport

__all__ = ["GraphBackend", "OperatorCosts", "PassReport", "backend"]
