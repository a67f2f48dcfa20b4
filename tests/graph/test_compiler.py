"""Compiled training equals eager training; settings, and errors while a graph is compiled or run."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.graph import GraphBackend
from fusedmoe.graph.compiler import _make_function
from fusedmoe.graph.planning import PassReport
from tests.cluster import Cluster
from tests.graph.models import AllToAll, Model, Steady, largest_difference, train
from tests.marks import slowly

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def compiled_and_eager(rank: int, world: int, k: int, chunks: int, blocks: int) -> tuple[float, list[PassReport]]:
    """Return the largest difference of any loss, gradient or parameter over 5 steps, and the reports."""
    torch._dynamo.reset()
    model = Model(k, blocks).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady(), chunks=chunks, groups=1)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    return largest_difference(ours, train(plain, plain, rank)), backend.reports


@pytest.mark.parametrize(
    ("world_size", "k", "chunks", "blocks"),
    slowly((2, 1, 4, 1), (1, 2, 4, 2), (2, 1, 4, 2), (4, 2, 2, 1)),
)
def test_compiled_training_equals_eager_on_ranks(
    cluster: Cluster, world_size: int, k: int, chunks: int, blocks: int
) -> None:
    check_training(cluster.run(world_size, compiled_and_eager, k, chunks, blocks), chunks, blocks)


def test_compiled_training_equals_eager(world: None) -> None:
    check_training([compiled_and_eager(0, 1, 2, 2, 1)], 2, 1)


def check_training(found: list[tuple[float, list[PassReport]]], chunks: int, blocks: int) -> None:
    for worst, (forward, backward) in found:
        assert worst < 1e-10
        assert [one.chunks for one in forward.ranges] == [chunks] * blocks
        assert {one.chunks for one in backward.ranges} == {chunks}
        # Each all-to-all of the backward pass overlaps with a weight gradient.
        assert [bool(one.weights) for one in backward.collectives] == [True] * 2 * blocks
    assert len({str((forward.order, backward.order)) for _, (forward, backward) in found}) == 1


@pytest.mark.slow
def test_reordered_weight_gradients_are_bitwise_equal(world: None) -> None:
    """Without chunks, the same operators run on the same numbers, in the reported order."""
    model = Model(2).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady(), chunks=1)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), 0)
    theirs = train(plain, torch.compile(plain, backend="aot_eager", fullgraph=True), 0)
    assert largest_difference(ours, theirs) == 0.0
    forward, backward = backend.reports
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert not forward.ranges and len(forward.collectives) == len(backward.collectives) == 4
    for one in backward.collectives:
        start = backward.order.index(one.name)
        wait = next(place for place in range(start, len(backward.order)) if "wait" in backward.order[place])
        for unit in one.weights:
            for name in unit.split(" + "):
                assert start < backward.order.index(name) < wait
    assert sum("mm" in name for one in backward.collectives for name in one.weights) >= 6
    text = str(backward)
    assert text.startswith("backward: ") and "4 all-to-alls" in text and "overlapped with " in text


class GraphBreak(nn.Module):
    """A graph break between two layers with an all-to-all each; the model has dropout and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x_SM: Tensor) -> Tensor:
        x_SM = self.drop(all_to_all_single(self.first(x_SM).relu(), None, None, dist.group.WORLD))
        torch._dynamo.graph_break()
        x_SM = all_to_all_single(self.norm(self.second(x_SM)), None, None, dist.group.WORLD)
        return self.drop(x_SM) + self.drop(self.first(x_SM))


def test_graph_breaks_dropout_and_buffers_equal_eager(world: None) -> None:
    """Random numbers are drawn in eager order."""
    model = GraphBreak().double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady())
    compiled = torch.compile(model, backend=backend)
    for step in range(3):
        x_SM = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        other_SM = x_SM.detach().clone().requires_grad_()
        torch.manual_seed(step)
        ours = compiled(x_SM)
        torch.manual_seed(step)
        theirs = plain(other_SM)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        assert torch.allclose(x_SM.grad, other_SM.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)  # type: ignore[arg-type]
    assert len(backend.reports) == 4
    with torch.no_grad():
        compiled.eval()
        plain.eval()
        assert torch.allclose(compiled(x_SM), plain(x_SM), rtol=0, atol=1e-12)
    assert backend.reports[-1].phase == "inference"


def bare(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional_autograd.all_to_all_single(x, [len(x)], [len(x)], dist.group.WORLD.group_name)


def explicitly_waited(x: Tensor) -> Tensor:
    rows = bare(x)
    wait_tensor(rows)
    return rows


WAITS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain_wait": lambda x: wait_tensor(all_to_all_single(x, None, None, dist.group.WORLD)),
    "double_wait": lambda x: wait_tensor(wait_tensor(bare(x))),
    "wait_on_view": lambda x: wait_tensor(bare(x).transpose(1, 2)).transpose(1, 2),
    "unused_wait": explicitly_waited,
    "wait_on_result": lambda x: wait_tensor(all_to_all_single(x, None, None, dist.group.WORLD).sin()),
    "wait_without_collective": lambda x: all_to_all_single(wait_tensor(x * 2), None, None, dist.group.WORLD),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(of, id=name, marks=[] if of is explicitly_waited else [pytest.mark.slow])
        for name, of in WAITS.items()
    ],
)
def test_explicit_waits_are_still_split(world: None, wait: Callable[[Tensor], Tensor]) -> None:
    """A layer with exclusive slots is still split into micro-batches, with unchanged results."""
    S, E, C, M = 16, 4, 4, 8

    def layer(x_SM: Tensor, w_ME: Tensor, w_EMM: Tensor) -> Tensor:
        prob_SE = (x_SM @ w_ME).softmax(-1)
        chosen_SE = F.one_hot(prob_SE.argmax(-1), E).double()
        place_SE = chosen_SE.cumsum(0) - 1
        chosen_SE = chosen_SE * (place_SE < C)
        place_S = (place_SE * chosen_SE).sum(1).long()
        weight_SEC = (prob_SE * chosen_SE)[:, :, None] * F.one_hot(place_S, C).double()[:, None]
        rows_ECM = wait(torch.einsum("sec,sm->ecm", (weight_SEC > 0).double(), x_SM))
        rows_ECM = wait(F.gelu(torch.bmm(rows_ECM, w_EMM)))
        return (torch.einsum("sec,ecm->sm", weight_SEC, rows_ECM) + x_SM).sin()

    shapes = (S, M), (M, E), (E, M, M)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for own_places, irregular in ((True, False), (False, True)):
        torch._dynamo.reset()
        backend = GraphBackend(chunks=2, groups=1, costs=Steady(), own_places=own_places, irregular=irregular)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), layer(*given), rtol=1e-12, atol=1e-12)
        results = [(y := run(*given), *torch.autograd.grad(y.square().sum(), given)) for run in (compiled, layer)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert [len(report.collectives) for report in backend.reports[:2]] == [2, 2]


def test_first_error_of_backward_compilation_is_raised(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch compiles a backward pass alongside its forward pass, swallows an error there, and compiles again."""
    messages = iter(("what this rank found", "what followed"))

    def fails(module: object, phase: str, *_: object) -> tuple[PassReport, None]:
        if phase == "backward":
            raise RankError(next(messages))
        return PassReport(phase, 0), None

    monkeypatch.setattr("fusedmoe.graph.compiler.plan_pass", fails)
    x = torch.randn(4, 8, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    model = nn.Sequential(AllToAll(), nn.Linear(8, 8), AllToAll())
    with pytest.raises(RankError, match="what this rank found"):
        torch.compile(model, backend=GraphBackend(costs=Steady()))(x).sum().backward()


def test_graph_without_all_to_alls_needs_no_plan(world: None) -> None:
    x_SM = torch.randn(4, 2)
    own = GraphBackend()
    assert torch.equal(torch.compile(nn.ReLU(), backend=own, fullgraph=True)(x_SM), x_SM.relu()) and not own.reports


def test_inputs_are_freed_after_their_last_use() -> None:
    x = torch.ones(2)
    inputs, input_reference, is_freed = [x, torch.zeros(1)], weakref.ref(x), []
    del x

    def probe(y: Tensor) -> Tensor:
        is_freed.append(input_reference() is None)
        return y

    graph = torch.fx.Graph()
    doubled = graph.call_function(torch.add, (x_node := graph.placeholder("x"), x_node))
    graph.placeholder("unused")
    graph.output((graph.call_function(probe, (doubled,)),))
    (y,) = _make_function(torch.fx.GraphModule({}, graph))(inputs)
    assert y.tolist() == [2.0, 2.0] and is_freed == [True] and inputs == []


@pytest.mark.parametrize("wrong", [{"chunks": 0}, {"groups": 0}, {"timeout_s": 0.0}])
def test_invalid_backend_settings_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="graph backend"):
        GraphBackend(**wrong)  # type: ignore[arg-type]


@torch.library.custom_op("fusedmoe_tests::as_long_as_there_is_room", mutates_args=())
def as_long_as_there_is_room(x: Tensor, full: Tensor) -> Tensor:
    if full.item():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return x.clone()


as_long_as_there_is_room.register_fake(lambda x, full: torch.empty_like(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "cure"), [(4, "chunks=2"), pytest.param(2, "chunks=1, which splits nothing", marks=pytest.mark.slow)]
)
def test_out_of_memory_error_suggests_fewer_chunks(world: None, chunks: int, cure: str) -> None:
    """The error states the fix on every rank."""
    model = Model(1, 1).double()

    def call(tokens_BL: Tensor, full: Tensor) -> Tensor:
        return as_long_as_there_is_room(model(tokens_BL), full)

    compiled = torch.compile(call, backend=GraphBackend(costs=Steady(), chunks=chunks, groups=1), fullgraph=True)
    tokens_BL, full = torch.randint(11, (4, 8)), torch.tensor(False)
    with torch.no_grad():
        assert torch.allclose(compiled(tokens_BL, full), model(tokens_BL), rtol=0, atol=1e-12)
        words = rf"memory\.\n.*up to {chunks} micro-batches.*GraphBackend\({cure}\)"
        with pytest.raises(torch.OutOfMemoryError, match=words):
            compiled(tokens_BL, full | True)
