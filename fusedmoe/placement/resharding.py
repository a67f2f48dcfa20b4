"""Resharding: move the parameters and optimizer state of experts to new owners."""

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
from fusedmoe.experts.split_optimizers import JoinedOptimizers, MatrixOptimizer, require_plain, similar_optimizer
from fusedmoe.placement.placed_experts import PlacedExperts
from fusedmoe.placement.placement import Placement

# Per layer, its deepcopies: (is trained, path of copy indices).
Paths = list[list[tuple[bool, tuple[int, ...]]]]


@torch.no_grad()
def move_experts(
    layers: Sequence[PlacedExperts],
    shardings: Sequence[Placement],
    optimizers: JoinedOptimizers,
    copies_by_layer: Sequence[Sequence[PlacedExperts]],
) -> int:
    """Move each layer's experts to the owners in `shardings`. Collective over the expert-parallel group.

    Drops gradients. Returns the number of bytes sent. `copies_by_layer`: copies of a layer's experts without an
    optimizer, which are moved too.

    Raises:
        ConfigError: the optimizer's state is not shaped like the parameter and cannot be split by expert.
        RankError: optimizer state has different keys on different ranks.
    """
    triples = zip(layers, shardings, copies_by_layer, strict=True)
    changing = [(placed, to, copies) for placed, to, copies in triples if to != placed.table.sharding]
    if not changing:
        return 0
    group = changing[0][0].table.group
    states_by_layer = [
        [_optimizer_state(optimizers.optimizer_of(p), name, p) for name, p in placed.table.parameter_items]
        for placed, *_ in changing
    ]
    # Before sending: peers would wait for the state of an optimizer that has not stepped.
    _require_same_keys(group, [[sorted(tensors) for tensors in states] for states in states_by_layer])
    sent = 0

    def move_rows(tensor: Tensor, before: Placement, after: Placement) -> Tensor:
        nonlocal sent
        received, bytes_ = _exchange_rows(tensor, before, after, group)
        sent += bytes_
        return received

    for (placed, sharding, copies), states in zip(changing, states_by_layer, strict=True):
        change = placed.table.placement, sharding
        for copy in copies:
            copy.reshard(sharding, {name: move_rows(p.data, *change) for name, p in copy.table.parameter_items})
        parameters: dict[str, Tensor] = {}
        for (name, parameter), state in zip(placed.table.parameter_items, states, strict=True):
            parameters[name] = move_rows(parameter.data, *change)
            for key, tensor in state.items():
                optimizers.optimizer_of(parameter).state[parameter][key] = move_rows(tensor, *change)
        # Last: until here the layer belongs to the old placement.
        placed.reshard(sharding, parameters)
    return sent


def find_copies_to_move(
    layers: Sequence[PlacedExperts], given: Sequence[Sequence[PlacedExperts]], group: Group
) -> list[list[PlacedExperts]]:
    """Return each layer's copies of experts that must move with it, in the same order on all ranks. Collective.

    Copies are the experts of the models in `given`, and the results of `copy.deepcopy` of the layer or of a copy.

    Raises:
        ConfigError: a copy's owners differ from its layer's, it is trained, or it does not exist on all ranks.
    """
    here = [placed.table.sharding for placed in layers]
    if any([copy.table.sharding for copy in model] != here for model in given):
        raise ConfigError(
            "ShardedExperts: a model of `averaged` has other experts on this rank than the model. Give copies of "
            "the model as it is now: deepcopy(model), or AveragedModel(model)"
        )
    known = {id(copy) for model in given for copy in model}

    def gather_copies() -> tuple[list[dict[tuple[int, ...], PlacedExperts]], list[Paths]]:
        """Return each layer's copies on this rank by path, and the sorted (is_trained, path) of all ranks' copies."""
        copies = [{path: copy for path, copy in _find_copies(placed, ()) if id(copy) not in known} for placed in layers]
        own = [sorted((copy.is_trained, path) for path, copy in layer.items()) for layer in copies]
        return copies, all_gather_object(group, own, "copies of experts")

    def are_trained(own: Paths) -> bool:
        return any(learned for layer in own for learned, _ in layer)

    copies, ranks = gather_copies()
    if any(own != ranks[0] or are_trained(own) for own in ranks):
        gc.collect()  # copies may be garbage here and collected on other ranks
        copies, ranks = gather_copies()
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


def _find_copies(placed: PlacedExperts, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], PlacedExperts]]:
    """Yield (path, copy) for the deep copies of a layer, recursively, except those with their own ShardedExperts."""
    for index, copy in list(placed.deep_copies.items()):
        if not copy.is_attached:
            yield (*path, index), copy
            yield from _find_copies(copy, (*path, index))


def require_movable(layers: Sequence[PlacedExperts], optimizers: JoinedOptimizers, *, steps: bool = False) -> None:
    """Raise `ConfigError` if `move_experts` would fail, or if experts that require gradients are in no optimizer.

    `steps`: also check the state that a step creates, with a new optimizer of the same kind if it can be constructed.
    """
    known = {id(parameter) for group in optimizers.param_groups for parameter in group["params"]}
    for placed in layers:
        for name, parameter in placed.table.parameter_items:
            _optimizer_state(optimizers.optimizer_of(parameter), name, parameter)
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"ShardedExperts: the {optimizers.kind} does not have the experts' {name}: what updates "
                    "it would keep its state where it is when experts change owners. Give the optimizers that have "
                    "the experts, in a list if there are several, or use reshard=False."
                )
    parameters = [parameter for placed in layers for parameter in placed.table.parameters]
    for optimizer in dict.fromkeys(map(optimizers.optimizer_of, parameters)) if steps else ():
        # The state exists only after the first step, so a new optimizer of this kind steps on a small 3-D parameter.
        # Its sizes are distinct, so no other shape equals it, and large enough for 8-bit state.
        small = nn.Parameter(torch.zeros(2, 48, 64, device=layers[0].table.device))
        small.grad = torch.ones_like(small)
        stepped = optimizer
        with suppress(Exception), torch.enable_grad():
            stepped = similar_optimizer(optimizer, small)
            stepped.step(lambda: 0.0)
        _optimizer_state(stepped, "parameter", small)


def _optimizer_state(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return an optimizer's state tensors for a parameter of experts, [owned, …] each."""
    tensors = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue  # step count, equal on all ranks
        require_plain(value, key, optimizer)
        if value.shape != parameter.shape and not isinstance(optimizer, MatrixOptimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for the experts' {name} of shape "
                f"{list(parameter.shape)}, which cannot move with single experts. Use an optimizer whose state is "
                f"shaped like the parameters, or fusedmoe.training.PerMatrix([the experts' matrices], "
                f"{type(optimizer).__name__}, …), or ShardedExperts(…, reshard=False)."
            )
        tensors[key] = value
    return tensors


def _require_same_keys(group: Group, keys: list[list[list[str]]]) -> None:
    of_ranks = all_gather_object(group, keys, "moving experts")
    for rank, of_rank in zip(group.ranks, of_ranks, strict=True):
        if of_rank != of_ranks[0]:
            raise RankError(
                f"moving experts: the optimizer keeps {of_rank} on rank {rank} and {of_ranks[0]} on rank "
                f"{group.ranks[0]}, by layer and parameter. Make it the same on every rank, "
                "and step on all of them or on none."
            )


def _exchange_rows(tensor: Tensor, before: Placement, after: Placement, group: Group) -> tuple[Tensor, int]:
    """Return this rank's rows after the change, [owned, ...] by expert number, and the bytes sent. Collective."""
    me = group.index
    owned_before, owned_after = before.owned(me), after.owned(me)
    # Sorted by rank, then expert: received rows need no permutation.
    outgoing = sorted((after.owners[expert], expert) for expert in owned_before if after.owners[expert] != me)
    incoming = sorted((before.owners[expert], expert) for expert in owned_after if before.owners[expert] != me)
    send, recv = (
        [sum(rank == peer for rank, _ in pairs) for peer in range(group.size)] for pairs in (outgoing, incoming)
    )
    row = {expert: at for at, expert in enumerate(owned_before)}
    rows = tensor[[row[expert] for _, expert in outgoing]].contiguous()
    received = all_to_all_rows(group, rows, send, recv, "moving experts")
    arrived = {expert: at for at, (_, expert) in enumerate(incoming)}
    result = tensor.new_empty((len(owned_after), *tensor.shape[1:]))
    for at, expert in enumerate(owned_after):
        result[at] = received[arrived[expert]] if expert in arrived else tensor[row[expert]]
    return result, rows.nbytes
