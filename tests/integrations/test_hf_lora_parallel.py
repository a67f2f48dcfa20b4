"""Adapters of peft over ranks, on attention and experts of an expert-parallel model, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import fusedmoe.hf
from fusedmoe.errors import ConfigError, RankError
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make
from tests.integrations.test_hf_lora import NAMES, never_folded
from tests.integrations.test_hf_parallel import load, loss

TARGETS = {"target_parameters": NAMES, "target_modules": ["q_proj", "v_proj"]}


def add_lora(model: Any, **targets: Any) -> Any:
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **(targets or TARGETS)))
    return fusedmoe.hf.apply(model)


def adapters(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def steps(rank: int, world: int, folder: str, tokens: list[Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return the adapters after two accumulated steps, and the largest difference from one process."""
    model = load(rank, world, folder, {"fsdp_size": world, "ep_size": world // (2 if world > 2 else 1), "tp_size": 1})
    torch.manual_seed(rank)  # adapters differ at first
    model = add_lora(model)
    alone = add_lora(load(rank, world, folder, None).double())
    alone.load_state_dict(adapters(model), strict=False)
    optimizers = [torch.optim.SGD(adapters(each).values(), lr=0.5) for each in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            for half in (slice(0, 4), slice(2, None)):
                if each is model:
                    with never_folded():
                        loss(model(input_ids=tokens[rank][:, half]).logits, tokens[rank][:, half]).backward()
                else:
                    total = sum(loss(alone(input_ids=t[:, half]).logits, t[:, half]) for t in tokens) / world
                    total.backward()
            optimizer.step()
    wanted = adapters(alone)
    worst = max(float((p - wanted[name]).detach().abs().max()) for name, p in adapters(model).items())
    return {name: p.detach().clone() for name, p in adapters(model).items()}, worst


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_adapter_gradients_are_equal_on_all_ranks(cluster: Cluster, tmp_path: Path, world: int) -> None:
    """Adapters that differ between ranks are synchronised and stay bitwise equal; gradients accumulate."""
    make("mixtral", "eager").save_pretrained(tmp_path)
    tokens = [torch.randint(0, VOCABULARY, (1, length)) for length in (6, 11, 7, 9)[:world]]
    results = cluster.run(world, steps, str(tmp_path), tokens)
    assert len(results[0][0]) == 2 * (4 + 2 * 2)
    for found, worst in results:
        assert worst < 2e-5
        assert all(torch.equal(value, results[0][0][name]) for name, value in found.items())


def apply_unshared_adapters(rank: int, world: int, folder: str) -> None:
    model = load(rank, world, folder, {"fsdp_size": world, "ep_size": world, "tp_size": 1})
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        model(input_ids=tokens)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"gradient of .*lora_A.* would differ .* fusedmoe.hf.apply\(model\)"):
            model(input_ids=tokens)
    fusedmoe.hf.apply(model)
    model(input_ids=tokens, labels=tokens).loss.backward()
    # Adapters added after a step.
    model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("late")
    with pytest.raises(ConfigError, match=r"gradient of .*lora_A.late.* would differ .* fusedmoe.hf.apply\(model\)"):
        model(input_ids=tokens)
    fusedmoe.hf.apply(model)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with pytest.raises(ConfigError, match=r"Linear.weight is split over ranks, .* merge it in one process"):
        model.merge_and_unload()
    del model
    # Adapters that peft would add to sharded parameters.
    model = load(rank, world, folder, {"fsdp_size": world, "ep_size": world, "tp_size": 1})
    model = add_lora(model, target_parameters=NAMES)
    with pytest.raises(ConfigError, match="_proj is split over ranks, .* merge it in one process"):
        model.merge_adapter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name or parameter.requires_grad)
    with pytest.raises((ConfigError, RankError), match="_proj is split over ranks, .* freeze the parameter"):
        model(input_ids=tokens)
    del model
    model = load(rank, world, folder, {"fsdp_size": world // 2, "ep_size": world, "tp_size": 2})
    with pytest.raises(ConfigError, match="tp_size=2"):
        add_lora(model, target_modules=["o_proj"])


@pytest.mark.slow
def test_unshared_adapters_raise(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(2, apply_unshared_adapters, str(tmp_path))
