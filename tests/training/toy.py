"""A model of parameters only, split in every possible way, with known whole values and gradients."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import NAMED

EXPERTS = 4


class Sizes(NamedTuple):
    """A world and how it is split."""

    world: int = 1
    ep: int = 1
    esp: int = 1
    mp: int = 1

    def topology(self) -> Topology:
        if self.world == 1:
            return Topology()
        return Topology.from_sizes(ep=self.ep, esp=self.esp, mp=self.mp, timeout_s=120.0)

    def places(self, rank: int) -> dict[str, tuple[int, int]]:
        """(index, size) along each axis, by the definition of the rank layout."""
        return {
            "esp": (rank % self.esp, self.esp),
            "ep": (rank // self.esp % self.ep, self.ep),
            "mp": (rank % self.mp, self.mp),
        }

    @property
    def dp(self) -> int:
        return self.world // self.mp


ONE = Sizes()

# Whole shapes and splits. The sizes are not divisible: torch.chunk leaves short and empty shards.
WHOLE: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "dense.weight": ((5, 3), {}),
    "dense.frozen": ((2, 2), {}),
    "dense.scale": ((), {}),
    "attention.columns": ((5, 3), {"mp": 0}),
    "attention.rows": ((3, 6), {"mp": 1}),
    "experts.w1": ((EXPERTS, 5, 3), {"ep": 0, "esp": 1}),
    "experts.w2": ((EXPERTS, 3, 5), {"ep": 0, "esp": 2}),
    "experts.b2": ((EXPERTS, 3), {"ep": 0}),
    "experts.shared": ((3,), {"esp": 0}),
}
NAMED_SHAPE = (2, 3)


def whole(name: str, kind: str, number: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The whole tensor `name`: numbers that depend only on the arguments."""
    shape = WHOLE[name][0] if name in WHOLE else NAMED_SHAPE
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind} {number}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def sharding(name: str) -> dict[str, int]:
    return WHOLE[name][1] if name in WHOLE else {"ep": NAMED, "esp": NAMED}


def part(tensor: Tensor, name: str, sizes: Sizes, rank: int) -> Tensor:
    """The rank's part of a whole tensor."""
    for axis, dim in sharding(name).items():
        index, parts = sizes.places(rank)[axis]
        if dim != NAMED:
            chunks = tensor.chunk(parts, dim)
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor.clone(memory_format=torch.contiguous_format)


def names(sizes: Sizes, rank: int, custom: bool) -> list[str]:
    """Names of the parameters on a rank; custom experts have a name each."""
    index, parts = sizes.places(rank)["ep"]
    local = EXPERTS // parts if custom else 0
    return [*WHOLE, *(f"custom.list.{i}.weight" for i in range(index * local, (index + 1) * local))]


class Toy(nn.Module):
    """Holds this rank's part of every parameter, and a buffer; `lm_head.weight` is `dense.weight`."""

    def __init__(
        self, sizes: Sizes = ONE, rank: int = 0, custom: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.dense, self.attention, self.experts = nn.Module(), nn.Module(), nn.Module()
        self.custom, self.lm_head = nn.Module(), nn.Module()
        self.custom.list = nn.ModuleDict()
        self.custom.shardings = {}
        for name in names(sizes, rank, custom):
            *path, leaf = name.split(".")
            if path[0] == "custom":
                self.custom.list[path[2]] = nn.Module()
                self.custom.shardings[".".join(path[1:] + [leaf])] = sharding(name)
            value = part(whole(name, "value", dtype=dtype), name, sizes, rank)
            self.get_submodule(".".join(path)).register_parameter(leaf, nn.Parameter(value))
        for path, module in (("attention", self.attention), ("experts", self.experts)):
            own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
            module.shardings = {leaf: sharding(f"{path}.{leaf}") for leaf in own}
        self.dense.frozen.requires_grad_(False)
        self.dense.register_buffer("bias", torch.arange(3.0))
        self.lm_head.weight = self.dense.weight

    def set_gradients(self, sizes: Sizes, rank: int, number: int) -> None:
        """The same whole gradient on every rank, as after a sync."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.grad = part(whole(name, "gradient", number, parameter.dtype), name, sizes, rank)


def train(model: Toy, optimizer: torch.optim.Optimizer, sizes: Sizes, rank: int, steps: range) -> None:
    for step in steps:
        model.set_gradients(sizes, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        matrices = [p for p in parameters if p.dim() >= 2]
        others = [p for p in parameters if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices, "lr": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.05)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All values that a rank holds, by name."""
    state: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{name} {key}"] = value.clone()
    return state
