"""Ranks that share an expert, in overlapping chunks: one order of collectives, results of the undivided layer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.runtime.execute import Streams
from fusedmoe.tutel import moe
from tests.cluster import Cluster
from tests.marks import slowly
from tests.runtime.issue_order import Issue, check, fake_streams, random_delays, recorded
from tests.tutel.cases import draw

D, H = 8, 16


def act(x: Tensor) -> Tensor:
    return F.softplus(x)


def whole(kind: str, experts: int) -> dict[str, Tensor]:
    if kind == "ffn":
        shapes: dict[str, tuple[int, ...]] = {"fc1_w": (H, D), "fc2_w": (H, D), "fc1_bias": (H,), "fc2_bias": (D,)}
    else:
        shapes = {"W_fc1": (D, H), "W_fc2": (D, H), "W_fc3": (H, D)}
    return {
        name: draw((experts, *shape), 50 + number, 0.3).requires_grad_()
        for number, (name, shape) in enumerate(shapes.items())
    }


def expert(kind: str, weights: dict[str, Tensor], e: int, x: Tensor) -> Tensor:
    w = {name: value[e] for name, value in weights.items()}
    if kind == "ffn":
        return act(x @ w["fc1_w"].t() + w["fc1_bias"]) @ w["fc2_w"] + w["fc2_bias"]
    return (act(x @ w["W_fc1"]) * (x @ w["W_fc2"])) @ w["W_fc3"]


def own_part(tensor: Tensor, rank: int, s: int) -> Tensor:
    """A rank's part of a parameter [E, …] or of its gradient, with the experts' dimension 0 kept."""
    return tensor[rank // s].chunk(s)[rank % s][None]


def tokens_of(rank: int) -> Tensor:
    return draw((7 + 5 * (rank % 2), D), 20 + rank)


def reference(
    kind: str, experts: int, gate: Tensor, world: int
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """The undivided layer: outputs and gradients of each rank's tokens, and gradients of the whole weights."""
    weights, k = whole(kind, experts), min(2, experts)
    inputs = [tokens_of(rank).requires_grad_() for rank in range(world)]
    outputs = []
    for rank, x in enumerate(inputs):
        top = (x @ gate.t()).softmax(1).topk(k)
        share = top.values / top.values.sum(1, keepdim=True) if k > 1 else top.values
        every = torch.stack([expert(kind, weights, e, x) for e in range(experts)], 1)
        chosen = every.gather(1, top.indices[..., None].expand(-1, -1, D))
        y = (share[..., None] * chosen).sum(1)
        (y * draw(tuple(y.shape), 90 + rank)).sum().backward()
        outputs.append(y.detach())
    grads = {name: value.grad for name, value in weights.items()}
    return outputs, [x.grad for x in inputs], grads  # type: ignore[return-value, misc]


def run_on_rank(
    rank: int, world: int, kind: str, share: int, parallel: str, degrees: list[int], streams: bool
) -> list[list[Issue]]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        options: dict[str, Any] = {"num_experts_per_device": -share, "hidden_size_per_expert": H, "activation_fn": act}
        E = world // share
        gate = {"type": "top", "k": min(2, E), "capacity_factor": 0.0}
        layer = moe.moe_layer(gate, D, {"type": kind, **options}, seeds=(1, rank + 1, 1), parallel_type=parallel)
    finally:
        torch.set_default_dtype(before)
    weights = whole(kind, E)
    parameters = dict(layer.experts.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            parameter = parameters[name if kind == "llama_ffn" else f"batched_{name}"]
            if kind == "llama_ffn":
                parameter.copy_(own_part(value.flatten(1), rank, share)[0])
            else:
                parameter.copy_(own_part(value, rank, share))
    router = layer.gates[0].wg.weight
    outputs, dx, dw = reference(kind, E, router.detach(), world)
    found = []
    if streams:
        layer._dispatcher()._collectives.runner.streams = Streams()
    for degree in degrees:
        layer.zero_grad()
        x = tokens_of(rank).requires_grad_()
        modes = [recorded(), random_delays(100 * degree + rank), fake_streams() if streams else nullcontext()]
        with modes[0] as issues, modes[1], modes[2]:
            y = layer(x, a2a_ffn_overlap_degree=degree)
            (y * draw(tuple(y.shape), 90 + rank)).sum().backward()
        found.append(issues)
        torch.testing.assert_close(y, outputs[rank], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(x.grad, dx[rank], rtol=1e-10, atol=1e-10)
        for name, grad in dw.items():
            own = parameters[name if kind == "llama_ffn" else f"batched_{name}"].grad
            assert own is not None
            part = own_part(grad.flatten(1) if kind == "llama_ffn" else grad, rank, share)
            torch.testing.assert_close(own, part.view_as(own), rtol=1e-10, atol=1e-10)
    return found


def compare_on_ranks(cluster: Cluster, world: int, *given: Any) -> None:
    found_W = cluster.run(world, run_on_rank, *given, timeout_s=60.0)
    for issues_W in zip(*found_W, strict=True):
        check(issues_W, one_thread=given[-1])


@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
@pytest.mark.parametrize("parallel", ["data", *slowly("model", "adaptive:0")])
def test_two_ranks_sharing_expert_equal_undivided_layer(cluster: Cluster, kind: str, parallel: str) -> None:
    compare_on_ranks(cluster, 2, kind, 2, parallel, [2, 3], False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("share", "parallel"), [(2, "data"), (2, "model"), (4, "data"), (4, "adaptive:2")])
def test_four_ranks_sharing_experts_equal_undivided_layer(
    cluster: Cluster, kind: str, share: int, parallel: str, streams: bool
) -> None:
    compare_on_ranks(cluster, 4, kind, share, parallel, [1, 2, 3, 4], streams)
