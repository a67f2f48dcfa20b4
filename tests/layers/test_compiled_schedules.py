"""Layers with a schedule inside compiled models: no break, one graph for all of them, the results of "off"."""

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
from fusedmoe.comm.exchange import Part
from fusedmoe.engine import scheduled_operator
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.layers.gate_cases import make

M = 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
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


def a_layer(topology: fusedmoe.Topology, schedule: Any, **more: Any) -> fusedmoe.MoELayer:
    more = {"gate": make("topk", 4, 2), "experts": fusedmoe.experts.SwiGLU(8)} | more
    gate, experts = more.pop("gate"), more.pop("experts")
    return fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule, dtype=torch.float64, **more)


def step(blocks: nn.Module, x: Tensor, layers: list[fusedmoe.MoELayer]) -> dict[str, Tensor]:
    """Output and all gradients."""
    x = x.detach().requires_grad_()
    y = blocks(x)
    blocks.zero_grad(set_to_none=True)
    (y.square().sum() + sum(layer.aux_loss for layer in layers)).backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def differences(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert ours.keys() == right.keys()
    worst = 0.0
    for name, tensor in right.items():
        if tensor.numel():
            worst = max(worst, float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1)))
    return worst


def compiled_blocks(
    rank: int, world: int, schedules: dict[str, Any], count: int, sizes: list[int], esp: int = 1
) -> dict[str, tuple[int, float]]:
    """How many graphs so many blocks need, compiled one by one, and the largest difference from "off" in eager mode."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world // esp, esp=esp, timeout_s=60)
    found = {}
    for name, schedule in schedules.items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        torch.manual_seed(0)
        layers = [a_layer(topology, schedule) for _ in range(count)]
        off = [a_layer(topology, "off") for _ in range(count)]
        blocks, plain = (nn.Sequential(*map(MoEBlock, every)) for every in (layers, off))
        plain.load_state_dict(blocks.state_dict())
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
        worst = 0.0
        for size in sizes:
            x = torch.randn(size + 3 * rank, M, dtype=torch.float64)
            worst = max(worst, differences(step(blocks, x, layers), step(plain, x, off)))
        found[name] = counter.frame_count, worst
        targets = {node.target for graph in counter.graphs for node in graph.graph.nodes}
        assert (torch.ops.fusedmoe.scheduled_experts.default in targets) == (schedule != "off")
    return found


LINE = Line(1e-4, 1e-9)
COLLECTIVES = ("all-to-all/ep", "all-gather/esp", "reduce-scatter/esp", "all-reduce/dp")
COSTS = CostModel(dict.fromkeys(COLLECTIVES, LINE) | {"gemm": Line(0.0, 1e-9)})
FSMOE, OTHER = fusedmoe.Schedule("fsmoe", (2, 2)), fusedmoe.Schedule("fsmoe", (3, 2))
AUTO = fusedmoe.Schedule("joint", costs=COSTS, puts=True)  # "auto" where costs are known
QUICK = {"other degrees": OTHER, "auto": AUTO}


def test_one_graph_for_all_blocks_with_a_schedule(cluster: Cluster) -> None:
    for found in cluster.run(2, compiled_blocks, {"other degrees": OTHER}, 3, [5, 9]):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "esp", "count"), [(2, 1, 4), (4, 1, 2), (4, 2, 2)])
def test_one_graph_for_all_blocks_and_many_sizes(cluster: Cluster, world: int, esp: int, count: int) -> None:
    schedules = QUICK | ({"same degrees": FSMOE, "off": "off"} if world == 2 else {})
    for found in cluster.run(world, compiled_blocks, schedules, count, [*range(2, 22, 3)], esp, timeout_s=550):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_call_measures_inside_the_graph(cluster: Cluster) -> None:
    for found in cluster.run(2, compiled_blocks, {"auto": "auto"}, 2, [5, 9], timeout_s=550):
        assert all(graphs <= 2 and worst < 1e-10 for graphs, worst in found.values()), found


def few_tokens(rank: int, world: int, batches: list[tuple[int, int]]) -> float:
    """Ranks with no token, and with one: nobody waits for ever, and results are those of "off"."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    torch.manual_seed(0)
    layer, off = (a_layer(topology, schedule, experts=fusedmoe.experts.FeedForward(8)) for schedule in (OTHER, "off"))
    off.load_state_dict(layer.state_dict())
    compiled, worst = torch.compile(layer, backend="aot_eager", fullgraph=True), 0.0
    for sizes in batches:
        x = torch.randn(sizes[rank], M, dtype=torch.float64)
        ours, right = (step(call, x, [each]) for call, each in ((compiled, layer), (off, off)))
        ours = {name.removeprefix("_orig_mod."): tensor for name, tensor in ours.items()}
        worst = max(worst, differences(ours, right))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches", [[(0, 5), (1, 0)], pytest.param([(0, 0), (1, 1), (6, 1), (0, 7)], marks=pytest.mark.slow)]
)
def test_no_token_and_one(cluster: Cluster, batches: list[tuple[int, int]]) -> None:
    assert max(cluster.run(2, few_tokens, batches)) < 1e-10


def states(rank: int, world: int) -> dict[str, Any]:
    """What else may be around such a layer: other orders and algorithms, autocast, evaluation, plans from outside,
    copies, and logits that are not finite."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)

    def compare(**more: Callable[[], Any]) -> float:
        torch._dynamo.reset()
        layer, off = (a_layer(topology, of, **{name: make() for name, make in more.items()}) for of in (OTHER, "off"))
        off.load_state_dict(layer.state_dict())
        layer.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(9 + rank, M, dtype=torch.float64)
        return differences(step(layer, x, [layer]), step(off, x, [off]))

    found: dict[str, Any] = {
        "drops": compare(gate=lambda: make("topk", 4, 2, capacity_factor=0.7)),
        "pairs": compare(gate=lambda: make("softmoe", 4)),
        "two levels": compare(dispatch=lambda: "2dh"),
        "shared": compare(shared=lambda: fusedmoe.experts.SwiGLU(8)),
    }
    torch._dynamo.reset()
    layer, off = a_layer(topology, OTHER), a_layer(topology, "off")
    off.load_state_dict(layer.state_dict())
    layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(9 + rank, M, dtype=torch.float64)
    with torch.no_grad():
        found["evaluation"] = float((layer.eval()(x) - off.eval()(x)).abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        y, right = layer.train()(x).detach(), off.train()(x).detach()
    found["autocast"] = float((y - right).abs().max() / right.abs().max())
    layer.set_plan(OTHER.plans(layer.parts, None))
    found["assigned"] = differences(step(layer, x, [layer]), step(off, x, [off]))
    twin = copy.deepcopy(layer)
    del layer
    twin.compile(backend="aot_eager", fullgraph=True)
    found["copy"] = differences(step(twin, x, [twin]), step(off, x, [off]))
    with pytest.raises(fusedmoe.RankError, match="rank 1.*router logits are NaN"):
        twin(torch.full((9, M), float("nan") if rank == 1 else 1.0, dtype=torch.float64))
    found["after"] = differences(step(twin, x, [twin]), step(off, x, [off]))
    return found


@pytest.mark.slow
def test_what_else_a_layer_may_have(cluster: Cluster) -> None:
    for found in cluster.run(2, states):
        assert found.pop("autocast") < 1e-2
        assert max(found.values()) < 1e-10, found


def sent_in_checkpoints(rank: int, world: int) -> dict[str, int]:
    """How many rows with M columns leave this rank in a step, with each policy of a checkpoint in a compiled block."""
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    layer, off = a_layer(topology, OTHER), a_layer(topology, "off")
    off.load_state_dict(layer.state_dict())
    x, seen = torch.randn(9 + rank, M, dtype=torch.float64), Counter[str]()
    whole, right = Part.dispatch, step(off, x, [])
    quiet = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    for name, more in (("none", None), ("plain", {}), ("saved", {"context_fn": save_communication})):
        torch._dynamo.reset()

        def block(x: Tensor, more: Any = more) -> Tensor:
            y: Tensor = layer(x) if more is None else checkpoint(layer, x, use_reentrant=False, **more)
            return y

        def counted(part: Part, rows: Tensor, name: str = name) -> Tensor:
            seen[name] += rows.shape[0] if rows.shape[1] == M else 0
            return whole(part, rows)

        with pytest.MonkeyPatch.context() as patch, quiet:
            patch.setattr(Part, "dispatch", counted)
            layer.zero_grad()
            leaf = x.detach().requires_grad_()
            y = torch.compile(block, backend="aot_eager", fullgraph=True)(leaf)
            y.square().sum().backward()
        assert leaf.grad is not None
        ours = {"y": y.detach(), "dx": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
        assert differences(ours, right) < 1e-10  # type: ignore[arg-type]
    return dict(seen)


@pytest.mark.slow
def test_a_checkpoint_sends_twice_unless_it_saves(cluster: Cluster) -> None:
    for seen in cluster.run(2, sent_in_checkpoints):
        assert seen["none"] == seen["saved"] and seen["plain"] == 1.5 * seen["none"]


def check_the_operator(rank: int, world: int) -> None:
    """Schema, fakes and gradient agree with what the operators do, with and without biases and weights."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    layout = fusedmoe.autograd.order(torch.tensor([[0, 1, 2], [1, 1, 3], [rank, -1, 0]]), 4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    for bias, weighted in ((True, False), (False, True)):
        layer = a_layer(topology, OTHER, experts=fusedmoe.experts.FeedForward(8, "gelu", bias))
        number = layer.dispatcher.number
        weights = random(2, 8, M), random(2, M, 8), *((random(2, 8), random(2, M)) if bias else (None, None))
        given = random(3, M), random(layout.rows) if weighted else None
        same = *weights, 0, "gelu", [weight is not None for weight in weights], layout.tensors
        operators = torch.ops.fusedmoe
        torch.library.opcheck(
            operators.scheduled_experts.default, (*given, *same, torch.tensor(0), True, 2, 1, number), test_utils=tests
        )
        y, _, *kept = scheduled_operator.scheduled_experts(*given, *same, None, True, 2, 1, number)
        kept = [tensor.detach() for tensor in kept]
        torch.library.opcheck(
            operators.scheduled_experts_backward.default,
            (torch.randn_like(y), kept, layout.rows if weighted else None, *same, number),
            test_utils=tests,
        )


def test_the_operator(cluster: Cluster) -> None:
    cluster.run(2, check_the_operator)


def test_a_layer_that_is_gone() -> None:
    layout = fusedmoe.autograd.order(torch.tensor([[0]]), 1)
    weights = torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, None, 0, "gelu", [True, True, False, False]
    with pytest.raises(fusedmoe.ConfigError, match="scheduled_experts: the layer is gone"):
        scheduled_operator.scheduled_experts(
            torch.ones(1, 1), None, *weights, layout.tensors, None, True, 1, 1, torch.tensor(-1)
        )
