"""Small models behind the library's other doors: its functions, as torchtitan's or transformers' layers call them, and
Tutel's layer. Their gradients are summed by hand, so that nothing but the door is between the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedmoe import ops
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.tutel import moe
from fusedmoe.tutel.impls import communicate
from tests.training.placed import DIM, EXPERTS

HIDDEN, K = 4, 2


def numbers(name: str, *shape: int) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


class Functions(nn.Module):
    """A dropless layer of the library's functions, with a router of its own."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._all_to_all, self._esp = ops.make_all_to_all("direct", topology), topology.esp
        own = slice(*(EXPERTS * at // topology.size for at in (topology.rank, topology.rank + 1)))
        self.router = nn.Parameter(numbers("router", EXPERTS, DIM))
        self.w1 = nn.Parameter(numbers("w1", EXPERTS, 2, HIDDEN, DIM)[own].clone())
        self.w2 = nn.Parameter(numbers("w2", EXPERTS, DIM, HIDDEN)[own].clone())

    def shared(self) -> list[nn.Parameter]:
        return [self.router]

    def forward(self, x_SM: Tensor) -> Tensor:
        weight_SK, expert_SK = (x_SM @ self.router.t()).softmax(-1).topk(K)
        layout = ops.order(expert_SK, EXPERTS)
        form = ops.RowForm.of(x_SM, layout, weight_SK)
        exchange = ops.Exchange(self._all_to_all, self._esp, layout.counts_E, form)
        rows_NM, weight_N = ops.permute(x_SM, layout), ops.take_pairs(weight_SK, layout)

        def experts(rows_RM: Tensor, received: ops.Layout, weight_R: Tensor | None) -> Tensor:
            return ops.experts(rows_RM, received, weight_R, ops.Weights(self.w1, self.w2), "swiglu")

        return ops.unpermute(ops.through_experts(rows_NM, weight_N, exchange, experts), layout)


class Tutel(nn.Module):
    """Tutel's layer, which drops nothing."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        # As the environment does where a process starts.
        communicate.TUTEL_GLOBAL_TIMEOUT_SEC = topology.job.timeout_s
        count = EXPERTS // topology.size
        experts = {"type": "ffn", "num_experts_per_device": count, "hidden_size_per_expert": HIDDEN}
        self.layer = moe.moe_layer({"type": "top", "k": K, "capacity_factor": 0}, DIM, experts).double()
        own = slice(count * topology.rank, count * (topology.rank + 1))
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                shape = parameter.shape
                experts_of = name.startswith("experts.")
                whole = numbers(name, EXPERTS, *shape[1:]) if experts_of else numbers(name, *shape)
                parameter.copy_(whole[own] if experts_of else whole)

    def shared(self) -> list[nn.Parameter]:
        return list(self.layer.gates.parameters())

    def forward(self, x_SM: Tensor) -> Tensor:
        y_SM: Tensor = self.layer(x_SM)
        return y_SM


DOORS: dict[str, Callable[[Topology], Functions | Tutel]] = {"functions": Functions, "tutel": Tutel}


def train(
    model: Functions | Tutel, topology: Topology, batches: list[list[Tensor]], probe: Tensor
) -> list[list[Tensor]]:
    """Steps of gradient descent on what the ranks that this process stands for have, [step][rank]; each one's losses,
    and at last its results of the probe."""
    found: list[list[Tensor]] = [[] for _ in batches[0]]
    for step in batches:
        model.zero_grad()
        for x_SM, mine in zip(step, found, strict=True):
            loss = model(x_SM).square().sum() / 50
            loss.backward()
            mine.append(loss.detach())
        for parameter in model.shared():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(topology.world, parameter.grad, operation="gradient sum")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        for mine in found:
            mine.append(model(probe))
    return found
