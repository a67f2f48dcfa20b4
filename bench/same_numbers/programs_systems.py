"""Programs of the four systems beyond one layer: blocks in micro-batches, placements, captured graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

import fusedmoe
from fusedmoe import experts, gates, training

from .programs_layers import M, auxiliary_loss, batch, costs, step, topology_of
from .record import Record, public


class Attention(nn.Module):
    """Dense part of a block: causal attention over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts_norm = nn.LayerNorm(M, dtype=torch.float64), nn.LayerNorm(M, dtype=torch.float64)
        self.qkv = nn.Linear(M, 3 * M, dtype=torch.float64)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        q_BLM, k_BLM, v_BLM = self.qkv(self.norm(x_BLM)).chunk(3, dim=-1)
        y_BLM = x_BLM + F.scaled_dot_product_attention(q_BLM, k_BLM, v_BLM, is_causal=True)
        return y_BLM, self.experts_norm(y_BLM)


class Positionwise(nn.Module):
    """Dense part without interaction between positions."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(M, M, dtype=torch.float64)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        return x_BLM, self.product(x_BLM).tanh()


class RunningSum(nn.Module):
    """Causal dense part: each position adds the sum of earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(M, M, dtype=torch.float64)

    def forward(self, x_BLM: Tensor, past: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, tuple[Tensor]]:
        own_BLM = self.product(x_BLM).tanh()
        sum_BLM = own_BLM.cumsum(1) + sum(own[0].sum(1, keepdim=True) for own in past)
        return x_BLM + sum_BLM, sum_BLM, (own_BLM,)


def make_blocks(
    topology: fusedmoe.Topology, dense: type[nn.Module] = Attention, count: int = 2, **more: Any
) -> list[tuple[nn.Module, fusedmoe.MoELayer]]:
    torch.manual_seed(5)

    def layer(number: int) -> fusedmoe.MoELayer:
        gate = gates.TopK(experts=8, k=1 + number % 2, capacity_factor=(0.8, None)[number % 2], aux={"balance": 0.1})
        network = experts.SwiGLU(12)
        return fusedmoe.MoELayer(M, gate, network, topology=topology, mp_input="split", dtype=torch.float64, **more)

    return [(dense(), layer(number)) for number in range(count)]


def blocks(
    record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int], along: str, recompute: bool = False
) -> None:
    with topology_of(sizes) as topology:
        for degrees in ((1, 1), (2, 2), (3, 2)):
            parts = make_blocks(topology, Attention if along == "samples" else RunningSum)
            piped = fusedmoe.pipeline(parts, degrees, along=along, recompute=recompute)
            step(record, str(degrees), piped, batch(rank, (4 + rank, 6), torch.float64))


def planned_blocks(record: Record, rank: int, world: int, scratch: Path, policy: str) -> None:
    """Record three steps under a plan of the whole step, with gradient buckets."""
    with topology_of({"ep": 2}, ranks_per_node=1) as topology:
        piped = fusedmoe.pipeline(make_blocks(topology))
        x = batch(rank, (8, 6), torch.float64)
        plan, buckets = training.plan_step(piped, topology, policy, costs(), piped.workload(x))
        optimizer = torch.optim.SGD(piped.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            optimizer.zero_grad()
            x = batch(rank, (8, 6), torch.float64, seed=10 * number)
            loss = piped(x).square().mean() + auxiliary_loss(piped)
            buckets.open()
            loss.backward()
            training.sync_gradients(piped, topology, buckets=buckets)
            record.note(f"{number}: loss", loss)
            record.gradients(piped, f"{number}: ")
            record.note(f"{number}: norm", training.clip_grad_norm(piped, topology, max_norm=1.0))
            optimizer.step()
        record.parameters(piped)


class Skewed(nn.Module):
    """Two layers of dynamic experts with routers biased towards experts of low number."""

    def __init__(self, topology: fusedmoe.Topology, form: str) -> None:
        super().__init__()
        schedule = fusedmoe.Schedule("fsmoe", (2, 2)) if form == "chunks" else "off"
        self.parts = make_blocks(topology, Positionwise, placement="fssdp", schedule=schedule)
        for _, layer in self.parts:
            with torch.no_grad():
                weight = next(layer.gate.parameters())
                weight.copy_(0.3 * torch.randn(weight.shape, dtype=weight.dtype))
                weight[:, 0] += torch.linspace(2.0, -2.0, len(weight), dtype=weight.dtype)
            if form == "adapters":
                experts.add_adapters(layer.experts, 2, alpha=3.0)
                for name, parameter in layer.experts.named_parameters():
                    if name.endswith(".b"):
                        nn.init.normal_(parameter)
        self.whole: Any = fusedmoe.pipeline(self.parts, (2, 3)) if form == "blocks" else None
        self.modules_of_parts = nn.ModuleList(module for part in self.parts for module in part)

    def forward(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            y: Tensor = self.whole(x)
            return y
        for dense, layer in self.parts:
            x, u = dense(x)
            x = x + layer(u)
        return x


def placed(
    record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int], options: Mapping[str, Any],
    form: str = "layers", heap: Any = None,
) -> None:  # fmt: skip
    """Record five optimizer steps with replicas, and evaluation in between."""
    # Rows are expensive enough that planning and replicas pay off for any measured planning time.
    given = {"memory": 2, "overlap": 4, "costs": public("PlacementCosts")(10.0, 8, 100, 200, 1e9, 1e9), **options}
    if heap is not None:
        given["heap"] = heap
    with topology_of(sizes) as topology:
        model = Skewed(topology, form)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        sharded = public("ShardedExperts")(model, optimizer, topology, **given)
        for number in range(5):
            optimizer.zero_grad()
            x = batch(rank, (3 + rank, 5), torch.float64, seed=10 * number)
            x[..., 0] = 1.0 + 0.5 * (number % 2)
            loss = model(x).square().sum() / 50 + auxiliary_loss(model.modules_of_parts)
            loss.backward()
            training.sync_gradients(model, topology)
            record.note(f"{number}: loss", loss)
            record.gradients(model.modules_of_parts, f"{number}: ")
            record.note(f"{number}: norm", training.clip_grad_norm(model, topology, max_norm=1.0))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            record.note("evaluation", model(batch(rank, (2, 5), torch.float64)))
        record.parameters(model.modules_of_parts)
        sharded.close()


class CapturedExperts(nn.Module):
    """Top-1 experts with at most `capacity` tokens of a rank per expert, in plain PyTorch."""

    def __init__(self, count: int = 4, capacity: int = 8) -> None:
        super().__init__()
        self.count, self.ranks, self.capacity = count, dist.get_world_size(), capacity
        self.gate = nn.Linear(M, count, bias=False)
        self.w1_eMH = nn.Parameter(torch.randn(count // self.ranks, M, 2 * M) / M**0.5)
        self.w2_eHM = nn.Parameter(torch.randn(count // self.ranks, 2 * M, M) / M**0.5)

    def forward(self, x_BLM: Tensor) -> Tensor:
        x_SM = x_BLM.flatten(0, 1)
        weight_S, expert_S = self.gate(x_SM).softmax(-1).max(-1)
        chosen_SE = F.one_hot(expert_S, self.count)
        place_S = (chosen_SE.cumsum(0) * chosen_SE).sum(-1) - 1
        slot_SC = F.one_hot(place_S.clamp(max=self.capacity - 1), self.capacity) * (place_S < self.capacity)[:, None]
        send_SEC = (chosen_SE[:, :, None] * slot_SC[:, None, :]).to(x_SM.dtype)
        rows_ECM = all_to_all_single(torch.einsum("sec,sm->ecm", send_SEC, x_SM), None, None, dist.group.WORLD)
        shape = (self.ranks, self.count // self.ranks, self.capacity, -1)
        rows_eRM = rows_ECM.reshape(shape).transpose(0, 1).flatten(1, 2)
        out_eRM = torch.bmm(F.gelu(torch.bmm(rows_eRM, self.w1_eMH)), self.w2_eHM)
        out_ECM = out_eRM.unflatten(1, (self.ranks, self.capacity)).transpose(0, 1).flatten(0, 1)
        back_ECM = all_to_all_single(out_ECM, None, None, dist.group.WORLD)
        return torch.einsum("sec,ecm->sm", send_SEC * weight_S[:, None, None], back_ECM).view_as(x_BLM)


class CapturedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.experts = nn.LayerNorm(M), nn.Linear(M, 3 * M), CapturedExperts()

    def forward(self, x_BLM: Tensor) -> Tensor:
        q_BLM, k_BLM, v_BLM = self.qkv(self.norm(x_BLM)).chunk(3, dim=-1)
        y_BLM = x_BLM + F.scaled_dot_product_attention(q_BLM, k_BLM, v_BLM, is_causal=True)
        return y_BLM + self.experts(y_BLM)


class GivenCosts:
    """Costs of captured operators that depend on sizes only, so that every version plans from the same values."""

    def operator_s(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        sizes = [one.numel() for one in args if isinstance(one, Tensor)]
        return 1e-6 + 1e-8 * float(sum(sizes))

    def collective_s(self, size: float) -> float:
        return 1e-5 + 2e-7 * size


def captured(record: Record, rank: int, world: int, scratch: Path, own_places: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(CapturedBlock(), CapturedBlock())
    backend = fusedmoe.graph.GraphBackend(
        costs=GivenCosts(), chunks=2, groups=2, own_places=own_places, timeout_s=200.0
    )
    call = torch.compile(model, backend=backend, fullgraph=True)
    for number in range(3):  # the first step of a graph with own places verifies them
        step(record, f"step {number}", model, batch(rank, (4, 6), seed=10 * number), call)
    record.note("collectives", [len(backend.reports)])
