"""Gradient clipping by the global norm over all ranks."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.training.replicated_parameters import list_replicas, local_part, note_scaled

_NamedMesh = tuple[str, DeviceMesh | None]


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module,
    topology: Topology | None,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the original norm. Collective.

    Call it after `sync_gradients`. Each element of each distinct parameter counts once, on whichever rank stores it:
    the result equals the norm of the same model in one process and is bitwise equal on all ranks. Norms are computed in
    at least float32 and added in float64. As in `torch.nn.utils.clip_grad_norm_`, gradients are scaled by
    max_norm/(norm + 1e-6) if that is below 1, and a non-finite norm makes them non-finite.

    Args:
        topology: of the model's layers. None for models whose parameters are DTensors on one or several meshes (FSDP2,
            tensor and expert parallelism). Plain tensors then count as replicated over ranks. Parameters of one name on
            different meshes count as replicas, which the first call verifies on up to 8 elements each. `Partial`
            gradients are summed first.
        max_norm: at least 0.
        norm_type: p > 0 of the p-norm; `math.inf` for the maximum absolute value.
        error_if_nonfinite: raise on all ranks, before scaling, if the norm is not finite. Synchronises with the device.
    Returns:
        The norm before clipping, a float64 scalar on the gradients' device.
    Raises:
        ConfigError: `max_norm` is negative or NaN; `norm_type` is not positive. Without a topology: a layer of this
            library is split over ranks, or parameters of one name are not replicas of each other (experts without a
            mesh that describes their sharding).
        RankError: another rank failed or is missing; with `error_if_nonfinite`, the norm is not finite.
    """
    if not max_norm >= 0:
        raise ConfigError(
            f"clip_grad_norm: max_norm = {max_norm}; pass a number of at least 0, math.inf to disable clipping"
        )
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm: norm_type = {norm_type}; pass a number above 0, math.inf for the maximum")
    if topology is None:
        topology, counted = _parameters_in_norm(model)
    else:
        counted = [(replica.parameter, replica.group.index == 0) for replica in list_replicas(model, topology)]
    gradients = []
    # Adding norms across devices would synchronise with each of them.
    norms: dict[torch.device, list[Tensor]] = {}
    for parameter, is_counted in counted:
        if parameter.grad is None:
            continue  # other ranks may have a gradient and count it
        gradient = local_part(parameter.grad)
        gradients.append(gradient)
        if is_counted and gradient.numel():  # the maximum of an empty tensor is undefined
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
            norms.setdefault(norm.device, []).append(norm.double())
    first = gradients[0].device if gradients else torch.device("cpu")
    device = device_of(topology.world) if topology.size > 1 else first
    # One number per rank: norm and scale are bitwise equal on all ranks.
    if norm_type == math.inf:
        parts = [torch.stack(device_norms).amax().to(device) for device_norms in norms.values()]
        total = torch.stack(parts).amax() if parts else torch.zeros((), dtype=torch.float64, device=device)
        norm = _max_over_ranks(total, topology)
    else:
        parts = [torch.stack(device_norms).pow(norm_type).sum().to(device) for device_norms in norms.values()]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
        total = all_reduce(topology.world, total, operation="sum of gradient norms")
        norm = total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RankError(
            f"rank {topology.rank}: clip_grad_norm: the norm of order {norm_type} is {float(norm)}. No gradient "
            "was scaled: skip the step, or pass error_if_nonfinite=False",
            agreed=True,
        )
    # One-dimensional: type promotion would round a scalar to half precision.
    scale_1 = (max_norm / (norm + 1e-6)).clamp(max=1.0).view(1)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient.unsqueeze(0).mul_(scale_1.to(gradient.device, dtype))
        note_scaled(gradient)
    return norm


def _max_over_ranks(value: Tensor, topology: Topology) -> Tensor:
    """Return the maximum over ranks, NaN if any rank has NaN, which collectives may drop in "max"."""
    pair = torch.stack([value.nan_to_num(0.0, posinf=math.inf), value.isnan().double()])
    largest, is_nan = all_reduce(topology.world, pair, "max", operation="maximum of gradient norms")
    return torch.where(is_nan > 0, math.nan, largest)


# By model, to compare once: local parameters at the last comparison, world topology, names that other ranks count.
_compared_meshes: weakref.WeakKeyDictionary[nn.Module, tuple[list[_NamedMesh], Topology, set[str]]] = (
    weakref.WeakKeyDictionary()
)


def _parameters_in_norm(model: nn.Module) -> tuple[Topology, list[tuple[nn.Parameter, bool]]]:
    """Return the world topology, and each parameter with whether this rank counts it. Collective.

    Sums `Partial` gradients. The first call compares the meshes of all ranks. Raises the errors of `clip_grad_norm`.
    """
    if any(
        (isinstance(module, MoELayer) and module.topology.size > 1)
        or any(len(ranks) > 1 for ranks in getattr(module, "expert_ranks", {}).values())
        for module in model.modules()
    ):
        raise ConfigError(
            "clip_grad_norm of a model with fusedmoe layers that are split over ranks: pass their topology, "
            "clip_grad_norm(model, topology, max_norm)"
        )
    parameters = list(model.named_parameters())
    local_meshes: list[_NamedMesh] = [
        (name, p.device_mesh if isinstance(p, DTensor) else None) for name, p in parameters
    ]
    cached = _compared_meshes.get(model)
    if cached is None or cached[0] != local_meshes:
        topology = Topology.from_sizes() if dist.is_initialized() and dist.get_world_size() > 1 else Topology()
        cached = _compared_meshes[model] = local_meshes, topology, _names_counted_elsewhere(model, topology)
    _, topology, elsewhere = cached
    for _, parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            whole = [Replicate() if one.is_partial() else one for one in parameter.grad.placements]
            if whole != list(parameter.grad.placements):
                parameter.grad = parameter.grad.redistribute(placements=whole)
    return topology, [(p, name not in elsewhere and _is_first_holder(p.grad)) for name, p in parameters]


def _names_counted_elsewhere(model: nn.Module, topology: Topology) -> set[str]:
    """Return the names of this rank's parameters that another rank counts. Collective."""
    own: dict[str, tuple[int, ...]] = {}
    descriptions = []
    for name, parameter in model.named_parameters():
        own[name], split = (dist.get_rank() if dist.is_initialized() else 0,), ""
        if isinstance(parameter, DTensor):
            own[name] = tuple(parameter.device_mesh.mesh.flatten().tolist())
            split = f"{tuple(parameter.device_mesh.shape)} {parameter.placements}"
        # A parameter on a mesh of all ranks has no replica on another mesh.
        if len(own[name]) < topology.size:
            flat = local_part(parameter).flatten()
            some = flat[:: max(1, flat.numel() // 8)][:8].double().tolist()
            descriptions.append((name, own[name], (tuple(parameter.shape), split), _mesh_coordinate(parameter), some))
    firsts: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, Any] = {}
    values: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for rank_descriptions in all_gather_object(topology.world, descriptions, "comparing the meshes of a model"):
        for name, ranks, layout, place, some in rank_descriptions:
            first, one = firsts.setdefault(name, ranks), torch.tensor(some, dtype=torch.float64, device="cpu")
            other = values.setdefault((name, place), one)
            same = layouts.setdefault(name, layout) == layout
            # Replicas may have drifted slightly; different shards have unrelated values.
            if not same or not (one.equal(other) or (one - other).norm() <= 0.1 * max(one.norm(), other.norm())):
                raise ConfigError(
                    f"clip_grad_norm: {name} on ranks {list(ranks)} is no copy of {name} on ranks {list(first)}, and "
                    "no mesh relates them. Make it one DTensor on a mesh of all these ranks, with Shard for different "
                    "parts; or use different names for different parts; or, if they should be replicas, give them the "
                    "same values before the first step"
                )
    return {name for name, ranks in own.items() if firsts.get(name, ranks) != ranks}


def _mesh_coordinate(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    return tuple(place)


def _is_first_holder(gradient: Tensor | None) -> bool:
    """Return whether this rank is the first in the mesh to hold its shard of the gradient."""
    if not isinstance(gradient, DTensor):
        return True
    # The gradient's placements may differ from the parameter's. FSDP2's strided shards are not `Shard`.
    splits = zip(_mesh_coordinate(gradient), gradient.placements, strict=True)
    return all(at == 0 or not split.is_replicate() for at, split in splits)
