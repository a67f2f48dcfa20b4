"""Deduplicated tokens through whole layers: placed experts, blocks, graphs; and a peer's invalid expert assignments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import MoELayer, Schedule, Topology, gates
from fusedmoe.blocks import forward as blocks_forward
from fusedmoe.comm import exchange, forwarding
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.experts.networks import FeedForward
from fusedmoe.kernels import deduplicate
from fusedmoe.training import ShardedExperts, save_communication
from tests.cluster import Cluster
from tests.comm.failing import nothing
from tests.layers.tokens_once import Batch, all_experts, slice_of, travel

M, E, K = 6, 8, 5
SAMPLES = (4, 0, 7, 1)  # by rank, of three positions each


class ByBits(gates.Gate):
    """Route a token by the bits of its values: often to expert 0, to some experts twice, with some slots empty."""

    splits: ClassVar[bool] = True

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_KM": (self.k, model_dim)}

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight_KM)

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            number_SK = (x_SM[:, : self.k] * 1e4).abs().to(torch.int64) % (2 * self.experts) - 1
            expert_SK = torch.where(number_SK < self.experts, number_SK, 0)
        return expert_SK, x_SM @ self.weight_KM.t()

    def choose(self, *scores: Tensor) -> gates.Routing:
        expert_SK, weight_SK = scores
        return self.routing(expert_SK, weight_SK)


class Dense(nn.Module):
    """Elementwise dense part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 2, M, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sin(x) + self.scale


def blocks_over(topology: Topology | None, **options: Any) -> nn.ModuleList:
    """Two blocks, x → x + experts(u) with (x, u) = dense(x), equal in every world."""
    torch.manual_seed(5)
    layers = (MoELayer(M, ByBits(E, K), FeedForward(4), topology=topology, mp_input="split", dtype=torch.float64,
                       **options) for _ in range(2))  # fmt: skip
    return nn.ModuleList(nn.ModuleList([Dense(), layer]) for layer in layers)


Way = Callable[[nn.ModuleList, Tensor], Tensor]


def run_blocks_with(call: Callable[[MoELayer, Tensor], Tensor]) -> Way:
    """Build the function that runs the blocks and applies each layer with `call`."""

    def through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for dense, layer in blocks:  # type: ignore[misc]
            x, u = dense(x)
            x = x + call(layer, u)
        return x

    return through


def call_compiled(layer: MoELayer, u: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's compiler calls its own deprecated functions
        result: Tensor = torch.compile(layer, fullgraph=True, backend="aot_eager")(u)
    return result


def call_in_checkpoint(layer: MoELayer, u: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, u, use_reentrant=False, context_fn=save_communication)
    return result


def run_in_micro_batches(degrees: tuple[int, int]) -> Way:
    return lambda blocks, x: fusedmoe.pipeline([tuple(block) for block in blocks], degrees)(x)  # type: ignore[arg-type]


# name -> (the layers' options, how blocks are called)
CALLS: dict[str, tuple[dict[str, Any], Way]] = {
    "layers": ({}, run_blocks_with(lambda layer, u: layer(u))),
    "schedules": ({"schedule": Schedule("fsmoe", (2, 3))}, run_blocks_with(lambda layer, u: layer(u))),
    "graphs": ({}, run_blocks_with(call_compiled)),
    "checkpoints": ({}, run_blocks_with(call_in_checkpoint)),
    "blocks": ({}, run_in_micro_batches((2, 3))),
    "blocks in one chunk": ({}, run_in_micro_batches((1, 1))),
    "placed": ({"placement": "fssdp"}, run_blocks_with(lambda layer, u: layer(u))),
    "placed and scheduled": (
        {"placement": "fssdp", "schedule": Schedule("fsmoe", (3, 2))},
        run_blocks_with(lambda layer, u: layer(u)),
    ),
    "placed blocks": ({"placement": "fssdp"}, run_in_micro_batches((2, 3))),
}


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, dz = (torch.randn(SAMPLES[rank], 3, M, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.requires_grad_(), dz


def layer_definition(layer: MoELayer, u: Tensor) -> Tensor:
    """Layer by its definition, with all experts."""
    u_SM = u.reshape(-1, M)
    routing = layer.gate(u_SM)
    y_SKM = all_experts(layer.experts, u_SM)[routing.expert_SK.clamp(min=0), torch.arange(len(u_SM))[:, None]]
    weight_SK = torch.where(routing.expert_SK >= 0, routing.weight_SK, 0)
    return (weight_SK[..., None] * y_SKM).sum(1).view_as(u)


def compare_with_definition(rank: int, world: int, name: str, esp: int) -> int:
    """Compare with the definition; return the number of expert replicas."""
    torch._dynamo.reset()
    topology = Topology.from_sizes(world // esp, esp, ranks_per_node=2, timeout_s=30)
    options, call = CALLS[name]
    blocks, whole = blocks_over(topology, **options), blocks_over(None)
    right: dict[int, tuple[Tensor, Tensor]] = {}
    for source in range(world):
        x, dz = batch_of(source)
        z = run_blocks_with(layer_definition)(whole, x)
        z.backward(dz)
        right[source] = z.detach(), x.grad  # type: ignore[assignment]
    sharded, optimizer, copies = None, torch.optim.SGD(blocks.parameters(), lr=0.0), 0
    if "placed" in name:
        sharded = ShardedExperts(blocks, optimizer, topology, overlap=4, memory=2)
    for _ in range(3):  # from the second step on, counted loads move experts and add replicas
        optimizer.zero_grad()
        copies += 0 if sharded is None else sum(str(placement).count("+") for placement in sharded.placements)
        x, dz = batch_of(rank)
        z = call(blocks, x)
        z.backward(dz)
        assert x.grad is not None
        assert_close(z, right[rank][0])
        assert_close(x.grad, right[rank][1])
        everything = dict(whole.named_parameters())
        for key, parameter in blocks.named_parameters():
            expected, got = (
                everything[key].grad,
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad,
            )
            assert expected is not None
            path, _, last = key.rpartition(".")
            if path.endswith("experts"):
                experts = blocks.get_submodule(path)
                assert (
                    isinstance(experts, FeedForward) and experts.own_numbers is not None and experts.place is not None
                )
                expected = slice_of(expected, last, experts.own_numbers, experts.place)
            else:
                got = all_reduce(topology.world, got.clone())
            assert_close(got, expected)
        optimizer.step()
    return copies


def assert_close(got: Tensor, right: Tensor) -> None:
    assert got.shape == right.shape
    if right.numel():
        assert (got - right).abs().max() <= 1e-10 * right.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(
    ("name", "world", "esp"),
    [
        pytest.param(name, *way, marks=() if way == (2, 1) and name in quick else pytest.mark.slow)
        for quick in [("schedules",)]
        for name in CALLS
        for way in [(2, 1), (4, 1), (4, 2)]
    ],
)
def test_deduplicated_layers_equal_definition(cluster: Cluster, name: str, world: int, esp: int) -> None:
    copies = cluster.run(world, compare_with_definition, name, esp)
    assert "placed" not in name or min(copies) > 0


def _flip(code_N: Tensor, at: int, code: int) -> Tensor:
    wrong_N = code_N.clone()
    wrong_N[at] = code
    return wrong_N


def _swapped(code_N: Tensor) -> Tensor:
    """Mark a pair other than the first as its token's first pair."""
    at = int((code_N & 1 == 0).nonzero()[0])
    wrong_N = code_N.clone()
    wrong_N[0] -= 1
    wrong_N[at] += 1
    return wrong_N


def _last(code_N: Tensor, first: int) -> int:
    return int((code_N & 1 == first).nonzero()[-1])


here = E // 2
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "last expert changed": lambda code_N: _flip(code_N, -1, (int(code_N[-1]) + 2) % (2 * here)),
    "first expert changed": lambda code_N: _flip(code_N, 0, (int(code_N[0]) + 2) % (2 * here)),
    "first mark moved": _swapped,
    "expert out of range": lambda code_N: _flip(code_N, -1, 2 * here + int(code_N[-1])),
    "negative expert": lambda code_N: _flip(code_N, -1, int(code_N[-1]) - 2 * here),
    "int16 minimum": lambda code_N: _flip(code_N, 0, -(2**15)),
    "first mark missing": lambda code_N: _flip(code_N, _last(code_N, 1), int(code_N[_last(code_N, 1)]) - 1),
    "extra first mark": lambda code_N: _flip(code_N, _last(code_N, 0), int(code_N[_last(code_N, 0)]) + 1),
    "zeros": torch.zeros_like,
    "noise": lambda code_N: torch.randint_like(code_N, -(2**15), 2**15 - 1),
}


def send_wrong_assignments(rank: int, world: int, name: str, esp: int, wrong: str, culprit: int) -> None:
    torch._dynamo.reset()
    # Longer than the run may take, so no rank ends on a time-out.
    topology = Topology.from_sizes(world // esp, esp, ranks_per_node=2, timeout_s=300)
    options, call = CALLS[name]
    blocks = blocks_over(topology, **options)
    # Every rank has tokens, and two passes succeed.
    x = torch.randn(4 + rank, 3, M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        call(blocks, x).sum().backward()

    def pack(code_N: Tensor | None, weight_N: Tensor | None) -> Tensor | None:
        return deduplicate.pack(None if code_N is None else WRONG[wrong](code_N), weight_N)

    with pytest.MonkeyPatch.context() as patch:
        if rank == culprit:
            patch.setattr(exchange, "pack", pack)
            patch.setattr(blocks_forward, "pack", pack)
        call(blocks, x).sum().backward()


def assert_culprit_named(cluster: Cluster, name: str, world: int, esp: int, wrong: str, culprit: int) -> None:
    cluster.run(world, nothing)  # starting ranks is slow
    outcomes = cluster.outcomes(world, send_wrong_assignments, name, esp, wrong, culprit, timeout_s=80)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, (rank, wrong)
        kind, text, _ = outcome.error
        assert kind == "RankError" and text.startswith(f"rank {rank}: "), outcome.error
        assert f"ended because rank {culprit} failed in exchange of pairs" in text, text


# Each combination of a data path and a fault, on alternating ranks; graphs, slow to build, with a third of the faults.
@pytest.mark.parametrize(
    ("name", "wrong", "culprit"),
    [
        pytest.param(name, wrong, by, marks=() if number == place and name in quick else pytest.mark.slow)
        for quick in [("layers", "blocks", "checkpoints")]
        for number, name in enumerate(["layers", "schedules", "graphs", "blocks", "placed", "checkpoints"])
        for place, wrong in enumerate(WRONG)
        for by in [(number + place + 1) % 2]
        if name != "graphs" or place % 3 == 2
    ],
)
def test_invalid_assignments_of_peer_end_all_ranks(cluster: Cluster, name: str, wrong: str, culprit: int) -> None:
    assert_culprit_named(cluster, name, 2, 1, wrong, culprit)


@pytest.mark.parametrize(
    ("name", "wrong", "culprit"),
    [
        pytest.param(name, wrong, by, marks=() if (name, number, by) == ("layers", 7, 3) else pytest.mark.slow)
        for name in ("layers", "schedules", "graphs", "blocks")
        for number, wrong in enumerate(WRONG)
        for by in [number % 4]
        if name != "graphs" or number % 4 == 0  # slow to build
    ],
)
def test_invalid_assignments_error_names_sending_shard(cluster: Cluster, name: str, wrong: str, culprit: int) -> None:
    """The error names the sending shard, rather than the rank that forwarded the assignments to other shards."""
    assert_culprit_named(cluster, name, 4, 2, wrong, culprit)


def send_wrong_positions(rank: int, world: int, wrong: str, culprit: int, dispatch: str) -> None:
    topology = Topology.from_sizes(world, ranks_per_node=2, timeout_s=300)
    batch = Batch("places", 8, partial(some_experts, 8), world, dispatch=dispatch)

    def pack(code_N: Tensor, weight_N: Tensor | None) -> Tensor | None:
        return deduplicate.pack(WRONG[wrong](code_N), weight_N)

    with pytest.MonkeyPatch.context() as patch:
        if rank == culprit:
            patch.setattr(forwarding, "pack", pack)
        travel(batch, rank, topology, (2, 2))


def some_experts(experts: int, rank: int, generator: torch.Generator) -> Tensor:
    return torch.rand(9 + rank, experts, generator=generator).argsort(1)[:, :3]


@pytest.mark.parametrize(
    ("wrong", "culprit", "dispatch"),
    [
        pytest.param(*of, marks=() if of == ("first mark moved", 1, "2dh") else pytest.mark.slow)
        for number, wrong in enumerate(WRONG)
        for of in [(wrong, 1 + number % 2, "1dh"), (wrong, 2 - number % 2, "2dh")]
    ],
)
def test_invalid_positions_of_peer_end_all_ranks(cluster: Cluster, wrong: str, culprit: int, dispatch: str) -> None:
    """The ranks that forward the peer's tokens name it."""
    outcomes = cluster.outcomes(4, send_wrong_positions, wrong, culprit, dispatch, timeout_s=80)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, (rank, wrong)
        kind, text, _ = outcome.error
        assert kind == "RankError" and f"rank {culprit} failed in exchange of destination ranks" in text, text
