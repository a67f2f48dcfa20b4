"""The dense feed-forward of blocks without experts, its hidden dim split over the MP group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.autograd.parallel import gather_rows, reduce_scatter_rows
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.activation import ACTIVATIONS, define_activation
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.parameters import normal_parameter, zero_parameter
from fusedmoe.models.sequence import TokenSplit
from fusedmoe.runtime.recorder import Recorder


class DenseFeedForward(nn.Module):
    """Two matrices with an activation between them, which may be a gated one: what an expert of the same config is.

    Attributes:
        up_weight: [H / MP, M], or [2, H / MP, M] for a gated activation.   up_bias: [H / MP] or [2, H / MP], or None.
        down_weight: [M, H / MP].   down_bias: [M] or None.
    Raises:
        ConfigError: H does not split over the MP group.
    """

    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        mp, dim, hidden = topology.mp, config.model_dim, config.hidden
        if hidden % mp.size:
            raise ConfigError(f"hidden = {hidden} does not split over mp = {mp.size} ranks")
        self.topology, self.activation = topology, config.nonlinearity
        self.recorder: Recorder | None = None
        halves = (2,) if ACTIVATIONS[self.activation].gated else ()
        split = len(halves)
        self.shardings = {"up_weight": {"mp": split}, "up_bias": {"mp": split}, "down_weight": {"mp": 1}}
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.up_weight = normal_parameter(*halves, hidden, dim, std=dim**-0.5, group=mp, dim=split, **make)
        up_bias = zero_parameter(*halves, hidden, group=mp, dim=split, **make) if config.bias else None
        self.register_parameter("up_bias", up_bias)
        std = hidden**-0.5 * (2 * config.layers) ** -0.5
        self.down_weight = normal_parameter(dim, hidden, std=std, group=mp, dim=1, **make)
        self.register_parameter("down_bias", zero_parameter(dim, **make) if config.bias else None)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> Tensor:
        """Some samples, [B, P, M] -> [B, P, M], of which this rank has P positions each; collective over the MP group.

        Rows stay in the order in which they come together, rank after rank: nothing here looks at their neighbours.
        """
        mp, counts = self.topology.mp, split.rows(len(x_BPM))
        x_TM = gather_rows(x_BPM.flatten(0, 1), mp, counts, self.recorder)
        bias = None if self.up_bias is None else self.up_bias.flatten()
        up_TH = F.linear(x_TM, self.up_weight.flatten(0, -2), bias).unflatten(1, self.up_weight.shape[:-1])
        y_TM = F.linear(define_activation(self.activation, up_TH), self.down_weight)
        y_BPM = reduce_scatter_rows(y_TM, mp, counts, self.recorder).view(x_BPM.shape)
        return y_BPM if self.down_bias is None else y_BPM + self.down_bias
