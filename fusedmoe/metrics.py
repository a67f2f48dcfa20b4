"""What a model's routing is like while it trains, for logs: `Metrics(model).collect()`, and where that can go."""

from fusedmoe.training.metric_sinks import JsonLines, Sink, TensorBoard
from fusedmoe.training.routing_metrics import Metrics

__all__ = ["JsonLines", "Metrics", "Sink", "TensorBoard"]
