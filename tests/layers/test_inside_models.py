"""The layer inside PyTorch's model wrappers: activation checkpointing, torch.compile, data parallelism."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, DerivativeError
from fusedmoe.experts.networks import SwiGLU
from fusedmoe.layers.moe import MoELayer
from fusedmoe.tutel import moe
from tests.cluster import Cluster

M, H, E = 8, 12, 4


class Held:
    """Object held by a graph; alive as long as the graph is."""


class Watched(torch.autograd.Function):
    """x², with a record of the object that its node keeps alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[weakref.ref[Held]]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.held = Held()
        seen.append(weakref.ref(ctx.held))
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad, None


class Gate(fusedmoe.gates.DeepSeekV3):
    """Record the reported load."""

    def update(self, load_E: Tensor) -> None:
        self.told_E = load_E.clone()
        super().update(load_E)


class Block(nn.Module):
    """A module before the layer, and one after it that saves tensors."""

    def __init__(self, topology: Topology | None = None) -> None:
        super().__init__()
        gate = Gate(experts=E, k=2, aux={"balance": 0.1, "z": 0.1})
        self.before = nn.Linear(M, M)
        self.moe = MoELayer(M, gate, SwiGLU(H), topology=topology)
        self.after = nn.Linear(M, M)
        self.seen: list[weakref.ref[Held]] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.moe(Watched.apply(self.before(x), self.seen))
        return x + self.after(y).tanh(), self.moe.aux_loss


class Model(nn.Module):
    def __init__(self, topology: Topology | None = None, checkpointed: str = "no") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(topology) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            if self.checkpointed == "no":
                x, aux = block(x)
            else:
                x, aux = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            total = total + aux
        return x.square().mean() + total


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare_checkpointed(rank: int, world: int, mode: str) -> None:
    topology = Topology.from_sizes(world)
    usual, thrifty = Model(topology), Model(topology, mode)
    x = torch.randn(10 + rank, M, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    for _ in range(2):
        for ours, theirs in zip(gradients(thrifty, x), gradients(usual, x), strict=True):
            assert torch.equal(ours, theirs)
        for one, other in zip(thrifty.blocks, usual.blocks, strict=True):
            assert torch.equal(one.moe.load_E, other.moe.load_E)
            one.moe.update_gate()
            other.moe.update_gate()
            assert one.moe.gate.told_E.sum() == 2 * (10 * world + sum(range(world)))  # once per token and slot
            assert torch.equal(one.moe.gate.told_E, other.moe.gate.told_E)


def recompute_ending_early(rank: int, world: int) -> None:
    """Recomputation ends inside the layer, with an exception, as soon as no tensor is missing."""
    topology = Topology.from_sizes(world)
    layer = Model(topology).blocks[0].moe
    x = torch.randn(10, M, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert topology.world.board.read() is None


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_activation_checkpointing_equals_plain(mode: str) -> None:
    compare_checkpointed(0, 1, mode)


def test_activation_checkpointing_over_ranks(cluster: Cluster) -> None:
    cluster.run(2, compare_checkpointed, "non-reentrant")


def test_early_end_of_recomputation_is_not_an_error(cluster: Cluster) -> None:
    cluster.run(2, recompute_ending_early)


def layer_with_losses() -> MoELayer:
    gate = fusedmoe.gates.TopK(E, 2, aux={"balance": 0.1, "z": 0.1})
    return MoELayer(M, gate, fusedmoe.experts.FeedForward(H), dtype=torch.float64)


def tutel_layer() -> Any:
    experts = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H}
    return moe.moe_layer({"type": "top", "k": 2}, M, experts).double()


def layer_without_losses() -> MoELayer:
    return MoELayer(M, fusedmoe.gates.TopK(E, 2, aux={}), fusedmoe.experts.FeedForward(H), dtype=torch.float64)


def aux_of(layer: Any) -> Tensor:
    return layer.aux_loss if isinstance(layer, MoELayer) else layer.l_aux


def call_with_aux(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x), aux_of(layer)


def reentrant_then_attribute(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(layer, x, use_reentrant=True), aux_of(layer)


def nested_reentrant(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(reentrant_then_attribute, layer, x, use_reentrant=True)


def nested_reentrant_then_attribute(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(lambda x: reentrant_then_attribute(layer, x)[0], x, use_reentrant=True), aux_of(layer)


def reentrant_inside_non_reentrant(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(lambda x: reentrant_then_attribute(layer, x)[0], x, use_reentrant=False), aux_of(layer)


def reentrant_around_non_reentrant(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(lambda x: non_reentrant(layer, x)[0], x, use_reentrant=True), aux_of(layer)


def compiled_in_reentrant(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    torch._dynamo.reset()
    return checkpoint(torch.compile(layer, backend="aot_eager"), x, use_reentrant=True), aux_of(layer)


def non_reentrant(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(layer, x, use_reentrant=False), aux_of(layer)


def reentrant_returning_aux(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(call_with_aux, layer, x, use_reentrant=True)


def reentrant_returning_aux_in_eval(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    found = reentrant_returning_aux(layer.eval(), x)
    with torch.no_grad():
        layer(x)
    return found


def nested_reentrant_returning_aux(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(lambda x: reentrant_returning_aux(layer, x), x, use_reentrant=True)


def reentrant_returning_aux_then_attribute(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, _ = reentrant_returning_aux(layer, x)
    return y, aux_of(layer)  # the same tensor


def evaluate_then_train(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        layer(x)
        aux_of(layer).numpy()
        reentrant_then_attribute(layer, x)[1].item()
    return call_with_aux(layer, x)


REFUSED = (
    reentrant_then_attribute,
    nested_reentrant,
    nested_reentrant_then_attribute,
    reentrant_inside_non_reentrant,
    reentrant_around_non_reentrant,
    compiled_in_reentrant,
)
RIGHT = (
    non_reentrant,
    reentrant_returning_aux,
    reentrant_returning_aux_in_eval,
    nested_reentrant_returning_aux,
    reentrant_returning_aux_then_attribute,
    evaluate_then_train,
)


def aux_gradients(make: Any, how: Any, coefficient: float = 3.0) -> list[Tensor]:
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(9, M, dtype=torch.float64, requires_grad=True)
    y, aux = how(layer, x)
    (y.square().mean() + coefficient * aux).backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("make", [layer_with_losses, tutel_layer])
def test_checkpoints_keep_or_reject_auxiliary_loss(make: Any) -> None:
    right = aux_gradients(make, call_with_aux)
    for how in RIGHT:
        torch.testing.assert_close(aux_gradients(make, how), right, msg=how.__name__)
    for how in REFUSED:
        with pytest.raises(DerivativeError, match="was made in a reentrant activation checkpoint"):
            aux_gradients(make, how)
    torch.testing.assert_close(
        aux_gradients(make, reentrant_then_attribute, 0.0), aux_gradients(make, call_with_aux, 0.0)
    )


def test_reentrant_checkpoint_without_auxiliary_loss() -> None:
    torch.testing.assert_close(
        aux_gradients(layer_without_losses, reentrant_then_attribute),
        aux_gradients(layer_without_losses, call_with_aux),
    )


def test_recomputed_activations_are_freed() -> None:
    model = Model(checkpointed="non-reentrant")
    model(torch.randn(9, M, requires_grad=True)).backward()
    seen = [ref for block in model.blocks for ref in block.seen]
    gc.collect()
    assert len(seen) == 4  # two forwards and two recomputations
    assert not [ref for ref in seen if ref() is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_compiled_model_equals_eager(backend: str) -> None:
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend=backend)
    try:
        for tokens in (12, 5, 0):
            x = torch.randn(tokens, M)
            expected = gradients(model, x)
            for ours, theirs in zip(gradients(compiled, x), expected, strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=tokens == 0)
    finally:
        torch._dynamo.reset()


def compare_ddp(rank: int, world: int) -> None:
    model = Model()  # every rank holds all experts
    wrapped = DistributedDataParallel(Model())
    x = [torch.randn(6 + r, M, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    expected = [torch.stack(each).mean(0) for each in zip(*(gradients(model, part)[1:] for part in x), strict=True)]
    for _ in range(2):
        for ours, theirs in zip(gradients(wrapped, x[rank])[1:], expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_ddp_gradients_equal_mean_over_ranks(cluster: Cluster) -> None:
    cluster.run(2, compare_ddp)


def test_functional_call_and_module_hooks() -> None:
    model = Model()
    x = torch.randn(4, M)
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    assert not torch.equal(torch.func.functional_call(model, doubled, (x,)), model(x))
    # A state names the experts of its matrices, and does not load into other experts.
    state = {name: 2 * value if value.is_floating_point() else value for name, value in model.state_dict().items()}
    for _ in range(2):
        assert torch.func.functional_call(model, state, (x,)) == torch.func.functional_call(model, doubled, (x,))
    others = {name: value if value.is_floating_point() else value + 1 for name, value in state.items()}
    with pytest.raises(ConfigError, match=r"this state has experts \[1, .* this rank now has experts \[0, "):
        torch.func.functional_call(model, others, (x,))
    calls: list[str] = []
    model.blocks[0].moe.register_forward_hook(partial(lambda name, *_: calls.append(name), "forward"))
    model.blocks[0].moe.register_full_backward_hook(partial(lambda name, *_: calls.append(name), "backward"))
    model(x).backward()
    assert calls == ["forward", "backward"]
