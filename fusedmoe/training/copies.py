"""Copies of parameters: which ranks hold them, and the sum of their gradients, in flat buffers of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import NAMED
from fusedmoe.experts.sharding import EXPERT_AXES, active_shardings, require_equal
from fusedmoe.training.repeated_sync import restore_summand

# Kinds of losses of an MP group: see fusedmoe.training.data_parallel.
MpLoss = Literal["summands", "replicated"]

# Small gradients share a collective, and no second copy of large ones, or of parameters, is made.
BUCKET_BYTES = 32 * 2**20
_NONE, _DENSE, _REWRITTEN, _SPARSE = 0, 1, 2, 3
# By state of a gradient on some rank: why all ranks refuse it.
_REFUSALS = {
    _REWRITTEN: "the gradient of {name} has been synchronised, and then written in place outside of a backward pass. "
    "Set its .grad to None, or to a new tensor, before this rank's next gradient",
    _SPARSE: "the gradient of {name} is sparse. Make its embedding with sparse=False",
}
# Modules that `fully_shard` has sharded with their experts, whose gradients FSDP then divides as the library does.
sharded_with_experts: WeakSet[nn.Module] = WeakSet()
# How often ranks have compared the copies of a model: as they begin, and once a step may have parted them.
_compared: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_CURES = (
    "Call torch.manual_seed with the same seed on every rank before the model is made, or "
    "fusedmoe.training.broadcast_parameters(model, topology) before the first step",
    "It was equal before: steps differ. Clip by fusedmoe.training.clip_grad_norm, as torch.nn.utils.clip_grad_norm_ "
    "has another norm on each rank, and give optimizers and their schedules the same settings on all ranks",
)


@dataclass(frozen=True, eq=False)
class Replica:
    """A parameter of this rank and the ranks that hold a copy of it.

    Attributes:
        sharding: {axis: dimension} over the axes that have more than one rank; empty for a replicated parameter.
        group: the ranks with a copy; each has a gradient of its own until they are summed. For a parameter that FSDP
            manages: the ranks with a copy of this rank's part, whose gradients FSDP has not joined.
        expert: an expert's, split over ranks or not: its gradient is a summand on every rank that holds a copy.
        managed: FSDP shards the parameter over the dp group, or over the ranks with a copy of an expert, and leaves in
            its gradient there the sum divided by the number of dp ranks.
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
    """Lists every distinct parameter once, in the order of `named_parameters`, which is the same on all ranks.

    Raises:
        ConfigError: a parameter that FSDP shards over other ranks than the dp group; a layer that splits experts over
            other ranks than the topology says, or does not say how.
    """
    splits, experts = active_shardings(model, topology)
    # By identity: a parameter under two names, in two modules, is one.
    spread = {id(part) for each in model.modules() if each in sharded_with_experts for part in each.parameters()}
    found = []
    for name, parameter in model.named_parameters():
        sharding, managed = splits.get(name, {}), isinstance(parameter, DTensor)
        if managed:
            group = _unmanaged_holders(name, parameter, sharding, topology, id(parameter) in spread)
        else:
            group = holders(sharding, topology)
        found.append(Replica(name, parameter, sharding, group, name in experts, managed))
    return found


def divisor(replica: Replica, topology: Topology, mp_loss: MpLoss) -> int:
    """Returns the number by which the sum of a parameter's gradients over `replica.group` is divided."""
    if mp_loss not in ("summands", "replicated"):
        raise ConfigError(f"mp_loss = {mp_loss!r}; choose summands or replicated")
    ranks = 1 if replica.managed else topology.dp.size
    whole = mp_loss == "replicated" and not replica.sharding and not replica.expert
    return ranks * topology.mp.size if whole else ranks


def holders(sharding: dict[str, int], topology: Topology) -> Group:
    """Returns the ranks that hold a copy of a tensor with this active sharding."""
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


def _unmanaged_holders(
    name: str, parameter: Tensor, sharding: dict[str, int], topology: Topology, spread: bool
) -> Group:
    assert isinstance(parameter, DTensor)
    ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if spread and not sharding.keys().isdisjoint(EXPERT_AXES):
        return topology.subgroup("own", (topology.rank,))
    if ranks != sorted(topology.dp.ranks) or not sharding.keys() <= {"mp"}:
        raise ConfigError(
            f"rank {topology.rank}: {name} is a DTensor over ranks {ranks}, which does not go with {topology}. "
            "Shard models with fusedmoe.training.fully_shard: the dense parts over the dp group, experts not "
            "at all or with experts=True."
        )
    return topology.subgroup("own", (topology.rank,)) if "mp" in sharding else topology.mp


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part, sharing memory: the tensor itself, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def broadcast_parameters(model: nn.Module, topology: Topology) -> None:
    """Gives all copies of each parameter and buffer the value they have on the first rank that holds one. Collective.

    For models that ranks initialised differently. Models of this library need it only if their ranks were seeded
    differently.
    """
    splits, _ = active_shardings(model, topology)
    # Over each parameter's own group: ranks that hold other experts must not get these.
    for replica in replicas(model, topology):
        broadcast(replica.parameter, replica.group)
    for name, buffer in model.named_buffers():
        broadcast(buffer, holders(splits.get(name, {}), topology))


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group) -> None:
    """Copies the first rank's tensor to the others, in place."""
    part = local_part(tensor.detach())
    if group.size == 1 or part.numel() == 0:
        return
    flat = part.contiguous().view(-1)
    for bucket in flat.split(max(1, BUCKET_BYTES // flat.element_size())):
        # A sum of bytes, all zero but the first rank's, is exact for every dtype.
        sent = bucket.view(torch.uint8).to(device_of(group))
        sent = sent if group.index == 0 else torch.zeros_like(sent)
        all_reduce(group, sent, operation="broadcast of parameters")
        bucket.copy_(sent.to(bucket.device).view(bucket.dtype))
    part.copy_(flat.view(part.shape))


def compare_copies(copies: list[Replica], topology: Topology, cure: str = _CURES[0]) -> None:
    """Raises `RankError`, on all ranks, where copies of a parameter that learns differ. Collective over the world."""
    held = [(one.name, one.group, local_part(one.parameter.detach())) for one in copies if one.parameter.requires_grad]
    require_equal(held, topology, cure)


@torch.no_grad()
def reduce_gradients(
    copies: list[Replica], divisors: list[int], topology: Topology, model: nn.Module | None = None
) -> None:
    """Replaces each gradient by the sum over its copies, divided by its divisor. Collective over the world.

    Sums run in at least float32, whatever the dtype of the gradient, and give the same bits on every rank that holds a
    copy. Where some rank has a gradient and another has none, the latter counts as zero: an optimizer steps the whole
    parameter on all ranks or on none, as it would in one process.

    Args:
        copies: the same parameters in the same order on every rank, save for names that only some ranks have.
        model: whose copies are compared before, the first two times; None: they are known to be equal.
    Raises:
        ConfigError: a sparse gradient (on every rank), or one that was reduced before and then written in place.
        RankError: another rank failed or did not come, in these sums or in the pass before; copies that differ; a
            parameter that is frozen on some ranks only.
    """
    times = 0 if model is None else _compared.get(model, 0)
    present, compares = _present(copies, topology, None if model is None else times < len(_CURES))
    if compares and model is not None:
        compare_copies(replicas(model, topology), topology, _CURES[min(times, 1)])
        _compared[model] = times + 1
    topology.check()  # the host has just waited for the pass: what it missed must not get into sums and steps
    buckets: dict[tuple[tuple[int, ...], torch.dtype, int], list[tuple[Replica, bool]]] = {}
    for replica, divisor, exists in zip(copies, divisors, present, strict=True):
        # Sums of many ranks in half precision would lose what each adds.
        dtype = torch.promote_types(replica.parameter.dtype, torch.float32)
        buckets.setdefault((replica.group.ranks, dtype, divisor), []).append((replica, exists))
    # In an order that does not depend on which names this rank has: ranks share several of the groups.
    for (_, dtype, divisor), members in sorted(buckets.items(), key=lambda item: repr(item[0])):
        gradients = [_writable_gradient(replica) for replica, exists in members if exists]
        if members[0][0].group.size > 1:
            _reduce(members[0][0].group, gradients, dtype, divisor)
        elif divisor != 1:  # nothing to sum: FSDP has, or this rank alone holds the part
            for gradient in gradients:
                gradient.div_(divisor)


@torch.no_grad()
def spread_overflow(copies: list[Replica], topology: Topology) -> None:
    """Spreads gradients that are not finite over the world: after it, a parameter has one on all ranks or on none.

    A loss scaler (`torch.amp.GradScaler`) on each rank looks at that rank's gradients alone. Those of what all ranks
    hold are equal; of an expert, or a part, that other ranks do not hold, the others would know nothing, and take the
    step that this rank skips. So NaN is put into the same parameter's gradient, as the scaler of one process would find
    it there. Collective over the world, after `reduce_gradients`; the host waits for nothing.
    """
    # Whole gradients are equal on all ranks by now, and so is what a scaler sees of them.
    split = [replica for replica in copies if replica.group.ranks != topology.world.ranks]
    if not split and topology.ep.size == topology.esp.size == 1:
        return  # on every rank alike: only experts have names on some ranks only
    everywhere = [replica for replica in split if not replica.named]
    # Parameters that only some ranks have by name count as one, the last.
    flags = torch.zeros(len(everywhere) + 1, dtype=torch.uint8, device=device_of(topology.world))
    place_of = {id(replica): place for place, replica in enumerate(everywhere)}
    held = [(place_of.get(id(replica), -1), _local_gradient(replica)) for replica in split]
    for place, gradient in held:
        if gradient is not None:
            low, high = gradient.aminmax()  # both are NaN where there is one
            flags[place] |= ~(low.isfinite() & high.isfinite()).to(flags.device)
    all_reduce(topology.world, flags, "max", "exchange of which gradients are not finite")
    # What is spoiled need not be the same element, or even the same tensor: a scaler skips the step for any.
    some = next((gradient for gradient in map(_local_gradient, (*split, *copies)) if gradient is not None), None)
    if not any(place == -1 for place, _ in held):
        held.append((-1, None))
    for place, gradient in held:
        # A rank without such a gradient, or with none of its elements, has another gradient spoiled.
        gradient = some if gradient is None else gradient
        if gradient is not None:
            first = gradient[(slice(0, 1),) * gradient.dim()]
            first.masked_fill_(flags[place].bool().to(gradient.device), float("nan"))


def _local_gradient(replica: Replica) -> Tensor | None:
    """Returns this rank's part of the gradient, if it has any elements."""
    gradient = None if replica.parameter.grad is None else local_part(replica.parameter.grad)
    return gradient if gradient is not None and gradient.numel() else None


def _present(copies: list[Replica], topology: Topology, note: bool | None) -> tuple[list[bool], bool]:
    """Returns, for each parameter, whether any rank has a gradient, and whether any rank has a note; None: no note.

    One collective serves all parameters of a kind, and the host waits once for all of them.
    """
    states = [_state(replica) for replica in copies] + [int(bool(note))]
    # Of a parameter that learns on some ranks and is frozen on others, the largest of both flags over ranks is 1.
    learns = [replica.parameter.requires_grad for replica in copies] + [False]
    frozen = [not each for each in learns[:-1]] + [False]
    world = topology.world
    kinds: dict[tuple[int, ...], tuple[Group, list[int]]] = {} if note is None else {world.ranks: (world, [])}
    for i, replica in enumerate(copies):
        # A parameter split over ranks is one tensor and has a gradient on all of them or on none.
        group = replica.group if replica.named else world
        kinds.setdefault(group.ranks, (group, []))[1].append(i)
    if note is not None:
        kinds[world.ranks][1].append(len(copies))
    reduced = []
    # In one order on all ranks, whichever names each of them has: they share several of the groups.
    for _, (group, members) in (in_order := sorted(kinds.items(), key=lambda kind: kind[0])):
        own_N3 = [[states[i], learns[i], frozen[i]] for i in members]
        flags = torch.tensor(own_N3, dtype=torch.uint8, device=device_of(group))
        reduced.append(all_reduce(group, flags, "max", "exchange of which gradients exist"))
    if reduced:
        places = [(group, i) for _, (group, members) in in_order for i in members]
        for (group, i), (state, some_learn, some_frozen) in zip(places, torch.cat(reduced).tolist(), strict=True):
            states[i] = state
            if some_learn and some_frozen:
                _refuse_frozen(copies[i], group, topology)
    *of_copies, noted = states
    for replica, state in zip(copies, of_copies, strict=True):
        if state in _REFUSALS:  # on some rank: all of them raise, since "max" has told them all
            refusal = f"{_REFUSALS[state].format(name=replica.name)}."
            topology.fail("gradient all-reduce", refusal)
            raise ConfigError(f"rank {topology.rank}: gradient all-reduce over the {replica.group}: {refusal}")
    return [state != _NONE for state in of_copies], bool(noted)


def _refuse_frozen(replica: Replica, group: Group, topology: Topology) -> None:
    """Raise `RankError` for a parameter that some ranks of the group have frozen. Collective over the group."""
    learns = all_gather_object(group, replica.parameter.requires_grad, "finding who has frozen a parameter")
    frozen = [rank for rank, learning in zip(group.ranks, learns, strict=True) if not learning]
    refusal = (
        f"{replica.name} is frozen on ranks {frozen} (requires_grad=False) and learns on the others of the {group}: "
        "their share of its gradient would be lost. Freeze a parameter, and thaw it, on all of these ranks"
    )
    topology.fail("gradient all-reduce", refusal)
    raise RankError(f"rank {topology.rank}: gradient all-reduce: {refusal}", agreed=True)


def _state(replica: Replica) -> int:
    gradient = replica.parameter.grad
    if gradient is None:
        return _NONE
    if gradient.layout != torch.strided:
        return _SPARSE
    return _DENSE if restore_summand(replica.parameter) else _REWRITTEN


def _writable_gradient(replica: Replica) -> Tensor:
    """Returns this rank's part of the gradient, zeros if there is none, each element in memory of its own."""
    parameter = replica.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    part = local_part(parameter.grad)
    # A backward formula with `expand` leaves elements that share memory: written in place, one would change all.
    if any(stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)):
        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        part = local_part(parameter.grad)
    return part


def _reduce(group: Group, gradients: list[Tensor], dtype: torch.dtype, divisor: int) -> None:
    """Sums gradients over a group, laid end to end into a buffer that a collective empties each time it is full."""
    size = min(sum(gradient.numel() for gradient in gradients), BUCKET_BYTES // dtype.itemsize)
    buffer = torch.empty(size, dtype=dtype, device=device_of(group))
    filled = 0
    parts: list[tuple[Tensor, Tensor]] = []  # part of a flat gradient, its place in the buffer
    copied: list[tuple[Tensor, Tensor]] = []  # gradient that cannot be viewed flat, its copy

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
