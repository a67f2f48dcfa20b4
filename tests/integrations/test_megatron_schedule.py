"""Schedules of the Megatron integration: results and gradients equal the definition's, and those without a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron.core is not installed")

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe.megatron
from fusedmoe import Schedule
from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_in
from tests.cluster import Cluster
from tests.integrations.plans_run import plans_run, tasks_run
from tests.integrations.test_megatron import (
    DIM,
    EXPERTS,
    OURS,
    bad_numbers,
    choice,
    config,
    definition,
    layer_of,
    megatron,
)
from tests.marks import slowly

# Our experts support other chunk counts in backward; Megatron's own, by autograd, need the same in both passes.
SCHEDULES = dict(zip(OURS, (Schedule("fsmoe", (2, 2)), Schedule("fsmoe", (2, 3))), strict=True))


class Stack(nn.Module):
    """Two layers of experts, each after a separate checkpoint, or without checkpoints."""

    def __init__(self, cfg: Any, ours: Any, schedule: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(cfg, partial(ours, schedule=schedule)) for _ in range(2))
        self.around: Callable[..., Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.around(lambda x, layer=layer: layer(x)[0], x)
        return x


def found(
    model: Stack, batches: list[Tensor], *, autocast: bool = False, around: Any = None, train: bool = True
) -> dict[str, Tensor]:
    """Return results and accumulated gradients of several batches."""
    model.around = around or (lambda layer, x: layer(x))
    model.train(train)
    values: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        x = batch.clone().requires_grad_(train)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), torch.set_grad_enabled(train):
            y = model(x)
        values[f"y{number}"] = y.detach()
        if train:
            y.square().sum().backward()
            assert x.grad is not None
            values[f"dx{number}"] = x.grad
    values |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return values


CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "evaluation": {"train": False},
    "checkpoints": {"around": partial(checkpoint, use_reentrant=False)},
    "reentrant checkpoints": {"around": partial(checkpoint, use_reentrant=True)},
    "autocast": {"autocast": True},
}


def compare(rank: int, ours: Any, cfg: Any) -> None:
    schedule, batches = SCHEDULES[ours], []
    for seed, count in ((rank, 9 - rank), (10 + rank, 4)):
        chance = torch.Generator().manual_seed(seed)
        batches.append(torch.randn(4 * count, 1, DIM, generator=chance, dtype=torch.float64))
    plain, model = (Stack(cfg, ours, of) for of in ("off", schedule))
    assert len(exchanges_in(model)) == 2
    for name, case in CASES.items():
        with plans_run() as ran:
            wanted = found(plain, batches, **case)
        assert not ran
        with plans_run() as ran:
            values = found(model, batches, **case)
        # Chunks with separate graphs, inside checkpoints that pack saved tensors, run one after the other.
        by_plan = name != "checkpoints" or ours is not OURS[0]
        assert set(ran) == ({schedule.degrees} if by_plan else set()), name
        assert values.keys() == wanted.keys()
        for key, value in wanted.items():
            if name == "autocast":
                assert float((values[key] - value).norm()) < 1e-2 * max(float(value.norm()), 1e-3), (name, key)
            else:
                torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)


def run_on_ranks(rank: int, counts: list[int], **sizes: int) -> None:
    tp = sizes.get("tensor_model_parallel_size", 1)
    cfg = config(sequence_parallel=tp > 1, **sizes)
    dropping = config(sequence_parallel=tp > 1, moe_expert_capacity_factor=0.6, **sizes)
    with megatron(**sizes):
        for ours in OURS:
            scheduled = partial(ours, schedule=SCHEDULES[ours])
            with plans_run() as ran:
                definition(rank, scheduled, counts, cfg)
                definition(rank, scheduled, counts, cfg, wanted=(2, 3))
                definition(rank, scheduled, counts, dropping)
            assert set(ran) == {SCHEDULES[ours].degrees} and len(ran) == 3
            bad_numbers(rank, layer_of(cfg, scheduled))
            compare(rank, ours, cfg)
        layer = layer_of(cfg, partial(OURS[1], schedule="auto"))
        group = layer.fusedmoe_exchange.topology.ep
        assert group.size == 1 or group.downward is not None


def compare_shared(rank: int, world: int, gate: bool, overlap: bool) -> None:
    """A schedule computes Megatron's shared expert within its plan, with or without its sigmoid gate."""
    sizes = {"expert_model_parallel_size": world, "moe_token_dispatcher_type": "alltoall"}
    shared = {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_overlap": overlap}
    cfg = config(**sizes, **shared, moe_shared_expert_gate=gate)
    batches = [
        torch.randn(9 - rank, 2, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in (rank, 10 + rank)
    ]
    with megatron(expert_model_parallel_size=world), pytest.MonkeyPatch.context() as patch:
        # Megatron's own dispatcher, which is replaced, creates a stream.
        patch.setattr("torch.cuda.Stream", lambda *_: None)
        for ours in OURS:
            plain, model = (Stack(cfg, ours, of) for of in ("off", SCHEDULES[ours]))
            model.load_state_dict(plain.state_dict())
            assert "shared_experts" in str([*plain.state_dict()])
            for name, case in CASES.items():
                with tasks_run() as ran:
                    wanted = found(plain, batches, **case)
                assert not ran
                with tasks_run() as ran:
                    values = found(model, batches, **case)
                passes = {"forward"} if name == "evaluation" else {"forward", "backward"}
                # Checkpoints recompute the graph of a module, which the plan then does not keep.
                assert {*ran} == (set() if name == "checkpoints" else passes), name
                assert values.keys() == wanted.keys()
                for key, value in wanted.items():
                    near = 1e-2 * max(float(value.norm()), 1e-3) if name == "autocast" else 1e-10
                    assert float((values[key] - value).norm()) < near, (name, key)


@pytest.mark.parametrize(("gate", "overlap"), [(True, True), *slowly((False, False))])
def test_shared_expert_is_a_task_of_the_plan(cluster: Cluster, gate: bool, overlap: bool) -> None:
    cluster.run(2, compare_shared, gate, overlap)


def count_warnings_with_one_queue(rank: int, world: int) -> None:
    cfg = config(expert_model_parallel_size=2)
    built = [("1", "off"), ("8", "fsmoe"), ("1", "fsmoe"), ("1", "fsmoe")]
    counts = []
    with megatron(expert_model_parallel_size=2), pytest.MonkeyPatch.context() as patch:
        fusedmoe.megatron._warn_once.cache_clear()
        for value, policy in built:
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                layer_of(cfg, partial(OURS[1], schedule=Schedule(policy, (2, 2)) if policy != "off" else policy))
            counts.append(sum("CUDA_DEVICE_MAX_CONNECTIONS=1" in str(warning.message) for warning in caught))
    assert counts == [0, 0, 1, 0]


def run_expert_parallel(rank: int, world: int) -> None:
    run_on_ranks(rank, [5, 9], expert_model_parallel_size=2)


def run_hooked(rank: int, world: int) -> None:
    """Module hooks in the experts act as with Megatron's experts, for every dispatcher and every schedule.

    Each hook is called.
    """
    cfg = config(expert_model_parallel_size=world)
    batch = torch.randn(20 - 4 * rank, 1, DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    with megatron(expert_model_parallel_size=world), plans_run() as ran:
        stacks = [Stack(cfg, ours, schedule) for ours in OURS for schedule in ("off", SCHEDULES[ours])]
        for stack in stacks:
            stack.load_state_dict(stacks[0].state_dict())
            for layer in stack.layers:
                up = layer.experts.local_experts[0].linear_fc1
                up.register_forward_hook(lambda _, __, given: (given[0] * 2, *given[1:]))
        values = [found(stack, [batch]) for stack in stacks]
    assert not ran
    for each in values[1:]:
        torch.testing.assert_close(each, values[0], rtol=1e-10, atol=1e-10)


def test_schedule_with_one_hardware_queue_warns_once(cluster: Cluster) -> None:
    cluster.run(2, count_warnings_with_one_queue)


def test_module_hooks_act_as_in_megatron(cluster: Cluster) -> None:
    cluster.run(2, run_hooked)


@pytest.mark.slow
def test_scheduled_expert_parallel_equals_unscheduled(cluster: Cluster) -> None:
    cluster.run(2, run_expert_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_scheduled_expert_tensor_parallel_equals_unscheduled(cluster: Cluster, world: int) -> None:
    cluster.run(world, split_experts)


def split_experts(rank: int, world: int) -> None:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    run_on_ranks(rank, [5, 9, 3, 1][:world], expert_model_parallel_size=world // 2, **sizes)


def run_one_rank(rank: int, world: int) -> None:
    """One rank sends nothing, so a schedule has no effect."""
    with megatron():
        for ours in OURS:
            with plans_run() as ran:
                definition(rank, partial(ours, schedule="auto"), [9], config())
            assert not ran


def test_schedule_on_one_rank_has_no_effect(world: None) -> None:
    run_one_rank(0, 1)


def test_unknown_schedule_raises() -> None:
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS)
    for ours in OURS:
        with pytest.raises(ConfigError, match="unknown schedule 'fast'; choose off, auto"):
            ours(spec, schedule="fast")
        assert choice(ours(spec, schedule="auto").submodules.mlp)[1]["schedule"] == "auto"
