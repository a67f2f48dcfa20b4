"""Metrics of models of transformers, also in the logs of `Trainer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import fusedmoe.hf
from fusedmoe import ConfigError, MoELayer, experts, gates
from fusedmoe.hf.callbacks import RouterMetrics
from tests.integrations.models import CONFIGS, VOCABULARY, make
from tests.marks import slowly

KEYS = {"max_vio", "max_vio_worst", "load_cv", "dead_experts", "diversity", "router_entropy", "balance_loss", "z_loss"}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("experts_of", ["eager", "fusedmoe"])
def test_metrics_equal_router_outputs(family: str, experts_of: str) -> None:
    model = make(family, experts_of).train()
    metrics, seen = RouterMetrics(model), []
    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("router")]
    for router in routers:
        router.register_forward_hook(lambda module, given, found: seen.append(found))
    model.activation_checkpointing_enable()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    again = len(seen) // 2
    assert len(seen) == 2 * len(routers)  # once more in the backward pass
    found = metrics.collect(per_layer=True)
    assert {key.removeprefix("moe/") for key in found if key.count("/") == 1} == KEYS
    vio, entropy = [], []
    for logits, _, number in seen[:again]:
        logits, load = logits.detach().float(), torch.bincount(number.flatten(), minlength=logits.shape[-1]).float()
        vio.append(float(load.max() / load.mean() - 1))
        entropy.append(float(torch.distributions.Categorical(logits=logits).entropy().mean()))
    assert found["moe/max_vio"] == pytest.approx(sum(vio) / again, rel=1e-5)
    assert found["moe/max_vio_worst"] == pytest.approx(max(vio), rel=1e-5)
    assert found["moe/router_entropy"] == pytest.approx(sum(entropy) / again, rel=1e-5)
    metrics.close()
    model(input_ids=tokens)
    assert metrics.collect() == {}


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", *slowly("qwen3", "olmoe", "deepseek")])
@pytest.mark.parametrize(
    "adapted",
    [
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_parameters": ["mlp.experts.down_proj"], "modules_to_save": ["gate", "router"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["experts"]},
    ],
    ids=["experts", "experts_and_routers", "modules_to_save"],
)
def test_lora_preserves_router_metrics(family: str, adapted: dict[str, Any]) -> None:
    """New adapters do not change a model's results."""
    model, tokens, found = make(family, "fusedmoe"), torch.randint(0, VOCABULARY, (2, 9)), []
    for each in (model, lambda: get_peft_model(model, LoraConfig(r=2, **adapted))):
        each = each.train() if each is model else each().train()
        metrics = RouterMetrics(each)
        each(input_ids=tokens)
        found.append(metrics.collect())
        metrics.close()
    assert found[0].keys() == {f"moe/{key}" for key in KEYS}
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_trainer_callback_logs_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (8, 5))]
    given: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "use_cpu": True, "report_to": "none"}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", disable_tqdm=True, **given)
    trainer = Trainer(
        make("mixtral", "fusedmoe"), arguments, train_dataset=rows, callbacks=[fusedmoe.hf.MetricsCallback()]
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for line in logged:
        assert {f"moe/{key}" for key in KEYS} == {key for key in line if key.startswith("moe/")}
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_callback_rejects_dense_model_and_logs_own_layer() -> None:
    callback = fusedmoe.hf.MetricsCallback()
    with pytest.raises(ConfigError, match="Linear has no experts"):
        callback.on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))
    layer = MoELayer(4, gates.TopK(4, 2), experts.FeedForward(3))
    callback.on_train_begin(None, None, None, model=layer)
    layer(torch.randn(3, 4))

    class State:
        log_history: list[dict[str, float]] = [{}]

    logs = {"loss": 1.0}
    callback.on_log(None, State, None, logs=logs)
    assert {"moe/dropped", "moe/aux_loss"} <= State.log_history[0].keys() <= logs.keys()
    callback.on_train_end(None, State, None)
    assert layer.load.counters is None
