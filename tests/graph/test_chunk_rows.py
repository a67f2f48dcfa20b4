"""Rows of some tokens that go to the experts and back by themselves: same numbers, and refused where they are not."""

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
from fusedmoe.graph.axes import Axis, Rows, same_rows, way_of
from fusedmoe.graph.instructions import Instructions
from fusedmoe.graph.micro_batches import infer
from fusedmoe.graph.rewriting import InstructionRange, RangeSplit, rewrite, stage_plan
from fusedmoe.schedule.cost import Durations
from fusedmoe.schedule.simulate import makespan
from tests.cluster import Cluster
from tests.graph.models import FreeCopies, Model, train
from tests.marks import slowly

S, E, C, M, H = 12, 4, 6, 5, 8
RANKS = 2  # of which each has two experts, were there more than this process
Middle = Callable[[Tensor, Tensor], Tensor]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def routed(tokens: int, places: int, filled: float = 0.7) -> Tensor:
    """[S, E·C]: each token in up to two places, nobody in another's."""
    taken = torch.zeros(tokens, places, dtype=torch.float64)
    free = torch.randperm(places)[: int(filled * places)]
    taken[torch.randint(tokens, free.shape), free] = torch.rand(free.shape, dtype=torch.float64) + 0.5
    return taken


def layer(weight_SEC: Tensor, x_SM: Tensor, w_eMH: Tensor, w_eHM: Tensor, b_eH: Tensor, middle: Middle) -> Any:
    """Rows of two ranks to experts and back, as other people write it; with what the backward pass would keep."""
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
    "twice": lambda h, b: h.relu() * h.sigmoid().clone(),
    "an expert's bias": lambda h, b: (h + b[:, None]).relu() * 2,
    "a bias of all": lambda h, b: torch.where(h > 0, h, b[0]),
    "a scalar": lambda h, b: h * b.sum(),
    "halves": lambda h, b: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "half": lambda h, b: h[..., : H // 2] * b[:, None, H // 2 :],
    "another product": lambda h, b: torch.baddbmm(b[:, None], h, torch.ones(2, H, H, dtype=h.dtype)).relu() * h,
    "turned": lambda h, b: h.transpose(0, 1).relu().transpose(0, 1),
    "cast": lambda h, b: h.to(torch.float32).to(torch.float64) * b[:, None],
}


def captured(middle: Middle, weight_SEC: Tensor) -> tuple[fx.GraphModule, list[Tensor], Any]:
    inner = H // 2 if middle in (MIDDLES["halves"], MIDDLES["half"]) else H
    inputs = [weight_SEC, floats(S, M), floats(2, M, H), floats(2, inner, M), floats(2, H)]
    right = layer(*inputs, middle)  # type: ignore[call-arg]
    return make_fx(lambda *of: layer(*of, middle), tracing_mode="fake")(*inputs), inputs, right  # type: ignore[call-arg]


def split_by_rows(module: fx.GraphModule, chunks: int) -> tuple[Instructions, RangeSplit]:
    of = Instructions(module.graph)
    split = infer(of.nodes, chunks, lambda node: 1.0, rows=True)
    assert split is not None
    return of, split


def put_in_chunks(module: fx.GraphModule, chunks: int) -> list[str]:
    """Rewrites a graph; the names of its nodes."""
    of, split = split_by_rows(module, chunks)
    axes = tuple((of.place[node], tuple(way.axis), way.crosses) for node, way in split.split.items())
    before = tuple(of.place[node] for node in split.before)
    rewrite(module.graph, of, InstructionRange(0, len(of.nodes), chunks, axes, before))
    module.graph.lint()
    module.recompile()
    return [node.name for node in module.graph.nodes]


@pytest.mark.parametrize("chunks", [3, *slowly(2, 12)])
@pytest.mark.parametrize("name", [*[*MIDDLES][::3], *slowly(*[*MIDDLES][1::3], *[*MIDDLES][2::3])])
def test_rows_of_some_tokens_give_what_all_give(world: None, name: str, chunks: int) -> None:
    """All of it is in chunks of the tokens, up to the end; what else is needed whole has zeros where no token is."""
    module, inputs, right = captured(MIDDLES[name], routed(S, E * C).reshape(S, E, C))
    names = put_in_chunks(module, chunks)
    for name_of_chunk in ("take_rows", "give_rows", "sin"):
        assert sum(one.startswith(name_of_chunk) for one in names) == chunks
    found = module(*inputs)
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("filled", [0.0, 0.05, 1.0])
def test_no_tokens_few_and_all(world: None, filled: float) -> None:
    module, inputs, right = captured(MIDDLES["gelu"], routed(S, E * C, filled).reshape(S, E, C))
    put_in_chunks(module, 4)
    torch.testing.assert_close(module(*inputs)[0], right[0], rtol=1e-12, atol=1e-12)


def test_what_sees_several_rows_is_not_split_by_rows(world: None) -> None:
    module, _, _ = captured(lambda h, b: h.softmax(1), routed(S, E * C).reshape(S, E, C))
    assert infer(Instructions(module.graph).nodes, 2, lambda node: 1.0, rows=True) is None
    module, _, _ = captured(lambda h, b: h.softmax(-1), routed(S, E * C).reshape(S, E, C))
    _, split = split_by_rows(module, 2)
    assert not any(way.by_rows for way in split.split.values()), "along the capacity, as without"


def test_rows_that_set_out_come_back(world: None) -> None:
    """A range that ends before they do has none; nor are there any where nobody has asked for them."""
    module, _, _ = captured(MIDDLES["gelu"], routed(S, E * C).reshape(S, E, C))
    of = Instructions(module.graph)
    home = next(of.place[node] for node in of.nodes if node.name == "wait_tensor_1")
    for nodes, rows in ((of.nodes, False), (of.nodes[: home + 1], True), (of.nodes[20:], True)):
        split = infer(nodes, 2, lambda node: 1.0, rows=rows)
        assert split is None or not any(way.by_rows for way in split.split.values())


@pytest.mark.parametrize(
    ("other", "said"), [(1, "a place of .* has several"), (S - 1, "tokens of two micro-batches are in one place")]
)
def test_places_that_are_not_one_tokens_own_are_refused(world: None, other: int, said: str) -> None:
    module, inputs, _ = captured(MIDDLES["gelu"], routed(S, E * C).reshape(S, E, C))
    put_in_chunks(module, 2)
    inputs[0].zero_()
    inputs[0][0] = inputs[0][other] = 1.0
    with pytest.raises(ConfigError, match=f"rank 0: .*{said}.*own_places=True"):
        module(*inputs)


def test_a_token_that_reads_anothers_place_is_refused(world: None) -> None:
    def call(send_SP: Tensor, weight_SP: Tensor, x_SM: Tensor) -> Tensor:
        rows_PM = all_to_all_single(send_SP.t() @ x_SM, None, None, dist.group.WORLD)
        return weight_SP @ all_to_all_single(rows_PM.relu(), None, None, dist.group.WORLD)

    send_SP = routed(S, 8)
    inputs = [send_SP, 2 * send_SP, floats(S, M)]
    module = make_fx(call, tracing_mode="fake")(*inputs)
    put_in_chunks(module, 2)
    torch.testing.assert_close(module(*inputs), call(*inputs), rtol=1e-12, atol=1e-12)
    inputs[1] = inputs[1].roll(S // 2, 0)  # of the other micro-batch
    with pytest.raises(ConfigError, match="reads a place that it has not filled"):
        module(*inputs)


def test_what_is_not_finite_stays_so(world: None) -> None:
    """A token's weights of NaN, which are in all places, are no promise that was broken."""

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
    put_in_chunks(module, 2)
    inputs[0][3] = torch.nan
    found, right = module(*inputs), call(*inputs)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert found[3].isnan().all() and found.isfinite().sum() == (S - 1) * M


def test_where_rows_are_after_a_reshape() -> None:
    assert same_rows((4, 6, 5), Rows((0, 1), 1), (2, 2, 1, 6, 5)) == Rows((0, 1, 3), 1)
    assert same_rows((1, 24, 5), Rows((1,), 0), (4, 6, 1, 5)) == Rows((0, 1), 0)
    assert same_rows((4, 6, 5), Rows((0,), 1), (24, 5)) is None, "what a row holds would count rows"
    assert same_rows((4, 6, 5), Rows((0, 1), 1), (4, 30)) is None


def trained(rank: int, world: int, chooses: str, k: int, factor: float, own_places: bool) -> tuple[float, list[str]]:
    """The largest difference of any loss, gradient or parameter over 5 steps, and the instructions."""
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
        # test_who_says_so_has_rows_or_none is the quick one
        *slowly((1, "switch", 1, 0.5), (2, "top", 2, 2.0), (4, "top", 1, 4.0)),
        *slowly((2, "random", 1, 2.0), (4, "random", 2, 4.0), (1, "hash", 2, 0.5)),
    ],
)
def test_training_is_what_it_was(cluster: Cluster, ranks: int, chooses: str, k: int, factor: float) -> None:
    """The first step, which checks the promise, gives the same results, too."""
    for worst, order in cluster.run(ranks, trained, chooses, k, factor, True):
        assert worst < 1e-10
        assert sum("give_rows" in name for name in order) == 2
        # Behind the layer micro-batches go on.
        last = max(place for place, name in enumerate(order) if "give_rows" in name)
        assert sum("add" in name for name in order[:last]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("own_places", [True, *slowly(False)])
def test_who_says_so_has_rows_or_none(world: None, own_places: bool) -> None:
    torch._dynamo.reset()
    worst, order = trained(0, 1, "top", 1, 1.0, own_places)
    assert worst < 1e-10 and any("rows" in name for name in order) == own_places
    torch._dynamo.reset()


def test_a_running_sum_in_chunks(world: None) -> None:
    module = make_fx(lambda x_SM: x_SM.cumsum(0), tracing_mode="fake")(floats(8, 3))
    (node,) = (node for node in module.graph.nodes if "cumsum" in str(node.target))
    assert way_of(node, Axis(0), chunks=2).carries and not way_of(node, Axis(1), chunks=3).carries  # type: ignore[union-attr]
    assert way_of(node, Axis(0, 2), chunks=2) is None, "not where chunks are scattered"


class ByProducts:
    """Products take what they multiply, in seconds of an expert's; but for those with masks, of one batch, and the
    head's. All else takes nothing, and a layer's all-to-alls together `wire_s`."""

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
def test_micro_batches_hide_what_those_of_a_whole_model_would(world: None, wire_s: float) -> None:
    """Predicted for two layers, beside micro-batches that all of the model goes through, gates included."""
    blocks, tokens, chunks = 2, 128, 8
    seconds = {}
    for own_places in (False, True):
        torch._dynamo.reset()
        backend = GraphBackend(costs=ByProducts(tokens, wire_s), chunks=chunks, own_places=own_places)
        with torch.no_grad():
            torch.compile(Model(1, blocks).double(), backend=backend, fullgraph=True)(
                torch.randint(11, (tokens // 2, 2))
            )
        seconds[own_places] = backend.reports[0].seconds
    torch._dynamo.reset()
    attention_s = (4 * 8 + 2 * 2) / (2 * 16)  # projections, and scores of two tokens
    compute = {stage: (attention_s, 1.0)[stage % 2] / chunks for stage in range(2 * blocks)}
    plan, taken = stage_plan(compute, dict.fromkeys(compute, wire_s / 2 / chunks), 0.0, chunks)
    best_s = makespan(plan, Durations(taken))
    assert best_s * (1 - 1e-9) <= seconds[True] <= 1.1 * best_s, (best_s, seconds)
    assert seconds[True] <= seconds[False]
