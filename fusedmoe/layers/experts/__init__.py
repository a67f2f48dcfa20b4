"""Expert networks: GPT's feed-forward, SwiGLU, and any module of the user's."""

from fusedmoe.layers.experts.base import NAMED, Experts, Place, RowExperts
from fusedmoe.layers.experts.custom import Custom
from fusedmoe.layers.experts.feed_forward import FeedForward, SwiGLU

__all__ = ["NAMED", "Custom", "Experts", "FeedForward", "Place", "RowExperts", "SwiGLU"]
