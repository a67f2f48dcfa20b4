"""`torch.compile(fullgraph=True)` of models with the layer: one graph, and the results of the layer as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.layers.expert_networks import Experts
from fusedmoe.layers.gates import GATES
from tests.layers.gate_cases import make

M = 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # torch's own, of versions that deprecate what their compiler still calls
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def a_model(layer: fusedmoe.MoELayer) -> nn.Module:
    return nn.Sequential(nn.Linear(M, M), layer, nn.Tanh(), nn.Linear(M, M))


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, seed: int) -> dict[str, Tensor]:
    """Output, gradients and what the layer tells of itself."""
    layer = model[1]  # type: ignore[index]
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = call(x)
    model.zero_grad(set_to_none=True)
    (y.float().square().sum() + layer.aux_loss).backward()
    found = {"y": y.detach(), "dx": x.grad, "aux": layer.aux_loss.detach(), "load": layer.load_E}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: tensor.clone() for name, tensor in found.items()} | {"dropped": torch.tensor(layer.dropped)}


def compare(layer: fusedmoe.MoELayer, backend: str, sizes: tuple[int, ...] = (41, 57), exact: bool = True) -> None:
    model = a_model(layer)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in sizes:
        x = torch.randn(size, M)
        ours, theirs = step(compiled, model, x, size), step(model, model, x, size)
        assert ours.keys() == theirs.keys()
        for name, right in theirs.items():
            if exact:
                assert torch.equal(ours[name], right), name
            else:
                torch.testing.assert_close(ours[name], right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, capacity_factor: float | None) -> None:
    if name in ("softmoe", "expert_choice") and capacity_factor is None:
        pytest.skip("knows no dropless form")
    options = {} if name == "softmoe" else {"capacity_factor": capacity_factor}
    layer = fusedmoe.MoELayer(M, make(name, 6, 2, **options), fusedmoe.experts.SwiGLU(24)).eval()
    compare(layer, "aot_eager")


@pytest.mark.parametrize(
    "experts",
    [
        fusedmoe.experts.FeedForward(24),
        pytest.param(fusedmoe.experts.FeedForward(24, "relu", bias=False), marks=pytest.mark.slow),
    ],
    ids=["bias", "no bias"],
)
def test_experts(experts: Experts) -> None:
    shared = fusedmoe.experts.SwiGLU(16)
    compare(fusedmoe.MoELayer(M, make("topk", 6, 2), experts, shared=shared), "aot_eager", (41,))


def test_tokens_of_several_sizes_and_none() -> None:
    compare(fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24)), "aot_eager", (41, 57, 1, 0))


def test_the_load_between_updates_counts_every_step() -> None:
    layer = fusedmoe.MoELayer(M, make("deepseek_v3", 6, 2), fusedmoe.experts.SwiGLU(24))
    twin = fusedmoe.MoELayer(M, make("deepseek_v3", 6, 2), fusedmoe.experts.SwiGLU(24))
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for size in (30, 40, 50):
        x = torch.randn(size, M)
        compiled(x), twin(x)
    layer.update_gate(), twin.update_gate()
    assert layer.gate.bias_E.any() and torch.equal(layer.gate.bias_E, twin.gate.bias_E)


def test_under_autocast() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(41, M)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(x), layer(x)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_bad_logits_end_it() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(41, M)
    compiled(x)
    x[7, 3] = float("nan")
    with pytest.raises(RuntimeError, match="router logits are NaN"):
        compiled(x)


def test_checkpointed_in_a_compiled_model() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24))
    model = a_model(layer)

    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    x = torch.randn(41, M)
    ours, theirs = (step(call, model, x, 0) for call in (torch.compile(checkpointed, backend="aot_eager"), model))
    assert all(torch.equal(ours[name], right) for name, right in theirs.items())


def test_layers_that_exchange_are_called_as_they_are() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2), fusedmoe.experts.SwiGLU(24), hooks=[fusedmoe.Hooks()])
    model = a_model(layer)
    x = torch.randn(41, M)
    ours, theirs = (step(call, model, x, 0) for call in (torch.compile(model, backend="aot_eager"), model))
    assert all(torch.equal(ours[name], right) for name, right in theirs.items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_by_the_default_compiler() -> None:
    layer = fusedmoe.MoELayer(M, make("topk", 6, 2, capacity_factor=0.7), fusedmoe.experts.SwiGLU(24))
    compare(layer, "inductor", exact=False)
