"""`torch.compile(fullgraph=True)` of models with the layer: one graph, and the results of the eager layer."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import handles
from fusedmoe.autograd import exchange_operators
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import RowExchange
from fusedmoe.experts.networks import Experts
from fusedmoe.gates import GATES
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.layers.gate_cases import make
from tests.marks import slowly
from tests.oracle import assert_same_results, run_passes

M = 32


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # PyTorch deprecates functions that its own compiler still calls.
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def model_with(layer: fusedmoe.MoELayer) -> nn.Module:
    return nn.Sequential(nn.Linear(M, M), layer, nn.Tanh(), nn.Linear(M, M))


def compare_compiled_with_eager(
    layer: fusedmoe.MoELayer, backend: str, sizes: tuple[int, ...] = (41, 57), exact: bool = True
) -> None:
    model = model_with(layer)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in sizes:
        x = torch.randn(size, M)
        ours, theirs = run_passes(model, x, call=compiled, seed=size), run_passes(model, x, seed=size)
        assert_same_results(ours, theirs, *(() if exact else (1e-4, 1e-5)))


# With or without a capacity: test_mask.py compiles the gates that support both the other way.
_OTHERS = sorted(GATES.keys() - {"expert_choice"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity_factor"),
    [("expert_choice", 0.7), *((name, (0.7, None)[place % 2]) for place, name in enumerate(_OTHERS))],
)
def test_compiled_gates_equal_eager(name: str, capacity_factor: float | None) -> None:
    options = {} if name == "softmoe" else {"capacity_factor": capacity_factor}
    layer = fusedmoe.MoELayer(M, make(name, 6, 2, **options), fusedmoe.experts.SwiGLU(24)).eval()
    compare_compiled_with_eager(layer, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "experts",
    [fusedmoe.experts.FeedForward(24), fusedmoe.experts.FeedForward(24, "relu", bias=False)],
    ids=["bias", "no bias"],
)
def test_compiled_experts_equal_eager(experts: Experts) -> None:
    shared = fusedmoe.experts.SwiGLU(16)
    compare_compiled_with_eager(fusedmoe.MoELayer(M, make("topk", 6, 2), experts, shared=shared), "aot_eager", (41,))


@pytest.mark.slow
def test_compiled_layer_with_varying_and_zero_tokens() -> None:
    experts, shared = fusedmoe.experts.FeedForward(24), fusedmoe.experts.SwiGLU(16)
    compare_compiled_with_eager(
        fusedmoe.MoELayer(M, make("topk", 6, 2), experts, shared=shared), "aot_eager", (41, 57, 1, 0)
    )


@pytest.mark.slow
def test_compiled_layer_accumulates_load_between_updates() -> None:
    layer = fusedmoe.MoELayer(M, make("deepseek_v3", 6, 2), fusedmoe.experts.SwiGLU(24))
    twin = fusedmoe.MoELayer(M, make("deepseek_v3", 6, 2), fusedmoe.experts.SwiGLU(24))
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for size in (30, 40, 50):
        x = torch.randn(size, M)
        compiled(x), twin(x)
    layer.update_gate(), twin.update_gate()
    assert layer.gate.bias_E.any() and torch.equal(layer.gate.bias_E, twin.gate.bias_E)


@pytest.mark.slow
def test_compiled_layer_under_autocast() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(41, M)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(x), layer(x)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


@pytest.mark.slow
def test_compiled_layer_raises_on_nan_logits() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(41, M)
    compiled(x)
    x[7, 3] = float("nan")
    with pytest.raises(RuntimeError, match="router logits that are NaN"):
        compiled(x)


def test_activation_checkpoint_in_compiled_model() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    model = model_with(layer)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    x = torch.randn(41, M)
    compiled = torch.compile(checkpointed, backend="aot_eager")
    assert_same_results(run_passes(model, x, call=compiled, seed=0), run_passes(model, x, seed=0))


def test_compiled_model_runs_layer_with_hooks_eagerly() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24), hooks=[fusedmoe.Hooks()])
    model = model_with(layer)
    x = torch.randn(41, M)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_results(run_passes(model, x, call=compiled, seed=0), run_passes(model, x, seed=0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_results_are_close_to_eager() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2, capacity_factor=0.7), fusedmoe.experts.SwiGLU(24))
    compare_compiled_with_eager(layer, "inductor", exact=False)


def layer_over_ranks(rank: int, world: int, capacity_factor: float | None = None) -> fusedmoe.MoELayer:
    torch._dynamo.reset()
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    torch.manual_seed(0)
    gate = make("topk", 8, 2, capacity_factor=capacity_factor)
    return fusedmoe.MoELayer(M, gate, fusedmoe.experts.SwiGLU(24), topology=topology)


def compare_over_ranks(rank: int, world: int, capacity_factor: float | None, backend: str, sizes: int = 4) -> None:
    """Uneven and empty ranks, and sizes new to the graph; results equal the eager layer's bit for bit."""
    layer = layer_over_ranks(rank, world, capacity_factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = (41 - 11 * rank, 20 * rank, 57, 13 * (1 - rank % 2))
        compare_compiled_with_eager(layer, backend, batches[:sizes], exact=backend == "aot_eager")


@pytest.mark.parametrize(("capacity_factor", "sizes"), slowly((0.7, 2), (None, 4), (0.7, 4)))
def test_compiled_exchange_equals_eager(cluster: Cluster, capacity_factor: float | None, sizes: int) -> None:
    cluster.run(2, compare_over_ranks, capacity_factor, "aot_eager", sizes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_exchange_is_close_to_eager(cluster: Cluster) -> None:
    cluster.run(2, compare_over_ranks, 0.7, "inductor", timeout_s=240)


def count_graphs_of_many_sizes(rank: int, world: int) -> int:
    """Count the graphs for 20 token counts; non-finite logits on one rank end the step on both."""
    layer, counter = layer_over_ranks(rank, world), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in range(2, 22):
            compiled(torch.randn(size + 3 * rank, M)).sum().backward()
        x = torch.full((9, M), float("nan") if rank == 1 else 1.0)
        with pytest.raises(fusedmoe.RankError, match="rank 1.*router logits are NaN"):
            compiled(x)
        compiled(torch.randn(9, M)).sum().backward()
    return counter.frame_count


@pytest.mark.slow
def test_two_graphs_serve_all_token_counts(cluster: Cluster) -> None:
    assert max(cluster.run(2, count_graphs_of_many_sizes)) <= 2


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(M), layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(self.norm(x))
        return y


def count_graphs_of_blocks(rank: int, world: int) -> dict[str, int]:
    """Count the graphs that ten equal blocks need for two steps; results equal the eager blocks'.

    Runs each kind of layer. Meanwhile one topology is closed whose process groups are still in use elsewhere.
    """
    from fusedmoe.tutel.moe import moe_layer

    def topology() -> fusedmoe.Topology:
        return fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)

    def layer(topology: fusedmoe.Topology, **more: Any) -> fusedmoe.MoELayer:
        gate = make("deepseek_v3", 4, 2)  # has a buffer, and a load count
        return fusedmoe.MoELayer(M, gate, fusedmoe.experts.SwiGLU(8), topology=topology, **more)

    one, closed, found = topology(), topology(), {}
    torch.manual_seed(0)
    model = layer(one)
    kinds: dict[str, list[nn.Module]] = {
        "in graphs": [layer(closed), *(copy.deepcopy(model) for _ in range(5)), *(layer(topology()) for _ in range(4))],
        "scheduled": [layer(one, schedule=fusedmoe.Schedule("fsmoe", (2, 2))) for _ in range(10)],
        "Tutel's": [moe_layer({"type": "top", "k": 2}, M, {"type": "ffn", "num_experts_per_device": 2,
                    "hidden_size_per_expert": 8}) for _ in range(10)],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, layers in kinds.items():
            torch._dynamo.reset()
            counter, whole = CompileCounterWithBackend("eager"), name == "in graphs"
            blocks = nn.Sequential(*map(Block, layers))
            for block in blocks:
                block.compile(backend=counter, fullgraph=whole)
            for step in range(2):
                x = torch.randn(9 + rank, M, requires_grad=True)
                y, plain = blocks(x), x
                y.square().sum().backward()
                ours, x.grad = x.grad, None
                for block in blocks:
                    plain = block.forward(plain)
                plain.square().sum().backward()
                assert torch.equal(y, plain) and ours is not None and torch.equal(ours, x.grad)
                if step == 0 and whole:
                    del blocks[0], kinds[name][0]
                    closed.close()
            found[name] = counter.frame_count
    return found


@pytest.mark.slow
def test_one_graph_serves_all_blocks(cluster: Cluster) -> None:
    """A call that stays outside the graphs has one graph before it and one after it, for any number of blocks."""
    assert cluster.run(2, count_graphs_of_blocks) == [{"in graphs": 1, "scheduled": 2, "Tutel's": 2}] * 2


def count_exchanges(rank: int, world: int, compiles: bool) -> dict[str, int]:
    """Count row exchanges in a step that saves received rows; gradients equal those of a plain step."""
    layer, seen = layer_over_ranks(rank, world), Counter[str]()
    model, x = model_with(layer), torch.randn(30 + rank, M)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False, context_fn=save_communication)

    call = torch.compile(checkpointed, backend="aot_eager", fullgraph=True) if compiles else checkpointed
    theirs = run_passes(model, x, seed=0)
    # A recomputation must not report the layer's statistics (loads, auxiliary loss) again.
    quiet = torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        for name in ("dispatch", "combine"):
            whole = getattr(RowExchange, name)

            def counted(part: RowExchange, rows: Tensor, name: str = name, whole: Any = whole) -> Tensor:
                seen[name] += rows.shape[1] == M
                return whole(part, rows)

            patch.setattr(RowExchange, name, counted)
        ours = run_passes(model, x, call=call, seed=0)
    assert_same_results(ours, theirs)
    return dict(seen)


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_selective_checkpoint_exchanges_rows_once(cluster: Cluster, compiles: bool) -> None:
    once = {"dispatch": 2, "combine": 2}  # forward and backward
    assert cluster.run(2, count_exchanges, compiles) == [once, once]


def check_operators(rank: int, world: int) -> None:
    """Schema, fake and gradient agree with the operators' results."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    way = exchange_operators.CollectiveRoute(topology, make_all_to_all("direct", topology))
    ops, tests = torch.ops.fusedmoe, ("test_schema", "test_autograd_registration", "test_faketensor")

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    # Tokens with several pairs on a rank, and rows with one token each; both with two rows of padding.
    layout = fusedmoe.autograd.order(torch.tensor([[0, 1, 2], [1, 1, 3], [rank, -1, 0]]), 4)
    tokens_W, *_, row_N, code_N = ops.deduplicate(layout.tensors, world)
    for counts, tokens, pairs, k in (
        (layout.counts_E, tokens_W, (row_N, code_N), 3),
        (torch.tensor([3, 0, 2, 1 + rank]), None, (None, None), 1),
    ):
        sizes = ops.exchange_metadata(counts, tokens, None, torch.float32, 4, k, None, way.name)
        rows, sent = int(counts.sum()), int((counts if tokens is None else tokens).sum())
        x_RM, _, order_N, *_ = ops.dispatch(random(sent + 2, 4), None, *pairs, k, *sizes, way.name)
        received, more = len(x_RM), (*pairs, k, *sizes)
        grads = torch.randn(received, 4), torch.randn(len(order_N)), order_N
        for operator, inputs in (
            (ops.deduplicate, (layout.tensors, world)),
            (ops.exchange_metadata, (counts, tokens, torch.tensor(0), torch.float32, 4, k, torch.float32, way.name)),
            (ops.dispatch, (random(sent + 2, 4), random(rows + 2), *more, way.name)),
            (ops.dispatch, (random(sent, 4), None, *more, way.name)),
            (ops.dispatch_backward, (*grads, *more, sent + 2, rows + 2, way.name)),
            (ops.combine, (random(received, 4), *sizes, sent + 2, way.name)),
            (ops.combine_backward, (torch.randn(sent + 2, 4), *sizes, received, way.name)),
        ):
            torch.library.opcheck(operator.default, inputs, test_utils=tests)


def test_exchange_operators_pass_opcheck(cluster: Cluster) -> None:
    cluster.run(2, check_operators)


def test_exchange_operator_of_freed_layer_raises() -> None:
    class Own:  # a data path name unique in this process
        group, identity = fusedmoe.Topology().ep, "a way of its own"

    way = exchange_operators.CollectiveRoute(fusedmoe.Topology(), Own())  # type: ignore[arg-type]
    name = way.name
    del way
    assert handles.find(name) is None, "a job that makes many topologies keeps nothing of them"
    with pytest.raises(fusedmoe.ConfigError, match=re.escape(f"exchange_metadata: the layer of {name} was freed")):
        torch.ops.fusedmoe.exchange_metadata(torch.tensor([1]), None, None, torch.float32, 4, 1, None, name)
