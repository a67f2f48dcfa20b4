"""Batches of deduplicated tokens and their expected results: plain sums over all ranks' tokens, without transport.

Every rank draws the tokens of all ranks from one seed, so each rank can compute the whole definition.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fusedmoe import autograd
from fusedmoe.autograd.order import permute, take_pairs, unpermute
from fusedmoe.comm import all_to_all, collectives, exchange
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.run import AssignedPlans
from fusedmoe.experts.networks import Custom, Experts, FeedForward, Place, SwiGLU, assign_evenly
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.layout import contiguous_layout, define_layout
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime.execute import Capabilities, runnable_kinds

#: Chunks forward and backward; None: no plan.
DEGREES = (None, (1, 1), (2, 2), (1, 3), (4, 2))

# (rank, generator) -> the experts that its tokens choose, [S, K]
Choose = Callable[[int, torch.Generator], Tensor]


class Elementwise(nn.Module):
    """User-defined expert whose results have the same bits whichever rows share its batch."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(model_dim)), nn.Parameter(torch.randn(model_dim))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows * self.a) * self.b


NETWORKS: dict[str, Callable[[int], Experts]] = {
    "swiglu": SwiGLU,
    "gelu": partial(FeedForward, activation="gelu", bias=True),
    "geglu": partial(FeedForward, activation="geglu", bias=True),
    "relu": partial(FeedForward, activation="relu", bias=False),
    "custom": lambda hidden: Custom(Elementwise),
}


@dataclass(frozen=True)
class Batch:
    """Tokens of all ranks, and the experts that they choose.

    Attributes:
        experts: E, in all.   choose: gives each rank's choices.
        ep, esp: sizes of the axes.   capacity: pairs that an expert accepts of a rank's.
        weights: makes router weights of random ones.   strided: tensors that are not contiguous are given.
    """

    name: str
    experts: int
    choose: Choose
    ep: int
    esp: int = 1
    dispatch: str = "direct"
    network: str = "gelu"
    capacity: int | None = None
    weights: Callable[[Tensor], Tensor] | None = None
    strided: bool = False
    M: int = 5
    H: int = 4
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}: E={self.experts} ep={self.ep} esp={self.esp} {self.dispatch} {self.network}"


@dataclass
class Tokens:
    """One rank's tokens, choices, router weights and gradients of results."""

    x_SM: Tensor
    expert_SK: Tensor
    weight_SK: Tensor
    dy_SM: Tensor


@dataclass
class Found:
    """One rank's results, gradients of tokens and weights, and expert gradients by name."""

    y: Tensor
    dx: Tensor
    dweight: Tensor
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        return {"y": self.y, "dx": self.dx, "dweight": self.dweight, **self.parameters}


def drawn(seed: int, world: int) -> Batch:
    """Draw a layout: sizes, axes, algorithm, choices (some without an expert), and an optional capacity."""
    draw = random.Random(f"{seed} of {world}")
    esp = draw.choice([1, 2]) if world > 2 or draw.random() < 0.2 else 1
    ep = world // esp
    if world > 2 and draw.random() < 0.15:
        ep //= 2  # two full sets of experts, without communication between them
    experts = ep * draw.randint(1, 4)
    k = draw.randint(1, experts)
    tokens = [draw.choice([0, 1, draw.randint(0, 40), draw.randint(0, 40)]) for _ in range(world)]
    kind = draw.choice(["distinct", "distinct", "any", "holes"])

    def choose(rank: int, generator: torch.Generator) -> Tensor:
        S = tokens[rank]
        distinct_SK = torch.rand(S, experts, generator=generator).argsort(1)[:, :k]
        any_SK = torch.randint(-1 if kind == "holes" else 0, experts, (S, k), generator=generator)
        return distinct_SK if kind == "distinct" else any_SK

    network = draw.choice([*NETWORKS] if esp == 1 else ["swiglu", "gelu", "geglu", "relu"])
    return Batch(
        f"seed {seed}, {kind}, K={k}, tokens {tokens}",
        experts,
        choose,
        ep,
        esp,
        draw.choice(["direct", "1dh", "2dh"]) if ep % 2 == 0 and esp == 1 and ep == world else "direct",
        network,
        draw.choice([None, None, 0, draw.randint(1, 8)]),
        strided=draw.random() < 0.3,
        M=draw.randint(1, 9),
        H=2 * draw.randint(1, 4),
        seed=seed,
    )


def tokens_of(batch: Batch, rank: int) -> Tokens:
    generator = torch.Generator().manual_seed(1000 * batch.seed + rank)
    expert_SK = batch.choose(rank, generator)
    S, K = expert_SK.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x_SM, weight_SK, dy_SM = normal(S, batch.M), normal(S, K), normal(S, batch.M)
    if batch.weights is not None:
        weight_SK = batch.weights(weight_SK)
    if batch.strided:  # every other column of a wider tensor, a transpose, and rows with a gap
        x_SM = torch.stack([x_SM, torch.full_like(x_SM, torch.nan)], 2).flatten(1)[:, ::2]
        expert_SK, weight_SK = (values.t().contiguous().t() for values in (expert_SK, weight_SK))
        dy_SM = torch.cat([dy_SM, torch.full_like(dy_SM, torch.nan)], 1)[:, : batch.M]
    return Tokens(x_SM.to(batch.dtype), expert_SK, weight_SK.to(batch.dtype), dy_SM.to(batch.dtype))


def all_experts(experts: Experts, x_SM: Tensor) -> Tensor:
    """Apply every expert to every token, [E, S, M]."""
    if isinstance(experts, Custom):
        return torch.stack([module(x_SM) for module in experts.experts.values()])
    assert isinstance(experts, FeedForward)
    gated = ACTIVATIONS[experts.activation].gated
    hidden = torch.einsum("sm,eghm->esgh" if gated else "sm,ehm->esh", x_SM, experts.w1)
    if experts.b1 is not None:
        hidden = hidden + experts.b1[:, None]
    if gated:
        gate, value = hidden.unbind(2)
        hidden = (nn.functional.silu if experts.activation == "swiglu" else nn.functional.gelu)(gate) * value
    else:
        hidden = (nn.functional.relu if experts.activation == "relu" else nn.functional.gelu)(hidden)
    y_ESM = torch.einsum("esh,emh->esm", hidden, experts.w2)
    return y_ESM if experts.b2 is None else y_ESM + experts.b2[:, None]


def make_experts(batch: Batch, place: Place) -> Experts:
    """Build a rank's experts: shards of the same model on all ranks."""
    torch.manual_seed(batch.seed)
    experts = NETWORKS[batch.network](batch.H)
    experts.setup(batch.M, place, dtype=batch.dtype)
    return experts


def define(batch: Batch, rank: int, ranks: list[int], place: Place) -> Found:
    """Compute a rank's expected results from the tokens of all `ranks` that share its experts."""
    whole = make_experts(batch, Place(0, batch.experts))
    own: Found | None = None
    for source in ranks:
        given = tokens_of(batch, source)
        x_SM, weight_SK = given.x_SM.requires_grad_(), given.weight_SK.requires_grad_()
        kept_SK = define_layout(given.expert_SK, batch.experts, batch.capacity).row_SK >= 0
        y_ESM = all_experts(whole, x_SM)
        token_S1 = torch.arange(len(x_SM))[:, None]
        y_SKM = y_ESM[given.expert_SK.clamp(min=0), token_S1]
        y_SM = (torch.where(kept_SK, weight_SK, 0)[..., None] * y_SKM).sum(1)
        y_SM.backward(given.dy_SM)
        if source == rank:
            own = Found(y_SM.detach(), _gradient(x_SM), _gradient(weight_SK))
    assert own is not None
    for name, parameter in whole.named_parameters():
        if isinstance(whole, Custom):
            if int(name.split(".")[1]) in place.numbers:
                own.parameters[name] = _gradient(parameter)
            continue
        own.parameters[name] = slice_of(_gradient(parameter), name, place.numbers, place)
    return own


def slice_of(whole: Tensor, name: str, numbers: Sequence[int], place: Place) -> Tensor:
    """Slice the parameter of all feed-forward experts to the shard of some experts."""
    own = whole[list(numbers)]
    # The halves of a gated activation precede H; a slice may be empty if M is smaller than the number of shards.
    dim = {"w1": own.dim() - 2, "b1": own.dim() - 1, "w2": 2, "b2": 1}[name]
    parts = own.chunk(place.shards, dim)
    return parts[place.shard] if place.shard < len(parts) else own.narrow(dim, 0, 0)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def dispatcher_of(batch: Batch, topology: Topology, degrees: tuple[int, int] | None) -> Collectives:
    """Build the dispatcher, with a plan of the given chunk counts in each pass."""
    way = make_all_to_all(batch.dispatch, topology)
    if degrees is None:
        return Collectives(topology, way)
    kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "itself")
    assigned = AssignedPlans(Schedule("fsmoe", degrees).plans(kinds, None))
    return Collectives(topology, way, lambda *_: assigned)


def travel(batch: Batch, rank: int, topology: Topology, degrees: tuple[int, int] | None) -> Found:
    """Send a rank's tokens through the experts of all ranks, and gradients back."""
    given, experts = tokens_of(batch, rank), make_experts(batch, assign_evenly(batch.experts, topology))
    x_SM, weight_SK = given.x_SM.requires_grad_(), given.weight_SK.requires_grad_()
    layout = autograd.order(given.expert_SK, batch.experts, batch.capacity)
    with topology.guard("a batch"):
        dispatcher = dispatcher_of(batch, topology, degrees)
        y_SM = dispatcher.through_experts(Routed(x_SM, layout, weight_SK), experts)
        y_SM.backward(given.dy_SM)
    parameters = {name: _gradient(parameter) for name, parameter in experts.named_parameters()}
    return Found(y_SM.detach(), _gradient(x_SM), _gradient(weight_SK), parameters)


def check(batch: Batch, rank: int, topology: Topology) -> None:
    """Compare all plans with the definition, and compare no plan with the one-chunk plan bit by bit."""
    assert topology.expert_grid is not None
    ranks = next(grid.flatten().tolist() for grid in topology.expert_grid if rank in grid)
    right = define(batch, rank, ranks, assign_evenly(batch.experts, topology)).named()
    plain: dict[str, Tensor] = {}
    for degrees in DEGREES:
        if batch.network == "custom" and degrees is not None and degrees[0] != degrees[1]:
            continue
        found = travel(batch, rank, topology, degrees).named()
        assert found.keys() == right.keys()
        for name, expected in right.items():
            got = found[name]
            assert got.shape == expected.shape, (str(batch), degrees, name, got.shape, expected.shape)
            error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-3) if got.numel() else 0.0
            assert error <= 1e-10, (str(batch), degrees, name, float(error))
        if degrees is None:
            plain = found
        elif degrees == (1, 1):
            assert all(torch.equal(found[name], value) for name, value in plain.items()), str(batch)


def travel_by_pairs(batch: Batch, rank: int, topology: Topology) -> None:
    """Send each pair as a separate row, as the transport does for rows that are not copies of tokens."""
    given, experts = tokens_of(batch, rank), make_experts(batch, assign_evenly(batch.experts, topology))
    layout = autograd.order(given.expert_SK, batch.experts, batch.capacity)
    x_NM = permute(given.x_SM.requires_grad_(), layout)
    weight_N1 = take_pairs(given.weight_SK.requires_grad_(), layout)[:, None]
    routed = Routed(x_NM, contiguous_layout(layout.counts_E, len(x_NM)), weight_N1)
    unpermute(dispatcher_of(batch, topology, None).through_experts(routed, experts), layout).backward(given.dy_SM)


@dataclass
class Wire:
    """Rows that left this rank in collectives, without the counts of metadata exchanges.

    Attributes:
        rows: by axis of the group and width of a row in bytes.
    """

    rows: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(width * rows for (_, width), rows in self.rows.items())

    def of_width(self, width: int) -> dict[str, int]:
        return {axis: rows for (axis, row_width), rows in self.rows.items() if row_width == width}


@contextmanager
def counted() -> Iterator[Wire]:
    """Count the rows that leave this rank."""
    move, wire = collectives.all_to_all_rows, Wire()

    def spy(group: Group, rows: Tensor, send: Any, *more: Any, **named: Any) -> Tensor:
        if rows.dtype != torch.int64:
            key = group.axis, rows.shape[1:].numel() * rows.itemsize
            others = sum(count for peer, count in enumerate(send) if peer != group.index)
            wire.rows[key] = wire.rows.get(key, 0) + others
        return move(group, rows, send, *more, **named)

    with (
        patch.object(collectives, "all_to_all_rows", spy),
        patch.object(all_to_all, "all_to_all_rows", spy),
        patch.object(exchange, "all_to_all_rows", spy),
    ):
        yield wire
