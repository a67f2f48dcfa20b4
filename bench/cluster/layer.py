"""The library's own layer in a setting: `MoELayer(schedule=…)`, forward and backward under autograd."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fusedmoe
from bench.cluster.setting import LIMIT, Setting
from bench.cluster.step import START_S
from fusedmoe.comm.topology import Topology
from fusedmoe.kernels.gather_sum import gather_sum, permute
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.expert_networks import Place, RowExperts
from fusedmoe.layers.schedule import Schedule
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.workload import Workload


def make_layer(setting: Setting, topology: Topology, policy: str, costs: CostModel) -> fusedmoe.MoELayer:
    """`policy`: "off", or one that chooses its degrees by `costs`."""
    torch.manual_seed(0)
    experts = fusedmoe.experts.FeedForward(setting.H) if setting.emulated_flops is None else Waiting(setting)
    return fusedmoe.MoELayer(
        setting.M,
        fusedmoe.gates.Random(setting.E, k=2),
        experts,
        topology=topology,
        mp_input="split",
        schedule="off" if policy == "off" else Schedule(policy, costs=costs, limit=LIMIT),
    )


def run(layer: fusedmoe.MoELayer, x_SM: Tensor, dy_SM: Tensor) -> None:
    x_SM.grad = None
    layer.zero_grad(set_to_none=True)
    layer(x_SM).backward(dy_SM)


class Waiting(RowExperts):
    """Experts that hand back their rows after the time that an accelerator would take, for both passes alike."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        assert setting.emulated_flops is not None
        self._setting = setting
        self.row_s = setting.expert_flop / setting.emulated_flops / (setting.S * setting.esp)

    def make(self, model_dim: int, place: Place, seed: int, **_: Any) -> None:
        pass

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        return Wait.apply(rows_NM, START_S + len(rows_NM) * self.row_s)

    def in_chunks(self, x_SM: Tensor) -> WaitingChunks:
        return WaitingChunks(self.row_s)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        of = self._setting
        return Workload(1, rows * esp, of.M, of.H, of.E, k=1, expert="ffn", ep=ep, esp=esp, itemsize=itemsize)


class Wait(torch.autograd.Function):
    """The identity, after so many seconds; its backward takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class WaitingChunks:
    """The same in chunks; see `fusedmoe.engine.chunk_experts.ChunkExperts`."""

    any_degree = True
    parameters: Sequence[Tensor | None] = ()

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def for_backward(self) -> WaitingChunks:
        return self

    def forward(self, x_RM: Tensor, layout: Layout, weight_R: Tensor | None) -> tuple[Tensor, Tensor]:
        time.sleep(START_S + len(x_RM) * self._row_s)
        return gather_sum(permute(x_RM, layout), layout, weight_R), x_RM[:, :0]

    def backward(
        self, dy_RM: Tensor, x_RM: Tensor, kept: Any, layout: Layout, weight_R: Tensor | None, totals: Any
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        time.sleep(2 * (START_S + len(dy_RM) * self._row_s))
        dweight_R = None if weight_R is None else torch.zeros_like(weight_R)
        return gather_sum(permute(dy_RM, layout), layout, weight_R), dweight_R, ()
