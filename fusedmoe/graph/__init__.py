"""Graph passes (Lancet): overlap the all-to-alls of any captured model with computation.

Usage: `model = torch.compile(model, backend=fusedmoe.graph.GraphBackend())`.
"""

from fusedmoe.graph.compiler import GraphBackend

__all__ = ["GraphBackend"]
