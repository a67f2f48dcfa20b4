"""Compiled training equals training as it is, irregular all-to-alls included; plans, reports, what goes wrong."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

import fusedmoe
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.graph import GraphBackend, PassReport, operator_costs
from fusedmoe.graph.chunk_rows import IrregularAllToAlls
from fusedmoe.graph.graph_ranks import GraphRanks
from fusedmoe.runtime.cache import CACHE, write
from tests.cluster import Cluster
from tests.graph.models import Model, Steady, train


@pytest.fixture
def world(world: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def largest_difference(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)


def compiled_and_eager(rank: int, world: int, k: int, chunks: int, blocks: int) -> tuple[float, list[PassReport]]:
    """The largest difference of any loss, gradient or parameter over 5 steps, and the reports."""
    torch._dynamo.reset()
    model = Model(k, blocks).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady(), chunks=chunks, groups=1)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    return largest_difference(ours, train(plain, plain, rank)), backend.reports


@pytest.mark.parametrize(
    ("world_size", "k", "chunks", "blocks"),
    [
        (2, 1, 4, 1),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2, 4, 2), (2, 1, 4, 2), (4, 2, 2, 1))),
    ],
)
def test_training_is_what_it_was(cluster: Cluster, world_size: int, k: int, chunks: int, blocks: int) -> None:
    found = cluster.run(world_size, compiled_and_eager, k, chunks, blocks)
    for worst, (forward, backward) in found:
        assert worst < 1e-10
        assert [one.chunks for one in forward.ranges] == [chunks] * blocks
        assert {one.chunks for one in backward.ranges} == {chunks}
        # Each all-to-all of the backward pass has something beside it that only weights need.
        assert [bool(one.weights) for one in backward.collectives] == [True] * 2 * blocks
    assert len({str((forward.order, backward.order)) for _, (forward, backward) in found}) == 1


def test_weight_gradients_in_between_change_no_bit(world: None) -> None:
    """Chunks apart, the same operators run on the same numbers; and they run where the report says."""
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
    assert text.startswith("backward: ") and "4 all-to-alls" in text and "beside it " in text


def measuring(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """Jobs of a rank whose cache is its own, with made-up seconds, where ranks start to measure only when all do.

    Returns: of each job the operators that this rank measured, and its reports; the costs that are kept in the end."""
    asked: list[str] = []

    def measure(target: Any, args: Any, kwargs: Any) -> float:
        key = operator_costs.operator_key(target, args, kwargs)
        if not asked:  # whoever measured alone would wait in vain
            dist.barrier()
        asked.append(key)
        return made_up_s(key, rank)

    jobs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, f"{folder}/{rank}")
        patch.setattr(operator_costs, "measure", measure)
        for forget in (None, 1, 0):  # the rank whose cache is lost
            dist.barrier()
            if rank == forget:
                shutil.rmtree(f"{folder}/{rank}")
            asked.clear()
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Model(1, 1).double()
            backend = GraphBackend(chunks=2, groups=1)
            train(model, torch.compile(model, backend=backend, fullgraph=True), rank, steps=1)
            jobs.append((list(asked), [(one.cached, one.seconds, one.order) for one in backend.reports]))
            (kept,) = Path(folder, "0").glob("operators-*")
            if rank == 1:  # what a rank has kept that does not lead is not asked for
                write(Path(folder, "1", kept.name), json.dumps(dict.fromkeys(jobs[0][0], 1e9)), "what is wrong")
    return jobs, operator_costs.load_numbers(kept)


def made_up_s(key: str, rank: int) -> float:
    """Now one rank is slower, now the other."""
    return 1e-4 * (1 + zlib.crc32(f"{rank} {key}".encode()) % 100)


def test_all_ranks_measure_at_once_and_agree(cluster: Cluster, tmp_path: Path) -> None:
    """On the slowest rank's seconds, and so on a plan; also where only some of them have measured before."""
    (first, kept), (second, _) = cluster.run(2, measuring, str(tmp_path))
    for (asked, reports), (others, other_reports), cached in zip(first, second, (False, True, False), strict=True):
        assert [seconds for _, seconds, _ in reports] == [seconds for _, seconds, _ in other_reports]
        assert [order for _, _, order in reports] == [order for _, _, order in other_reports]
        assert [known for known, _, _ in reports] == [cached] * 2
        assert asked == others and len(set(asked)) == len(asked) and bool(asked) != cached
    slowest = {key: max(made_up_s(key, 0), made_up_s(key, 1)) for key in first[2][0]}
    assert kept == slowest
    assert any(seconds != made_up_s(key, 0) for key, seconds in slowest.items())


class Broken(nn.Module):
    """The graph ends between two layers with an all-to-all each; one has dropout, and a statistic that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x_SM: Tensor) -> Tensor:
        x_SM = self.drop(all_to_all_single(self.first(x_SM).relu(), None, None, dist.group.WORLD))
        torch._dynamo.graph_break()
        x_SM = all_to_all_single(self.norm(self.second(x_SM)), None, None, dist.group.WORLD)
        return self.drop(x_SM) + self.drop(self.first(x_SM))


def test_graph_breaks_dropout_and_statistics(world: None) -> None:
    """Random numbers are drawn in the order of the model as it is."""
    model = Broken().double()
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


def test_sizes_that_are_known_late(world: None) -> None:
    """A dynamic dimension: the backward pass is planned all the same, nothing is split."""
    model = nn.Sequential(nn.Linear(8, 8), _AllToAll(), nn.Linear(8, 8), _AllToAll(), nn.Linear(8, 8)).double()
    backend = GraphBackend(costs=Steady())
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for size in (4, 6, 10):
        x_SM = torch.randn(size, 8, dtype=torch.float64)
        assert torch.allclose(compiled(x_SM), model(x_SM), rtol=0, atol=1e-12)
        compiled(x_SM).sum().backward()
    assert [report.phase for report in backend.reports] == ["forward", "backward"]
    assert not backend.reports[0].ranges and backend.reports[1].collectives[1].weights


def test_sizes_that_values_decide(world: None) -> None:
    """As many rows as are chosen: no number is known of them, and results are what they were."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.send = nn.Linear(8, 8), nn.Linear(8, 8), _AllToAll()

        def forward(self, x_SM: Tensor) -> Tensor:
            h_SM = self.send(self.first(x_SM))
            rows = (h_SM.detach()[:, 0] > 0).nonzero()[:, 0]
            return self.send(h_SM.index_add(0, rows, self.second(h_SM[rows])))

    model, backend = Chosen().double(), GraphBackend(costs=Steady())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            x_SM = torch.randn(6, 8, dtype=torch.float64)
            results = []
            for run in (model, compiled):
                model.zero_grad()
                run(x_SM).square().sum().backward()
                results.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
            for one, other in zip(*results, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert [report.phase for report in backend.reports] == ["forward", "backward"]


def test_rows_that_a_dynamic_size_counts_are_not_split(world: None) -> None:
    """Dropless, a product between both ways: without a size nothing is split, and nothing is checked."""

    def call(x_NM: Tensor, w_MM: Tensor) -> Tensor:
        size = [x_NM.shape[0]]
        rows_NM = all_to_all_single_autograd(x_NM, size, size, dist.group.WORLD)
        return all_to_all_single_autograd(rows_NM @ w_MM, size, size, dist.group.WORLD)

    given = [torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (12, 8)]
    torch._dynamo.mark_dynamic(given[0], 0)
    backend = GraphBackend(costs=Steady(), own_places=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for run in (torch.no_grad, torch.enable_grad):
        with run():
            torch.testing.assert_close(compiled(*given), call(*given), rtol=1e-12, atol=1e-12)
    found, right = (torch.autograd.grad(run(*given).square().sum(), given) for run in (compiled, call))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert [report.phase for report in backend.reports] == ["inference", "forward", "backward"]


def bare(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional_autograd.all_to_all_single(x, [len(x)], [len(x)], dist.group.WORLD.group_name)


def looked_at(x: Tensor) -> Tensor:
    rows = bare(x)
    wait_tensor(rows)
    return rows


WAITS: dict[str, Callable[[Tensor], Tensor]] = {
    "its author's": lambda x: wait_tensor(all_to_all_single(x, None, None, dist.group.WORLD)),
    "twice": lambda x: wait_tensor(wait_tensor(bare(x))),
    "through a view": lambda x: wait_tensor(bare(x).transpose(1, 2)).transpose(1, 2),
    "unused": looked_at,
    "of a result": lambda x: wait_tensor(all_to_all_single(x, None, None, dist.group.WORLD).sin()),
    "of what never travelled": lambda x: all_to_all_single(wait_tensor(x * 2), None, None, dist.group.WORLD),
}


@pytest.mark.parametrize(
    "wait",
    [pytest.param(of, id=name, marks=[] if of is looked_at else [pytest.mark.slow]) for name, of in WAITS.items()],
)
def test_waits_of_the_author(world: None, wait: Callable[[Tensor], Tensor]) -> None:
    """A layer with places of each token's own still goes in micro-batches, and results are what they were."""
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


def test_the_first_error_of_a_backward_pass(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch compiles a backward pass beside its forward pass, keeps an error to itself, and comes again."""
    messages = iter(("what this rank found", "what followed"))

    def fails(module: object, phase: str, *_: object) -> tuple[PassReport, None]:
        if phase == "backward":
            raise RankError(next(messages))
        return PassReport(phase, 0), None

    monkeypatch.setattr("fusedmoe.graph.compiler.planned", fails)
    x = torch.randn(4, 8, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    model = nn.Sequential(_AllToAll(), nn.Linear(8, 8), _AllToAll())
    with pytest.raises(RankError, match="what this rank found"):
        torch.compile(model, backend=GraphBackend(costs=Steady()))(x).sum().backward()


class _AllToAll(nn.Module):
    def forward(self, x_SM: Tensor) -> Tensor:
        return all_to_all_single(x_SM, None, None, dist.group.WORLD)


@pytest.mark.parametrize("own_places", [False, True])
def test_plans_are_kept(world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_places: bool) -> None:
    """The default backend measures, once: the second job finds costs and plans, and runs the same."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    orders = []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model(1, 1).double()
        plain = copy.deepcopy(model)
        backend = GraphBackend(chunks=2, groups=1, own_places=own_places)
        ours = train(model, torch.compile(model, backend=backend), 0, steps=1)
        assert largest_difference(ours, train(plain, plain, 0, steps=1)) < 1e-10
        assert [report.cached for report in backend.reports] == [cached, cached]
        assert all(one.seconds > 0 for report in backend.reports for one in report.collectives)
        orders.append([report.order for report in backend.reports])
    assert orders[0] == orders[1]
    assert sorted({path.name.rpartition("-")[0] for path in tmp_path.iterdir()}) == ["all-to-all", "graph", "operators"]
    for path in tmp_path.glob("graph-*"):
        path.write_text("{")  # not a plan: another one is made
    torch._dynamo.reset()
    backend = GraphBackend(chunks=2, groups=1, own_places=own_places)
    train(model, torch.compile(model, backend=backend), 0, steps=1)
    assert not any(report.cached for report in backend.reports)


def test_all_to_alls_are_measured_outside_of_python(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python's dispatcher on, one in about a thousand of them would wait for ever."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    key, send, seen = torch._C.DispatchKey.PythonDispatcher, dist.all_to_all_single, []

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
        return send(*args, **options)

    monkeypatch.setattr(dist, "all_to_all_single", spy)
    torch.compile(_AllToAll(), backend=GraphBackend(), fullgraph=True)(torch.randn(4, 2))
    assert seen and not any(seen)


def test_the_plain_function(world: None) -> None:
    model = _AllToAll()
    x_SM = torch.randn(4, 2)
    assert torch.equal(torch.compile(model, backend=fusedmoe.graph.backend, fullgraph=True)(x_SM), x_SM)
    # Without an all-to-all there is nothing to plan.
    own = GraphBackend()
    assert torch.equal(torch.compile(nn.ReLU(), backend=own)(x_SM), x_SM.relu()) and not own.reports


@pytest.mark.parametrize("wrong", [{"chunks": 0}, {"groups": 0}, {"timeout_s": 0.0}])
def test_settings_that_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="graph backend"):
        GraphBackend(**wrong)  # type: ignore[arg-type]


@torch.library.custom_op("fusedmoe_tests::as_long_as_there_is_room", mutates_args=())
def as_long_as_there_is_room(x: Tensor, full: Tensor) -> Tensor:
    if full.item():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return x.clone()


as_long_as_there_is_room.register_fake(lambda x, full: torch.empty_like(x))


@pytest.mark.parametrize(("chunks", "cure"), [(4, "chunks=2"), (2, "chunks=1, which splits nothing")])
def test_too_little_memory(world: None, chunks: int, cure: str) -> None:
    """The error says how to go on, on every rank."""
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


def other_ways(rank: int, world: int) -> str:
    """Rank 1 takes another way through the model."""
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)

    def call(x_SM: Tensor) -> Tensor:
        y_SM = all_to_all_single(layer(x_SM), None, None, dist.group.WORLD)
        return y_SM.relu() if rank else y_SM

    with pytest.raises(Exception) as caught:
        torch.compile(call, backend=GraphBackend(costs=Steady(), timeout_s=30))(torch.randn(4, 8))
    return str(caught.value)


def deciding(rank: int, world: int) -> list[str]:
    graph_ranks = GraphRanks([dist.group.WORLD], 20.0)
    return [*graph_ranks.all(f"rank {rank}"), graph_ranks.from_first(lambda: f"as rank {rank} says")]


def failing(rank: int, world: int) -> str:
    with pytest.raises((RankError, ZeroDivisionError)) as caught:
        GraphRanks([dist.group.WORLD], 60.0).from_first(lambda: str(1 // 0))
    return f"{caught.type.__name__}: {caught.value}"


def alone(rank: int, world: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(RankError) as caught:
        GraphRanks([dist.group.WORLD], 1.0).require_same("a graph")
    return str(caught.value)


def measuring_alone(rank: int, world: int) -> str:
    if rank == 1:
        time.sleep(2.0)  # its connections stay
        return ""
    graph_ranks = GraphRanks([dist.group.WORLD], 1.0)
    with pytest.raises(RankError) as caught:
        operator_costs.measure_points(dist.group.WORLD, torch.device("cpu"), [1024], graph_ranks.wait)
    return str(caught.value)


def test_a_rank_that_does_not_come_to_measure_is_named(cluster: Cluster) -> None:
    text, _ = cluster.run(2, measuring_alone)
    assert "rank 1 failed in planning a captured graph: did not come within 1 s" in text


def test_ranks_that_do_not_fit_together(cluster: Cluster) -> None:
    for text in cluster.run(2, other_ways):
        assert "ranks [1] captured another graph than rank 0" in text
    assert cluster.run(2, deciding) == [["rank 0", "rank 1", "as rank 0 says"]] * 2
    first, second = cluster.run(2, failing)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith("RankError: rank 1: planning a captured graph ended because rank 0 failed")
    text, _ = cluster.run(2, alone)
    assert "rank 1 failed" in text and "must compile the same graphs in the same order" in text


BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.bool: torch.uint8}


SHAPES = ((4, 3, 5), (8, 1), (2, 2, 3, 4), (4, 0, 3), (0, 3))


def every_exchange(rank: int, world: int, filled: float) -> list[tuple[int, int, int]]:
    return [exchanged(rank, world, shape, dtype, filled) for dtype in BITS for shape in SHAPES]


def exchanged(rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype, filled: float) -> tuple[int, int, int]:
    """Rows of a buffer, how many of them travelled, and how many are not all zero bits."""
    source = torch.Generator().manual_seed(rank + math.prod(shape))
    x = torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    full = torch.rand(shape[:-1], generator=source) < filled
    x = torch.where(full[..., None], x, torch.zeros((), dtype=dtype))
    if filled > 0 and dtype != torch.bool and shape[-1] and full.any():
        first = x[full][0]
        first.fill_(0.0)
        first[-1] = -0.0  # not the bits of 0.0
        x[full.nonzero()[0].split(1)] = first
        x[full.nonzero()[-1].split(1)] = math.nan
    x = x.transpose(0, -2).contiguous().transpose(0, -2)  # where there are three dimensions, not contiguous
    share = [shape[0] // world] * world
    want = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Gloo has no collectives of every dtype; bytes have no dtype.
    dist.all_to_all_single(want.view(torch.uint8), x.contiguous().view(torch.uint8), share, share)
    irregular = IrregularAllToAlls()
    got = irregular.wait(irregular.start(x, world, dist.group.WORLD.group_name))
    assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
    assert torch.equal(got.view(BITS[dtype]), want.view(BITS[dtype]))
    bits_NM = x.flatten(0, -2).contiguous().view(BITS[dtype])
    return irregular.rows, irregular.sent, int((bits_NM != 0).any(-1).sum())


@pytest.mark.parametrize("filled", [0.0, 0.5, 1.0])
def test_every_bit_arrives(cluster: Cluster, filled: float) -> None:
    for found in cluster.run(2, every_exchange, filled):
        for (rows, sent, wanted), shape in zip(found, len(BITS) * SHAPES, strict=True):
            assert rows == math.prod(shape[:-1]) and sent == wanted
            assert sent == 0 if filled == 0 else sent <= rows
        assert filled == 0 or sum(sent for _, sent, _ in found) > 0


def trained(rank: int, world: int, k: int, chunks: int, blocks: int, factor: float) -> tuple[float, int, int]:
    """The largest difference from training as it is, and the rows of all passes, and those that travelled."""
    torch._dynamo.reset()
    model = Model(k, blocks, factor=factor).double()
    plain = copy.deepcopy(model)
    backend = GraphBackend(costs=Steady(), chunks=chunks, groups=1, own_places=False, irregular=True)
    ours = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    theirs = train(plain, plain, rank)
    worst = max(float((a[name] - b[name]).abs().max()) for a, b in zip(ours, theirs, strict=True) for name in b)
    assert backend.irregular is not None
    return worst, backend.irregular.rows, backend.irregular.sent


@pytest.mark.parametrize(
    ("world_size", "k", "chunks", "blocks", "factor"),
    [
        (2, 1, 2, 1, 1.0),
        pytest.param(2, 1, 4, 2, 1.0, marks=pytest.mark.slow),
        pytest.param(4, 2, 2, 2, 2.0, marks=pytest.mark.slow),
        pytest.param(1, 2, 1, 2, 0.5, marks=pytest.mark.slow),
    ],
)
def test_training_with_irregular_all_to_alls_is_what_it_was(
    cluster: Cluster, world_size: int, k: int, chunks: int, blocks: int, factor: float
) -> None:
    found = cluster.run(world_size, trained, k, chunks, blocks, factor)
    tokens, steps = 32, 5
    capacity = int(factor * k * tokens / 4)
    buffers = found[0][1] / (4 * capacity)
    # There and back, forward and backward. Backward micro-batches may be of columns: each then has all the rows.
    assert 4 * blocks * steps <= buffers <= 4 * chunks * blocks * steps and buffers == int(buffers)
    for worst, rows, _ in found:
        assert worst < 1e-10
        assert rows == 4 * capacity * buffers
    # No more than the tokens that are kept.
    rows, sent = (sum(one[place] for one in found) for place in (1, 2))
    assert 0 < sent <= min(rows, buffers * k * tokens * world_size) and (factor < 1 or sent < rows)


def as_they_are(rank: int, world: int) -> tuple[int, bool]:
    """An all-to-all of unequal shares and one of a vector."""
    torch._dynamo.reset()
    mine, other = (3, 1) if rank == 0 else (1, 3)

    def call(x_SM: Tensor) -> Tensor:
        y_SM = all_to_all_single(x_SM, [mine, other], [mine, other], dist.group.WORLD)
        return all_to_all_single(y_SM.sum(-1), None, None, dist.group.WORLD)

    backend = GraphBackend(costs=Steady(), irregular=True)
    x_SM = torch.arange(12.0).reshape(4, 3) * (rank + 1)
    assert backend.irregular is not None
    return backend.irregular.rows, torch.equal(torch.compile(call, backend=backend)(x_SM), call(x_SM))


def test_what_stays_as_it_is(cluster: Cluster) -> None:
    assert cluster.run(2, as_they_are) == [(0, True)] * 2


def of_any_size(rank: int, world: int) -> list[tuple[int, int, bool]]:
    """Sizes that a graph does not fix: rows so far, those that travelled, and whether results are the same."""
    torch._dynamo.reset()

    def call(x_SM: Tensor) -> Tensor:
        return 2 * all_to_all_single(x_SM.relu(), None, None, dist.group.WORLD)

    backend = GraphBackend(costs=Steady(), irregular=True)
    compiled = torch.compile(call, backend=backend, dynamic=True)
    assert backend.irregular is not None
    found = []
    for tokens in (4, 6, 8):
        x_SM = torch.arange(3.0 * tokens).reshape(tokens, 3) + rank
        x_SM[1] = -1
        same = torch.equal(compiled(x_SM), call(x_SM))
        found.append((backend.irregular.rows, backend.irregular.sent, same))
    return found


def test_any_size(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(2, of_any_size)):
        assert found == [(4, 3, True), (10, 8, True), (18, 15, True)], rank


@pytest.mark.parametrize(("dtype", "stays"), [(torch.complex64, True), (torch.float32, False)])
def test_complex_numbers_stay(dtype: torch.dtype, stays: bool) -> None:
    """Whose bits may not be what they say: a conjugate is a flag."""
    graph = torch.fx.Graph()
    x_SM = graph.placeholder("x_SM")
    x_SM.meta["val"] = torch.empty(4, 3, dtype=dtype)
    start = torch.ops._c10d_functional.all_to_all_single.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    graph.output(graph.call_function(wait, (graph.call_function(start, (x_SM, [2, 2], [2, 2], "group")),)))
    IrregularAllToAlls().put_into(graph)
    assert (start in {node.target for node in graph.nodes}) == stays
