"""Tables of experts that move: which rows go to which place in them, their memory, and copies that come late.

A rank's table has the experts that it owns, and copies of others behind them (`layers/dynamic_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fusedmoe.comm.all_to_all import LastTokens
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts, Place
from fusedmoe.kernels.layout import Layout, offsets
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.traffic import Transfer


def first_place(experts: int, topology: Topology) -> Place:
    """Places a rank's experts at first: evenly over ep, in order; their number need not divide."""
    ep, esp = topology.ep, topology.esp
    owned = Placement.even(ep.size, experts).owned(ep.index)
    return Place(owned[0] if owned else 0, len(owned), esp.index, esp.size)


def nodes_of(topology: Topology) -> Nodes:
    """Nodes of the expert-parallel group."""
    # Where ranks do not fill nodes evenly and in order, transfers are planned as if each rank were one.
    node_W = [rank // topology.ranks_per_node for rank in topology.ep.ranks]
    per_node = node_W.count(node_W[0])
    even = len(node_W) == per_node * len(set(node_W))
    even = even and all(node == node_W[i - i % per_node] for i, node in enumerate(node_W))
    return Nodes(len(node_W), per_node if even else 1)


def of_all_shards(shards: Group, tokens_WE: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums the tokens of all ranks that have parts of the same experts. Collective over these."""
    # They decide as one: a replica needs all of its parts.
    if shards.size == 1:
        return tokens_WE
    summed_WE = torch.from_numpy(tokens_WE).to(device_of(shards), copy=True)
    return all_reduce(shards, summed_WE, operation="exchange of loads").cpu().numpy()


def by_place(layout: Layout, sent_EV: NDArray[np.int64], held_W: Sequence[Sequence[int]]) -> Layout:
    """Sorts rows that are sorted by expert by the places in tables that they go to.

    Places are numbered rank by rank, as many for each rank as the longest table has. Worked example: tables [0, 1] and
    [2, 0], sent_EV = [[2, 1], [0, 0], [0, 4]]: of three rows of expert 0 the first two go to place 0, on rank 0, and
    the third to place 3, on rank 1; the four of expert 2 go to place 2. So the rows 0 1 2 | 3 4 5 6 become
    0 1 | – | 3 4 5 6 | 2.

    Args:
        layout: of this rank's rows, without slack.
        sent_EV: rows of each expert that go to each rank.
        held_W: the experts in each rank's table.
    """
    # Ranks agree on the number of places without asking: all have the tables of all.
    width = max(1, *map(len, held_W))
    row_EV = np.zeros_like(sent_EV)
    for rank, held in enumerate(held_W):
        row_EV[list(held), rank] = np.arange(len(held))
    place_EV = row_EV + width * np.arange(len(held_W))
    place_N = torch.from_numpy(np.repeat(place_EV.reshape(-1), sent_EV.reshape(-1))).to(layout.counts_E.device)
    counts_P = torch.bincount(place_N, minlength=width * len(held_W))
    # From the order by expert to that by place: rows of one place keep their order.
    from_N = torch.argsort(place_N, stable=True)
    to_N = torch.empty_like(from_N)
    to_N[from_N] = torch.arange(len(from_N), device=from_N.device)
    row_SK = layout.row_SK
    if len(to_N):
        row_SK = torch.where(row_SK < 0, row_SK, to_N[row_SK.clamp_min(0)])
    assert layout.source_N is not None
    source_N, pair_N = layout.source_N[from_N], layout.pair_N[from_N]
    return Layout(counts_P, offsets(counts_P), source_N, pair_N, row_SK, verified=True)


def of_experts(layout: Layout, rows_E: NDArray[np.int64], chosen_E: NDArray[np.bool_]) -> tuple[Layout, Tensor]:
    """Returns the layout of some experts' rows alone, of all the tokens, and the rows [n] of the whole one that it has.

    Worked example: of rows 0 1 | 2 | 3 4 of three experts, the first and the last have the rows 0 1 | – | 2 3, which
    were 0, 1, 3, 4.

    Args:
        layout: without padding.
        rows_E: its counts, on the host.
        chosen_E: the experts whose rows stay.
    """
    device = layout.pair_N.device
    chosen_N = torch.from_numpy(np.repeat(chosen_E, rows_E))
    rows_n = chosen_N.nonzero()[:, 0]
    # The last place is of pairs that have no row.
    to_N = torch.full((len(chosen_N) + 1,), -1, device="cpu")
    to_N[rows_n] = torch.arange(len(rows_n), device="cpu")
    rows_n, to_N = rows_n.to(device), to_N.to(device)
    counts_E = layout.counts_E * torch.from_numpy(chosen_E).to(device)
    source_n = rows_n if layout.source_N is None else layout.source_N[rows_n]
    return Layout(counts_E, offsets(counts_E), source_n, layout.pair_N[rows_n], to_N[layout.row_SK], True), rows_n


def held_after(held_W: Sequence[tuple[int, ...]], before: Placement, after: Placement) -> list[tuple[int, ...]]:
    """Returns the experts in each rank's table after its copies have changed: new ones in the places of those that are
    there no longer, then behind all others. Ranks keep the tables of all, since places are numbered through them.

    Worked example: [0, 1] with a copy of 2 behind is [0, 1, 2]; with copies of 3 and 4 instead it becomes [0, 1, 3, 4].
    """
    held_WP = [list(held) for held in held_W]
    for rank, held in enumerate(held_WP):
        gone_E, new_E = (
            np.flatnonzero(one.holds_EW[:, rank] & ~other.holds_EW[:, rank]).tolist()
            for one, other in ((before, after), (after, before))
        )
        assert len(gone_E) <= len(new_E), "a place would have nothing in it"
        for expert in gone_E:
            held[held.index(expert)] = new_E.pop(0)
        held += new_E
    return [tuple(held) for held in held_WP]


def table(parameter: nn.Parameter, rows: int) -> Tensor:
    """Returns [rows, ...] in memory that begins with a parameter, [owned, ...]; takes more where needed."""
    storage = parameter.data.untyped_storage()
    # A view of other memory, or a parameter whose memory was given anew (`.to`), moves to memory of its own, once.
    shared = not parameter.is_contiguous() or parameter.storage_offset() or not storage.resizable()
    if shared or getattr(parameter, "_fusedmoe_table", None) != id(storage):
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        storage = parameter.data.untyped_storage()
        parameter._fusedmoe_table = id(storage)  # type: ignore[attr-defined]
    shape = (rows, *parameter.shape[1:])
    needed = torch.Size(shape).numel() * parameter.element_size()
    # Rows that are there stay where they are: replicas come behind the owned ones.
    if storage.nbytes() < needed:
        storage.resize_(needed)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage, 0, shape, stride)


def replace(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Gives a parameter data of another shape."""
    parameter.grad = None
    # A graph of an earlier forward that is still held (a loss that was kept) knows the parameter's old shape, and the
    # engine would go by it. A change of dtype makes it forget.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = tensor


def _unstacked(experts: Experts) -> list[str]:
    """Lists parameters that are not said to be [experts, ...]."""
    return [name for name, _ in experts.named_parameters() if experts.shardings.get(name, {}).get("ep") != 0]


def require_movable_experts(experts: Experts, count: int) -> None:
    """Raises `ConfigError` for experts that are not all in tables, and for those with buffers."""
    unstacked = _unstacked(experts)
    if unstacked or not count:
        raise ConfigError(
            f"placement='fssdp' moves experts that lie in one tensor, [experts, ...]; {type(experts).__name__} has "
            f"{', '.join(unstacked) or 'no experts'}. Use FeedForward or SwiGLU, or stack the parameters and say so: "
            "self.shardings[name] = {'ep': 0}."
        )
    # A buffer (running statistics, say) would be changed on a replica, and its owner would not know.
    if any(True for _ in experts.buffers()):
        raise ConfigError(f"placement='fssdp' moves parameters only, and {type(experts).__name__} has buffers")


def require_stacked(experts: Experts, owned: int) -> None:
    """Checks that all parameters are tables still: experts may have been parametrised since they were made.

    Raises:
        ConfigError: a parameter that is not known to be [owned, ...], one part for each expert.
    """
    wrong = _unstacked(experts)
    wrong += [name for name, one in experts.named_parameters() if one.dim() == 0 or len(one) != owned]
    if wrong:
        raise ConfigError(
            f"placement='fssdp' moves the rows of parameters, [experts, ...]; {type(experts).__name__} has "
            f"{', '.join(dict.fromkeys(wrong))} besides, parts of a parametrisation (LoRA), say. Make them "
            "[local experts, ...], one part for each expert, and say so before ShardedExperts is made: "
            "experts.shardings['parametrizations.w1.0.A'] = {'ep': 0}, and "
            "experts.shardings['parametrizations.w1.original'] = experts.shardings.pop('w1'); or use placement='ep'"
        )


class LateCopies:
    """The late copies of one layer, the same on all ranks.

    A rank gets them once the gate has chosen, and they follow the layer's rows. Worked example: rank 1's table is
    [2, 0], and its copy of expert 0 was chosen after the gate. Rows go first, then the copy; rank 1 computes its rows
    for expert 2 meanwhile, and those for expert 0 last.

    They are known until placements change: what is computed again, and a step's other forwards, must find the order of
    rows that the first one had. There they travel with all other copies.

    Args:
        transfers: what brings them; () where there are none.
        held_W: the experts in each rank's table.
        computed_EV: rows of each expert that each rank computes.
        start: starts them on their way, given whether that is to be recorded.
    Attributes:
        rows_W: their rows in each rank's table.
        tokens: those that go to them, which come last; None: there are none.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer] = (),
        held_W: Sequence[Sequence[int]] = (),
        computed_EV: NDArray[np.int64] | None = None,
        start: Callable[[bool], None] | None = None,
    ) -> None:
        came = {(one.target, one.expert) for one in transfers}
        self.rows_W = [
            [row for row, expert in enumerate(held) if (rank, expert) in came] for rank, held in enumerate(held_W)
        ]
        self._start = start
        self.tokens: LastTokens | None = None
        if computed_EV is not None:
            last_WP = np.zeros((len(held_W), max(map(len, held_W))), dtype=bool)  # places as `by_place` numbers them
            late_W = np.zeros(len(held_W))
            for rank, rows in enumerate(self.rows_W):
                last_WP[rank, rows] = True
                late_W[rank] = computed_EV[[held_W[rank][row] for row in rows], rank].sum()
            self.tokens = LastTokens(last_WP, late_W / np.maximum(computed_EV.sum(axis=0), 1))

    def __bool__(self) -> bool:
        return any(self.rows_W)

    @property
    def waiting(self) -> bool:
        """Tells whether they are to follow the rows of this forward, and have not started yet."""
        return self._start is not None

    def send(self, recorded: bool = True) -> bool:
        """Starts them on their way, and tells whether there were any to start. Collective.

        recorded: as a span of the layer's recorder; else the executor records a plan's task.
        """
        start, self._start = self._start, None
        if start is not None:
            start(recorded)
        return start is not None

    def forget(self) -> None:
        """Leaves those that have not started where they are."""
        self._start = None
