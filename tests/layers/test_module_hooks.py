"""Module hooks and parametrisations act alike under every schedule: float64, compared with a dense computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.errors import RankError
from fusedmoe.experts.networks import Custom, Experts, SwiGLU
from fusedmoe.gates import TopK
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.marks import slowly

M, E, K, H, S = 6, 4, 2, 5, 10
HOWS = ("off", "plan", "pipeline", "compiled", "whole graph", "fssdp")
HOWS_BUT_GRAPH_SLOWLY = [*(how for how in HOWS if how != "whole graph"), *slowly("whole graph")]


class Split(nn.Module):
    """Dense part of a block; nothing is added to the experts' results."""

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        return x_BLM * 0, x_BLM * 1


def expert(model_dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(model_dim, H), nn.Tanh(), nn.Linear(H, model_dim))


def make(how: str, topology: fusedmoe.Topology, experts: Experts, shared: bool = False) -> tuple[Any, MoELayer]:
    """Return a layer and its callable."""
    torch.manual_seed(0)
    layer = MoELayer(
        M,
        TopK(E, K),
        experts,
        topology=topology,
        shared=SwiGLU(H) if shared else None,
        schedule=fusedmoe.Schedule("fsmoe", degrees=(2, 2)) if how not in ("off", "pipeline") else "off",
        placement="fssdp" if how == "fssdp" else "ep",
        dtype=torch.float64,
    )
    if how == "pipeline":
        return fusedmoe.pipeline([(Split(), layer)], degrees=(2, 2)), layer
    if how in ("compiled", "whole graph"):
        return torch.compile(layer, backend="aot_eager", fullgraph=how == "whole graph"), layer
    return layer, layer


def topology_of(world: int) -> fusedmoe.Topology:
    return fusedmoe.Topology.from_sizes(ep=world, timeout_s=30) if world > 1 else fusedmoe.Topology()


def numbers(rank: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(S // 2, 2, M, generator=chance, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), dy


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def dense_reference(
    layer: MoELayer, x: Tensor, hooked: dict[str, float], experts: list[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Loop over experts; `hooked`: the factors that hooks apply."""
    of = {"layer_in": 1.0, "gate_in": 1.0, "in": 1.0, "out": 1.0, "grad_in": 1.0, "grad_out": 1.0} | hooked
    x_SM = x.reshape(-1, M) * of["layer_in"]
    logits_SE = (x_SM * of["gate_in"]) @ layer.gate.weight_EM.t()
    top_SK = logits_SE.topk(K, 1).indices
    weight_SK = logits_SE.gather(1, top_SK).softmax(1)
    u_SM = Backward.apply(x_SM, of["grad_in"]) * of["in"]
    y_SM = torch.zeros_like(x_SM)
    for number, network in enumerate(experts):
        y_SM = y_SM + network(u_SM) * (weight_SK * (top_SK == number)).sum(1, keepdim=True)
    return (Backward.apply(y_SM, of["grad_out"]) * of["out"]).view(x.shape)


def feed_forward(w1: Tensor, w2: Tensor) -> list[Callable[[Tensor], Tensor]]:
    def network(number: int, x: Tensor) -> Tensor:
        gate, value = (x @ half.t() for half in w1[number])
        return (F.silu(gate) * value) @ w2[number].t()

    return [lambda x, number=number: network(number, x) for number in range(E)]


@contextmanager
def registered_hook(kind: str, layer: MoELayer, calls: list[int]) -> Iterator[dict[str, float]]:
    """Register a hook of the given kind; return the factors that it applies."""

    def count(*_: Any) -> None:
        calls.append(1)

    def doubled_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        calls.append(1)
        return args[0] * 2, *args[1:]

    def doubled(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        calls.append(1)
        return result * 2

    def doubled_gradients(_: nn.Module, grads: Any, __: Any = None) -> Any:
        calls.append(1)
        return (grads[0] * 2, *grads[1:])

    def global_hook(module: nn.Module, _: Any, result: Any) -> Any:
        return doubled(module, None, result) if module is layer.experts else None

    experts, handles = layer.experts, []
    forward = experts.forward
    match kind:
        case "layer":
            handles, of = [layer.register_forward_pre_hook(doubled_input)], {"layer_in": 2.0}
        case "gate":
            handles, of = [layer.gate.register_forward_pre_hook(doubled_input)], {"gate_in": 2.0}
        case "forward pre":
            handles, of = [experts.register_forward_pre_hook(doubled_input)], {"in": 2.0}
        case "forward":
            handles, of = [experts.register_forward_hook(doubled)], {"out": 2.0}
        case "backward":
            handles, of = [experts.register_full_backward_hook(doubled_gradients)], {"grad_in": 2.0}
        case "backward pre":
            handles, of = [experts.register_full_backward_pre_hook(doubled_gradients)], {"grad_out": 2.0}
        case "global":
            handles, of = [register_module_forward_hook(global_hook)], {"out": 2.0}
        case "replaced forward":
            experts.forward, of = lambda *args: forward(*args) * 2, {"out": 2.0}
        case "observer":
            handles, of = [experts.register_forward_hook(count)], {}
        case _:
            raise AssertionError(kind)
    try:
        yield of
    finally:
        vars(experts).pop("forward", None)
        for handle in handles:
            handle.remove()


KINDS = ("layer", "gate", "forward pre", "forward", "backward", "backward pre", "global", "observer")
KINDS += ("replaced forward",)


def check_each_hook(rank: int, world: int, how: str) -> None:
    """Register every kind of hook in turn on one layer: compare values and gradients, and require one call."""
    topology = topology_of(world)
    run, layer = make(how, topology, SwiGLU(H))
    whole, _ = make("off", fusedmoe.Topology(), SwiGLU(H))  # with all experts
    planned: list[int] = []
    in_chunks = layer.experts.in_chunks
    layer.experts.in_chunks = lambda x: (planned.append(1), in_chunks(x))[1]  # type: ignore[method-assign]
    for kind in (*KINDS, "off"):
        if how == "whole graph" and "backward" in kind:  # PyTorch breaks graphs there
            continue
        calls: list[int] = []
        planned.clear()
        torch.compiler.reset()  # PyTorch does not guard hooks
        if kind == "off":  # hooks are removed, and plans are used again
            y, wanted = run_layer_and_dense(run, layer, whole, rank, world, {})
        else:
            with registered_hook(kind, layer, calls) as hooked:
                y, wanted = run_layer_and_dense(run, layer, whole, rank, world, hooked)
            counted = kind != "replaced forward" and how not in ("compiled", "whole graph")
            assert len(calls) == 1 or not counted, f"{how}, {kind}: {len(calls)} calls"
        # A layer whose hooks suspend its schedule resumes it once they are removed.
        plans = kind in ("off", "layer", "gate") if how != "pipeline" else kind == "off"
        assert bool(planned) == (plans and (how == "pipeline" or (how != "off" and world > 1))), (how, kind)
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-12, msg=partial(_message, how, kind))
    topology.close()


def _message(how: str, kind: str, text: str) -> str:
    return f"{how}, {kind}: {text}"


def run_layer_and_dense(
    run: Any, layer: MoELayer, whole: MoELayer, rank: int, world: int, hooked: dict[str, float]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Run both passes with a layer and densely; return results and gradients of each."""
    x, dy = numbers(rank)
    layer.zero_grad()
    y = run(x)
    y.backward(dy)
    every = [numbers(other) for other in range(world)]
    whole.zero_grad()
    of_experts = feed_forward(whole.experts.w1, whole.experts.w2)
    results = [dense_reference(whole, one, hooked, of_experts) for one, _ in every]
    sum((result * grad).sum() for result, (_, grad) in zip(results, every, strict=True)).backward()
    gate = layer.gate.weight_EM.grad.clone()
    if world > 1:
        dist.all_reduce(gate)
    at = slice(rank * E // world, (rank + 1) * E // world)
    own = [y.detach(), x.grad, gate, layer.experts.w1.grad, layer.experts.w2.grad]
    wanted = [results[rank].detach(), every[rank][0].grad, whole.gate.weight_EM.grad]
    return own, [*wanted, whole.experts.w1.grad[at], whole.experts.w2.grad[at]]


@pytest.mark.parametrize("how", HOWS_BUT_GRAPH_SLOWLY)
def test_module_hooks_on_one_rank_equal_dense(how: str) -> None:
    check_each_hook(0, 1, how)


@pytest.mark.parametrize("how", HOWS)
def test_module_hooks_on_two_ranks_equal_dense(cluster: Cluster, how: str) -> None:
    cluster.run(2, check_each_hook, how)


class Doubled(SwiGLU):
    """User-defined experts whose base class computes chunks with kernels."""

    def forward(self, x_SM: Tensor, layout: Any, weight_N: Tensor | None) -> Tensor:
        return super().forward(x_SM, layout, weight_N) * 2


def check_overridden_forward(rank: int, world: int, how: str) -> None:
    topology = topology_of(world)
    run, layer = make(how, topology, Doubled(H))
    whole, _ = make("off", fusedmoe.Topology(), SwiGLU(H))
    torch.compiler.reset()
    y, wanted = run_layer_and_dense(run, layer, whole, rank, world, {"out": 2.0})
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-12)
    topology.close()


@pytest.mark.parametrize("how", HOWS)
def test_overridden_expert_forward_on_two_ranks(cluster: Cluster, how: str) -> None:
    cluster.run(2, check_overridden_forward, how)


def test_overridden_expert_forward_in_pipeline() -> None:
    check_overridden_forward(0, 1, "pipeline")


# Pre-hooks that recompute weights, and parametrisations.


class Counted(nn.Module):
    """Parametrisation that counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, w: Tensor) -> Tensor:
        self.count += 1
        return w * 1.5


def _experts_of(kind: str) -> Experts:
    return Custom(expert) if "custom" in kind else SwiGLU(H)


def _parametrize_weights(kind: str, layer: MoELayer) -> list[Counted]:
    """Recompute or evaluate weights of the layer; return the parametrisations."""
    counted = []
    networks = layer.experts.experts.values() if isinstance(layer.experts, Custom) else ()
    match kind:
        case "prune":
            prune.l1_unstructured(layer.experts, "w1", 0.5)
        case "prune custom":
            for network in networks:
                prune.l1_unstructured(network[0], "weight", 0.5)
        case "weight_norm custom":
            for network in networks:
                nn.utils.weight_norm(network[2])
        case "spectral_norm custom":
            for network in networks:
                nn.utils.spectral_norm(network[0])
        case "forward hook custom":
            for network in networks:
                network[0].register_forward_hook(lambda _, __, y: y * 2)
        case "w1":
            parametrize.register_parametrization(layer.experts, "w1", counted.append(Counted()) or counted[-1])
        case "gate":
            parametrize.register_parametrization(layer.gate, "weight_EM", counted.append(Counted()) or counted[-1])
        case "shared":
            parametrize.register_parametrization(layer.shared, "w1", counted.append(Counted()) or counted[-1])
        case "parametrised custom":
            for network in networks:
                counted.append(Counted())
                parametrize.register_parametrization(network[0], "weight", counted[-1])
        case _:
            raise AssertionError(kind)
    return counted


RECOMPUTED = ("prune", "prune custom", "weight_norm custom", "spectral_norm custom", "forward hook custom")
EVALUATED = ("w1", "gate", "shared", "parametrised custom")


def compare_with_no_plan(rank: int, world: int, how: str, kind: str) -> None:
    """Two steps with recomputed weights equal those of a layer without a plan, whose modules are called."""
    topology = topology_of(world)
    found = []
    for way in ("off", how):
        torch.compiler.reset()
        run, layer = make(way, topology, _experts_of(kind), shared=True)
        counted = _parametrize_weights(kind, layer)
        chance = torch.Generator().manual_seed(3)
        for _ in range(2):
            x, dy = numbers(rank)
            before = [float(each.count) for each in counted]
            y = run(x)
            assert [float(each.count) - once for each, once in zip(counted, before, strict=True)] == [1.0] * len(before)
            layer.zero_grad()
            (y * dy).sum().backward()
            for parameter in layer.parameters():  # weights computed by a hook are stale now
                step = torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype) / 8
                with torch.no_grad():
                    parameter.add_(step)
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append((y.detach(), x.grad, grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    topology.close()


def check_recomputed_weights(rank: int, world: int, how: str) -> None:
    for kind in (*RECOMPUTED, *EVALUATED):
        # Experts that are separate modules are not moved between ranks, and no graph holds them with a schedule.
        if how not in ("fssdp", "whole graph") or "custom" not in kind:
            compare_with_no_plan(rank, world, how, kind)


@pytest.mark.parametrize("how", HOWS_BUT_GRAPH_SLOWLY[1:])
def test_parametrized_weights_on_two_ranks_equal_no_plan(cluster: Cluster, how: str) -> None:
    cluster.run(2, check_recomputed_weights, how)


@pytest.mark.parametrize("how", ["pipeline", *slowly("plan", "compiled")])
def test_parametrized_weights_on_one_rank_equal_no_plan(how: str) -> None:
    check_recomputed_weights(0, 1, how)


# Ranks with different hooks.


def check_hook_on_one_rank(rank: int, world: int) -> None:
    """A hook on one rank makes all ranks run without a plan; after its removal all ranks use the plan again."""
    topology = topology_of(world)
    run, layer = make("plan", topology, SwiGLU(H))
    whole, _ = make("off", fusedmoe.Topology(), SwiGLU(H))
    chunks = layer.experts.in_chunks
    planned: list[int] = []
    layer.experts.in_chunks = lambda x: (planned.append(1), chunks(x))[1]  # type: ignore[method-assign]
    for hooked in (True, False, True):
        planned.clear()
        calls: list[int] = []
        handle = layer.experts.register_forward_hook(lambda *_: calls.append(1)) if hooked and rank else None  # noqa: B023
        y, wanted = run_layer_and_dense(run, layer, whole, rank, world, {})
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-12)
        assert len(calls) == (handle is not None)
        assert bool(planned) != hooked
        if handle is not None:
            handle.remove()
    topology.close()


def test_hook_on_one_rank_disables_plan_on_all(cluster: Cluster) -> None:
    cluster.run(2, check_hook_on_one_rank)


def error_of_hook_on_one_rank(rank: int, world: int, how: str) -> str:
    """One rank has a hook, and another cannot call its experts as a module: no rank waits, and all raise the reason."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=20)
    run, layer = make("whole graph" if how == "graph of one rank" and not rank else how, topology, SwiGLU(H))
    if rank:
        layer.experts.register_forward_hook(observe_call)
    with pytest.raises(RankError) as error:
        run(numbers(rank)[0])
    return str(error.value)


def observe_call(*_: Any) -> None:
    """Observe a call."""


@pytest.mark.parametrize("how", ["pipeline", "whole graph", "graph of one rank"])
def test_unsupported_hook_on_one_rank_raises_on_all(how: str) -> None:
    ranks = Cluster()  # a separate cluster: the job is over
    try:
        texts = ranks.run(2, error_of_hook_on_one_rank, how)
    finally:
        ranks.close()
    assert all("rank 1" in text for text in texts), texts
    if how != "whole graph":  # a graph cannot detect whether it was traced with hooks
        assert "because of the forward hook observe_call on SwiGLU" in texts[1], texts[1]


def remove_hook_before_backward(rank: int, world: int) -> None:
    """A checkpoint recomputes as it saved, without a plan, although the hook is gone by then."""
    topology = topology_of(world)
    run, layer = make("plan", topology, SwiGLU(H))
    grads = []
    for hooked in (True, False):
        x, dy = numbers(rank)
        handle = layer.experts.register_forward_hook(lambda *_: None) if hooked else None
        y = checkpoint(run, x, use_reentrant=False)
        if handle is not None:
            handle.remove()
        layer.zero_grad()
        y.backward(dy)
        grads.append([x.grad, layer.experts.w1.grad])
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    topology.close()


def test_recomputation_after_hook_removal(cluster: Cluster) -> None:
    cluster.run(2, remove_hook_before_backward)
