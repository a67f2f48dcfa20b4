"""Who holds a copy of which parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.experts.base import NAMED
from fusedmoe.layers.sharding import EXPERT_AXES, parameter_shardings

# Broadcasts travel in pieces of this size.
_PIECE_BYTES = 32 * 2**20


# What the losses of an MP group are: see fusedmoe.training.gradients.
MpLoss = Literal["summands", "replicated"]


@dataclass(frozen=True, eq=False)
class Replica:
    """A parameter of this rank and the ranks that hold a copy of it.

    Attributes:
        sharding: {axis: dimension} over the axes that have more than one rank; empty for a replicated parameter.
        group: the ranks with a copy; each has a gradient of its own until they are summed. For a parameter that FSDP
            manages: the ranks with a copy of this rank's part, whose gradients FSDP has not joined.
        expert: an expert's, split over ranks or not: its gradient is a summand on every rank that holds a copy.
        managed: FSDP shards the parameter over the dp group and averages its gradient there.
    """

    name: str
    parameter: nn.Parameter
    sharding: dict[str, int]
    group: Group
    expert: bool = False
    managed: bool = False

    @property
    def named(self) -> bool:
        """The parameter has this name on some ranks only."""
        return NAMED in self.sharding.values()


def replicas(model: nn.Module, topology: Topology) -> list[Replica]:
    """Every distinct parameter once, in the order of `named_parameters`, which is the same on all ranks.

    Raises:
        ConfigError: a parameter that FSDP shards over other ranks than the dp group.
    """
    shardings = parameter_shardings(model)
    found = []
    for name, parameter in model.named_parameters():
        declared = shardings.get(name, {})
        sharding, expert = active(declared, topology), not declared.keys().isdisjoint(EXPERT_AXES)
        group, managed = holders(sharding, topology), isinstance(parameter, DTensor)
        if managed:
            group = _unmanaged_holders(name, parameter, sharding, topology)
        found.append(Replica(name, parameter, sharding, group, expert, managed))
    return found


def divisor(replica: Replica, topology: Topology, mp_loss: MpLoss) -> int:
    """What the sum of a parameter's gradients over `replica.group` is divided by.

    Raises:
        ConfigError: unknown `mp_loss`.
    """
    if mp_loss not in ("summands", "replicated"):
        raise ConfigError(f"mp_loss = {mp_loss!r}; choose summands or replicated")
    ranks = 1 if replica.managed else topology.dp.size
    whole = mp_loss == "replicated" and not replica.sharding and not replica.expert
    return ranks * topology.mp.size if whole else ranks


def active(sharding: dict[str, int], topology: Topology) -> dict[str, int]:
    """The axes of a sharding that do split: those of more than one rank."""
    return {axis: dim for axis, dim in sharding.items() if getattr(topology, axis).size > 1}


def holders(sharding: dict[str, int], topology: Topology) -> Group:
    """The ranks that hold a copy of a tensor split along the active axes of `sharding`."""
    axes = set(active(sharding, topology))
    if not axes:
        return topology.world
    if axes == {"mp"}:
        return topology.dp
    free = [axis for axis in EXPERT_AXES if axis not in axes and getattr(topology, axis).size > 1]
    if not free:
        return topology.edp
    assert topology.expert_grid is not None
    grid = topology.expert_grid
    ranks = grid[:, topology.ep.index] if free == ["esp"] else grid[:, :, topology.esp.index]
    return topology.subgroup(f"edp×{free[0]}", tuple(sorted(ranks.flatten().tolist())))


def _unmanaged_holders(name: str, parameter: Tensor, sharding: dict[str, int], topology: Topology) -> Group:
    assert isinstance(parameter, DTensor)
    ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if ranks != sorted(topology.dp.ranks) or not sharding.keys() <= {"mp"}:
        raise ConfigError(
            f"rank {topology.rank}: {name} is a DTensor over ranks {ranks}, which does not go with {topology}. "
            "Shard models with fusedmoe.training.fully_shard: the dense parts over the dp group, experts not at all."
        )
    return topology.subgroup("own", (topology.rank,)) if "mp" in sharding else topology.mp


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory: the tensor itself, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def broadcast_parameters(model: nn.Module, topology: Topology) -> None:
    """Gives all copies of each parameter and buffer the value they have on the first rank that holds one. Collective.

    For models that ranks initialised differently. Models of this library need it only if their ranks were seeded
    differently.
    """
    shardings = parameter_shardings(model)
    for replica in replicas(model, topology):
        broadcast(replica.parameter, replica.group)
    for name, buffer in model.named_buffers():
        broadcast(buffer, holders(shardings.get(name, {}), topology))


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group) -> None:
    """Copies the first rank's tensor to the others, in place: a sum of bytes, theirs zero, is exact for every dtype."""
    part = local_part(tensor.detach())
    if group.size == 1 or part.numel() == 0:
        return
    flat = part.contiguous().view(-1)
    for piece in flat.split(max(1, _PIECE_BYTES // max(1, flat.element_size()))):
        piece_bytes = piece.view(torch.uint8).to(device_of(group))
        if group.index != 0:
            piece_bytes = torch.zeros_like(piece_bytes)
        all_reduce(group, piece_bytes, operation="broadcast of parameters")
        piece.copy_(piece_bytes.to(piece.device).view(piece.dtype))
    part.copy_(flat.view(part.shape))
