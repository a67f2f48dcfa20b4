"""A stack of layers as its two passes call it: what each layer computes of a piece, and what goes between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fusedmoe.autograd.chunk_experts import ChunkExperts
from fusedmoe.autograd.linear_later import Later
from fusedmoe.autograd.pipeline import Plans
from fusedmoe.comm.exchange import Exchange
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.task import Task


class Choice(Protocol):
    """What a stack needs of a gate's routing; see `fusedmoe.layers.gates.Routing`."""

    expert_SK: Tensor
    weight_SK: Tensor
    aux_loss: Tensor


class Dense(NamedTuple):
    """What a layer computes of a piece by itself.

    Attributes:
        y: the residual stream, like x.   u: what the experts see, like x, in the dtype in which it travels.
        scores: of the gate, [S, …] each.   routing: by them.
        own: what later pieces of the same samples need of this one; empty where pieces are whole samples.
    """

    y: Tensor
    u: Tensor
    scores: tuple[Tensor, ...]
    routing: Choice
    own: tuple[Tensor, ...]


class Stage(Protocol):
    """One layer.

    Attributes:
        experts_in_all: E.
        waits: whether it takes all tokens to know which rows an expert has no room for.
        dense_parameters: of dense part and gate, the model's own.
    """

    experts_in_all: int
    waits: bool

    @property
    def dense_parameters(self) -> Sequence[torch.nn.Parameter]: ...

    def capacity(self, tokens: int) -> int | None:
        """Rows that an expert takes of so many tokens; None: all."""
        ...

    def draw(self, x: Tensor) -> tuple[Tensor, ...]:
        """What belongs to the tokens of a batch beside x: random numbers, above all. First dimensions are tokens'."""
        ...

    def dense(
        self,
        parameters: Sequence[Tensor],
        x: Tensor,
        drawn: tuple[Tensor, ...],
        past: Sequence[tuple[Tensor, ...]],
        later: Later | None,
    ) -> Dense:
        """Of one piece [b, …, M].

        Args:
            parameters: to compute with in place of `dense_parameters`.
            past: `own` of the pieces before of the same samples.
            later: takes the weight gradients that may be computed later; None: none may.
        """
        ...

    def choose(self, scores: tuple[Tensor, ...]) -> Choice:
        """The routing of the whole batch, with its auxiliary loss."""
        ...

    def count(self, routing: Choice, kept_E: Tensor) -> None:
        """Told the routing of the whole batch, and how many rows of each expert were kept of it."""
        ...

    def exchange(self, counts: Tensor, like: Tensor, routings: Sequence[Choice]) -> Exchange: ...

    def experts(self, like: Tensor) -> ChunkExperts: ...


class Gradients(Protocol):
    """Reduces the gradients of dense parts while the backward pass goes on; by `training.gradient_buckets`."""

    @property
    def opened(self) -> bool:
        """Whether gradients of the pass that comes are to be reduced."""
        ...

    def give(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        """A gradient that is complete, in memory of its own; it is reduced in place."""
        ...

    def reduce(self, task: Task) -> None: ...


@dataclass(frozen=True, eq=False)
class Stack:
    """What a call of `through_stack` needs beside tensors.

    Attributes:
        axis: of the batch that is cut: 0, samples, or 1, positions; these then go to `Stage.dense` in order.
        peers: ranks that the experts are split over.
        stop: told of an exception on this rank while others wait for it.
        gradients: reduces the gradient pieces in the backward plan.
        streams: one for each resource, on CUDA.
    """

    stages: Sequence[Stage]
    plans: Plans
    peers: int
    stop: Callable[[BaseException], None]
    axis: int = 0
    gradients: Gradients | None = None
    recorder: Recorder | None = None
    streams: Mapping[str, torch.cuda.Stream] | None = None
