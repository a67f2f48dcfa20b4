"""Parameter replicas: the ranks that hold each, and the reduction of their gradients in 32 MiB buckets.

A second reduction must not change reduced gradients. Reduction replaces n summands by their sum over a divisor d, and
would turn the result `g`, equal on all replicas, into `g·n/d`. Therefore `g` is converted back to a summand `g·d/n`
before a backward pass accumulates into it. For replicated parameters d = n; for experts d/n is the number of ranks that
split them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import tensor_version
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import NAMED
from fusedmoe.experts.sharding import EXPERT_AXES, active_shardings, require_equal

# Whether the losses of an MP group add up to its mean loss, or all are the mean loss.
MpLoss = Literal["summands", "replicated"]

# Small gradients share a collective; large gradients and parameters are never copied in full.
BUCKET_BYTES = 32 * 2**20
_NO_GRADIENT, _DENSE, _WRITTEN_AFTER_SYNC, _SPARSE = 0, 1, 2, 3
# Error by gradient state.
_GRADIENT_ERRORS = {
    _WRITTEN_AFTER_SYNC: "the gradient of {name} has been synchronised, then written in place outside of a backward "
    "pass. Set its .grad to None, or to a new tensor, before the next backward pass",
    _SPARSE: "the gradient of {name} is sparse. Create its embedding with sparse=False",
}
# Modules sharded by `fully_shard(shard_experts=True)`: FSDP divides their gradients by the dp size.
sharded_with_experts: WeakSet[nn.Module] = WeakSet()
# Number of replica comparisons so far, by model.
_num_comparisons: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
# By gradient: its version after synchronisation, and d/n.
_synchronised_gradients: Any = WeakIdKeyDictionary()
# Parameters with a hook that restores the summand.
_hooked_parameters: Any = WeakIdKeyDictionary()
_MISMATCH_FIXES = (
    "Call torch.manual_seed with the same seed on every rank before building the model, or "
    "fusedmoe.training.broadcast_parameters(model, topology) before the first step",
    "It was equal before: steps differ. Clip with fusedmoe.training.clip_grad_norm (torch.nn.utils.clip_grad_norm_ "
    "computes a different norm on each rank), and use the same optimizer and scheduler settings on all ranks",
)


@dataclass(frozen=True, eq=False)
class Replica:
    """Parameter and the ranks that hold a replica of it.

    Attributes:
        sharding: {axis: dimension} for axes with more than one rank; empty for a replicated parameter.
        group: ranks with a replica, whose gradients differ until summed. For an FSDP parameter: ranks with a replica of
            the local shard whose gradients FSDP does not reduce.
        is_expert: the parameter belongs to an expert; its gradient is a summand on every rank of `group`.
        is_fsdp: FSDP shards the parameter over the dp group, or over the ranks with a replica of an expert. Its
            gradient is the sum over these ranks divided by the dp size.
    """

    name: str
    parameter: nn.Parameter
    sharding: dict[str, int]
    group: Group
    is_expert: bool = False
    is_fsdp: bool = False

    @property
    def has_local_name(self) -> bool:
        """True if only some ranks have a parameter of this name."""
        return NAMED in self.sharding.values()


def list_replicas(model: nn.Module, topology: Topology) -> list[Replica]:
    """List every distinct parameter once, in `named_parameters` order; the order is equal on all ranks.

    Raises:
        ConfigError: FSDP shards a parameter over ranks other than the dp group, or a layer's expert sharding is missing
            or inconsistent with the topology.
    """
    splits, experts = active_shardings(model, topology)
    sharded_ids = {id(part) for each in model.modules() if each in sharded_with_experts for part in each.parameters()}
    result = []
    for name, parameter in model.named_parameters():
        sharding, is_fsdp = splits.get(name, {}), isinstance(parameter, DTensor)
        if is_fsdp:
            group = _fsdp_replica_group(name, parameter, sharding, topology, id(parameter) in sharded_ids)
        else:
            group = replica_group(sharding, topology)
        result.append(Replica(name, parameter, sharding, group, name in experts, is_fsdp))
    return result


def gradient_divisor(replica: Replica, topology: Topology, mp_loss: MpLoss) -> int:
    """Return the divisor of the sum of a parameter's gradients over `replica.group`."""
    if mp_loss not in ("summands", "replicated"):
        raise ConfigError(f"mp_loss = {mp_loss!r}; choose summands or replicated")
    ranks = 1 if replica.is_fsdp else topology.dp.size
    is_replicated_loss = mp_loss == "replicated" and not replica.sharding and not replica.is_expert
    return ranks * topology.mp.size if is_replicated_loss else ranks


def replica_group(sharding: dict[str, int], topology: Topology) -> Group:
    if not sharding:
        return topology.world
    if set(sharding) == {"mp"}:
        return topology.dp
    sizes = {"ep": topology.ep.size, "esp": topology.esp.size}
    free = [axis for axis in EXPERT_AXES if axis not in sharding and sizes[axis] > 1]
    if not free:
        return topology.edp
    assert topology.expert_grid is not None
    grid = topology.expert_grid
    ranks = grid[:, topology.ep.index] if free == ["esp"] else grid[:, :, topology.esp.index]
    return topology.subgroup(f"edp×{free[0]}", tuple(sorted(ranks.flatten().tolist())))


def _fsdp_replica_group(
    name: str, parameter: Tensor, sharding: dict[str, int], topology: Topology, is_sharded: bool
) -> Group:
    assert isinstance(parameter, DTensor)
    ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if is_sharded and not sharding.keys().isdisjoint(EXPERT_AXES):
        return topology.subgroup("own", (topology.rank,))
    if ranks != sorted(topology.dp.ranks) or not sharding.keys() <= {"mp"}:
        raise ConfigError(
            f"rank {topology.rank}: {name} is a DTensor over ranks {ranks}, which does not match {topology}. "
            "Shard with fusedmoe.training.fully_shard: dense parameters over the dp group, experts only with "
            "shard_experts=True."
        )
    return topology.subgroup("own", (topology.rank,)) if "mp" in sharding else topology.mp


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, sharing memory, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_shared_elements(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def broadcast_parameters(model: nn.Module, topology: Topology) -> None:
    """Broadcast each parameter and buffer from its first rank to all replicas. Collective.

    Required only if ranks initialised the model from different random seeds.
    """
    splits, _ = active_shardings(model, topology)
    for replica in list_replicas(model, topology):
        broadcast(replica.parameter, replica.group)
    for name, buffer in model.named_buffers():
        broadcast(buffer, replica_group(splits.get(name, {}), topology))


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group) -> None:
    part = local_part(tensor.detach())
    if group.size == 1 or part.numel() == 0:
        return
    flat = part.contiguous().view(-1)
    for bucket in flat.split(max(1, BUCKET_BYTES // flat.element_size())):
        # Summing bytes that are zero on all other ranks is exact for every dtype.
        sent = bucket.view(torch.uint8).to(device_of(group))
        sent = sent if group.index == 0 else torch.zeros_like(sent)
        all_reduce(group, sent, operation="broadcast of parameters")
        bucket.copy_(sent.to(bucket.device).view(bucket.dtype))
    part.copy_(flat.view(part.shape))


def compare_replicas(replicas: list[Replica], topology: Topology, fix: str = _MISMATCH_FIXES[0]) -> None:
    """Raise `RankError` on all ranks if replicas of a trainable parameter differ. Collective."""
    trainable = [one for one in replicas if one.parameter.requires_grad]
    require_equal([(one.name, one.group, local_part(one.parameter.detach())) for one in trainable], topology, fix)


@torch.no_grad()
def reduce_gradients(
    replicas: list[Replica], divisors: list[int], topology: Topology, model: nn.Module | None = None
) -> None:
    """Replace each gradient by the sum over its replicas, divided by its divisor. Collective over the world.

    Sums and errors are those of `sync_gradients`.

    Args:
        replicas: the same parameters in the same order on every rank, except names that only some ranks have.
        model: its replicas are compared in the first two calls. None skips the comparison.
    """
    times = 0 if model is None else _num_comparisons.get(model, 0)
    present, compares = _exchange_presence(replicas, topology, None if model is None else times < len(_MISMATCH_FIXES))
    if compares and model is not None:
        compare_replicas(list_replicas(model, topology), topology, _MISMATCH_FIXES[min(times, 1)])
        _num_comparisons[model] = times + 1
    topology.check()  # raise the device's faults before they reach the sums
    buckets: dict[tuple[tuple[int, ...], torch.dtype, int], list[tuple[Replica, bool]]] = {}
    for replica, divisor, exists in zip(replicas, divisors, present, strict=True):
        dtype = torch.promote_types(replica.parameter.dtype, torch.float32)
        buckets.setdefault((replica.group.ranks, dtype, divisor), []).append((replica, exists))
    # Ranks with different parameter names share groups and must agree on the order.
    for (_, dtype, divisor), members in sorted(buckets.items(), key=lambda item: repr(item[0])):
        gradients = [_writable_gradient(replica) for replica, exists in members if exists]
        if members[0][0].group.size > 1:
            _reduce_in_buckets(members[0][0].group, gradients, dtype, divisor)
        elif divisor != 1:  # FSDP computed the sum, or only this rank holds the shard
            for gradient in gradients:
                gradient.div_(divisor)


@torch.no_grad()
def propagate_nonfinite(replicas: list[Replica], topology: Topology) -> None:
    """Set NaN on every rank for each parameter whose gradient is non-finite on some rank. Collective over the world.

    Call it after `reduce_gradients`. Without it, a loss scaler (`torch.amp.GradScaler`), which inspects local
    gradients, skips the step only on ranks that hold the parameter. It does not synchronise with the device.
    """
    # Gradients of fully replicated parameters are already equal on all ranks.
    split = [replica for replica in replicas if replica.group.ranks != topology.world.ranks]
    if not split and topology.ep.size == topology.esp.size == 1:
        return  # on all ranks alike
    shared = [replica for replica in split if not replica.has_local_name]
    # The last flag is of all parameters that only some ranks have.
    flags = torch.zeros(len(shared) + 1, dtype=torch.uint8, device=device_of(topology.world))
    place_of = {id(replica): place for place, replica in enumerate(shared)}
    held = [(place_of.get(id(replica), -1), _local_gradient(replica)) for replica in split]
    for place, gradient in held:
        if gradient is not None:
            low, high = gradient.aminmax()  # both are NaN if any element is
            flags[place] |= ~(low.isfinite() & high.isfinite()).to(flags.device)
    all_reduce(topology.world, flags, "max", "exchange of which gradients are not finite")
    # A NaN in any element of any gradient makes a scaler skip the step.
    some = next((gradient for gradient in map(_local_gradient, (*split, *replicas)) if gradient is not None), None)
    if not any(place == -1 for place, _ in held):
        held.append((-1, None))
    for place, gradient in held:
        # Without elements of this parameter, this rank marks another gradient.
        gradient = some if gradient is None else gradient
        if gradient is not None:
            first = gradient[(slice(0, 1),) * gradient.dim()]
            first.masked_fill_(flags[place].bool().to(gradient.device), float("nan"))


def _local_gradient(replica: Replica) -> Tensor | None:
    gradient = None if replica.parameter.grad is None else local_part(replica.parameter.grad)
    return gradient if gradient is not None and gradient.numel() else None


def _exchange_presence(replicas: list[Replica], topology: Topology, has_note: bool | None) -> tuple[list[bool], bool]:
    """Return whether any rank has a gradient, per parameter, and whether any rank set `has_note` (None: not exchanged).

    Uses one all-reduce per group and one host synchronisation. Raises the errors of `sync_gradients`.
    """
    # State, is trainable, is frozen. The maxima over ranks of both flags are 1 if only some ranks froze a parameter.
    facts = [(_gradient_state(one), one.parameter.requires_grad, not one.parameter.requires_grad) for one in replicas]
    facts.append((int(bool(has_note)), False, False))
    states = [state for state, _, _ in facts]
    world = topology.world
    kinds: dict[tuple[int, ...], tuple[Group, list[int]]] = {} if has_note is None else {world.ranks: (world, [])}
    for i, replica in enumerate(replicas):
        # A parameter of all ranks receives a gradient on all of them or on none.
        group = replica.group if replica.has_local_name else world
        kinds.setdefault(group.ranks, (group, []))[1].append(i)
    if has_note is not None:
        kinds[world.ranks][1].append(len(replicas))
    reduced = []
    for _, (group, members) in (in_order := sorted(kinds.items(), key=lambda kind: kind[0])):
        flags = torch.tensor([facts[i] for i in members], dtype=torch.uint8, device=device_of(group))
        reduced.append(all_reduce(group, flags, "max", "exchange of which gradients exist"))
    if reduced:
        places = [(group, i) for _, (group, members) in in_order for i in members]
        for (group, i), (state, some_learn, some_frozen) in zip(places, torch.cat(reduced).tolist(), strict=True):
            states[i] = state
            if some_learn and some_frozen:
                _raise_frozen(replicas[i], group, topology)
    *of_replicas, any_note = states
    for replica, state in zip(replicas, of_replicas, strict=True):
        if state in _GRADIENT_ERRORS:  # on all ranks
            refusal = f"{_GRADIENT_ERRORS[state].format(name=replica.name)}."
            topology.fail("gradient all-reduce", refusal)
            raise ConfigError(f"rank {topology.rank}: gradient all-reduce over the {replica.group}: {refusal}")
    return [state != _NO_GRADIENT for state in of_replicas], bool(any_note)


def _raise_frozen(replica: Replica, group: Group, topology: Topology) -> None:
    """Raise `RankError` that names the ranks with a frozen parameter. Collective over the group."""
    trainable = all_gather_object(group, replica.parameter.requires_grad, "finding ranks with a frozen parameter")
    frozen = [rank for rank, learning in zip(group.ranks, trainable, strict=True) if not learning]
    refusal = (
        f"{replica.name} is frozen on ranks {frozen} (requires_grad=False) and trained on the other ranks of the "
        f"{group}: their gradients would be lost. Freeze it on all of these ranks or on none"
    )
    topology.fail("gradient all-reduce", refusal)
    raise RankError(f"rank {topology.rank}: gradient all-reduce: {refusal}", agreed=True)


def _gradient_state(replica: Replica) -> int:
    gradient = replica.parameter.grad
    if gradient is None:
        return _NO_GRADIENT
    if gradient.layout != torch.strided:
        return _SPARSE
    return _DENSE if _restore_summand(replica.parameter) else _WRITTEN_AFTER_SYNC


def note_synchronised(parameter: nn.Parameter, factor: float) -> None:
    """Record that a gradient is synchronised; `factor` = d/n converts it back to a summand."""
    gradient = parameter.grad
    if gradient is None or factor == 1:
        return
    _synchronised_gradients[gradient] = tensor_version(gradient), factor
    if parameter.requires_grad and parameter not in _hooked_parameters:
        _hooked_parameters[parameter] = True
        own = ref(parameter)  # a strong reference in the hook would keep the parameter alive
        parameter.register_hook(lambda _: _restore(own()))


def note_scaled(gradient: Tensor) -> None:
    """Record that a gradient was scaled equally on all ranks and remains synchronised."""
    if gradient in _synchronised_gradients:
        _synchronised_gradients[gradient] = tensor_version(gradient), _synchronised_gradients[gradient][1]


def _restore_summand(parameter: nn.Parameter) -> bool:
    """Convert a synchronised gradient that no backward pass has modified back to this rank's summand.

    Return False if the gradient is nonzero and was written in place outside of a backward pass.
    """
    gradient = parameter.grad
    if gradient is None or gradient not in _synchronised_gradients:
        return True
    if tensor_version(gradient) != _synchronised_gradients[gradient][0] and bool(gradient.any()):
        return False
    _restore(parameter)
    return True


@torch.no_grad()
def _restore(parameter: Tensor | None) -> None:
    gradient = None if parameter is None else parameter.grad
    if gradient is not None and (noted := _synchronised_gradients.pop(gradient, None)) is not None:
        gradient.mul_(noted[1])


def _writable_gradient(replica: Replica) -> Tensor:
    """Return the local gradient, zeros if there is none, without elements that share memory."""
    parameter = replica.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    part = local_part(parameter.grad)
    if has_shared_elements(part):  # as returned by the backward of `expand`
        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        part = local_part(parameter.grad)
    return part


def _reduce_in_buckets(group: Group, gradients: list[Tensor], dtype: torch.dtype, divisor: int) -> None:
    size = min(sum(gradient.numel() for gradient in gradients), BUCKET_BYTES // dtype.itemsize)
    buffer = torch.empty(size, dtype=dtype, device=device_of(group))
    filled = 0
    parts: list[tuple[Tensor, Tensor]] = []  # slice of a flat gradient, slice of the buffer
    copied: list[tuple[Tensor, Tensor]] = []  # non-contiguous gradient, its contiguous copy

    def flush() -> None:
        nonlocal filled
        if filled:
            all_reduce(group, buffer[:filled], operation="gradient all-reduce").div_(divisor)
        for target, source in (*parts, *copied):
            target.copy_(source)
        filled = 0
        parts.clear()
        copied.clear()

    for gradient in gradients:
        flat = rest = gradient.contiguous().view(-1)
        while len(rest):
            part, rest = rest[: size - filled], rest[size - filled :]
            place = buffer[filled : filled + len(part)]
            place.copy_(part)
            parts.append((part, place))
            filled += len(part)
            if filled == size:
                flush()
        if not gradient.is_contiguous():
            copied.append((gradient, flat.view(gradient.shape)))
    flush()
