"""Shared experts of Hugging Face's blocks as tasks of plans: results and gradients equal those without a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import fusedmoe.hf
from fusedmoe import Schedule
from fusedmoe.layers.scheduled_exchange import exchanges_in
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make
from tests.integrations.plans_run import tasks_run
from tests.integrations.test_hf_schedule import CASES, load
from tests.marks import slowly

# Adapters on the routed experts need equal degrees.
SCHEDULE = Schedule("fsmoe", degrees=(2, 2))


def shared_of(model: nn.Module) -> list[nn.Module]:
    return [one for name, one in model.named_modules() if name.endswith((".shared_experts", ".shared_expert"))]


def compare(
    rank: int,
    world: int,
    folder: str,
    cases: Sequence[str],
    change: Callable[[Any], Any] | None,
    in_plan: bool,
    tp_size: int = 1,
) -> None:
    model = load(rank, world, folder, {"fsdp_size": 2 // tp_size, "ep_size": 2, "tp_size": tp_size}).train()
    model = model if change is None else change(model) or model
    tokens = [torch.randint(0, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n + rank // tp_size))
              for n in (9 + 4 * (rank // tp_size), 6)]  # fmt: skip
    names = list(model.state_dict())
    for name in cases:
        values = []
        for schedule in ("off", SCHEDULE):
            fusedmoe.hf.apply(model, schedule=schedule)
            with tasks_run() as ran:
                values.append(CASES[name](model, tokens))
            planned = schedule is SCHEDULE and in_plan
            wanted = {"forward"} if name == "evaluation" else {"forward", "backward"}
            assert {*ran} == (wanted if planned else set()), (name, schedule)
        assert values[0].keys() == values[1].keys()
        for key, value in values[0].items():
            if name == "autocast":
                assert float((values[1][key] - value).norm()) < 1e-2 * max(float(value.norm()), 1e-3), (name, key)
            else:
                torch.testing.assert_close(values[1][key], value, rtol=1e-10, atol=1e-10, msg=f"{name} {key}")
    assert list(model.state_dict()) == names
    assert not any("forward" in vars(one) for one in shared_of(model))


def compare_each(rank: int, world: int, folder: str, changes: Sequence[tuple[Callable[[Any], None], bool]]) -> None:
    for change, in_plan in changes:
        compare(rank, world, folder, ["step"], change, in_plan)


@pytest.mark.parametrize("cases", [("accumulated",), *slowly((tuple(CASES),))])
def test_shared_experts_of_deepseek_are_tasks_of_the_plan(
    cluster: Cluster, tmp_path: Path, cases: Sequence[str]
) -> None:
    make("deepseek", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), cases, None, True)


def freeze(model: Any) -> None:
    first, *_ = shared_of(model)
    for parameter in first.parameters():
        parameter.requires_grad_(False)


def train_shared_alone(model: Any) -> None:
    model.requires_grad_(False)
    for shared in shared_of(model):
        shared.requires_grad_(True)


def adapt(model: Any) -> Any:
    target = r".*shared_experts\.(gate|up)_proj"
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, target_modules=target))


def hook(model: Any) -> None:
    for shared in shared_of(model):
        shared.up_proj.register_forward_hook(lambda module, args, output: 3 * output)


def hook_parameters(model: Any) -> None:
    """Gradients of 1/3, computed once and complete."""
    for shared in shared_of(model):
        for parameter in shared.parameters():
            parameter.register_hook(lambda gradient: gradient / 3 + 1)


@pytest.mark.parametrize("cases", [("checkpoints", "evaluation"), *slowly((tuple(CASES),))])
def test_gated_shared_experts_of_qwen_are_tasks_of_the_plan(
    cluster: Cluster, tmp_path: Path, cases: Sequence[str]
) -> None:
    make("qwen2", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), cases, None, True)


def call_experts_first_once_loaded(rank: int, world: int, folder: str) -> None:
    """A model that is loaded with a schedule changes the order of its calls in the first pass."""
    model = load(rank, world, folder, {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}, "fusedmoe-fsmoe")
    for exchange in exchanges_in(model):
        exchange.plans.schedule = replace(exchange.plans.schedule, degrees=(2, 2))  # no measurement
    tokens, values = torch.arange(6)[None] + rank, []
    for wanted in ([], ["forward"] * len(shared_of(model))):
        with tasks_run() as ran, torch.no_grad():
            values.append(model(input_ids=tokens).logits)
        assert ran == wanted
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


def test_loaded_qwen_calls_experts_first_from_the_second_pass(cluster: Cluster, tmp_path: Path) -> None:
    make("qwen2", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, call_experts_first_once_loaded, str(tmp_path))


def test_changed_shared_experts_equal_no_schedule(cluster: Cluster, tmp_path: Path) -> None:
    make("deepseek", "eager", torch.float64).save_pretrained(tmp_path)
    # The block calls modules with hooks, and a shared expert that is the only one trained.
    changes = [(freeze, True), (train_shared_alone, False), (hook, False), (hook_parameters, True), (adapt, True)]
    cluster.run(2, compare_each, str(tmp_path), changes)


@pytest.mark.slow
def test_block_computes_shared_experts_with_tensor_parallelism(cluster: Cluster, tmp_path: Path) -> None:
    make("deepseek", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), ["step"], None, False, 2)
