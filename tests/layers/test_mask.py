"""A padded batch with a padding mask gives the results of the same batch without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe
from fusedmoe import ConfigError, RankError, Schedule
from fusedmoe.comm.topology import Topology
from fusedmoe.gates import GATES
from fusedmoe.layers.load import RoutingCounters
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.layers.gate_cases import make
from tests.marks import slowly
from tests.oracle import Results, assert_same_results, run_passes
from tests.training.placed import Between

M, H, E = 6, 5, 8


def build(gate: str, factor: float | None = None, **options: Any) -> MoELayer:
    torch.manual_seed(3)
    of_gate: dict[str, Any] = {"dim": M, "dtype": torch.float64}
    if factor is not None:
        of_gate["capacity_factor"] = factor
    layer = MoELayer(M, make(gate, E, 2, **of_gate), fusedmoe.experts.SwiGLU(H), dtype=torch.float64, **options)
    layer.load.counters = RoutingCounters(E)
    return layer


def step(layer: MoELayer, x: Tensor, mask: Tensor | None, run: Any = None) -> Results:
    """Return a step's results for the tokens without padding, with metrics."""
    assert layer.load.counters is not None
    layer.load.counters.sums.zero_()
    given = () if mask is None else (mask,)
    # A loss's gradient of padding must not matter either.
    results = run_passes(layer, x, *given, call=run, dy=lambda y: y + 1, aux=3.0, seed=11)
    real = torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
    for name in ("y", "dx"):
        value = results[name]
        assert value is not None and not value[~real].any(), name
        results[name] = value[real]
    return results | {"metrics": layer.load.counters.sums.clone()}


def batch(real: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and the same tokens with padding that would corrupt every result if it were read."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(int(real.sum()), M, generator=generator, dtype=torch.float64)
    x = torch.full((*real.shape, M), float("nan"), dtype=torch.float64)
    x[real] = tokens
    return tokens, x


def compare_masked_with_unpadded(layer: MoELayer, real: Tensor, seed: int, run: Any = None) -> None:
    tokens, x = batch(real, seed)
    wanted, found = step(layer, tokens, None), step(layer, x, real, run)
    if run is not None:  # graphs do not report sent rows
        wanted["metrics"], found["metrics"] = wanted["metrics"][:-2], found["metrics"][:-2]  # type: ignore[index]
    assert_same_results(found, wanted, 1e-12, none_is_zero=True)


def masks(seed: int, share: float = 0.6) -> list[Tensor]:
    """Masks of right-padded samples, of arbitrary tokens, of one, none and all tokens; not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (4,), generator=generator)
    right = torch.arange(7) < lengths[:, None]
    some = torch.rand(5, 4, generator=generator) < share
    one = torch.zeros(9, dtype=torch.bool)
    one[4] = True
    return [right, some.t(), one, torch.zeros(2, 3, dtype=torch.bool), torch.ones(6, dtype=torch.bool)]


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param(name, factor, marks=() if (factor is None) == (name == "softmoe") else pytest.mark.slow)
        for name in GATES
        for factor in (None, 0.7)
    ],
)
def test_mask_excludes_padding_for_every_gate(name: str, factor: float | None) -> None:
    if factor is None and name == "expert_choice":
        factor = 1.0
    if factor is not None and name == "softmoe":
        pytest.skip("it has no capacity")
    layer = build(name, factor, shared=fusedmoe.experts.SwiGLU(3))
    for seed, real in enumerate(masks(len(name))):
        compare_masked_with_unpadded(layer, real, seed)


def test_unmasked_padding_changes_load() -> None:
    layer = build("topk", 0.7)
    tokens, x = batch(masks(1)[1], 2)
    x = x.nan_to_num(0.5)
    wanted, found = step(layer, tokens, None), step(layer, x, None)
    assert not torch.equal(wanted["load"], found["load"])


def test_fully_padded_batch_has_zero_loss_and_load() -> None:
    layer = build("topk")
    mask = torch.zeros(2, 2, dtype=torch.bool)
    found = step(layer, batch(mask, 1)[1], mask)
    assert found["aux"] == 0 and not found["load"].any() and not found["metrics"].any()


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 3), torch.ones(3, 2).bool(), torch.ones(2, 3, M).bool(), [True] * 6], ids=str
)
def test_mask_of_wrong_shape_or_dtype_is_rejected(mask: Any) -> None:
    with pytest.raises(ConfigError, match=r"mask .* takes booleans \[2, 3\]"):
        build("topk")(torch.zeros(2, 3, M, dtype=torch.float64), mask)


def test_mask_cutting_loss_sequences_is_rejected() -> None:
    """The remaining tokens would be counted off as sequences that mix tokens of several sequences."""
    gate = fusedmoe.gates.DeepSeekV3(E, 2, sequence=4, aux={"balance": 1.0})
    layer = MoELayer(M, gate, fusedmoe.experts.SwiGLU(H))
    x, whole = torch.randn(3, 4, M), torch.tensor([True, False, True])[:, None].expand(3, 4)
    layer(x, whole)
    found = layer.aux_loss
    layer(x[[0, 2]])
    assert found == layer.aux_loss
    halves = torch.tensor([True, True, False, False]).expand(3, 4)[:2]
    run = fusedmoe.pipeline([(Between(torch.nn.Identity()), layer)], (2, 2))
    layer(run.dense[0](x)[1], whole)
    found = layer.aux_loss
    run(x, whole)
    torch.testing.assert_close(layer.aux_loss, found)
    for call, name in ((layer, "MoELayer"), (run, "pipeline")):
        with pytest.raises(ConfigError, match=f"{name} got a mask that cuts sequences of 4 tokens"):
            call(x[:2], halves)
    # Without that loss, sequence boundaries have no effect.
    MoELayer(M, fusedmoe.gates.DeepSeekV3(E, 2, sequence=4), fusedmoe.experts.SwiGLU(H))(x[:2], halves)


def test_mask_in_compiled_model() -> None:
    layer = build("topk", 0.8)
    compiled = torch.compile(layer, backend="eager")
    for seed, real in enumerate(masks(5)[:2]):
        compare_masked_with_unpadded(layer, real, seed, compiled)


# Expert choice would need the token count inside the graph. SoftMoE, which has no capacity, gets no capacity factor.
_IN_GRAPHS = [(name, (None, 0.7)[place % 2]) for place, name in enumerate(sorted(GATES.keys() - {"expert_choice"}))]


@pytest.mark.parametrize(("name", "factor"), [("topk", 0.7), *slowly(*_IN_GRAPHS)])
def test_mask_in_one_dynamic_graph(name: str, factor: float | None) -> None:
    """One graph serves masks with any number of tokens, including zero: the count is known only at run time."""
    torch._dynamo.reset()
    layer = build(name, factor, shared=fusedmoe.experts.SwiGLU(3))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in range(3):
        for real in (masks(seed)[0], torch.zeros(4, 7, dtype=torch.bool)):
            compare_masked_with_unpadded(layer, real, seed, compiled)
    assert counter.frame_count == 1


def compare_in_graph_on_rank(rank: int, world: int, factor: float | None, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = build("topk", factor, topology=Topology.from_sizes(world), **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    # Equal token counts, then no tokens on one of the ranks.
    real = [masks(rank)[0], torch.full((4, 7), rank == 0), torch.full((4, 7), rank == 1)]
    for seed, mask in enumerate(real):
        compare_masked_with_unpadded(layer, mask, seed, compiled)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("factor", "options"),
    slowly((0.7, {}), *((factor, {"schedule": Schedule("fsmoe", (2, 3))}) for factor in (None, 0.7))),
    ids=str,
)
def test_mask_in_one_dynamic_graph_on_two_ranks(
    cluster: Cluster, factor: float | None, options: dict[str, Any]
) -> None:
    cluster.run(2, compare_in_graph_on_rank, factor, options)


class Seen(fusedmoe.Hooks):
    """Record the shapes that hooks receive."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def before_moe_start(self, x: Tensor, context: Any) -> Tensor:
        self.shapes.append(x.shape)
        return x

    def before_moe_end(self, y: Tensor, context: Any) -> Tensor:
        self.shapes.append(y.shape)
        return y


def test_outer_hooks_receive_padding() -> None:
    hooks = Seen()
    real = masks(2)[0]
    compare_masked_with_unpadded(build("topk", hooks=[hooks]), real, 1)
    assert hooks.shapes[-2:] == [torch.Size((*real.shape, M))] * 2


def compare_on_rank(rank: int, world: int, ep: int, mp: int, options: dict[str, Any]) -> None:
    topology = Topology.from_sizes(ep, mp=mp)
    for factor in (None, 0.7):
        layer = build("topk", factor, topology=topology, **options)
        # Ranks of an MP group have the same tokens; different groups have different tokens, and one group has none.
        shared = rank // mp if mp > 1 else rank
        for seed, real in enumerate(masks(shared)):
            compare_masked_with_unpadded(layer, real if seed or shared else torch.zeros_like(real), 10 * shared + seed)
    if mp == 1:
        layer = build("topk", topology=topology, **options)
        mask = torch.ones(2, 3 + (rank == 1), dtype=torch.bool)
        with pytest.raises(RankError, match="rank 1.*: MoELayer got a mask"):
            layer(torch.zeros(2, 3, M, dtype=torch.float64), mask)


@pytest.mark.parametrize(
    ("ep", "mp", "options"),
    [
        (2, 1, {"schedule": Schedule("fsmoe", (2, 3))}),
        (1, 2, {}),
        *slowly((2, 1, {})),
    ],
    ids=str,
)
def test_mask_on_two_ranks(cluster: Cluster, ep: int, mp: int, options: dict[str, Any]) -> None:
    cluster.run(2, compare_on_rank, ep, mp, options)


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "mp"), [(4, 1), (2, 2)])
def test_mask_on_four_ranks(cluster: Cluster, ep: int, mp: int) -> None:
    cluster.run(4, compare_on_rank, ep, mp, {"schedule": Schedule("fsmoe", (3, 2))})
