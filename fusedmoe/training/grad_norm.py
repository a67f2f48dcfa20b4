"""Clipping by the norm of all gradients, over all ranks: each element of each distinct parameter counts once."""

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
from fusedmoe.training.copies import local_part, replicas
from fusedmoe.training.repeated_sync import note_scaled

# A parameter's name and its mesh.
_Held = tuple[str, DeviceMesh | None]


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module,
    topology: Topology | None,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients such that their joint norm is at most `max_norm`; returns what it was. Collective.

    Call it after `sync_gradients`. Each element of each distinct parameter counts once, on whichever ranks it lies: the
    norm is that of the same model in one process, and the same bits on every rank. Norms are taken in at least float32
    and added in float64. As in `torch.nn.utils.clip_grad_norm_`, gradients are scaled by max_norm/(norm + 1e-6) where
    that is below 1, and a norm that is not finite spoils them: look at the result.

    The host waits for nothing, until it reads the norm.

    Args:
        topology: of the model's layers. None: parameters are DTensors, over one mesh or several (FSDP2, tensor and
            expert parallelism), which say themselves who holds which part. A parameter is whole on its mesh, a plain
            tensor on its rank: those of one name elsewhere are copies. Whether they are is seen from some of their
            values, in the first call. Gradients that are summands (`Partial`) are summed.
        norm_type: p > 0 of the p-norm of all elements; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise an error, on all ranks, before a norm that is not finite scales anything. The host
            waits for the norm.
    Returns:
        The norm before clipping, a float64 scalar where the gradients are.
    Raises:
        ConfigError: a `max_norm` below 0 or NaN; no topology, and a layer of this library that is split over ranks, or
            parameters of one name that are no copies: experts without a mesh that says which ranks split them.
        RankError: another rank failed or did not come; with `error_if_nonfinite`, a norm that is not finite.
    """
    if not max_norm >= 0:
        raise ConfigError(
            f"clip_grad_norm: max_norm = {max_norm}; give a number of at least 0, math.inf to clip nothing"
        )
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm: norm_type = {norm_type}; give a number above 0, math.inf for the maximum")
    if topology is None:
        topology, counted = _by_meshes(model)
    else:
        # The first of the ranks that hold a copy counts it.
        counted = [(replica.parameter, replica.group.index == 0) for replica in replicas(model, topology)]
    gradients = []
    # By device: a model may have parts on several, and adding norms across them would wait for each.
    norms: dict[torch.device, list[Tensor]] = {}
    for parameter, counts in counted:
        if parameter.grad is None:
            continue  # on other ranks it may have one, which they count
        gradient = local_part(parameter.grad)
        gradients.append(gradient)
        if counts and gradient.numel():  # no elements have no largest one
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
            norms.setdefault(norm.device, []).append(norm.double())
    first = gradients[0].device if gradients else torch.device("cpu")
    device = device_of(topology.world) if topology.size > 1 else first
    # One number for each rank, reduced in one order: the same bits of the norm, and so of the scale, everywhere.
    if norm_type == math.inf:
        parts = [torch.stack(of).amax().to(device) for of in norms.values()]
        total = torch.stack(parts).amax() if parts else torch.zeros((), dtype=torch.float64, device=device)
        norm = _largest(total, topology)
    else:
        parts = [torch.stack(of).pow(norm_type).sum().to(device) for of in norms.values()]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
        total = all_reduce(topology.world, total, operation="sum of gradient norms")
        norm = total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RankError(
            f"rank {topology.rank}: clip_grad_norm: the norm of order {norm_type} is {float(norm)}. No gradient "
            "was scaled: skip the step, or leave out error_if_nonfinite=True",
            agreed=True,
        )
    # A tensor of one dimension, which half precision is promoted by: the scale is not rounded to it.
    scale_1 = (max_norm / (norm + 1e-6)).clamp(max=1.0).view(1)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient.unsqueeze(0).mul_(scale_1.to(gradient.device, dtype))
        note_scaled(gradient)
    return norm


def _largest(value: Tensor, topology: Topology) -> Tensor:
    """Return the maximum over all ranks, NaN where one rank has NaN, which a collective may drop."""
    pair = torch.stack([value.nan_to_num(0.0, posinf=math.inf), value.isnan().double()])
    largest, is_nan = all_reduce(topology.world, pair, "max", operation="maximum of gradient norms")
    return torch.where(is_nan > 0, math.nan, largest)


# By model: what this rank held when ranks last compared, the whole job, and the names that other ranks count. Ranks
# compare once, not in every step.
_compared_meshes: weakref.WeakKeyDictionary[nn.Module, tuple[list[_Held], Topology, set[str]]] = (
    weakref.WeakKeyDictionary()
)


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
    parameters = list(model.named_parameters())
    held: list[_Held] = [(name, p.device_mesh if isinstance(p, DTensor) else None) for name, p in parameters]
    known = _compared_meshes.get(model)
    if known is None or known[0] != held:
        topology = Topology.from_sizes() if dist.is_initialized() and dist.get_world_size() > 1 else Topology()
        known = _compared_meshes[model] = held, topology, _counted_elsewhere(model, topology)
    _, topology, elsewhere = known
    for _, parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            whole = [Replicate() if one.is_partial() else one for one in parameter.grad.placements]
            if whole != list(parameter.grad.placements):
                parameter.grad = parameter.grad.redistribute(placements=whole)
    return topology, [(p, name not in elsewhere and _is_first(p.grad)) for name, p in parameters]


def _counted_elsewhere(model: nn.Module, topology: Topology) -> set[str]:
    """Names the parameters of which other ranks hold copies, and count them. Collective."""
    own: dict[str, tuple[int, ...]] = {}
    told = []
    for name, parameter in model.named_parameters():
        own[name], split = (dist.get_rank() if dist.is_initialized() else 0,), ""
        if isinstance(parameter, DTensor):
            own[name] = tuple(parameter.device_mesh.mesh.flatten().tolist())
            split = f"{tuple(parameter.device_mesh.shape)} {parameter.placements}"
        # Beside a mesh of all ranks there is no other one.
        if len(own[name]) < topology.size:
            flat = local_part(parameter).flatten()
            some = flat[:: max(1, flat.numel() // 8)][:8].double().tolist()
            told.append((name, own[name], (tuple(parameter.shape), split), _place(parameter), some))
    firsts: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, Any] = {}
    values: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for each in all_gather_object(topology.world, told, "comparing the meshes of a model"):
        for name, ranks, layout, place, some in each:
            # Ranks come in order: the first has the lowest.
            first, one = firsts.setdefault(name, ranks), torch.tensor(some, dtype=torch.float64, device="cpu")
            other = values.setdefault((name, place), one)
            same = layouts.setdefault(name, layout) == layout
            # Copies may have drifted apart a little; other parts have other values altogether.
            if not same or not (one.equal(other) or (one - other).norm() <= 0.1 * max(one.norm(), other.norm())):
                raise ConfigError(
                    f"clip_grad_norm: {name} on ranks {list(ranks)} is no copy of {name} on ranks {list(first)}, and "
                    "no mesh says how they belong together. Make it one DTensor on a mesh of all these ranks, with "
                    "Shard where they hold different parts; or give different parts different names; or, where they "
                    "should be copies, give them the same values before the first step"
                )
    return {name for name, ranks in own.items() if firsts.get(name, ranks) != ranks}


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Returns this rank's coordinates in the tensor's mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    place = tensor.device_mesh.get_coordinate()
    assert place is not None  # a parameter is on this rank
    return tuple(place)


def _is_first(gradient: Tensor | None) -> bool:
    """Returns whether this rank is the first of its mesh with the part of the gradient that it holds."""
    if not isinstance(gradient, DTensor):
        return True
    # The gradient's placements, which need not be the parameter's. FSDP2's strided shards are no `Shard`.
    splits = zip(_place(gradient), gradient.placements, strict=True)
    return all(at == 0 or not split.is_replicate() for at, split in splits)
