"""MoELayer behaves as an ordinary nn.Module."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Custom, Experts, FeedForward, SwiGLU
from fusedmoe.gates import TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from tests.cluster import Cluster
from tests.oracle import Results, ShardedExpert, assert_same_results, run_passes

M, H, E = 8, 12, 4


def build(seed: int = 0, experts: Experts | None = None, device: str | None = None) -> MoELayer:
    torch.manual_seed(seed)
    gate = fusedmoe.gates.DeepSeekV3(experts=E, k=2, aux={"balance": 1.0})
    layer = MoELayer(M, gate, experts or SwiGLU(H), shared=FeedForward(6), device=device, dtype=torch.float64)
    with torch.no_grad():
        gate.weight_EM.normal_()
        gate.bias_E.normal_(std=0.1)
    return layer


def assert_same(ours: Results, theirs: Results) -> None:
    assert_same_results(ours, theirs, 1e-12)


@pytest.mark.parametrize("make", [lambda: SwiGLU(H), lambda: FeedForward(H), lambda: Custom(ShardedExpert)])
def test_state_dict_round_trip(make: object) -> None:
    first, second = build(1, make()), build(2, make())  # type: ignore[operator]
    x = torch.randn(7, M, dtype=torch.float64)
    expected = run_passes(first, x)
    assert not torch.equal(run_passes(second, x)["y"], expected["y"])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same(run_passes(second, x), expected)


def test_state_loads_into_layer_from_meta_device() -> None:
    layer = build(1)
    x = torch.randn(5, M, dtype=torch.float64)
    blank = build(device="meta")
    assert all(p.is_meta for p in blank.parameters())
    blank.to_empty(device="cpu")
    blank.load_state_dict(layer.state_dict())
    assert_same(run_passes(blank, x), run_passes(layer, x))
    blank.update_gate()


def test_deepcopy_after_step_is_independent() -> None:
    layer = build()
    x = torch.randn(5, M, dtype=torch.float64)
    y = layer(x)
    twin = copy.deepcopy(layer)  # aux_loss is part of a graph by now
    assert not twin.aux_loss.requires_grad and layer.aux_loss.requires_grad
    (y.sum() + layer.aux_loss).backward()
    assert_same(run_passes(twin, x), run_passes(layer, x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert layer(x).abs().sum() > 0 and twin(x).abs().sum() == 0


def test_pickle_round_trip() -> None:
    layer = build()
    x = torch.randn(5, M, dtype=torch.float64)
    expected = run_passes(layer, x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert_same(run_passes(torch.load(file, weights_only=False), x), expected)


def test_to_dtype_casts_parameters_but_not_gate_bias() -> None:
    layer = build().to(torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.gate.bias_E.dtype == torch.float32
    y = layer(torch.randn(5, M, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    wide = layer.double()
    assert wide(torch.randn(5, M, dtype=torch.float64)).dtype == torch.float64


def test_eval_counts_no_load() -> None:
    layer = build()
    before = layer.gate.bias_E.clone()
    layer.eval()(torch.randn(9, M, dtype=torch.float64))
    layer.update_gate()
    assert torch.equal(layer.gate.bias_E, before)
    layer.train()(torch.randn(9, M, dtype=torch.float64))
    assert layer.load_E.sum() == 18
    layer.update_gate()
    assert torch.equal((layer.gate.bias_E - before).sign(), (layer.load_E.double().mean() - layer.load_E).sign())


@pytest.mark.slow
def test_missing_gate_updates_warn_once() -> None:
    """Warn once, after more training forwards than one step accumulates; not for other gates, nor in evaluation."""
    layer, other = build(), MoELayer(M, fusedmoe.gates.TopK(experts=E, k=2), SwiGLU(H))
    x = torch.randn(3, M, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            other(x.float())
            layer.eval()(x)
        for step in range(120):
            layer.train()(x)
            if step % 50 == 49:
                layer.update_gate()
    with pytest.warns(
        UserWarning, match="DeepSeekV3 gate .*update_gate.* not called in 100 .* optimizer step"
    ) as caught:
        for _ in range(250):
            layer(x)
    assert len(caught) == 1


def test_evaluation_has_no_noise() -> None:
    layer = MoELayer(M, fusedmoe.gates.GShard(experts=E, k=2), SwiGLU(H)).eval()
    x = torch.randn(50, M)
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("shape", [(M,), (1, M), (3, M), (2, 3, M), (2, 1, 2, M), (0, M), (2, 0, M)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    layer = build()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    assert torch.equal(y.reshape(-1, M), layer(x.reshape(-1, M)))
    (y.sum() + layer.aux_loss).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_strided_inputs_equal_contiguous_inputs() -> None:
    layer = build()
    x = torch.randn(6, 10, M, dtype=torch.float64)
    variants = [x.transpose(0, 1), x[:, ::3], x.flip(-1), x[:1, :1].expand(4, 5, M), torch.randn(M, 7).double().t()]
    for variant in variants:
        assert_same(run_passes(layer, variant), run_passes(layer, variant.contiguous()))
    y = layer(x[:, 0])
    dy = torch.randn(M, 6, dtype=torch.float64).t()
    of_w1 = [torch.autograd.grad(y, layer.experts.w1, g, retain_graph=True)[0] for g in (dy, dy.contiguous())]
    assert torch.equal(*of_w1)
    torch.autograd.grad(layer(x).sum(), layer.experts.w1)  # the gradient of a sum is an expanded scalar


def test_parameter_gradients_without_input_gradient() -> None:
    layer = build()
    layer(torch.randn(5, M, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in layer.experts.parameters())


def test_frozen_experts_receive_no_gradient() -> None:
    layer = build()
    layer.experts.requires_grad_(False)
    x = torch.randn(5, M, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.experts.w1.grad is None and layer.gate.weight_EM.grad is not None


def test_gradients_accumulate() -> None:
    layer = build()
    x = torch.randn(6, M, dtype=torch.float64)
    once = run_passes(layer, x, dy=lambda y: 2 * y, aux=1.0)
    layer.zero_grad()
    for _ in range(2):
        (layer(x).square().sum() + layer.aux_loss).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[f"gradient of {name}"])


def test_training_reduces_loss() -> None:
    torch.manual_seed(0)
    layer = MoELayer(M, fusedmoe.gates.TopK(experts=E, k=2), SwiGLU(H))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x, target = torch.randn(64, M), torch.randn(64, M)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(layer(x), target) + 0.01 * layer.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


LAYERS: dict[str, Callable[[Topology], nn.Module]] = {
    "feed-forward": lambda t: MoELayer(8, TopK(4, 2), FeedForward(6), topology=t, shared=FeedForward(4)),
    "custom": lambda t: MoELayer(8, TopK(4, 2), Custom(lambda d, shard=0, shards=1: nn.Linear(d, d)), topology=t),
    "placed": lambda t: MoELayer(8, TopK(4, 2), FeedForward(6), topology=t, placement="fssdp"),
    "model": lambda t: Transformer(ModelConfig(2, model_dim=8, heads=2, seq_len=4, hidden=4, experts=4), t),
}


def check_states_of_ranks(rank: int, world: int) -> None:
    """A rank's state loads only on that rank, whole or experts only, through every file format."""
    for axis, name in itertools.product(("ep", "esp"), LAYERS):
        if (axis, name) == ("esp", "placed"):
            continue
        topology, make = Topology.from_sizes(**{axis: 2}, timeout_s=30.0), LAYERS[name]
        layer = make(topology)
        paths = [path for path, module in layer.named_modules() if isinstance(module, Experts) and module.own_numbers]
        own, alone = layer.state_dict(), layer.get_submodule(paths[0]).state_dict()
        theirs, theirs_alone = all_gather_object(topology.world, (own, alone), "states")[1 - rank]
        whole = make(Topology())
        layer.load_state_dict(own)
        layer.load_state_dict({key: value.clone() for key, value in own.items()})
        # States of versions that did not save expert numbers.
        layer.load_state_dict({key: value for key, value in own.items() if "numbers" not in key})
        before = copy.deepcopy(own)
        for target, state in (
            (layer, theirs),
            (layer, dict(theirs)),
            (layer.get_submodule(paths[0]), theirs_alone),
            (whole, own),
            (whole, theirs),
        ):
            for more in ({}, {"strict": False}, {"assign": True}):
                with pytest.raises(ConfigError, match=r"this state has .*experts .* but this rank now has"):
                    target.load_state_dict(state, **more)
        for key, value in layer.state_dict().items():
            assert torch.equal(value, before[key]), key
        # PyTorch reports mismatched shapes or names.
        with pytest.raises((ConfigError, RuntimeError), match="this state has experts|size mismatch|Unexpected"):
            layer.load_state_dict(whole.state_dict())


def test_state_of_other_rank_is_rejected(cluster: Cluster) -> None:
    cluster.run(2, check_states_of_ranks)


def check_dcp_rejected(rank: int, world: int, folder: str) -> None:
    """PyTorch's distributed checkpoint rejects a rank's state: it would keep one of two equally named tensors."""
    for axis in ("ep", "esp"):
        topology = Topology.from_sizes(**{axis: 2}, timeout_s=30.0)
        state = LAYERS["feed-forward"](topology).state_dict()
        with pytest.raises(dcp.CheckpointException, match="experts.numbers: .*fusedmoe.training.save_checkpoint"):
            dcp.save(state, checkpoint_id=folder)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        assert {type(value) for value in torch.load(buffer, weights_only=True).values()} == {Tensor}
    whole = LAYERS["feed-forward"](Topology())
    before = copy.deepcopy(whole.state_dict())
    dcp.save(whole.state_dict(), checkpoint_id=f"{folder}{rank}", no_dist=True)
    dcp.load(whole.state_dict(), checkpoint_id=f"{folder}{rank}", no_dist=True)
    assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())


def test_torch_distributed_checkpoint_is_rejected(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, check_dcp_rejected, str(tmp_path / "state"))
