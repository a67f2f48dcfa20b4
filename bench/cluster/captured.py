"""A model in plain PyTorch: eager, captured, and with its all-to-alls overlapped by `fusedmoe.graph`.

Blocks of attention and top-1 experts that exchange rows with PyTorch's functional collectives. A step is forward and
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from bench.cluster.setting import Setting
from bench.cluster.turns import beside, in_turns, row, tell
from fusedmoe.comm.topology import Topology
from fusedmoe.graph import GraphBackend

_HEADS = 4


class Experts(nn.Module):
    """E experts over all ranks, with S/E slots each for the tokens of a rank."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.count, self.ranks, self.capacity = setting.E, setting.ranks, setting.S // setting.E
        own = setting.E // setting.ranks
        self.gate = nn.Linear(setting.M, setting.E, bias=False)
        self.w1_eMH = nn.Parameter(torch.randn(own, setting.M, setting.H) / setting.M**0.5)
        self.w2_eHM = nn.Parameter(torch.randn(own, setting.H, setting.M) / setting.H**0.5)

    def forward(self, x_SM: Tensor) -> Tensor:
        score_SE = self.gate(x_SM).softmax(-1)
        expert_S = torch.arange(len(x_SM)) % self.count  # even loads, independent of the gate
        chosen_SE = F.one_hot(expert_S, self.count)
        place_S = (chosen_SE.cumsum(0) * chosen_SE).sum(-1) - 1
        slot_SC = F.one_hot(place_S.clamp(max=self.capacity - 1), self.capacity) * (place_S < self.capacity)[:, None]
        send_SEC = (chosen_SE[:, :, None] * slot_SC[:, None, :]).to(x_SM.dtype)
        rows_ECM = _across(torch.einsum("sec,sm->ecm", send_SEC, x_SM))
        rows_eRM = rows_ECM.reshape(self.ranks, -1, self.capacity, x_SM.shape[1]).transpose(0, 1).flatten(1, 2)
        out_eRM = torch.bmm(F.gelu(torch.bmm(rows_eRM, self.w1_eMH)), self.w2_eHM)
        out_ECM = _across(out_eRM.unflatten(1, (self.ranks, self.capacity)).transpose(0, 1).flatten(0, 1))
        return torch.einsum("sec,ecm->sm", send_SEC * score_SE[:, :, None], out_ECM)


def _across(rows_ECM: Tensor) -> Tensor:
    return all_to_all_single(rows_ECM, None, None, dist.group.WORLD)


class Block(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        M = setting.M
        self.norm, self.experts_norm = nn.LayerNorm(M), nn.LayerNorm(M)
        self.qkv, self.out, self.experts = nn.Linear(M, 3 * M), nn.Linear(M, M), Experts(setting)

    def forward(self, x_BLM: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for one in self.qkv(self.norm(x_BLM)).chunk(3, dim=-1)
        )
        mixed_BLM = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BLM = x_BLM + self.out(mixed_BLM)
        return x_BLM + self.experts(self.experts_norm(x_BLM).flatten(0, 1)).view_as(x_BLM)


def make_step(setting: Setting, backend: Any) -> tuple[Callable[[], Tensor], nn.Module]:
    """Return a step, which returns the model's output, and the model. `backend`: of `torch.compile`; None: eager."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(setting) for _ in range(setting.layers)))
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x_BLM = torch.randn(setting.S // setting.sequence, setting.sequence, setting.M)
    dy_BLM = torch.randn_like(x_BLM)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        y_BLM: Tensor = call(x_BLM)
        y_BLM.backward(dy_BLM)
        return y_BLM.detach()

    return step, model


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time the eager model ("off"), capture without a plan, overlapped weight gradients ("chunks=1"), and other plans.

    The other plans split along the capacity, within the experts or beyond them. Collective.

    Raises:
        AssertionError: results or gradients differ.
    """
    backends: dict[str, Any] = {
        "off": None,
        "captured": "aot_eager",
        "chunks=1": GraphBackend(chunks=1),
        "own_places=False": GraphBackend(own_places=False),
        "own_places=True": GraphBackend(own_places=True),
    }
    steps, wanted = {}, None
    for name, backend in backends.items():
        tell(topology, f"planning {name}")
        torch._dynamo.reset()
        steps[name], model = make_step(setting, backend)
        found = [steps[name](), *(parameter.grad for parameter in model.parameters())]
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            assert one is not None and other is not None
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    rows = {name: row(seconds) for name, seconds in in_turns(topology, steps, rounds).items()}
    for name, backend in backends.items():
        if isinstance(backend, GraphBackend):
            # Resetting the next backend forces a new capture.
            passes = {report.phase: report for report in backend.reports}.values()
            predicted_s = sum(report.seconds for report in passes)
            rows[name] |= {"predicted_s": predicted_s, "error": predicted_s / rows[name]["median_s"] - 1.0}
            rows[name]["reports"] = [str(report) for report in passes]
    return {"rows": beside(rows)}
