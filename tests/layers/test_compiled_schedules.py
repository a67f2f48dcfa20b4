"""Layers with a schedule inside compiled models: no graph break, one graph for all layers, and the results of "off"."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.comm.exchange import RowExchange
from fusedmoe.engine import scheduled_operator
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.layers.gate_cases import make

M = 16


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class MoEBlock(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(M, dtype=torch.float64), layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(self.norm(x))
        return y


def layer_with_schedule(topology: fusedmoe.Topology, schedule: Any, **more: Any) -> fusedmoe.MoELayer:
    more = {"gate": make("topk", 4, 2), "experts": fusedmoe.experts.SwiGLU(8)} | more
    gate, experts = more.pop("gate"), more.pop("experts")
    return fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule, dtype=torch.float64, **more)


def run_blocks(blocks: nn.Module, x: Tensor, layers: list[fusedmoe.MoELayer]) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    x = x.detach().requires_grad_()
    y = blocks(x)
    blocks.zero_grad(set_to_none=True)
    (y.square().sum() + sum(layer.aux_loss for layer in layers)).backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def largest_difference(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    worst = 0.0
    for name, tensor in right.items():
        if tensor.numel():
            worst = max(worst, float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1)))
    return worst


def count_graphs_and_differences(
    rank: int, world: int, schedules: dict[str, Any], count: int, sizes: list[int], esp: int = 1
) -> dict[str, tuple[int, float]]:
    """Count the graphs of blocks compiled one by one; return the largest difference from "off" in eager mode."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world // esp, esp=esp, timeout_s=60)
    found = {}
    for name, schedule in schedules.items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        layers = [layer_with_schedule(topology, schedule) for _ in range(count)]
        off = [layer_with_schedule(topology, "off") for _ in range(count)]
        blocks, plain = (nn.Sequential(*map(MoEBlock, every)) for every in (layers, off))
        plain.load_state_dict(blocks.state_dict())
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
        worst = 0.0
        for size in sizes:
            x = torch.randn(size + 3 * rank, M, dtype=torch.float64)
            worst = max(worst, largest_difference(run_blocks(blocks, x, layers), run_blocks(plain, x, off)))
        found[name] = counter.frame_count, worst
        targets = {node.target for graph in counter.graphs for node in graph.graph.nodes}
        assert (torch.ops.fusedmoe.scheduled_experts.default in targets) == (schedule != "off")
    return found


LINE = Line(1e-4, 1e-9)
COLLECTIVES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
COSTS = CostModel(dict.fromkeys(COLLECTIVES, LINE) | {"gemm": Line(0.0, 1e-9)})
FSMOE, OTHER = fusedmoe.Schedule("fsmoe", (2, 2)), fusedmoe.Schedule("fsmoe", (3, 2))
AUTO = fusedmoe.Schedule("joint", costs=COSTS, puts=True)  # "auto" with known costs
QUICK = {"other degrees": OTHER, "auto": AUTO}


def test_one_graph_serves_all_scheduled_blocks(cluster: Cluster) -> None:
    for found in cluster.run(2, count_graphs_and_differences, {"other degrees": OTHER}, 3, [5, 9]):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "esp", "count"), [(2, 1, 4), (4, 1, 2), (4, 2, 2)])
def test_one_graph_serves_scheduled_blocks_of_many_sizes(cluster: Cluster, world: int, esp: int, count: int) -> None:
    schedules = QUICK | ({"same degrees": FSMOE, "off": "off"} if world == 2 else {})
    for found in cluster.run(
        world, count_graphs_and_differences, schedules, count, [*range(2, 22, 3)], esp, timeout_s=550
    ):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_compiled_call_measures_costs(cluster: Cluster) -> None:
    for found in cluster.run(2, count_graphs_and_differences, {"auto": "auto"}, 2, [5, 9], timeout_s=550):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


def run_zero_and_one_token(rank: int, world: int, batches: list[tuple[int, int]]) -> float:
    """Ranks with zero tokens or one token do not deadlock; results equal those of "off"."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    torch.manual_seed(0)
    layer, off = (
        layer_with_schedule(topology, schedule, experts=fusedmoe.experts.FeedForward(8)) for schedule in (OTHER, "off")
    )
    off.load_state_dict(layer.state_dict())
    compiled, worst = torch.compile(layer, backend="aot_eager", fullgraph=True), 0.0
    for sizes in batches:
        x = torch.randn(sizes[rank], M, dtype=torch.float64)
        ours, right = (run_blocks(call, x, [each]) for call, each in ((compiled, layer), (off, off)))
        ours = {name.removeprefix("_orig_mod."): tensor for name, tensor in ours.items()}
        worst = max(worst, largest_difference(ours, right))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches", [[(0, 5), (1, 0)], pytest.param([(0, 0), (1, 1), (6, 1), (0, 7)], marks=pytest.mark.slow)]
)
def test_zero_and_one_token_per_rank_equal_no_schedule(cluster: Cluster, batches: list[tuple[int, int]]) -> None:
    assert max(cluster.run(2, run_zero_and_one_token, batches)) < 1e-10


def run_other_options(rank: int, world: int) -> dict[str, Any]:
    """Combine such a layer with other options: orders, autocast, evaluation, replicas, non-finite logits."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)

    def compare(**more: Callable[[], Any]) -> float:
        torch._dynamo.reset()
        layer, off = (
            layer_with_schedule(topology, of, **{name: make() for name, make in more.items()}) for of in (OTHER, "off")
        )
        off.load_state_dict(layer.state_dict())
        layer.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(9 + rank, M, dtype=torch.float64)
        return largest_difference(run_blocks(layer, x, [layer]), run_blocks(off, x, [off]))

    found: dict[str, Any] = {
        "drops": compare(gate=lambda: make("topk", 4, 2, capacity_factor=0.7)),
        "pairs": compare(gate=lambda: make("softmoe", 4)),
        "two levels": compare(dispatch=lambda: "2dh"),
        "shared": compare(shared=lambda: fusedmoe.experts.SwiGLU(8)),
    }
    torch._dynamo.reset()
    layer, off = layer_with_schedule(topology, OTHER), layer_with_schedule(topology, "off")
    off.load_state_dict(layer.state_dict())
    layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(9 + rank, M, dtype=torch.float64)
    with torch.no_grad():
        found["evaluation"] = float((layer.eval()(x) - off.eval()(x)).abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        y, right = layer.train()(x).detach(), off.train()(x).detach()
    found["autocast"] = float((y - right).abs().max() / right.abs().max())
    layer.set_plan(OTHER.plans(layer.parts, None))
    found["assigned"] = largest_difference(run_blocks(layer, x, [layer]), run_blocks(off, x, [off]))
    twin = copy.deepcopy(layer)
    del layer
    twin.compile(backend="aot_eager", fullgraph=True)
    found["copy"] = largest_difference(run_blocks(twin, x, [twin]), run_blocks(off, x, [off]))
    with pytest.raises(fusedmoe.RankError, match="rank 1.*router logits are NaN"):
        twin(torch.full((9, M), float("nan") if rank == 1 else 1.0, dtype=torch.float64))
    found["after"] = largest_difference(run_blocks(twin, x, [twin]), run_blocks(off, x, [off]))
    return found


@pytest.mark.slow
def test_compiled_schedule_with_other_options(cluster: Cluster) -> None:
    for found in cluster.run(2, run_other_options):
        assert found.pop("autocast") < 1e-2
        assert max(found.values()) < 1e-10, found


def count_rows_in_checkpoints(rank: int, world: int) -> dict[str, int]:
    """Count the rows with M columns that this rank sends in a step, for each checkpoint policy in a compiled block."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    layer, off = layer_with_schedule(topology, OTHER), layer_with_schedule(topology, "off")
    off.load_state_dict(layer.state_dict())
    x, seen = torch.randn(9 + rank, M, dtype=torch.float64), Counter[str]()
    whole, right = RowExchange.dispatch, run_blocks(off, x, [])
    quiet = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    for name, more in (("none", None), ("plain", {}), ("saved", {"context_fn": save_communication})):
        torch._dynamo.reset()

        def block(x: Tensor, more: Any = more) -> Tensor:
            y: Tensor = layer(x) if more is None else checkpoint(layer, x, use_reentrant=False, **more)
            return y

        def counted(part: RowExchange, rows: Tensor, name: str = name) -> Tensor:
            seen[name] += rows.shape[0] if rows.shape[1] == M else 0
            return whole(part, rows)

        with pytest.MonkeyPatch.context() as patch, quiet:
            patch.setattr(RowExchange, "dispatch", counted)
            layer.zero_grad()
            leaf = x.detach().requires_grad_()
            y = torch.compile(block, backend="aot_eager", fullgraph=True)(leaf)
            y.square().sum().backward()
        assert leaf.grad is not None
        ours = {"y": y.detach(), "dx": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
        assert largest_difference(ours, right) < 1e-10  # type: ignore[arg-type]
    return dict(seen)


@pytest.mark.slow
def test_checkpoint_resends_rows_unless_saved(cluster: Cluster) -> None:
    for seen in cluster.run(2, count_rows_in_checkpoints):
        assert seen["none"] == seen["saved"] and seen["plain"] == 1.5 * seen["none"]


def check_scheduled_experts_operator(rank: int, world: int) -> None:
    """Schema, fakes and gradient agree with the operators' results, with and without biases and weights."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    layout = fusedmoe.autograd.order(torch.tensor([[0, 1, 2], [1, 1, 3], [rank, -1, 0]]), 4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    for bias, weighted in ((True, False), (False, True)):
        layer = layer_with_schedule(topology, OTHER, experts=fusedmoe.experts.FeedForward(8, "gelu", bias))
        number = layer.dispatcher.handle_number
        weights = random(2, 8, M), random(2, M, 8), *((random(2, 8), random(2, M)) if bias else (None, None))
        given = random(3, M), random(layout.rows) if weighted else None
        needs_grad = [weight is not None for weight in weights]
        # Without biases also without a shared expert.
        shared: Any = *(None,) * 5, 0, ""
        if bias:
            shared = random(3, M), random(1, 5, M), random(1, M, 5), None, random(1, M), 0, "gelu"
            needs_grad += [each is not None for each in (*shared[1:5], shared[0])]
        same = *weights, 0, "gelu", needs_grad, *shared
        operators = torch.ops.fusedmoe
        after = layout.tensors, torch.tensor(0), True, 2, 1, number
        torch.library.opcheck(operators.scheduled_experts.default, (*given, *same, *after), test_utils=tests)
        y, _, *kept, shared_y = scheduled_operator.scheduled_experts(*given, *same, *after)
        kept = [tensor.detach() for tensor in kept]
        shared_dy = torch.randn_like(shared_y) if bias else None
        rows = layout.rows if weighted else None
        torch.library.opcheck(
            operators.scheduled_experts_backward.default,
            (torch.randn_like(y), kept, rows, *same, shared_dy, layout.tensors, number),
            test_utils=tests,
        )


def test_scheduled_experts_operator_passes_opcheck(cluster: Cluster) -> None:
    cluster.run(2, check_scheduled_experts_operator)


def test_scheduled_operator_of_freed_layer_raises() -> None:
    layout = fusedmoe.autograd.order(torch.tensor([[0]]), 1)
    weights = torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, None, 0, "gelu", [True, True, False, False]
    with pytest.raises(fusedmoe.ConfigError, match="scheduled_experts: the layer of dispatcher -1 was freed"):
        scheduled_operator.scheduled_experts(
            torch.ones(1, 1), None, *weights, *(None,) * 5, 0, "", layout.tensors, None, True, 1, 1, torch.tensor(-1)
        )
