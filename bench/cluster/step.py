"""A training step of a stack of layers by one plan: dense part and experts, both passes, and gradient all-reduces.

Each layer is y = attention(x), z = y + experts(y): every rank's rows go in equal shares to all experts. What the plan
orders is what is done, on real rows over real links; only what computes may be emulated (`parts.py`).

Rows lie by (capacity, expert): a chunk, as many rows for each expert, is also a run of the rows that attention makes.
So it can be a micro-batch that goes from layer to layer, and every pass can have chunks of its own.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.cluster.parts import Computation
from bench.cluster.setting import Setting
from fusedmoe.comm.all_to_all import Direct
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.exchange import Exchange, Part
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import gradient_ranges
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task

_KINDS = ("attention", *PIPELINE, *WEIGHT_GRADIENTS.values(), "gradient-all-reduce")


class Step:
    """Makes the moves once, and runs as many steps as are wanted. Making one is collective."""

    def __init__(self, setting: Setting, topology: Topology, computation: Computation) -> None:
        self._setting, self._topology, self._computation = setting, topology, computation
        self.gradient_bytes = computation.gradient_bytes
        self._capacity = setting.S // setting.E
        counts_E = torch.full((setting.E,), self._capacity)
        self._exchange = Exchange(Direct(topology.ep), topology.esp, counts_E, torch.float32)
        self._parts: dict[int, Part] = {}
        generator = torch.Generator().manual_seed(topology.rank)
        self._x_SM, self._dz_SM = torch.randn(2, setting.S, setting.M, generator=generator)

    def run(self, plan: Plan, recorder: Recorder | None = None) -> dict[str, Tensor]:
        """One step; what comes out of it, the same whatever the plan. The next step may overwrite it."""
        state = _State(self, plan)
        bodies = {kind: getattr(state, kind.replace("-", "_")) for kind in _KINDS}
        execute(plan, bodies, stop=partial(self._topology.stop, "a step"), recorder=recorder)
        found = {"z": state.z_SM, "dx": state.dx_SM, "gradient": state.gradient}
        return found | self._computation.expert_gradients()

    def chunk(self, number: int, degree: int) -> slice:
        """Of each expert's rows from a rank, those in one of `degree` chunks."""
        units = self._capacity // self._setting.unit
        start, stop = (units * n // degree for n in (number, number + 1))
        return slice(start * self._setting.unit, stop * self._setting.unit)

    def part(self, rows: int) -> Part:
        """The moves of so many rows from each rank to each expert."""
        if rows not in self._parts:
            of = self._exchange
            self._parts[rows] = of.part(np.full_like(of.send_PE, rows), np.full_like(of.come_QPE, rows))
        return self._parts[rows]


class _State:
    """What the tasks of one run hand each other."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self._step, self._setting, self._computation = step, step._setting, step._computation
        layers = self._setting.layers
        self._pieces = gradient_ranges(plan, (self._computation.gradient_bytes,) * layers)
        self._degrees = plan.degrees
        self._later = {(task.kind, task.layer) for task in plan.compute if task.kind in WEIGHT_GRADIENTS.values()}
        self._at: dict[tuple[str | None, int | None, int | None], Tensor] = {}
        self.gradient = torch.zeros(layers * self._computation.gradient_bytes // 4)
        # What goes to the experts, forward and backward, and what comes back; in between the result of the last layer.
        self._y_SM, self.dx_SM = step._x_SM.clone(), step._dz_SM.clone()
        self._out_SM, self.z_SM = torch.empty_like(self._y_SM), torch.empty_like(self._y_SM)

    def attention(self, task: Task) -> None:
        rows, layer = self._rows(task), _layer(task)
        if task.phase == "forward":
            x_SM = self._y_SM[rows] if layer == 0 else self._y_SM[rows] + self._out_SM[rows]
            self._y_SM[rows] = self._computation.attention(layer, x_SM, rows)
        else:
            dy_SM = self.dx_SM[rows] + self._out_SM[rows]
            gradient = None if ("attention-weight-gradient", layer) in self._later else self._gradient(layer)
            self.dx_SM[rows] = self._computation.attention_backward(layer, dy_SM, rows, gradient)

    def attention_weight_gradient(self, task: Task) -> None:
        layer = _layer(task)
        self._computation.attention_weights(layer, self._rows(task), self._gradient(layer))

    def dispatch(self, task: Task) -> None:
        rows = self._rows(task)
        if task.phase == "backward" and task.layer == self._setting.layers - 1:
            self.z_SM[rows] = self._y_SM[rows] + self._out_SM[rows]
        rows_SM = self._y_SM if task.phase == "forward" else self.dx_SM
        rows_CEM = rows_SM[rows].view(-1, self._setting.E, self._setting.M)
        self._at[_of(task)] = self._part(task).dispatch(rows_CEM.transpose(0, 1).reshape(-1, self._setting.M))

    def all_gather(self, task: Task) -> None:
        self._at[_of(task)] = self._part(task).all_gather(self._at[_of(task)])

    def expert(self, task: Task) -> None:
        chunk, layer = self._chunk(task), _layer(task)
        local = self._setting.E // self._step._topology.ep.size
        peers = self._setting.ranks
        rows_PeCM = self._at[_of(task)].view(peers, local, chunk.stop - chunk.start, self._setting.M)
        if task.phase == "forward":
            out_PeCM = self._computation.experts(layer, rows_PeCM, chunk)
        else:
            weights = ("weight-gradient", layer) not in self._later
            out_PeCM = self._computation.experts_backward(layer, rows_PeCM, chunk, weights)
        self._at[_of(task)] = out_PeCM.view(-1, self._setting.M)

    def weight_gradient(self, task: Task) -> None:
        self._computation.expert_weights(_layer(task), self._chunk(task))

    def reduce_scatter(self, task: Task) -> None:
        self._at[_of(task)] = self._part(task).reduce_scatter(self._at[_of(task)])

    def combine(self, task: Task) -> None:
        rows_ECM = self._part(task).combine(self._at.pop(_of(task))).view(self._setting.E, -1, self._setting.M)
        out_CEM = self._out_SM[self._rows(task)].view(-1, self._setting.E, self._setting.M)
        out_CEM.copy_(rows_ECM.transpose(0, 1))

    def gradient_all_reduce(self, task: Task) -> None:
        piece = self._pieces[task]
        all_reduce(self._step._topology.dp, self.gradient[piece.start // 4 : piece.stop // 4])

    def _gradient(self, layer: int) -> Tensor:
        """A layer's place in the stream, which begins with the last layer."""
        numbers = self._computation.gradient_bytes // 4
        place = (self._setting.layers - 1 - layer) * numbers
        return self.gradient[place : place + numbers]

    def _part(self, task: Task) -> Part:
        chunk = self._chunk(task)
        return self._step.part(chunk.stop - chunk.start)

    def _chunk(self, task: Task) -> slice:
        if task.chunk is None:
            return slice(0, self._step._capacity)
        return self._step.chunk(task.chunk, self._degrees[task.phase, task.layer])

    def _rows(self, task: Task) -> slice:
        chunk = self._chunk(task)
        return slice(chunk.start * self._setting.E, chunk.stop * self._setting.E)


def _layer(task: Task) -> int:
    assert task.layer is not None
    return task.layer


def _of(task: Task) -> tuple[str | None, int | None, int | None]:
    return task.phase, task.layer, task.chunk
