"""The gates' products, in small models summed in an order independent of the CPU; and gates that stay float32."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusedmoe.errors import ConfigError
from fusedmoe.gates.base import router_logits
from fusedmoe.tutel import moe
from fusedmoe.tutel.gates import top
from fusedmoe.tutel.gates.cosine_top import CosineTopKGate
from fusedmoe.tutel.gates.top import LinearTopKGate, gate_product
from tests.cluster import Cluster
from tests.tutel.cases import draw


def logits_in_order(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One float32 operation at a time."""
    logits = np.empty((len(x), len(weight)), np.float32)
    for s, e in np.ndindex(*logits.shape):
        sums = [np.float32(0)] * 4
        for m in range(x.shape[1]):
            sums[m % 4] = np.float32(sums[m % 4] + np.float32(x[s, m] * weight[e, m]))
        logits[s, e] = np.float32(np.float32(sums[0] + sums[2]) + np.float32(sums[1] + sums[3]))
    return logits


@pytest.mark.parametrize("shape", [(24, 4, 16), (7, 3, 10), (1, 5, 64), (3, 1, 2), (0, 4, 16)])
def test_small_gate_product_is_summed_in_order(shape: tuple[int, int, int]) -> None:
    S, E, M = shape
    x_SM = torch.randn(M, S).t().requires_grad_()  # not contiguous
    weight_EM = torch.randn(E, M, requires_grad=True)
    logits_SE = gate_product(x_SM, weight_EM)
    expected = logits_in_order(x_SM.detach().numpy(), weight_EM.detach().numpy())
    np.testing.assert_array_equal(logits_SE.detach().numpy(), expected)

    wide_SM, wide_EM = (t.detach().double().requires_grad_() for t in (x_SM, weight_EM))
    (wide_SM @ wide_EM.t()).square().sum().backward()
    logits_SE.square().sum().backward()
    torch.testing.assert_close(x_SM.grad.double(), wide_SM.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight_EM.grad.double(), wide_EM.grad, rtol=1e-5, atol=1e-4)


def test_large_gate_product_equals_router_logits() -> None:
    for S, E, M, dtype in [(200, 8, 64, torch.float32), (4, 2, 66, torch.float32), (24, 4, 16, torch.float64)]:
        x_SM, weight_EM = torch.randn(S, M, dtype=dtype), torch.randn(E, M, dtype=dtype)
        assert gate_product(x_SM, weight_EM).equal(router_logits(x_SM, weight_EM))
    x_SM, weight_EM = torch.randn(24, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    assert gate_product(x_SM, weight_EM).dtype == torch.bfloat16
    assert gate_product(x_SM.float(), weight_EM.float()).equal(top.summed_in_order(x_SM.float(), weight_EM.float()))


D, E, P = 8, 4, 6
CONVERSIONS: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.half(),
    lambda m: m.double(),
    lambda m: m.type(torch.bfloat16),
    lambda m: copy.deepcopy(m).bfloat16(),
    lambda m: pickle.loads(pickle.dumps(m)).bfloat16(),
]


def layer_of(kind: str = "top", **gate: object) -> moe.MOELayer:
    torch.manual_seed(0)
    described = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 12}
    gate = {"type": kind, "k": 2, "capacity_factor": 0.0, "fp32_gate": True, **gate}
    return moe.moe_layer(gate, D, described)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_fp32_gate_stays_float32_after_conversion(convert: Callable[[nn.Module], nn.Module]) -> None:
    before = layer_of()
    weight = before.gates[0].wg.weight
    rounded = convert(nn.ParameterList([nn.Parameter(weight.detach().clone())]))[0]
    layer = convert(before)
    found = layer.gates[0].wg.weight
    assert found.dtype == torch.float32 and torch.equal(found, rounded.float())  # values move with the model
    assert layer is not before or found is weight  # the optimizer's parameter is unchanged
    x = draw((9, D), 1).to(layer.experts.batched_fc1_w.dtype)
    assert x.dtype == rounded.dtype
    assert torch.equal(layer.gates[0](x), top.summed_in_order(x.float(), found))
    (layer(x).float().square().sum() + layer.l_aux).backward()
    assert found.grad is not None and found.grad.dtype == found.dtype == torch.float32
    assert layer.experts.batched_fc1_w.grad.dtype == x.dtype


def train_steps(layer: moe.MOELayer, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(20):
        optimizer.zero_grad()
        layer(x).float().square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("early", [True, False])
def test_optimizer_updates_fp32_gate_in_float32(early: bool) -> None:
    """The steps would round away in bfloat16; the optimizer is made before or after the conversion."""
    layer, x = layer_of(), draw((64, D), 1).bfloat16()
    made = [torch.optim.SGD(layer.parameters(), lr=1e-6)] if early else []
    layer = layer.bfloat16()
    optimizer = made.pop() if made else torch.optim.SGD(layer.parameters(), lr=1e-6)
    gate, expert = layer.gates[0].wg.weight, layer.experts.batched_fc1_w
    start, expert_start = gate.detach().clone(), expert.detach().clone()
    train_steps(layer, optimizer, x)
    moved = (gate.detach() != start).double().mean()
    assert moved == 1, moved
    assert torch.equal(gate.bfloat16(), start.bfloat16()) and torch.equal(expert, expert_start)


def test_fp32_cosine_gate_keeps_projector_in_float32() -> None:
    """As in Tutel, the projector is float32; the rest has the model's dtype, and is cast for the product."""
    layer = layer_of("cosine_top", proj_dim=P, init_t=0.3).bfloat16()
    gate = layer.gates[0]
    names = {name: p.dtype for name, p in gate.named_parameters()}
    assert names == {
        "temperature": torch.bfloat16,
        "sim_matrix": torch.bfloat16,
        "cosine_projector.weight": torch.float32,
        "cosine_projector.bias": torch.float32,
    }
    x = draw((9, D), 1).bfloat16()
    token = F.normalize(F.linear(x.float(), gate.cosine_projector.weight, gate.cosine_projector.bias), dim=1)
    cosine = token @ F.normalize(gate.sim_matrix.float(), dim=0)
    scale = gate.temperature.clamp(max=math.log(100)).exp()
    assert scale.dtype == torch.bfloat16 and torch.equal(gate(x), cosine * scale) and gate(x).dtype == torch.float32
    layer(x).float().square().sum().backward()
    assert all(p.grad.dtype == p.dtype for p in gate.parameters())


def test_fp32_gate_ignores_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        linear, cosine = LinearTopKGate(D, E, fp32_gate=True), CosineTopKGate(D, E, fp32_gate=True, proj_dim=P)
        torch.manual_seed(0)
        nn.Linear(D, E, bias=False, dtype=torch.float32)
        projector = nn.Linear(D, P)
    finally:
        torch.set_default_dtype(torch.float32)
    assert linear.wg.weight.dtype == cosine.cosine_projector.weight.dtype == torch.float32
    assert torch.equal(cosine.cosine_projector.weight, projector.weight.float())  # drawn as without the option
    linear.load_state_dict({"wg.weight": torch.ones(E, D, dtype=torch.bfloat16)}, assign=True)
    assert linear.wg.weight.dtype == torch.float32 and bool((linear.wg.weight == 1).all())
    plain = LinearTopKGate(D, E).bfloat16()
    assert plain.wg.weight.dtype == plain(torch.ones(3, D)).dtype == torch.bfloat16


@pytest.mark.parametrize("fp32", [False, True])
def test_hooks_and_replacement_of_gate_linear_take_effect(fp32: bool) -> None:
    """Clients register hooks on it, and replace it."""
    x = draw((9, D), 1).float()
    for kind, name in (("top", "wg"), ("cosine_top", "cosine_projector")):
        gate = layer_of(kind, fp32_gate=fp32).gates[0]
        seen: list[Tensor] = []
        getattr(gate, name).register_forward_hook(lambda _, __, y, seen=seen: seen.append(y))
        logits = gate(x)
        assert len(seen) == 1 and (kind != "top" or torch.equal(seen[0], logits))
    gate = layer_of(fp32_gate=fp32).gates[0]
    gate.wg = nn.Linear(D, E)
    torch.testing.assert_close(gate(x), x @ gate.wg.weight.t() + gate.wg.bias)


@pytest.mark.parametrize("kind", ["top", "cosine_top"])
@pytest.mark.parametrize("k", [-2, 0])
def test_gate_rejects_nonpositive_k(kind: str, k: int) -> None:
    with pytest.raises(ConfigError, match=f"k = {k} experts; choose a number from 1 on"):
        layer_of(kind, k=k)
    layer = layer_of(kind)
    layer.gates[0].top_k = k
    with pytest.raises(ConfigError, match=f"k = {k} experts; choose a number from 1 on"):
        layer(draw((9, D), 1).float())


def check_under_ddp_and_fsdp(rank: int, world: int) -> None:
    """A converted model with a float32 gate under DDP and FSDP, which rely on the parameters' dtypes."""
    x = draw((9, D), rank).bfloat16()
    cases = itertools.product(("ddp", "fsdp"), (("top", "wg"), ("cosine_top", "cosine_projector")))
    for wrap, (kind, name) in cases:
        layer = layer_of(kind).bfloat16()
        linear = getattr(layer.gates[0], name)
        own = {name: p for name, p in layer.named_parameters() if hasattr(p, "_tutel_expert")}
        model: nn.Module = layer
        if wrap == "ddp":
            layer._ddp_params_and_buffers_to_ignore = list(own)  # type: ignore[assignment]
            model = nn.parallel.DistributedDataParallel(layer)
        else:
            mesh = init_device_mesh("cpu", (world,))
            fully_shard(linear, mesh=mesh)
            fully_shard(layer, mesh=mesh, ignored_params=set(own.values()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        values = []
        for _ in range(2):
            y = model(x)
            values.append(y.detach())
            optimizer.zero_grad()
            (y.float().square().sum() + layer.l_aux).backward()
            optimizer.step()
        weight = linear.weight
        assert weight.dtype == weight.grad.dtype == torch.float32, wrap
        assert not torch.equal(*values), wrap


@pytest.mark.slow  # wrappers
def test_fp32_gates_under_ddp_and_fsdp(cluster: Cluster) -> None:
    cluster.run(2, check_under_ddp_and_fsdp)
