"""Blocks in micro-batches equal blocks without overlap: losses, gradients, drops, updated parameters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedmoe
from fusedmoe import ConfigError, experts, gates, orders
from fusedmoe.blocks.pipeline import Parts
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import RowExperts
from tests.cluster import Cluster
from tests.marks import slowly

M, H, E, L, LAYERS = 12, 8, 8, 5, 2

GATES: dict[str, Callable[[int, float | None], gates.Gate]] = {
    "topk": lambda k, f: gates.TopK(E, k, f, aux={"balance": 0.5, "z": 0.1}),
    "noisy": lambda k, f: gates.TopK(E, k, f, noise=1.0, aux={"importance_load": 0.5, "balance": 0.5}),
    "gshard": lambda k, f: gates.GShard(E, k, f, aux={"importance_load": 0.5, "balance": 0.5}),
    "switch": lambda k, f: gates.Switch(E, f, jitter=0.1),
    "sigmoid": lambda k, f: gates.Sigmoid(E, k, f, aux={"balance": 0.5}),
    "deepseek": lambda k, f: gates.DeepSeekV3(E, k, f, sequence=L, aux={"balance": 0.5}),
    "xmoe": lambda k, f: gates.XMoE(E, k, f),
    "hash": lambda k, f: gates.Hash(E, k, f),
    "random": lambda k, f: gates.Random(E, k, f),
}


class Attention(nn.Module):
    """Causal attention with one head, as in a user's own block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_u = nn.LayerNorm(M), nn.LayerNorm(M)
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M, bias=False)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x_BLM)).chunk(3, -1)
        y_BLM = x_BLM + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return y_BLM, self.norm_u(y_BLM)


def make_blocks(gate: str, k: int, factor: float | None, topology: Topology, **options: Any) -> list[Parts]:
    torch.manual_seed(0)
    return [
        Parts(
            Attention().double(),
            fusedmoe.MoELayer(
                M, GATES[gate](k, factor), experts.SwiGLU(H), topology=topology, mp_input="split", dtype=torch.double,
                **options,
            ),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip


def without_overlap(blocks: list[Parts]) -> Callable[[Tensor], Tensor]:
    def run(x_BLM: Tensor) -> Tensor:
        for dense, layer in blocks:
            x_BLM, u_BLM = dense(x_BLM)
            x_BLM = x_BLM + layer(u_BLM)
        return x_BLM

    return run


def train(run: Callable[[Tensor], Tensor], blocks: list[Parts], batch: int, rank: int, steps: int) -> list[Tensor]:
    """Return losses, gradients, drops and parameters of several steps."""
    modules = nn.ModuleList([module for block in blocks for module in block])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x_BLM = torch.randn(batch, L, M, dtype=torch.double, requires_grad=True)
        weight_BLM = torch.randn(batch, L, M, dtype=torch.double)
        torch.manual_seed(7 * step + rank)  # for the gates' noise
        z_BLM = run(x_BLM)
        loss = (z_BLM * weight_BLM).sum() / 10 + sum(block.experts.aux_loss for block in blocks)
        optimizer.zero_grad()
        loss.backward()
        assert x_BLM.grad is not None
        found += [loss.detach(), z_BLM.detach(), x_BLM.grad]
        for parameter in modules.parameters():
            found.append(torch.zeros(()) if parameter.grad is None else parameter.grad.clone())
        found += [torch.tensor(block.experts.dropped) for block in blocks]
        found += [block.experts.load_E.clone() for block in blocks]
        optimizer.step()
    return found + [parameter.detach().clone() for parameter in modules.parameters()]


def compare_with_no_overlap(
    rank: int, world: int, gate: str, k: int, factor: float | None, degrees: tuple[int, int], batches: tuple[int, ...],
    sizes: dict[str, int], steps: int = 2, options: dict[str, Any] | None = None,
) -> int:  # fmt: skip
    topology = Topology.from_sizes(**sizes, timeout_s=30) if world > 1 else Topology()
    blocks = make_blocks(gate, k, factor, topology, **(options or {}))
    return assert_equals_no_overlap(blocks, degrees, batches[rank % len(batches)], rank, steps)


def assert_equals_no_overlap(blocks: list[Parts], degrees: tuple[int, int], batch: int, rank: int, steps: int) -> int:
    """Require equality with the run without overlap; return the number of slots dropped in the last step."""
    others = copy.deepcopy(blocks)
    want = train(without_overlap(blocks), blocks, batch, rank, steps)
    got = train(fusedmoe.pipeline(others, degrees), others, batch, rank, steps)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return int(sum(block.experts.dropped for block in others))


@pytest.mark.parametrize(
    ("gate", "k", "factor", "degrees"),
    [
        pytest.param(gate, *of, (3, 2), marks=() if place % 4 == number else pytest.mark.slow)
        for place, gate in enumerate(GATES)
        for number, of in enumerate([(1, None), (2, 0.8), (2, None), (1, 0.8)])
    ],
)
def test_pipelined_gates_equal_no_overlap(gate: str, k: int, factor: float | None, degrees: tuple[int, int]) -> None:
    if gate == "switch" and k > 1:
        pytest.skip("one expert a token")
    dropped = compare_with_no_overlap(0, 1, gate, k, factor, degrees, (6,), {})
    assert (dropped > 0) == (factor is not None) or gate in ("hash", "random")


@pytest.mark.parametrize("degrees", [(1, 1), (2, 2)])
def test_pipeline_in_inference_mode(degrees: tuple[int, int]) -> None:
    """Link threads assemble the micro-batches, and training continues afterwards."""
    blocks = make_blocks("topk", 2, None, Topology())
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    pipe = fusedmoe.pipeline(blocks, degrees)
    with torch.inference_mode():
        got = pipe(x_BLM)
    assert got.is_inference()
    want = pipe(x_BLM)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    (want.sum() + sum(block.experts.aux_loss for block in blocks)).backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


class LowRank(nn.Module):
    """Adapter that replaces its base linear layer, as PEFT inserts it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a_RM = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.double))
        self.b_MR = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.double))

    def forward(self, x_SM: Tensor) -> Tensor:
        return self.base(x_SM) + x_SM @ self.a_RM.t() @ self.b_MR.t()


def test_parameters_added_to_dense_parts_are_trained() -> None:
    blocks = make_blocks("topk", 2, None, Topology())
    pipe = fusedmoe.pipeline(blocks, (2, 3))
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    pipe(x_BLM)
    for dense, _ in blocks:
        dense.out = LowRank(dense.out)  # type: ignore[arg-type]
        nn.utils.parametrizations.weight_norm(dense.qkv)  # type: ignore[arg-type]
    other = nn.ModuleList([copy.deepcopy(module) for block in blocks for module in block])
    run = without_overlap([Parts(*pair) for pair in zip(other[::2], other[1::2], strict=True)])
    pipe(x_BLM).sum().backward()
    run(x_BLM).sum().backward()
    own = nn.ModuleList([module for block in blocks for module in block])
    for (name, one), right in zip(own.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == name.endswith(("base.weight", "base.bias")), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, right.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_pipeline_under_functional_call(own: bool, recompute: bool) -> None:
    """Weights passed to the call, computed from other tensors, replace the module's; gradients reach those tensors."""
    torch.manual_seed(1)
    network = (lambda: experts.Custom(lambda dim: nn.Linear(dim, dim))) if own else (lambda: experts.SwiGLU(H))
    blocks = [
        Parts(Attention().double(), fusedmoe.MoELayer(M, GATES["xmoe"](2, None), network(), dtype=torch.double))
        for _ in range(LAYERS)
    ]
    pipe = fusedmoe.pipeline(blocks, (2, 2), recompute=recompute)
    plain = copy.deepcopy(blocks)
    x_BLM, dz_BLM = torch.randn(2, 3, L, M, dtype=torch.double)
    state = pipe.state_dict()
    weights = {name: one.detach() for name, one in pipe.named_parameters()}
    leaves = {name: torch.full((), 1.25, dtype=torch.double, requires_grad=True) for name in weights}
    given = {**state, **{name: leaf * weights[name] for name, leaf in leaves.items()}}
    z_BLM = torch.func.functional_call(pipe, given, (x_BLM,))
    (z_BLM * dz_BLM).sum().backward()
    for number, block in enumerate(plain):
        for part, module in (("dense", block.dense), ("experts", block.experts)):
            for name, parameter in module.named_parameters():
                parameter.data *= 1.25
                parameter.register_hook(lambda grad, name=f"{part}.{number}.{name}": found.__setitem__(name, grad))
    found: dict[str, Tensor] = {}
    want_BLM = without_overlap(plain)(x_BLM)
    (want_BLM * dz_BLM).sum().backward()
    torch.testing.assert_close(z_BLM, want_BLM, rtol=1e-10, atol=1e-10)
    for name, leaf in leaves.items():
        want = (found[name] * weights[name]).sum() if name in found else None
        torch.testing.assert_close(leaf.grad, want, rtol=1e-9, atol=1e-9)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.slow  # imports the compiler
def test_compiled_model_runs_blocks_eagerly() -> None:
    model = nn.Sequential(nn.Linear(M, M).double(), fusedmoe.pipeline(make_blocks("topk", 2, None, Topology()), (2, 3)))
    other = copy.deepcopy(model)
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    compiled = torch.compile(other, backend="eager")
    want, got = model(x_BLM), compiled(x_BLM)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    want.sum().backward()
    got.sum().backward()
    for one, right in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, right.grad, rtol=1e-10, atol=1e-10)


# Each degree with each batch, including one sample and no sample on a rank.
DEFAULT = [((8, 8), (8, 0), 0.5), ((1, 4), (3, 8), 0.5)]


@pytest.mark.parametrize(
    ("degrees", "batches", "factor"),
    [
        pytest.param(*of, marks=() if of in DEFAULT else pytest.mark.slow)
        for row, degrees in enumerate([(1, 1), (8, 8), (2, 3), (1, 4)])
        for column, batches in enumerate([(1,), (8, 0), (3, 8)])
        for of in [(degrees, batches, (None, 0.5)[(row + column + (row == 3)) % 2])]
    ],
)
def test_pipeline_on_two_ranks_equals_no_overlap(
    cluster: Cluster, degrees: tuple[int, int], batches: tuple[int, ...], factor: float | None
) -> None:
    cluster.run(2, compare_with_no_overlap, "topk", 2, factor, degrees, batches, {"ep": 2})


@pytest.mark.parametrize(
    ("sizes", "degrees", "factor"),
    [
        pytest.param(sizes, *of, marks=() if (place, number) == (1, 1) else pytest.mark.slow)
        for place, sizes in enumerate([{"ep": 4}, {"ep": 2, "esp": 2}, {"esp": 4}, {"ep": 2}])
        for number, of in enumerate([((2, 2), 1.0), ((4, 3), None)])
    ],
)
def test_pipeline_on_four_ranks_equals_no_overlap(
    cluster: Cluster, degrees: tuple[int, int], factor: float | None, sizes: dict[str, int]
) -> None:
    cluster.run(4, compare_with_no_overlap, "topk", 2, factor, degrees, (4, 3, 0, 1), sizes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_pipelines_equal_no_overlap(cluster: Cluster, world: int) -> None:
    """Run five steps for each random combination of all options."""
    rng = random.Random()
    for _ in range(15 if world == 1 else 6):
        gate = rng.choice(list(GATES))
        k = 1 if gate == "switch" else rng.choice([1, 2, 4, 8])
        factor = rng.choice([None, 0.5, 1.0, 1.25, 2.0])
        degrees = rng.randint(1, 8), rng.randint(1, 8)
        batches = tuple(rng.randint(0, 9) for _ in range(world))
        sizes = rng.choice([{"ep": 4}, {"ep": 2, "esp": 2}, {"esp": 4}, {"ep": 2}]) if world == 4 else {"ep": 2}
        given = (gate, k, factor, degrees, batches, sizes if world > 1 else {}, 5)
        try:
            compare_with_no_overlap(0, 1, *given) if world == 1 else cluster.run(world, compare_with_no_overlap, *given)
        except AssertionError as error:
            raise AssertionError(f"{given}") from error


@pytest.mark.slow
def test_pipeline_with_two_level_dispatch(cluster: Cluster) -> None:
    sizes = {"ep": 4, "ranks_per_node": 2}
    cluster.run(4, compare_with_no_overlap, "gshard", 2, 1.0, (3, 2), (4, 3, 0, 1), sizes, 1, {"dispatch": "2dh"})


def test_pipeline_with_shared_expert(cluster: Cluster) -> None:
    cluster.run(2, compare_with_experts, experts.SwiGLU(H), experts.FeedForward(H), (2, 3))


class Double(RowExperts):
    """Experts differentiated by autograd, whose backward uses the forward's chunks."""

    def make(self, model_dim: int, place: Any, seed: int, **_: Any) -> None:
        self.scale = nn.Parameter(torch.ones(place.local, model_dim, dtype=torch.double))
        self.shardings["scale"] = {"ep": 0}

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return (rows_NM * self.scale[of]).tanh()


def test_pipeline_with_autograd_experts(cluster: Cluster) -> None:
    cluster.run(2, compare_with_experts, Double(), None, (3, 3))
    with pytest.raises(ConfigError, match="one degree for both passes"):
        compare_with_experts(0, 1, Double(), None, (2, 3))


def compare_with_experts(
    rank: int, world: int, own: experts.Experts, shared: experts.Experts | None, degrees: tuple[int, int]
) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else Topology()
    torch.manual_seed(0)
    layer = fusedmoe.MoELayer(
        M, gates.TopK(E, 2), own, shared=shared, topology=topology, mp_input="split", dtype=torch.double
    )
    assert_equals_no_overlap([Parts(Attention().double(), layer)], degrees, 4, rank, 2)


@pytest.mark.parametrize("degrees", [(3, 2), *slowly(((2, 2),))])
def test_pipeline_under_autocast(degrees: tuple[int, int]) -> None:
    """Experts compute in bfloat16, and their own parameters receive gradients."""
    torch.manual_seed(0)
    blocks = [Parts(Attention(), fusedmoe.MoELayer(M, gates.TopK(E, 2), experts.SwiGLU(H))) for _ in range(LAYERS)]
    x_BLM, dz_BLM = torch.randn(2, 6, L, M)
    found = []
    for run in (without_overlap(blocks), fusedmoe.pipeline(blocks, degrees)):
        with torch.autocast("cpu", torch.bfloat16):
            z_BLM = run(x_BLM)
        z_BLM.backward(dz_BLM)
        weights = [weight for block in blocks for weight in block.experts.parameters()]
        found.append([z_BLM.detach(), *(weight.grad for weight in weights)])
        for weight in weights:
            weight.grad = None
    for want, got in zip(*found, strict=True):
        assert want is not None and got is not None
        assert (got - want).norm() <= 0.02 * want.norm()


def test_pipeline_evaluation_has_no_graph() -> None:
    blocks = make_blocks("topk", 2, 1.0, Topology())
    run = fusedmoe.pipeline(blocks, (3, 2)).eval()
    x_BLM = torch.randn(5, L, M, dtype=torch.double)
    with torch.no_grad():
        z_BLM = run(x_BLM)
        torch.testing.assert_close(z_BLM, without_overlap(blocks)(x_BLM), rtol=1e-10, atol=1e-10)
    assert not z_BLM.requires_grad


def test_gradients_accumulate_and_reach_tensor_hooks() -> None:
    blocks = make_blocks("topk", 1, None, Topology())
    run = fusedmoe.pipeline(blocks, (2, 2))
    weight, seen = blocks[0].dense.qkv.weight, []  # type: ignore[union-attr]
    weight.register_hook(lambda grad: seen.append(grad.clone()))  # type: ignore[union-attr]
    for _ in range(2):
        run(torch.randn(4, L, M, dtype=torch.double)).square().sum().backward()
    torch.testing.assert_close(weight.grad, seen[0] + seen[1])


def test_second_backward_raises() -> None:
    z = fusedmoe.pipeline(make_blocks("topk", 1, None, Topology()), (2, 2))(torch.randn(4, L, M, dtype=torch.double))
    z.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        z.sum().backward()


class OwnRoute(gates.TopK):
    def route(self, x_SM: Tensor) -> Any:
        return super().route(x_SM.flip(0))


def test_gates_of_whole_batches_are_rejected() -> None:
    for gate in (gates.BatchPrioritised(E), gates.ExpertChoice(E), gates.SoftMoE(E), OwnRoute(E)):
        assert not gate.splits
        layer = fusedmoe.MoELayer(M, gate, experts.SwiGLU(H))
        with pytest.raises(ConfigError, match=f"{type(gate).__name__} looks at whole batches"):
            fusedmoe.pipeline([(Attention(), layer)], (2, 2))
    for make in GATES.values():
        assert make(1, None).splits


class Reversed(orders.Sparse):
    def layout(self, routing: Any, experts: int) -> Any:
        return super().layout(replace(routing, expert_SK=routing.expert_SK.flip(0)), experts)


def test_pipeline_rejects_invalid_blocks_and_degrees() -> None:
    blocks = make_blocks("topk", 2, None, Topology())
    with pytest.raises(ConfigError, match="degrees"):
        fusedmoe.pipeline(blocks, (0, 2))
    with pytest.raises(ConfigError, match="no blocks"):
        fusedmoe.pipeline([], (1, 1))
    with pytest.raises(ConfigError, match="Reversed has a layout.. or restore.. of its own"):
        fusedmoe.pipeline(make_blocks("topk", 2, 1.0, Topology(), order=Reversed()), (1, 1))
    blocks_or_not: Any
    for blocks_or_not, found in (
        ([blocks[0].experts], "block 0 is of MoELayer"),
        ([blocks[0], blocks[1][::-1]], "block 1 is of MoELayer, Attention"),
    ):
        with pytest.raises(ConfigError, match=f"{found}; give a dense part"):
            fusedmoe.pipeline(blocks_or_not)
    with pytest.raises(ConfigError, match="degrees are the chunks forward and backward, .* not 2"):
        fusedmoe.pipeline(blocks, 2)  # type: ignore[arg-type]
    for shape in ((4,), (4, L, M + 1)):
        with pytest.raises(ConfigError, match="shape"):
            fusedmoe.pipeline(blocks, (1, 1))(torch.randn(shape, dtype=torch.double))


class Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, x_BLM: Tensor) -> Any:
        return self.give(x_BLM)


def test_invalid_dense_part_results_are_rejected() -> None:
    # Two samples in one tensor could be mistaken for y and u.
    for give, match in (
        (lambda x: x, r"the dense part Gives gave a Tensor; it must give \(y, u\)"),
        (lambda x: (x, x, x), "gave 3 results"),
        (lambda x: (x, x[:, :1]), rf"u of the dense part Gives is \[2, 1, {M}\], not \[2, {L}, {M}\] as x"),
    ):
        block = (Gives(give), fusedmoe.MoELayer(M, gates.TopK(E), experts.SwiGLU(H)))
        with pytest.raises(ConfigError, match=match):
            fusedmoe.pipeline([block], (1, 1))(torch.randn(2, L, M))


def nonfinite_logits(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    run = fusedmoe.pipeline(make_blocks("topk", 2, None, topology), (2, 2))
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    if rank == 1:
        x_BLM[3] = torch.nan
    run(x_BLM)


def different_degrees(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    fusedmoe.pipeline(make_blocks("topk", 2, None, topology), (2, 2 + rank))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (nonfinite_logits, "NaN or infinite"),
        (different_degrees, "pipeline: chunks of dense part and rows is [((2, 2), (2, 2))"),
    ],
)
def test_error_on_one_rank_is_equal_on_all(cluster: Cluster, function: Callable[..., None], text: str) -> None:
    for outcome in cluster.outcomes(2, function):
        assert outcome.error is not None and outcome.error[0] == "RankError" and text in outcome.error[1]
