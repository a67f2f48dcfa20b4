"""`import fusedmoe.hf`: Hugging Face's models with these kernels. See `fusedmoe.integrations.hf`."""

from fusedmoe.integrations.hf import NAME, MetricsCallback, apply

__all__ = ["NAME", "MetricsCallback", "apply"]
