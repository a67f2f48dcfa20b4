"""What a model's routing is like while it trains, for logs: `Metrics(model).collect()`, and where that can go."""

from fusedmoe.layers.routing_metrics import Metrics
from fusedmoe.runtime.metric_sinks import JsonLines, Sink, TensorBoard

__all__ = ["JsonLines", "Metrics", "Sink", "TensorBoard"]
