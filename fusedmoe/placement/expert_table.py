"""The table of a rank's experts: owned experts, then replicas, as rows of one tensor per parameter.

Dispatch sends rows to *slots*: the table rows of rank 0, then rank 1, ..., each padded to the longest table. Worked
example: rank 0 owns experts 0 and 1, rank 1 owns expert 2 and has a replica of 0. The tables are [0, 1] and [2, 0], so
slots 0, 1, 2, 3 hold experts 0, 1, 2, 0. Rows of rank 0 for expert 0 are split over slots 0 and 3. In backward, rank 1
sends the replica's gradient to rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import tensor_version
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts, Place
from fusedmoe.kernels.layout import Layout, offsets
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import Transfer, chain_gathers, gather_transfers


class ExpertTable:
    """The experts of one layer: the ranks that hold them, and this rank's rows of each parameter.

    A parameter of the module `experts` is [owned, ...], a view of the first rows of a table [rows, ...]. The other rows
    are replicas. Kernels read and write the table without a copy.

    Attributes:
        placement: owner and replicas of each expert in this step, equal on all ranks. Initially even, without replicas.
        current: `placement` with the on-demand replicas chosen after the gate.
        shards: group of ranks with shards of the same experts.
        experts_W: experts in each rank's table, by row.
    """

    def __init__(self, experts: Experts, num_experts: int, topology: Topology) -> None:
        require_movable_experts(experts, num_experts)
        self.experts, self.group, self.shards, self.node_layout = experts, topology.ep, topology.esp, nodes_of(topology)
        self.set_placement(Placement.even(topology.ep.size, num_experts))

    def copy_for(self, experts: Experts) -> ExpertTable:
        table = copy(self)
        table.experts = experts
        table.set_placement(self.sharding)
        return table

    def set_placement(self, placement: Placement) -> None:
        self.placement, self.current = placement, placement.sharding
        self.experts_W = [placement.owned(rank) for rank in range(placement.num_ranks)]
        self._transfers: tuple[Transfer, ...] | None = None
        self._set_current(placement)
        self.experts.own_numbers, self.experts.is_placed = placement.owned(self.group.index), True

    def replace_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameters by the tensors of other owned experts. Drops gradients."""
        for name, parameter in self.parameter_items:
            _replace_data(parameter, tensors[name])

    def set_replicas(self, target: Placement) -> tuple[Transfer, ...]:
        """Allocate rows for missing replicas in `target`, and return their transfers.

        Rows of other replicas are reused; these replicas send no gradients.
        """
        more = gather_transfers(self.current.both(target), target, self.node_layout)
        kept = tuple(one for one in self.transfers if target.holds_EW[one.expert, one.target])
        self._set_current(target)
        self._transfers = chain_gathers(kept, more)
        return more

    def _set_current(self, target: Placement) -> None:
        self.experts_W, self.current = experts_after(self.experts_W, self.current, target), target

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        if self._transfers is None:
            self._transfers = gather_transfers(self.sharding, self.current, self.node_layout)
        return self._transfers

    @property
    def sharding(self) -> Placement:
        return self.placement.sharding

    @property
    def parameter_items(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.experts.named_parameters())

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.parameter_items]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.parameter_items]

    @property
    def expert_bytes(self) -> int:
        return sum(p.shape[1:].numel() * p.element_size() for p in self.parameters)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def local_experts(self) -> tuple[int, ...]:
        return self.experts_W[self.group.index]

    @property
    def row_of_expert(self) -> dict[int, int]:
        return {expert: row for row, expert in enumerate(self.local_experts)}

    @property
    def num_rows(self) -> int:
        return max(1, len(self.local_experts))

    @property
    def num_owned(self) -> int:
        return len(self.placement.owned(self.group.index))

    def is_read_early(self, dtype: torch.dtype) -> bool:
        """Return whether `Experts.in_chunks` reads parameters before chunks run, to cast or parametrize them."""
        is_cast = any(parameter.dtype != dtype for parameter in self.parameters)
        return is_cast or any(parametrize.is_parametrized(module) for module in self.experts.modules())

    def tensors(self) -> list[Tensor]:
        """Return the tables, [rows, ...] for each parameter. Allocates missing rows of replicas."""
        with torch.inference_mode(False):  # the tables are also used outside inference mode
            return [_table_of(parameter, self.num_rows) for parameter in self.parameters]

    def free_replicas(self) -> None:
        for parameter in self.parameters:
            parameter.data.untyped_storage().resize_(parameter.nbytes)

    def versions(self) -> list[tuple[int, int]]:
        """Return (version, storage id) per parameter. Writes and reallocation change it."""
        return [(tensor_version(parameter), id(parameter.data.untyped_storage())) for parameter in self.parameters]


def initial_place(experts: int, topology: Topology) -> Place:
    ep, esp = topology.ep, topology.esp
    owned = Placement.even(ep.size, experts).owned(ep.index)
    return Place(owned[0] if owned else 0, len(owned), esp.index, esp.size)


def nodes_of(topology: Topology) -> NodeLayout:
    """Return the nodes of the EP group. Ranks that do not fill nodes in order count as one node each."""
    node_W = [rank // topology.ranks_per_node for rank in topology.ep.ranks]
    per_node = node_W.count(node_W[0])
    even = len(node_W) == per_node * len(set(node_W))
    even = even and all(node == node_W[i - i % per_node] for i, node in enumerate(node_W))
    return NodeLayout(len(node_W), per_node if even else 1)


def sum_over_shards(shards: Group, tokens_WE: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum loads over the ranks that share experts: they must choose the same replicas. Collective over `shards`."""
    if shards.size == 1:
        return tokens_WE
    summed_WE = torch.from_numpy(tokens_WE).to(device_of(shards), copy=True)
    return all_reduce(shards, summed_WE, operation="exchange of loads").cpu().numpy()


def sort_by_slot(layout: Layout, sent_EV: NDArray[np.int64], experts_W: Sequence[Sequence[int]]) -> Layout:
    """Re-sort expert-sorted rows by destination slot.

    With the tables of the module's example and sent_EV = [[2, 1], [0, 0], [0, 4]], two of expert 0's three rows are
    sent to slot 0, one to slot 3, and the four rows of expert 2 to slot 2:

        0 1 2 | 3 4 5 6    ->    0 1 | – | 3 4 5 6 | 2

    Args:
        layout: of this rank's rows, without padding.
        sent_EV: number of rows of each expert to send to each rank.
    """
    width = max(1, *map(len, experts_W))
    row_EV = np.zeros_like(sent_EV)
    for rank, held in enumerate(experts_W):
        row_EV[list(held), rank] = np.arange(len(held))
    slot_EV = row_EV + width * np.arange(len(experts_W))
    slot_N = torch.from_numpy(np.repeat(slot_EV.reshape(-1), sent_EV.reshape(-1))).to(layout.counts_E.device)
    counts_P = torch.bincount(slot_N, minlength=width * len(experts_W))
    from_N = torch.argsort(slot_N, stable=True)
    to_N = torch.empty_like(from_N)
    to_N[from_N] = torch.arange(len(from_N), device=from_N.device)
    row_SK = layout.row_SK
    if len(to_N):
        row_SK = torch.where(row_SK < 0, row_SK, to_N[row_SK.clamp_min(0)])
    assert layout.source_N is not None
    source_N, pair_N = layout.source_N[from_N], layout.pair_N[from_N]
    return Layout(counts_P, offsets(counts_P), source_N, pair_N, row_SK, verified=True)


def experts_after(experts_W: Sequence[tuple[int, ...]], before: Placement, after: Placement) -> list[tuple[int, ...]]:
    """Return the experts in each rank's table after its replicas change from `before` to `after`.

    New replicas reuse the rows of removed replicas, then are appended: with replicas of 3 and 4 instead of 2, the table
    [0, 1, 2] becomes [0, 1, 3, 4].
    """
    held_WP = [list(held) for held in experts_W]
    for rank, held in enumerate(held_WP):
        gone_E, new_E = (
            np.flatnonzero(one.holds_EW[:, rank] & ~other.holds_EW[:, rank]).tolist()
            for one, other in ((before, after), (after, before))
        )
        assert len(gone_E) <= len(new_E), "a row would have no expert"
        for expert in gone_E:
            held[held.index(expert)] = new_E.pop(0)
        held += new_E
    return [tuple(held) for held in held_WP]


def _table_of(parameter: nn.Parameter, rows: int) -> Tensor:
    """Return a tensor [rows, ...] on the storage of a parameter [owned, ...]. Grows the storage if needed."""
    storage = parameter.data.untyped_storage()
    # A view of another tensor, or a parameter replaced by `.to`, is copied once to its own storage.
    is_shared = not parameter.is_contiguous() or parameter.storage_offset() or not storage.resizable()
    if is_shared or getattr(parameter, "_fusedmoe_table", None) != id(storage):
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        storage = parameter.data.untyped_storage()
        parameter._fusedmoe_table = id(storage)  # type: ignore[attr-defined]
    shape = (rows, *parameter.shape[1:])
    needed = torch.Size(shape).numel() * parameter.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage, 0, shape, stride)


def _replace_data(parameter: nn.Parameter, tensor: Tensor) -> None:
    parameter.grad = None
    # A retained loss holds the graph of an earlier forward, whose old shape autograd would check. A change of dtype
    # resets the recorded shape.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = tensor


def _unstacked_names(experts: Experts) -> list[str]:
    return [name for name, _ in experts.named_parameters() if experts.shardings.get(name, {}).get("ep") != 0]


def require_movable_experts(experts: Experts, count: int) -> None:
    """Raise `ConfigError` for experts with parameters that are not [experts, ...], or with buffers."""
    unstacked = _unstacked_names(experts)
    if unstacked or not count:
        raise ConfigError(
            f"placement='fssdp' moves experts that lie in one tensor, [experts, ...]; {type(experts).__name__} has "
            f"{', '.join(unstacked) or 'no experts'}. Use FeedForward or SwiGLU, or stack the parameters and say so: "
            "self.shardings[name] = {'ep': 0}."
        )
    # A replica would update a buffer, such as running statistics, without its owner.
    if any(True for _ in experts.buffers()):
        raise ConfigError(f"placement='fssdp' moves parameters only, and {type(experts).__name__} has buffers")


def require_stacked(experts: Experts, owned: int) -> None:
    """Raise `ConfigError` for a parameter that is not [owned, ...], for example after parametrisation."""
    wrong = _unstacked_names(experts)
    wrong += [name for name, one in experts.named_parameters() if one.dim() == 0 or len(one) != owned]
    if wrong:
        raise ConfigError(
            f"placement='fssdp' moves the rows of parameters, [experts, ...]; {type(experts).__name__} has "
            f"{', '.join(dict.fromkeys(wrong))} besides, parts of a parametrisation (LoRA), say. Make them "
            "[local experts, ...], one part for each expert, and say so before ShardedExperts is made: "
            "experts.shardings['parametrizations.w1.0.A'] = {'ep': 0}, and "
            "experts.shardings['parametrizations.w1.original'] = experts.shardings.pop('w1'); or use placement='ep'"
        )
