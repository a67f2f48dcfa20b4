"""float32 and bfloat16 results are within the rounding that a float64 reference explains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import FeedForward, SwiGLU
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.layers import plain
from tests.marks import slowly

S, M, H, E, K = 600, 48, 80, 4, 2
EXPERTS = {"swiglu": lambda: SwiGLU(H), "feed_forward": lambda: FeedForward(H, "gelu", bias=True)}


def build(experts: str, dtype: torch.dtype, seed: int, topology: Topology | None = None) -> MoELayer:
    torch.manual_seed(seed)
    gate = fusedmoe.gates.TopK(experts=E, k=K)
    layer = MoELayer(M, gate, EXPERTS[experts](), topology=topology, dtype=dtype)
    with torch.no_grad():
        gate.weight_EM.normal_(std=0.2)
    return layer


def inputs(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(S, M, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def errors(
    ours: dict[str, Tensor], exact: dict[str, Tensor], plain_torch: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Return per result the relative errors of the layer and of plain torch in the same dtype."""
    assert ours.keys() == exact.keys() == plain_torch.keys()
    return {name: (plain.error(ours[name], t), plain.error(plain_torch[name], t)) for name, t in exact.items()}


@pytest.mark.parametrize("experts", EXPERTS)
def test_float32_error_is_within_rounding(experts: str) -> None:
    seed = torch.seed() % 2**31
    layer = build(experts, torch.float32, seed)
    x, dy = inputs(torch.float32, seed)
    exact = plain.gradients(layer, x, dy, plain.chosen_experts(layer, x), torch.float64)
    for name, t in plain.of_layer(layer, x, dy).items():
        assert plain.error(t, exact[name]) < 1e-5, (seed, name)


@pytest.mark.parametrize("experts", EXPERTS)
def test_bfloat16_error_is_at_most_plain_torch(experts: str) -> None:
    seed = torch.seed() % 2**31
    layer = build(experts, torch.bfloat16, seed)
    x, dy = inputs(torch.bfloat16, seed)
    chosen = plain.chosen_experts(layer, x)
    exact = plain.gradients(layer, x, dy, chosen, torch.float64)
    usual = plain.gradients(layer, x, dy, chosen, torch.bfloat16)
    for name, (ours, theirs) in errors(plain.of_layer(layer, x, dy), exact, usual).items():
        assert theirs > 1e-4, name  # the reference does round
        assert ours <= 1.5 * theirs, (seed, name, ours, theirs)


@pytest.mark.parametrize("experts", EXPERTS)
def test_autocast_error_is_at_most_plain_torch(experts: str) -> None:
    seed = torch.seed() % 2**31
    layer = build(experts, torch.float32, seed)
    x, dy = inputs(torch.float32, seed)
    chosen = plain.chosen_experts(layer, x)
    exact = plain.gradients(layer, x, dy, chosen, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        usual = plain.gradients(layer, x, dy, chosen, torch.float32)
        ours = plain.of_layer(layer, x, dy)
        assert layer(x).dtype == torch.bfloat16
        inside = plain.chosen_experts(layer, x)
    assert torch.equal(inside, chosen)  # the router stays in float32
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}
    for name, (our_error, theirs) in errors(ours, exact, usual).items():
        assert our_error > 1e-4 or name == "gate.weight_EM", name  # autocast was on
        assert our_error <= 1.5 * theirs, (seed, name, our_error, theirs)


def compare_errors_on_rank(
    rank: int, world: int, ep: int, esp: int, experts: str, dtype: torch.dtype, seed: int
) -> None:
    topology = Topology.from_sizes(ep, esp)
    whole, layer = build(experts, dtype, seed), build(experts, dtype, seed, topology)
    x, dy = inputs(dtype, seed + rank)
    chosen = plain.chosen_experts(whole, x)
    exact = plain.gradients(whole, x, dy, chosen, torch.float64)
    usual = plain.gradients(whole, x, dy, chosen, dtype)
    ours = plain.of_layer(layer, x, dy)
    for results in (exact, usual):  # an expert's gradient includes all ranks' tokens
        for name in exact:
            if name.startswith("experts."):
                whole_grad = all_reduce(topology.world, results[name])
                for axis, dim in layer.experts.shardings[name.removeprefix("experts.")].items():
                    group = getattr(topology, axis)
                    whole_grad = whole_grad.chunk(group.size, dim)[group.index]
                results[name] = whole_grad
    for name, (our_error, theirs) in errors(ours, exact, usual).items():
        # Each of the esp summands is rounded, and plain torch rounds their sum: independent errors add in squares.
        bound = 1e-5 if dtype == torch.float32 else 1.5 * math.sqrt(esp) * theirs
        assert our_error <= bound, (seed, name, our_error, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float32)], ids=str)
@pytest.mark.parametrize("ep, esp", [(2, 1), (1, 2)])
def test_parallel_error_is_within_rounding(cluster: Cluster, ep: int, esp: int, dtype: torch.dtype) -> None:
    cluster.run(
        2, compare_errors_on_rank, ep, esp, "swiglu" if ep == 2 else "feed_forward", dtype, torch.seed() % 2**31
    )


class Seen(fusedmoe.Hooks):
    """Record the dtype of the sent rows."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def before_dispatch(self, rows: Tensor, context: fusedmoe.HookContext) -> None:
        self.dtypes.add(rows.dtype)

    before_combine = before_dispatch


@pytest.mark.parametrize("experts", EXPERTS)
def test_autocast_sends_rows_in_bfloat16(experts: str) -> None:
    seen = Seen()
    layer = MoELayer(M, fusedmoe.gates.TopK(experts=E, k=K), EXPERTS[experts](), hooks=[seen])
    alone = MoELayer(M, fusedmoe.gates.TopK(experts=E, k=K), EXPERTS[experts]())
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(S, M, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        torch.testing.assert_close(y, alone(x), rtol=0.02, atol=0.02)
    y.float().square().sum().backward()
    assert seen.dtypes == {torch.bfloat16} and y.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
