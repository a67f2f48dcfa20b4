"""What computes in a layer: really, on one thread, or emulated by a wait of the modelled length."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from bench.cluster.setting import Setting

#: What an emulated part takes to start.
START_S = 0.3e-3
_SEQUENCE = 256
# Rows of a product, whatever the chunks: how they are split shall change what travels when, not what a product takes.
_BLOCK = 128


class Computation(Protocol):
    """The dense part and the experts of all layers, one part of a pass at a time.

    Rows of an expert lie by (capacity, peer): a chunk is a slice, whatever the number of chunks of either pass.
    """

    gradient_bytes: int

    def attention(self, layer: int, x_SM: Tensor) -> Tensor: ...

    def attention_backward(self, layer: int, dy_SM: Tensor) -> tuple[Tensor, Tensor | None]:
        """dx and the gradient of all weights in one row; None where there are none."""
        ...

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor: ...

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice) -> Tensor: ...


class Computed:
    """Attention in sequences of 256 tokens, and two-layer experts, in float32."""

    def __init__(self, setting: Setting) -> None:
        M, H, E, L = setting.M, setting.H, setting.E, setting.layers
        e, rows = E // 2, setting.S // E * setting.ranks
        self._M = M
        self._projections = [[_weight(M, M).requires_grad_() for _ in range(4)] for _ in range(L)]
        self._graph: list[tuple[Tensor, Tensor] | None] = [None] * L
        self._w1, self._w2 = ([[_weight(*shape) for _ in range(e)] for _ in range(L)] for shape in ((H, M), (M, H)))
        self._x, self._h = (torch.zeros(L, e, rows, width) for width in (M, H))
        self.dw1, self.dw2 = torch.zeros(L, e, H, M), torch.zeros(L, e, M, H)
        self.gradient_bytes = 4 * 4 * M * M

    def attention(self, layer: int, x_SM: Tensor) -> Tensor:
        with torch.enable_grad():
            x_SM = x_SM.detach().requires_grad_()
            x_BLM = x_SM.view(-1, _SEQUENCE, self._M)
            q, k, v = (x_BLM @ w for w in self._projections[layer][:3])
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v) @ self._projections[layer][3]
            y_SM = x_SM + mixed.view_as(x_SM)
        self._graph[layer] = x_SM, y_SM
        return y_SM.detach()

    def attention_backward(self, layer: int, dy_SM: Tensor) -> tuple[Tensor, Tensor | None]:
        graph = self._graph[layer]
        assert graph is not None
        x_SM, y_SM = graph
        dx_SM, *dweights = torch.autograd.grad(y_SM, [x_SM, *self._projections[layer]], dy_SM)
        self._graph[layer] = None
        self.dw1[layer] = 0  # the next step's begin anew
        self.dw2[layer] = 0
        return dx_SM, torch.cat([dweight.view(-1) for dweight in dweights])

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor:
        x_eCPM = x_PeCM.permute(1, 2, 0, 3)
        out = torch.empty(x_eCPM.shape)
        rows = _rows(chunk, x_PeCM.shape[0])
        for e in range(len(out)):
            x = self._x[layer, e, rows]
            x.view(x_eCPM[e].shape).copy_(x_eCPM[e])
            blocks = (x.split(_BLOCK), self._h[layer, e, rows].split(_BLOCK), out[e].view(x.shape).split(_BLOCK))
            for x_b, h_b, out_b in zip(*blocks, strict=True):
                torch.mm(x_b, self._w1[layer][e].t(), out=h_b)
                torch.mm(h_b.relu(), self._w2[layer][e].t(), out=out_b)
        return out.permute(2, 0, 1, 3).contiguous()

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice) -> Tensor:
        dy_eCPM = dy_PeCM.permute(1, 2, 0, 3).contiguous()
        out = torch.empty_like(dy_eCPM)
        rows = _rows(chunk, dy_PeCM.shape[0])
        for e in range(len(out)):
            x, h = self._x[layer, e, rows], self._h[layer, e, rows]
            dy, dx = dy_eCPM[e].view(x.shape), out[e].view(x.shape)
            for x_b, h_b, dy_b, dx_b in zip(*(rows.split(_BLOCK) for rows in (x, h, dy, dx)), strict=True):
                self.dw2[layer, e].addmm_(dy_b.t(), h_b.relu())
                dh_b = (dy_b @ self._w2[layer][e]).mul_(h_b > 0)
                self.dw1[layer, e].addmm_(dh_b.t(), x_b)
                torch.mm(dh_b, self._w1[layer][e], out=dx_b)
        return out.permute(2, 0, 1, 3).contiguous()


class Emulated:
    """Waits as long as an accelerator would compute. Rows go through as they are."""

    def __init__(self, setting: Setting) -> None:
        assert setting.emulated_flops is not None
        self._capacity = setting.S // setting.E
        self._expert_s = setting.expert_flop / setting.emulated_flops
        self._attention_s = setting.attention_flop / setting.emulated_flops
        self.gradient_bytes = setting.gradient_bytes

    def attention(self, layer: int, x_SM: Tensor) -> Tensor:
        time.sleep(START_S + self._attention_s)
        return x_SM

    def attention_backward(self, layer: int, dy_SM: Tensor) -> tuple[Tensor, Tensor | None]:
        time.sleep(2 * (START_S + self._attention_s))
        return dy_SM, None

    def experts(self, layer: int, x_PeCM: Tensor, chunk: slice) -> Tensor:
        time.sleep(START_S + self._expert_s * (chunk.stop - chunk.start) / self._capacity)
        return x_PeCM

    def experts_backward(self, layer: int, dy_PeCM: Tensor, chunk: slice) -> Tensor:
        time.sleep(2 * (START_S + self._expert_s * (chunk.stop - chunk.start) / self._capacity))
        return dy_PeCM


def computation(setting: Setting) -> Computation:
    return Computed(setting) if setting.emulated_flops is None else Emulated(setting)


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def _rows(chunk: slice, peers: int) -> slice:
    return slice(chunk.start * peers, chunk.stop * peers)
