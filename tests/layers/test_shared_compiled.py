"""The shared expert as a task of the plan in compiled layers: results and gradients equal those without a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.layers.schedule import with_wire
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.integrations.plans_run import tasks_run
from tests.layers.test_compiled_schedules import AUTO
from tests.layers.test_shared_expert import FP8, FSMOE, TOKENS, M, make
from tests.marks import slowly

KINDS = ("swiglu", "feed-forward", "frozen", "one frozen")


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(layer: Any, call: Any, x: Tensor, grad: bool) -> dict[str, Tensor | None]:
    layer.zero_grad()
    x = x.clone().requires_grad_(grad)
    y = call(x)
    (y.square().sum() + layer.aux_loss).backward()
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in layer.named_parameters()}}


def with_mask(call: Any, x: Tensor) -> Tensor:
    y: Tensor = call(x, torch.arange(len(x)) % 3 != 1)
    return y


def compare(rank: int, world: int, kinds: Sequence[str], schedule: Any, esp: int, how: str = "") -> None:
    topology = fusedmoe.Topology.from_sizes(ep=world // esp, esp=esp, timeout_s=60)
    for kind in kinds:
        torch._dynamo.reset()
        plain, planned = (
            make(topology, of, kind, [], dtype=torch.float64) for of in (with_wire("off", schedule.wire), schedule)
        )
        plain_call: Any = plain
        compiled: Any = torch.compile(planned, backend="aot_eager", fullgraph=True)
        if how in ("checkpoint", "saved"):
            more = {"context_fn": save_communication} if how == "saved" else {}
            call = partial(checkpoint, compiled, use_reentrant=False, **more)
        elif how == "mask":
            call, plain_call = (partial(with_mask, each) for each in (compiled, plain))
        else:
            call = compiled
        for seed in range(2):
            x = torch.randn(TOKENS[rank] + seed, M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            wanted = step(plain, plain_call, x, how != "tokens need no gradient")
            with tasks_run() as ran:
                found = step(planned, call, x, how != "tokens need no gradient")
            assert {*ran} == {"forward", "backward"}, (kind, ran)
            for name, value in wanted.items():
                # A graph returns zeros where autograd returns no gradient.
                value = torch.zeros_like(found[name]) if value is None and found[name] is not None else value
                assert (found[name] is None) == (value is None), (kind, name)
                if value is not None:
                    torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{kind} {name}")


@pytest.mark.parametrize(
    ("world", "esp", "schedule", "kinds"),
    [
        pytest.param(2, 1, FSMOE, ["swiglu"], id="ep"),
        pytest.param(2, 1, FP8, ["swiglu"], id="fp8"),
        *slowly((2, 1, FSMOE, KINDS), (2, 1, AUTO, ["feed-forward"]), (4, 2, FSMOE, ["swiglu"])),
    ],
)
@pytest.mark.timeout(600)
def test_compiled_layer_computes_the_shared_expert_within_its_plan(
    cluster: Cluster, world: int, esp: int, schedule: Any, kinds: Sequence[str]
) -> None:
    cluster.run(world, compare, kinds, schedule, esp, timeout_s=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["checkpoint", "saved", "tokens need no gradient", "mask"])
def test_compiled_shared_expert_with_other_features(cluster: Cluster, how: str) -> None:
    cluster.run(2, compare, ["swiglu", "frozen"], FSMOE, 1, how, timeout_s=500)
