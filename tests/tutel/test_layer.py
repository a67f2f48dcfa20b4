"""Arguments, attributes, environment and custom parts of the layer."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fusedmoe.errors import ConfigError, RankError
from fusedmoe.losses import balance_loss
from fusedmoe.schedule.cost import CostModel, Line
from fusedmoe.tutel import moe, net
from fusedmoe.tutel.experts import ffn
from fusedmoe.tutel.experts.ffn import activation_name
from fusedmoe.tutel.impls import dispatcher, losses
from fusedmoe.tutel.impls.fast_dispatch import alignment_of, capacity_of
from tests.cluster import Cluster
from tests.marks import slowly
from tests.tutel.cases import draw, fill

D, H = 16, 32
FFN = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": H}


def make(gate: Any = None, experts: dict[str, Any] | None = None, **more: Any) -> moe.MOELayer:
    return moe.moe_layer(gate or {"type": "top", "k": 2}, D, {**FFN, **(experts or {})}, **more)


def random_tokens(*shape: int) -> Tensor:
    return draw(shape or (24, D), 7).float()


def test_layer_rejects_invalid_arguments() -> None:
    with pytest.raises(AssertionError, match="even"):
        moe.moe_layer({"type": "top"}, 7, FFN)
    with pytest.raises(ConfigError, match="no argument 'degree'"):
        make(degree=3)
    with pytest.raises(ConfigError, match="unknown gate_type"):
        make("SwitchGate")
    with pytest.raises(ConfigError, match="unknown type 'rnn' of experts"):
        make(experts={"type": "rnn"})
    for count in (0, 2.5, -0.5):
        with pytest.raises(ConfigError, match=f"num_experts_per_device = {count}; give a count"):
            make(experts={"num_experts_per_device": count})
    with pytest.raises(ConfigError, match="no option 'kk'; it has type, k, fp32_gate, capacity_factor, gate_noise$"):
        make({"type": "top", "kk": 2})
    wrong = {"type": "cosine_top", "normalize_gate": False, "noise": 1.0}
    with pytest.raises(
        ConfigError, match="'normalize_gate', 'noise'; it has .* proj_dim, init_t, .* moe_layer itself$"
    ):
        make(wrong)
    with pytest.raises(ConfigError, match="cannot share"):
        make(experts={"num_experts_per_device": -3})
    with pytest.raises(ConfigError, match="gate_noise > 0"):
        make(is_gshard_loss=False).eval()(random_tokens())
    with pytest.raises(ConfigError, match="set self.top_k"):
        make({"type": "custom", "module": lambda model_dim, num_global_experts: nn.Linear(model_dim, 4)})
    with pytest.raises(ConfigError, match=rf"input of shape \[4, {D + 1}\]; it takes \[tokens, …, model_dim = {D}\]"):
        make()(torch.randn(4, D + 1))
    with pytest.raises(ConfigError, match="adaptive degree 2"):
        make()(random_tokens(), adaptive_r=2)
    for kind in ("pipeline", "adaptive:x"):
        with pytest.raises(ConfigError, match=f"unknown parallel_type '{kind}'"):
            make(parallel_type=kind)
    for degree in (0, -2, "2", 1.5):
        with pytest.raises(ConfigError, match="give a number of chunks"):
            make(a2a_ffn_overlap_degree=degree)
        with pytest.raises(ConfigError, match="give a number of chunks"):
            make()(random_tokens(), a2a_ffn_overlap_degree=degree)
    with pytest.raises(ConfigError, match="custom gate without a 'module'"):
        make({"type": "custom", "k": 2})
    with pytest.raises(ConfigError, match=r"no longer support 'implicit_dropout_p'.*activation_fn=lambda x: dropout"):
        make(experts={"implicit_dropout_p": 0.1})
    with pytest.raises(ConfigError, match="no longer support 'fused_custom_fn'.*{'type': 'custom'"):
        make(experts={"fused_custom_fn": lambda self, x: x})
    with pytest.raises(ConfigError, match="k = -2 experts; choose a number from 1 on"):
        make()(random_tokens(), top_k=-2)
    for experts in (None, [nn.Linear(D, D)]):
        with pytest.raises(ConfigError, match=r"needs experts=\{'type': …\}"):
            moe.moe_layer({"type": "top"}, D, experts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="custom experts without a 'module'"):
        moe.moe_layer({"type": "top"}, D, {"type": "custom"})


def test_deprecated_arguments_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        layer = make("Top2Gate", pad_samples=True)
    assert "pad_samples" in caplog.text and "Top2Gate" in caplog.text
    assert layer.gates[0].top_k == 2


def test_layer_attributes_equal_tutel() -> None:
    seen: dict[str, nn.Parameter] = {}
    layer = make(
        [{"type": "top", "k": 3, "capacity_factor": 1.5}, {"type": "cosine_top", "gate_noise": 0.5}],
        scan_expert_func=lambda name, p: seen.setdefault(name, p),
        result_func=lambda y: (y, y.l_aux),
    )
    assert list(seen) == ["batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias"]
    assert all(p._tutel_expert for p in seen.values()) and not hasattr(layer.gates[0].wg.weight, "_tutel_expert")
    assert (layer.num_global_experts, layer.num_local_experts, layer.sharded_count, layer.world_size) == (4, 4, 1, 1)
    assert (layer.valid_rs, layer.adaptive_degree, layer.group) == ([0, 1], 1, None)
    first, second = layer.gates
    assert (first.top_k, first.capacity_factor, first.gate_noise) == (3, 1.5, 0.0)
    assert (second.top_k, second.capacity_factor, second.gate_noise) == (1, 1.0, 0.5)
    assert [name for name, _ in layer.get_parameter_iterator("gate")][0] == "0.wg.weight"
    assert dict(layer.get_parameter_iterator("local_experts")) == seen
    y, aux = layer(random_tokens(), gate_index=1)
    assert aux is y.l_aux is layer.l_aux and int(layer.dispatch_count.sum()) == 24
    assert layer.protected_shape[0] == 4 and layer.protected_shape[-1] == D
    assert moe.moe_layer.global_expert_count(3) == 3
    for one in (-1, 1 / 1, np.int64(1)):  # scripts pass 1 / world, or count with NumPy
        alone = make(experts={"num_experts_per_device": one})
        assert (alone.num_global_experts, alone.num_local_experts, alone(random_tokens()).shape) == (1, 1, (24, D))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(random_tokens(), gate_index=0)[0], layer(random_tokens(), gate_index=0)[0])


def test_seeds_control_gates_experts_and_generator() -> None:
    gates = [{"type": "top"}, {"type": "top"}]
    layer = make(gates, seeds=(5, 9, 11))
    after = torch.randn(3)
    torch.manual_seed(11)
    assert torch.equal(after, torch.randn(3))
    for i, gate in enumerate(layer.gates):
        torch.manual_seed(5 + i)
        assert torch.equal(gate.wg.weight, nn.Linear(D, 4, bias=False).weight)
    torch.manual_seed(9)
    other = make(gates)
    assert torch.equal(other.experts.batched_fc1_w, layer.experts.batched_fc1_w)


def test_init_argument_selects_older_initialization() -> None:
    old = make(experts={"init": "0.3"}, seeds=(1, 2, 3)).experts
    torch.manual_seed(2)
    up, down = nn.Linear(D, H), nn.Linear(H, D)
    assert torch.equal(old.batched_fc1_w[0], up.weight) and torch.equal(old.batched_fc1_bias[0], up.bias)
    assert torch.equal(old.batched_fc2_w[0], down.weight.t()) and torch.equal(old.batched_fc2_bias[0], down.bias)


@pytest.mark.parametrize("shards", [1, 4])
def test_initial_weights_equal_tutel(shards: int) -> None:
    """W1 in ±1/√D, W2 in ±1/√(its second-to-last size, H/s), expert by expert, in Tutel's order of operations."""
    M, hidden, out = 8, 512, 6
    torch.manual_seed(2)
    new = ffn.FusedExpertsNetwork(M, hidden, 3, shards, output_dim=out)
    h = hidden // shards
    torch.manual_seed(2)
    for i in range(3):
        for w, rows, inputs in ((new.batched_fc1_w, M, M), (new.batched_fc2_w, out, h)):
            bound = 1.0 / math.sqrt(inputs)
            assert torch.equal(w[i], torch.rand(h, rows) * (bound + bound) - bound)
            assert 0.95 * inputs**-0.5 < w[i].abs().max() <= inputs**-0.5
    assert not new.batched_fc1_bias.any() and not new.batched_fc2_bias.any()


def test_environment_variables_set_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tokens()
    monkeypatch.setenv("CAP_FACTOR", "0.25")
    monkeypatch.setenv("BATCH_PRIO", "1")
    layer = make()
    assert layer.gates[0].capacity_factor == 0.25 and layer.batch_prioritized_routing
    assert make({"type": "top", "capacity_factor": 3.0}).gates[0].capacity_factor == 3.0
    monkeypatch.setenv("SKIP_EXPERT", "1")
    skipping = make({"type": "top", "k": 2, "capacity_factor": 0.0})
    torch.testing.assert_close(skipping(x), x)  # weights of a token add up to one
    monkeypatch.setenv("SKIP_MOE", "1")
    y = make(result_func=lambda t: (t, t.l_aux))(x)
    assert y[0] is x and y[1] is None


def layer_reference(layer: moe.MOELayer, x: Tensor, capacity: int, k: int = 2) -> Tensor:
    """The definition, token by token."""
    E = layer.experts
    prob = F.linear(x, layer.gates[0].wg.weight).softmax(1)
    chosen = prob.topk(k, 1)
    weight = chosen.values / chosen.values.sum(1, keepdim=True) if k > 1 else chosen.values
    taken = [0] * layer.num_global_experts
    y = torch.zeros_like(x)
    for i in range(k):
        for s in range(len(x)):
            e = int(chosen.indices[s, i])
            taken[e] += 1
            if taken[e] <= capacity:
                h = (E.batched_fc1_w[e] @ x[s] + E.batched_fc1_bias[e]).relu()
                y[s] += weight[s, i] * (h @ E.batched_fc2_w[e] + E.batched_fc2_bias[e])
    return y


@pytest.mark.parametrize("factor,capacity", [(1.0, 12), (0.5, 6), (0.0, 24), (-0.25, 2)])
def test_layer_equals_definition(factor: float, capacity: int) -> None:
    layer = make({"type": "top", "k": 2, "capacity_factor": factor})
    fill(layer, 0, 1)
    torch.testing.assert_close(
        layer(random_tokens()), layer_reference(layer, random_tokens(), capacity), rtol=1e-4, atol=1e-5
    )


def test_capacity_and_alignment_of_examples() -> None:
    def never() -> int:
        raise AssertionError

    assert capacity_of(1.25, 2, 24, 4, never) == 14
    assert capacity_of(1.25, 2, 24, 4, never, alignment=4) == 16
    assert capacity_of(0.7, 1, 25, 4, never) == int(0.7 * 7)
    assert capacity_of(0.0, 2, 24, 4, lambda: 9) == 9
    assert [capacity_of(-f, 2, 24, 4, lambda: 9) for f in (0.5, 2.0)] == [6, 9]
    assert capacity_of(1.0, 2, 0, 4, never) == 0
    assert [alignment_of(2, 4), alignment_of(1, 1, 8), alignment_of(3, 100)] == [8, 8, 384]


def test_losses_equal_definition() -> None:
    scores = draw((10, 4), 3).softmax(1)
    top_ids = scores.topk(2, 1).indices
    torch.testing.assert_close(losses.gshard_loss(scores, top_ids), balance_loss(scores, top_ids[:, :1]))
    logits = draw((10, 4), 5)
    load = torch.special.ndtr((scores - logits[:, 1:2]) / (0.5 / 4)).sum(0)
    importance = scores.sum(0)
    expected = sum(t.var() / (t.mean() ** 2 + 1e-10) for t in (load, importance)) / 2
    torch.testing.assert_close(losses.load_importance_loss(scores, logits[:, :2], 4, 0.5), expected)


def test_activation_names_are_recognized() -> None:
    known = {
        "relu": [F.relu, torch.relu, nn.ReLU(), lambda x: F.relu(x), lambda x: x.relu()],
        "gelu": [F.gelu, nn.GELU(), lambda x: F.gelu(x)],
        "gelu_tanh": [lambda x: F.gelu(x, approximate="tanh")],
        "silu": [F.silu, nn.SiLU()],
    }
    for name, functions in known.items():
        assert [activation_name(function) for function in functions] == [name] * len(functions)
    before = torch.random.get_rng_state()
    strange = [
        lambda x: F.relu(x) * 2,
        lambda x: F.dropout(F.relu(x)),
        lambda x: F.relu(x + 1),
        lambda x: F.relu(x, inplace=True),
        F.leaky_relu,
        nn.PReLU(),
        lambda x: x,
        lambda x: None,
        lambda x: F.relu(torch.ones(2)),
        lambda x: (F.relu(x), F.gelu(x))[0],
    ]
    assert [activation_name(function) for function in strange] == [None] * len(strange)  # type: ignore[arg-type]
    assert torch.equal(before, torch.random.get_rng_state())


class Gate(nn.Module):
    def __init__(self, model_dim: int, num_global_experts: int, k: int) -> None:
        super().__init__()
        self.top_k = k
        self.own = nn.Linear(model_dim, num_global_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


class Expert(nn.Module):
    """Scales the channels of [e, C, 4, 4]; an older argument name."""

    def __init__(self, model_dim: int, local_experts: int, sharded_count: int, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((local_experts, 1, 4, 1), start))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, ctx: moe.MOELayer) -> Tensor:
        names = ("group", "sharded_count", "adaptive_degree", "num_global_experts", "model_dim", "megablocks_size")
        self.seen = {"shape": tuple(x.shape)} | {name: getattr(ctx, name) for name in names}
        self.seen["count"] = ctx.dispatch_count.tolist()
        return x * self.scale


def test_custom_gate_and_experts_with_reserved_dims() -> None:
    gate = {"type": "custom", "module": Gate, "k": 2}
    layer = moe.moe_layer(gate, D, {"type": "custom", "module": Expert, "num_experts_per_device": 4, "start": 3.0})
    assert (layer.gates[0].capacity_factor, layer.gates[0].gate_noise) == (1.0, 0.0)
    x = random_tokens(2, 12, 4, 4)
    y = layer(x, reserve_dims=2, capacity_factor=0.0)
    torch.testing.assert_close(y, 3 * x)
    seen = layer.experts.seen
    assert seen["shape"] == (4, max(seen["count"]), 4, 4) == tuple(layer.protected_shape)
    assert (seen["sharded_count"], seen["adaptive_degree"], seen["num_global_experts"]) == (1, 1, 4)
    y.sum().backward()
    assert layer.experts.scale.grad is not None


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_numpy_and_tensor_scalars_are_accepted(number: Any) -> None:
    layer, x = make(experts={"num_experts_per_device": number(4)}, a2a_ffn_overlap_degree=number(2)), random_tokens()
    expected = layer(x, top_k=1, capacity_factor=0.5, adaptive_r=0)
    factor = number(0.5) if number is torch.tensor else np.float64(0.5)
    zero, one = number(0), number(1)
    found = layer(x, zero, top_k=one, capacity_factor=factor, adaptive_r=zero, megablocks_size=one)
    assert torch.equal(found, expected)
    assert (layer.a2a_ffn_overlap_degree, layer.adaptive_degree, list(layer._dispatchers)) == (2, 0, [0])
    assert type(layer.a2a_ffn_overlap_degree) is type(layer.adaptive_degree) is int


def test_built_in_experts_with_reserved_dims() -> None:
    layer = make()
    flat = layer(random_tokens(24, D))
    torch.testing.assert_close(layer(random_tokens(24, 4, 4), reserve_dims=2), flat.view(24, 4, 4))


@pytest.mark.parametrize("small", [2**23, 0])  # experts as blocks, and in one operation
def test_output_dim_with_reserved_dims(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn, "SMALL", small)
    layer = make(experts={"output_dim": 10})
    y = layer(random_tokens(2, 12, 4, 4), reserve_dims=2)
    torch.testing.assert_close(y, layer(random_tokens(24, D)).view(2, 12, 10))


def test_layer_under_autocast_and_with_expert_hook() -> None:
    layer = make({"type": "top", "k": 2, "fp32_gate": True})
    expected = layer(random_tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(random_tokens())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    calls: list[int] = []
    layer.experts.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(layer(random_tokens()), expected)
    assert calls == [1]


# On several ranks.


def check_two_level_all_to_all(rank: int, world: int) -> None:
    """LOCAL_SIZE ranks form a node: the two-level path is equal, in the world, in a subgroup, with shards."""
    pair = net.create_groups_from_world(2)
    groups = {"world": None, "one node": pair.model_group, "across nodes": pair.data_group}
    for nodes in ("2", "8"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_SIZE", nodes)
            for name, group in groups.items():
                for count in (2, -2):
                    results = []
                    for two_level in (False, True):
                        layer = make(experts={"num_experts_per_device": count}, group=group, use_2dh=two_level)
                        fill(layer, net.get_world_rank(group), net.get_world_size(group))
                        y = layer(draw((9 + rank, D), rank).float())
                        y.square().sum().backward()
                        results.append([y.detach(), *(p.grad for p in layer.parameters())])
                    assert all(map(torch.equal, *results)), (nodes, name, count)


@pytest.mark.slow  # makes twelve topologies
def test_local_size_nodes_use_two_level_all_to_all(cluster: Cluster) -> None:
    cluster.run(4, check_two_level_all_to_all)


def check_skip_a2a(rank: int, world: int) -> None:
    """SKIP_A2A: rows are computed on their source rank, by its experts."""
    module = lambda **more: Expert(start=2.0 + rank, **more)  # noqa: E731
    layer = moe.moe_layer({"type": "top", "k": 2}, D, {"type": "custom", "module": module, "count_per_node": 2})
    x = random_tokens(24, 4, 4)
    parts = torch.arange(2.0 * world).view(1, 2 * world) + 10 * rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIP_A2A", "1")
        torch.testing.assert_close(layer(x, reserve_dims=2, capacity_factor=0.0), (2 + rank) * x)
        assert torch.equal(net.all_to_all(parts, 0, 1), net.all_to_all(parts, 0, 1, background=True)())
        assert torch.equal(net.all_to_all(parts, 0, 1), parts.view(world, 2))
        assert torch.equal(net.simple_all_to_all(parts.t()), parts.t())
        assert torch.equal(net.all_to_all_single(parts.t()), parts.t())
    assert not torch.equal(net.simple_all_to_all(parts.t()), parts.t())


def test_skip_a2a_keeps_rows_on_source_rank(cluster: Cluster) -> None:
    cluster.run(2, check_skip_a2a)


class Model(nn.Module):
    """A layer between dense ones, equal on all ranks except for the experts, which each rank draws separately."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(D, D)
        self.moe = make({"type": "top", "k": 2, "capacity_factor": 0.0}, {"num_experts_per_device": 2}, group=group)
        fill(self.moe, rank, world)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.dense(x))
        return y

    def backward(self, x: Tensor, wrapper: nn.Module | None = None) -> list[Tensor]:
        """Gradients of the dense layer, the gate, and the experts."""
        ((wrapper or self)(x).square().sum() + self.moe.l_aux).backward()
        grads = [p.grad for p in (self.dense.weight, self.moe.gates[0].wg.weight, *self.moe.experts.parameters())]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def check_under_ddp_and_fsdp(rank: int, world: int) -> None:
    """DDP and FSDP average shared gradients and skip the experts', which Tutel's users exclude."""
    x = draw((9 + rank, D), rank).float()
    dense, gate, *experts = Model(rank, world).backward(x)
    expected = [net.simple_all_reduce(dense) / world, net.simple_all_reduce(gate) / world, *experts]
    model = Model(rank, world)
    own = {name: p for name, p in model.named_parameters() if hasattr(p, "_tutel_expert")}
    model._ddp_params_and_buffers_to_ignore = list(own)  # type: ignore[assignment]
    torch.testing.assert_close(model.backward(x, nn.parallel.DistributedDataParallel(model)), expected)
    model = Model(rank, world)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (world,)),
        ignored_params={p for p in model.parameters() if hasattr(p, "_tutel_expert")},
    )
    torch.testing.assert_close(model.backward(x), expected)
    # With the experts inside, DDP makes all ranks' experts equal, and FSDP shards each rank's as if they were equal.
    model = Model(rank, world)
    with pytest.raises(ConfigError, match="experts of this layer are this rank's own, and PyTorch's DistributedDataP"):
        model.backward(x, nn.parallel.DistributedDataParallel(model))
    model = Model(rank, world)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(ConfigError, match="experts of this layer are this rank's own, and PyTorch's fully_shard"):
        model.backward(x)


def check_under_ddp_with_replicas(rank: int, world: int) -> None:
    """Ranks outside the layer's group may hold equal experts, over which a wrapper reduces."""
    env = net.create_groups_from_world(2)
    model = Model(env.model_rank, env.model_size, env.model_group)
    wrapper = nn.parallel.DistributedDataParallel(model, process_group=env.data_group)
    found = model.backward(draw((9, D), rank).float(), wrapper)
    expected = Model(env.model_rank, env.model_size, env.model_group).backward(draw((9, D), rank).float())
    for gradient, own in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, net.simple_all_reduce(own, env.data_group) / 2)


@pytest.mark.slow  # four ranks
def test_gradients_of_replicated_experts_under_ddp(cluster: Cluster) -> None:
    cluster.run(4, check_under_ddp_with_replicas)


def test_gradients_under_ddp_and_fsdp(cluster: Cluster) -> None:
    cluster.run(2, check_under_ddp_and_fsdp)


def build_outside_group(rank: int, world: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ConfigError, match="this rank is not in the group"):
            make(group=group)
        with pytest.raises(ConfigError, match="this rank is not in the group"):
            net.all_gather(random_tokens(), 0, group=group)


def test_rank_outside_group_is_rejected(cluster: Cluster) -> None:
    cluster.run(2, build_outside_group)


def check_sharded_experts(rank: int, world: int) -> None:
    """For any split of an expert over its ranks, results equal one process."""
    torch.set_default_dtype(torch.float64)
    try:
        layer = make(experts={"num_experts_per_device": 1 / 4})
        whole = make(experts={"num_experts_per_device": 1}, group=net.create_standalone_group())
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layer.num_global_experts, layer.sharded_count, layer.valid_rs) == (1, 4, [0, 1, 2, 4])
    fill(layer, rank, world)
    fill(whole, 0, 1)
    x = [draw((9 - 2 * r, D), 3 + r) for r in range(world)]
    for r in range(world):
        y = whole(x[r], capacity_factor=0.7)
        y.square().sum().backward()
        if r == rank:
            expected = y.detach()
    for degree in layer.valid_rs:
        layer.zero_grad()
        y = layer(x[rank], capacity_factor=0.7, adaptive_r=degree)
        y.square().sum().backward()
        # The capacity is rounded up to a multiple of the shards, as in Tutel.
        torch.testing.assert_close(y, plain_capacity(whole, x[rank]), msg=f"adaptive_r = {degree}")
        gathered = {name: net.simple_all_gather(p.grad) for name, p in layer.experts.named_parameters()}
        assert expected.shape == y.shape
        if degree == 0:
            first = gathered
        for name, grad in gathered.items():
            torch.testing.assert_close(grad, first[name], msg=f"{name} at adaptive_r = {degree}")


def plain_capacity(whole: moe.MOELayer, x: Tensor) -> Tensor:
    capacity = capacity_of(0.7, 1, len(x), 1, lambda: 0, alignment=4)
    return layer_reference(whole, x, capacity, k=1).detach()


def test_sharded_experts_equal_one_process(cluster: Cluster) -> None:
    cluster.run(4, check_sharded_experts)


def check_overlap_degrees(rank: int, world: int) -> None:
    """Chunks do not change results: any chunk count, chosen by the user or the scheduler, one operation or any
    function.
    """
    # Slow links, which make chunks profitable for the scheduler.
    costs = CostModel({"all-to-all/ep": Line(0.0, 1e-6), "gemm": Line(0.0, 1e-9)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "measured_costs", lambda *_: costs)
        patch.setattr(ffn, "SMALL", 0)
        count_chunks(rank, world)


def count_chunks(rank: int, world: int) -> None:
    chunks = {}
    for number, experts in enumerate(({}, {"activation_fn": lambda x: F.relu(x) * 1.0})):
        # Capacities of 2·int(1.2·7) = 16 and 2·int(1.2·4) = 8: multiples of every degree.
        layer = make({"type": "top", "k": 2, "capacity_factor": 1.2}, {"num_experts_per_device": 2, **experts})
        fill(layer, rank, world)
        x = draw((25 - 9 * rank, D), 7 + rank).float()
        results = {}
        for degree in (1, 2, 4, "auto"):
            layer.zero_grad()
            y = layer(x, a2a_ffn_overlap_degree=degree)
            assert layer.a2a_ffn_overlap_degree == degree
            y.square().sum().backward()
            results[degree] = [y.detach(), *(p.grad for p in layer.parameters())]
            torch.testing.assert_close(results[degree], results[1])
        plans = layer._dispatchers[1]._plans
        chunks[number] = {key[0]: max(found.forward.degrees.values()) for key, found in plans.items()}
    assert all(found[2] == 2 and found[4] == 4 and found["auto"] > 1 for found in chunks.values()), chunks


def check_expert_hook(rank: int, world: int) -> None:
    """A hook on the experts runs once for all rows, and its result is used, for any number of chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffn, "SMALL", 0)
        layer = make({"type": "top", "k": 2, "capacity_factor": 1.2}, {"num_experts_per_device": 2})
        fill(layer, rank, world)
        x, calls = draw((25 - 9 * rank, D), 7 + rank).float(), []
        layer.experts.register_full_backward_pre_hook(lambda _, grads: (calls.append(1), (grads[0] * 2,))[1])
        results = {}
        for degree in (1, 2, 4):
            layer.zero_grad()
            calls.clear()
            y = layer(x, a2a_ffn_overlap_degree=degree)
            y.square().sum().backward()
            assert len(calls) == 1
            results[degree] = [y.detach(), *(p.grad for p in layer.parameters())]
            torch.testing.assert_close(results[degree], results[1])


def test_expert_hook_runs_once_for_all_chunks(cluster: Cluster) -> None:
    cluster.run(2, check_expert_hook)


def test_overlap_degree_does_not_change_results(cluster: Cluster) -> None:
    cluster.run(2, check_overlap_degrees)


def check_unequal_tokens(rank: int, world: int) -> None:
    """Custom experts receive W·C places, as many as the largest rank needs; a rank without tokens takes part."""
    module = lambda **more: Expert(start=2.0, **more)  # noqa: E731
    layer = moe.moe_layer({"type": "top", "k": 2}, D, {"type": "custom", "module": module, "count_per_node": 2})
    x = random_tokens(0 if rank else 24, 4, 4)
    y = layer(x, reserve_dims=2, capacity_factor=0.0, inequivalent_tokens=True)
    torch.testing.assert_close(y, 2 * x)
    (y.sum() + layer.l_aux).backward()
    assert layer.experts.seen["shape"][0] == 2
    most = int(net.simple_all_reduce(layer.dispatch_count.max(), op=dist.ReduceOp.MAX))
    assert layer.experts.seen["shape"][1] == world * most


def test_custom_experts_with_unequal_tokens_per_rank(cluster: Cluster) -> None:
    cluster.run(2, check_unequal_tokens)


class _Plain(nn.Module):
    """Custom experts with one matrix each."""

    def __init__(self, model_dim: int, num_experts_per_device: int, **more: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_experts_per_device, model_dim, model_dim))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        return x @ self.w


def check_non_finite_rejected(rank: int, world: int) -> None:
    """Each kind of non-finite value, on the last rank: refused on all ranks, and the next call is right."""
    small = {"num_experts_per_device": 2}
    layers = [
        (make(experts=small, seeds=(1, rank + 1, 1)), {}),
        (make(experts=small, seeds=(1, rank + 1, 1), a2a_ffn_overlap_degree=2, is_postscore=False), {}),
        (make(experts=small, seeds=(1, rank + 1, 1), batch_prioritized_routing=True), {"capacity_factor": 0.0}),
        (make(experts={"num_experts_per_device": -world}, seeds=(1, 1, 1), gate={"type": "top", "k": 1}), {}),
        (make(experts=small, seeds=(1, rank + 1, 1), parallel_type="adaptive:0"), {"inequivalent_tokens": True}),
        (make({"type": "cosine_top", "k": 2}, experts=small, seeds=(1, rank + 1, 1)), {}),
        (make(experts=small, seeds=(1, rank + 1, 1)).half(), {}),
        (make(experts={"type": "custom", "module": _Plain, **small}, seeds=(1, rank + 1, 1)), {}),
    ]
    for layer, more in layers:
        dtype = next(layer.experts.parameters()).dtype
        for number, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
            x = random_tokens().to(dtype)
            if rank == world - 1:
                x[7, 3] = bad
            where = f"rank {rank}: " if rank == world - 1 else f"rank {world - 1} failed in the check of"
            error = ConfigError if world == 1 else RankError
            with torch.set_grad_enabled(number > 0), pytest.raises(error, match=f"{where}.*are NaN or infinite"):
                layer(x, **more)
            y = layer(random_tokens().to(dtype), **more)
            assert y.isfinite().all()
            (y * 60000).sum().backward()  # overflowing gradients are for a loss scaler to handle
            layer.zero_grad()


@pytest.mark.parametrize("world", [1, *slowly(2)])
def test_non_finite_values_are_rejected_on_all_ranks(cluster: Cluster, world: int) -> None:
    cluster.run(world, check_non_finite_rejected)


def test_extract_critical_rejects_non_finite_scores() -> None:
    scores = random_tokens(6, 4).softmax(1)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ConfigError, match="extract_critical: scores are NaN"):
            moe.extract_critical(scores.index_fill(0, torch.tensor(2), bad), 2)


def check_differently_seeded_gates(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    layer = make(experts={"num_experts_per_device": 2})
    for _ in range(2):
        with pytest.raises(RankError, match=r"gates.0.wg.weight should be a copy .* ranks \[0\], another on ranks \[1"):
            layer(random_tokens())
    torch.manual_seed(rank)
    layer = make(experts={"num_experts_per_device": 2})
    hidden = [name for name, _ in layer.named_parameters() if name.startswith("experts")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, hidden)
    nn.parallel.DistributedDataParallel(layer)(random_tokens()).sum().backward()
    copy.deepcopy(layer)(random_tokens())
    make(experts={"num_experts_per_device": 2}, seeds=(1, rank, 1))(random_tokens())


def errors_of_different_layers(rank: int, world: int) -> list[str]:
    found = []
    for options in (
        {"gate_type": {"type": "top", "k": 1 + rank}},
        {"normalize_gate": rank == 0},
        {"experts": {"type": "ffn", "hidden_size_per_expert": 8, "activation_fn": torch.relu if rank else torch.tanh}},
    ):
        given = {
            "gate_type": {"type": "top", "k": 2},
            "experts": {"type": "ffn", "hidden_size_per_expert": 8},
        } | options
        layer = moe.moe_layer(model_dim=4, seeds=(1, rank + 1, 1), **given)
        with pytest.raises(RankError) as error:
            layer(torch.randn(3, 4))
        found.append(str(error.value))
    layer = moe.moe_layer({"type": "top", "k": 2}, 4, {"type": "ffn", "hidden_size_per_expert": 8})
    layer.gates[0].top_k = 1 + rank
    with pytest.raises(RankError) as error:
        layer(torch.randn(3, 4))
    return [*found, str(error.value)]


def test_different_layers_across_ranks_error_names_argument(cluster: Cluster) -> None:
    of_ranks = cluster.run(2, errors_of_different_layers)
    assert of_ranks[0] == of_ranks[1]
    for name, text in zip(("gate_type", "normalize_gate"), of_ranks[0], strict=False):
        assert text.startswith(f"moe_layer: layer argument {name} is "), text
    for name, text in zip(("experts", "gates"), of_ranks[0][2:], strict=True):
        assert text.startswith(f"moe_layer: layer.{name} is "), text


def test_differently_seeded_gates_across_ranks(cluster: Cluster) -> None:
    cluster.run(2, check_differently_seeded_gates)


def error_of_different_output_dim(rank: int, world: int) -> str:
    options = {"output_dim": 10 + 2 * (rank == world - 1), "num_experts_per_device": 2}
    layer = make(experts=options, seeds=(1, rank + 1, 1))
    with pytest.raises(RankError) as caught:
        layer(random_tokens())
    return str(caught.value)


def test_different_output_dim_across_ranks_is_rejected(cluster: Cluster) -> None:
    for text in cluster.run(2, error_of_different_output_dim, timeout_s=60.0):
        assert "moe_layer: output_dim is 10 on ranks [0] and 12 on ranks [1]" in text
