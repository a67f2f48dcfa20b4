"""Virtual ranks of one process, on one GPU or in the interpreter: the fused layer equals the dense layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.gpu.case import make_case
from bench.gpu.memory import saved_bytes
from bench.gpu.ranks import in_turn
from bench.gpu.reference import find_errors, make_reference
from bench.gpu.shapes import Shape
from bench.gpu.spread import WAYS, part_steps, variants
from bench.gpu.virtual_heaps import local_heaps
from fusedmoe.autograd.order import order
from fusedmoe.comm.one_sided import receive_buffers
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_experts import FusedBackward, FusedForward
from fusedmoe.engine.route import Route
from fusedmoe.errors import RankError
from fusedmoe.kernels.experts import Weights, define_experts
from fusedmoe.kernels.triton.grouped import call
from tests.kernels.device.capture import captured
from tests.marks import interpreted_slowly, slow_without_gpu


@pytest.mark.parametrize("peers", [2, *interpreted_slowly(4, 8)])
def test_fused_layer_with_rows_sorted_by_arrival_equals_dense(
    device: torch.device, peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk, several token tiles per source: an expert's rows and the row tiles are sorted by arrival."""
    monkeypatch.setattr(receive_buffers, "TOKEN_TILE", 16)
    sorted_tiles = []
    sort_tiles = call.sort_tiles
    monkeypatch.setattr(call, "sort_tiles", lambda *args: sorted_tiles.append(args) or sort_tiles(*args))
    test_fused_layer_on_virtual_ranks_equals_dense(device, peers, 1, "w1 w2")
    assert len(sorted_tiles) == 2 * peers  # up projection and its backward


@pytest.mark.parametrize(
    ("degree", "peers", "trained"),
    [
        (3, 4, "w1 w2"),
        *interpreted_slowly(((2, 3), 2, "w1 w2"), ((2, 3), 2, ""), ((1, 2), 2, "w2")),
        pytest.param(1, 2, "w1", marks=pytest.mark.slow),
        *(pytest.param(*of, "w1 w2", marks=pytest.mark.slow) for of in ((1, 2), (1, 8), ((4, 1), 4), ((1, 5), 8))),
    ],
    ids=str,
)
def test_fused_layer_on_virtual_ranks_equals_dense(
    device: torch.device, peers: int, degree: int | tuple[int, int], trained: str
) -> None:
    draw = torch.Generator().manual_seed(peers * 10 + sum([degree] if isinstance(degree, int) else degree))
    experts, slots, width, hidden = 8, 2, 64, 48
    counts = torch.randint(0, 30, (peers,), generator=draw).tolist()
    w1, w2 = torch.randn(experts, 2, hidden, width, generator=draw), torch.randn(experts, width, hidden, generator=draw)
    buffers = [
        ReceiveBuffers(heap, BufferSizes(30, slots, experts, width, torch.float32))
        for heap in local_heaps(peers, device)
    ]
    local, layouts, inputs = experts // peers, [], []
    for count in counts:
        expert_SK = torch.rand(count, experts, generator=draw).argsort(1)[:, :slots]
        layouts.append(order(expert_SK.to(device), experts))
        rows = torch.randn(2, count, width, generator=draw)
        inputs.append((rows[0], torch.rand(count, slots, generator=draw), rows[1]))
    parts = [[w[r * local :][:local].to(device) for w in (w1, w2)] for r in range(peers)]
    learns = [name in trained for name in ("w1", "w2")]
    own = [Weights(*(w.requires_grad_(learnt) for w, learnt in zip(of, learns, strict=True))) for of in parts]

    forwards = []
    for (x, weight, _), layout, room, parameters in zip(inputs, layouts, buffers, own, strict=True):
        route = Route(x.to(device), weight.to(device), layout, room, degree)
        forwards.append(FusedForward(x.to(device), route, GroupedExperts(parameters, "swiglu")))
    in_turn(forwards)
    outputs = [run.finish() for run in forwards]
    backwards = [FusedBackward(run, dy.to(device)) for run, (_, _, dy) in zip(forwards, inputs, strict=True)]
    in_turn(backwards)
    gradients = [run.finish() for run in backwards]

    whole = Weights(w1.double().requires_grad_(), w2.double().requires_grad_())
    for r, ((x, weight, dy), layout) in enumerate(zip(inputs, layouts, strict=True)):
        x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
        there = type(layout)(*(None if one is None else one.cpu() for one in layout.tensors)).exact()
        if not len(x):
            continue
        y = define_experts(x64, there, weight64.reshape(-1)[there.pair_N], whole, "swiglu")
        y.backward(dy.double())
        close(outputs[r], y)
        close(gradients[r][0], x64.grad)
        close(gradients[r][1], weight64.grad)
    for r, run in enumerate(backwards):
        # Rows are saved only for the gradient of w1, and totals exist only for trainable parameters.
        assert all((x is not None) == learns[0] for x in forwards[r].x)
        totals = [None, None] if run.totals is None else run.totals[:2]
        for total, matrix, learnt in zip(totals, (whole.w1, whole.w2), learns, strict=True):
            assert (total is not None) == learnt and matrix.grad is not None
            if learnt:
                close(total, matrix.grad[r * local :][:local])


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.double().cpu(), wanted.detach(), atol=2e-6 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    "degree",
    interpreted_slowly(((2, 1),), ((1, 1),), ((3, 3),)),
    ids=str,
)
def test_captured_passes_replay_with_other_tokens(device: torch.device, degree: tuple[int, int]) -> None:
    """Passes with a bound on rows are captured, and replayed with other tokens and loads."""
    peers, experts, slots, width, hidden, count, rows = 2, 4, 2, 16, 8, 7, 24
    sizes = BufferSizes(count, slots, experts, width, torch.float32)
    buffers = [ReceiveBuffers(heap, sizes) for heap in local_heaps(peers, device)]
    draw = torch.Generator().manual_seed(3)

    def fresh() -> list[Tensor]:
        """Each rank's tokens, choices, router weights and gradients, then each rank's expert matrices."""
        choice = [torch.rand(count, experts, generator=draw).argsort(1)[:, :slots] for _ in range(peers)]
        shapes = [(count, width), (count, slots), (count, width), (experts // peers, 2, hidden, width)]
        shapes += [(experts // peers, width, hidden)]
        numbers = [torch.randn(*shape, generator=draw) for shape in shapes for _ in range(peers)]
        return [one.to(device) for one in (*choice, *numbers)]

    def step(given: list[Tensor], bound: int | None) -> list[Tensor]:
        expert_SK, x, weight, dy, w1, w2 = (given[at : at + peers] for at in range(0, len(given), peers))
        forwards = []
        for rank in range(peers):
            layout = order(expert_SK[rank], experts)
            own = GroupedExperts(Weights(w1[rank].requires_grad_(), w2[rank].requires_grad_()), "swiglu")
            route = Route(x[rank], weight[rank], layout, buffers[rank], degree, bound)
            forwards.append(FusedForward(x[rank], route, own))
        in_turn(forwards)
        found = [run.finish() for run in forwards]
        backwards = [FusedBackward(run, one) for run, one in zip(forwards, dy, strict=True)]
        in_turn(backwards)
        found += [one for run in backwards for one in run.finish()]
        return found + [one for run in backwards if run.totals is not None for one in run.totals[:2] if one is not None]

    given = fresh()
    step(given, rows)  # kernels are compiled by now
    with captured(device) as replay:
        found = step(given, rows)
    for _ in range(2):
        other = fresh()
        with torch.no_grad():
            for at, value in zip(given, other, strict=True):
                at.copy_(value)
        replay()
        once = [one.clone() for one in found]
        for one, right in zip(once, step(other, None), strict=True):
            torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-5)
    for own in buffers:
        own.heap.check()


@pytest.mark.parametrize(
    ("way", "count"),
    [
        pytest.param(way, count, marks=mark)
        for place, way in enumerate(WAYS)
        for number, count in enumerate((2, 4))
        for mark in [() if place == number == 1 else slow_without_gpu if place == number else pytest.mark.slow]
    ],
)
def test_benchmarked_variants_equal_reference(device: torch.device, way: str, count: int) -> None:
    """Each benchmarked method, in float32; 41 tokens are no multiple of the ranks."""
    case = make_case(Shape("small", 41, 32, 16, 8, 3, spread=True), device, torch.float32)
    layer = variants()[f"{count} ranks, {way}"](case)
    right = make_reference(case, torch.float64)
    for _ in range(2):  # buffers are reused
        assert all(error < 1e-6 for error in find_errors(layer, case, right).values())
    rows, width = case.shape.rows, case.shape.M + 2 * case.shape.H
    assert saved_bytes(layer) >= rows * width * case.x_SM.itemsize


def test_benchmarked_parts_round_trip_rows(device: torch.device) -> None:
    case = make_case(Shape("small", 41, 32, 16, 8, 3, spread=True), device, torch.float32)
    for _ in range(2):
        for step in part_steps(case):
            found = step.run(step.before())
        # Unchanged rows return once per expert of their token.
        torch.testing.assert_close(torch.cat(found), 3 * case.x_SM)


def test_kernel_wait_times_out_and_names_missing_rank(device: torch.device) -> None:
    """Rank 1 sends nothing: rank 0's waiting kernel times out and reports the rank that it waited for."""
    assert [heap.group.job.timeout_s for heap in local_heaps(2, device)] == [10.0, 10.0]
    buffers = [
        ReceiveBuffers(heap, BufferSizes(8, 1, 2, 16, torch.float32)) for heap in local_heaps(2, device, timeout_s=0.5)
    ]
    layout = order(torch.tensor([[0], [1]], device=device), 2)
    route = Route(torch.randn(2, 16, device=device), None, layout, buffers[0])
    with pytest.raises(RankError, match="rank 0: .* of rank 1, expected signal 1, seen 0; .* within 0 s"):
        route.put_metadata()
        route.forward  # noqa: B018  waits for the routing metadata of both
        if device.type == "cuda":
            buffers[0].watch.check(wait=True)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("late", [0, 1])
def test_results_wait_for_credit_of_each_peer(joined: bool, late: int, device: torch.device) -> None:
    """Credit of each peer is awaited, whether or not the same launch waits for routing metadata."""
    buffers = [
        ReceiveBuffers(heap, BufferSizes(8, 1, 2, 16, torch.float32)) for heap in local_heaps(2, device, timeout_s=0.5)
    ]
    layout, x_SM = order(torch.tensor([[0], [1]], device=device), 2), torch.randn(2, 16, device=device)
    routes = [Route(x_SM, None, layout, own) for own in buffers]
    for route in routes:
        route.put_metadata()
    if not joined:
        routes[0].forward  # noqa: B018  waits for the routing metadata
    # The slot's second exchange begins, and one peer has not read the first.
    results = buffers[0].results
    results.epochs[0].fill_(2)
    results.credits[0] = torch.tensor([0 if peer == late else 1 for peer in range(2)])
    with pytest.raises(RankError, match=f"the credit of rank {late}, expected signal 1, seen 0"):
        routes[0].begin_results()
        if device.type == "cuda":
            buffers[0].watch.check(wait=True)
