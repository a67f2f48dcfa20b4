"""The norm over all gradients, each element counted once on whichever ranks it lies, and clipping by it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.training.copies import local_part, replicas

# A parameter's name and its mesh.
_Held = tuple[str, DeviceMesh | None]


@torch.no_grad()
def clip_grad_norm(model: nn.Module, topology: Topology | None, max_norm: float) -> Tensor:
    """Scales all gradients such that their joint 2-norm is at most `max_norm`; returns what it was. Collective.

    Call it after `sync_gradients`. Each element of each distinct parameter counts once, on whichever ranks it lies: the
    norm is that of the same model in one process, and the same bits on every rank. Norms are taken in at least float32
    and added in float64. As in `torch.nn.utils.clip_grad_norm_`, gradients are scaled by max_norm/(norm + 1e-6) where
    that is below 1, and a norm that is not finite spoils them: look at the result.

    The host waits for nothing: that is up to who reads the norm.

    Args:
        topology: of the model's layers. None: parameters are DTensors, over one mesh or several (FSDP2, tensor and
            expert parallelism), which say themselves who holds which part. A parameter is whole on its mesh, a plain
            tensor on its rank: those of one name elsewhere are copies. Whether they are is seen from some of their
            values, in the first call. Gradients that are summands (`Partial`) are summed.
    Returns:
        The norm before clipping, a float64 scalar where the gradients are.
    Raises:
        ConfigError: no topology, and a layer of this library that is split over ranks, or parameters of one name that
            are no copies: experts without a mesh that says which ranks split them.
        RankError: another rank failed or did not come.
    """
    if topology is None:
        topology, counted = _by_meshes(model)
    else:
        # The first of the ranks that hold a copy counts it.
        counted = [(replica.parameter, replica.group.index == 0) for replica in replicas(model, topology)]
    gradients = []
    # By device: a model may have parts on several, and adding squares across them would wait for each.
    squares: dict[torch.device, list[Tensor]] = {}
    for parameter, counts in counted:
        if parameter.grad is None:
            continue  # on other ranks it may have one, which they count
        gradient = local_part(parameter.grad)
        gradients.append(gradient)
        if counts:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            squares.setdefault(norm.device, []).append(norm.double().square())
    first = gradients[0].device if gradients else torch.device("cpu")
    device = device_of(topology.world) if topology.size > 1 else first
    sums = [torch.stack(of).sum().to(device) for of in squares.values()]
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    # One number for each rank, summed in one order: the same bits of the norm, and so of the scale, everywhere.
    norm = all_reduce(topology.world, total, operation="sum of gradient norms").sqrt()
    # A tensor of one dimension, which half precision is promoted by: the scale is not rounded to it.
    scale_1 = (max_norm / (norm + 1e-6)).clamp(max=1.0).view(1)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient.unsqueeze(0).mul_(scale_1.to(gradient.device, dtype))
    return norm


# By model: what this rank held when ranks last compared, the whole job, and the names that other ranks count. Ranks
# compare once, not in every step.
_known: WeakKeyDictionary[nn.Module, tuple[list[_Held], Topology, set[str]]] = WeakKeyDictionary()


def _by_meshes(model: nn.Module) -> tuple[Topology, list[tuple[nn.Parameter, bool]]]:
    """Returns the whole job, and each parameter with whether this rank counts it."""
    if any(
        (isinstance(module, MoELayer) and module.topology.size > 1)
        or any(len(ranks) > 1 for ranks in getattr(module, "expert_ranks", {}).values())
        for module in model.modules()
    ):
        raise ConfigError(
            "clip_grad_norm of a model with layers of fusedmoe that are split over ranks: give it their topology, "
            "clip_grad_norm(model, topology, max_norm)"
        )
    held: list[_Held] = [
        (name, parameter.device_mesh if isinstance(parameter, DTensor) else None)
        for name, parameter in model.named_parameters()
    ]
    known = _known.get(model)
    if known is None or known[0] != held:
        topology = Topology.from_sizes() if dist.is_initialized() and dist.get_world_size() > 1 else Topology()
        known = _known[model] = held, topology, _counted_elsewhere(model, topology)
    _, topology, elsewhere = known
    counted = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = _summed(parameter.grad)
        counted.append((parameter, name not in elsewhere and _is_first(parameter.grad)))
    return topology, counted


def _counted_elsewhere(model: nn.Module, topology: Topology) -> set[str]:
    """Names the parameters of which other ranks hold copies, and count them. Collective."""
    own = {name: _ranks(parameter) for name, parameter in model.named_parameters()}
    # Beside a mesh of all ranks there is no other one.
    told = [
        (name, own[name], _layout(parameter), _place(parameter), _some_values(parameter))
        for name, parameter in model.named_parameters()
        if len(own[name]) < topology.size
    ]
    holders: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, Any] = {}
    values: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for each in all_gather_object(topology.world, told, "comparing the meshes of a model"):
        for name, ranks, layout, place, some in each:
            # Ranks come in order: the first has the lowest.
            first, one = holders.setdefault(name, ranks), torch.tensor(some, dtype=torch.float64)
            other = values.setdefault((name, place), one)
            if layouts.setdefault(name, layout) != layout or not _alike(one, other):
                raise ConfigError(
                    f"clip_grad_norm: {name} on ranks {list(ranks)} is no copy of {name} on ranks {list(first)}, and "
                    "no mesh says how they belong together. Make it one DTensor on a mesh of all these ranks, with "
                    "Shard where they hold different parts; or give different parts different names; or, where they "
                    "should be copies, give them the same values before the first step"
                )
    return {name for name, ranks in own.items() if holders.get(name, ranks) != ranks}


def _ranks(parameter: Tensor) -> tuple[int, ...]:
    if isinstance(parameter, DTensor):
        return tuple(parameter.device_mesh.mesh.flatten().tolist())
    return (dist.get_rank() if dist.is_initialized() else 0,)


def _layout(parameter: Tensor) -> Any:
    split = (tuple(parameter.device_mesh.shape), str(parameter.placements)) if isinstance(parameter, DTensor) else None
    return tuple(parameter.shape), split


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Returns this rank's coordinates in the tensor's mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None  # a parameter is on this rank
    return tuple(place)


def _some_values(parameter: Tensor) -> list[float]:
    flat = local_part(parameter).flatten()
    return flat[:: max(1, flat.numel() // 8)][:8].double().tolist()


def _alike(one: Tensor, other: Tensor) -> bool:
    """Returns whether values are of copies, which may have drifted apart a little, and not of other parts."""
    return one.equal(other) or bool((one - other).norm() <= 0.1 * torch.maximum(one.norm(), other.norm()))


def _is_first(gradient: Tensor | None) -> bool:
    """Returns whether this rank is the first of its mesh with the part of the gradient that it holds."""
    if not isinstance(gradient, DTensor):
        return True
    # The gradient's placements, which need not be the parameter's. FSDP2's strided shards are no `Shard`.
    splits = zip(_place(gradient), gradient.placements, strict=True)
    return all(at == 0 or not split.is_replicate() for at, split in splits)


def _summed(gradient: DTensor) -> DTensor:
    placements = [Replicate() if one.is_partial() else one for one in gradient.placements]
    return gradient if list(gradient.placements) == placements else gradient.redistribute(placements=placements)
