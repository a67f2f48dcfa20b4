"""Dispatchers: the base class, and the dispatcher of a single rank.

Subclasses send tokens by collectives (`Collectives`), by one-sided puts of kernels (`OneSided`), or to dynamically
placed experts (`PlacedDispatcher`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.experts import cast_down
from fusedmoe.autograd.order import row_weights
from fusedmoe.comm.metadata import INPUT_CHECK, NonFiniteCount
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import disable_current_modes, graph_task_id, saved_tensor_hooks, selective_modes
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.layout import Layout

Value = TypeVar("Value")


class LocalExperts(Protocol):
    """The experts of a rank, as a dispatcher calls them."""

    def __call__(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        """Return [S, M]: for each token of x_SM, the weighted sum of the results of its experts on this rank."""
        ...

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        """Return the same experts as `ChunkExperts`, to call on chunks of rows with the dtype and width of x_SM."""
        ...


@dataclass(eq=False)
class SharedExpert:
    """A shared expert and this rank's tokens in one forward pass, for a dispatcher that may compute it within a plan.

    `result`: [S, M]; None if no plan has computed it.
    """

    module: LocalExperts
    x_SM: Tensor
    result: Tensor | None = None


class Routed(NamedTuple):
    """Routed tokens of this rank.

    Attributes:
        weight_SK: [S, K] router weights, or None for 1.
        refusal: error message of this rank, which all ranks then raise; None: no error. `Collectives` also accept a
            count of non-finite values on the device, which the ranks exchange with the sizes.
        shared: the layer's shared expert, which `Collectives` compute within a plan; None: there is none.
    """

    x_SM: Tensor
    layout: Layout
    weight_SK: Tensor | None = None
    refusal: str | NonFiniteCount | None = None
    shared: SharedExpert | None = None


class Handle(NamedTuple):
    """Metadata of dispatched tokens, for the experts and for `combine`.

    Attributes:
        layout: sorts the received tokens by local expert.
        weight_N: router weight of each sorted row, applied by the experts; None for 1.
        counts_RE: rows by source rank and local expert, in sorted order; None: all are from this rank.
    """

    layout: Layout
    weight_N: Tensor | None
    counts_RE: Tensor | None = None
    state: Any = None


class Dispatcher:
    """Sends tokens to the ranks of their experts, and results back. Ranks call its methods in the same order.

        x_RM, handle = dispatcher.dispatch(Routed(x_SM, layout, weight_SK))
        y_RM = experts(x_RM, handle.layout, handle.weight_N)
        y_SM = dispatcher.combine(y_RM, handle)

    Worked example: two ranks, four experts (0 and 1 on rank 0, 2 and 3 on rank 1), K = 2. Rank 0 has tokens a → 0, 1
    and b → 3, 1; rank 1 has token c → 3, 2. A token is sent once to each rank that has experts for it:

        rank 0    a b to itself, b to rank 1       counts_E = [1, 2, 0, 1], tokens_W = [2, 1]
        rank 1    c to itself                      counts_E = [0, 0, 1, 1], tokens_W = [0, 1]

    `handle.layout` sorts received tokens, which are in order of source rank, as if they were local:

        rank 0    a b             expert 0: a, expert 1: a b       counts_RE = [[1, 2], [0, 0]]
        rank 1    b c             expert 2: c, expert 3: b c       counts_RE = [[0, 1], [1, 1]]

    Experts return one result per received token, the weighted sum of its rows' results on this rank. `combine` returns
    them: rank 0 sums b's results from ranks 0 and 1.

    A layer calls `through_experts`, so that a dispatcher can overlap the three steps by a plan. A custom dispatcher,
    passed as `MoELayer(dispatch=…)`, defines `dispatch` and `combine`, both differentiable, or `through_experts`;
    `examples/own_dispatcher.py` is one over ranks.

    Attributes:
        compiles: `through_experts` consists of operators that a compiler can capture.
        follows_plans: sends rows in chunks, by plans.
        sent_counts: (token, k) pairs and tokens sent in the last batch; None: not counted.
    """

    compiles: ClassVar[bool] = False
    follows_plans: ClassVar[bool] = False
    sent_counts: tuple[int, int] | None = None

    def __init_subclass__(cls) -> None:
        # A subclass may override methods with code that graphs cannot hold: it must declare `compiles` again.
        if "compiles" not in vars(cls):
            cls.compiles = False

    @classmethod
    def require_methods(cls) -> None:
        """Raise `ConfigError` for a subclass that implements neither `through_experts` nor both of its parts."""
        if cls.through_experts is not Dispatcher.through_experts:
            return
        missing = [name for name in ("dispatch", "combine") if getattr(cls, name) is getattr(Dispatcher, name)]
        if missing:
            raise ConfigError(
                f"{cls.__name__} does not implement {' and '.join(missing)}. A dispatcher implements dispatch(routed) "
                "-> (rows, handle) and combine(results, handle) -> sums, or through_experts(routed, experts) -> sums"
            )

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def collectives(self) -> Any:
        """The `Collectives` whose operators graphs and integrations use to send rows; None: no such operators."""
        return None

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        """Send tokens to their experts' ranks."""
        raise NotImplementedError

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        """Send results back, and return [S, M], the sum of each token's results. The adjoint of `dispatch`."""
        raise NotImplementedError

    def through_experts(self, routed: Routed, experts: LocalExperts) -> Tensor:
        """Dispatch, compute and combine: return [S, M], the sum of each token's results."""
        rows_RM, handle = self.dispatch(routed)
        return self.combine(experts(rows_RM, handle.layout, handle.weight_N), handle)


class Local(Dispatcher):
    """The dispatcher of a single rank: tokens stay in place."""

    compiles = True

    def dispatch(self, routed: Routed) -> tuple[Tensor, Handle]:
        return routed.x_SM, Handle(routed.layout, row_weights(routed.weight_SK, routed.layout))

    def combine(self, out_RM: Tensor, handle: Handle) -> Tensor:
        return out_RM


def call_module(experts: LocalExperts, rows_RM: Tensor, handle: Handle) -> Tensor:
    """Call experts as a module on dispatched rows. The result requires gradients if a parameter does."""
    y_RM = cast_down(experts(rows_RM, handle.layout, handle.weight_N), rows_RM)
    # Trainable experts take part in the backward even if no row has used a parameter.
    own = experts.parameters() if isinstance(experts, nn.Module) else ()
    if torch.is_grad_enabled() and not y_RM.requires_grad and any(one.requires_grad for one in own):
        y_RM = y_RM.detach().requires_grad_()
    return y_RM


def refuse(topology: Topology, refusal: str | None) -> None:
    if refusal:
        # Through the failure board: no exchange follows that could report it to the other ranks.
        topology.fail(INPUT_CHECK, refusal)
        raise (ConfigError if topology.size == 1 else RankError)(f"rank {topology.rank}: {refusal}")


def is_in_selective_checkpoint() -> bool:
    if saved_tensor_hooks(True) is None:
        return False
    with disable_current_modes() as modes:
        return any(isinstance(mode, selective_modes) for mode in modes)


def has_saved_tensor_hooks() -> bool:
    return saved_tensor_hooks(True) is not None


def is_recomputing() -> bool:
    """Return whether this forward is a recomputation by an activation checkpoint."""
    # A graph is the same in both cases. Outside the autograd engine the id is −1.
    return not torch.compiler.is_compiling() and graph_task_id() != -1


class ForwardDecision(Generic[Value]):
    """Decision of the last forward (`value`), reused when an activation checkpoint recomputes that forward.

    Checkpoints require equal saved tensors, so both must take the same decision. Copies of this object hold no value.
    """

    def __init__(self) -> None:
        self.value: Value | None = None

    def __reduce__(self) -> Any:
        return ForwardDecision, ()

    def decide(self, compute: Callable[[], Value | None]) -> Value | None:
        """Store and return the result of `compute()`; in a recomputation, return the stored value instead."""
        if not is_recomputing():
            self.value = compute()
        return self.value
