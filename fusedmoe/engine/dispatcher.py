"""Dispatchers: a base class, the one for a single rank, and what they are given and hand back.

Local          nothing travels                                               here
Collectives    all-to-alls, all-gathers, reduce-scatters, by plans           `engine/collectives_dispatcher.py`
OneSided       kernels put tokens into other ranks' memory                   `engine/one_sided_dispatcher.py`
Moving         experts are where a placement says                            `layers/placed_dispatcher.py`
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedmoe.autograd.order import take_pairs
from fusedmoe.comm.metadata import CHECK, NonFinite
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import disable_current_modes, graph_task_id, saved_tensor_hooks, selective_modes
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.layout import Layout


class LocalExperts(Protocol):
    """The experts of a rank; see `fusedmoe.experts.networks.Experts`."""

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """Returns for each row of x_SM the sum of its sorted rows' results, times their weights."""
        ...

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """Returns the same experts for rows like these in chunks, forward and backward apart."""
        ...


class Routed(NamedTuple):
    """Tokens of this rank, and where they are to go.

    Attributes:
        x_SM: [S, M].
        layout: their rows, sorted by expert, of all E experts.
        weight_SK: [S, K] router weights, or None for 1.
        refusal: why this rank cannot take part, if so; then all ranks end with that reason. On CUDA `Collectives` are
            given a count of bad numbers, which ranks tell each other with sizes: the host does not wait to know it.
    """

    x_SM: Tensor
    layout: Layout
    weight_SK: Tensor | None = None
    refusal: str | NonFinite | None = None


class Handle(NamedTuple):
    """Tokens that were dispatched, as experts and `combine` need to know them.

    Attributes:
        layout: sorts the received tokens' rows by local expert.
        weight_N: the router weight of each sorted row, which experts multiply results by; None for 1.
        counts_RE: rows by source rank and local expert, in the order in which they are sorted; None: all are from here.
        state: whatever the dispatcher wants back.
    """

    layout: Layout
    weight_N: Tensor | None
    counts_RE: Tensor | None = None
    state: Any = None


class Dispatcher:
    """Takes tokens to the ranks of their experts, and results back. Ranks call the same methods in the same order.

        x_RM, handle = dispatcher.dispatch(Routed(x_SM, layout, weight_SK))
        y_RM = experts(x_RM, handle.layout, handle.weight_N)
        y_SM = dispatcher.combine(y_RM, handle)

    Worked example, two ranks, four experts (0 and 1 on rank 0, 2 and 3 on rank 1), K = 2. Rank 0 has tokens a → 0, 1
    and b → 3, 1; rank 1 has token c → 3, 2. A token goes once to each rank that has experts for it:

        rank 0    a b to itself, b to rank 1       counts_E = [1, 2, 0, 1], tokens_W = [2, 1]
        rank 1    c to itself                      counts_E = [0, 0, 1, 1], tokens_W = [0, 1]

    Tokens arrive by source rank, and `handle.layout` is that of tokens with these experts, as if they were local:

        rank 0    a b             expert 0: a, expert 1: a b       counts_RE = [[1, 2], [0, 0]]
        rank 1    b c             expert 2: c, expert 3: b c       counts_RE = [[0, 1], [1, 1]]

    Experts return one result for each token in the order of arrival: the weighted sum of its rows' results there.
    `combine` takes it back: rank 0 has all of a, and sums b's results of rank 0 and rank 1; rank 1 has all of c.

    A layer calls the three as one, `through_experts`, so that a dispatcher can have them overlap by a plan. One of your
    own defines `dispatch` and `combine`, differentiable both, and is given to `MoELayer(dispatch=…)`.

    Attributes:
        compiles: a compiler can take all that `through_experts` does into a graph, as operators.
        follows_plans: it has rows go in chunks, by plans.
        travelled: the (token, k) pairs and the tokens of the last batch that travelled; None: not counted.
    """

    compiles: ClassVar[bool] = False
    follows_plans: ClassVar[bool] = False
    travelled: tuple[int, int] | None = None

    def __init_subclass__(cls) -> None:
        # Graphs take operators, not what a subclass does in their place: it has to say so again.
        if "compiles" not in vars(cls):
            cls.compiles = False

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def collectives(self) -> Any:
        """The `Collectives` by whose operators graphs and integrations send rows; None: it has no such operators."""
        return None

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        """Takes tokens to their experts' ranks."""
        raise NotImplementedError

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """Returns [S, M], the sum of each token's results. The inverse way of `dispatch`."""
        raise NotImplementedError

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        """Returns [S, M], the sum of each token's results: dispatch, experts, combine."""
        rows_RM, handle = self.dispatch(routed)
        return self.combine(experts(rows_RM, handle.layout, handle.weight_N), handle)


class Local(Dispatcher):
    """Leaves tokens where they are."""

    compiles = True

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return routed.x_SM, Handle(routed.layout, weight_of_rows(routed.weight_SK, routed.layout))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        return out_RM


def weight_of_rows(weight_SK: Tensor | None, layout: Layout) -> Tensor | None:
    """Returns the router weight of each sorted row; None for 1."""
    return None if weight_SK is None else take_pairs(weight_SK, layout)


def refuse(topology: Topology, refusal: str | None) -> None:
    """Raises a refusal, if there is any, and tells the other ranks."""
    if refusal:
        # On the board, for no exchange will follow by which the other ranks would hear of it.
        topology.fail(CHECK, refusal)
        raise (ConfigError if topology.size == 1 else RankError)(f"rank {topology.rank}: {refusal}")


def selects() -> bool:
    """Tells whether a selective activation checkpoint, forward or when it recomputes, chooses among operators."""
    # Such a checkpoint lets each operator's result be taken once, in the order of the forward.
    if saved_tensor_hooks(True) is None:  # there is no checkpoint
        return False
    with disable_current_modes() as modes:
        return any(isinstance(mode, selective_modes) for mode in modes)


def packs() -> bool:
    """Tells whether hooks take what autograd saves here, as those of an activation checkpoint do."""
    return saved_tensor_hooks(True) is not None


def recomputing() -> bool:
    """Tells whether this forward runs inside a backward, for activation checkpointing: nothing may then count twice."""
    # A graph cannot ask, and is the same in both. Outside of autograd's engine the id is −1.
    return not torch.compiler.is_compiling() and graph_task_id() != -1
