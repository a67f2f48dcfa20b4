"""Passes over captured training graphs (Lancet): all-to-alls of models that were not written for this library hide
behind computation.

    model = torch.compile(model, backend=fusedmoe.graph.backend)
"""

from fusedmoe.graph.backend import Backend, backend
from fusedmoe.graph.costs import Costs, Points
from fusedmoe.graph.report import Report

__all__ = ["Backend", "Costs", "Points", "Report", "backend"]
