"""Expert choices that are recorded and replayed, in layers of this library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fusedmoe
from fusedmoe import ConfigError, Topology, routing
from fusedmoe.gates import GATES
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster
from tests.layers.gate_cases import make
from tests.marks import slowly

M, H, E, K = 6, 5, 8, 2
ROUTED = [name for name in GATES if name not in ("softmoe", "expert_choice")]


def layer_of(gate: str = "topk", seed: int = 0, topology: Topology | None = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    of_gate = make(gate, E, K, dim=M, dtype=torch.float64, **options)
    return MoELayer(M, of_gate, fusedmoe.experts.SwiGLU(H), topology=topology, dtype=torch.float64)


class Model(nn.Module):
    """Two layers with residual connections; `around` wraps each layer, for example in a checkpoint."""

    def __init__(self, around: Callable[..., Tensor] = lambda f, x: f(x), **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer_of(seed=seed, **options) for seed in range(2)])
        self.dense = nn.ModuleList([nn.Linear(M, M, dtype=torch.float64) for _ in range(2)])
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer, dense in zip(self.layers, self.dense, strict=True):
            x = x + self.around(lambda x, layer=layer, dense=dense: layer(dense(x).tanh()), x)
        return x


class _Private(nn.Module):
    """Holds a layer under a private name, as its only child or not."""

    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self._moe, self.other = layer_of(), other

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._moe(x)
        return y


def test_private_module_name_is_not_a_wrapper() -> None:
    models = [nn.Sequential(_Private()), nn.Sequential(_Private(nn.Dropout(0.0)))]
    models += [nn.Sequential(torch.compile(_Private(), backend="eager")), nn.Sequential(checkpoint_wrapper(_Private()))]
    assert [list(routing.find_routers(model)) for model in models] == [["0._moe"]] * 4


def with_perturbed_routers(model: nn.Module, seed: int = 9) -> nn.Module:
    """The same with other routers: most tokens would choose other experts."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in other.modules():
            if isinstance(module, MoELayer):
                for parameter in module.gate.parameters():
                    parameter.add_(torch.randn_like(parameter))
    return other


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def record_choices(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with routing.record(model) as choices:
        model(x)
    return choices


def gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = y.square().sum() + sum(layer.aux_loss for layer in model.modules() if isinstance(layer, MoELayer))
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("gate", ROUTED)
@pytest.mark.parametrize("count", [13, 1, 0])
def test_replay_repeats_experts_in_other_router(gate: str, count: int) -> None:
    layer, x = layer_of(gate), tokens(count)
    (name,) = routing.find_routers(layer)
    wanted = record_choices(layer, x)[name]
    other = with_perturbed_routers(layer)
    torch.manual_seed(5)
    free = record_choices(other, x)[name]
    with routing.replay(other, {name: wanted}), routing.record(other) as found:
        other(x)
    assert torch.equal(found[name], wanted) and wanted.dtype == torch.int16 and wanted.shape == (count, other.gate.k)
    if count == 13:
        assert gate == "hash" or not torch.equal(free, wanted)
    # After the replay the router decides again.
    torch.manual_seed(5)
    assert torch.equal(record_choices(other, x)[name], free)


def replay_reference(layer: MoELayer, x: Tensor, expert_TK: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax gate's layer with given experts, and its balance loss, token by token."""
    logits = x @ layer.gate.weight_EM.t()
    w1_E2HM, w2_EMH = (parameter for _, parameter in sorted(layer.experts.named_parameters()))
    out = []
    for t in range(len(x)):
        weight_K = logits[t, expert_TK[t]].softmax(0)
        y = torch.zeros(M, dtype=torch.float64)
        for k, e in enumerate(expert_TK[t].tolist()):
            gate_H, up_H = (w1_E2HM[e] @ x[t]).view(2, -1)
            y = y + weight_K[k] * (w2_EMH[e] @ (nn.functional.silu(gate_H) * up_H))
        out.append(y)
    share_E = torch.bincount(expert_TK.flatten(), minlength=E).double() / expert_TK.numel()
    return torch.stack(out), E * (logits.softmax(1).mean(0) * share_E).sum()


def test_replay_gradients_equal_definition() -> None:
    layer, x = layer_of(), tokens(17).requires_grad_()
    expert_TK = torch.rand(17, E, generator=torch.Generator().manual_seed(4)).topk(K).indices
    with routing.replay(layer, [expert_TK]):
        y = layer(x)
    found = torch.autograd.grad(y.square().sum() + 3 * layer.aux_loss, [x, *layer.parameters()])
    y_defined, aux = replay_reference(layer, x, expert_TK)
    wanted = torch.autograd.grad(y_defined.square().sum() + 3 * aux, [x, *layer.parameters()])
    for one, other in zip([y, *found], [y_defined, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert torch.equal(layer.load_E, torch.bincount(expert_TK.flatten(), minlength=E))


def test_minus_one_selects_live_routing() -> None:
    layer, x = layer_of(), tokens(9)
    live = record_choices(layer, x)["MoELayer"]
    given = live.flip(1).clone()
    given[:4] = (live[:4] + 1) % E
    given[2] = -1
    given[3, 1] = -1
    given[8] = -1
    with routing.replay(layer, [given]), routing.record(layer) as found:
        layer(x)
    wanted = given.clone()
    wanted[[2, 3, 8]] = live[[2, 3, 8]]
    assert torch.equal(found["MoELayer"], wanted)


def selective(save: bool) -> Callable[..., Tensor]:
    policy = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

    def context() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    return lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=context)


class Reentrant(torch.autograd.Function):
    """Another library's checkpoint: a function whose backward calls the forward again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(grad)
        return None, x.grad


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "no early stop": lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "inside checkpoint": lambda f, x: checkpoint(
        lambda x: checkpoint(f, x, use_reentrant=False) + x, x, use_reentrant=False
    ),
    "inside reentrant checkpoint": lambda f, x: checkpoint(
        lambda x: checkpoint(f, x, use_reentrant=False) + x, x, use_reentrant=True
    ),
    "selective": selective(save=False),
    "sequential": lambda f, x: checkpoint_sequential([f, nn.Identity()], 2, x, use_reentrant=False),
    "custom autograd function": Reentrant.apply,
}


class ByHook(torch.autograd.Function):
    """A checkpoint that recomputes in a hook of its output, without a reference to its forward."""

    @staticmethod
    def forward(run: Callable[..., Tensor], x: Tensor) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.run, x = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("the hook raises before")


@pytest.mark.parametrize("ended", [False, True])
def test_unrecognized_recomputation_raises(ended: bool) -> None:
    layer, x = layer_of(), tokens(5).requires_grad_()
    expert_TK = torch.rand(10, E).topk(K).indices
    # PyTorch's checkpoint keeps the replayed choices until its backward, which may follow the replay's end.
    with routing.replay(layer, [expert_TK]):
        y = checkpoint(layer, x, use_reentrant=False)
        z = ByHook.apply(layer, x)
        z.register_hook(lambda grad: layer(x) and None)
        if not ended:
            with pytest.raises(ConfigError, match="outside of a checkpoint that replay recognizes"):
                z.sum().backward(retain_graph=True)
    if ended:
        with pytest.raises(ConfigError, match="outside of a checkpoint that replay recognizes"):
            z.sum().backward()
    del y


@pytest.mark.parametrize("inside", [True, *slowly(False)])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recomputation_replays_choices_of_its_forward(kind: str, inside: bool) -> None:
    def plain(f: Callable[..., Tensor], x: Tensor) -> Tensor:
        return f(x) + x if kind.startswith("inside") else f(x)

    # A loss made in a reentrant checkpoint receives no gradient, so the result has none.
    free, checked = Model(plain, aux={}), Model(CHECKPOINTS[kind], aux={})
    given = [[torch.rand(n, E).topk(K).indices for _ in range(2)] for n in (5, 5, 7)]
    batches = [tokens(len(one[0]), seed) for seed, one in enumerate(given)]
    joined = [torch.cat(layers) for layers in zip(*given, strict=True)]
    found = []
    for model in (free, checked):
        with routing.replay(model, joined):
            # All forwards precede the first backward; the backward passes run in two orders.
            losses = [model(x.clone().requires_grad_()).square().sum() for x in batches]
            if inside:
                model.zero_grad(set_to_none=True)
                losses[1].backward()
                (losses[0] + losses[2]).backward()
        if not inside:
            model.zero_grad(set_to_none=True)
            losses[1].backward()
            (losses[0] + losses[2]).backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        del losses
        assert not any("tap" in vars(layer.gate) for layer in model.layers)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_second_backward_of_retained_graph_replays_same_choices() -> None:
    model = Model(CHECKPOINTS["not reentrant"], aux={})
    given = [torch.rand(6, E).topk(K).indices for _ in range(2)]
    with routing.replay(model, given):
        loss = model(tokens(6)).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    for one, other in zip(
        first, torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True), strict=True
    ):
        assert torch.equal(one, other)


def test_recomputation_is_not_recorded() -> None:
    model = Model(CHECKPOINTS["not reentrant"], aux={})
    with routing.record(model) as choices:
        model(tokens(6).requires_grad_()).sum().backward()
    assert [one.shape for one in choices.values()] == [(6, K)] * 2


def test_sequential_forwards_consume_choices_in_order() -> None:
    model = Model()
    with routing.record(model, device="cpu") as choices:
        for count in (3, 0, 4):
            model(tokens(count, count))
    assert list(choices) == list(routing.find_routers(model)) == ["layers.0", "layers.1"]
    other, parts = with_perturbed_routers(model), [3, 4]
    with routing.replay(other, choices), routing.record(other) as found:
        model_input = torch.cat([tokens(3, 3), tokens(4, 4)])
        for part in model_input.split(parts):
            other(part)
    for name in choices:
        assert torch.equal(found[name], choices[name])


def test_deepcopy_during_replay_is_not_replayed() -> None:
    model, x = with_perturbed_routers(Model()), tokens(5)
    wanted = model(x)
    with routing.replay(model, [torch.rand(5, E).topk(K).indices for _ in range(2)]):
        copied = copy.deepcopy(model)
        assert not torch.equal(model(x), wanted)
    assert torch.equal(copied(x), wanted) and torch.equal(model(x), wanted)


def test_replay_in_compiled_model() -> None:
    model = Model()
    compiled = torch.compile(model, backend="eager")
    x = tokens(5)
    compiled(x)
    wanted = record_choices(with_perturbed_routers(model), x)
    with routing.replay(compiled, wanted), routing.record(compiled) as found:
        compiled(x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted) and list(found) == ["layers.0", "layers.1"]
    torch._dynamo.reset()


GOOD = torch.tensor([[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ([GOOD], "2 layers with experts, but 1 were given; layers.1 is the first without"),
        ([GOOD] * 3, "2 layers with experts, but 3"),
        ({"layers.0": GOOD}, "only the model has a layer 'layers.1'"),
        ({"layers.0": GOOD, "layers.1": GOOD, "layers.2": GOOD}, "only the choices have a layer 'layers.2'"),
        ([GOOD, GOOD[:2]], "layers.1 routes 3 tokens, but only 2 of 2 given rows are left"),
        ([torch.cat([GOOD, GOOD]), GOOD], "layers.0 has routed 3 tokens, but 6 were given"),
        ([GOOD, GOOD[:, :1]], "layers.1 selects 2 experts per token, but 1 were given"),
        ([GOOD, GOOD * 2], "choices of layers.1 must be numbers from 0 to 7, or -1, got 0 to 10"),
        ([GOOD, GOOD - 2], "choices of layers.1 .* got -2"),
        ([GOOD, GOOD * 0], "choices of layers.1 have an expert twice"),
        ([GOOD, GOOD.float()], r"choices of layers.1 must be integers \[T, K\], got torch.float32"),
        ([GOOD, GOOD[None]], r"choices of layers.1 must be integers \[T, K\]"),
    ],
)
def test_mismatch_error_names_layer(choices: Any, says: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=says), routing.replay(model, choices):
        model(tokens(3))
    # No state remains.
    assert not any("tap" in vars(layer.gate) for layer in model.layers)


@pytest.mark.parametrize("context", [routing.record, lambda model: routing.replay(model, [GOOD])])
def test_record_and_replay_reject_unsupported_models(context: Any) -> None:
    for model in (nn.Linear(2, 2), layer_of("softmoe"), layer_of("expert_choice")):
        with pytest.raises(ConfigError, match="no MoE layers|chooses no experts"), context(model):
            pass
    layer = layer_of()
    with pytest.raises(ConfigError, match="already"), context(layer), context(layer):
        pass
    with pytest.raises(ConfigError, match="ran no forward|has routed 0 tokens"), context(layer):
        pass
    assert "tap" not in vars(layer.gate)


class Lowest(fusedmoe.gates.Gate):
    """A user's gate that does not choose by a top-k."""

    def route(self, x_SM: Tensor) -> Any:
        expert_SK = x_SM[:, : self.experts].argsort(1)[:, : self.k]
        return self.routing(expert_SK, torch.ones(len(x_SM), self.k, dtype=x_SM.dtype))


def test_gate_without_top_k_is_recorded_but_not_replayed() -> None:
    layer = MoELayer(M, Lowest(3, 2), fusedmoe.experts.SwiGLU(H), dtype=torch.float64)
    choices = record_choices(layer, tokens(4))
    assert torch.equal(choices["MoELayer"].long(), tokens(4)[:, :3].argsort(1)[:, :2])
    with pytest.raises(ConfigError, match="MoELayer uses experts other than the top-k"), routing.replay(layer, choices):
        layer(tokens(4))


def replay_on_ranks(rank: int, world: int) -> None:
    topology = Topology.from_sizes(world)
    layer = layer_of(topology=topology)
    alone = layer_of()
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            whole = dict(alone.experts.named_parameters())[name]
            whole[rank * E // world : (rank + 1) * E // world] = parameter
            for r in range(world):
                part = parameter.detach().clone()
                torch.distributed.broadcast(part, r)
                whole[r * E // world : (r + 1) * E // world] = part
    x = tokens([9, 0, 4, 1][rank], rank).requires_grad_()
    given = torch.rand(len(x), E, generator=torch.Generator().manual_seed(rank)).topk(K).indices
    with routing.replay(layer, [given]), routing.record(layer) as found:
        y = checkpoint(layer, x, use_reentrant=False)
    # Global expert numbers, before ranks renumber theirs.
    assert torch.equal(found["MoELayer"].long(), given)
    wanted = replay_reference(alone, x, given)[0] if len(x) else y
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(y.square().sum() + x.sum() * 0, x)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum() + x.sum() * 0, x) if len(x) else (grad,)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-10)
    short = given[:-1] if rank == 0 else given
    says = ConfigError if rank == 0 else fusedmoe.RankError
    with pytest.raises(says, match="MoELayer routes 9 tokens, but only 8 of 8"), routing.replay(layer, [short]):
        layer(x)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replay_over_ranks(cluster: Cluster, world: int) -> None:
    cluster.run(world, replay_on_ranks)
