"""A training step of a stack of layers under a plan: dense part and experts, both passes, and gradient all-reduces.

Each layer is y = attention(x), z = y + experts(y), with every rank's rows distributed evenly over all experts. The plan
is executed on real rows over real links; only computation may be emulated, by a wait of the modelled length.

Rows are ordered by (capacity, expert), so a chunk with equally many rows per expert is also a contiguous range of
attention's rows. It can therefore be a micro-batch through all layers, and each pass can have its own chunks.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bench.cluster.setting import Setting
from fusedmoe.comm.all_to_all import DirectAllToAll
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.exchange import RowExchange, exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.runtime.execute import execute
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step_costs import gradient_ranges
from fusedmoe.schedule.task import PIPELINE, WEIGHT_GRADIENTS, Task

#: Launch time of an emulated part.
START_S = 0.3e-3
# Rows per product, independent of chunks: splitting must change the communication's timing, but not the product's time.
_BLOCK = 128

_DENSE = ("attention", "attention-weight-gradient")
_KINDS = ("attention", *PIPELINE, *WEIGHT_GRADIENTS.values(), "gradient-all-reduce")


class Computation(Protocol):
    """Dense part and experts of all layers, by chunk of a pass.

    An expert's rows are ordered by (capacity, peer), so a chunk is a slice for any number of chunks. Weight gradients
    are computed with the input's gradients, or by a separate call.
    """

    gradient_bytes: int

    def attention(self, layer: int, x_SM: Tensor, chunk: slice) -> Tensor: ...

    def attention_backward(self, layer: int, dy_SM: Tensor, chunk: slice, gradient: Tensor | None) -> Tensor:
        """Return the gradient of a chunk's rows; add the weight gradients to the flat `gradient`, if given."""
        ...

    def attention_weights(self, layer: int, chunk: slice, gradient: Tensor) -> None: ...

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor: ...

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice, weights: bool) -> Tensor: ...

    def expert_weights(self, layer: int, chunk: slice) -> None: ...

    def expert_gradients(self) -> dict[str, Tensor]:
        """Return the experts' gradients of the last step by name; the next step overwrites them."""
        ...


class Computed:
    """Attention within samples, and two-layer experts, in float32."""

    def __init__(self, setting: Setting) -> None:
        M, H, E, L, S = setting.M, setting.H, setting.E, setting.layers, setting.S
        e, rows = E // 2, S // E * setting.ranks
        self._M, self._sequence, self._peers = M, setting.sequence, setting.ranks
        self._projections = [[_weight(M, M) for _ in range(4)] for _ in range(L)]
        # Per layer, saved for backward and weight gradients: x, q, k, v, mixed values; dq, dk, dv, dy.
        self._kept_SM, self._later_SM = torch.zeros(L, 5, S, M), torch.zeros(L, 4, S, M)
        self._w1, self._w2 = ([[_weight(*shape) for _ in range(e)] for _ in range(L)] for shape in ((H, M), (M, H)))
        self._x, self._h = (torch.zeros(L, e, rows, width) for width in (M, H))
        # For separate weight-gradient tasks, used by blocks only.
        self._dy, self._dh = (torch.zeros(L, e, rows if setting.blocks else 0, width) for width in (M, H))
        self._dw1, self._dw2 = torch.zeros(L, e, H, M), torch.zeros(L, e, M, H)
        # Attention's gradient, zero-padded.
        self.gradient_bytes = max(4 * 4 * M * M, setting.gradient_bytes)

    def attention(self, layer: int, x_SM: Tensor, chunk: slice) -> Tensor:
        if chunk.start == 0:  # first computation of this layer in the step
            self._dw1[layer] = 0
            self._dw2[layer] = 0
        *weights, out = self._projections[layer]
        q, k, v = (x_SM @ w for w in weights)
        mixed = self._mix(q, k, v).reshape(x_SM.shape)
        for kept_SM, part in zip(self._kept_SM[layer], (x_SM, q, k, v, mixed), strict=True):
            kept_SM[chunk] = part
        return x_SM + mixed @ out

    def attention_backward(self, layer: int, dy_SM: Tensor, chunk: slice, gradient: Tensor | None) -> Tensor:
        *weights, out = self._projections[layer]
        with torch.enable_grad():
            qkv = [kept_SM[chunk].requires_grad_() for kept_SM in self._kept_SM[layer, 1:4]]
            mixed = self._mix(*qkv)
        later = (*torch.autograd.grad(mixed, qkv, (dy_SM @ out.t()).view(mixed.shape)), dy_SM)
        for later_SM, part in zip(self._later_SM[layer], later, strict=True):
            later_SM[chunk] = part
        if gradient is not None:
            self.attention_weights(layer, chunk, gradient)
        return dy_SM + sum(part @ w.t() for part, w in zip(later, weights, strict=False))

    def attention_weights(self, layer: int, chunk: slice, gradient: Tensor) -> None:
        x, *_, mixed = self._kept_SM[layer, :, chunk]
        own = gradient[: 4 * self._M**2].view(4, self._M, self._M)
        for dw, rows, part in zip(own, (x, x, x, mixed), self._later_SM[layer, :, chunk], strict=True):
            dw.addmm_(rows.t(), part)

    def _mix(self, *qkv_SM: Tensor) -> Tensor:
        q, k, v = (part.view(len(part) // self._sequence, self._sequence, self._M) for part in qkv_SM)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor:
        x_eCPM = x_PeCM.permute(1, 2, 0, 3)
        out = torch.empty(x_eCPM.shape)
        rows = self._rows(chunk)
        for e in range(len(out)):
            x = self._x[layer, e, rows]
            x.view(x_eCPM[e].shape).copy_(x_eCPM[e])
            blocks = (x.split(_BLOCK), self._h[layer, e, rows].split(_BLOCK), out[e].view(x.shape).split(_BLOCK))
            for x_b, h_b, out_b in zip(*blocks, strict=True):
                torch.mm(x_b, self._w1[layer][e].t(), out=h_b)
                torch.mm(h_b.relu(), self._w2[layer][e].t(), out=out_b)
        return out.permute(2, 0, 1, 3).contiguous()

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice, weights: bool) -> Tensor:
        dy_eCPM = dy_PeCM.permute(1, 2, 0, 3).contiguous()
        out = torch.empty_like(dy_eCPM)
        rows = self._rows(chunk)
        for e in range(len(out)):
            x, h = self._x[layer, e, rows], self._h[layer, e, rows]
            dy, dx = dy_eCPM[e].view(x.shape), out[e].view(x.shape)
            for start in range(0, len(x), _BLOCK):
                of = slice(start, start + _BLOCK)
                dh = (dy[of] @ self._w2[layer][e]).mul_(h[of] > 0)
                torch.mm(dh, self._w1[layer][e], out=dx[of])
                if weights:
                    self._add_weights(layer, e, x[of], h[of], dy[of], dh)
                else:
                    self._dh[layer, e, rows][of] = dh
            if not weights:
                self._dy[layer, e, rows] = dy
        return out.permute(2, 0, 1, 3).contiguous()

    def expert_weights(self, layer: int, chunk: slice) -> None:
        rows = self._rows(chunk)
        for e in range(len(self._w1[layer])):
            kept = (of[layer, e, rows].split(_BLOCK) for of in (self._x, self._h, self._dy, self._dh))
            for blocks in zip(*kept, strict=True):
                self._add_weights(layer, e, *blocks)

    def expert_gradients(self) -> dict[str, Tensor]:
        return {"dw1": self._dw1, "dw2": self._dw2}

    def _add_weights(self, layer: int, e: int, x: Tensor, h: Tensor, dy: Tensor, dh: Tensor) -> None:
        self._dw2[layer, e].addmm_(dy.t(), h.relu())
        self._dw1[layer, e].addmm_(dh.t(), x)

    def _rows(self, chunk: slice) -> slice:
        return slice(chunk.start * self._peers, chunk.stop * self._peers)


class Emulated:
    """Waits as long as an accelerator would compute; weight gradients take as long as input gradients.

    Rows are returned unchanged. Some of them represent weight gradients, to verify that their inputs were available.
    """

    def __init__(self, setting: Setting) -> None:
        assert setting.emulated_flops is not None
        self._S, self._capacity = setting.S, setting.S // setting.E
        self._expert_s = setting.expert_flop / setting.emulated_flops
        self._attention_s = setting.attention_flop / setting.emulated_flops
        self._later_LS = torch.zeros(setting.layers, setting.S)
        self.gradient_bytes = setting.gradient_bytes

    def attention(self, layer: int, x_SM: Tensor, chunk: slice) -> Tensor:
        _wait(self._attention_s * len(x_SM) / self._S)
        return x_SM

    def attention_backward(self, layer: int, dy_SM: Tensor, chunk: slice, gradient: Tensor | None) -> Tensor:
        self._later_LS[layer, chunk] = dy_SM[:, 0]
        _wait(self._attention_s * len(dy_SM) / self._S)
        if gradient is not None:
            self.attention_weights(layer, chunk, gradient)
        return dy_SM

    def attention_weights(self, layer: int, chunk: slice, gradient: Tensor) -> None:
        _wait(self._attention_s * (chunk.stop - chunk.start) / self._S)
        gradient[chunk] += self._later_LS[layer, chunk]

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor:
        _wait(self._share_s(chunk))
        return x_PeCM

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice, weights: bool) -> Tensor:
        _wait(self._share_s(chunk))
        if weights:
            _wait(self._share_s(chunk))
        return dy_PeCM

    def expert_weights(self, layer: int, chunk: slice) -> None:
        _wait(self._share_s(chunk))

    def expert_gradients(self) -> dict[str, Tensor]:
        return {}

    def _share_s(self, chunk: slice) -> float:
        return self._expert_s * (chunk.stop - chunk.start) / self._capacity


def computation(setting: Setting) -> Computation:
    return Computed(setting) if setting.emulated_flops is None else Emulated(setting)


def _wait(seconds: float) -> None:
    time.sleep(START_S + seconds)


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


class Step:
    """Allocates communication buffers once, and runs steps. Construction is collective."""

    def __init__(self, setting: Setting, topology: Topology, computation: Computation) -> None:
        self._setting, self._topology, self._computation = setting, topology, computation
        self.gradient_bytes = computation.gradient_bytes
        self._capacity = setting.S // setting.E
        counts_E = torch.full((setting.E,), self._capacity)
        self._exchange = exchange_metadata(
            DirectAllToAll(topology.ep), topology.esp, counts_E, RowForm(torch.float32, setting.M, 1, None)
        )
        self._parts: dict[int, RowExchange] = {}
        generator = torch.Generator().manual_seed(topology.rank)
        self._x_SM, self._dz_SM = torch.randn(2, setting.S, setting.M, generator=generator)

    def run(self, plan: Plan, recorder: Recorder | None = None) -> dict[str, Tensor]:
        """Run one step and return its results, which do not depend on the plan. The next step may overwrite them."""
        state = _State(self, plan)
        bodies = {kind: getattr(state, kind.replace("-", "_")) for kind in _KINDS}
        execute(plan, bodies, stop=partial(self._topology.stop, "a step"), recorder=recorder)
        found = {"z": state.z_SM, "dx": state.dx_SM, "gradient": state.gradient}
        return found | self._computation.expert_gradients()

    def chunk(self, number: int, degree: int) -> slice:
        """Return the slice of each expert's rows per rank in chunk `number` of `degree`."""
        units = self._capacity // self._setting.unit
        start, stop = (units * n // degree for n in (number, number + 1))
        return slice(start * self._setting.unit, stop * self._setting.unit)

    def part(self, rows: int) -> RowExchange:
        """Return the communication of `rows` rows from each rank to each expert."""
        if rows not in self._parts:
            of = self._exchange
            send_PE, recv_QPE = of.sizes.send_PE, of.sizes.recv_QPE
            send_P, recv_QP = np.full_like(send_PE, rows).sum(1), np.full_like(recv_QPE, rows).sum(2)
            self._parts[rows] = of.with_row_counts(send_P, recv_QP)
        return self._parts[rows]


class _State:
    """Tensors passed between the tasks of a run."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self._step, self._setting, self._computation = step, step._setting, step._computation
        layers = self._setting.layers
        self._buckets = gradient_ranges(plan, (self._computation.gradient_bytes,) * layers)
        self._degrees = plan.degrees
        self._dense_degrees: dict[tuple[str | None, int | None], int] = {}  # a block's dense part has its own chunks
        for task in plan:
            if task.kind in _DENSE and task.chunk is not None:
                at = task.phase, task.layer
                self._dense_degrees[at] = max(self._dense_degrees.get(at, 0), task.chunk + 1)
        self._later = {(task.kind, task.layer) for task in plan.compute if task.kind in WEIGHT_GRADIENTS.values()}
        self._at: dict[tuple[str | None, int | None, int | None], Tensor] = {}
        self.gradient = torch.zeros(layers * self._computation.gradient_bytes // 4)
        # Inputs of the experts and results, forward and backward; in between, the last layer's result.
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
        bucket = self._buckets[task]
        all_reduce(self._step._topology.dp, self.gradient[bucket.start // 4 : bucket.stop // 4])

    def _gradient(self, layer: int) -> Tensor:
        numbers = self._computation.gradient_bytes // 4
        place = (self._setting.layers - 1 - layer) * numbers
        return self.gradient[place : place + numbers]

    def _part(self, task: Task) -> RowExchange:
        chunk = self._chunk(task)
        return self._step.part(chunk.stop - chunk.start)

    def _chunk(self, task: Task) -> slice:
        if task.chunk is None:
            return slice(0, self._step._capacity)
        degrees = self._dense_degrees if task.kind in _DENSE else self._degrees
        return self._step.chunk(task.chunk, degrees[task.phase, task.layer])

    def _rows(self, task: Task) -> slice:
        chunk = self._chunk(task)
        return slice(chunk.start * self._setting.E, chunk.stop * self._setting.E)


def _layer(task: Task) -> int:
    assert task.layer is not None
    return task.layer


def _of(task: Task) -> tuple[str | None, int | None, int | None]:
    return task.phase, task.layer, task.chunk
