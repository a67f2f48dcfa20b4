"""A training step of a stack of layers by one plan: dense part and experts, both passes, and gradient all-reduces.

Each layer is y = attention(x), z = y + experts(y): every rank's rows go in equal shares to all experts. What the plan
orders is what is done, on real rows over real links; only what computes may be emulated (`parts.py`).
"""

from __future__ import annotations

from functools import partial

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
from fusedmoe.schedule.gradient import gradient_ranges
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import Task


class Step:
    """Makes the moves once, and runs as many steps as are wanted. Making one is collective."""

    def __init__(self, setting: Setting, topology: Topology, computation: Computation) -> None:
        self._setting, self._topology, self._computation = setting, topology, computation
        self.gradient_bytes = computation.gradient_bytes
        self._capacity = setting.S // setting.E
        counts_E = torch.full((setting.E,), self._capacity)
        self._exchange = Exchange(Direct(topology.ep), topology.esp, counts_E, torch.float32)
        self._parts: dict[int, list[Part]] = {}
        generator = torch.Generator().manual_seed(topology.rank)
        self._x_SM, self._dz_SM = torch.randn(2, setting.S, setting.M, generator=generator)

    def run(self, plan: Plan, recorder: Recorder | None = None) -> dict[str, Tensor]:
        """One step; what comes out of it, the same whatever the plan."""
        state = _State(self, plan)
        kinds = ("attention", "dispatch", "all-gather", "expert", "reduce-scatter", "combine", "gradient-all-reduce")
        bodies = {kind: getattr(state, kind.replace("-", "_")) for kind in kinds}
        execute(plan, bodies, stop=partial(self._topology.stop, "a step"), recorder=recorder)
        return {"z": state.z_SM, "dx": state.dx_SM, "gradient": state.gradient}

    def parts(self, degree: int) -> list[Part]:
        if degree not in self._parts:
            self._parts[degree] = self._exchange.parts(degree)
        return self._parts[degree]


class _State:
    """What the tasks of one run hand each other."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self._step, self._setting, self._computation = step, step._setting, step._computation
        layers, total = self._setting.layers, self._setting.layers * self._computation.gradient_bytes
        self._pieces = gradient_ranges(plan, (self._computation.gradient_bytes,) * layers)
        self._degrees = plan.degrees
        self._out_ECM = torch.empty(self._setting.E, step._capacity, self._setting.M)
        self._at: dict[int, Tensor] = {}
        self.gradient = torch.zeros(total // 4)
        # What goes to the experts, forward and backward, and in between the result of the last layer.
        self._y_SM, self.dx_SM = step._x_SM, step._dz_SM
        self.z_SM: Tensor

    def attention(self, task: Task) -> None:
        assert task.layer is not None
        moe_SM = self._out_ECM.view(self._setting.S, -1)
        if task.phase == "forward":
            x_SM = self._y_SM if task.layer == 0 else self._y_SM + moe_SM
            self._y_SM = self._computation.attention(task.layer, x_SM)
            return
        self.dx_SM, gradient = self._computation.attention_backward(task.layer, self.dx_SM + moe_SM)
        if gradient is not None:
            place = (self._setting.layers - 1 - task.layer) * len(gradient)
            self.gradient[place : place + len(gradient)] = gradient

    def dispatch(self, task: Task) -> None:
        if task.phase == "backward" and task.layer == self._setting.layers - 1 and (task.chunk or 0) == 0:
            self.z_SM = self._y_SM + self._out_ECM.view(self._setting.S, -1)
        rows_SM = self._y_SM if task.phase == "forward" else self.dx_SM
        rows_ECM = rows_SM.view(self._out_ECM.shape)[:, self._slots(task)]
        self._at[task.chunk or 0] = self._part(task).dispatch(rows_ECM.reshape(-1, self._setting.M))

    def all_gather(self, task: Task) -> None:
        self._at[task.chunk or 0] = self._part(task).all_gather(self._at[task.chunk or 0])

    def expert(self, task: Task) -> None:
        assert task.layer is not None
        slots = self._slots(task)
        local = self._setting.E // self._step._topology.ep.size
        rows_PeCM = self._at[task.chunk or 0].view(-1, local, slots.stop - slots.start, self._setting.M)
        compute = self._computation.experts if task.phase == "forward" else self._computation.experts_backward
        self._at[task.chunk or 0] = compute(task.layer, rows_PeCM, slots).view(-1, self._setting.M)

    def reduce_scatter(self, task: Task) -> None:
        self._at[task.chunk or 0] = self._part(task).reduce_scatter(self._at[task.chunk or 0])

    def combine(self, task: Task) -> None:
        slots = self._slots(task)
        rows = self._part(task).combine(self._at.pop(task.chunk or 0))
        self._out_ECM[:, slots] = rows.view(self._setting.E, -1, self._setting.M)

    def gradient_all_reduce(self, task: Task) -> None:
        piece = self._pieces[task]
        all_reduce(self._step._topology.dp, self.gradient[piece.start // 4 : piece.stop // 4])

    def _part(self, task: Task) -> Part:
        return self._step.parts(self._degrees[task.phase, task.layer])[task.chunk or 0]

    def _slots(self, task: Task) -> slice:
        """Of each expert's rows from a rank, those in this chunk."""
        degree, chunk = self._degrees[task.phase, task.layer], task.chunk or 0
        capacity = self._step._capacity
        return slice(capacity * chunk // degree, capacity * (chunk + 1) // degree)
