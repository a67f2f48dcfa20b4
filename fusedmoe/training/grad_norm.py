"""The norm over all gradients, each element counted once on whichever ranks it lies, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer
from fusedmoe.training.copies import local_part, replicas

# Of a parameter: its name, the ranks of its mesh, and whether this rank is the first of those with the same part.
_Held = tuple[str, tuple[int, ...], bool]


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
            expert parallelism), which say themselves who holds which part; other meshes hold other parts, and plain
            tensors of one name are copies of each other. Gradients that are summands (`Partial`) are summed.
    Returns:
        The norm before clipping, a float64 scalar where the gradients are.
    Raises:
        ConfigError: no topology, and a layer of this library that is split over ranks.
        RankError: another rank failed or did not come.
    """
    if topology is None:
        topology, counted = _by_meshes(model)
    else:
        # The first of the ranks that hold a copy counts it.
        counted = [(replica.parameter, replica.group.index == 0) for replica in replicas(model, topology)]
    gradients = []
    squares: dict[torch.device, list[Tensor]] = {}
    for parameter, counts in counted:
        if parameter.grad is None:
            continue
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
    norm = all_reduce(topology.world, total, operation="sum of gradient norms").sqrt()
    # A tensor of one dimension, which half precision is promoted by: the scale is not rounded to it.
    scale_1 = (max_norm / (norm + 1e-6)).clamp(max=1.0).view(1)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient.unsqueeze(0).mul_(scale_1.to(gradient.device, dtype))
    return norm


# Of a model: what its ranks held when they last compared, the whole job, and the names that other meshes count.
_known: WeakKeyDictionary[nn.Module, tuple[list[_Held], Topology, set[str]]] = WeakKeyDictionary()


def _by_meshes(model: nn.Module) -> tuple[Topology, list[tuple[nn.Parameter, bool]]]:
    """The whole job, and each parameter with whether this rank counts it."""
    if any(isinstance(module, MoELayer) and module.topology.size > 1 for module in model.modules()):
        raise ConfigError(
            "clip_grad_norm of a model with layers of fusedmoe that are split over ranks: give it their topology, "
            "clip_grad_norm(model, topology, max_norm)"
        )
    held = list(_held(model))
    known = _known.get(model)
    if known is None or known[0] != held:
        topology = Topology.from_sizes() if dist.is_initialized() and dist.get_world_size() > 1 else Topology()
        # Plain tensors of one name are copies. Of DTensors other meshes hold other parts: experts have one for each.
        plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
        found = [(name, ranks) for name, ranks, _ in held if name in plain]
        every = all_gather_object(topology.world, found, "comparing the meshes of a model")
        lowest: dict[str, int] = {}
        for name, ranks in (pair for each in every for pair in each):
            lowest[name] = min(lowest.get(name, ranks[0]), ranks[0])
        known = _known[model] = held, topology, {name for name, ranks in found if ranks[0] != lowest[name]}
    held, topology, elsewhere = known
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = _summed(parameter.grad)
    return topology, [(parameters[name], first and name not in elsewhere) for name, _, first in held]


def _held(model: nn.Module) -> Iterator[_Held]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            yield name, (rank,), True
            continue
        mesh = parameter.device_mesh
        place = mesh.get_coordinate()
        assert place is not None  # a parameter is on this rank
        first = all(at == 0 or split.is_shard() for at, split in zip(place, parameter.placements, strict=True))
        yield name, tuple(sorted(mesh.mesh.flatten().tolist())), first


def _summed(gradient: DTensor) -> DTensor:
    placements = [Replicate() if one.is_partial() else one for one in gradient.placements]
    return gradient if list(gradient.placements) == placements else gradient.redistribute(placements=placements)
