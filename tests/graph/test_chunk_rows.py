"""Micro-batches of token rows through the experts: same numbers, refused where tokens share slots."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed._functional_collectives import all_to_all_single
from torch.fx.experimental.proxy_tensor import make_fx

from fusedmoe.errors import ConfigError
from fusedmoe.graph import GraphBackend
from fusedmoe.graph.axes import Axis, Rows, reshape_rows, split_operator
from fusedmoe.graph.instructions import Instructions
from fusedmoe.graph.micro_batches import infer_split
from fusedmoe.graph.rewriting import InstructionRange, RangeSplit, rewrite, stage_plan
from fusedmoe.schedule.cost import TaskDurations
from fusedmoe.schedule.simulate import makespan
from tests.cluster import Cluster
from tests.graph.models import FreeCopies, Model, train
from tests.marks import slowly

S, E, C, M, H = 12, 4, 6, 5, 8
RANKS = 2  # as if this process were two ranks of two experts each
Middle = Callable[[Tensor, Tensor], Tensor]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def routed(tokens: int, places: int, filled: float = 0.7) -> Tensor:
    """[S, E·C] weights: each token in up to two slots, each slot with at most one token."""
    taken = torch.zeros(tokens, places, dtype=torch.float64)
    free = torch.randperm(places)[: int(filled * places)]
    taken[torch.randint(tokens, free.shape), free] = torch.rand(free.shape, dtype=torch.float64) + 0.5
    return taken


def layer(weight_SEC: Tensor, x_SM: Tensor, w_eMH: Tensor, w_eHM: Tensor, b_eH: Tensor, middle: Middle) -> Any:
    """Send rows of two simulated ranks to experts and back, as third-party code does; also return saved tensors."""
    send_SEC = (weight_SEC != 0).to(x_SM.dtype)
    rows_ECM = torch.einsum("sec,sm->ecm", send_SEC, x_SM.tanh())
    rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD)
    rows_eRM = rows_ECM.reshape(RANKS, E // RANKS, C, M).transpose(0, 1).reshape(E // RANKS, RANKS * C, M)
    h_eRH = torch.bmm(rows_eRM, w_eMH)
    out_eRM = torch.bmm(middle(h_eRH, b_eH), w_eHM)
    out_ECM = out_eRM.reshape(E // RANKS, RANKS, C, M).transpose(0, 1).reshape(E, C, M)
    out_ECM = all_to_all_single(out_ECM, None, None, dist.group.WORLD)
    y_SM = torch.einsum("sec,ecm->sm", weight_SEC, out_ECM)
    return (y_SM + x_SM).sin(), rows_eRM, h_eRH.transpose(1, 2)


MIDDLES: dict[str, Middle] = {
    "gelu": lambda h, b: F.gelu(h),
    "two_uses": lambda h, b: h.relu() * h.sigmoid().clone(),
    "expert_bias": lambda h, b: (h + b[:, None]).relu() * 2,
    "shared_bias": lambda h, b: torch.where(h > 0, h, b[0]),
    "scalar": lambda h, b: h * b.sum(),
    "halves": lambda h, b: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "sliced": lambda h, b: h[..., : H // 2] * b[:, None, H // 2 :],
    "second_product": lambda h, b: torch.baddbmm(b[:, None], h, torch.ones(2, H, H, dtype=h.dtype)).relu() * h,
    "transposed": lambda h, b: h.transpose(0, 1).relu().transpose(0, 1),
    "cast": lambda h, b: h.to(torch.float32).to(torch.float64) * b[:, None],
}


def capture_layer(middle: Middle, weight_SEC: Tensor) -> tuple[fx.GraphModule, list[Tensor], Any]:
    inner = H // 2 if middle in (MIDDLES["halves"], MIDDLES["sliced"]) else H
    inputs = [weight_SEC, floats(S, M), floats(2, M, H), floats(2, inner, M), floats(2, H)]
    right = layer(*inputs, middle)  # type: ignore[call-arg]
    return make_fx(lambda *of: layer(*of, middle), tracing_mode="fake")(*inputs), inputs, right  # type: ignore[call-arg]


def split_by_rows(module: fx.GraphModule, chunks: int) -> tuple[Instructions, RangeSplit]:
    of = Instructions(module.graph)
    split = infer_split(of.nodes, chunks, lambda node: 1.0, by_rows=True)
    assert split is not None
    return of, split


def rewrite_in_chunks(module: fx.GraphModule, chunks: int) -> list[str]:
    """Rewrite the graph in chunks; return the names of its nodes."""
    of, split = split_by_rows(module, chunks)
    axes = tuple((of.position[node], tuple(way.axis), way.token_outer) for node, way in split.split.items())
    before = tuple(of.position[node] for node in split.before)
    rewrite(module.graph, of, InstructionRange(0, len(of.nodes), chunks, axes, before))
    module.graph.lint()
    module.recompile()
    return [node.name for node in module.graph.nodes]


@pytest.mark.parametrize("chunks", [3, *slowly(2, 12)])
@pytest.mark.parametrize("name", [*[*MIDDLES][::3], *slowly(*[*MIDDLES][1::3], *[*MIDDLES][2::3])])
def test_token_row_chunks_equal_whole_batch(world: None, name: str, chunks: int) -> None:
    """The whole graph runs in chunks of tokens. Tensors required whole are zero at the other chunk's tokens."""
    module, inputs, right = capture_layer(MIDDLES[name], routed(S, E * C).reshape(S, E, C))
    names = rewrite_in_chunks(module, chunks)
    for name_of_chunk in ("dispatch_rows", "combine_rows", "sin"):
        assert sum(one.startswith(name_of_chunk) for one in names) == chunks
    found = module(*inputs)
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("filled", [0.0, 0.05, 1.0])
def test_token_row_chunks_with_empty_sparse_and_full_slots(world: None, filled: float) -> None:
    module, inputs, right = capture_layer(MIDDLES["gelu"], routed(S, E * C, filled).reshape(S, E, C))
    rewrite_in_chunks(module, 4)
    torch.testing.assert_close(module(*inputs)[0], right[0], rtol=1e-12, atol=1e-12)


def test_operator_across_rows_is_not_split_by_rows(world: None) -> None:
    module, _, _ = capture_layer(lambda h, b: h.softmax(1), routed(S, E * C).reshape(S, E, C))
    assert infer_split(Instructions(module.graph).nodes, 2, lambda node: 1.0, by_rows=True) is None
    module, _, _ = capture_layer(lambda h, b: h.softmax(-1), routed(S, E * C).reshape(S, E, C))
    _, split = split_by_rows(module, 2)
    assert not any(way.has_rows for way in split.split.values()), "along the capacity, as without"


def test_range_without_combine_is_not_split_by_rows(world: None) -> None:
    """A range that ends before the combine is not split by rows, nor is any range without `rows`."""
    module, _, _ = capture_layer(MIDDLES["gelu"], routed(S, E * C).reshape(S, E, C))
    of = Instructions(module.graph)
    home = next(of.position[node] for node in of.nodes if node.name == "wait_tensor_1")
    for nodes, rows in ((of.nodes, False), (of.nodes[: home + 1], True), (of.nodes[20:], True)):
        split = infer_split(nodes, 2, lambda node: 1.0, by_rows=rows)
        assert split is None or not any(way.has_rows for way in split.split.values())


@pytest.mark.parametrize(
    ("other", "said"), [(1, "a slot of .* has several"), (S - 1, "tokens of two micro-batches share a slot")]
)
def test_slot_shared_by_tokens_is_rejected(world: None, other: int, said: str) -> None:
    module, inputs, _ = capture_layer(MIDDLES["gelu"], routed(S, E * C).reshape(S, E, C))
    rewrite_in_chunks(module, 2)
    inputs[0].zero_()
    inputs[0][0] = inputs[0][other] = 1.0
    with pytest.raises(ConfigError, match=f"rank 0: .*{said}.*own_places=True"):
        module(*inputs)


def test_token_reading_another_slot_is_rejected(world: None) -> None:
    def call(send_SP: Tensor, weight_SP: Tensor, x_SM: Tensor) -> Tensor:
        rows_PM = all_to_all_single(send_SP.t() @ x_SM, None, None, dist.group.WORLD)
        return weight_SP @ all_to_all_single(rows_PM.relu(), None, None, dist.group.WORLD)

    send_SP = routed(S, 8)
    inputs = [send_SP, 2 * send_SP, floats(S, M)]
    module = make_fx(call, tracing_mode="fake")(*inputs)
    rewrite_in_chunks(module, 2)
    torch.testing.assert_close(module(*inputs), call(*inputs), rtol=1e-12, atol=1e-12)
    inputs[1] = inputs[1].roll(S // 2, 0)  # slots of the other micro-batch
    with pytest.raises(ConfigError, match="reads a slot that it did not fill"):
        module(*inputs)


def test_non_finite_weights_are_preserved(world: None) -> None:
    """NaN weights of a token reach all slots and are not reported as shared slots."""

    def call(score_SE: Tensor, x_SM: Tensor) -> Tensor:
        mask_SE = F.one_hot(score_SE.argmax(-1), E).double()
        place_SE = mask_SE.cumsum(0) - 1
        mask_SE = mask_SE * (place_SE < C)
        slot_SC = F.one_hot((place_SE * mask_SE).sum(1).long(), C).double()
        weight_SEC = score_SE.softmax(-1)[:, :, None] * mask_SE[:, :, None] * slot_SC[:, None]
        rows_ECM = torch.einsum("sec,sm->ecm", (weight_SEC > 0).double(), x_SM)
        for _ in range(2):
            rows_ECM = all_to_all_single(rows_ECM, None, None, dist.group.WORLD).relu()
        return torch.einsum("sec,ecm->sm", weight_SEC, rows_ECM)

    inputs = [floats(S, E), floats(S, M)]
    module = make_fx(call, tracing_mode="fake")(*inputs)
    rewrite_in_chunks(module, 2)
    inputs[0][3] = torch.nan
    found, right = module(*inputs), call(*inputs)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert found[3].isnan().all() and found.isfinite().sum() == (S - 1) * M


def test_reshape_rows_maps_row_dimensions() -> None:
    assert reshape_rows((4, 6, 5), Rows((0, 1), 1), (2, 2, 1, 6, 5)) == Rows((0, 1, 3), 1)
    assert reshape_rows((1, 24, 5), Rows((1,), 0), (4, 6, 1, 5)) == Rows((0, 1), 0)
    assert reshape_rows((4, 6, 5), Rows((0,), 1), (24, 5)) is None, "what a row holds would count rows"
    assert reshape_rows((4, 6, 5), Rows((0, 1), 1), (4, 30)) is None


def train_in_chunks(
    rank: int, world: int, chooses: str, k: int, factor: float, own_places: bool
) -> tuple[float, list[str]]:
    """Return the largest difference of any loss, gradient or parameter over 5 steps, and the instructions."""
    torch._dynamo.reset()
    model = Model(k, 1, factor=factor, chooses=chooses).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=FreeCopies(), chunks=2, groups=1, own_places=own_places)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)  # type: ignore[arg-type]
    theirs = train(plain, plain, rank)
    worst = max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)
    return worst, [*backend.reports[0].order]


@pytest.mark.parametrize(
    ("ranks", "chooses", "k", "factor"),
    [
        # test_own_places_setting_enables_row_chunks is the quick case
        *slowly((1, "switch", 1, 0.5), (2, "top", 2, 2.0), (4, "top", 1, 4.0)),
        *slowly((2, "random", 1, 2.0), (4, "random", 2, 4.0), (1, "hash", 2, 0.5)),
    ],
)
def test_chunked_training_equals_eager_on_ranks(
    cluster: Cluster, ranks: int, chooses: str, k: int, factor: float
) -> None:
    """The first step, which checks for exclusive slots, gives the same results too."""
    for worst, order in cluster.run(ranks, train_in_chunks, chooses, k, factor, True):
        assert worst < 1e-10
        assert sum("combine_rows" in name for name in order) == 2
        # Micro-batches continue after the layer.
        last = max(place for place, name in enumerate(order) if "combine_rows" in name)
        assert sum("add" in name for name in order[:last]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("own_places", [True, *slowly(False)])
def test_own_places_setting_enables_row_chunks(world: None, own_places: bool) -> None:
    torch._dynamo.reset()
    worst, order = train_in_chunks(0, 1, "top", 1, 1.0, own_places)
    assert worst < 1e-10 and any("rows" in name for name in order) == own_places
    torch._dynamo.reset()


def test_chunked_cumsum_needs_previous_chunk(world: None) -> None:
    module = make_fx(lambda x_SM: x_SM.cumsum(0), tracing_mode="fake")(floats(8, 3))
    (node,) = (node for node in module.graph.nodes if "cumsum" in str(node.target))
    assert (
        split_operator(node, Axis(0), chunks=2).needs_previous
        and not split_operator(node, Axis(1), chunks=3).needs_previous
    )  # type: ignore[union-attr]
    assert split_operator(node, Axis(0, 2), chunks=2) is None, "not where chunks are scattered"


class ProductCosts:
    """Costs in units of an expert's products.

    Masked products (batch size 1), the head's products and all other operators cost nothing. The all-to-alls of a layer
    cost `wire_s` in total.
    """

    def __init__(self, tokens: int, wire_s: float) -> None:
        self.of_experts, self.bytes, self.wire_s = tokens * 2 * 8 * 16, tokens * 8 * 8, wire_s

    def operator_s(self, target: object, args: tuple[object, ...], kwargs: object) -> float:
        if not str(target).startswith(("aten.addmm", "aten.bmm")):
            return 0.0
        left, right = [one.shape for one in args if isinstance(one, Tensor)][-2:]
        if left[0] == 1 or right[-1] == 11:
            return 0.0
        return left.numel() * right[-1] / self.of_experts

    def collective_s(self, size: float) -> float:
        return self.wire_s / 2 * size / self.bytes


@pytest.mark.slow
@pytest.mark.parametrize("wire_s", [0.5, 1.0])
def test_row_chunks_hide_as_much_as_model_micro_batches(world: None, wire_s: float) -> None:
    """Predicted for two layers, compared with micro-batches through the whole model, gates included."""
    blocks, tokens, chunks = 2, 128, 8
    seconds = {}
    for own_places in (False, True):
        torch._dynamo.reset()
        backend = GraphBackend(costs=ProductCosts(tokens, wire_s), chunks=chunks, own_places=own_places)
        with torch.no_grad():
            torch.compile(Model(1, blocks).double(), backend=backend, fullgraph=True)(
                torch.randint(11, (tokens // 2, 2))
            )
        seconds[own_places] = backend.reports[0].seconds
    torch._dynamo.reset()
    attention_s = (4 * 8 + 2 * 2) / (2 * 16)  # projections, and scores of two tokens
    compute = {stage: (attention_s, 1.0)[stage % 2] / chunks for stage in range(2 * blocks)}
    plan, taken = stage_plan(compute, dict.fromkeys(compute, wire_s / 2 / chunks), 0.0, chunks)
    best_s = makespan(plan, TaskDurations(taken))
    assert best_s * (1 - 1e-9) <= seconds[True] <= 1.1 * best_s, (best_s, seconds)
    assert seconds[True] <= seconds[False]
