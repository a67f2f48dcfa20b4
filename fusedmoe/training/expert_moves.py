"""Experts that change owners take their parameters and optimizer state with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedmoe.comm.collectives import all_gather_object, all_to_all_rows
from fusedmoe.comm.group import Group
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.placement.placement import Placement
from fusedmoe.training.optimizers import JoinedOptimizers, PerMatrix, another, require_plain


@torch.no_grad()
def move(
    layers: Sequence[DynamicExperts],
    shardings: Sequence[Placement],
    optimizers: JoinedOptimizers,
    copies: Sequence[Sequence[DynamicExperts]],
) -> int:
    """Gives each layer's experts the owners that a sharding says. Collective over the expert-parallel group.

    Each tensor of an expert is sent once, from its old owner to its new one. Gradients are dropped. `copies`: of each
    layer, those of its experts that go with them; they have no optimizer. Returns the bytes that this rank sent.

    Raises:
        ConfigError: optimizer state that is not shaped like the parameter: it is not known how it splits.
        RankError: the ranks' optimizers keep different state.
    """
    triples = zip(layers, shardings, copies, strict=True)
    changing = [(placed, to, following) for placed, to, following in triples if to != placed.placement.sharding]
    if not changing:
        return 0
    group = changing[0][0].group
    kept = [
        [_state(optimizers.of(p), name, p) for name, p in placed.experts.named_parameters()] for placed, *_ in changing
    ]
    # Before anything is sent: a rank whose optimizer has not stepped would wait for tensors that no rank sends.
    _require_same(group, [[sorted(tensors) for tensors in states] for states in kept])
    sent = 0

    def moved(tensor: Tensor, before: Placement, after: Placement) -> Tensor:
        nonlocal sent
        received, bytes_ = _moved(tensor, before, after, group)
        sent += bytes_
        return received

    for (placed, sharding, following), states in zip(changing, kept, strict=True):
        change = placed.placement, sharding
        for copy in following:
            copy.reshard(sharding, {name: moved(p.data, *change) for name, p in copy.experts.named_parameters()})
        parameters: dict[str, Tensor] = {}
        for (name, parameter), state in zip(placed.experts.named_parameters(), states, strict=True):
            parameters[name] = moved(parameter.data, *change)
            for key, tensor in state.items():
                optimizers.of(parameter).state[parameter][key] = moved(tensor, *change)
        # Last: until here the layer, and its optimizer's state, are of the placement before.
        placed.reshard(sharding, parameters)
    return sent


def followers(
    layers: Sequence[DynamicExperts], given: Sequence[Sequence[DynamicExperts]], group: Group
) -> list[list[DynamicExperts]]:
    """Lists for each layer the copies of its experts that change owners with it, in one order on all ranks. Collective.

    Those are the ones of `given` models, and what `copy.deepcopy` has made of the layer, or of a copy. It raises
    `ConfigError` for one with other owners than its layer, one that is trained, or one that not all ranks have.
    """
    here = [placed.placement.sharding for placed in layers]
    if any([copy.placement.sharding for copy in model] != here for model in given):
        raise ConfigError(
            "ShardedExperts: a model of `averaged` has other experts on this rank than the model. Give copies of "
            "the model as it is now: deepcopy(model), or AveragedModel(model)"
        )
    known = {id(copy) for model in given for copy in model}

    def look() -> tuple[list[dict[tuple[int, ...], DynamicExperts]], list[list[list[tuple[bool, tuple[int, ...]]]]]]:
        """Looks for the copies by path, and gathers by rank and layer what there are, those that are trained last."""
        copies = [{path: copy for path, copy in _copies(placed, ()) if id(copy) not in known} for placed in layers]
        own = [sorted((copy.learned, path) for path, copy in layer.items()) for layer in copies]
        return copies, all_gather_object(group, own, "copies of experts")

    def are_trained(own: list[list[tuple[bool, tuple[int, ...]]]]) -> bool:
        return any(learned for layer in own for learned, _ in layer)

    copies, ranks = look()
    if any(own != ranks[0] or are_trained(own) for own in ranks):
        gc.collect()  # what is there may be garbage, and gone on other ranks already
        copies, ranks = look()
    for rank, own in zip(group.ranks, ranks, strict=True):
        if are_trained(own):
            raise ConfigError(
                f"ShardedExperts: experts change owners, and rank {rank} has a copy of the model (deepcopy) that is "
                "trained by itself: its experts, and what its optimizer keeps of them, would stay where they are. Give "
                "the copy a ShardedExperts of its own, or use reshard=False for the model, or drop the copy."
            )
        if own != ranks[0]:
            raise ConfigError(
                f"ShardedExperts: experts change owners, and rank {rank} has other copies of the model (deepcopy, "
                f"AveragedModel) than rank {group.ranks[0]}. Copies follow the owners where all ranks have them: make "
                "and drop them on all ranks, or use reshard=False."
            )
    return [
        [*(model[number] for model in given), *(layer[path] for path in sorted(layer))]
        for number, layer in enumerate(copies)
    ]


def _copies(placed: DynamicExperts, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], DynamicExperts]]:
    """Yields copies that have no ShardedExperts of their own, and copies of these, by their numbers."""
    for copy in list(placed.deepcopies):
        if not copy.hooked:
            yield (*path, copy.number), copy
            yield from _copies(copy, (*path, copy.number))


def require_movable(layers: Sequence[DynamicExperts], optimizers: JoinedOptimizers, *, tries: bool = False) -> None:
    """Raises `ConfigError` as `move` would, before anything has to move; and for experts that the optimizer does not
    have. `tries`: also for what it keeps after a step, as far as another one of its kind can be made."""
    known = {id(parameter) for group in optimizers.param_groups for parameter in group["params"]}
    for placed in layers:
        for name, parameter in placed.experts.named_parameters():
            _state(optimizers.of(parameter), name, parameter)
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"ShardedExperts: the {optimizers.kind} does not have the experts' {name}: what updates "
                    "it would keep its state where it is when experts change owners. Give the optimizers that have "
                    "the experts, in a list if there are several, or use reshard=False."
                )
    parameters = [parameter for placed in layers for parameter in placed.experts.parameters()]
    for optimizer in dict.fromkeys(map(optimizers.of, parameters)) if tries else ():
        # State appears with the first step, which is late to refuse: another optimizer of its kind steps on a parameter
        # of three dimensions, as experts have; no two sizes alike, so that no other shape looks like it, and large
        # enough to be kept in 8 bits.
        small = nn.Parameter(torch.zeros(2, 48, 64, device=layers[0].parameters[0].device))
        small.grad = torch.ones_like(small)
        tried = optimizer
        with suppress(Exception), torch.enable_grad():
            tried = another(optimizer, small)
            tried.step(lambda: 0.0)
        _state(tried, "parameter", small)


def _state(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns what an optimizer keeps for the experts of a parameter, [owned, …], by key."""
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue  # a count of steps: all ranks have the same
        require_plain(value, key, optimizer)
        if value.shape != parameter.shape and not isinstance(optimizer, PerMatrix):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for the experts' {name} of shape "
                f"{list(parameter.shape)}, which cannot move with single experts. Use an optimizer whose state is "
                f"shaped like the parameters, or fusedmoe.training.PerMatrix([the experts' matrices], "
                f"{type(optimizer).__name__}, …), or ShardedExperts(…, reshard=False)."
            )
        tensors[key] = value
    return tensors


def _require_same(group: Group, keys: list[list[list[str]]]) -> None:
    of_ranks = all_gather_object(group, keys, "moving experts")
    for rank, of_rank in zip(group.ranks, of_ranks, strict=True):
        if of_rank != of_ranks[0]:
            raise RankError(
                f"moving experts: the optimizer keeps {of_rank} on rank {rank} and {of_ranks[0]} on rank "
                f"{group.ranks[0]}, by layer and parameter. Make it the same on every rank, "
                "and step on all of them or on none."
            )


def _moved(tensor: Tensor, before: Placement, after: Placement, group: Group) -> tuple[Tensor, int]:
    """Exchanges rows; returns this rank's, [owned, ...] in order of their experts, and the bytes that it sent."""
    me = group.index
    ours, wanted = before.owned(me), after.owned(me)
    # Sorted by rank, then expert, on both sides: rows arrive in the order that they are expected in.
    leaving = sorted((after.owners[expert], expert) for expert in ours if after.owners[expert] != me)
    coming = sorted((before.owners[expert], expert) for expert in wanted if before.owners[expert] != me)
    send, recv = ([sum(rank == peer for rank, _ in pairs) for peer in range(group.size)] for pairs in (leaving, coming))
    # An expert's row is its place among those that the rank owns, in order of their numbers.
    row = {expert: at for at, expert in enumerate(ours)}
    rows = tensor[[row[expert] for _, expert in leaving]].contiguous()
    received = all_to_all_rows(group, rows, send, recv, "moving experts")
    arrived = {expert: at for at, (_, expert) in enumerate(coming)}
    result = tensor.new_empty((len(wanted), *tensor.shape[1:]))
    for at, expert in enumerate(wanted):
        result[at] = received[arrived[expert]] if expert in arrived else tensor[row[expert]]
    return result, rows.nbytes
